"""The masks that keep requests apart, for the same ragged batch in different layouts.

Two prompts of 2 and 3 tokens. 1: the query (row) sees the key (column).

    padded, left: a matrix each      block-diagonal: one matrix over the packed tokens
        . 1 .     1 . .                  1 . . . .
        . 1 .     1 1 .                  1 1 . . .
        . 1 1     1 1 1                  . . 1 . .
        ^ pad                            . . 1 1 .
                                         . . 1 1 1

(A padded query row, the first of the left matrix, sees the first real key: a softmax over
nothing would be NaN. Nobody reads its result.)

Every mask is boolean, True where the query sees the key, and is the very tensor that
`attention.masked_attention` runs with.

Always holds: a query sees itself and keys before it, of its own request only, and with a
sliding window of W exactly the last W of them.

Taught in notebooks/04_ragged_batches_and_masks.ipynb.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def causal_mask(query_len: int, seq_len: int, sliding_window: int | None = None) -> Tensor:
    """bool [query_len, seq_len]: the queries are the last of the keys' positions.

    Aligned at the bottom right: with 2 queries and 4 keys, `1 1 1 .` over `1 1 1 1`.
    """
    query_pos_T1 = torch.arange(seq_len - query_len, seq_len).unsqueeze(1)
    return visible(query_pos_T1, torch.arange(seq_len).unsqueeze(0), sliding_window)


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


def wasted_share(mask: Tensor, seq_lens: Sequence[int]) -> float:
    """The share of a mask's scores that is computed for nothing.

    A dense mask of any shape computes every entry; a request of n tokens needs n (n + 1) / 2
    of them (without a window).
    """
    num_needed = sum(n * (n + 1) // 2 for n in seq_lens)
    return 1 - num_needed / mask.numel()
