"""The masks that keep requests apart, for the same ragged batch in different layouts.

Two prompts of 2 and 3 tokens. 1: the query (row) sees the key (column).

    padded, left: a matrix each      block-diagonal: one matrix over the packed tokens
        . 1 .     1 . .                  1 . . . .
        . 1 .     1 1 .                  1 1 . . .
        . 1 1     1 1 1                  . . 1 . .
        ^ pad                            . . 1 1 .
                                         . . 1 1 1

(The first row of the left matrix is a padded query. It sees the first real key, since a softmax
over no keys would be NaN; its result is not used.)

The block-diagonal mask has two more forms. With a cached prefix there are fewer rows than
columns: a request's rows are its last positions. In the block-sparse form only tiles that hold
a 1 are computed, and these as a whole:

    paged: 1 new token, 2 cached;    block-sparse: in tiles of 2 x 2
    then a prompt of 3
        1 1 1 . . .                      1 . |     |
        . . . 1 . .                      1 1 |     |
        . . . 1 1 .                          | 1 . |
        . . . 1 1 1                          | 1 1 |
                                             | 1 1 | 1

Every dense mask is boolean, True where the query sees the key, and is the very tensor that
`attention.masked_attention` runs with. A block-sparse one is the BlockMask that torch's
flex_attention takes.

Always holds: a query sees itself and keys before it, of its own request only, and with a
sliding window of W exactly the last W of them.

Taught in notebooks/04_ragged_batches_and_masks.ipynb. Sources: FlashAttention's variable-length
interface (Dao, 2023); FlexAttention (Dong et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanobatch.utils.arithmetic import keys_seen

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def visible(query_pos: Tensor, key_pos: Tensor, sliding_window: int | None = None) -> Tensor:
    """Whether a query at one position sees a key at another: the rule behind every mask.

    Args:
        query_pos, key_pos: integer positions within one request, of shapes that broadcast
            ([T, 1] and [1, L] give [T, L]).
        sliding_window: keys that a query sees, itself included; None: all before it.
    """
    sees = key_pos <= query_pos
    if sliding_window is not None:
        sees = sees & (key_pos > query_pos - sliding_window)
    return sees


def causal_mask(
    query_len: int,
    seq_len: int,
    sliding_window: int | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """bool [query_len, seq_len]: the queries are the last of the keys' positions.

    Aligned at the bottom right: with 2 queries and 4 keys, `1 1 1 .` over `1 1 1 1`.
    """
    pos_L = torch.arange(seq_len, device=device)
    query_pos_T1 = pos_L[seq_len - query_len :].unsqueeze(1)
    return visible(query_pos_T1, pos_L.unsqueeze(0), sliding_window)


def padded_mask(
    seq_lens: Sequence[int], max_len: int | None = None, sliding_window: int | None = None
) -> Tensor:
    """bool [S, 1, L, L] for a batch padded on the left to L = max_len (or the longest)."""
    max_len = max(seq_lens) if max_len is None else max_len
    num_pad_S11 = (max_len - torch.tensor(seq_lens)).view(-1, 1, 1)
    pos_SL = torch.arange(max_len) - num_pad_S11[:, 0]
    # A pad's position is negative; as a query it is counted as position 0.
    query_pos_SL1 = pos_SL.clamp(min=0).unsqueeze(2)
    key_pos_S1L = pos_SL.unsqueeze(1)
    mask_SLL = visible(query_pos_SL1, key_pos_S1L, sliding_window) & (key_pos_S1L >= 0)
    return mask_SLL.unsqueeze(1)


def block_diagonal_mask(seq_lens: Sequence[int], sliding_window: int | None = None) -> Tensor:
    """bool [T, T] over packed tokens, T = sum(seq_lens): causal within each request."""
    lens_S = torch.tensor(seq_lens)
    request_of_T = torch.repeat_interleave(torch.arange(len(seq_lens)), lens_S)
    pos_T = torch.cat([torch.arange(n) for n in seq_lens])
    same_request_TT = request_of_T.unsqueeze(1) == request_of_T.unsqueeze(0)
    return same_request_TT & visible(pos_T.unsqueeze(1), pos_T.unsqueeze(0), sliding_window)


def paged_mask(
    query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int | None = None
) -> Tensor:
    """bool [T, L]: packed queries over packed keys, where part of the keys may be cached.

    Args:
        query_lens: tokens that each request computes in this step; T is their sum.
        seq_lens: keys of each request after the step, cached ones included; L is their sum.
        sliding_window: keys that a query sees, itself included; None: all before it.

    Within a request the queries are the last positions: aligned at the bottom right.

    Raises:
        ValueError: a request computes more tokens than it has keys.
    """
    _check_lens(query_lens, seq_lens)
    mask_TL = torch.zeros(sum(query_lens), sum(seq_lens), dtype=torch.bool)
    first_query = first_key = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        rows = slice(first_query, first_query + query_len)
        columns = slice(first_key, first_key + seq_len)
        mask_TL[rows, columns] = causal_mask(query_len, seq_len, sliding_window)
        first_query, first_key = rows.stop, columns.stop
    return mask_TL


def block_sparse_mask(
    seq_lens: Sequence[int],
    block_size: int = 128,
    sliding_window: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """The block-diagonal mask as FlexAttention takes it: which tiles to compute, and a rule.

    Args:
        seq_lens: tokens of each request; T is their sum.
        block_size: tokens along a side of a tile (not of a cache block). What
            flex_attention's compiled kernel takes depends on the device; 128 always goes.
        sliding_window: keys that a query sees, itself included; None: all before it.
        device: where the tensors go.

    Returns:
        for flex_attention(q, k, v, block_mask=...) with q, k, v of [1, heads, T, D].
        Making it takes T * T booleans for a moment.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    lens_S = torch.tensor(seq_lens, device=device)
    request_of_T = torch.arange(len(seq_lens), device=device).repeat_interleave(lens_S)
    pos_T = torch.cat([torch.arange(n, device=device) for n in seq_lens])

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_request = request_of_T[query] == request_of_T[key]
        return same_request & visible(pos_T[query], pos_T[key], sliding_window)

    T = len(pos_T)
    return create_block_mask(sees, None, None, T, T, device=device, BLOCK_SIZE=block_size)


def computed_scores(mask: Tensor | BlockMask) -> int:
    """Scores that attention computes with this mask: every entry of a dense one, every entry
    of the tiles that a block-sparse one names."""
    if isinstance(mask, Tensor):
        return mask.numel()
    num_tiles = int(mask.kv_num_blocks.sum())  # tiles in which some entries are masked
    if mask.full_kv_num_blocks is not None:  # tiles in which none is
        num_tiles += int(mask.full_kv_num_blocks.sum())
    tile_rows, tile_columns = mask.BLOCK_SIZE
    return num_tiles * tile_rows * tile_columns


def needed_scores(
    query_lens: Sequence[int], seq_lens: Sequence[int], sliding_window: int | None = None
) -> int:
    """Scores that any layout has to compute: one for each query and key that it sees.

    Args: see paged_mask, whose number of True entries this is.
    """
    _check_lens(query_lens, seq_lens)
    pairs = zip(query_lens, seq_lens, strict=True)
    return sum(keys_seen(n - query_len, query_len, sliding_window)[1] for query_len, n in pairs)


def wasted_share(
    mask: Tensor | BlockMask,
    seq_lens: Sequence[int],
    sliding_window: int | None = None,
    query_lens: Sequence[int] | None = None,
) -> float:
    """The share of a mask's scores that is computed and not needed.

    With a dense mask every entry is computed, with a BlockMask whole tiles. A request of n
    tokens needs n (n + 1) / 2 scores, fewer with a window or where part is cached.

    Args:
        mask: dense, or what block_sparse_mask gave.
        seq_lens, sliding_window: of which the mask was made.
        query_lens: tokens that each request computes; None: all of seq_lens.
    """
    query_lens = seq_lens if query_lens is None else query_lens
    return 1 - needed_scores(query_lens, seq_lens, sliding_window) / computed_scores(mask)


def _check_lens(query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """ValueError unless 0 <= query_len <= seq_len for each request."""
    if len(query_lens) != len(seq_lens):
        raise ValueError(
            f"query_lens has {len(query_lens)} requests and seq_lens {len(seq_lens)}; they "
            "must be the same ones"
        )
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 0 <= query_len <= seq_len:
            raise ValueError(
                f"query_lens[{i}] is {query_len} and seq_lens[{i}] is {seq_len}; a request "
                "computes between 0 and all of its tokens"
            )
