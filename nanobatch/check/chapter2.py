"""The checks of chapter 2: static batching and its waste.

    ex2_1   positions of a batch that is padded on the left
    ex2_2   row-steps that a static batch computes and discards
    ex2_3   which requests should share a batch

Taught in notebooks/02_static_batching.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanobatch.check.compare import call, expect, right, show
from nanobatch.utils.arithmetic import cdiv

PADS = [
    ([2, 0], 4),
    ([0, 0, 0], 3),
    ([3, 1, 0, 2], 6),
    ([4], 5),  # all pads but one
    ([0], 1),
]
OUTPUT_LENS = [[2, 7, 3], [4, 4], [5], [1, 1, 8, 1], [3, 6, 6, 2], [1]]
LENGTHS = [
    ([5, 1, 4, 2], 2),
    ([2, 9, 2, 9, 2, 9], 3),  # equal lengths: their indices differ
    ([1, 2, 3, 4, 5, 6], 2),
    ([30, 3, 28, 4, 2, 31, 3, 29], 4),
    ([8, 6, 7], 1),
    ([6, 3], 8),  # all fit in one batch
    ([9, 1, 8, 2, 5], 2),  # one does not fill its batch
    ([7], 4),
]


def ex2_1(answer: Callable[[list[int], int], Tensor]) -> None:
    """positions(num_pads, length): int64 [S, length], the positions of the tokens in a batch
    that is padded on the left. Row s begins with num_pads[s] pads, which get position 0; its
    first real token has position 0 as well."""
    for num_pads, length in PADS:
        found = call(answer, list(num_pads), length)
        wanted = torch.tensor(
            [[max(0, column - pads) for column in range(length)] for pads in num_pads]
        )
        expect(found, wanted, num_pads, length)
        if found.dtype != torch.int64:
            inputs = show(num_pads, length)
            raise AssertionError(f"for {inputs} the dtype is {found.dtype}; right is int64")
    right("ex2_1")


def ex2_2(answer: Callable[[list[int]], int]) -> None:
    """wasted_turns(output_lens): of all the rows that the steps of a static batch compute, how
    many are discarded. Each step computes len(output_lens) rows; each request needs one row
    for each of its output tokens; the batch runs until its last request is done."""
    for output_lens in OUTPUT_LENS:
        wanted = sum(
            step >= num_output for step in range(max(output_lens)) for num_output in output_lens
        )
        expect(call(answer, list(output_lens)), wanted, output_lens)
    right("ex2_2")


def ex2_3(answer: Callable[[list[int], int], list[list[int]]]) -> None:
    """batches(lengths, batch_size): lists of indices of requests, one list a batch. Each
    request is in one batch, a batch has at most batch_size, there are as few batches as
    possible, and the padding is the least: the sum of (longest of its batch - own length).
    If one batch is not full, it may hold the shortest or the longest requests."""
    for lengths, batch_size in LENGTHS:
        found = call(answer, list(lengths), batch_size)
        inputs = show(lengths, batch_size)
        try:
            groups = [[int(i) for i in group] for group in found]
        except (TypeError, ValueError):
            gives = f"for {inputs} it gives {found!r}"
            raise AssertionError(f"{gives}; right is a list of lists of indices") from None
        gives = f"for {inputs} it gives {groups}"
        _check_partition(groups, len(lengths), batch_size, gives)
        by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        chunks = (
            [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
            for order in (by_length, by_length[::-1])
        )
        allowed = max(_padding(lengths, chunk) for chunk in chunks)
        found_padding = _padding(lengths, groups)
        assert found_padding <= allowed, (
            f"{gives}, which pads {found_padding} tokens; {allowed} are enough"
        )
    right("ex2_3")


def _check_partition(
    groups: Sequence[Sequence[int]], num_requests: int, batch_size: int, gives: str
) -> None:
    """Assert that each index is in one group, no group is too large, and there are no more
    groups than needed."""
    members = [i for group in groups for i in group]
    strange = [i for i in members if not 0 <= i < num_requests]
    assert not strange, f"{gives}; {strange[0]} is the index of no request"
    for i in range(num_requests):
        count = members.count(i)
        assert count == 1, f"{gives}; request {i} is in {count} batches, it must be in one"
    largest = max(len(group) for group in groups)
    assert largest <= batch_size, f"{gives}; a batch of {largest} is over {batch_size}"
    fewest = cdiv(num_requests, batch_size)
    assert len(groups) == fewest, f"{gives}; {len(groups)} batches, {fewest} are enough"


def _padding(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    return sum(max(lengths[j] for j in group) - lengths[i] for group in groups for i in group)
