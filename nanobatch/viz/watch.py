"""A recorder between an engine and its runner: what each step did to each request.

Always holds: a Watch changes neither plans nor tokens. It records a plan just before it runs.

Drawn by lives.py; used in notebooks/07_the_engine.ipynb.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanobatch.engine import LLMEngine
from nanobatch.plan import ScheduledRequest, SchedulerOutput, StepResult
from nanobatch.request import Request, RequestStatus


@dataclass(frozen=True)
class Cell:
    """What one request did in one step.

    kind: "waiting", "swapped", "prefill" or "decode".
    num_tokens: computed in this step. samples: whether a token was sampled for it.
    num_cached: if it was admitted in this step, tokens found in the prefix cache.
    num_back: tokens whose blocks were copied back from the host in this step.
    """

    kind: str
    num_tokens: int = 0
    samples: bool = False
    num_cached: int = 0
    num_back: int = 0


@dataclass(frozen=True)
class Step:
    """One step: when the runner began and ended (seconds), and each request's cell."""

    start: float
    end: float
    cells: dict[Request, Cell]
    preempted: list[Request]


class Watch:
    """Wraps the runner of an engine and records each step.

    Args:
        engine: this object replaces its runner until `leave()` is called.
    """

    def __init__(self, engine: LLMEngine):
        self._runner = engine.runner
        self._engine = engine
        self.steps: list[Step] = []
        engine.runner = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)  # vocab_size and the like: the runner's

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Record the plan, then run it."""
        before = self.steps[-1].cells if self.steps else {}
        cells = {row.request: _cell_of_row(row, before) for row in plan.scheduled}
        for request in self._engine.scheduler.waiting:
            is_swapped = request.status is RequestStatus.SWAPPED
            cells[request] = Cell("swapped" if is_swapped else "waiting")
        start = self._engine.clock.now()
        result = self._runner.run(plan)
        end = self._engine.clock.now()
        self.steps.append(Step(start, end, cells, list(plan.preempted)))
        return result

    def leave(self) -> None:
        """Give the engine its runner back. The record stays."""
        self._engine.runner = self._runner

    @property
    def requests(self) -> list[Request]:
        """All requests seen, in order of arrival; the index is the request's number."""
        seen = dict.fromkeys(request for step in self.steps for request in step.cells)
        return sorted(seen, key=lambda request: request.arrival_order)

    def token_gaps(self, request: Request) -> list[float]:
        """Seconds between the request's tokens: its inter-token latencies."""
        times = [
            step.end
            for step in self.steps
            if request in step.cells and step.cells[request].samples
        ]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


def _cell_of_row(row: ScheduledRequest, before: Mapping[Request, Cell]) -> Cell:
    request, last = row.request, before.get(row.request)
    is_decode = row.num_tokens == 1 and row.samples and len(request.output_token_ids) > 0
    is_admitted = last is None or last.kind in ("waiting", "swapped")
    num_found = request.num_computed_tokens if is_admitted else 0
    was_swapped = last is not None and last.kind == "swapped"
    return Cell(
        "decode" if is_decode else "prefill",
        row.num_tokens,
        row.samples,
        num_cached=0 if was_swapped else num_found,
        num_back=num_found if was_swapped else 0,
    )
