"""Batching at the scale of real models, on a laptop: the real scheduler, a made-up GPU.

    requests --arrive--> Scheduler --plan--> SimulatedRunner --cost model--> VirtualClock
                             ^------------ update, tokens of no meaning -----------|

Everything is real but the numbers: Scheduler, BlockAllocator, policies, admission, preemption
and prefix cache are those of the engine, and so is every plan. Only the time a plan takes comes
from a cost model (cost_model.py), and tokens mean nothing: a request ends when it is told to.

Always holds: the same requests give the same result on every machine; on the same requests the
engine makes the same plans (all that differs is time).

Taught in notebooks/03_iteration_level_scheduling.ipynb and 08_measuring_honestly.ipynb. Source:
Vidur (Agrawal et al., MLSys 2024), which simulates schedulers likewise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanobatch.admission import Admission
from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig, check_choice, check_int, settle_max_model_len
from nanobatch.cost_model import GPUS, CostModel
from nanobatch.engine import StepResult
from nanobatch.metrics import EngineStats, InterTokenLatencies, summarize
from nanobatch.plan import SchedulerOutput
from nanobatch.policy import Policy
from nanobatch.request import Request, RequestMetrics
from nanobatch.scheduler import Scheduler
from nanobatch.shapes import MODEL_SHAPES

SOME_TOKEN = [0]


class VirtualClock:
    """Time that passes when it is told to. Seconds."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep_until(self, t: float) -> None:
        """Go on to t, unless that has passed."""
        self._now = max(self._now, t)


class SimulatedRunner:
    """Runs plans by letting time pass. It serves an LLMEngine as well as simulate().

    Args:
        cost_model: says how long a plan takes.
        clock: is moved on by that.
        output_lens: by request id, how many tokens a request's output has when its text ends
            by itself, with a stop token; who is not here goes on to max_tokens.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: VirtualClock,
        output_lens: Mapping[str, int] | None = None,
    ):
        self.cost_model = cost_model
        self.clock = clock
        self.output_lens = {} if output_lens is None else output_lens

    def run(self, plan: SchedulerOutput) -> StepResult:
        """A token for whoever samples; it means nothing, or that the text has ended."""
        self.clock.sleep_until(self.clock.now() + self.cost_model.step_seconds(plan))
        sampling = [row.request for row in plan.scheduled if row.samples]
        tokens = dict.fromkeys([request.request_id for request in sampling], SOME_TOKEN)
        if self.output_lens:
            for request in sampling:
                length = self.output_lens.get(request.request_id)
                if length == len(request.output_token_ids) + 1 and request.stop_token_ids:
                    tokens[request.request_id] = [request.stop_token_ids[0]]
        return StepResult(tokens)


class StepRecord(NamedTuple):
    """One step. start, duration: seconds. num_tokens: by request id. preempted: ids."""

    start: float
    duration: float
    num_tokens: dict[str, int]
    preempted: list[str]


@dataclass
class SimulationResult:
    """What came of a simulation.

    metrics: under the keys of bench.py's JSON (metrics.summarize), and utilizations.
    timeline: one record a step, if it was kept.
    requests: the times and counts of each request, by id.
    """

    metrics: dict[str, float]
    timeline: list[StepRecord]
    requests: dict[str, RequestMetrics]


def make_cost_model(
    model: str, gpu: str, tensor_parallel_size: int = 1, block_size: int = 16
) -> CostModel:
    """The cost model of a model and a GPU by name.

    Raises:
        ValueError: there is no such model or GPU, or the heads do not divide.
    """
    check_choice("model", model, tuple(MODEL_SHAPES))
    check_choice("gpu", gpu, tuple(GPUS))
    check_int("tensor_parallel_size", tensor_parallel_size, 1)
    shape = MODEL_SHAPES[model]
    heads_left_over = shape.num_heads % tensor_parallel_size
    if heads_left_over:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; it must divide the "
            f"{shape.num_heads} heads of {model}"
        )
    return CostModel(shape, GPUS[gpu], tensor_parallel_size, block_size)


def simulate(
    requests: Iterable[Request],
    *,
    model: str = "llama-2-7b",
    gpu: str = "a100-80gb",
    config: EngineConfig | None = None,
    tensor_parallel_size: int = 1,
    policy: Policy | None = None,
    admission: Admission | None = None,
    output_lens: Mapping[str, int] | None = None,
    goodput: Mapping[str, float] | None = None,
    keep_timeline: bool = True,
    progress: bool = False,
) -> SimulationResult:
    """Serve the requests on a GPU that need not be there.

    Args:
        requests: a list in any order, or an iterator in order of arrival, which is read as
            time goes on. They are used up: make new ones for the next simulation.
        model, gpu: names from shapes.MODEL_SHAPES and cost_model.GPUS.
        config: num_blocks None is what the GPU's memory holds, max_model_len the model's own.
        tensor_parallel_size: GPUs that share the model.
        policy, admission: in place of those that config names.
        output_lens: see SimulatedRunner.
        goodput: see metrics.summarize.
        keep_timeline: a record for each step; without it memory does not grow with the steps.
        progress: show a progress bar.

    Raises:
        ValueError: no such model or GPU, a model that does not fit the GPU, a request that can
            never fit.
    """
    config = EngineConfig() if config is None else config
    cost_model = make_cost_model(model, gpu, tensor_parallel_size, config.block_size)
    config = _settle(config, cost_model)
    allocator = BlockAllocator(
        config.num_blocks, config.block_size, config.enable_prefix_caching
    )
    scheduler = Scheduler(config, allocator, policy, admission)
    clock = VirtualClock()
    runner = SimulatedRunner(cost_model, clock, output_lens)
    seen = _Seen(config, keep_timeline)
    coming = _Coming(requests, progress)
    while True:
        start = clock.now()
        coming.add_due(scheduler, start)
        plan = scheduler.schedule(start)
        if not plan.scheduled:  # idle: nothing happens until somebody comes
            if coming.next is None:
                break
            clock.sleep_until(coming.next.arrival_time)
            continue
        num_blocks_in_use = allocator.num_blocks - allocator.num_free_blocks
        result = runner.run(plan)
        seen.step(plan, result.token_ids, start, clock.now(), num_blocks_in_use)
        finished = scheduler.update(plan, result.token_ids, clock.now())
        seen.finished(finished)
        coming.show(len(finished))
    return seen.result(clock.now(), goodput)


def _settle(config: EngineConfig, cost_model: CostModel) -> EngineConfig:
    if config.speculative is not None:
        raise ValueError(
            f"speculative is {config.speculative!r}; simulated tokens mean nothing, and nobody "
            "can guess them: it must be None"
        )
    config = settle_max_model_len(config, cost_model.model)
    num_blocks = cost_model.num_blocks(config.gpu_memory_utilization)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    return dataclasses.replace(config, num_blocks=num_blocks)


class _Coming:
    """The requests that have yet to arrive; `next` is the first of them."""

    def __init__(self, requests: Iterable[Request], progress: bool):
        total = len(requests) if isinstance(requests, Sequence) else None
        if isinstance(requests, Sequence):
            requests = sorted(requests, key=lambda r: r.arrival_time)
        self._requests = iter(requests)
        self.next = next(self._requests, None)
        self._bar = None
        if progress:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, unit="request", mininterval=1.0)

    def add_due(self, scheduler: Scheduler, now: float) -> None:
        while self.next is not None and self.next.arrival_time <= now:
            scheduler.add(self.next)
            self.next = next(self._requests, None)

    def show(self, num_finished: int) -> None:
        if self._bar is not None and num_finished:
            self._bar.update(num_finished)


class _Seen:
    """What is noted while a simulation runs."""

    def __init__(self, config: EngineConfig, keep_timeline: bool):
        self._config = config
        self._keep_timeline = keep_timeline
        self._stats, self._itl = EngineStats(), InterTokenLatencies()
        self._timeline: list[StepRecord] = []
        self._requests: dict[str, RequestMetrics] = {}

    def step(
        self,
        plan: SchedulerOutput,
        token_ids: Mapping[str, Sequence[int]],
        start: float,
        end: float,
        num_blocks_in_use: int,
    ) -> None:
        """A plan was computed between start and end."""
        self._stats.count_step(plan, self._config, num_blocks_in_use)
        self._stats.num_preemptions += len(plan.preempted)
        self._itl.step(token_ids, end)
        if self._keep_timeline:
            num_tokens = {row.request.request_id: row.num_tokens for row in plan.scheduled}
            preempted = [request.request_id for request in plan.preempted]
            self._timeline.append(StepRecord(start, end - start, num_tokens, preempted))

    def finished(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._itl.forget(request.request_id)
            self._requests[request.request_id] = request.metrics

    def result(self, now: float, goodput: Mapping[str, float] | None) -> SimulationResult:
        done = list(self._requests.values())
        first = min((m.arrival_time for m in done), default=0.0)
        duration = max(now - first, 1e-9)
        metrics = summarize(done, duration, self._itl, goodput) | self._stats.utilizations()
        metrics["num_swapped_blocks"] = self._stats.num_swapped_blocks
        return SimulationResult(metrics, self._timeline, self._requests)
