"""The backend "c": every operation in C where there is a kernel for it, else in torch.

    rms_norm, silu_mul, rope_and_write, top_ids     kernels.c
    paged_attention    sequences with one query     kernels.c, which gathers nothing
                       with several                 prefill.c, with AMX and in bfloat16
    prepack            products                     matmul.c, with AMX and in bfloat16

Always holds: the results are those of torch, to the rounding of the number format.

Source: see extensions/cpu/kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanobatch.attention import TorchBackend
from nanobatch.batch import Batch
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.cpu.library import ELEMENTS
from nanobatch.extensions.cpu.products import prepack
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import AttentionArgs


class CBackend(TorchBackend):
    """torch's backend, with C in place of what C has kernels for."""

    name = "c"

    @classmethod
    def choose(
        cls, device: torch.device, dtype: torch.dtype, is_asked: bool
    ) -> CBackend | None:
        """This backend, if it can compute this number format here; else None, with a warning
        where the reason is that C cannot be compiled.

        Raises:
            ValueError: is_asked, so attention_backend is "c", and it cannot.
        """
        why = "it computes on a CPU" if device.type != "cpu" else cpu_kernels.why_none(dtype)
        if why is None:
            return cls()
        if is_asked:
            raise ValueError(f"attention_backend is 'c', which is not available: {why}")
        if dtype in ELEMENTS:
            cpu_kernels.warn_once(why)
        return None

    def prepack(self, decoder: nn.Module) -> None:
        """See products.prepack."""
        prepack(decoder)

    def rms_norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Ops.rms_norm."""
        kernels = cpu_kernels.elementwise(x_TE, weight_E) or super()
        return kernels.rms_norm(x_TE, weight_E, eps, residual_TE)

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Ops.silu_mul."""
        kernels = cpu_kernels.elementwise(gate_up_TF) or super()
        return kernels.silu_mul(gate_up_TF)

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
        kernels = cpu_kernels.rope_and_write(cache.keys, q_THD, k_TKD, v_TKD) or super()
        return kernels.rope_and_write(
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, cache, slot_mapping_T
        )

    def top_ids(self, x_SV: Tensor, k: int) -> Tensor:
        """See Ops.top_ids."""
        kernels = cpu_kernels.elementwise(x_SV) or super()
        return kernels.top_ids(x_SV, k)

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, batch: Batch, args: AttentionArgs
    ) -> Tensor:
        """See TorchBackend.paged_attention."""
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        q_THD = q_THD.contiguous()
        decodes_left, prefills_left = True, batch.max_query_len > 1
        if args.softcap is None:
            decodes_left = not _decode(q_THD, cache, batch, args, out_THD)
            prefills_left = prefills_left and not _prefill(q_THD, cache, batch, args, out_THD)
        if decodes_left or prefills_left:
            self.attend_in_groups(
                q_THD, cache, batch, args, out_THD, decodes_left, prefills_left
            )
        return out_THD


def _decode(
    q_THD: Tensor, cache: KVCache, batch: Batch, args: AttentionArgs, out_THD: Tensor
) -> bool:
    """Attention of those with one query, if there is a kernel; returns whether."""
    kernels = cpu_kernels.paged_attention(q_THD, cache.keys)
    if kernels is None:
        return False
    window = args.sliding_window
    rows = batch.once(("decodes", window), lambda: decodes(batch, window))
    kernels.paged_decode(q_THD, cache, *rows, args.scale, out_THD)
    return True


def _prefill(
    q_THD: Tensor, cache: KVCache, batch: Batch, args: AttentionArgs, out_THD: Tensor
) -> bool:
    """Attention of those with several queries, if there is a kernel; returns whether."""
    kernels = cpu_kernels.paged_prefill(q_THD, cache.keys)
    if kernels is None:
        return False
    max_len = cpu_kernels.MAX_PREFILL_ROWS * cache.keys.shape[1] // q_THD.shape[1]
    tables_SB, pieces_I4 = batch.once(("pieces", max_len), lambda: pieces(batch, max_len))
    window = args.sliding_window
    kernels.paged_prefill(q_THD, cache, tables_SB, pieces_I4, window, args.scale, out_THD)
    return True


def decodes(batch: Batch, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the sequences with one query: block tables, token, first and end of what it sees."""
    is_decode_S = batch.query_start_loc.diff() == 1
    end_S = batch.seq_lens_S[is_decode_S].int()
    start_S = torch.zeros_like(end_S) if window is None else (end_S - window).clamp(min=0)
    token_S = batch.query_start_loc[:-1][is_decode_S].long()
    return batch.block_tables_SB[is_decode_S].int(), token_S, start_S, end_S


def pieces(batch: Batch, max_len: int) -> tuple[Tensor, Tensor]:
    """Of the sequences with several queries: all block tables, and int32 [I, 4] pieces of at
    most max_len queries: sequence, first token, number of tokens, position of the first.

    The last pieces of a sequence see the most keys: they come first.
    """
    starts = batch.query_start_loc.tolist()
    found = []
    for row, seq_len in enumerate(batch.seq_lens_S.tolist()):
        start, end = starts[row], starts[row + 1]
        if end - start > 1:
            for first in range(start, end, max_len):
                found.append((row, first, min(max_len, end - first), seq_len - end + first))
    found.sort(key=lambda piece: piece[3], reverse=True)
    return batch.block_tables_SB.int(), torch.tensor(found, dtype=torch.int32).view(-1, 4)
