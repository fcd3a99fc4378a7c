"""What there is to compute on: the device, its number format, the memory it has left.

    resolve_device     "auto" is a CUDA GPU where torch sees one, else the CPU
    resolve_dtype      "auto" is what the device multiplies fast
    cache_directory    where what was built or converted once is kept
    cache_bytes        what a GPU has left for the KV cache once everything else has its share

    a GPU's memory    [ others | weights | one step's tensors | the same for graphs | cache | ]
                      |<--------------------- gpu_memory_utilization -------------------->|

Source: vLLM, which also measures one step of the largest size before it sizes its cache.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

GIB = 2**30


def resolve_device(name: str) -> torch.device:
    """EngineConfig.device as torch knows it.

    Raises:
        ValueError: name is "cuda" and torch sees no such device.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device is {name!r}; torch {torch.__version__} sees no CUDA device: it must be "
            "'cpu' or 'auto'"
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """EngineConfig.dtype as torch knows it; "auto" is what the device multiplies in hardware.

    A GPU is asked for its compute capability: a T4 (7.5) says that it supports bfloat16,
    which it emulates.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bfloat16 else torch.float16
    has_bfloat16 = cpu_has("avx512_bf16") or cpu_has("amx_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def cpu_has(feature: str) -> bool:
    """Whether the CPU has a feature by torch's name for it, "amx_bf16" for one."""
    return bool(getattr(torch.cpu, "get_capabilities", dict)().get(feature))


def cache_directory() -> Path:
    """In the user's: $XDG_CACHE_HOME, else ~/.cache.

    Raises:
        OSError: it cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "nanobatch"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class GpuMemory(NamedTuple):
    """A GPU's memory around one step of the largest size, in bytes.

    total: what the card has. others: other processes' and CUDA's own. before: this
    process's tensors ahead of the step, the weights above all. peak: the most during it.
    """

    total: int
    others: int
    before: int
    peak: int


def measure_step(step, device: torch.device) -> GpuMemory:
    """Run step() once on a GPU and see what memory it takes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, total - free - torch.cuda.memory_reserved(device), before, peak)


def cache_bytes(memory: GpuMemory, utilization: float, has_graphs: bool) -> int:
    """What is left for the cache, in bytes; below 0 if there is not even room for a step.

    Captured graphs keep the tensors of a step for themselves: these count twice then.
    """
    step = memory.peak - memory.before
    taken = memory.others + memory.before + step * (2 if has_graphs else 1)
    return int(memory.total * utilization) - taken
