"""Continuous batching in one file. Read it from top to bottom.

A server continues many texts at once, and they come and go. It works in steps. A request has
tokens (its prompt, then what the model has added) and a count of those already computed, whose
keys and values are in the cache. In every step each request that runs computes

    num_scheduled = min(num_tokens - num_computed, budget left)

more of its tokens. That line is the whole idea. One step with a budget of 8 tokens:

    request   computed    to compute    num_scheduled
    A         #########   .                   1          decodes: its newest token
    B         ####        .....               5          the rest of its prompt
    C                     .......             2          joins: a first chunk of its prompt
    D                     ...                            waits: no budget is left

These 8 tokens go through the model as one batch. A and B then have no token left to compute,
so the model's next token is added to each. Nobody waits for the others to end: when A leaves, D
takes its place.

The cache is cut into blocks. A request takes free blocks for its tokens when it joins, and more
as it grows, so they lie anywhere; its block table lists them in order. A slot is the place of
one token:

    block         0            1            2            3        block_size 4
             [A0 A1 A2 A3][B0 B1 B2 B3][A4 A5 -- --][   free   ]  A.block_table = [0, 2]
    slot      0  1  2  3   4  5  6  7   8  9                      token 5 of A: slot 2 * 4 + 1

When no block is free, the last request that joined is preempted: it gives back its blocks and
waits. Later it computes its tokens again, by the same line, from num_computed = 0.

Always holds: a block is free or in one block table; what a request gets does not depend on the
others, on the budget, or on the number of blocks. `python -m nanobatch.minimal` shows a run.

A tensor's name ends in its axes: T tokens of the step, S requests, H query heads, K key heads,
D numbers of a head, N blocks, P slots of a block, L keys of a request, E hidden, F MLP,
V vocabulary.

Sources: Orca (Yu et al., OSDI 2022) for steps, PagedAttention (Kwon et al., SOSP 2023) for
blocks, Sarathi-Serve (Agrawal et al., OSDI 2024) for prompts in chunks.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

TINY_MODEL = Path(__file__).parent / "tiny_model"
BEGIN, END = 256, 257  # token ids 0 to 255 are the bytes of the text


@dataclass(eq=False)  # two requests may look the same, and are still two
class Request:
    """A prompt to continue until the model says END, by at most max_tokens tokens."""

    name: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.prompt) + len(self.output) - self.num_computed


Plan = list[tuple[Request, int]]  # the requests of a step, and how many tokens each computes


class Engine:
    """Serves requests, which may be added between any two steps."""

    def __init__(self, model: Llama, block_size=16, num_blocks=64, budget=64, max_num_seqs=8):
        assert budget >= max_num_seqs, "in each step each running request computes a token"
        self.model, self.budget, self.max_num_seqs = model, budget, max_num_seqs
        self.waiting: deque[Request] = deque()  # the next to join is first
        self.running: list[Request] = []  # the last that joined is last
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        K, D = model.num_kv_heads, model.head_dim
        shape = (model.num_layers, 2, num_blocks, block_size, K, D)  # 2: keys and values
        self.kv_cache = torch.zeros(shape)
        self.max_len = min(num_blocks * block_size, model.max_len)

    def add(self, request: Request) -> None:
        """Raises ValueError if the prompt is empty or could not run to its end, even alone."""
        if not 0 < len(request.prompt) <= self.max_len - request.max_tokens:
            raise ValueError(f"prompt and max_tokens must fit in {self.max_len}: {request}")
        self.waiting.append(request)

    # ---- The loop: plan, compute, append.

    def step(self) -> Plan:
        """Run one step; return what was computed."""
        plan = self.schedule()
        next_tokens = self.compute(plan) if plan else []
        for (request, num_scheduled), token in zip(plan, next_tokens, strict=True):
            request.num_computed += num_scheduled
            if request.num_left > 0:
                continue  # still inside its prompt: there is no next token yet
            request.output.append(token)
            if token == END or len(request.output) == request.max_tokens:
                self.running.remove(request)
                self.free(request)
        return plan

    # ---- The scheduler: which requests compute how many tokens.

    def schedule(self) -> Plan:
        """Serve the running requests, then let others join while budget and blocks last.

        A prompt that is cut uses up the budget, so nobody joins behind it. So only the last
        that runs has several tokens left; the others need one each, and there is budget for it.
        """
        plan, budget, has_preempted = [], self.budget, False
        for request in self.running.copy():
            num_scheduled = min(request.num_left, budget)
            while request in self.running and not self.allocate(request, num_scheduled):
                self.preempt(self.running.pop())  # the request itself, or one not yet planned
                has_preempted = True
            if request in self.running:
                plan.append((request, num_scheduled))
                budget -= num_scheduled
        while self.waiting and budget > 0 and not has_preempted:
            request = self.waiting[0]
            has_slot = len(self.running) < self.max_num_seqs
            if not has_slot or not self.allocate(request, request.num_left):
                break
            self.running.append(self.waiting.popleft())
            num_scheduled = min(request.num_left, budget)
            plan.append((request, num_scheduled))
            budget -= num_scheduled
        return plan

    def preempt(self, request: Request) -> None:
        """Free its blocks. It will be the next to join, and starts from its first token."""
        self.free(request)
        request.num_computed = 0
        self.waiting.appendleft(request)

    # ---- The memory: a list of free blocks.

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Let its block table hold num_tokens more. False if the free blocks are too few."""
        num_needed = -(-(request.num_computed + num_tokens) // self.block_size)
        num_new = num_needed - len(request.block_table)
        if num_new > len(self.free_blocks):
            return False
        request.block_table += [self.free_blocks.pop() for _ in range(num_new)]
        return True

    def free(self, request: Request) -> None:
        self.free_blocks += request.block_table
        request.block_table = []

    # ---- The batch: the T tokens of all requests side by side, no padding.

    def compute(self, plan: Plan) -> list[int]:
        """The most likely next token of each request; inside a prompt it is discarded."""
        token_ids, positions, slots = [], [], []
        for request, num_scheduled in plan:
            new = range(request.num_computed, request.num_computed + num_scheduled)
            token_ids += (request.prompt + request.output)[new.start : new.stop]
            positions += new
            for block, offset in (divmod(position, self.block_size) for position in new):
                slots.append(request.block_table[block] * self.block_size + offset)
        positions_T, slot_mapping_T = torch.tensor(positions), torch.tensor(slots)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            """Write the new keys and values, then let each request see its own."""
            cache_2NPKD = self.kv_cache[layer]
            cache_2NPKD.flatten(1, 2)[:, slot_mapping_T] = torch.stack([k_TKD, v_TKD])
            outs, start = [], 0
            for request, num_scheduled in plan:
                end, num_keys = start + num_scheduled, request.num_computed + num_scheduled
                k_LKD, v_LKD = cache_2NPKD[:, request.block_table].flatten(1, 2)[:, :num_keys]
                outs.append(attention(q_THD[start:end], k_LKD, v_LKD, positions_T[start:end]))
                start = end
            return torch.cat(outs)

        last_S = torch.tensor([num_scheduled for _, num_scheduled in plan]).cumsum(0) - 1
        logits_SV = self.model.forward(torch.tensor(token_ids), positions_T, last_S, attend)
        return logits_SV.argmax(dim=1).tolist()


def attention(q_THD: Tensor, k_LKD: Tensor, v_LKD: Tensor, positions_T: Tensor) -> Tensor:
    """Attention of one request. Causal: the token at position p sees keys 0 to p."""
    group_size = q_THD.shape[1] // k_LKD.shape[1]  # query heads that share a key head
    k_HLD = k_LKD.repeat_interleave(group_size, dim=1).transpose(0, 1)
    v_HLD = v_LKD.repeat_interleave(group_size, dim=1).transpose(0, 1)
    scores_HTL = q_THD.transpose(0, 1) @ k_HLD.transpose(1, 2) / q_THD.shape[2] ** 0.5
    is_future_TL = torch.arange(len(k_LKD)) > positions_T.unsqueeze(1)
    weights_HTL = scores_HTL.masked_fill(is_future_TL, float("-inf")).softmax(dim=2)
    return (weights_HTL @ v_HLD).transpose(0, 1)


class Llama:
    """The bundled model. It knows no requests: tokens see each other only in attend()."""

    def __init__(self, folder: Path = TINY_MODEL):
        config = json.loads((folder / "config.json").read_text())
        self.num_layers, self.head_dim = config["num_hidden_layers"], config["head_dim"]
        self.num_kv_heads, self.eps = config["num_key_value_heads"], config["rms_norm_eps"]
        self.max_len = config["max_position_embeddings"]
        self.rope_theta = config["rope_parameters"]["rope_theta"]
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, last_S: Tensor, attend
    ) -> Tensor:
        """A score for each token of the vocabulary, after the tokens at last_S: [S, V]."""
        x_TE = self.weights["model.embed_tokens.weight"][token_ids_T]
        for i in range(self.num_layers):
            layer = f"model.layers.{i}"
            y_TE = self.norm(x_TE, f"{layer}.input_layernorm")
            qkv = (self.linear(y_TE, f"{layer}.self_attn.{x}_proj") for x in "qkv")
            q_THD, k_TKD, v_TKD = (x.unflatten(1, (-1, self.head_dim)) for x in qkv)
            q_THD, k_TKD = self.rope(q_THD, positions_T), self.rope(k_TKD, positions_T)
            out_THD = attend(i, q_THD, k_TKD, v_TKD)
            x_TE = x_TE + self.linear(out_THD.flatten(1), f"{layer}.self_attn.o_proj")
            y_TE = self.norm(x_TE, f"{layer}.post_attention_layernorm")
            gate_TF = F.silu(self.linear(y_TE, f"{layer}.mlp.gate_proj"))
            up_TF = self.linear(y_TE, f"{layer}.mlp.up_proj")
            x_TE = x_TE + self.linear(gate_TF * up_TF, f"{layer}.mlp.down_proj")
        return self.linear(self.norm(x_TE[last_S], "model.norm"), "model.embed_tokens")

    def linear(self, x_TE: Tensor, name: str) -> Tensor:
        return x_TE @ self.weights[f"{name}.weight"].T

    def norm(self, x_TE: Tensor, name: str) -> Tensor:
        """RMSNorm: scale each token's vector to a mean square of 1, then by the weights."""
        mean_square_T1 = x_TE.square().mean(dim=1, keepdim=True)
        return x_TE * (mean_square_T1 + self.eps).rsqrt() * self.weights[f"{name}.weight"]

    def rope(self, x_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Rotate pairs of each head's numbers by angles that grow with the position."""
        half = self.head_dim // 2
        inv_freq_R = self.rope_theta ** (-torch.arange(half) / half)
        angles_T1R = (positions_T.unsqueeze(1) * inv_freq_R).unsqueeze(1)
        cos, sin, (a, b) = angles_T1R.cos(), angles_T1R.sin(), x_THD.split(half, dim=2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)


def encode(text: str) -> list[int]:
    return [BEGIN, *text.encode()]


def decode(token_ids: list[int]) -> str:
    return bytes(t for t in token_ids if t < BEGIN).decode(errors="replace")


def demo() -> None:
    """Four requests, one of them late, on a pool that is too small for three."""
    texts = {"A": "Once upon a time", "B": "One day, a little dog", "C": "Long ago", "D": "A"}
    requests = [Request(name, encode(text), max_tokens=16) for name, text in texts.items()]
    arrivals = {1: requests[:3], 8: requests[3:]}
    engine = Engine(Llama(), block_size=4, num_blocks=22, budget=12, max_num_seqs=3)
    print("tokens computed in each step\n\nstep   A   B   C   D   free blocks")
    for step in itertools.count(1):
        new = arrivals.pop(step, [])
        for request in new:
            engine.add(request)
        before = engine.running.copy()
        scheduled = dict(engine.step())
        events = [f"{r.name} arrives" for r in new]
        events += [f"{r.name} joins" for r in scheduled if r not in before]
        events += [f"{r.name} is preempted" for r in before if r in engine.waiting]
        events += [f"{r.name} leaves" for r in scheduled if r not in engine.running]
        columns = "".join(f"{scheduled.get(r, '.'):>4}" for r in requests)
        print(f"{step:4}{columns}{len(engine.free_blocks):8}      {', '.join(events)}")
        if not (arrivals or engine.waiting or engine.running):
            break
    print()
    for request in requests:
        print(f"{request.name}: {decode(request.prompt)}|{decode(request.output)}")


if __name__ == "__main__":
    demo()
