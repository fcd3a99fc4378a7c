"""Grouping: which sequences torch attends to together, and where their keys are gathered from.

    block table [7, 2]      cache block 7      gathered keys of one head
                              block 2    ->    [ block 7 | block 2 | ]
                                                 positions 0 ..  seq_len - 1, then the tail

A prompt or a chunk is a group by itself. Sequences with one query token each are sorted, so
that those of similar length share a group. A group is padded to its own longest sequence only.
It is small enough for the gathered keys to be in the CPU's cache still when they are read
(measured for 64 x 1000 tokens: 10-13 ms in groups of 256 blocks, 41-100 ms in one).

Always holds (invariant 14): gathered slots past a sequence's end are set to zero.

Taught in notebooks/05_paged_kv_blocks.ipynb.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanobatch.attention_masks import visible
from nanobatch.batch import Batch
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.utils.arithmetic import cdiv

MAX_GROUP_BLOCKS = 256


@dataclass
class Group:
    """S sequences with T queries each, whose attention is one call.

    tokens: where their queries are among the packed tokens, a slice or int64 [S * T].
    shape: (S, K, B) of the gathered blocks.
    runs: int64 [S * K * B], which (block, head) pairs of the cache to gather.
    num_keys: L, gathered positions that are used; at most B * P.
    mask: bool [S, 1, T, L]; None: plain causal with T == L.
    tail: int64, gathered slots (of S * K * B * P) past their sequence's end, to be zeroed.
    """

    tokens: slice | Tensor
    shape: tuple[int, int, int]
    runs: Tensor
    num_keys: int
    mask: Tensor | None
    tail: Tensor

    def gather(self, cache: KVCache, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[S, K, L, D] twice: the cached keys and values in order of position, in dtype."""
        S, K, B = self.shape
        found = []
        for x in cache.gather(self.runs, dtype):
            P, D = x.shape[1:]
            x.view(-1, D).index_fill_(0, self.tail, 0)
            found.append(x.view(S, K, B * P, D)[:, :, : self.num_keys])
        return tuple(found)


def make_groups(
    batch: Batch,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    decodes: bool,
    prefills: bool,
) -> Iterator[Group]:
    """Sequences with one query in groups of similar length, then each of the others alone.

    Args:
        window: the sliding window, or None.
        decodes, prefills: whether those with one query, and with several, are wanted.
    """
    layout = (num_kv_heads, block_size, window)
    starts = batch.query_start_loc.tolist()
    query_lens_S = batch.query_start_loc.diff()
    first_block_S = _first_visible_block(batch.seq_lens_S, query_lens_S, block_size, window)
    num_blocks = (cdiv(batch.seq_lens_S, block_size) - first_block_S).tolist()
    query_lens = query_lens_S.tolist()
    singles = [seq for seq, query_len in enumerate(query_lens) if query_len == 1]
    singles = sorted(singles, key=lambda seq: num_blocks[seq]) if decodes else []
    while singles:
        seqs = [singles.pop()]  # the longest first: it sets the group's width
        while singles and (len(seqs) + 1) * num_blocks[seqs[0]] <= MAX_GROUP_BLOCKS:
            seqs.append(singles.pop())
        tokens = batch.query_start_loc[seqs].long()
        yield _make_group(batch, seqs, tokens, *layout)
    for seq, query_len in enumerate(query_lens):
        if query_len > 1 and prefills:
            tokens = slice(starts[seq], starts[seq + 1])
            yield _make_group(batch, [seq], tokens, *layout)


def _first_visible_block(
    seq_lens: Tensor, query_lens: Tensor, block_size: int, window: int | None
) -> Tensor:
    """The first block that the window of a sequence's first query reaches."""
    if window is None:
        return torch.zeros_like(seq_lens)
    return (seq_lens - query_lens - window + 1).clamp(min=0) // block_size


def _make_group(
    batch: Batch,
    seqs: list[int],
    tokens: slice | Tensor,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
) -> Group:
    K, P = num_kv_heads, block_size
    seq_len_S1 = batch.seq_lens_S[seqs].long().unsqueeze(1)
    query_len_S1 = batch.query_start_loc.diff()[seqs].unsqueeze(1)
    query_len = int(query_len_S1[0])
    first_block_S1 = _first_visible_block(seq_len_S1, query_len_S1, P, window)
    len_S1 = seq_len_S1 - first_block_S1 * P  # counted from the first gathered position
    num_keys = int(len_S1.max())
    num_blocks = cdiv(num_keys, P)
    device = len_S1.device
    pos_L = torch.arange(num_blocks * P, device=device)

    # Past a sequence's own table any block will do: what is gathered there is zeroed.
    index_SB = first_block_S1 + pos_L[:num_blocks]
    index_SB = index_SB.clamp(max=batch.block_tables_SB.shape[1] - 1)
    blocks_SB = batch.block_tables_SB[seqs].long().gather(1, index_SB)
    head_K1 = torch.arange(K, device=device).unsqueeze(1)
    runs = (blocks_SB.unsqueeze(1) * K + head_K1).flatten()
    is_tail_SKL = (pos_L >= len_S1).unsqueeze(1).expand(-1, K, -1)
    tail = is_tail_SKL.flatten().nonzero().flatten()

    mask = None
    is_plain_causal = len(seqs) == 1 and query_len == num_keys and window is None
    if not is_plain_causal:
        query_pos_ST = len_S1 - query_len + torch.arange(query_len, device=device)
        mask = visible(query_pos_ST.unsqueeze(2), pos_L[:num_keys], window).unsqueeze(1)
    return Group(tokens, (len(seqs), K, num_blocks), runs, num_keys, mask, tail)
