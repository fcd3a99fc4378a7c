"""Train the bundled model from scratch: a byte-level Llama with a million parameters.

    python -m nanobatch.tiny_model.train --out some/directory

A token is a byte: ids 0 to 255 are the bytes, 256 begins a story and 257 ends it. A row of
training data is whole stories, one after the other, cut at the length of the row:

    256 O n c e ... 257 256 L o n g   a g o ... 257 256 O n e

so the model learns where a story ends, and that another one may follow. Stories are drawn
during training; no two steps see the same ones.

A story must refer back to its own cast. These words are rare, and the hardest for a small
model, so the loss counts the first byte of each REFERENCE_WEIGHT times. (Without that, names
are learned late and things not at all.)

Always holds: the number of steps is fixed, so one seed gives one model on one kind of
processor. (Another sums in another order and gives a different, equally good model.)
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from nanobatch.tiny_model.grammar import COLORS, KINDS, NAMES, PLACES, THINGS, TRAITS, story

BOS, EOS = 256, 257
CONTEXT = 1024

PEAK_LR = 3e-3
WARMUP_STEPS = 100
# Attention over short rows is cheaper, so most steps use rows that just hold a whole story.
# Every eighth step fills the context: there the model learns to ignore older stories.
SHORT_ROWS = (8, 384)
LONG_ROWS = (3, CONTEXT)
REFERENCE_WEIGHT = 8.0
CAST = {
    word.lower()
    for table in (*NAMES.values(), *KINDS.values(), PLACES.values(), THINGS, TRAITS, COLORS)
    for word in table
}


def new_model() -> LlamaForCausalLM:
    """The untrained model: tied embeddings, 6 query heads that share 2 key-value heads."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.04,  # twice the usual: attention that starts sharp learns sooner
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def weights_of(text: str) -> list[float]:
    """The weight of each byte of a story: more where it refers back to its cast."""
    weights, seen = [1.0] * len(text), set()
    for match in re.finditer("[A-Za-z]+", text):
        word = match[0].lower()
        if word in CAST and word in seen:
            weights[match.start()] = REFERENCE_WEIGHT
        seen.add(word)
    return weights


def token_stream(rng: random.Random) -> Iterator[tuple[int, float]]:
    """Stories without end, each as BOS, its bytes, EOS; tokens with their weights."""
    while True:
        text = story(rng)
        yield BOS, 1.0
        yield from zip(text.encode(), weights_of(text), strict=True)
        yield EOS, 1.0


def next_batch(rng: random.Random, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and weights, [rows, length] each; each row starts with a new story."""
    streams = [token_stream(rng) for _ in range(rows)]
    pairs = [[next(stream) for _ in range(length)] for stream in streams]
    ids = torch.tensor([[token for token, _ in row] for row in pairs])
    return ids, torch.tensor([[weight for _, weight in row] for row in pairs])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over WARMUP_STEPS, then a cosine decay to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


def train(seed: int, steps: int) -> LlamaForCausalLM:
    """Train a new model for this many steps; print the loss every 100."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = new_model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps")
    # Weight decay for matrices only, not for the gains of norms.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    started, total = time.perf_counter(), 0.0
    for step in range(steps):
        ids, weights = next_batch(rng, *(LONG_ROWS if step % 8 == 7 else SHORT_ROWS))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        # The weights stay float32; only the matrix products run in bfloat16, for speed.
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        losses = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        weights = weights[:, 1:].flatten()
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += losses.mean().item()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step + 1:5}  loss {total / 100:.4f}  {seconds:6.1f} s", flush=True)
            total = 0.0
    return model


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write to out: config.json, generation_config.json, the weights in bfloat16, and an
    empty file that tells nanobatch that the tokens are bytes."""
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "byte_tokenizer").touch()


def main() -> None:
    """Read the command line, train, save."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--out", type=Path, required=True, help="directory for the model")
    args = parser.parse_args()
    torch.set_num_threads(2)
    save(train(args.seed, args.steps), args.out)


if __name__ == "__main__":
    main()
