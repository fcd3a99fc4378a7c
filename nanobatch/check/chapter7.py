"""Checks of notebooks/07_the_engine.ipynb.

    ex7_1   sizes of the chunks of a prompt
    ex7_2   text that may be streamed when there are stop strings
    ex7_3   tokens to recompute after a preemption

The right values come from the package: the plans of a Scheduler, the deltas of an
IncrementalDetokenizer, and the prefix matches of a BlockAllocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.check.compare import call, expect, right
from nanobatch.config import EngineConfig
from nanobatch.detokenizer import IncrementalDetokenizer
from nanobatch.models.tokenizer import ByteTokenizer
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv


def ex7_1(answer: Callable[[int, int, int], list[int]]) -> None:
    """answer(num_prompt_tokens, budget, num_decoding) -> the sizes of the prompt's chunks.

    num_decoding requests decode in every step; budget > num_decoding.
    """
    for inputs in (
        (10, 4, 0),  # the last chunk is smaller
        (8, 4, 0),  # no empty chunk at the end
        (20, 8, 3),  # each decode takes one token of every step
        (15, 8, 3),
        (3, 8, 2),  # a prompt smaller than a chunk
        (6, 5, 4),  # one token in each step
        (1, 2, 1),
        (100, 64, 0),
    ):
        expect(call(answer, *inputs), _planned_chunks(*inputs), *inputs)
    right("ex7_1")


def _planned_chunks(num_prompt_tokens: int, budget: int, num_decoding: int) -> list[int]:
    """What a Scheduler gives in each step to a prompt that arrives while others decode."""
    config = EngineConfig(
        block_size=16,
        num_blocks=1024,
        max_num_seqs=num_decoding + 1,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config, BlockAllocator(1024, 16, False))
    for i in range(num_decoding):
        scheduler.add(Request(f"decode-{i}", [i], SamplingParams(max_tokens=1000)))
    sizes: list[int] = []
    for now in range(num_prompt_tokens + 2):
        if now == 1:
            params = SamplingParams(max_tokens=1)
            scheduler.add(Request("prompt", [7] * num_prompt_tokens, params))
        plan = scheduler.schedule(now)
        sizes += [
            row.num_tokens for row in plan.scheduled if row.request.request_id == "prompt"
        ]
        sampled = {row.request.request_id: [0] for row in plan.scheduled if row.samples}
        scheduler.update(plan, sampled, now)
    return sizes


def ex7_2(answer: Callable[[str, int, list[str]], str]) -> None:
    """answer(text, sent, stops) -> the part of text that may be streamed now.

    The first `sent` characters have been streamed. No stop string is complete in text.
    """
    for text, stops in (
        ("Once upon a time", []),
        ("the ENA END of", ["END!"]),
        ("xabab", ["abab!"]),  # "ab" could begin it, and so could "abab"
        ("aaaa, aaab", ["aaac"]),
        ("one\n\ntwo\n", ["\n\n\n"]),
        ("She said: stay, star", ["stop", "said no"]),  # the second holds back more
        ("hello <|e", ["<|end|>", "</s>"]),
        ("ab", ["c", "b!"]),
        ("a", ["a man"]),  # all of it is held back
        # Of two stops that could begin here, the one that holds back more counts.
        ("xab", ["bc", "abd"]),
        ("xab", ["abd", "bc"]),
    ):
        _check_deltas(answer, text, stops)
    right("ex7_2")


def _check_deltas(answer: Callable, text: str, stops: list[str]) -> None:
    """Feed text byte by byte; after each, the answer must equal the detokenizer's delta."""
    detokenizer = IncrementalDetokenizer(ByteTokenizer().stream([]), stops)
    for i, byte in enumerate(text.encode(), start=1):
        sent = len(detokenizer.sent_text)
        detokenizer.append(byte)
        wanted = detokenizer.take_delta(finished=False)
        inputs = (text[:i], sent, list(stops))
        expect(call(answer, *inputs), wanted, text[:i], sent, stops)


def ex7_3(answer: Callable[[int, list[bool], int], int]) -> None:
    """answer(num_computed, is_cached, block_size) -> tokens to compute again.

    num_computed tokens were in the cache when the request was preempted; is_cached says for
    each of its full blocks, in order, whether the prefix cache can still find it.
    """
    for inputs in (
        (40, [True, False], 16),  # the third block, half full, is lost in any case
        (40, [True, True], 16),
        (40, [False, False], 16),
        (40, [False, True], 16),  # a block is useless without the one before it
        (50, [True, False, True], 16),
        (32, [True, True], 16),  # nothing is lost
        (7, [], 16),  # no block was full
        (12, [True, True, False, True, True, True], 2),
        (64, [True, True, True, False], 16),
    ):
        num_computed, is_cached, block_size = inputs
        found = call(answer, num_computed, list(is_cached), block_size)
        expect(found, _computed_again(*inputs), *inputs)
    right("ex7_3")


def _computed_again(num_computed: int, is_cached: Sequence[bool], block_size: int) -> int:
    """Evict the blocks that are not cached from a real pool, then match the prefix."""
    token_ids = list(range(num_computed + 1))  # the last is not computed yet
    num_blocks = cdiv(num_computed, block_size)
    allocator = BlockAllocator(num_blocks, block_size)
    table = allocator.allocate(num_blocks)
    allocator.cache_blocks(token_ids, table, num_computed)
    gone = [block for block, is_kept in zip(table, is_cached, strict=False) if not is_kept]
    # Blocks freed first are handed out first. A block that is not full is never cached.
    partial = table[len(is_cached) :]
    for block in [*gone, *partial]:
        allocator.free([block])
    allocator.free([block for block in table if block not in {*gone, *partial}])
    allocator.allocate(len(gone))
    num_found = len(allocator.match_prefix(token_ids)) * block_size
    return num_computed - num_found
