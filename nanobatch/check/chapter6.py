"""Checks of notebooks/06_the_triton_kernel.ipynb.

ex6_1   merging two partial softmaxes
ex6_2   bytes that a launch reads from the cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanobatch.check.compare import call, expect, right
from nanobatch.kernels.launch_config import LaunchConfig
from nanobatch.kernels.work_list import keys_of_program, query_blocks

Part = tuple[Tensor, Tensor, Tensor]  # max [M], sum [M], acc [M, D]


def ex6_1(answer: Callable) -> None:
    """merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b) -> (max, sum, acc).

    Merges two partial softmaxes of the same M rows over different keys. max [M] is the largest
    score, sum [M] the sum of exp(score - max), acc [M, D] the sum of exp(score - max) * value.
    Where a row of a part saw no key, its max is -inf, its sum 0 and its acc 0; where neither
    part saw one, so is the result.
    """
    values_LD = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0], [2.0, 2.0]])
    none = [-torch.inf] * 2
    cases = [
        # (scores in a, scores in b): one list for each row, two keys each
        ([[0.0, 1.0]], [[2.0, 0.5]]),
        ([[3.0, 1.0]], [[2.0, -0.5]]),
        ([[300.0, 299.0]], [[301.0, 298.0]]),
        ([[-301.0, -299.0]], [[-300.0, -302.0]]),
        ([[1.0, 0.0]], [none]),
        ([none], [[-200.0, -201.0]]),
        ([none], [none]),
        ([[0.0, 1.0], none, [5.0, 4.0], none], [[90.0, 1.0], [2.0, 3.0], none, none]),
    ]
    for scores_a, scores_b in cases:
        a_ML, b_ML = torch.tensor(scores_a), torch.tensor(scores_b)
        parts = (*_partial(a_ML, values_LD[:2]), *_partial(b_ML, values_LD[2:]))
        wanted = _partial(torch.cat([a_ML, b_ML], dim=1), values_LD)
        shown = [x.double().round(decimals=4).tolist() for x in parts]
        found = call(_on_copies(answer, parts), *shown)
        expect(found, wanted, *shown)
    right("ex6_1")


def _on_copies(answer: Callable, parts: Sequence[Tensor]) -> Callable:
    """The answer, called with copies of parts; its arguments are only for the message."""
    return (lambda *_: answer(*(x.clone() for x in parts))) if callable(answer) else answer


def _partial(scores_ML: Tensor, values_LD: Tensor) -> Part:
    """The state of rows that have seen these scores; -inf: no key."""
    max_M = scores_ML.max(dim=1).values
    base_M = max_M.masked_fill(max_M == -torch.inf, 0.0)
    p_ML = torch.exp(scores_ML - base_M[:, None])
    return max_M, p_ML.sum(dim=1), p_ML @ values_LD


def ex6_2(answer: Callable) -> None:
    """bytes_read(launch, query_start_loc, seq_lens, num_kv_heads, head_dim, itemsize) -> int.

    Bytes of keys and values that all programs of one launch read from the cache: all query
    blocks, all KV heads, all splits.
    """
    cases = [
        # (query tokens and keys of each sequence, KV heads, block_q, tile, splits, D, itemsize)
        ([(1, 9)], 1, 16, 16, 1, 64, 2),
        ([(1, 9), (1, 40)], 8, 4, 16, 1, 128, 2),
        ([(1, 200), (1, 24), (1, 9)], 2, 5, 16, 4, 16, 4),
        ([(12, 12)], 2, 4, 4, 1, 64, 2),
        ([(7, 50), (1, 1), (20, 33)], 3, 5, 16, 1, 80, 4),
        ([(3, 7), (9, 21)], 2, 4, 8, 2, 64, 2),
    ]
    for lens, num_kv_heads, block_q, tile, num_splits, head_dim, itemsize in cases:
        query_start_loc = [sum(t for t, _ in lens[:i]) for i in range(len(lens) + 1)]
        seq_lens = [n for _, n in lens]
        launch = LaunchConfig(16, block_q, tile, num_splits, num_warps=4, num_stages=2)
        inputs = (launch, query_start_loc, seq_lens, num_kv_heads, head_dim, itemsize)
        expect(call(answer, *inputs), _bytes_read(*inputs), *inputs)
    right("ex6_2")


def _bytes_read(
    launch: LaunchConfig,
    query_start_loc: list[int],
    seq_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> int:
    seq_of_block_X, _ = query_blocks(np.diff(query_start_loc), launch.block_q)
    num_keys = 0
    for query_block in range(len(seq_of_block_X)):
        for split in range(launch.num_splits):
            _, first, end = keys_of_program(
                launch, query_start_loc, seq_lens, query_block, split
            )
            num_keys += end - first
    return num_keys * num_kv_heads * 2 * head_dim * itemsize
