"""The operations of kernels/ops.py in Triton: each number is read once and written once.

None of these multiplies matrices, so all that counts is memory: the work of torch's separate
operations (add, square, mean, multiply, ...) is done on one pass through registers.

    rms_norm          a program takes a row:   x, residual -> sum, normed row
    rope_and_write    a program takes some heads of a token: q is rotated, k is rotated and
                      goes with v to its slot of the paged cache
    silu_mul          a program takes a run of elements

Always holds (invariants 14 and 16): slot -1 writes nothing; slots are 64 bits wide before they
are multiplied. Arithmetic is in float32, results in the format of the inputs.

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: see kernels/ops.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobatch.kernels.grouped_matmul import triton_grouped_matmul
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import Ops
from nanobatch.utils.arithmetic import cdiv

SILU_BLOCK = 1024  # elements of a program
ROPE_HEADS = 16  # heads of a program, so that the angles are loaded once for many


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [T, H, E] the normed rows
    sum_ptr,  # float32 [T, H, E] x + residual: the next residual
    x_ptr,  # [T, H, E]; a token's rows are contiguous
    residual_ptr,  # float32 [T, H, E]
    weight_ptr,  # [E]
    x_stride,  # elements from one token's rows to the next one's
    eps,  # keeps a row of zeros from dividing by 0
    H: tl.constexpr,  # rows of a token: its heads, or 1
    E: tl.constexpr,  # elements of a row
    E_PAD: tl.constexpr,  # the next power of two
    HAS_RESIDUAL: tl.constexpr,
):
    """One program normalizes one row."""
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, E_PAD)
    is_e_E = e_E < E
    x_ptr += row // H * x_stride + row % H * E
    wide_E = tl.load(x_ptr + e_E, mask=is_e_E, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide_E += tl.load(residual_ptr + row * E + e_E, mask=is_e_E, other=0.0)
    tl.store(sum_ptr + row * E + e_E, wide_E, mask=is_e_E)
    scale = tl.rsqrt(tl.sum(wide_E * wide_E, 0) / E + eps)
    weight_E = tl.load(weight_ptr + e_E, mask=is_e_E, other=0.0).to(tl.float32)
    normed_E = wide_E * scale * weight_E
    tl.store(out_ptr + row * E + e_E, normed_E.to(out_ptr.dtype.element_ty), mask=is_e_E)


@triton.jit
def load_heads(from_ptr, where_XR, is_XR, R: tl.constexpr):
    """Some heads in two halves: elements i and i + R."""
    a_XR = tl.load(from_ptr + where_XR, mask=is_XR, other=0.0).to(tl.float32)
    b_XR = tl.load(from_ptr + where_XR + R, mask=is_XR, other=0.0).to(tl.float32)
    return a_XR, b_XR


@triton.jit
def rotate(a_XR, b_XR, cos_R, sin_R):
    """Rotate each pair (i, i + R) of some heads by angle i."""
    cos_XR, sin_XR = cos_R[None, :], sin_R[None, :]
    return a_XR * cos_XR - b_XR * sin_XR, b_XR * cos_XR + a_XR * sin_XR


@triton.jit
def store_heads(to_ptr, where_XR, is_XR, a_XR, b_XR, R: tl.constexpr):
    """Both halves, in the number format of where they go."""
    element = to_ptr.dtype.element_ty
    tl.store(to_ptr + where_XR, a_XR.to(element), mask=is_XR)
    tl.store(to_ptr + where_XR + R, b_XR.to(element), mask=is_XR)


@triton.jit
def rope_and_write_kernel(
    q_out_ptr,  # [T, H, D] the rotated queries
    k_cache_ptr,  # [N, K, P, D]
    v_cache_ptr,  # [N, K, P, D]
    q_ptr,  # [T, H, D]; heads and elements contiguous, as of k and v
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    cos_ptr,  # float32 [T, R] of each token's angles, R = D / 2
    sin_ptr,  # float32 [T, R]
    slot_ptr,  # int64 [T] block * P + offset, or -1
    q_stride,  # elements from one token's queries to the next one's
    k_stride,  # the same for keys
    v_stride,  # the same for values
    H: tl.constexpr,  # query heads
    K: tl.constexpr,  # KV heads
    D: tl.constexpr,  # head dimension
    P: tl.constexpr,  # slots in a cache block
    R: tl.constexpr,  # D / 2
    R_PAD: tl.constexpr,  # the next power of two
    HEADS: tl.constexpr,  # heads of a program, a power of two
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
        # A head's slots are a run of P: the next head's row is that far away.
        slot_X1 = slot // P * (K * P) + slot % P + head_X * P
        cache_XR = slot_X1 * D + r_R[None, :]
        a_XR, b_XR = load_heads(k_ptr + token * k_stride, where_XR, is_XR, R)
        a_XR, b_XR = rotate(a_XR, b_XR, cos_R, sin_R)
        store_heads(k_cache_ptr, cache_XR, is_XR, a_XR, b_XR, R)
        a_XR, b_XR = load_heads(v_ptr + token * v_stride, where_XR, is_XR, R)
        store_heads(v_cache_ptr, cache_XR, is_XR, a_XR, b_XR, R)


@triton.jit
def silu_mul_kernel(
    out_ptr,  # [T, F]
    gate_up_ptr,  # [T, 2 F]: gate, then up
    F: tl.constexpr,  # elements of an output row
    BLOCK: tl.constexpr,  # elements of a program
):
    """One program takes BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    f_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_f_F = f_F < F
    gate_ptr = gate_up_ptr + row * (2 * F) + f_F
    gate_F = tl.load(gate_ptr, mask=is_f_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_ptr + F, mask=is_f_F, other=0.0).to(tl.float32)
    product_F = gate_F * tl.sigmoid(gate_F) * up_F
    tl.store(out_ptr + row * F + f_F, product_F.to(out_ptr.dtype.element_ty), mask=is_f_F)


class TritonOps(Ops):
    """The same operations by the kernels above, for tensors on CUDA."""

    name = "triton"

    def rms_norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Ops.rms_norm."""
        E = x_TE.shape[-1]
        x_THE = dense_heads(x_TE if x_TE.dim() == 3 else x_TE.view(-1, 1, E))
        out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
        sum_TE = torch.empty_like(out_TE, dtype=torch.float32)
        residual_or_x = x_TE if residual_TE is None else residual_TE.contiguous()
        rms_norm_kernel[(x_TE.numel() // E,)](
            out_TE, sum_TE, x_THE, residual_or_x, weight_E, x_THE.stride(0), eps,
            H=x_THE.shape[1], E=E, E_PAD=triton.next_power_of_2(E),
            HAS_RESIDUAL=residual_TE is not None, num_warps=warps_of_row(E),
        )  # fmt: skip
        return out_TE, sum_TE

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Ops.silu_mul."""
        gate_up_TF = gate_up_TF.contiguous()
        F = gate_up_TF.shape[-1] // 2
        out_TF = gate_up_TF.new_empty(*gate_up_TF.shape[:-1], F)
        grid = (out_TF.numel() // F, cdiv(F, SILU_BLOCK))
        silu_mul_kernel[grid](out_TF, gate_up_TF, F=F, BLOCK=SILU_BLOCK)
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
        q_THD, k_TKD, v_TKD = map(dense_heads, (q_THD, k_TKD, v_TKD))
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        grid, sizes = rope_grid(q_THD, cache)
        rope_and_write_kernel[grid](
            out_THD, cache.keys, cache.values, q_THD, k_TKD, v_TKD, cos_TR, sin_TR,
            slot_mapping_T, q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), **sizes,
        )  # fmt: skip
        return out_THD

    def grouped_matmul(self, x_MK: Tensor, weight_XNK: Tensor, counts_X: Tensor) -> Tensor:
        """See Ops.grouped_matmul."""
        return triton_grouped_matmul(x_MK, weight_XNK, counts_X)


def warps_of_row(E: int) -> int:
    """Of a program that has a row of E numbers in registers: at most 64 a thread."""
    return min(max(triton.next_power_of_2(E) // 2048, 4), 32)


def dense_heads(x_TXD: Tensor) -> Tensor:
    """Heads that follow one another; tokens may be any distance apart."""
    return x_TXD if x_TXD.stride()[1:] == (x_TXD.shape[2], 1) else x_TXD.contiguous()


def rope_grid(q_THD: Tensor, cache: KVCache) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid of rope_and_write_kernel, and its sizes."""
    (T, H, D), (_, K, P, _) = q_THD.shape, cache.keys.shape
    heads = min(triton.next_power_of_2(H), ROPE_HEADS)
    pad = triton.next_power_of_2(D // 2)
    sizes = {"H": H, "K": K, "D": D, "P": P, "R": D // 2, "R_PAD": pad, "HEADS": heads}
    return (T, cdiv(H, heads) + cdiv(K, heads)), sizes
