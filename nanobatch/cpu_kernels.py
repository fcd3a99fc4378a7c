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

HERE = Path(__file__).parent
ELEMENTS = {torch.bfloat16: {"ELEM_BF16": 1}, torch.float32: {}}
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-Wall",
    "-Wextra",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
]
# Sums in any order, as vectors need it. Not -ffast-math: NaN must stay NaN (invariant 15).
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
if platform.machine() == "x86_64":
    FLAGS += ["-mprefer-vector-width=512"]
MAX_NUMBERS = 2**14  # that attention keeps on the stack, G * (2 D + P)


@functools.cache
def compiler() -> str | None:
    """The C compiler that would be used: $CC, cc, gcc or clang."""
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))), None)


# Of each function: P pointer, i int, l int64, f float.
SIGNATURES = {
    "rms_norm": "PPPfiiPPi",
    "silu_mul": "PiiPi",
    "rope_and_write": "PPPlllPPPiiiiiPPPi",
    "top_ids": "PiiiPi",
    "paged_decode": "PPPPiPPPiifPi",
    "matmul": "PPPiiiiPi",
}
C_TYPES = {
    "P": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float,
}  # fmt: skip


class Library:
    """A compiled file's functions, called with tensors for pointers."""

    def __init__(self, file: Path):
        self.library = ctypes.CDLL(str(file))
        self._functions = {}
        for name, types in SIGNATURES.items():
            if hasattr(self.library, name):
                self._functions[name] = function = getattr(self.library, name)
                function.argtypes, function.restype = [C_TYPES[c] for c in types], None

    def _call(self, name: str, *args: Tensor | float | None) -> None:
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        self._functions[name](*values, torch.get_num_threads())


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


def elementwise(x: Tensor) -> CpuKernels | None:
    """All but paged_decode, for tensors like x; None: use the twins."""
    is_ours = x.device.type == "cpu" and x.dtype in ELEMENTS and not x.requires_grad
    return _kernels(x.dtype) if is_ours else None


def paged_attention(q_THD: Tensor, k_cache_NKPD: Tensor) -> CpuKernels | None:
    """paged_decode for these; None: use its twin."""
    (_, H, D), (_, K, P, _) = q_THD.shape, k_cache_NKPD.shape
    G = H // K
    if elementwise(q_THD) is None or G * (2 * D + P) > MAX_NUMBERS:
        return None
    return _kernels(q_THD.dtype, HEAD_DIM=D, GROUP=G, BLOCK=P)


@functools.cache
def _kernels(dtype: torch.dtype, **sizes: int) -> CpuKernels | None:
    file = _build("cpu_kernels.c", ELEMENTS[dtype] | sizes)
    return None if file is None else CpuKernels(file)


def products(weight_NK: Tensor) -> CpuMatmul | None:
    """For a product with this weight; None: use torch's."""
    is_whole = all(size % 32 == 0 for size in weight_NK.shape)
    return _products() if is_whole and _is_for_tiles(weight_NK) else None


def has_amx() -> bool:
    """Whether this CPU has tiles that multiply bfloat16."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def _is_for_tiles(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and elementwise(x) is not None and has_amx()


@functools.cache
def _products() -> CpuMatmul | None:
    file = _build("cpu_matmul.c", ELEMENTS[torch.bfloat16])
    kernels = None if file is None else CpuMatmul(file)
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
    """A hash of all that the library depends on; -march=native means this CPU."""
    version = subprocess.run([cc, "--version"], check=True, capture_output=True).stdout
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = [line for line in lines if line.startswith(("model name", "flags", "Features"))][:2]
    text = repr([(HERE / name).read_bytes() for name in (source, "cpu_elem.h")])
    text += repr((version, FLAGS, defines, cpu))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home) / "nanobatch"
    directory.mkdir(parents=True, exist_ok=True)
    return directory
