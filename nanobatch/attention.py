"""Attention over a paged cache, in torch: the oracle, and what runs where no kernel does.

The keys of a sequence lie in blocks all over the cache; its block table says where. They are
gathered into one contiguous piece and handed to torch's scaled_dot_product_attention, several
sequences of like length together (kernels/gather.py). On a CPU with a C compiler sequences
with one query go to cpu/kernels.c instead, which gathers nothing, and with AMX those with
several, in bfloat16, to cpu/prefill.c; on a GPU all go to Triton.

Always holds (invariant 14): what lies in slots past a sequence's end never reaches an
output. It may be NaN, so a mask on the scores does not suffice (0 * NaN is NaN): the gathered
tail is set to zero.

The cache is [N, K, P, D]: one head's slots of a block are one contiguous run, so that
gathering (block, head) pairs gives [sequence, head, position, D] with no transpose.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nanobatch.attention_masks import causal_mask
from nanobatch.batch import Batch
from nanobatch.config import ATTENTION_BACKENDS
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.cpu import library as cpu_library
from nanobatch.extensions.quantized_cache import LARGEST, Cache
from nanobatch.kernels.gather import decodes, make_groups, pieces
from nanobatch.kernels.ops import HAS_TRITON, rope_and_write
from nanobatch.utils.arithmetic import next_power_of_two
from nanobatch.utils.checks import check_choice


def masked_attention(
    q_SHTD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Grouped-query attention over dense keys; query head h reads key head h // (H / K).

    Args:
        q_SHTD: [S, H, T, D] queries. k_SKLD, v_SKLD: [S, K, L, D] keys and values.
        mask: bool, broadcastable to [S, H, T, L], True where a query sees a key; or None.
        scale: what the scores are multiplied by.
        softcap: if set, scores become softcap * tanh(score / softcap) (Gemma 2).
        is_causal: in place of a mask, for T == L.

    Returns:
        [S, H, T, D].
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q_SHTD, k_SKLD, v_SKLD, mask, scale=scale, is_causal=is_causal, enable_gqa=True
        )
    if is_causal:
        mask = causal_mask(q_SHTD.shape[2], k_SKLD.shape[2])
    group_size = q_SHTD.shape[1] // k_SKLD.shape[1]
    k_SHLD, v_SHLD = (x.repeat_interleave(group_size, dim=1) for x in (k_SKLD, v_SKLD))
    scores_SHTL = (q_SHTD @ k_SHLD.transpose(2, 3)).float() * scale
    scores_SHTL = softcap * torch.tanh(scores_SHTL / softcap)
    if mask is not None:
        scores_SHTL = scores_SHTL.masked_fill(~mask, float("-inf"))
    return scores_SHTL.softmax(dim=-1).to(v_SHLD.dtype) @ v_SHLD


def choose_backend(backend: str, on_cuda: bool, block_size: int) -> str:
    """What `backend` comes to for a cache on a GPU or on a CPU: "torch", "triton" or "c".

    "auto" is Triton on CUDA, where it is installed and the block size is a power of two; C on
    a CPU with a C compiler: what it has no kernel for is torch's.

    Raises:
        ValueError: "triton" was asked for and cannot be had: not installed, a block size that
            is no power of two, or a CPU without Triton's interpreter; or "c" was, on a GPU or
            without a compiler.
    """
    check_choice("attention_backend", backend, ATTENTION_BACKENDS)
    is_power_of_two = next_power_of_two(block_size) == block_size
    has_c = not on_cuda and cpu_library.compiler() is not None
    if backend == "auto":
        has_triton = on_cuda and HAS_TRITON and is_power_of_two
        return "triton" if has_triton else "c" if has_c else "torch"
    if backend == "c" and not has_c:
        raise ValueError("attention_backend is 'c'; it needs a CPU and a C compiler")
    if backend in ("torch", "c"):
        return backend
    if not HAS_TRITON:
        raise ValueError("attention_backend is 'triton', which is not installed; use 'torch'")
    if not is_power_of_two:
        raise ValueError(f"block_size is {block_size}; the Triton kernels need a power of two")
    if not on_cuda:
        import triton

        if not triton.knobs.runtime.interpret:
            raise ValueError(
                "attention_backend is 'triton' and the device is 'cpu'; set TRITON_INTERPRET=1 "
                "before triton is imported, or use 'torch'"
            )
    return backend


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    k_scale_NKP: Tensor | None = None,
    v_scale_NKP: Tensor | None = None,
) -> Tensor:
    """Causal attention of the step's queries over the keys that their block tables name.

    The step's own keys and values must be in the cache already. Each sequence's queries are
    its last positions: the mask is aligned at the bottom right.

    Args:
        q_THD: [T, H, D] queries of the packed tokens.
        k_cache_NKPD, v_cache_NKPD: [N, K, P, D].
        batch: where each sequence's queries and keys are.
        scale: what the scores are multiplied by, usually D ** -0.5.
        sliding_window: keys that a query sees, itself included; None: all before it.
        softcap: see masked_attention.
        backend: see choose_backend.
        k_scale_NKP, v_scale_NKP: of caches in 8 bits, which only their scales make keys and
            values of (extensions/quantized_cache.py).

    Returns:
        [T, H, D]; tokens that belong to no sequence get zeros.

    Raises:
        ValueError: shapes do not agree, or the backend cannot be had.
    """
    _check_shapes(q_THD, k_cache_NKPD, v_cache_NKPD)
    for cache_NKPD, scale_NKP in ((k_cache_NKPD, k_scale_NKP), (v_cache_NKPD, v_scale_NKP)):
        _check_scale(cache_NKPD, scale_NKP)
    _, K, P, _ = k_cache_NKPD.shape
    backend = choose_backend(backend, q_THD.is_cuda, P)
    if backend == "triton":
        from nanobatch.paged_attention_kernel import triton_paged_attention

        return triton_paged_attention(
            q_THD, k_cache_NKPD, v_cache_NKPD, batch, scale=scale,
            sliding_window=sliding_window, softcap=softcap, k_scale_NKP=k_scale_NKP,
            v_scale_NKP=v_scale_NKP,
        )  # fmt: skip
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    done = (False, False)
    if backend == "c" and softcap is None:
        cache = (k_cache_NKPD, v_cache_NKPD, k_scale_NKP, v_scale_NKP)
        done = _attend_in_c(q_THD, cache, batch, scale, sliding_window, out_THD)
    how = (K, P, sliding_window, *(not kind for kind in done))
    for group in batch.once(("groups", *how), lambda: list(make_groups(batch, *how))):
        q_SHTD = q_THD[group.tokens].unflatten(0, (group.shape[0], -1)).transpose(1, 2)
        out_SHTD = masked_attention(
            q_SHTD,
            group.gather(k_cache_NKPD, k_scale_NKP, q_THD.dtype),
            group.gather(v_cache_NKPD, v_scale_NKP, q_THD.dtype),
            group.mask,
            scale=scale,
            softcap=softcap,
            is_causal=group.mask is None,
        )
        out_THD[group.tokens] = out_SHTD.transpose(1, 2).flatten(0, 1)
    return out_THD


def _attend_in_c(
    q_THD: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    batch: Batch,
    scale: float,
    window: int | None,
    out_THD: Tensor,
) -> tuple[bool, bool]:
    """What C has kernels for; returns whether that is (decodes, prefills)."""
    q_THD, k_cache_NKPD = q_THD.contiguous(), cache[0]
    decode = cpu_kernels.paged_attention(q_THD, k_cache_NKPD)
    if decode is not None:
        rows = batch.once(("decodes", window), lambda: decodes(batch, window))
        decode.paged_decode(q_THD, *cache, *rows, scale, out_THD)
    if batch.max_query_len == 1:
        return decode is not None, True
    prefill = cpu_kernels.paged_prefill(q_THD, k_cache_NKPD)
    if prefill is not None:
        max_len = cpu_kernels.MAX_PREFILL_ROWS * k_cache_NKPD.shape[1] // q_THD.shape[1]
        tables_SB, pieces_I4 = batch.once(("pieces", max_len), lambda: pieces(batch, max_len))
        prefill.paged_prefill(q_THD, *cache, tables_SB, pieces_I4, window, scale, out_THD)
    return decode is not None, prefill is not None


def _check_shapes(q_THD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor) -> None:
    ok = (
        q_THD.dim() == 3
        and k_cache_NKPD.dim() == 4
        and k_cache_NKPD.shape == v_cache_NKPD.shape
    )
    if ok:
        H, K = q_THD.shape[1], k_cache_NKPD.shape[1]
        heads_left_over = H % K
        ok = heads_left_over == 0 and q_THD.shape[2] == k_cache_NKPD.shape[3]
    if not ok:
        raise ValueError(
            f"q_THD is {tuple(q_THD.shape)}, k_cache_NKPD {tuple(k_cache_NKPD.shape)}, "
            f"v_cache_NKPD {tuple(v_cache_NKPD.shape)}; they must be [T, H, D] and twice "
            "[N, K, P, D], H a multiple of K"
        )


def _check_scale(cache_NKPD: Tensor, scale_NKP: Tensor | None) -> None:
    is_quantized = cache_NKPD.dtype in LARGEST
    wanted = cache_NKPD.shape[:3] if is_quantized else None
    given = None if scale_NKP is None else scale_NKP.shape
    if given != wanted:
        raise ValueError(
            f"a cache of {cache_NKPD.dtype} has scales of shape {given and tuple(given)}; they "
            f"must be {tuple(wanted) if is_quantized else None}"
        )


class AttentionArgs(NamedTuple):
    """What sets one layer's attention apart: see paged_attention."""

    sliding_window: int | None
    scale: float
    softcap: float | None = None


@dataclass
class PagedAttend:
    """What the model calls in each layer: rotate, write to the paged cache, attend.

    caches: one for each layer (extensions/quantized_cache.py).
    """

    batch: Batch
    caches: list[Cache]
    backend: str = "auto"

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        how: AttentionArgs,
    ) -> Tensor:
        k_cache_NKPD, v_cache_NKPD, *scales = self.caches[layer]
        q_THD = rope_and_write(
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, k_cache_NKPD, v_cache_NKPD,
            self.batch.slot_mapping_T, *scales,
        )  # fmt: skip
        k_scale_NKP, v_scale_NKP = scales or (None, None)
        return paged_attention(
            q_THD, k_cache_NKPD, v_cache_NKPD, self.batch, **how._asdict(),
            backend=self.backend, k_scale_NKP=k_scale_NKP, v_scale_NKP=v_scale_NKP,
        )  # fmt: skip
