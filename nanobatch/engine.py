"""The loop: requests in, steps, outputs out. It is given a runner and a clock.

    add_request ---> Scheduler.waiting
    step():
      plan   = scheduler.schedule(now)            who computes how many tokens
      result = runner.run(plan)                   the only part that needs a model
      done   = scheduler.update(plan, ids, now)   append, finish, free
      detokenize ---> RequestOutput

The runner may be a model (ModelRunner), a cost model, or three lines in a test: anything
with `run(plan) -> StepResult`. If it raises, nothing of the step is recorded, and the next
step plans the same work again.

Always holds: a request that is refused changes nothing; an abort shows once, in the outputs
of the next step; what a finished request held is let go (invariants 11, 15, 17).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's LLMEngine.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.detokenizer import IncrementalDetokenizer
from nanobatch.metrics import EngineStats
from nanobatch.plan import SchedulerOutput
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request, RequestOutput, SamplingParams
from nanobatch.scheduler import Scheduler


@dataclass
class StepResult:
    """What a runner made of a plan.

    token_ids: the sampled tokens by request id, for the rows that sample.
    logprobs: by request id, one {token_id: log-probability} for each sampled token.
    errors: by request id, why a row has no token; the request ends with "error".
    """

    token_ids: Mapping[str, Sequence[int]]
    logprobs: Mapping[str, Sequence[dict[int, float]]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """Computes plans. May say `vocab_size` and `eos_token_ids` of its model."""

    def run(self, plan: SchedulerOutput) -> StepResult: ...


class WallClock:
    """Seconds of real time, from an arbitrary start."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, t: float) -> None:
        time.sleep(max(0.0, t - self.now()))


@dataclass
class _Progress:
    """What the engine keeps of a live request besides the Request itself."""

    detokenizer: IncrementalDetokenizer | None  # where there is a tokenizer
    logprobs: list[dict[int, float]] | None
    family: str | None  # the id that n siblings were added under


class LLMEngine:
    """Continuous batching over any runner.

    Args:
        config: its num_blocks is set (ModelRunner.config is such a one).
        runner: computes plans.
        tokenizer: turns text to tokens and back; without one, prompts are token ids.
        clock: by default the wall clock.
        policy, admission: in place of those that config names; see Scheduler.

    Raises:
        ValueError: config.num_blocks is None.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        tokenizer=None,
        clock: WallClock | None = None,
        policy: Policy | None = None,
        admission: Admission | None = None,
    ):
        if config.num_blocks is None:
            raise ValueError("config.num_blocks is None; the engine needs a number >= 1")
        allocator = BlockAllocator(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.clock = WallClock() if clock is None else clock
        self.scheduler = Scheduler(config, allocator, policy, admission)
        self.stats = EngineStats()
        self._progress: dict[str, _Progress] = {}
        self._families: dict[str, list[str]] = {}  # live siblings by the id they were added as
        self._aborted: list[RequestOutput] = []  # to show in the next step
        self._ids = itertools.count()
        self._num_arrived = 0

    # ------------------------------------------------------------------ requests come and go

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Enqueue a prompt (text or token ids) and return its request id.

        With params.n > 1 the outputs come under the ids `id-0`, `id-1`, ... The arrival time
        (by default now) counts for order and metrics; the request may be served at once.

        Raises:
            ValueError: the prompt is empty, too long, or not in the vocabulary; text without
                a tokenizer; the id is live. Nothing was enqueued.
        """
        requests = self.prepare(prompt, params, request_id, arrival_time, priority, cache_salt)
        self.submit(requests)
        family = self._progress[requests[0].request_id].family
        return requests[0].request_id if family is None else family

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Make and check the request (n of them for n > 1) without enqueueing anything."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; it must be SamplingParams")
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop is {params.stop!r}; stop strings need a model with a tokenizer"
            )
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise ValueError(f"request_id is {request_id!r}; it must be a non-empty string")
        token_ids = self._encode(prompt)
        arrival_time = self.clock.now() if arrival_time is None else arrival_time
        request_id = self._new_id() if request_id is None else request_id
        sources = (self.runner, self.tokenizer)
        eos = [t for source in sources for t in getattr(source, "eos_token_ids", ())]
        ids = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        self._check_ids(request_id, ids)
        shared = {"arrival_time": arrival_time, "priority": priority, "cache_salt": cache_salt}
        requests = [Request(i, token_ids, params, eos_token_ids=eos, **shared) for i in ids]
        for i, request in enumerate(requests):
            request.seed = None if params.seed is None else params.seed + i
            request.leader = requests[0] if i > 0 else None
            self.scheduler.check(request)
        return requests

    def _check_ids(self, request_id: str, ids: list[str]) -> None:
        """Whoever lives must go by another name: abort(name) has to mean one thing."""
        for taken in {request_id, *ids}:
            if taken in self._families or self.scheduler.get(taken) is not None:
                raise ValueError(f"request_id {taken!r} is in use by a live request")

    def submit(self, requests: Sequence[Request]) -> None:
        """Enqueue what prepare() made; all or, with a ValueError, nothing."""
        ids = [request.request_id for request in requests]
        family = ids[0].rpartition("-")[0] if len(ids) > 1 else None
        self._check_ids(family or ids[0], ids)
        for request in requests:
            self.scheduler.check(request)
        if family is not None:
            self._families[family] = ids
        for request in requests:
            if request.seed is None:
                # From the engine's seed and the order of arrival: a fresh engine repeats it.
                text = f"{self.config.seed}/{self._num_arrived}".encode()
                digest = hashlib.blake2b(text, digest_size=7).digest()
                request.seed = int.from_bytes(digest, "big")
            self._num_arrived += 1
            self.scheduler.add(request)
            logprobs = None if request.params.logprobs is None else []
            self._progress[request.request_id] = _Progress(
                self._new_detokenizer(request), logprobs, family
            )

    def _new_id(self) -> str:
        return next(
            name
            for name in map(str, self._ids)
            if name not in self._families and self.scheduler.get(name) is None
        )

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the prompt is text, and the model has no tokenizer")
            prompt.encode()  # a lone surrogate is no text: UnicodeEncodeError, a ValueError
            token_ids = self.tokenizer.encode(prompt) if prompt else []
        else:
            token_ids = prompt
        vocab_size = getattr(self.runner, "vocab_size", None)
        if vocab_size is not None and isinstance(token_ids, Sequence):
            bad = next((t for t in token_ids if isinstance(t, int) and t >= vocab_size), None)
            if bad is not None:
                raise ValueError(f"prompt_token_ids has {bad}; not in [0, {vocab_size})")
        return token_ids

    def _new_detokenizer(self, request: Request):
        if self.tokenizer is None:
            return None
        stream = self.tokenizer.stream(request.prompt_token_ids)
        return IncrementalDetokenizer(stream, request.params.stop, request.params.min_tokens)

    def abort(self, request_id: str) -> bool:
        """End a request (or all siblings of one) at any time; False if no such one lives."""
        ids = list(self._families.get(request_id, [request_id]))
        requests = [r for r in map(self.scheduler.get, ids) if r is not None]
        for request in requests:
            self.scheduler.finish(request, "abort", self.clock.now())
            self._aborted.append(self._output(request))
        return bool(requests)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished()

    # ------------------------------------------------------------------------------ one step

    def step(self) -> list[RequestOutput]:
        """One iteration; outputs for every request that got a token or ended."""
        plan = self.scheduler.schedule(self.clock.now())
        self.stats.num_preemptions += len(plan.preempted)
        outputs = []
        if plan.scheduled:
            result = self.runner.run(plan)
            allocator = self.scheduler.allocator
            num_blocks_in_use = allocator.num_blocks - allocator.num_free_blocks
            self.stats.count_step(plan, self.config, num_blocks_in_use)
            outputs = self._record(plan, result)
        aborted, self._aborted = self._aborted, []
        return aborted + outputs

    def _record(self, plan: SchedulerOutput, result: StepResult) -> list[RequestOutput]:
        now = self.clock.now()
        rows = [row for row in plan.scheduled if not row.request.is_finished]  # by an abort
        failed = [row.request for row in rows if row.request.request_id in result.errors]
        sampling = [row.request for row in rows if row.samples and row.request not in failed]
        before = [
            (r.metrics.num_output_tokens, r.metrics.num_accepted_tokens) for r in sampling
        ]
        for request in failed:
            self.scheduler.finish(request, "error", now)
        self.scheduler.update(plan, result.token_ids, now)
        for request, (num_output, num_accepted) in zip(sampling, before, strict=True):
            self._take_tokens(request, result, num_output, now)
            self.stats.count_output(request.metrics, num_output, num_accepted)
        return [self._output(r, result.errors.get(r.request_id)) for r in failed + sampling]

    def _take_tokens(
        self, request: Request, result: StepResult, num_before: int, now: float
    ) -> None:
        """Turn a request's output from token num_before on into text; end it where a stop
        string is complete. Its log-probabilities are those of the tokens that stay."""
        progress = self._progress[request.request_id]
        if progress.detokenizer is not None:
            self._detokenize(request, progress.detokenizer, num_before, now)
        if progress.logprobs is not None:
            num_new = len(request.output_token_ids) - num_before
            progress.logprobs += result.logprobs.get(request.request_id, ())[:num_new]

    def _detokenize(
        self,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        num_before: int,
        now: float,
    ) -> None:
        num_left = len(request.output_token_ids) - num_before
        for token_id in request.output_token_ids[num_before:]:
            is_shown = token_id not in request.stop_token_ids + request.eos_token_ids
            num_left -= 1
            if detokenizer.append(token_id if is_shown else None):
                request.drop_tokens(num_left)
                break
        if request.is_finished:
            detokenizer.finish()
        if detokenizer.stopped:
            if request.is_finished:
                request.finish_reason = "stop"  # it wins over "length"
            else:
                self.scheduler.finish(request, "stop", now)

    def _output(self, request: Request, error: str | None = None) -> RequestOutput:
        """What to show of a request now. A finished one is forgotten with it."""
        progress = self._progress[request.request_id]
        detokenizer = progress.detokenizer
        delta = "" if detokenizer is None else detokenizer.take_delta(request.is_finished)
        if request.is_finished:
            self._forget(request.request_id)
        return RequestOutput(
            request_id=request.request_id,
            text="" if detokenizer is None else detokenizer.sent_text,
            delta=delta,
            token_ids=list(request.output_token_ids),
            logprobs=None if progress.logprobs is None else list(progress.logprobs),
            finish_reason=request.finish_reason,
            finished=request.is_finished,
            metrics=request.metrics,
            error=error,
        )

    def _forget(self, request_id: str) -> None:
        family = self._progress.pop(request_id).family
        if family is not None:
            self._families[family].remove(request_id)
            if not self._families[family]:
                del self._families[family]
