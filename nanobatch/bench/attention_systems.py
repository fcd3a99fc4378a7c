"""One attention problem in several systems: ours on packed queries and a paged cache, torch's
on dense keys and values of the same numbers.

What a dense layout reads in one run, the paged one gathers from blocks that lie anywhere: the
peers show what that costs. Used by `bench.py kernels` and the sweep of launches (gpu/sweep.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from nanobatch.attention import paged_attention
from nanobatch.batch import Batch, Row, pack
from nanobatch.utils.arithmetic import cdiv

BLOCK_SIZE = 16
OURS = "nanobatch"
Flex = Callable[..., Tensor]


class AttentionInputs(NamedTuple):
    """The same queries, keys and values twice: packed with a paged cache, and dense."""

    q_THD: Tensor
    k_cache_NKPD: Tensor
    v_cache_NKPD: Tensor
    batch: Batch
    q_SHTD: Tensor
    k_SKLD: Tensor
    v_SKLD: Tensor


def attention_inputs(
    shape: tuple[int, int, int],
    num_seqs: int,
    query_len: int,
    seq_len: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> AttentionInputs:
    """Random inputs; the blocks of a sequence lie scattered over the pool."""
    H, K, D = shape
    S, L, P = num_seqs, seq_len, BLOCK_SIZE
    num_blocks = cdiv(L, P)
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    block_ids = torch.randperm(S * num_blocks, generator=torch.Generator().manual_seed(seed))
    tables_SB = block_ids.view(S, num_blocks)
    rows = [Row([0] * query_len, L - query_len, table) for table in tables_SB.tolist()]
    q_THD = randn(S * query_len, H, D)
    caches = [randn(S * num_blocks, K, P, D) for _ in range(2)]
    dense = [
        cache[tables_SB.to(device)].transpose(1, 2).flatten(2, 3)[:, :, :L].contiguous()
        for cache in caches
    ]
    q_SHTD = q_THD.view(S, query_len, H, D).transpose(1, 2).contiguous()
    return AttentionInputs(q_THD, *caches, pack(rows, P, device), q_SHTD, *dense)


def attention_systems(
    inputs: AttentionInputs, flex: Flex | None
) -> dict[str, Callable[[], Tensor]]:
    """Ours and its peers on the same numbers; each call gives [S, H, T, D].

    Args:
        flex: flex_attention, compiled or not; None leaves it out.
    """
    x = inputs
    scale = x.q_THD.shape[-1] ** -0.5
    S, _, query_len, _ = x.q_SHTD.shape
    is_prefill = query_len > 1
    options = {"scale": scale, "enable_gqa": True}

    def paged() -> Tensor:
        out_THD = paged_attention(x.q_THD, x.k_cache_NKPD, x.v_cache_NKPD, x.batch, scale=scale)
        return out_THD.unflatten(0, (S, query_len)).transpose(1, 2)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(
            x.q_SHTD, x.k_SKLD, x.v_SKLD, is_causal=is_prefill, **options
        )

    systems = {OURS: paged, "SDPA": sdpa}
    if flex is not None:
        mask = None
        if is_prefill:

            def is_before(b, h, query, key):
                return query >= key

            mask = create_block_mask(
                is_before, None, None, query_len, query_len, device=x.q_THD.device
            )
        systems["FlexAttention"] = lambda: flex(
            x.q_SHTD, x.k_SKLD, x.v_SKLD, block_mask=mask, **options
        )
    return systems
