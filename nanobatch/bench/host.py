"""`bench.py host`: what the host does between two steps, in microseconds: plan, update, pack.

A real GPU waits meanwhile, and a step of a small model takes 5 ms. The case is steady decode,
the most common one: every request computes one token, one in block_size needs a block and fills
one, contexts are long and the prefix cache is on.

Needs no torch: without it, packing the batch into tensors is not measured.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser, Namespace
from typing import NamedTuple

from nanobatch.bench import flags, report
from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.plan import SchedulerOutput
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv

BLOCK_SIZE = 16
NUM_STEPS = 100
NUM_REQUESTS = (16, 64, 256, 1024)


class HostCost(NamedTuple):
    """Microseconds a step, medians. pack is None where torch is not installed."""

    num_requests: int
    schedule: float
    update: float
    pack: float | None


def steady_decode(num_requests: int, context: int = 1000) -> HostCost:
    """Measure NUM_STEPS steps in which num_requests requests decode."""
    scheduler = _decoding_scheduler(num_requests, context)
    token_ids = {str(i): [7] for i in range(num_requests)}
    scheduler.update(scheduler.schedule(0.0), token_ids, 0.0)
    schedule, update, pack = [], [], []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        schedule.append(time.perf_counter() - start)
        pack.append(_seconds_to_pack(plan))
        start = time.perf_counter()
        scheduler.update(plan, token_ids, 0.0)
        update.append(time.perf_counter() - start)
    medians = [1e6 * statistics.median(seconds) for seconds in (schedule, update)]
    is_packed = None not in pack
    return HostCost(
        num_requests, *medians, 1e6 * statistics.median(pack) if is_packed else None
    )


def _decoding_scheduler(num_requests: int, context: int) -> Scheduler:
    """A scheduler whose requests all begin in the next step, with room for NUM_STEPS more."""
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
    return scheduler


def _seconds_to_pack(plan: SchedulerOutput) -> float | None:
    """Seconds to turn a plan's requests into tensors; None without torch."""
    try:
        from nanobatch.batch import Row, pack
    except ModuleNotFoundError:
        return None
    rows = [
        Row(
            row.request.token_ids[row.request.num_computed_tokens :],
            row.request.num_computed_tokens,
            row.request.block_table,
        )
        for row in plan.scheduled
    ]
    start = time.perf_counter()
    pack(rows, BLOCK_SIZE)
    return time.perf_counter() - start


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py host`."""
    flags.add_flags(parser, {"save_json": None})


def _describe_hardware() -> dict[str, str | int]:
    try:
        import torch
    except ModuleNotFoundError:
        return report.describe_hardware()
    torch.set_num_threads(1)
    return report.describe_hardware(torch.device("cpu"))


def run_command(args: Namespace) -> dict:
    """Measure and print; the report."""
    info = _describe_hardware()
    report.print_heading("the host's part of a step of steady decode, in us", info)
    table = report.Table("requests", ("schedule", "update", "both", "pack"), 10)
    costs = []
    for num_requests in NUM_REQUESTS:
        cost = steady_decode(num_requests)
        both = cost.schedule + cost.update
        pack = "" if cost.pack is None else f"{cost.pack:.0f}"
        table.line(
            str(num_requests),
            [f"{cost.schedule:.0f}", f"{cost.update:.0f}", f"{both:.0f}", pack],
        )
        costs.append(cost._asdict())
    if cost.pack is None:
        print("\npack: not measured; torch is not installed")
    return {"machine": info, "host": costs}
