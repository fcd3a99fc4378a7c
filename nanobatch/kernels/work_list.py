"""The work list: which query tokens and keys each program of an attention launch takes.

A *query block* is as many query tokens of one sequence as a program has rows for. Where its
keys are many, they are cut into runs of tiles, the *splits*, and each run is a program. Three
decodes and a chunk of a prompt, with 2 query tokens a program:

    sequence    s0          s1       s2        s3
    queries     1           1        3         1
    tiles       ########    ##       ###       #

    items       s0, 0, 0, 2    ####      (sequence, first query, split, number of splits)
                s0, 0, 1, 2    ####
                s2, 2, 0, 1    ###       those that are split come first; then the longest,
                s2, 0, 0, 1    ##        so that no long one begins when the others are done
                s1, 0, 0, 1    ##
                s3, 0, 0, 1    #

The host makes the list once a batch, and knows all lengths then (pack). A captured step of
decodes is replayed while its sequences grow: its list comes from the batch's shape alone, with
the same number of splits for each (equal_work).

Always holds: each query token is in one block, and each tile that it needs in one item; the
items of a block are neighbours in the list, in order.

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: Flash-Decoding (Dao et al., 2023) for
splits, FlashInfer (Ye et al., 2025) for a list that balances them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nanobatch.kernels.launch_config import MAX_SPLITS, Chip, LaunchConfig
from nanobatch.utils.arithmetic import cdiv

MIN_TILES = 4  # of a split: fewer are not worth writing and reading what was found
# How fine work is cut: programs for each multiprocessor, times their rows. More balance better,
# and write more partial results: 35 MB on an H200 at most, with heads of 128.
ROWS_PER_SM = 256


class Work(NamedTuple):
    """What the programs of one launch do.

    items_W4: int32 [W, 4]: sequence, first query (counted in its sequence), split, and number
        of splits of this query block. num_parts: how many items, the first, are of blocks with
        several splits.
    """

    items_W4: np.ndarray
    num_parts: int

    def of(self, seqs: np.ndarray) -> Work:
        """The same for these sequences of a batch, where the list names the first of them 0."""
        items_W4 = self.items_W4.copy()
        items_W4[:, 0] = seqs[items_W4[:, 0]]
        return self._replace(items_W4=items_W4)


def query_blocks(query_lens: Sequence[int], block_q: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence and first query of each query block, in order of sequences."""
    query_lens_S = np.asarray(query_lens)
    num_blocks_S = cdiv(query_lens_S, block_q)
    seq_X = np.repeat(np.arange(len(query_lens_S)), num_blocks_S)
    first_block_S = num_blocks_S.cumsum() - num_blocks_S
    return seq_X, (np.arange(len(seq_X)) - first_block_S[seq_X]) * block_q


def equal_work(launch: LaunchConfig, query_lens: Sequence[int]) -> Work:
    """All query blocks in order, each with launch.num_splits splits."""
    seq_X, first_X = query_blocks(query_lens, launch.block_q)
    items_W4 = _items(seq_X, first_X, np.full(len(seq_X), launch.num_splits))
    return Work(items_W4, len(items_W4) if launch.num_splits > 1 else 0)


def balanced_work(
    launch: LaunchConfig,
    query_lens_S: np.ndarray,
    seq_lens_S: np.ndarray,
    num_kv_heads: int,
    chip: Chip,
    sliding_window: int | None = None,
) -> Work:
    """Work cut so that no program has much more than its share of the chip's, longest first.

    Args:
        query_lens_S, seq_lens_S: query tokens and keys of each sequence.
        num_kv_heads: K, programs for each item.
        sliding_window: keys that a query sees, its own included; None: all up to it.
    """
    seq_X, first_X = query_blocks(query_lens_S, launch.block_q)
    lens = query_lens_S[seq_X], seq_lens_S[seq_X]
    first_tile_X, end_tile_X = _tiles(launch, first_X, *lens, sliding_window)
    tiles_X = end_tile_X - first_tile_X
    num_programs = cdiv(chip.num_sms * ROWS_PER_SM, launch.block_m)
    share = max(MIN_TILES, cdiv(int(tiles_X.sum()) * num_kv_heads, num_programs))
    splits_X = cdiv(tiles_X, share).clip(1, MAX_SPLITS)
    order_X = np.lexsort((-tiles_X, splits_X == 1))  # by the last of these first
    splits_X = splits_X[order_X]
    items_W4 = _items(seq_X[order_X], first_X[order_X], splits_X)
    return Work(items_W4, int(splits_X[splits_X > 1].sum()))


def _items(seq_X: np.ndarray, first_X: np.ndarray, splits_X: np.ndarray) -> np.ndarray:
    """int32 [W, 4]: the splits of each query block, one after the other."""
    block_W = np.repeat(np.arange(len(seq_X)), splits_X)
    first_item_X = splits_X.cumsum() - splits_X
    split_W = np.arange(len(block_W)) - first_item_X[block_W]
    columns = (seq_X[block_W], first_X[block_W], split_W, splits_X[block_W])
    return np.stack(columns, axis=1).astype(np.int32)


def _tiles(launch: LaunchConfig, first_query, query_len, seq_len, sliding_window: int | None):
    """(first, end) of the tiles that a query block's programs read; numbers or arrays."""
    context_len = seq_len - query_len
    end_query = np.minimum(first_query + launch.block_q, query_len)
    end_tile = cdiv(context_len + end_query, launch.tile)
    if sliding_window is None:
        return np.zeros_like(end_tile), end_tile
    oldest = context_len + first_query - sliding_window + 1
    return np.maximum(oldest, 0) // launch.tile, end_tile


def keys_of_item(
    launch: LaunchConfig,
    item: Sequence[int],
    query_len: int,
    seq_len: int,
    sliding_window: int | None = None,
) -> tuple[int, int]:
    """The key positions that an item's programs read, from the first to end - 1, computed as
    the kernel does; the same twice for one that reads nothing.

    Args:
        item: a row of Work.items_W4. query_len, seq_len: of its sequence.
    """
    _, first_query, split, num_splits = map(int, item)
    first, end = _tiles(launch, first_query, query_len, seq_len, sliding_window)
    tiles_per_split = cdiv(int(end - first), num_splits)
    first_tile = int(first) + split * tiles_per_split
    end_tile = min(int(end), first_tile + tiles_per_split)
    end_key = max(min(end_tile * launch.tile, seq_len), 0)
    return min(first_tile * launch.tile, end_key), end_key


def keys_of_program(
    launch: LaunchConfig,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    query_block: int,
    split: int = 0,
    sliding_window: int | None = None,
) -> tuple[int, int, int]:
    """What one program of equal_work reads: (sequence, first key, end key).

    Keys are positions; first == end for a program that reads nothing. It reads
    2 * (end - first) * head_dim numbers of the cache: keys and values of one KV head.
    """
    query_lens = np.diff(query_start_loc)
    seq_X, first_X = query_blocks(query_lens, launch.block_q)
    seq = int(seq_X[query_block])
    item = (seq, first_X[query_block], split, launch.num_splits)
    lens = int(query_lens[seq]), int(seq_lens[seq])
    return seq, *keys_of_item(launch, item, *lens, sliding_window)
