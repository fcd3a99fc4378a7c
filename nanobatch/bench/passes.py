"""One pass over the requests: by static batches, or by a fresh engine.

A pass gives the tokens, so that a comparison of speeds can check first that the work was the
same; and the least work of each step (simulation/roofline.py), so that a speed can be held
against what the hardware can do.

Always holds: a pass begins with a cold cache, and no request starts before it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanobatch.bench.hardware import Hardware
from nanobatch.bench.static_batching import run_static_batch
from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.llm import build_engine
from nanobatch.metrics import InterTokenLatencies, duration_of, summarize
from nanobatch.model_runner import ModelRunner
from nanobatch.plan import Launched, SchedulerOutput, StepResult
from nanobatch.request import RequestMetrics, SamplingParams
from nanobatch.simulation.roofline import Work, step_work


@dataclass
class Run:
    """One system's pass over the requests; times in seconds from its start.

    work: the least that each step had to do. itl: times between tokens. gpu_utilization: what
    NVML says, if it does.
    """

    outputs: list[list[int]]
    metrics: list[RequestMetrics]
    slot_utilization: float
    work: list[Work]
    itl: InterTokenLatencies | None = None
    gpu_utilization: float | None = None

    def summary(
        self, hardware: Hardware | None, goodput: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """The figures under the keys of bench.py's JSON; a share of the roofline if the
        hardware was measured."""
        duration = duration_of(self.metrics)
        figures = summarize(self.metrics, duration, self.itl, goodput)
        figures["slot_utilization"] = self.slot_utilization
        if hardware is not None:
            at_best = sum(work.seconds(*hardware) for work in self.work)
            figures["roofline_utilization"] = at_best / duration
        if self.gpu_utilization is not None:
            figures["nvml_gpu_utilization"] = self.gpu_utilization
        return figures


@dataclass
class WatchedRunner:
    """A runner that notes the least work of each of its steps."""

    runner: ModelRunner
    work: list[Work] = field(default_factory=list)

    def __post_init__(self):
        self.can_overlap, self.clock = self.runner.can_overlap, self.runner.clock

    def run(self, plan: SchedulerOutput) -> StepResult:
        self._note(plan)
        return self.runner.run(plan)

    def launch(self, plan: SchedulerOutput, previous: Launched | None) -> Launched:
        self._note(plan)
        return self.runner.launch(plan, previous)

    def _note(self, plan: SchedulerOutput) -> None:
        rows = [(s.request.num_computed_tokens, s.num_tokens) for s in plan.scheduled]
        num_logits = sum(s.num_logits for s in plan.scheduled)
        sizes = (self.runner.dtype.itemsize, self.runner.layout.dtype.itemsize)
        self.work.append(step_work(self.runner.model.config, rows, num_logits, *sizes))


def run_static(
    runner: ModelRunner, items: Sequence[WorkItem], batch_size: int, num_slots: int
) -> Run:
    """Batches of at most batch_size, of those that have arrived when the last one is done."""
    clock, itl = runner.clock, InterTokenLatencies()
    outputs, metrics, work = [], [], []
    start = clock.now()
    while len(outputs) < len(items):
        first = len(outputs)
        clock.sleep_until(start + items[first].arrival_time)
        now = clock.now() - start
        batch = [i for i in items[first : first + batch_size] if i.arrival_time <= now]
        names = [str(first + row) for row in range(len(batch))]
        tokens, timed, batch_work = _run_batch(runner, batch, names, start, itl)
        outputs += tokens
        metrics += timed
        work += batch_work
    num_useful_rows = sum(map(len, outputs))
    return Run(outputs, metrics, num_useful_rows / (len(work) * num_slots), work, itl)


def _run_batch(
    runner: ModelRunner,
    batch: Sequence[WorkItem],
    names: Sequence[str],
    start: float,
    itl: InterTokenLatencies,
) -> tuple[list[list[int]], list[RequestMetrics], list[Work]]:
    """Tokens and metrics of one static batch, and the least work of each step.

    A row of the batch is credited at its own last token, though a server that returns whole
    batches would make it wait for the longest.
    """
    clock, config = runner.clock, runner.model.config
    now = clock.now() - start
    timed = [
        RequestMetrics(i.arrival_time, now, num_prompt_tokens=len(i.prompt_token_ids))
        for i in batch
    ]
    tokens: list[list[int]] = [[] for _ in batch]
    work = []
    prompts = [i.prompt_token_ids for i in batch]
    max_tokens = [i.num_output_tokens for i in batch]
    spans = [(0, len(prompt)) for prompt in prompts]  # (computed before, in this step)
    for emitted in run_static_batch(
        runner.model, prompts, max_tokens, cache_dtype=runner.layout.dtype
    ):
        now = clock.now() - start
        itl.step([names[row] for row in emitted], now)
        alive = [spans[row] for row in emitted]
        work.append(step_work(config, alive, len(alive), runner.dtype.itemsize))
        spans = [(computed + num_tokens, 1) for computed, num_tokens in spans]
        for row, token_id in emitted.items():
            tokens[row].append(token_id)
            if len(tokens[row]) == 1:
                timed[row].first_token_time = now
            timed[row].finish_time = now
            timed[row].num_output_tokens = len(tokens[row])
    return tokens, timed, work


def run_engine(runner: ModelRunner, items: Sequence[WorkItem], config: EngineConfig) -> Run:
    """A fresh engine around the runner, which keeps nothing between requests."""
    watched, itl = WatchedRunner(runner), InterTokenLatencies()
    config = replace(config, num_blocks=runner.config.num_blocks)
    engine = build_engine(watched, config)
    start = engine.clock.now()
    coming, done = list(enumerate(items))[::-1], {}
    while coming or engine.has_unfinished():
        if not engine.has_unfinished():
            engine.clock.sleep_until(start + coming[-1][1].arrival_time)
        while coming and start + coming[-1][1].arrival_time <= engine.clock.now():
            i, item = coming.pop()
            engine.add_request(
                item.prompt_token_ids,
                SamplingParams(
                    temperature=0, max_tokens=item.num_output_tokens, ignore_eos=True
                ),
                request_id=str(i),
                arrival_time=start + item.arrival_time,
            )
        outs = engine.step()
        itl.step([out.request_id for out in outs], engine.clock.now())
        done |= {out.request_id: out for out in outs if out.finished}
    outs = [done[str(i)] for i in range(len(items))]
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "finish_time")
    metrics = [
        replace(o.metrics, **{n: getattr(o.metrics, n) - start for n in names}) for o in outs
    ]
    tokens = [o.token_ids for o in outs]
    return Run(tokens, metrics, engine.stats.slot_utilization, watched.work, itl)
