"""Checks of notebooks/05_paged_kv_blocks.ipynb.

ex5_1   the slot of each position
ex5_2   new blocks that a step needs
ex5_3   prefix hits
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from nanobatch.batch import Row, pack
from nanobatch.block_allocator import BlockAllocator
from nanobatch.check.compare import call, expect, right


def ex5_1(answer: Callable) -> None:
    """slot_mapping(positions, block_table, block_size) -> the slot of each position.

    A slot is block * block_size + offset. The positions may start anywhere, and the blocks
    may lie anywhere in the pool. The right values come from nanobatch.batch.pack.
    """
    expect(call(answer, [], [3], 4), [], [], [3], 4)
    cases = [
        ([0, 1, 2], [3], 4),
        ([0, 1, 2, 3, 4, 5], [7, 2], 4),
        ([5], [2, 0], 4),
        ([6, 7, 8, 9], [5, 0, 9, 1], 3),
        ([30, 31, 32], [1, 4, 0], 16),
        ([0, 1, 2], [6, 11, 2], 1),
    ]
    for positions, block_table, block_size in cases:
        start, num_tokens = positions[0], len(positions)
        batch = pack([Row([0] * num_tokens, start, block_table)], block_size)
        inputs = (positions, block_table, block_size)
        found = call(answer, list(positions), list(block_table), block_size)
        expect(found, batch.slot_mapping_T.tolist(), *inputs)
    right("ex5_1")


def ex5_2(answer: Callable) -> None:
    """blocks_to_allocate(num_computed, num_new, table_len, block_size) -> new blocks.

    How many blocks to add to a table of table_len blocks so that num_new tokens fit behind
    the num_computed tokens in the cache. Never below 0.
    """
    cases = [
        (0, 1, 0, 4),  # the first token
        (0, 4, 0, 4),  # exactly one full block
        (0, 5, 0, 4),  # one token more
        (3, 1, 1, 4),  # fills the last block: nothing new
        (4, 1, 1, 4),  # the table is full
        (5, 1, 2, 4),  # room left
        (6, 3, 2, 4),  # crosses the end of a block
        (16, 16, 1, 16),
        (32, 1, 4, 16),  # more room than is needed
        (0, 1000, 0, 16),
        (7, 1, 7, 1),
        (0, 1, 0, 1),
    ]
    for num_computed, num_new, table_len, block_size in cases:
        num_blocks = 0  # count up until there is room
        while (table_len + num_blocks) * block_size < num_computed + num_new:
            num_blocks += 1
        inputs = {
            "num_computed": num_computed,
            "num_new": num_new,
            "table_len": table_len,
            "block_size": block_size,
        }
        found = call(answer, num_computed, num_new, table_len, block_size)
        expect(found, num_blocks, **inputs)
    right("ex5_2")


def ex5_3(answer: Callable) -> None:
    """matched_blocks(token_ids, cached, block_size) -> leading blocks of a prompt found.

    cached is a set of tuples: for each cached block, all tokens from the start of its request
    to the end of the block. Counting stops at the first block that is missing, and at least
    one token of the prompt must be left to compute.
    """
    three = {(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8), tuple(range(1, 13))}
    cases = [
        (list(range(1, 11)), three, 4, 2),
        (list(range(1, 14)), three, 4, 3),  # all three; one token is left
        (list(range(1, 13)), three, 4, 2),  # the whole prompt is cached: leave the last block
        ([1, 2, 3, 4], three, 4, 0),
        ([1, 2, 3, 4, 5], three, 4, 1),
        ([1, 2, 3], three, 4, 0),  # shorter than a block
        ([1], three, 4, 0),
        ([5, 6, 7, 8, 9], three, 4, 0),  # cached, but after another prefix
        ([1, 2, 3, 4, 9, 9, 9, 9, 9], three, 4, 1),
        (list(range(1, 11)), {tuple(range(1, 9))}, 4, 0),  # the first block was evicted
        (list(range(1, 14)), three - {tuple(range(1, 9))}, 4, 1),  # the second one was
        (list(range(1, 11)), set(), 4, 0),
        ([7, 7, 7], {(7,), (7, 7), (7, 7, 7)}, 1, 2),
    ]
    for token_ids, cached, block_size, num_blocks in cases:
        found = call(answer, list(token_ids), set(cached), block_size)
        expect(found, num_blocks, token_ids, cached, block_size)
    for token_ids, cached, block_size, num_blocks in _random_prompts():
        found = call(answer, list(token_ids), set(cached), block_size)
        expect(found, num_blocks, token_ids, cached, block_size)
    right("ex5_3")


def _random_prompts(num_prompts: int = 40):
    """Prompts over two tokens, and what BlockAllocator.match_prefix finds of them."""
    rng = Random(0)
    for _ in range(num_prompts):
        block_size = rng.choice((1, 2, 3))
        allocator, cached = BlockAllocator(64, block_size), set()
        for _ in range(3):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            num_full = len(tokens) // block_size
            table = allocator.allocate(num_full)
            allocator.cache_blocks(tokens, table, num_full * block_size)
            cached |= {tuple(tokens[: (i + 1) * block_size]) for i in range(num_full)}
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        yield prompt, cached, block_size, len(allocator.match_prefix(prompt))
