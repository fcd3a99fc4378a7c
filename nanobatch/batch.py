"""One step's work as packed tensors: no padding between requests, no request objects.

Three requests, block_size 4: r0 decodes its 6th token, r1 computes a prompt of 3, r2 the
second chunk of its prompt.

    rows                 r0    r1            r2
    token_ids_T         [ 9 |  5   8   2  |  7   7 ]        T = 6 tokens, S = 3 sequences
    positions_T         [ 5 |  0   1   2  |  4   5 ]
    query_start_loc     [ 0    1             4       6 ]    each row's start; the end
    seq_lens_S          [ 6    3             6 ]            its keys after the step
    block_tables_SB     [[2 0] [3 -]        [1 5]]          - is padding: any valid id
    slot_mapping_T      [ 1 | 12  13  14  | 20  21 ]        block * block_size + offset
    logits_indices_S    [ 0    3             5 ]            the last token of each row

Always holds (invariant 14): a slot of -1 writes nothing; padding in a block table is a valid
id that no result depends on.

Taught in notebooks/04_ragged_batches_and_masks.ipynb. Source: vLLM's attention metadata,
FlashAttention's variable-length interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING_SLOT = -1  # a token with this slot writes nothing


class Row(NamedTuple):
    """One sequence's share of a step: tokens to compute, and where the sequence lies."""

    token_ids: Sequence[int]
    start: int  # position of the first of these tokens
    block_table: Sequence[int]


@dataclass
class Batch:
    """The packed tensors of one step (shapes: see the module's picture).

    token_ids_T, positions_T, slot_mapping_T, logits_indices_S are int64;
    query_start_loc (S + 1), seq_lens_S, block_tables_SB are int32.
    derived: what attention computes once from the above and uses in every layer.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_start_loc: Tensor
    seq_lens_S: Tensor
    block_tables_SB: Tensor
    logits_indices_S: Tensor
    derived: dict = field(default_factory=dict, repr=False)

    @property
    def max_query_len(self) -> int:
        """The most tokens that one sequence computes in this step."""
        if "max_query_len" not in self.derived:
            self.derived["max_query_len"] = int(self.query_start_loc.diff().max())
        return self.derived["max_query_len"]


def pack(rows: Sequence[Row], block_size: int, device: torch.device | str = "cpu") -> Batch:
    """Pack rows into a Batch.

    Args:
        rows: at least one; each with at least one token and a block table that has room
            for start + len(token_ids) tokens.
        block_size: tokens in a block.
        device: where the tensors go.

    Raises:
        ValueError: a row has no tokens or too small a block table.
    """
    if not rows:
        raise ValueError("rows is empty; it needs >= 1 row")
    for i, row in enumerate(rows):
        num_after, capacity = row.start + len(row.token_ids), len(row.block_table) * block_size
        is_negative = row.start < 0 or min(row.block_table, default=0) < 0
        if not row.token_ids or num_after > capacity or is_negative:
            raise ValueError(
                f"rows[{i}] has {len(row.token_ids)} tokens from position {row.start}, and the "
                f"block table {row.block_table} for {capacity}; it needs >= 1 token, room for "
                "all, and no negative number"
            )
    query_lens_S = np.array([len(row.token_ids) for row in rows])
    starts_S = np.array([row.start for row in rows])
    query_start_loc = np.concatenate([[0], query_lens_S.cumsum()])
    num_tokens = int(query_start_loc[-1])

    row_of_T = np.repeat(np.arange(len(rows)), query_lens_S)
    positions_T = np.arange(num_tokens) + (starts_S - query_start_loc[:-1])[row_of_T]
    block_tables_SB = np.zeros((len(rows), max(len(r.block_table) for r in rows)), np.int32)
    for i, row in enumerate(rows):
        block_tables_SB[i, : len(row.block_table)] = row.block_table
    block_T = block_tables_SB[row_of_T, positions_T // block_size].astype(np.int64)

    arrays = {
        "token_ids_T": np.fromiter(chain.from_iterable(r.token_ids for r in rows), np.int64),
        "positions_T": positions_T,
        "slot_mapping_T": block_T * block_size + positions_T % block_size,
        "query_start_loc": query_start_loc.astype(np.int32),
        "seq_lens_S": (starts_S + query_lens_S).astype(np.int32),
        "block_tables_SB": block_tables_SB,
        "logits_indices_S": query_start_loc[1:] - 1,
    }
    batch = Batch(**{name: torch.from_numpy(a).to(device) for name, a in arrays.items()})
    batch.derived["max_query_len"] = int(query_lens_S.max())  # known here without a sync
    return batch
