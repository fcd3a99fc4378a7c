"""Checks of notebooks/04_ragged_batches_and_masks.ipynb.

ex4_1   query_start_loc of a packed batch
ex4_2   the mask of a ragged batch
ex4_3   scores that are needed
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanobatch.check.compare import call, expect, right, show

# (query_lens, seq_lens): a prompt; a decode; a chunk; prompts; decodes; mixed; mixed in another
# order.
STEPS = [
    ([3], [3]),
    ([1], [4]),
    ([2], [5]),
    ([2, 3], [2, 3]),
    ([1, 1, 1], [3, 1, 5]),
    ([1, 4, 2], [6, 4, 5]),
    ([3, 1, 1, 2], [3, 7, 1, 4]),
]


def ex4_1(answer: Callable[[list[int]], Tensor]) -> None:
    """start_locations(query_lens): int32 [S + 1], where each request starts, then the end."""
    for query_lens in ([2, 3], [1], [4, 1, 1, 7], [1] * 5, [300, 1], []):
        found = call(answer, list(query_lens))
        wanted = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
        expect(found, torch.tensor(wanted, dtype=torch.int32), query_lens)
        assert found.dtype == torch.int32, (
            f"for {show(query_lens)} it gives {found.dtype}; right is torch.int32"
        )
    right("ex4_1")


def ex4_2(answer: Callable[[list[int], list[int]], Tensor]) -> None:
    """ragged_mask(query_lens, seq_lens): bool [sum(query_lens), sum(seq_lens)]."""
    for query_lens, seq_lens in STEPS:
        found = call(answer, list(query_lens), list(seq_lens))
        wanted = _mask(query_lens, seq_lens)
        inputs = show(query_lens, seq_lens)
        assert isinstance(found, Tensor), (
            f"for {inputs} it gives {type(found).__name__}; right is a tensor"
        )
        assert found.dtype == torch.bool, (
            f"for {inputs} it gives {found.dtype}; right is torch.bool"
        )
        assert found.shape == wanted.shape, (
            f"for {inputs} its shape is {tuple(found.shape)}; right is {tuple(wanted.shape)}"
        )
        if not torch.equal(found, wanted):
            raise AssertionError(_difference(found, wanted, query_lens, seq_lens))
    right("ex4_2")


def ex4_3(answer: Callable[..., int]) -> None:
    """needed_scores(query_lens, seq_lens, window=None): pairs of a query and a key it sees."""
    for query_lens, seq_lens in STEPS:
        expect(
            call(answer, list(query_lens), list(seq_lens)),
            int(_mask(query_lens, seq_lens).sum()),
            query_lens,
            seq_lens,
        )
        for window in (1, 2, 4, 100):
            found = call(answer, list(query_lens), list(seq_lens), window)
            wanted = int(_mask(query_lens, seq_lens, window).sum())
            expect(found, wanted, query_lens, seq_lens, window)
    # A step whose mask would have about 10 ** 11 entries.
    large = [100_000, 1, 4], [100_000, 1_000_000, 50_000]
    wanted = 100_000 * 100_001 // 2 + 1_000_000 + (49_997 + 49_998 + 49_999 + 50_000)
    expect(call(answer, *map(list, large)), wanted, *large)
    right("ex4_3")


def _mask(query_lens: list[int], seq_lens: list[int], window: int | None = None) -> Tensor:
    """The right mask, by definition, entry by entry."""
    queries = [
        (request, seq_len - query_len + i)
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True))
        for i in range(query_len)
    ]
    keys = [(request, i) for request, seq_len in enumerate(seq_lens) for i in range(seq_len)]
    width = max(seq_lens) if window is None else window
    rows = [[r == s and q - width < k <= q for s, k in keys] for r, q in queries]
    return torch.tensor(rows, dtype=torch.bool)


def _difference(
    found: Tensor, wanted: Tensor, query_lens: list[int], seq_lens: list[int]
) -> str:
    """The first wrong row, as a picture, and the request of its query."""
    row = int((found != wanted).any(dim=1).nonzero()[0])
    request = int((torch.tensor(query_lens).cumsum(0) <= row).sum())
    pictures = [" ".join(".1"[bit] for bit in x[row].int().tolist()) for x in (found, wanted)]
    return (
        f"for {show(query_lens, seq_lens)} row {row}, a query of request {request}, is\n"
        f"    {pictures[0]}\nright is\n    {pictures[1]}"
    )
