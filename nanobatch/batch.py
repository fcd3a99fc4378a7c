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
    logits_indices_S    [ 0    3             5 ]            tokens whose logits are wanted: the
                                                            last Row.num_logits of each row

logits_indices_S has S entries only if each row wants one. A prompt's unfinished chunk wants
none, and a draft several. (Letters of the axes: nanobatch/README.md, "Names of tensors".)

Always holds (invariant 14): a slot of -1 writes nothing; padding in a block table is a valid
id that no result depends on.

Taught in notebooks/04_ragged_batches_and_masks.ipynb. Source: vLLM's attention metadata,
FlashAttention's variable-length interface.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanobatch.plan import ScheduledRequest
from nanobatch.utils.transfer import staged

PADDING_SLOT = -1  # a token with this slot writes nothing


class Row(NamedTuple):
    """One sequence's share of a step: tokens to compute, and where the sequence lies."""

    token_ids: Sequence[int]
    start: int  # position of the first of these tokens
    block_table: Sequence[int]
    num_logits: int = 1  # how many of its last tokens need logits


@dataclass
class Batch:
    """The packed tensors of one step (shapes: see the module's picture).

    token_ids_T, positions_T, slot_mapping_T, logits_indices_S are int64;
    query_start_loc (S + 1), seq_lens_S, block_tables_SB are int32. logits_indices_S may have
    more or fewer than S entries.
    derived: what attention computes once from these tensors and uses in every layer.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    query_start_loc: Tensor
    seq_lens_S: Tensor
    block_tables_SB: Tensor
    logits_indices_S: Tensor
    derived: dict = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What make() gives, computed for the first layer that asks and kept for the others."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    @property
    def has_lens(self) -> bool:
        """Whether the host knows all lengths; in a captured step only the device does."""
        return "lens" in self.derived

    @property
    def lens(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S] twice, on the host: query tokens and keys of each sequence. If the host
        does not know them, this waits for the device."""
        starts, seq_lens_S = self.query_start_loc, self.seq_lens_S
        return self.once(
            "lens", lambda: (np.diff(starts.tolist()), np.array(seq_lens_S.tolist()))
        )

    @property
    def max_query_len(self) -> int:
        """The most tokens that one sequence computes in this step."""
        return self.once("max_query_len", lambda: int(self.query_start_loc.diff().max()))


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
    query_lens_S = np.array([len(row.token_ids) for row in rows])
    starts_S = np.array([row.start for row in rows])
    block_tables_SB = _block_tables([row.block_table for row in rows])
    _check_rows(rows, starts_S, query_lens_S, block_tables_SB, block_size)
    query_start_loc = np.concatenate([[0], query_lens_S.cumsum()])
    num_tokens = int(query_start_loc[-1])

    row_of_T = np.repeat(np.arange(len(rows)), query_lens_S)
    positions_T = np.arange(num_tokens) + (starts_S - query_start_loc[:-1])[row_of_T]
    block_T = block_tables_SB[row_of_T, positions_T // block_size].astype(np.int64)

    arrays = {
        "token_ids_T": np.fromiter(chain.from_iterable(r.token_ids for r in rows), np.int64),
        "positions_T": positions_T,
        "slot_mapping_T": block_T * block_size + positions_T % block_size,
        "query_start_loc": query_start_loc.astype(np.int32),
        "seq_lens_S": (starts_S + query_lens_S).astype(np.int32),
        "block_tables_SB": block_tables_SB,
        "logits_indices_S": _last_tokens(rows, query_start_loc[1:]),
    }
    device = torch.device(device)
    tensors = {
        name: staged(torch.from_numpy(a), device).to(device, non_blocking=True)
        for name, a in arrays.items()
        if a.size
    }
    if "logits_indices_S" not in tensors:  # no logits are wanted: nothing to copy
        tensors["logits_indices_S"] = torch.empty(0, dtype=torch.int64, device=device)
    # Known here without waiting for the device.
    lens = (query_lens_S, starts_S + query_lens_S)
    return Batch(**tensors, derived={"lens": lens, "max_query_len": int(query_lens_S.max())})


def fill_in(token_ids_T: Tensor, sampled_S: Tensor) -> None:
    """Put tokens that only the device knows in the place of their placeholders (request.py).

    Args:
        token_ids_T: int64 [T], on the device; -1 - i becomes sampled_S[i].
        sampled_S: int64 [S], the tokens that the step before has sampled.
    """
    which_T = (-1 - token_ids_T).clamp_(min=0)
    token_ids_T.copy_(torch.where(token_ids_T < 0, sampled_S[which_T], token_ids_T))


def _last_tokens(rows: Sequence[Row], ends_S: np.ndarray) -> np.ndarray:
    """int64: the last num_logits tokens of each row, by row."""
    counts_S = np.array([row.num_logits for row in rows])
    return np.repeat(ends_S - counts_S.cumsum(), counts_S) + np.arange(counts_S.sum())


def _block_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [S, B], rows padded with 0 to the longest."""
    longest = max(map(len, tables))
    padding = [0] * longest
    flat: list[int] = []
    for table in tables:
        flat += table
        flat += padding[len(table) :]
    # struct packs a list of ints twice as fast as numpy reads it: 0.1 ms for 256 x 64 blocks.
    packed = bytearray(struct.pack(f"{len(flat)}i", *flat))
    return np.frombuffer(packed, np.int32).reshape(len(tables), longest)


def _check_rows(
    rows: Sequence[Row],
    starts_S: np.ndarray,
    query_lens_S: np.ndarray,
    block_tables_SB: np.ndarray,
    block_size: int,
) -> None:
    """Raise ValueError with the first row that is wrong."""
    capacity_S = np.array([len(row.block_table) for row in rows]) * block_size
    is_wrong_S = (query_lens_S < 1) | (starts_S < 0) | (block_tables_SB < 0).any(axis=1)
    is_wrong_S |= starts_S + query_lens_S > capacity_S
    if is_wrong_S.any():
        i = int(is_wrong_S.argmax())
        raise ValueError(
            f"rows[{i}] has {query_lens_S[i]} tokens from position {starts_S[i]}, and the "
            f"block table {rows[i].block_table} for {capacity_S[i]}; it needs >= 1 token, room "
            "for all, and no negative number"
        )


def row_of(s: ScheduledRequest) -> Row:
    """A request's next tokens. Logits are wanted after the request's last token only."""
    request, start = s.request, s.request.num_computed_tokens
    token_ids = request.token_ids[start : start + s.num_tokens]
    return Row(token_ids, start, request.block_table, int(s.samples))
