"""The device to compute on, its number format, and the memory it has left.

    resolve_device     "auto": a CUDA GPU where torch sees one, else the CPU
    resolve_dtype      "auto": a number format that the device multiplies fast
    cache_directory    the user's folder for compiled kernels
    free_bytes         the memory it has left, before weights are made
    refuse_as          turns "out of memory" into a ValueError
    measure_step       the memory of a GPU before and during one step
    cache_bytes        what a GPU has left for the KV cache
    blocks_beside      how many blocks that is

    a GPU's memory    [ others | weights | one step's tensors | the same for graphs | cache | ]
                      |<--------------------- gpu_memory_utilization -------------------->|

Source: vLLM, which also measures one step of the largest size before it sizes its cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from nanobatch.utils.cache_size import blocks_on_gpu
from nanobatch.utils.memory import free_memory

BFLOAT16_CAPABILITY = (8, 0)  # of a GPU that multiplies it
# in torch's messages
CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory")
# What torch 2.9 has in place of get_capabilities. All CPUs with AMX's tiles multiply bfloat16.
ASKED_ONE_BY_ONE = {
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_bf16": "_is_amx_tile_supported",
}


def resolve_device(name: str) -> torch.device:
    """The torch device that EngineConfig.device names.

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
    """The torch dtype that EngineConfig.dtype names; "auto": what the device multiplies in
    hardware, whatever format a checkpoint is in.

    Raises:
        ValueError: as check_dtype.
    """
    if name != "auto":
        dtype = getattr(torch, name)
        check_dtype(dtype, device)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if capability_of(device) >= BFLOAT16_CAPABILITY else torch.float16
    has_bfloat16 = cpu_has("avx512_bf16") or cpu_has("amx_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for bfloat16 on a GPU that does not multiply it.

    A T4 (7.5) reports bfloat16 support, but torch only emulates it and Triton has none.
    """
    if dtype != torch.bfloat16 or device.type == "cpu":
        return
    capability = capability_of(device)
    if capability < BFLOAT16_CAPABILITY:
        raise ValueError(
            "dtype is 'bfloat16'; it needs a GPU of compute capability >= 8.0, and this one's "
            f"is {capability[0]}.{capability[1]}: use 'float16', 'float32' or 'auto'"
        )


def capability_of(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, (7, 5) for a T4."""
    return torch.cuda.get_device_capability(device)


def cpu_has(feature: str) -> bool:
    """Whether the CPU has a feature, by torch's name for it: a key of ASKED_ONE_BY_ONE."""
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get(feature))
    return getattr(torch.cpu, ASKED_ONE_BY_ONE[feature])()


def cache_directory() -> Path:
    """nanobatch/ in $XDG_CACHE_HOME, if that is an absolute path, or else in ~/.cache; created
    if it is not there.

    Raises:
        OSError: it cannot be created, or this user has no home.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):  # no $HOME, and no entry in the system's list of users
        raise FileNotFoundError("this user has no home directory; set XDG_CACHE_HOME")
    directory = Path(home) / "nanobatch"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None if that is not known."""
    if device.type != "cuda":
        return free_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def refuse_as(message: str) -> Iterator[None]:
    """Raise ValueError(message) if torch or NumPy runs out of memory."""
    try:
        yield
    except MemoryError:
        raise ValueError(message) from None
    except RuntimeError as error:
        # On a GPU the type says so, on a CPU only the text does.
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        if not is_gpu and not any(text in str(error) for text in CPU_OUT_OF_MEMORY):
            raise
        raise ValueError(message) from None


class GpuMemory(NamedTuple):
    """A GPU's memory around one step of the largest size, in bytes.

    total: of the GPU. others: used by other processes and by CUDA itself. before: this
    process's tensors before the step, mostly weights. peak: the maximum during the step.
    """

    total: int
    others: int
    before: int
    peak: int


def measure_step(step: Callable[[], None], device: torch.device) -> GpuMemory:
    """Run step() once on a GPU and measure the memory it takes."""
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
    """Bytes left for the cache; below 0 if not even one step fits.

    Captured graphs keep their own copy of a step's tensors, so these count twice.
    """
    step = memory.peak - memory.before
    taken = memory.others + memory.before + step * (2 if has_graphs else 1)
    return int(memory.total * utilization) - taken


def blocks_beside(
    step: Callable[[], None],
    device: torch.device,
    bytes_per_block: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
    has_graphs: bool,
) -> int:
    """Blocks of KV cache that a GPU has room for beside the weights and one step.

    Args:
        step: runs a step of the largest size, which max_num_seqs and max_num_batched_tokens
            set.

    Raises:
        ValueError: such a step, or a block beside it, does not fit.
    """
    with refuse_as(
        f"max_num_batched_tokens is {max_num_batched_tokens} and max_num_seqs {max_num_seqs}; "
        "a step of that size does not fit into the GPU beside the weights: lower them"
    ):
        memory = measure_step(step, device)
    free = cache_bytes(memory, gpu_memory_utilization, has_graphs)
    num_blocks = blocks_on_gpu(free, bytes_per_block)
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}; the weights and one step "
            "leave no room for a block of the cache: raise it, or lower max_num_batched_tokens "
            f"({max_num_batched_tokens}) or max_num_seqs ({max_num_seqs})"
        )
    return num_blocks
