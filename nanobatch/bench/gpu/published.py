"""Output tokens/s that others have published for one workload, and that workload.

The workload is that of nano-vllm's bench.py: 256 requests at once, prompts and outputs of 100
to 1024 random tokens, Qwen3-0.6B, temperature 0.6. vLLM and a port of nano-vllm to Triton were
measured on it too. (Mini-SGLang shows an H200 in a figure without numbers; vLLM's own dashboard
replays chat logs.) A figure of another card says nothing about this one.

Source: bench.py and README.md in github.com/GeeeekExplorer/nano-vllm.
"""

from __future__ import annotations

import random
from typing import NamedTuple


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
