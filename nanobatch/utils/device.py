"""The device to compute on, its number format, and the memory it has left.

    resolve_device     "auto": a CUDA GPU where torch sees one, else the CPU
    resolve_dtype      "auto": a number format that the device multiplies fast
    check_dtype        refuses one that a GPU does not multiply
    cache_directory    the user's folder for compiled kernels
    free_bytes         the memory it has left, before weights are made
    refuse_as          turns "out of memory" into a ValueError
    measure_step       the memory of a GPU before and during a step
    cache_bytes        what a GPU has left for the KV cache

    a GPU's memory    [ others | weights | the largest step's tensors | graphs | cache |      ]
                      |<--------------------- gpu_memory_utilization ----------------->|

Source: vLLM, which also measures one step of the largest size before it sizes its cache.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

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
    """A GPU's memory around some steps, in bytes.

    total: of the GPU. others: used by other processes and by CUDA itself. before: this
    process's tensors before the steps, mostly weights. peak: the maximum during them.
    """

    total: int
    others: int
    before: int
    peak: int

    @property
    def taken(self) -> int:
        """By the steps' own tensors."""
        return self.peak - self.before


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


def cache_bytes(memory: GpuMemory, utilization: float, reserved: int) -> int:
    """Bytes left for the cache; below 0 if not even the steps fit.

    Args:
        memory: around the largest steps.
        reserved: what else will be there beside the cache, in bytes.
    """
    taken = memory.others + memory.before + memory.taken + reserved
    return int(memory.total * utilization) - taken
