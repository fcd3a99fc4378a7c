"""The CPU's kernels, in C (extensions/cpu/library.py calls them, compiler.py compiles them).

    backend.py    --elementwise(x)-->         CpuKernels  --ctypes-->  kernels.c
                  --rope_and_write(k, q)-->   CpuKernels
                  --paged_attention(q, k)-->  CpuDecode
                  --paged_prefill(q, k)-->    CpuPrefill  --ctypes-->  prefill.c
    products.py   --products(weight)-->       CpuMatmul   --ctypes-->  matmul.c

torch's operations each read and write all of their numbers, and each wakes all cores; a decode
step has some thirty of them in each layer. SmolLM2-135M in bfloat16, two cores of a Xeon with
AMX (2026-11-30, ms):

                                                         torch      here
    decode: a layer's attention, 64 sequences of 250     3.6        0.75    no gathered copy
            the layers' products, 1 to 16 rows           12 - 13    5 - 6   weights laid out
                                  64 rows                19         11      once, read in order
            the 32 best of 49,152 logits, 64 rows        4.1        2.2
            RMSNorm with residual, 64 rows               0.05       0.02
    prefill: a layer's attention, 768 tokens             1.8        0.9     keys packed once
             the last 512 of them, as a chunk            1.9        0.8     and no mask
             gate, up and SiLU, 1024 tokens              2.0        1.5     in one

In other number formats, where gradients are wanted, and where a file cannot be compiled (with
one warning, which says why), there is no kernel: these functions return None, and the caller
uses torch. A cache in 8 bits (cache.h) has its own kernels, compiled from the same source.

Always holds: the results are those of torch, to the rounding of the number format; a token with
slot -1 is written nowhere, and nothing past a sequence's end is read (invariant 14).

Sources: flash decoding (Dao et al., 2023); vLLM's CPU backend, compiled for its machine too.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from nanobatch.extensions.cpu.compiler import NoLibrary
from nanobatch.extensions.cpu.library import CACHES, ELEMENTS, Library
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.utils.device import cpu_has

MAX_PREFILL_ROWS = 256  # queries times heads of a piece
MAX_NUMBERS = 2**14  # that attention keeps on the stack, G * (2 D + P)


class CpuKernels(Library):
    """kernels.c for one number format, and one of the cache. Arguments are on the CPU and of
    that format; q, k and v may be slices of wider tokens."""

    source = "kernels.c"
    functions = ("rms_norm", "silu_mul", "rope_and_write", "top_ids")

    def rms_norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See Ops.rms_norm."""
        x_TE, E = x_TE.contiguous(), x_TE.shape[-1]
        sum_TE, out_TE = torch.empty_like(x_TE, dtype=torch.float32), torch.empty_like(x_TE)
        T = x_TE.numel() // E
        self._call("rms_norm", x_TE, residual_TE, weight_E, eps, T, E, sum_TE, out_TE)
        return out_TE, sum_TE

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Ops.silu_mul."""
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
        cache: KVCache,
        slot_mapping_T: Tensor,
    ) -> Tensor:
        """See Ops.rope_and_write."""
        (T, H, D), (_, K, P, _) = q_THD.shape, cache.keys.shape
        q_THD, k_TKD, v_TKD = map(_dense_heads, (q_THD, k_TKD, v_TKD))
        strides = [x.stride(0) for x in (q_THD, k_TKD, v_TKD)]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        self._call(
            "rope_and_write", q_THD, k_TKD, v_TKD, *strides, cos_TR, sin_TR, slot_mapping_T,
            T, H, K, P, D, *_pointers(cache), out_THD,
        )  # fmt: skip
        return out_THD

    def top_ids(self, x_SV: Tensor, k: int) -> Tensor:
        """See Ops.top_ids."""
        S, V = x_SV.shape
        ids_SX = torch.empty(S, k, dtype=torch.int64)
        self._call("top_ids", x_SV.contiguous(), S, V, k, ids_SX)
        return ids_SX


class CpuDecode(Library):
    """kernels.c for one shape of cache."""

    source, functions = "kernels.c", ("paged_decode",)

    def paged_decode(
        self,
        q_THD: Tensor,
        cache: KVCache,
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
        (S, B), K = block_tables_SB.shape, cache.keys.shape[1]
        self._call(
            "paged_decode", q_THD, *_pointers(cache), block_tables_SB, B, token_S, start_S,
            end_S, S, K, scale, out_THD,
        )  # fmt: skip


class Tiled(Library):
    """A file that computes on tiles (AMX), in bfloat16.

    Raises:
        NoLibrary: as Library, or the system gives this process no tiles.
    """

    def __init__(self, *formats: torch.dtype | None, **sizes: int):
        super().__init__(*formats, **sizes)
        if self.library.tiles_init() != 0:
            raise NoLibrary("the system gives this process no tile registers (AMX)")


class CpuPrefill(Tiled):
    """prefill.c for one shape of cache."""

    source, functions = "prefill.c", ("paged_prefill",)

    def paged_prefill(
        self,
        q_THD: Tensor,
        cache: KVCache,
        block_tables_SB: Tensor,
        pieces_I4: Tensor,
        window: int | None,
        scale: float,
        out_THD: Tensor,
    ) -> None:
        """Attention of pieces of sequences, into their rows of out_THD.

        Args:
            pieces_I4: int32: sequence, first token of T, how many (at most
                MAX_PREFILL_ROWS / G), position of the first. Others: as in paged_decode.
        """
        B, num_pieces, K = block_tables_SB.shape[1], len(pieces_I4), cache.keys.shape[1]
        self._call(
            "paged_prefill", q_THD, *_pointers(cache), block_tables_SB, B, pieces_I4,
            num_pieces, K, window or 0, scale, out_THD,
        )  # fmt: skip


class CpuMatmul(Tiled):
    """matmul.c: products with weights that were laid out for it."""

    source, functions = "matmul.c", ("matmul",)
    FORMS = ("bfloat16", "float", "gated")

    def pack(self, weight_NK: Tensor) -> Tensor:
        """Panels of 32 columns; in each, for 32 k, two tiles: 16 pairs of k, 16 columns."""
        N, K = weight_NK.shape
        tiles = weight_NK.view(N // 32, 2, 16, K // 32, 16, 2)
        return tiles.permute(0, 3, 1, 4, 2, 5).contiguous()

    def product(
        self,
        x_TE: Tensor,
        packed: Tensor,
        bias_F: Tensor | None,
        dtype: torch.dtype,
        is_gated: bool = False,
    ) -> Tensor:
        """[T, F] in bfloat16 or float32: x times a weight [F, E] as pack() laid it out.

        Args:
            is_gated: [T, F / 2] in bfloat16 instead: of each 32 columns the SiLU of the first
                16 times the others. Memory never sees the product.
        """
        x_TE = x_TE.contiguous()
        (T, E), F = x_TE.shape, packed.shape[0] * 32
        form = "gated" if is_gated else "float" if dtype == torch.float32 else "bfloat16"
        out = torch.empty(T, F // 2 if is_gated else F, dtype=dtype)
        self._call("matmul", x_TE, packed, bias_F, T, F, E, self.FORMS.index(form), out)
        return out


def _pointers(cache: KVCache) -> tuple[Tensor | None, ...]:
    """Keys, values and, in 8 bits, their scales, else None twice."""
    return cache.parts if len(cache.parts) == 4 else (*cache.parts, None, None)


def _dense_heads(x_TXD: Tensor) -> Tensor:
    """Heads that follow one another; tokens may be any distance apart."""
    return x_TXD if x_TXD.stride()[1:] == (x_TXD.shape[2], 1) else x_TXD.contiguous()


# --------------------------------------------------------------- which kernel, and if there is


def elementwise(*tensors: Tensor) -> CpuKernels | None:
    """The operations between the products, of one number format; None: use torch."""
    dtype = tensors[0].dtype
    if dtype not in ELEMENTS:
        return None
    for x in tensors:
        if x.dtype is not dtype or not x.is_cpu or x.requires_grad:
            return None
    return _kernels(CpuKernels, dtype)


def rope_and_write(k_cache_NKPD: Tensor, *tensors: Tensor) -> CpuKernels | None:
    """For tensors of one number format, and a cache of that or in 8 bits; None: use torch."""
    if k_cache_NKPD.dtype not in CACHES:
        return elementwise(k_cache_NKPD, *tensors)
    is_ours = elementwise(*tensors) is not None
    return _kernels(CpuKernels, tensors[0].dtype, k_cache_NKPD.dtype) if is_ours else None


def paged_attention(q_THD: Tensor, k_cache_NKPD: Tensor) -> CpuDecode | None:
    """paged_decode for these, also with a cache in 8 bits; None: use its reference."""
    (_, H, D), (_, K, P, _) = q_THD.shape, k_cache_NKPD.shape
    G = H // K
    is_ours = rope_and_write(k_cache_NKPD, q_THD) is not None
    if not is_ours or G * (2 * D + P) > MAX_NUMBERS:
        return None
    sizes = {"HEAD_DIM": D, "GROUP": G, "BLOCK": P}
    return _kernels(CpuDecode, q_THD.dtype, k_cache_NKPD.dtype, **sizes)


def paged_prefill(q_THD: Tensor, k_cache_NKPD: Tensor) -> CpuPrefill | None:
    """For bfloat16 on a CPU with tiles, also with a cache in 8 bits; None: use torch's."""
    (_, H, D), (_, K, P, _) = q_THD.shape, k_cache_NKPD.shape
    G, steps_left_over = H // K, D % 32
    has_shape = G <= MAX_PREFILL_ROWS and steps_left_over == 0 and D <= 256
    is_ours = rope_and_write(k_cache_NKPD, q_THD) is not None
    if not has_shape or not is_ours or not _has_tiles_for(q_THD):
        return None
    sizes = {"HEAD_DIM": D, "GROUP": G, "BLOCK": P, "MAX_ROWS": MAX_PREFILL_ROWS}
    return _kernels(CpuPrefill, q_THD.dtype, k_cache_NKPD.dtype, **sizes)


def products(weight_NK: Tensor) -> CpuMatmul | None:
    """For a product with this weight; None: use torch's."""
    is_whole = all(size % 32 == 0 for size in weight_NK.shape)
    if not is_whole or not _has_tiles_for(weight_NK):
        return None
    return _kernels(CpuMatmul, weight_NK.dtype)


def _has_tiles_for(*tensors: Tensor) -> bool:
    is_bfloat16 = tensors[0].dtype == torch.bfloat16
    return is_bfloat16 and elementwise(*tensors) is not None and has_amx()


def has_amx() -> bool:
    """Whether this CPU has tiles that multiply bfloat16."""
    return cpu_has("amx_bf16")


def why_none(dtype: torch.dtype) -> str | None:
    """Why there are no kernels for this number format; None: there are."""
    if dtype not in ELEMENTS:
        return f"its kernels compute float32 and bfloat16, not {dtype}"
    found = _build(CpuKernels, dtype)
    return str(found) if isinstance(found, NoLibrary) else None


def _kernels(kind: type[Library], *formats: torch.dtype, **sizes: int) -> Library | None:
    found = _build(kind, *formats, **sizes)
    if isinstance(found, NoLibrary):
        warn_once(str(found))
        return None
    return found


@functools.cache
def _build(kind: type[Library], *formats: torch.dtype, **sizes: int) -> Library | NoLibrary:
    """Tried once in a process: a compiler that failed is not asked again."""
    try:
        return kind(*formats, **sizes)
    except NoLibrary as error:
        return error


@functools.cache
def warn_once(reason: str) -> None:
    """Say why torch computes what C should; once in a process for each reason."""
    warnings.warn(
        f"torch computes in place of C, more slowly: {reason}. Another C compiler can be named "
        "in $CC; attention_backend='torch' asks for torch, without this warning.",
        RuntimeWarning,
        stacklevel=2,
    )
