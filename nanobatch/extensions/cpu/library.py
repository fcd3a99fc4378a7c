"""C for the CPU: a compiled file's functions, called with tensors.

    extensions/cpu/kernels.py  --CpuKernels(dtype)-->  compiler.load("kernels.c", ...)
                               --_call(name, ...)--->  checked pointers and numbers

Always holds: C checks neither types nor bounds, so arguments are checked here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from nanobatch.extensions.cpu import compiler

HERE = Path(__file__).parent
ELEMENTS = {torch.bfloat16: {"ELEM_BF16": 1}, torch.float32: {}}
CACHES = {torch.int8: "CACHE_INT8", torch.float8_e4m3fn: "CACHE_FP8"}  # in 8 bits

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
    strides are checked.

    Args:
        dtype, cache_dtype: of elements, and of the cache where that is another.
        sizes: macros of the C file, for example GROUP=3.

    Raises:
        compiler.NoLibrary: it cannot be built here.
    """

    source: str  # the C file, and those of its functions that a subclass calls
    functions: tuple[str, ...]

    def __init__(
        self, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, **sizes: int
    ):
        cache = {CACHES[cache_dtype]: 1} if cache_dtype in CACHES else {}
        macros = ELEMENTS[dtype] | cache | sizes
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        self.library = compiler.load(HERE / self.source, defines, self.functions)
        formats = FORMATS | {"E": dtype, "S": dtype, "C": cache_dtype or dtype}
        self._functions = {}
        for name in self.functions:
            function = getattr(self.library, name)
            arguments = [text.split(":") for text in SIGNATURES[name].split()]
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
