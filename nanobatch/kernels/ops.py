"""What lies between the matrix products: RMSNorm, RoPE and the write into the cache, SiLU.

Each operation stands here as a few lines of torch, which say what it means, and twice as a
kernel that reads and writes each number once: in Triton (kernels/triton_ops.py), used on CUDA,
and in C (cpu/kernels.c), used on a CPU. Where a kernel cannot be had its reference runs.

Always holds: kernel and reference agree to the rounding of their number format; a token with
slot -1 is written nowhere (invariant 14).

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: RMSNorm (Zhang and Sennrich, 2019);
RoPE (Su et al., 2021) in the half-split form of Hugging Face's Llama; SwiGLU (Shazeer, 2020).
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor

from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.quantized_cache import as_bytes, quantize

HAS_TRITON = importlib.util.find_spec("triton") is not None


def rms_norm(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, if any, and scale each row to root mean square 1, then by weight.

    Rows are along the last dimension, whatever stands before it. The residual is float32 also
    in a bfloat16 model: it collects the sum of all layers, and would be rounded by each.

    Returns:
        the normed rows [T, E], and the sum that went in, float32: the next residual.
    """
    if x_TE.is_cuda and HAS_TRITON:
        from nanobatch.kernels.triton_ops import triton_rms_norm

        return triton_rms_norm(x_TE, weight_E, eps, residual_TE)
    kernels = cpu_kernels.elementwise(x_TE, weight_E)
    if kernels is not None:
        return kernels.rms_norm(x_TE, weight_E, eps, residual_TE)
    sum_TE = x_TE.float() if residual_TE is None else x_TE + residual_TE
    normed_TE = F.rms_norm(sum_TE, weight_E.shape, weight_E.float(), eps)
    return normed_TE.to(x_TE.dtype), sum_TE


def layer_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    bias_E: Tensor,
    eps: float,
    residual_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As rms_norm, but each row is moved to mean 0 first, and by a bias last. torch's alone."""
    sum_TE = x_TE.float() if residual_TE is None else x_TE + residual_TE
    weights = weight_E.float(), bias_E.float()
    return F.layer_norm(sum_TE, weight_E.shape, *weights, eps).to(x_TE.dtype), sum_TE


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate each pair (i, i + R) of a head's elements by its token's angle i; R = D / 2."""
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    a_THR, b_THR = x_THD.chunk(2, dim=-1)
    return torch.cat(
        (a_THR * cos_T1R - b_THR * sin_T1R, b_THR * cos_T1R + a_THR * sin_T1R), dim=-1
    ).to(x_THD.dtype)


def write_to_cache(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    slot_mapping_T: Tensor,
    k_scale_NKP: Tensor | None = None,
    v_scale_NKP: Tensor | None = None,
) -> None:
    """Put each token's keys and values into its slot of the caches. Slot -1 writes nothing.

    Caches of 8 bits come with their scales.
    """
    _, K, P, D = k_cache_NKPD.shape
    is_real_T = slot_mapping_T >= 0
    if not is_real_T.all():  # -1 // P would be the last block: an easy slip
        slot_mapping_T = slot_mapping_T[is_real_T]
        k_TKD, v_TKD = k_TKD[is_real_T], v_TKD[is_real_T]
    block_T, offset_T = slot_mapping_T // P, slot_mapping_T % P
    # Rows of D elements: head k of block n has its P slots in a run, at (n * K + k) * P.
    row_TK = (block_T.unsqueeze(1) * K + torch.arange(K, device=block_T.device)) * P
    rows = (row_TK + offset_T.unsqueeze(1)).flatten()
    for x_TKD, cache_NKPD, scale_NKP in (
        (k_TKD, k_cache_NKPD, k_scale_NKP),
        (v_TKD, v_cache_NKPD, v_scale_NKP),
    ):
        if scale_NKP is not None:
            x_TKD, scale_TK = quantize(x_TKD, cache_NKPD.dtype)
            scale_NKP.view(-1).index_copy_(0, rows, scale_TK.flatten())
        as_bytes(cache_NKPD).view(-1, D).index_copy_(0, rows, as_bytes(x_TKD).reshape(-1, D))


def rope_and_write(
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
    """Rotate queries and keys, write keys and values to their slots; return the queries."""
    scales = (k_scale_NKP, v_scale_NKP)
    if q_THD.is_cuda and HAS_TRITON:
        from nanobatch.kernels.triton_ops import triton_rope_and_write

        return triton_rope_and_write(
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, k_cache_NKPD, v_cache_NKPD, slot_mapping_T,
            *scales,
        )  # fmt: skip
    kernels = cpu_kernels.rope_and_write(k_cache_NKPD, q_THD, k_TKD, v_TKD)
    if kernels is not None:
        return kernels.rope_and_write(
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, k_cache_NKPD, v_cache_NKPD, slot_mapping_T,
            *scales,
        )  # fmt: skip
    k_TKD = apply_rope(k_TKD, cos_TR, sin_TR)
    write_to_cache(k_TKD, v_TKD, k_cache_NKPD, v_cache_NKPD, slot_mapping_T, *scales)
    return apply_rope(q_THD, cos_TR, sin_TR)


def silu_mul(gate_up_TF: Tensor) -> Tensor:
    """SiLU of the first half of each row times the second half."""
    if gate_up_TF.is_cuda and HAS_TRITON:
        from nanobatch.kernels.triton_ops import triton_silu_mul

        return triton_silu_mul(gate_up_TF)
    kernels = cpu_kernels.elementwise(gate_up_TF)
    if kernels is not None:
        return kernels.silu_mul(gate_up_TF)
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_mul(gate_up_TF: Tensor) -> Tensor:
    """GELU (by tanh) of the first half of each row times the second half. torch's alone."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def top_ids(x_SV: Tensor, k: int) -> Tensor:
    """int64 [S, k]: where each row's k largest numbers are, in no order."""
    kernels = cpu_kernels.elementwise(x_SV)
    if kernels is not None:
        return kernels.top_ids(x_SV, k)
    return x_SV.argmax(dim=-1, keepdim=True) if k == 1 else x_SV.topk(k).indices
