"""The CPU's kernels, in C: built when first needed, called by address.

    fused_kernels.py  --elementwise(x)-->         CpuKernels  --ctypes-->  cpu_kernels.c
    attention.py      --paged_attention(q, k)-->  CpuKernels
    model.py          --products(weight)-->       CpuMatmul   --ctypes-->  cpu_matmul.c

torch's operations each read and write all of their numbers and share them between the cores
anew, and a decoding step has some thirty of them in each layer. SmolLM2-135M in bfloat16, two
cores of a Xeon with AMX (2026-11-30, ms):

                                                         torch      here
    attention of a layer, 64 sequences of 250 tokens     3.6        0.75    no gathered copy
    the layers' products, 1 to 16 rows                   21 - 25    12      weights laid out
                          64 rows                        39         24      once, read in order
    the 32 best of 49,152 logits, 64 rows                4.1        2.2
    RMSNorm with residual, 64 rows                       0.05       0.02

Nothing needs them: without a C compiler, in other number formats, and where gradients are
wanted, there is None, and the callers' torch twins run. A library is kept in the user's cache
directory under a hash of source, compiler, flags and CPU.

Always holds: they say what their twins say, to the rounding of the number format; a token of
slot -1 is written nowhere, and nothing past a sequence's end is read (invariant 14).

Sources: flash decoding (Dao et al., 2023); vLLM's CPU backend, compiled for its machine too.
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

from nanobatch.device import cpu_has

HERE = Path(__file__).parent
ELEMENTS = {torch.bfloat16: {"ELEM_BF16": 1}, torch.float32: {}}
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
# Sums in any order, as vectors need it. Not -ffast-math: NaN must stay NaN (invariant 15).
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
if platform.machine() == "x86_64":
    FLAGS += ["-mprefer-vector-width=512"]
MAX_NUMBERS = 2**14  # that attention keeps on the stack, G * (2 D + P)


@functools.cache
def compiler() -> str | None:
    """The C compiler that would be used: $CC (or cc), else gcc."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))), None)


# The arguments of each function, but for the number of threads, which comes last.
#     pointers to dense numbers: E of the library's format, F float32, I int32, L int64
#     S as E, but with strides;  V of a format that another argument tells
#     numbers: i int, l int64, f float
SIGNATURES = {
    "rms_norm": "x:E residual:F weight:E eps:f T:i E:i sum:F out:E",
    "silu_mul": "gate_up:E T:i F:i out:E",
    "rope_and_write": "q:S k:S v:S q_stride:l k_stride:l v_stride:l cos:F sin:F slot_mapping:L "
    "T:i H:i K:i P:i D:i k_cache:E v_cache:E out:E",
    "top_ids": "x:E S:i V:i k:i ids:L",
    "paged_decode": "q:E k_cache:E v_cache:E block_tables:I B:i token:L start:I end:I "
    "S:i K:i scale:f out:E",
    "matmul": "x:E packed:E bias:E M:i N:i K:i is_float:i out:V",
}
NUMBERS = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float}
FORMATS = {"F": torch.float32, "I": torch.int32, "L": torch.int64}


class Library:
    """A compiled file's functions, called with tensors for pointers. C looks at no type and no
    bound, so what it is given is checked here."""

    def __init__(self, file: Path, dtype: torch.dtype):
        self.library = ctypes.CDLL(str(file))
        formats = FORMATS | {"E": dtype, "S": dtype}
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


class CpuKernels(Library):
    """cpu_kernels.c for one number format. What it is given is on the CPU and of that format;
    q, k and v may be slices of wider tokens."""

    def rms_norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See fused_kernels.rms_norm."""
        x_TE, E = x_TE.contiguous(), x_TE.shape[-1]
        sum_TE, out_TE = torch.empty_like(x_TE, dtype=torch.float32), torch.empty_like(x_TE)
        T = x_TE.numel() // E
        self._call("rms_norm", x_TE, residual_TE, weight_E, eps, T, E, sum_TE, out_TE)
        return out_TE, sum_TE

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See fused_kernels.silu_mul."""
        *rows, both = gate_up_TF.shape
        out_TF = gate_up_TF.new_empty(*rows, both // 2)
        T = gate_up_TF.numel() // both
        self._call("silu_mul", gate_up_TF.contiguous(), T, both // 2, out_TF)
        return out_TF

    def rope_and_write(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        k_cache_NKPD: Tensor,
        v_cache_NKPD: Tensor,
        slot_mapping_T: Tensor,
    ) -> Tensor:
        """See fused_kernels.rope_and_write."""
        (T, H, D), (_, K, P, _) = q_THD.shape, k_cache_NKPD.shape
        q_THD, k_TKD, v_TKD = map(_dense_heads, (q_THD, k_TKD, v_TKD))
        strides = [x.stride(0) for x in (q_THD, k_TKD, v_TKD)]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        self._call(
            "rope_and_write", q_THD, k_TKD, v_TKD, *strides, cos_TR, sin_TR, slot_mapping_T,
            T, H, K, P, D, k_cache_NKPD, v_cache_NKPD, out_THD,
        )  # fmt: skip
        return out_THD

    def top_ids(self, x_SV: Tensor, k: int) -> Tensor:
        """See fused_kernels.top_ids."""
        S, V = x_SV.shape
        ids_SX = torch.empty(S, k, dtype=torch.int64)
        self._call("top_ids", x_SV.contiguous(), S, V, k, ids_SX)
        return ids_SX

    def paged_decode(
        self,
        q_THD: Tensor,
        k_cache_NKPD: Tensor,
        v_cache_NKPD: Tensor,
        block_tables_SB: Tensor,
        token_S: Tensor,
        start_S: Tensor,
        end_S: Tensor,
        scale: float,
        out_THD: Tensor,
    ) -> None:
        """Attention of one query token for each of S sequences, into its row of out_THD.

        Args:
            token_S: int64, which of the T tokens it is. start_S, end_S: int32, the positions
                that it sees. Others: as in attention.paged_attention; q and out contiguous.
        """
        (S, B), K = block_tables_SB.shape, k_cache_NKPD.shape[1]
        self._call(
            "paged_decode", q_THD, k_cache_NKPD, v_cache_NKPD, block_tables_SB, B,
            token_S, start_S, end_S, S, K, scale, out_THD,
        )  # fmt: skip


class CpuMatmul(Library):
    """cpu_matmul.c: products with weights that were laid out for it."""

    def pack(self, weight_NK: Tensor) -> Tensor:
        """Panels of 32 columns; in each, for 32 k, two tiles: 16 pairs of k, 16 columns."""
        N, K = weight_NK.shape
        tiles = weight_NK.view(N // 32, 2, 16, K // 32, 16, 2)
        return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()

    def product(
        self, x_TE: Tensor, packed: Tensor, bias_F: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[T, F] in bfloat16 or float32: x times a weight [F, E] as pack() laid it out."""
        x_TE = x_TE.contiguous()
        (T, E), F = x_TE.shape, packed.shape[0] * 32
        out_TF = torch.empty(T, F, dtype=dtype)
        is_float = dtype == torch.float32
        self._call("matmul", x_TE, packed, bias_F, T, F, E, is_float, out_TF)
        return out_TF


def _dense_heads(x_TXD: Tensor) -> Tensor:
    """Heads that follow one another; tokens may be any distance apart."""
    return x_TXD if x_TXD.stride()[1:] == (x_TXD.shape[2], 1) else x_TXD.contiguous()


# -------------------------------------------------------------------------- which, and whether


def elementwise(*tensors: Tensor) -> CpuKernels | None:
    """All but paged_decode, for tensors of one number format; None: use the twins."""
    dtype = tensors[0].dtype
    if dtype not in ELEMENTS:
        return None
    for x in tensors:
        if x.dtype is not dtype or not x.is_cpu or x.requires_grad:
            return None
    return _kernels(dtype)


def paged_attention(
    q_THD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor
) -> CpuKernels | None:
    """paged_decode for these; None: use its twin."""
    (_, H, D), (_, K, P, _) = q_THD.shape, k_cache_NKPD.shape
    G = H // K
    is_ours = elementwise(q_THD, k_cache_NKPD, v_cache_NKPD) is not None
    if not is_ours or G * (2 * D + P) > MAX_NUMBERS:
        return None
    return _kernels(q_THD.dtype, HEAD_DIM=D, GROUP=G, BLOCK=P)


def products(weight_NK: Tensor) -> CpuMatmul | None:
    """For a product with this weight; None: use torch's."""
    is_ours = weight_NK.dtype == torch.bfloat16 and elementwise(weight_NK) is not None
    is_whole = all(size % 32 == 0 for size in weight_NK.shape)
    return _products() if is_ours and is_whole and has_amx() else None


def has_amx() -> bool:
    """Whether this CPU has tiles that multiply bfloat16."""
    return cpu_has("amx_bf16")


@functools.cache
def _kernels(dtype: torch.dtype, **sizes: int) -> CpuKernels | None:
    file = _build("cpu_kernels.c", ELEMENTS[dtype] | sizes)
    return None if file is None else CpuKernels(file, dtype)


@functools.cache
def _products() -> CpuMatmul | None:
    file = _build("cpu_matmul.c", ELEMENTS[torch.bfloat16])
    kernels = None if file is None else CpuMatmul(file, torch.bfloat16)
    return kernels if kernels is not None and kernels.library.matmul_init() == 0 else None


def _build(source: str, constants: dict[str, int]) -> Path | None:
    """Compile, or take what was compiled before; None where that cannot be done."""
    cc = compiler()
    if cc is None:
        return None
    defines = [f"-D{name}={value}" for name, value in constants.items()]
    try:
        file = _cache_directory() / f"{_key(cc, source, defines)}.so"
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                built = Path(folder) / file.name
                command = [cc, *FLAGS, *defines, str(HERE / source), "-o", str(built), "-lm"]
                subprocess.run(command, check=True, capture_output=True)
                built.replace(file)  # whole or not at all, whoever else builds it
        return file
    except (OSError, subprocess.CalledProcessError):
        return None


def _key(cc: str, source: str, defines: list[str]) -> str:
    """A hash of all that the library depends on."""
    texts = [(HERE / name).read_bytes() for name in (source, "cpu_elem.h")]
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


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "nanobatch"
    directory.mkdir(parents=True, exist_ok=True)
    return directory
