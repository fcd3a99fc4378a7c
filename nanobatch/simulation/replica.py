"""One engine on virtual time: the real engine, over a runner that only advances the clock.

    requests --add--> LLMEngine --plan--> SimulatedRunner --cost model--> VirtualClock
                          ^------------ end_step, tokens without meaning ----|

A replica advances from one time to the next, so that several can run side by side and a router
can look at them in between. That time may lie within a step: then the plan is made, and its
tokens are not known yet. So a step begins and ends in two calls.

Always holds: a request that arrives when a step would begin may join that step; the steps are
those of an engine that takes in all that has arrived before it plans.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Source: Vidur (Agrawal et al., MLSys
2024), whose replicas advance by events too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanobatch.config import EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.metrics import EngineStats, InterTokenLatencies, summarize
from nanobatch.models.config import settle_max_model_len
from nanobatch.plan import SchedulerOutput, StepResult
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request, RequestMetrics
from nanobatch.simulation.cost_model import CostModel
from nanobatch.utils.cache_size import blocks_to_swap_to
from nanobatch.utils.clock import VirtualClock

SOME_TOKEN = [0]


class SimulatedRunner:
    """Runs a plan by letting its time pass.

    Args:
        cost_model: says how long a plan takes.
        clock: is advanced by that time.
        output_lens: by request id, the number of tokens after which a stop token ends the
            text; a request that is not in it ends at max_tokens.
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
        """A token for each request that samples: a meaningless one, or a stop token."""
        self.clock.sleep_until(self.clock.now() + self.cost_model.step_seconds(plan))
        sampling = [entry.request for entry in plan.scheduled if entry.samples]
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
    """The result of a simulation.

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
        advance(t)          begin each step that begins before t, end each that ends by t

               t0          t1                     t
        steps  |===========|======================|==========>     begun, not yet ended
                                                  ^ visible at t: the plan, and none of the
                                                    tokens that it will bring

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
        self.clock = VirtualClock()
        runner = SimulatedRunner(cost_model, self.clock, output_lens)
        config = _settle(config, cost_model)
        self.engine = LLMEngine(
            config, runner, clock=self.clock, policy=policy, admission=admission
        )
        self.num_given = self.num_unfinished = 0  # requests
        self.busy_seconds = 0.0
        self.itl = InterTokenLatencies()
        self.requests: dict[str, RequestMetrics] = {}  # those that have finished
        self._keep_timeline = keep_timeline
        self._timeline: list[StepRecord] = []
        self._in_flight: tuple[SchedulerOutput, StepResult] | None = None

    def add(self, request: Request) -> None:
        """Enqueue a request that arrives now, even while a step is in flight.

        Raises:
            ValueError: it can never fit, or its id is live; nothing was changed.
        """
        self.engine.submit([request])
        self.num_given += 1
        self.num_unfinished += 1

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that the prefix cache has now."""
        allocator = self.engine.scheduler.allocator
        found = allocator.match_prefix(request.token_ids, request.cache_salt)
        return len(found) * allocator.block_size

    def advance(self, until: float, count: Callable[[int], object] | None = None) -> None:
        """Let time pass to `until` (seconds; inf: until all is done).

        A step that would begin at `until` does not: a request that arrives then may still
        join it. count is called with the number of requests that a step has finished.
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
        """Plan a step and move the clock to its end; False if there is nothing to do."""
        start = self.clock.now()
        plan = self.engine.begin_step()
        if not plan.scheduled:
            return False
        self._in_flight = plan, self.engine.runner.run(plan)
        seconds = self.clock.now() - start
        self.busy_seconds += seconds
        if self._keep_timeline:
            num_tokens = {e.request.request_id: e.num_tokens for e in plan.scheduled}
            preempted = [request.request_id for request in plan.preempted]
            self._timeline.append(StepRecord(start, seconds, num_tokens, preempted))
        return True

    def _end_step(self) -> int:
        """Record what the step in flight computed; return how many requests it finished."""
        (plan, result), self._in_flight = self._in_flight, None
        self.itl.step(result.token_ids, self.clock.now())
        served = self.engine.end_step(plan, result)
        finished = [self.engine.outputs.take(r) for r in served if r.finish_reason is not None]
        for output in finished:
            self.itl.forget(output.request_id)
            self.requests[output.request_id] = output.metrics
        self.num_unfinished -= len(finished)
        return len(finished)

    def result(
        self, duration: float, goodput: Mapping[str, float] | None = None
    ) -> SimulationResult:
        """The results so far, with rates over duration (seconds)."""
        metrics = summarize_all([self], duration, goodput)
        return SimulationResult(metrics, self._timeline, self.requests)


def _settle(config: EngineConfig, cost_model: CostModel) -> EngineConfig:
    if config.speculative is not None:
        raise ValueError(
            f"speculative is {config.speculative!r}; simulated tokens have no meaning, so "
            "they cannot be guessed: it must be None"
        )
    config = settle_max_model_len(config, cost_model.model)
    num_blocks = cost_model.num_blocks(config.gpu_memory_utilization)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    num_host_blocks = config.num_host_blocks
    if num_host_blocks is None:
        of_each_gpu = cost_model.block_bytes // cost_model.tensor_parallel_size
        num_host_blocks = blocks_to_swap_to(num_blocks, of_each_gpu)
    return dataclasses.replace(config, num_blocks=num_blocks, num_host_blocks=num_host_blocks)


def metrics_of(replicas: Sequence[Replica]) -> list[RequestMetrics]:
    """Times and counts of the requests that have finished, of all."""
    return [m for replica in replicas for m in replica.requests.values()]


def summarize_all(
    replicas: Sequence[Replica], duration: float, goodput: Mapping[str, float] | None = None
) -> dict[str, float]:
    """metrics.summarize over the requests of all, and the shares of their steps together."""
    stats, itl = EngineStats(), InterTokenLatencies()
    for replica in replicas:
        stats.take_in(replica.engine.stats)
        itl.take_in(replica.itl)
    metrics = summarize(metrics_of(replicas), duration, itl, goodput) | stats.utilizations()
    metrics["num_swapped_blocks"] = stats.num_swapped_blocks
    return metrics
