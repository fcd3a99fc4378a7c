"""One engine on virtual time: the real scheduler, a runner that only lets time pass.

    requests --add--> Scheduler --plan--> SimulatedRunner --cost model--> VirtualClock
                          ^------------ update, tokens of no meaning -----------|

A replica is moved on from one point in time to the next, so that many of them can live side by
side and be looked at in between. A step is begun and ended apart: at a time that lies within it
the plan is made, and nothing has come of it yet.

Always holds: who arrives when a step would begin may join it; the steps are those of an engine
that takes in whatever has come before it plans.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Source: Vidur (Agrawal et al., MLSys
2024), whose replicas are moved on by events likewise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.engine import StepResult
from nanobatch.metrics import EngineStats, InterTokenLatencies, summarize
from nanobatch.models.config import settle_max_model_len
from nanobatch.plan import SchedulerOutput
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request, RequestMetrics
from nanobatch.scheduler import Scheduler
from nanobatch.simulation.cost_model import CostModel

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


class Replica:
    """One engine on virtual time.

        add(request)        it has arrived
        advance(t)          whatever begins before t begins, whatever ends by t ends

               t0          t1                     t
        steps  |===========|======================|==========>     begun, not yet ended
                                                  ^ what can be seen of it at t: the plan, and
                                                    no token that it will bring

    Args:
        config: as in simulate().
        cost_model, output_lens: see SimulatedRunner.
        policy, admission, keep_timeline: as in simulate().
    """

    def __init__(
        self,
        config: EngineConfig,
        cost_model: CostModel,
        policy: Policy | None = None,
        admission: Admission | None = None,
        output_lens: Mapping[str, int] | None = None,
        keep_timeline: bool = True,
    ):
        self.config = config = _settle(config, cost_model)
        allocator = BlockAllocator(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(config, allocator, policy, admission)
        self.clock = VirtualClock()
        self.runner = SimulatedRunner(cost_model, self.clock, output_lens)
        self.num_given = self.num_unfinished = 0  # requests
        self.busy_seconds = 0.0
        self.stats, self.itl = EngineStats(), InterTokenLatencies()
        self.requests: dict[str, RequestMetrics] = {}  # that have finished
        self._keep_timeline = keep_timeline
        self._timeline: list[StepRecord] = []
        self._in_flight: tuple[SchedulerOutput, StepResult] | None = None

    def add(self, request: Request) -> None:
        """Enqueue a request that arrives now, even while a step is in flight.

        Raises:
            ValueError: it can never fit, or its id is live; nothing was changed.
        """
        self.scheduler.add(request)
        self.num_given += 1
        self.num_unfinished += 1

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens of its prompt that the prefix cache has now."""
        allocator = self.scheduler.allocator
        found = allocator.match_prefix(request.token_ids, request.cache_salt)
        return len(found) * allocator.block_size

    def advance(self, until: float, count: Callable[[int], object] | None = None) -> None:
        """Let time pass to `until` (seconds; inf: until all is done).

        A step that would begin at `until` does not: who arrives then may still join it.
        count is told how many requests each step has finished.
        """
        while self._in_flight or (self.clock.now() < until and self._begin_step()):
            if self.clock.now() > until:
                return
            num_finished = self._end_step()
            if count is not None and num_finished:
                count(num_finished)
        if until < math.inf:
            self.clock.sleep_until(until)

    def _begin_step(self) -> bool:
        """Plan a step and have the clock at its end; False if there is nothing to do."""
        start = self.clock.now()
        plan = self.scheduler.schedule(start)
        if not plan.scheduled:
            return False
        allocator = self.scheduler.allocator
        num_blocks_in_use = allocator.num_blocks - allocator.num_free_blocks
        self.stats.count_step(plan, self.config, num_blocks_in_use)
        self.stats.num_preemptions += len(plan.preempted)
        self._in_flight = plan, self.runner.run(plan)
        seconds = self.clock.now() - start
        self.busy_seconds += seconds
        if self._keep_timeline:
            num_tokens = {row.request.request_id: row.num_tokens for row in plan.scheduled}
            preempted = [request.request_id for request in plan.preempted]
            self._timeline.append(StepRecord(start, seconds, num_tokens, preempted))
        return True

    def _end_step(self) -> int:
        """Record what the step in flight computed; return how many requests it finished."""
        (plan, result), self._in_flight = self._in_flight, None
        now = self.clock.now()
        self.itl.step(result.token_ids, now)
        finished = self.scheduler.update(plan, result.token_ids, now)
        for request in finished:
            self.itl.forget(request.request_id)
            self.requests[request.request_id] = request.metrics
        self.num_unfinished -= len(finished)
        return len(finished)

    def result(
        self, duration: float, goodput: Mapping[str, float] | None = None
    ) -> SimulationResult:
        """What came of it, rates being over duration (seconds)."""
        metrics = summarize_all([self], duration, goodput)
        return SimulationResult(metrics, self._timeline, self.requests)


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


def duration_of(replicas: Sequence[Replica]) -> float:
    """Seconds from the first arrival to the last token, of all."""
    done = [m for replica in replicas for m in replica.requests.values()]
    first = min((m.arrival_time for m in done), default=0.0)
    last = max((m.finish_time for m in done), default=0.0)
    return max(last - first, 1e-9)


def summarize_all(
    replicas: Sequence[Replica], duration: float, goodput: Mapping[str, float] | None = None
) -> dict[str, float]:
    """metrics.summarize over the requests of all, and the shares of their steps together."""
    done = [m for replica in replicas for m in replica.requests.values()]
    stats, itl = EngineStats(), InterTokenLatencies()
    for replica in replicas:
        stats.take_in(replica.stats)
        itl.take_in(replica.itl)
    metrics = summarize(done, duration, itl, goodput) | stats.utilizations()
    metrics["num_swapped_blocks"] = stats.num_swapped_blocks
    return metrics
