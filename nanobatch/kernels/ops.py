"""The operations between the matrix products: RMSNorm, RoPE with the cache write, SiLU, ...

`Ops` has each as a few lines of torch, which say what it means. A subclass has the same
operations as kernels that read and write each number once: TritonOps (kernels/triton_ops.py)
on CUDA, CBackend (extensions/cpu/backend.py) on a CPU. The model and the sampler are given one
such object and call nothing else:

    Ops                the reference          rms_norm, silu_mul, rope_and_write, ...
      TorchBackend     attention.py           + paged_attention
        CBackend       extensions/cpu/        all of it in C, and weights laid out for the CPU
      TritonOps        kernels/triton_ops.py
        TritonBackend  paged_attention_kernel.py   + paged_attention

Always holds: kernel and reference agree to the rounding of their number format; a token with
slot -1 is written nowhere (invariant 14).

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: RMSNorm (Zhang and Sennrich, 2019);
RoPE (Su et al., 2021) in the half-split form of Hugging Face's Llama; SwiGLU (Shazeer, 2020).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from nanobatch.attention_masks import causal_mask
from nanobatch.config import EngineConfig
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.utils.arithmetic import next_power_of_two

NUM_CHUNKS = 16  # of a row of logits, in largest()
HAS_TRITON = importlib.util.find_spec("triton") is not None


class AttentionArgs(NamedTuple):
    """One layer's settings of attention: see attention.paged_attention."""

    sliding_window: int | None
    scale: float
    softcap: float | None = None


class Ops:
    """The operations in plain torch: the reference, on any device."""

    name = "torch"

    def __repr__(self) -> str:
        return repr(self.name)

    def prepack(self, decoder: nn.Module) -> None:
        """Lay a decoder's weights out for this backend, in place; torch has nothing to do."""

    def warm_up(
        self,
        layers: Sequence[nn.Module],
        caches: Sequence[KVCache],
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> None:
        """Compile all that a GPU will be given (kernels/warm_up.py); torch has nothing to do.

        Args: see warm_up.try_launches.
        """

    def rms_norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the residual, if any; scale each row to root mean square 1, then by weight.

        Rows are along the last dimension, whatever stands before it. The residual is float32
        in a bfloat16 model too: it sums up all layers, and would be rounded by each.

        Returns:
            the normed rows [T, E], and the sum before the norm, float32: the next residual.
        """
        sum_TE = x_TE.float() if residual_TE is None else x_TE + residual_TE
        normed_TE = F.rms_norm(sum_TE, weight_E.shape, weight_E.float(), eps)
        return normed_TE.to(x_TE.dtype), sum_TE

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """SiLU of the first half of each row times the second half."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return F.silu(gate) * up

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
        """Rotate queries and keys, write keys and values to their slots; return the queries."""
        cache.write(apply_rope(k_TKD, cos_TR, sin_TR), v_TKD, slot_mapping_T)
        return apply_rope(q_THD, cos_TR, sin_TR)

    def top_ids(self, x_SV: Tensor, k: int) -> Tensor:
        """int64 [S, k]: where each row's k largest numbers are, in no order."""
        return x_SV.argmax(dim=-1, keepdim=True) if k == 1 else largest(x_SV, k)[1]

    def grouped_matmul(self, x_MK: Tensor, weight_XNK: Tensor, counts_X: Tensor) -> Tensor:
        """[M, N]: rows times their expert's weight, transposed: the first counts_X[0]
        rows times weight 0, the next counts_X[1] times weight 1, and so on.

        Args:
            x_MK: rows in the order of their experts.
            weight_XNK: one matrix for each expert.
            counts_X: int64, rows of each; they sum to M.
        """
        out_MN = x_MK.new_empty(len(x_MK), weight_XNK.shape[1])
        start = 0
        for expert, count in enumerate(counts_X.tolist()):
            if count:
                rows = slice(start, start + count)
                out_MN[rows] = F.linear(x_MK[rows], weight_XNK[expert])
                start += count
        return out_MN


REFERENCE = Ops()


def largest(x_SV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Each row's k largest numbers and where they are, [S, k], the largest first."""
    # On CUDA topk sorts whole rows if they are few and long (torch's TensorTopK.cpp).
    num_rows, row_size = x_SV.shape
    if x_SV.is_cuda and num_rows <= 10 and row_size >= 100_000 and k <= row_size // NUM_CHUNKS:
        return largest_of_chunks(x_SV, k)
    return x_SV.topk(k)


def largest_of_chunks(x_SV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As largest(), in two steps: those of each chunk of a row, then the largest of these.

    k: at most row size // NUM_CHUNKS.
    """
    chunk_size = x_SV.shape[1] // NUM_CHUNKS
    num_in_chunks = NUM_CHUNKS * chunk_size
    chunks_SCX = x_SV[:, :num_in_chunks].unflatten(1, (NUM_CHUNKS, chunk_size))
    values_SCX, ids_SCX = chunks_SCX.topk(k)
    start_C1 = torch.arange(0, num_in_chunks, chunk_size, device=x_SV.device).unsqueeze(1)
    ids_SX = (ids_SCX + start_C1).flatten(1)
    # The few numbers behind the last chunk are candidates too.
    rest = torch.arange(num_in_chunks, x_SV.shape[1], device=x_SV.device)
    ids_SX = torch.cat((ids_SX, rest.expand(len(x_SV), -1)), dim=1)
    values_SX = torch.cat((values_SCX.flatten(1), x_SV[:, num_in_chunks:]), dim=1)
    values_SX, where_SX = values_SX.topk(k)
    return values_SX, ids_SX.gather(1, where_SX)


def layer_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    bias_E: Tensor,
    eps: float,
    residual_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As rms_norm, but each row is moved to mean 0 first, and by a bias last. In torch only."""
    sum_TE = x_TE.float() if residual_TE is None else x_TE + residual_TE
    weights = weight_E.float(), bias_E.float()
    return F.layer_norm(sum_TE, weight_E.shape, *weights, eps).to(x_TE.dtype), sum_TE


def gelu_mul(gate_up_TF: Tensor) -> Tensor:
    """GELU (by tanh) of the first half of each row times the second half. In torch only."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate each pair (i, i + R) of a head's elements by its token's angle i; R = D / 2."""
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    a_THR, b_THR = x_THD.chunk(2, dim=-1)
    return torch.cat(
        (a_THR * cos_T1R - b_THR * sin_T1R, b_THR * cos_T1R + a_THR * sin_T1R), dim=-1
    ).to(x_THD.dtype)


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
        mask = causal_mask(q_SHTD.shape[2], k_SKLD.shape[2], device=q_SHTD.device)
    group_size = q_SHTD.shape[1] // k_SKLD.shape[1]
    k_SHLD, v_SHLD = (x.repeat_interleave(group_size, dim=1) for x in (k_SKLD, v_SKLD))
    scores_SHTL = (q_SHTD @ k_SHLD.transpose(2, 3)).float() * scale
    scores_SHTL = softcap * torch.tanh(scores_SHTL / softcap)
    if mask is not None:
        scores_SHTL = scores_SHTL.masked_fill(~mask, float("-inf"))
    return scores_SHTL.softmax(dim=-1).to(v_SHLD.dtype) @ v_SHLD


def check_triton(on_cuda: bool, block_size: int) -> None:
    """Raise ValueError unless the Triton kernels can run on such a device and block size."""
    if not HAS_TRITON:
        raise ValueError("attention_backend is 'triton', which is not installed; use 'torch'")
    is_power_of_two = next_power_of_two(block_size) == block_size
    if not is_power_of_two:
        raise ValueError(f"block_size is {block_size}; the Triton kernels need a power of two")
    import numpy
    import triton

    if not on_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(
            "attention_backend is 'triton' and the device is 'cpu'; set TRITON_INTERPRET=1 "
            "before triton is imported, or use 'torch'"
        )
    triton_version, numpy_version = (
        tuple(map(int, x.__version__.split(".")[:2])) for x in (triton, numpy)
    )
    if not on_cuda and triton_version < (3, 7) and numpy_version >= (2, 4):
        raise ValueError(
            f"numpy is {numpy.__version__}; it must be < 2.4 for the interpreter of triton "
            f"{triton.__version__}: install numpy<2.4 or triton>=3.7, or use 'torch'"
        )
