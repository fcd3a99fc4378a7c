"""Asynchronous scheduling: the host plans step n + 1 while the device computes step n.

    plain   host     plan 1 | launch 1 |  waits | record 1 | plan 2 | launch 2 |  waits | ...
            device                     | step 1 |            idle              | step 2 | idle

    here    host     plan 2 | launch 2 | waits | record 1 | plan 3 | launch 3 | waits | ...
            device    ...   step 1             |           step 2                     | step 3

A step takes about max(host, device) instead of host + device. The tokens of step n come to the
host after step n + 1 was launched, so that step is planned without them:

    token_ids    p0 p1 p2 | o0 -3      a placeholder: row 2 of what step n samples
    launch       the device puts that token in the placeholder's place (batch.fill_in)
    record n     the token itself in its place; stops, text, outputs

advance() has this order: plan n + 1, launch it, record n, count n + 1 with placeholders for
what it samples. The order is what makes the rest hold:

- A launch reads num_computed_tokens, so the step is counted after it.
- A placeholder is not computed when it is counted, and all tokens before it are known then:
  blocks that become full are cached by known tokens.
- A request may be in plan n + 1, and end with its token of step n (a stop, a stop string, NaN).
  Its row of step n + 1 is computed for nothing, and thrown away.
- One that reaches max_tokens with its placeholder (ENDING) is not in plan n + 1; it keeps its
  seat and its blocks until the token is known.
- Penalties need the tokens themselves: with such a request step n is recorded first. (A seed
  and min_tokens need only how many there are.)

Blocks that are freed when step n is recorded may be given to others by plan n + 2, while step
n + 1 still writes to them. The device does what it is given in order: whatever step n + 2 reads
from them it has written itself, or was cached before. Copies of swapped blocks are made in that
order too (those to the host wait for the device). Where the launch itself computes (a CPU),
steps never overlap at all. What a launch uploads lies in pinned memory of its own, which torch
gives to nobody else until the copy is done (utils/transfer.py).

Always holds: at most one step is in flight; the outputs are those of the plain loop (invariants
10 and 13), one step() later. If step n fails on the device, or anything else is raised, all
placeholders are dropped, and their requests begin anew (recovery.py).

Seam: LLMEngine.advance and LLMEngine.record; the runner's launch. Source: async scheduling in
vLLM V1; the overlap scheduler of SGLang (NanoFlow: Zhu et al., 2024).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from nanobatch.engine import LLMEngine
from nanobatch.plan import Launched, SchedulerOutput, StepResult
from nanobatch.request import Request, RequestStatus


class InFlight(NamedTuple):
    """The step that the device computes.

    sampling: its requests that sample, in the order of the plan. Row i's placeholder is -1 - i.
    """

    launched: Launched
    sampling: list[Request]

    def expecting(self) -> list[Request]:
        """The requests that still wait for their token: not ended since, nor begun anew."""
        return [r for i, r in enumerate(self.sampling) if r.token_ids[-1] == -1 - i]


class AsyncEngine(LLMEngine):
    """An LLMEngine that has the next step ready when the device has computed one.

    Its runner has `launch(plan, previous) -> Launched`; `previous` is the step before, whose
    tokens the placeholders in the plan stand for, or None if there are none.
    """

    _in_flight: InFlight | None = None

    def advance(self) -> None:
        """Launch a step, and add the outputs of the one before to outputs.ready."""
        if self._in_flight is not None and _needs_tokens(self._in_flight):
            self._record_step()
        plan = self.begin_step()
        try:
            step = self._launch(plan) if plan.scheduled else None
        finally:  # also if the launch has failed: then it is planned again
            self._record_step()
        if step is not None:
            with self._recovering():
                self._count(plan, step)

    def _launch(self, plan: SchedulerOutput) -> InFlight:
        previous = None if self._in_flight is None else self._in_flight.launched
        step = InFlight(
            self.runner.launch(plan, previous),
            [entry.request for entry in plan.scheduled if entry.samples],
        )
        self.stats.count_step(plan, self.config, self.scheduler.allocator)
        return step

    def _record_step(self) -> None:
        """Wait for the step in flight, if there is one, and record its tokens."""
        if self._in_flight is not None:
            with self._recovering():
                step, self._in_flight = self._in_flight, None
                result = step.launched.wait()
                live = step.expecting()
                update = partial(self._put_tokens, live, result)
                self.outputs.make_ready(self.record(live, result, update))

    def _put_tokens(self, requests: list[Request], result: StepResult, now: float) -> None:
        """Put the sampled tokens in place of the placeholders; end requests by them."""
        for request in requests:
            (token_id,) = result.token_ids[request.request_id]
            request.drop_placeholder()
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            reason = request.append_token(token_id)
            if reason is not None:
                self.scheduler.finish(request, reason, now)

    def _count(self, plan: SchedulerOutput, step: InFlight) -> None:
        """Count what the launched step computes; its tokens are placeholders."""
        requests = [entry.request for entry in plan.scheduled]
        self.outputs.mark([r for r in requests if r.status is RequestStatus.RUNNING])
        placeholders = {r.request_id: [-1 - i] for i, r in enumerate(step.sampling)}
        self.scheduler.update(plan, placeholders, None)
        self._in_flight = step


def _needs_tokens(step: InFlight) -> bool:
    """Whether the token that a request waits for has a part in how its next one is sampled."""
    going_on = [r.params for r in step.expecting() if r.status is not RequestStatus.ENDING]
    return any(
        (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0)
        for p in going_on
    )
