"""`bench.py host`: what the host does between two steps, in microseconds: plan, update, pack.

A real GPU waits meanwhile, and a step of a small model takes 5 ms. The case is steady decode,
the most common one: every request computes one token, one in block_size needs a block and fills
one, contexts are long and the prefix cache is on.

Two more tables show what should not matter: how long the outputs are already, and how many
requests wait. A step costs what runs and what has changed.

Needs no torch: without it, packing the batch into tensors is not measured.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanobatch.bench import flags, report
from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.plan import SchedulerOutput, StepResult
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv

BLOCK_SIZE = 16
NUM_STEPS = 100
NUM_REQUESTS = (16, 64, 256, 1024)
NUM_OUTPUT_TOKENS = (10, 8000)
NUM_WAITING = (10, 1000)


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


class _Speaker:
    """A tokenizer and its stream: every token is a word."""

    eos_token_ids = ()

    def stream(self, prompt_token_ids: Sequence[int]) -> _Speaker:
        return self

    def step(self, token_id: int) -> str:
        return "word "

    def pending(self) -> str:
        return ""


class _Instant:
    """A runner that computes nothing. Its first answer is long: to begin with long outputs."""

    def __init__(self, num_at_first: int):
        self.num_tokens = num_at_first

    def run(self, plan: SchedulerOutput) -> StepResult:
        token_ids = [7] * self.num_tokens
        self.num_tokens = 1
        return StepResult({e.request.request_id: token_ids for e in plan.scheduled})


def long_outputs(num_output_tokens: int, num_requests: int = 256) -> float:
    """Measure the engine's part of a step, in microseconds: plan, update, text, outputs. All
    requests have num_output_tokens tokens of output already."""
    num_tokens = 2 * BLOCK_SIZE + num_output_tokens + NUM_STEPS
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_requests * cdiv(num_tokens, BLOCK_SIZE),
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * num_tokens,
    )
    engine = LLMEngine(config, _Instant(num_output_tokens), tokenizer=_Speaker())
    for i in range(num_requests):
        prompt = [i, *range(i % BLOCK_SIZE)]
        engine.add_request(prompt, SamplingParams(max_tokens=num_tokens))
    for _ in range(3):  # the prompts, then all of the outputs
        engine.step()
    return _median_us(engine.step)


def long_queue(policy: str, num_waiting: int, context: int = 1000) -> float:
    """Measure schedule and update together, in microseconds, while 16 requests decode and
    others wait for room. All prompts begin alike."""
    num_running, num_shared = 16, context // 2
    blocks_each = cdiv(context, BLOCK_SIZE) + 2  # but the shared ones: room is left for no more
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_running * blocks_each,
        max_num_batched_tokens=num_running * context,
        policy=policy,
        enable_prefix_caching=True,
    )
    scheduler = Scheduler(config, BlockAllocator(config.num_blocks, BLOCK_SIZE))
    rng = random.Random(0)
    shared = rng.choices(range(1000), k=num_shared)

    def add(first: int, num_requests: int, length: int, max_tokens: int) -> None:
        for i in range(first, first + num_requests):
            prompt = shared + rng.choices(range(1000), k=length - num_shared)
            scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=max_tokens)))

    def step() -> None:
        plan = scheduler.schedule(0.0)
        token_ids = {entry.request.request_id: [7] for entry in plan.scheduled}
        scheduler.update(plan, token_ids, 0.0)

    add(0, num_running, context, 2 * BLOCK_SIZE)
    step()
    add(num_running, num_waiting, 2 * context, context)
    step()
    cost = _median_us(step, BLOCK_SIZE)
    assert (len(scheduler.running), len(scheduler.waiting)) == (num_running, num_waiting)
    return cost


def _median_us(step: Callable[[], object], num_steps: int = NUM_STEPS) -> float:
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


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
    print("\na step of the engine around a runner that computes nothing, 256 running, in us")
    outputs = {n: long_outputs(n) for n in NUM_OUTPUT_TOKENS}
    table = report.Table("output tokens so far", ("step",), 22)
    for num_tokens, cost in outputs.items():
        table.line(str(num_tokens), [f"{cost:.0f}"])
    print("\nschedule and update while others wait, 16 running, in us")
    table = report.Table("waiting", ("fcfs", "sjf"), 22)
    queues = {n: {p: long_queue(p, n) for p in ("fcfs", "sjf")} for n in NUM_WAITING}
    for num_waiting, costs_of in queues.items():
        table.line(str(num_waiting), [f"{cost:.0f}" for cost in costs_of.values()])
    return {
        "machine": info,
        "host": costs,
        "long_outputs": [{"num_output_tokens": n, "step": us} for n, us in outputs.items()],
        "long_queue": [{"num_waiting": n} | costs_of for n, costs_of in queues.items()],
    }
