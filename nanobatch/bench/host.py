"""What the host does between two steps, in microseconds: plan, record, pack.

On a real GPU it waits meanwhile, and a step of a small model takes 5 ms. The case is steady
decode, the commonest there is: everybody computes one token, one in block_size needs a block
and fills one, contexts are long and the prefix cache is on.

Run by `python bench.py --host`.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

from nanobatch.batch import Row, pack
from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv

BLOCK_SIZE = 16
NUM_STEPS = 100


class HostCost(NamedTuple):
    """Microseconds a step, medians."""

    num_requests: int
    schedule: float
    update: float
    pack: float


def steady_decode(num_requests: int, context: int = 1000) -> HostCost:
    """Measure NUM_STEPS steps in which num_requests requests decode."""
    blocks_each = cdiv(context + NUM_STEPS + 2 * BLOCK_SIZE, BLOCK_SIZE)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_requests * blocks_each,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * context,
    )
    scheduler = Scheduler(config, BlockAllocator(config.num_blocks, BLOCK_SIZE))
    rng = random.Random(0)
    params = SamplingParams(max_tokens=NUM_STEPS + 2)
    for i in range(num_requests):  # lengths differ, so that blocks fill at different times
        prompt = rng.choices(range(1000), k=context - i % BLOCK_SIZE)
        scheduler.add(Request(str(i), prompt, params))
    token_ids = {str(i): [7] for i in range(num_requests)}
    scheduler.update(scheduler.schedule(0.0), token_ids, 0.0)
    times = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        rows = [
            Row(
                row.request.token_ids[row.request.num_computed_tokens :],
                row.request.num_computed_tokens,
                row.request.block_table,
            )
            for row in plan.scheduled
        ]
        ready = time.perf_counter()
        pack(rows, BLOCK_SIZE)
        packed = time.perf_counter()
        scheduler.update(plan, token_ids, 0.0)
        end = time.perf_counter()
        times.append((planned - start, end - packed, packed - ready))
    medians = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return HostCost(num_requests, *medians)
