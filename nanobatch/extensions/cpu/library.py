"""C for the CPU: compiled at first use, kept, and called with tensors.

    extensions/cpu/kernels.py  --build("kernels.c")-->  cc  -->  ~/.cache/nanobatch/HASH.so
                    --Library(file)._call-->     checked pointers and numbers

A library is kept in the user's cache directory under a hash of source, compiler, flags and CPU.

Always holds: C checks neither types nor bounds, so arguments are checked here. What cannot be
built is None.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from nanobatch.utils.device import cache_directory

HERE = Path(__file__).parent
ELEMENTS = {torch.bfloat16: {"ELEM_BF16": 1}, torch.float32: {}}
CACHES = {torch.int8: "CACHE_INT8", torch.float8_e4m3fn: "CACHE_FP8"}  # in 8 bits
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
# Sums in any order, as vectors need it. Not -ffast-math: NaN must stay NaN (invariant 15).
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
if platform.machine() == "x86_64":
    FLAGS += ["-mprefer-vector-width=512"]
HEADERS = ("elem.h", "cache.h", "tiles.h")


@functools.cache
def compiler() -> str | None:
    """The C compiler that would be used: $CC (or cc), else gcc."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))), None)


# The arguments of each function, but for the number of threads, which comes last.
#     pointers to dense numbers: E of the library's format, C of its cache's, B bfloat16,
#     F float32, I int32, L int64
#     S as E, but with strides;  V of a format that another argument tells
#     numbers: i int, l int64, f float
SIGNATURES = {
    "rms_norm": "x:E residual:F weight:E eps:f T:i E:i sum:F out:E",
    "silu_mul": "gate_up:E T:i F:i out:E",
    "rope_and_write": "q:S k:S v:S q_stride:l k_stride:l v_stride:l cos:F sin:F slot_mapping:L "
    "T:i H:i K:i P:i D:i k_cache:C v_cache:C k_scale:B v_scale:B out:E",
    "top_ids": "x:E S:i V:i k:i ids:L",
    "paged_decode": "q:E k_cache:C v_cache:C k_scale:B v_scale:B block_tables:I B:i token:L "
    "start:I end:I S:i K:i scale:f out:E",
    "paged_prefill": "q:E k_cache:C v_cache:C k_scale:B v_scale:B block_tables:I B:i pieces:I "
    "I:i K:i window:i scale:f out:E",
    "matmul": "x:E packed:E bias:E M:i N:i K:i form:i out:V",
}
NUMBERS = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
FORMATS = {"B": torch.bfloat16, "F": torch.float32, "I": torch.int32, "L": torch.int64}


class Library:
    """A compiled file's functions, called with tensors in place of pointers; number formats and
    strides are checked."""

    def __init__(self, file: Path, dtype: torch.dtype, cache_dtype: torch.dtype | None = None):
        self.library = ctypes.CDLL(str(file))
        formats = FORMATS | {"E": dtype, "S": dtype, "C": cache_dtype or dtype}
        self._functions = {}
        for name, signature in SIGNATURES.items():
            if hasattr(self.library, name):
                function = getattr(self.library, name)
                arguments = [text.split(":") for text in signature.split()]
                types = [NUMBERS.get(kind, ctypes.c_void_p) for _, kind in arguments]
                function.argtypes, function.restype = [*types, ctypes.c_int], None
                wanted = [(a, formats.get(kind), kind == "S") for a, kind in arguments]
                self._functions[name] = function, wanted

    def _call(self, name: str, *values: Tensor | float | None) -> None:
        function, wanted = self._functions[name]
        given = []
        for (argument, dtype, may_stride), value in zip(wanted, values, strict=True):
            if not isinstance(value, Tensor):
                given.append(value)
                continue
            is_right = dtype is None or value.dtype is dtype
            if not is_right or not (may_stride or value.is_contiguous()):
                must_be = f"{dtype or value.dtype}" + ("" if may_stride else ", dense")
                raise ValueError(
                    f"{name}: {argument} is {value.dtype} with strides {value.stride()}; "
                    f"it must be {must_be}"
                )
            given.append(value.data_ptr())
        function(*given, torch.get_num_threads())


def constants_of(dtype: torch.dtype, cache_dtype: torch.dtype | None) -> dict[str, float]:
    """The macros that tell C the number formats of elements and cache."""
    if cache_dtype not in CACHES:
        return ELEMENTS[dtype]
    return ELEMENTS[dtype] | {CACHES[cache_dtype]: 1}


def build(source: str, constants: dict[str, float]) -> Path | None:
    """Compile a file, or take the library compiled earlier; None if it cannot be built."""
    cc = compiler()
    if cc is None:
        return None
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    try:
        file = cache_directory() / f"{_key(cc, source, defines)}.so"
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                built = Path(folder) / file.name
                command = [cc, *FLAGS, *defines, str(HERE / source), "-o", str(built), "-lm"]
                subprocess.run(command, check=True, capture_output=True)
                built.replace(file)  # atomic: another process may build it too
        return file
    except (OSError, subprocess.CalledProcessError):
        return None


def _key(cc: str, source: str, defines: list[str]) -> str:
    """A hash of everything that the library depends on."""
    texts = [(HERE / name).read_bytes() for name in (source, *HEADERS)]
    text = repr((texts, FLAGS, defines, _machine(cc)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.cache
def _machine(cc: str) -> tuple[bytes, list[str]]:
    """The compiler's version, and the CPU that -march=native means."""
    version = subprocess.run([cc, "--version"], check=True, capture_output=True).stdout
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return version, cpu[:2]
