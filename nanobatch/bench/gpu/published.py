"""Output tokens/s that others have published for one workload, and that workload.

The workload is that of nano-vllm's bench.py: 256 requests at once, prompts and outputs of 100
to 1024 random tokens, Qwen3-0.6B, temperature 0.6. vLLM and a port of nano-vllm to Triton were
measured on it too. (Mini-SGLang shows an H200 in a figure without numbers; vLLM's own dashboard
replays chat logs.) A figure of another card says nothing about this one.

Source: bench.py and README.md in github.com/GeeeekExplorer/nano-vllm.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nanobatch.bench.gpu.engines import device_and_dtype, model_that_fits, wait_for
from nanobatch.llm import LLM
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.request import SamplingParams


class Published(NamedTuple):
    """Output tokens/s that somebody has published for the workload below."""

    engine: str
    card: str
    tokens_per_second: float
    source: str


README = "README.md of github.com/GeeeekExplorer/nano-vllm"
ISSUE = "github.com/cosmoliu2002/nano-vllm-triton/issues/1"
PUBLISHED = (
    Published("nano-vllm", "RTX 4070 Laptop", 1434.13, README),
    Published("vLLM", "RTX 4070 Laptop", 1361.84, README),
    Published("nano-vllm-triton", "A800-SXM4-80GB", 10009.26, ISSUE),
    Published("vLLM 0.10.2", "A800-SXM4-80GB", 8587.95, ISSUE),
)


def nano_vllm_requests(
    num_seqs: int, longest: int, shortest: int = 100
) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths) as nano-vllm's bench.py draws them from seed 0; there 256
    requests of 100 to 1024 tokens each way."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(shortest, longest))]
        for _ in range(num_seqs)
    ]
    return prompts, [rng.randint(shortest, longest) for _ in range(num_seqs)]


def published_workload(
    models: Sequence[str], num_seqs: int, longest: int, shortest: int = 100
) -> Iterator[dict]:
    """Our output tokens/s on nano-vllm's workload, then those that others have published.

    Its settings too: temperature 0.6, a budget of 16,384 tokens, requests of at most 4,096.
    """
    device, dtype = device_and_dtype()
    prompts, output_lens = nano_vllm_requests(num_seqs, longest, shortest)
    model = model_that_fits(models, sum(map(len, prompts)) // 2, device, dtype)
    vocab_size = MODEL_PRESETS[model].vocab_size
    prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    most = min(4096, MODEL_PRESETS[model].max_position_embeddings)
    ours = LLM(
        f"dummy:{model}", max_num_seqs=num_seqs, max_num_batched_tokens=16384,
        max_model_len=most,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in output_lens
    ]
    few = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4)
    ours.generate([prompt[::-1] for prompt in prompts], few, progress=False)  # warm up
    wait_for(device)
    start = time.perf_counter()
    outs = ours.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(out.token_ids) for out in outs)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    yield {
        "engine": "nanobatch", "model": model, "card": card, "requests": len(outs),
        "prompt tokens": sum(map(len, prompts)), "output tokens": num_tokens,
        "seconds": seconds, "output tokens/s": num_tokens / seconds, "source": "this run",
    }  # fmt: skip
    for one in PUBLISHED:
        yield {
            "engine": one.engine, "model": "qwen3-0.6b", "card": one.card,
            "output tokens/s": one.tokens_per_second, "source": one.source,
        }  # fmt: skip
