"""Triton's kernels for a KV cache in 8 bits: the cache write, and paged attention.

They do what rope_and_write_kernel (kernels/triton_ops.py) and paged_attention_kernel do, and
differ in the following:

    write       each row of D numbers gets a scale, as quantize() computes it
    scores      q times 8-bit keys converted in registers; each column times its key's scale
    output      the weights times their values' scales, times the 8-bit values

The scales multiply the products, which have one number for each key, and not the keys, which
have D. Values are loaded as pairs of bytes: as the right factor of a product single bytes would
be copied 8 bytes at a time. Even and odd columns then have an accumulator each.

    pair of bytes    int16 [ v1 | v0 ]   ->   v0 to the even columns, v1 to the odd ones

Always holds (invariants 14 and 16): as in paged_attention_kernel.py.

Source: see extensions/quantized_cache.py.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobatch.batch import Batch
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import Chip, LaunchConfig, choose_launch_config
from nanobatch.kernels.ops import AttentionArgs
from nanobatch.kernels.triton_ops import (
    dense_heads,
    load_heads,
    rope_grid,
    rotate,
    store_heads,
)
from nanobatch.paged_attention_kernel import (
    TritonBackend,
    add_values,
    load_item,
    online_softmax,
    soft_capped,
    store_result,
    tiles_of_split,
)


@triton.jit
def _magnitude(x_XR):
    """|x|, and infinity for NaN, which a maximum would pass over (invariant 15)."""
    return tl.where(x_XR == x_XR, tl.abs(x_XR), float("inf"))


@triton.jit
def _store_quantized(
    cache_ptr, scale_ptr, slot_X1, r_R, is_X1, is_XR, a_XR, b_XR,
    D: tl.constexpr, R: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    """Some heads into their slots of a cache, as quantized_cache.quantize does it."""
    largest_XR = tl.maximum(_magnitude(a_XR), _magnitude(b_XR))
    scale_X1 = tl.max(largest_XR, 1, keep_dims=True) / LARGEST
    scale_X1 = tl.maximum(scale_X1, SMALLEST_SCALE).to(scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + slot_X1, scale_X1, mask=is_X1)
    scale_X1 = scale_X1.to(tl.float32)
    a_XR, b_XR = a_XR / scale_X1, b_XR / scale_X1
    if cache_ptr.dtype.element_ty == tl.int8:
        a_XR, b_XR = tl.floor(a_XR + 0.5), tl.floor(b_XR + 0.5)
    a_XR, b_XR = tl.clamp(a_XR, -LARGEST, LARGEST), tl.clamp(b_XR, -LARGEST, LARGEST)
    store_heads(cache_ptr, slot_X1 * D + r_R[None, :], is_XR, a_XR, b_XR, R)


@triton.jit
def quantized_rope_and_write_kernel(
    q_out_ptr,  # [T, H, D] the rotated queries
    k_cache_ptr,  # [N, K, P, D] in 8 bits
    v_cache_ptr,  # [N, K, P, D] in 8 bits
    k_scale_ptr,  # [N, K, P] of each token's keys
    v_scale_ptr,  # [N, K, P] of each token's values
    q_ptr,  # the others: see rope_and_write_kernel
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_stride,
    k_stride,
    v_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,  # number that the caches' format holds
    SMALLEST_SCALE: tl.constexpr,  # of a row of zeros
):
    """One program takes HEADS heads of one token: the first programs queries, the rest keys."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head_X = tl.arange(0, HEADS)[:, None]
    r_R = tl.arange(0, R_PAD)
    is_r_R = r_R < R
    cos_R = tl.load(cos_ptr + token * R + r_R, mask=is_r_R, other=0.0)
    sin_R = tl.load(sin_ptr + token * R + r_R, mask=is_r_R, other=0.0)
    num_query_parts: tl.constexpr = (H + HEADS - 1) // HEADS
    if part < num_query_parts:
        head_X += part * HEADS
        is_XR = (head_X < H) & is_r_R[None, :]
        where_XR = head_X * D + r_R[None, :]
        to_ptr, from_ptr = q_out_ptr + token * (H * D), q_ptr + token * q_stride
        a_XR, b_XR = load_heads(from_ptr, where_XR, is_XR, R)
        a_XR, b_XR = rotate(a_XR, b_XR, cos_R, sin_R)
        store_heads(to_ptr, where_XR, is_XR, a_XR, b_XR, R)
    else:
        slot = tl.load(slot_ptr + token)
        if slot < 0:
            return
        head_X += (part - num_query_parts) * HEADS
        is_XR = (head_X < K) & is_r_R[None, :]
        where_XR = head_X * D + r_R[None, :]
        slot_X1 = slot // P * (K * P) + slot % P + head_X * P
        a_XR, b_XR = load_heads(k_ptr + token * k_stride, where_XR, is_XR, R)
        a_XR, b_XR = rotate(a_XR, b_XR, cos_R, sin_R)
        _store_quantized(
            k_cache_ptr, k_scale_ptr, slot_X1, r_R, head_X < K, is_XR, a_XR, b_XR,
            D, R, LARGEST, SMALLEST_SCALE,
        )  # fmt: skip
        a_XR, b_XR = load_heads(v_ptr + token * v_stride, where_XR, is_XR, R)
        _store_quantized(
            v_cache_ptr, v_scale_ptr, slot_X1, r_R, head_X < K, is_XR, a_XR, b_XR,
            D, R, LARGEST, SMALLEST_SCALE,
        )  # fmt: skip


@triton.jit
def _two_of(pair_LX, kind: tl.constexpr, dtype: tl.constexpr):
    """Two numbers of 8 bits from each int16: that of the even address, and the next one."""
    even_LX, odd_LX = pair_LX.to(tl.int8), (pair_LX >> 8).to(tl.int8)
    if kind != tl.int8:
        even_LX, odd_LX = even_LX.to(kind, bitcast=True), odd_LX.to(kind, bitcast=True)
    return even_LX.to(dtype), odd_LX.to(dtype)


@triton.jit(do_not_specialize=["table_stride"])
def quantized_attention_kernel(
    out_ptr,  # [T, H, D] the result of items that are not split
    acc_ptr,
    max_ptr,
    sum_ptr,
    q_ptr,  # [T, H, D]
    k_cache_ptr,  # [N, K, P, D] in 8 bits
    v_cache_ptr,  # [N, K, P, D] in 8 bits
    k_scale_ptr,  # [N, K, P] of each token's keys
    v_scale_ptr,  # [N, K, P] of each token's values
    block_tables_ptr,  # the others: see paged_attention_kernel
    seq_lens_ptr,
    query_start_ptr,
    work_ptr,
    q_stride,
    table_stride,
    scale_log2,
    softcap,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,  # an even number
    D_PAD: tl.constexpr,
    P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program: BLOCK_Q query tokens of one sequence, G heads, one split of the keys."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    seq, first_query, split, num_splits = load_item(work_ptr, item)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)

    row_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, D_PAD)
    query_M = first_query + row_M // G
    head_M = kv_head * G + row_M % G
    is_row_M = (row_M < BLOCK_Q * G) & (query_M < query_len)
    is_d_D = d_D < D
    token_M = (query_start + query_M).to(tl.int64)
    q_MD = tl.load(
        q_ptr + token_M[:, None] * q_stride + head_M[:, None] * D + d_D[None, :],
        mask=is_row_M[:, None] & is_d_D[None, :],
        other=0.0,
    )
    if WIDEN:
        q_MD = q_MD.to(tl.float32)

    context_len = seq_len - query_len
    pos_M = context_len + query_M
    end_query = tl.minimum(first_query + BLOCK_Q, query_len)
    first_tile, end_tile = tiles_of_split(
        context_len, first_query, end_query, split, num_splits, TILE, WINDOW
    )

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    x_X = tl.arange(0, D_PAD // 2)  # pairs of columns
    even_MX = tl.zeros([BLOCK_M, D_PAD // 2], tl.float32)
    odd_MX = tl.zeros([BLOCK_M, D_PAD // 2], tl.float32)
    pairs_ptr = v_cache_ptr.to(tl.pointer_type(tl.int16))
    table_ptr = block_tables_ptr + seq * table_stride
    pos_L = first_tile * TILE + tl.arange(0, TILE)
    block_L = tl.load(table_ptr + pos_L // P, mask=pos_L < seq_len, other=0)
    for _ in range(first_tile, end_tile):
        is_key_L = pos_L < seq_len
        # 64 bits before multiplying: a cache of more than 2**31 elements is ordinary.
        slot_L = (block_L.to(tl.int64) * K + kv_head) * P + pos_L % P
        k_scale_L = tl.load(k_scale_ptr + slot_L, mask=is_key_L, other=0.0).to(tl.float32)
        v_scale_L = tl.load(v_scale_ptr + slot_L, mask=is_key_L, other=0.0).to(tl.float32)
        where_LD = slot_L[:, None] * D + d_D[None, :]
        is_here_LD = is_key_L[:, None] & is_d_D[None, :]
        k_LD = tl.load(k_cache_ptr + where_LD, mask=is_here_LD, other=0.0).to(q_MD.dtype)
        # Zeroed and not only masked: an unused slot may hold NaN, and 0 * NaN is NaN.
        where_LX = slot_L[:, None] * (D // 2) + x_X[None, :]
        is_here_LX = is_key_L[:, None] & (x_X < D // 2)[None, :]
        pair_LX = tl.load(pairs_ptr + where_LX, mask=is_here_LX, other=0)

        score_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision="ieee") * scale_log2
        score_ML *= k_scale_L[None, :]
        if HAS_SOFTCAP:
            score_ML = soft_capped(score_ML, softcap)
        sees_ML = pos_L[None, :] <= pos_M[:, None]
        if WINDOW > 0:
            sees_ML &= pos_L[None, :] > pos_M[:, None] - WINDOW
        score_ML = tl.where(sees_ML, score_ML, float("-inf"))

        p_ML, rescale_M, max_M, sum_M = online_softmax(score_ML, max_M, sum_M)
        p_ML *= v_scale_L[None, :]  # after the sum: it belongs to the values
        even_LX, odd_LX = _two_of(pair_LX, v_cache_ptr.dtype.element_ty, q_MD.dtype)
        even_MX = add_values(p_ML, even_LX, rescale_M, even_MX)
        odd_MX = add_values(p_ML, odd_LX, rescale_M, odd_MX)
        pos_L += TILE
        block_L = tl.load(table_ptr + pos_L // P, mask=pos_L < seq_len, other=0)

    acc_MD = tl.interleave(even_MX, odd_MX)
    row_of_out_M = token_M * (K * G) + head_M
    store_result(
        out_ptr, acc_ptr, max_ptr, sum_ptr, item, num_splits, row_of_out_M, row_M, d_D,
        is_row_M, is_d_D, acc_MD, max_M, sum_M, K, D, BLOCK_M,
    )  # fmt: skip


class QuantizedTritonBackend(TritonBackend):
    """Triton's backend, for caches in 8 bits: each is a QuantizedCache."""

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
        q_THD, k_TKD, v_TKD = map(dense_heads, (q_THD, k_TKD, v_TKD))
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        grid, sizes = rope_grid(q_THD, cache)
        quantized_rope_and_write_kernel[grid](
            out_THD, *cache.parts, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, slot_mapping_T,
            q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), **sizes,
            LARGEST=cache.largest, SMALLEST_SCALE=cache.smallest_scale,
        )  # fmt: skip
        return out_THD

    def paged_attention(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: Batch,
        args: AttentionArgs,
        launch: LaunchConfig | None = None,
    ) -> Tensor:
        """See TritonBackend.paged_attention.

        Raises:
            ValueError: the head dimension is odd.
        """
        D = q_THD.shape[2]
        is_odd = D % 2 == 1
        if is_odd:
            raise ValueError(f"head_dim is {D}; Triton's caches in 8 bits need an even one")
        return super().paged_attention(q_THD, cache, batch, args, launch)

    def kernel(self):
        """The kernel that takes the cache's parts."""
        return quantized_attention_kernel

    def launch_config(self, *sizes: int | Chip) -> LaunchConfig:
        """See quantized_launch_config."""
        return quantized_launch_config(*sizes)


def quantized_launch_config(
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    chip: Chip,
) -> LaunchConfig:
    """choose_launch_config's choice, changed for caches in 8 bits.

    Their conversion takes registers: at most 64 rows, and fewer keys. A tile has fewer bytes:
    of heads of 64, too few for 8 warps to copy 16 at a time. Products of float32 read what is
    copied in an order that spills; they do without copies.
    """
    sizes = (num_tokens, num_seqs, max_query_len, num_heads, num_kv_heads, head_dim)
    launch = choose_launch_config(*sizes, itemsize, chip, max_rows=64)
    if itemsize == 4:
        return dataclasses.replace(launch, tile=16, num_stages=1, max_registers=255)
    is_small, is_large = head_dim <= 64, head_dim > 128
    has_few_bytes = is_small and chip.capability >= (8, 0)
    num_warps = 4 if has_few_bytes else launch.num_warps
    tile = 16 if is_large else 32
    return dataclasses.replace(launch, tile=tile, num_warps=num_warps, max_registers=255)
