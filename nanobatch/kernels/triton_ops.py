"""The Triton references of kernels/ops.py: each number is read once and written once.

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

from nanobatch.extensions.quantized_cache import LARGEST, SMALLEST_SCALE
from nanobatch.utils.arithmetic import cdiv

SILU_BLOCK = 1024  # elements of a program
ROPE_HEADS = 16  # heads of a program, so that the angles are loaded once for many


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [T, E] the normed rows
    sum_ptr,  # float32 [T, E] x + residual: the next residual
    x_ptr,  # [T, E]
    residual_ptr,  # float32 [T, E]
    weight_ptr,  # [E]
    eps,  # keeps a row of zeros from dividing by 0
    E: tl.constexpr,  # elements of a row
    E_PAD: tl.constexpr,  # the next power of two
    HAS_RESIDUAL: tl.constexpr,
):
    """One program normalizes one row."""
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, E_PAD)
    is_e_E = e_E < E
    wide_E = tl.load(x_ptr + row * E + e_E, mask=is_e_E, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide_E += tl.load(residual_ptr + row * E + e_E, mask=is_e_E, other=0.0)
    tl.store(sum_ptr + row * E + e_E, wide_E, mask=is_e_E)
    scale = tl.rsqrt(tl.sum(wide_E * wide_E, 0) / E + eps)
    weight_E = tl.load(weight_ptr + e_E, mask=is_e_E, other=0.0).to(tl.float32)
    normed_E = wide_E * scale * weight_E
    tl.store(out_ptr + row * E + e_E, normed_E.to(out_ptr.dtype.element_ty), mask=is_e_E)


@triton.jit
def _load(from_ptr, where_XR, is_XR, R: tl.constexpr):
    """Some heads in two halves: elements i and i + R."""
    a_XR = tl.load(from_ptr + where_XR, mask=is_XR, other=0.0).to(tl.float32)
    b_XR = tl.load(from_ptr + where_XR + R, mask=is_XR, other=0.0).to(tl.float32)
    return a_XR, b_XR


@triton.jit
def _rotate(a_XR, b_XR, cos_R, sin_R):
    """Rotate each pair (i, i + R) of some heads by angle i."""
    cos_XR, sin_XR = cos_R[None, :], sin_R[None, :]
    return a_XR * cos_XR - b_XR * sin_XR, b_XR * cos_XR + a_XR * sin_XR


@triton.jit
def _store(to_ptr, where_XR, is_XR, a_XR, b_XR, R: tl.constexpr):
    """Both halves, in the number format of where they go."""
    element = to_ptr.dtype.element_ty
    tl.store(to_ptr + where_XR, a_XR.to(element), mask=is_XR)
    tl.store(to_ptr + where_XR + R, b_XR.to(element), mask=is_XR)


@triton.jit
def _magnitude(x_XR):
    """|x|, and infinity for NaN, which a maximum would pass over (invariant 15)."""
    return tl.where(x_XR == x_XR, tl.abs(x_XR), float("inf"))


@triton.jit
def _write(
    cache_ptr, scale_ptr, slot_X1, r_R, is_X1, is_XR, a_XR, b_XR,
    D: tl.constexpr, R: tl.constexpr, LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
):  # fmt: skip
    """Some heads into their slots of a cache; into 8 bits as kv_cache.quantize does."""
    if LARGEST > 0:
        largest_XR = tl.maximum(_magnitude(a_XR), _magnitude(b_XR))
        scale_X1 = tl.max(largest_XR, 1, keep_dims=True) / LARGEST
        scale_X1 = tl.maximum(scale_X1, SMALLEST_SCALE).to(scale_ptr.dtype.element_ty)
        tl.store(scale_ptr + slot_X1, scale_X1, mask=is_X1)
        scale_X1 = scale_X1.to(tl.float32)
        a_XR, b_XR = a_XR / scale_X1, b_XR / scale_X1
        if cache_ptr.dtype.element_ty == tl.int8:
            a_XR, b_XR = tl.floor(a_XR + 0.5), tl.floor(b_XR + 0.5)
        a_XR, b_XR = tl.clamp(a_XR, -LARGEST, LARGEST), tl.clamp(b_XR, -LARGEST, LARGEST)
    _store(cache_ptr, slot_X1 * D + r_R[None, :], is_XR, a_XR, b_XR, R)


@triton.jit
def rope_and_write_kernel(
    q_out_ptr,  # [T, H, D] the rotated queries
    k_cache_ptr,  # [N, K, P, D]
    v_cache_ptr,  # [N, K, P, D]
    k_scale_ptr,  # [N, K, P] of each token's keys, if the caches are in 8 bits
    v_scale_ptr,  # [N, K, P] of each token's values
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
    LARGEST: tl.constexpr,  # number that the caches' 8 bits hold; 0: they are not quantized
    SMALLEST_SCALE: tl.constexpr,
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
        a_XR, b_XR = _load(from_ptr, where_XR, is_XR, R)
        a_XR, b_XR = _rotate(a_XR, b_XR, cos_R, sin_R)
        _store(to_ptr, where_XR, is_XR, a_XR, b_XR, R)
    else:
        slot = tl.load(slot_ptr + token)
        if slot < 0:
            return
        head_X += (part - num_query_parts) * HEADS
        is_XR = (head_X < K) & is_r_R[None, :]
        where_XR = head_X * D + r_R[None, :]
        # A head's slots are a run of P: the next head's row is that far away.
        slot_X1 = slot // P * (K * P) + slot % P + head_X * P
        a_XR, b_XR = _load(k_ptr + token * k_stride, where_XR, is_XR, R)
        a_XR, b_XR = _rotate(a_XR, b_XR, cos_R, sin_R)
        _write(
            k_cache_ptr, k_scale_ptr, slot_X1, r_R, head_X < K, is_XR, a_XR, b_XR,
            D, R, LARGEST, SMALLEST_SCALE,
        )  # fmt: skip
        a_XR, b_XR = _load(v_ptr + token * v_stride, where_XR, is_XR, R)
        _write(
            v_cache_ptr, v_scale_ptr, slot_X1, r_R, head_X < K, is_XR, a_XR, b_XR,
            D, R, LARGEST, SMALLEST_SCALE,
        )  # fmt: skip


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


def triton_rms_norm(
    x: Tensor, weight_E: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """fused_kernels.rms_norm, by the kernel."""
    E = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    total = torch.empty_like(x, dtype=torch.float32)
    rms_norm_kernel[(x.numel() // E,)](
        out, total, x, x if residual is None else residual.contiguous(), weight_E, eps,
        E=E, E_PAD=triton.next_power_of_2(E), HAS_RESIDUAL=residual is not None,
    )  # fmt: skip
    return out, total


def triton_rope_and_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    slot_mapping_T: Tensor,
    k_scale_NKP: Tensor | None = None,
    v_scale_NKP: Tensor | None = None,
) -> Tensor:
    """fused_kernels.rope_and_write, by the kernel."""
    T, H, D = q_THD.shape
    _, K, P, _ = k_cache_NKPD.shape
    q_THD, k_TKD, v_TKD = (
        x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (q_THD, k_TKD, v_TKD)
    )
    out_THD = q_THD.new_empty(T, H, D)
    heads = min(triton.next_power_of_2(H), ROPE_HEADS)
    is_quantized = k_scale_NKP is not None
    scales = (k_scale_NKP, v_scale_NKP) if is_quantized else (k_cache_NKPD, v_cache_NKPD)
    rope_and_write_kernel[(T, cdiv(H, heads) + cdiv(K, heads))](
        out_THD, k_cache_NKPD, v_cache_NKPD, *scales, q_THD, k_TKD, v_TKD, cos_TR, sin_TR,
        slot_mapping_T, q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0),
        H=H, K=K, D=D, P=P, R=D // 2, R_PAD=triton.next_power_of_2(D // 2), HEADS=heads,
        LARGEST=LARGEST.get(k_cache_NKPD.dtype, 0), SMALLEST_SCALE=SMALLEST_SCALE,
    )  # fmt: skip
    return out_THD


def triton_silu_mul(gate_up: Tensor) -> Tensor:
    """fused_kernels.silu_mul, by the kernel."""
    gate_up = gate_up.contiguous()
    F = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], F)
    grid = (out.numel() // F, cdiv(F, SILU_BLOCK))
    silu_mul_kernel[grid](out, gate_up, F=F, BLOCK=SILU_BLOCK)
    return out
