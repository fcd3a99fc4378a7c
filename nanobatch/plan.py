"""One step's plan, in plain Python: the scheduler makes it, a runner computes it.

    SchedulerOutput    the step: its entries, preempted requests, blocks to copy
    ScheduledRequest   one entry: a request, and how many of its tokens are computed
    StepResult         what the runner gives back: tokens, log-probabilities, errors
    Launched           a step that a device has been given, and that can be waited for
    StepHook           what an extension may add to a step

Always holds: between schedule() and update() a request's num_computed_tokens counts what
earlier steps computed, and its block_table already has room for this step.

Source: the names are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanobatch.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """Compute the next num_tokens uncomputed tokens of a request.

    draft_token_ids: guesses that follow its known tokens, counted in num_tokens
        (extensions/speculative.py).
    """

    request: Request
    num_tokens: int
    draft_token_ids: Sequence[int] = ()

    @property
    def samples(self) -> bool:
        """Whether the request's last known token is computed here: then one is sampled."""
        num_known = self.num_tokens - len(self.draft_token_ids)
        return self.request.num_uncomputed_tokens == num_known

    @property
    def num_logits(self) -> int:
        """Positions whose logits are needed: the last known token and each draft."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass
class SchedulerOutput:
    """The plan of one step. Its block copies are made before the step computes.

    scheduled: which requests compute how many tokens.
    preempted: requests that lost their blocks to make room.
    padding: finished requests of a static batch that still take a slot.
    swap_out, swap_in: pairs of block ids, (device, host) and (host, device).
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    padding: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(entry.num_tokens for entry in self.scheduled)

    def remove(self, request: Request) -> int:
        """Drop a request's entry, if it has one; return its number of tokens."""
        for i, entry in enumerate(self.scheduled):
            if entry.request is request:
                return self.scheduled.pop(i).num_tokens
        return 0


@dataclass
class StepResult:
    """What a runner returns for a plan.

    token_ids: the sampled tokens by request id, for the entries that sample.
    logprobs: by request id, one {token_id: log-probability} for each sampled token.
    errors: by request id, why an entry has no token; the request ends with "error".
    """

    token_ids: Mapping[str, Sequence[int]]
    logprobs: Mapping[str, Sequence[dict[int, float]]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Sequence[Request], samples: Iterable[Sequence]) -> StepResult:
        """From each request's samples (sampler.Sampled), at least one: tokens, or an error."""
        result = cls({}, {}, {})
        for request, sampled in zip(requests, samples, strict=True):
            request_id = request.request_id
            if sampled[0].error is not None:
                result.errors[request_id] = sampled[0].error
                continue
            result.token_ids[request_id] = [token.token_id for token in sampled]
            if sampled[0].logprobs is not None:
                result.logprobs[request_id] = [token.logprobs for token in sampled]
        return result


@dataclass(frozen=True)
class Launched:
    """A step that a device has been given.

    wait: its result, when it is done; it does not wait for steps that were launched later.
    tokens_S: what it samples, a tensor int64 [S] on the device, by row; None: nothing.
    """

    wait: Callable[[], StepResult]
    tokens_S: object | None = None


class Runner(Protocol):
    """Computes plans. May state `vocab_size` and `eos_token_ids` of its model."""

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute one plan."""
        ...


class StepHook(Protocol):
    """What an extension may add to a step."""

    def begin_step(self) -> None:
        """A step is planned next."""

    def end_step(self, plan: SchedulerOutput, budget: int) -> None:
        """The plan is complete; `budget` tokens are left for the hook to add."""

    def update(self) -> None:
        """The plan was computed, and its requests have their new tokens."""
