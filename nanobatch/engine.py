"""The loop: requests in, steps, outputs out. It is given a runner and a clock.

    add_request ---> Scheduler.waiting
    step():
      plan   = scheduler.schedule(now)            how many tokens each request computes
      result = runner.run(plan)                   the only part that needs a model
      done   = scheduler.update(plan, ids, now)   append, finish, free
      detokenize ---> RequestOutput

The runner may be a model (ModelRunner), a cost model (SimulatedRunner) or three lines in a
test: anything with `run(plan) -> StepResult`. If it raises, nothing of the step is recorded,
and the next step plans the same work again. If a policy, a clock or a tokenizer raises, so too
(recovery.py). Ctrl-C takes effect between steps, and threads take turns (utils/interrupts.py).

Always holds: a request that is refused changes nothing; nothing is kept of a finished one. An
abort shows once, in the outputs of the next step, and frees every block (invariant 11). NaN
logits end one request with "error" (15). The deltas joined are the text (17).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's LLMEngine.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig, extension_for
from nanobatch.detokenizer import Tokenizer, check_stop
from nanobatch.metrics import EngineStats
from nanobatch.outputs import Outputs, OutputStream
from nanobatch.plan import Runner, SchedulerOutput, StepResult
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.recovery import recovering
from nanobatch.request import Request, RequestOutput, SamplingParams, check_request_id
from nanobatch.scheduler import Scheduler
from nanobatch.utils.clock import WallClock
from nanobatch.utils.interrupts import Guard


class LLMEngine:
    """Continuous batching over any runner.

    Args:
        config: the settings, with num_blocks: usually runner.config.
        runner: computes plans.
        tokenizer: turns text to tokens and back; without one, prompts are token ids.
        clock: by default the wall clock.
        policy, admission: in place of those that config names; see Scheduler.

    Raises:
        ValueError: config.num_blocks is None, or a setting needs a missing extension.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None = None,
        clock: WallClock | None = None,
        policy: Policy | None = None,
        admission: Admission | None = None,
    ):
        if config.num_blocks is None:
            raise ValueError(
                "config.num_blocks is None; the engine needs a number >= 1: see runner.config"
            )
        config.check_fits(getattr(runner, "config", config))
        allocator = BlockAllocator(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.clock = WallClock() if clock is None else clock
        self.scheduler = Scheduler(config, allocator, policy, admission)
        self.stats = EngineStats()
        self.outputs = Outputs()
        self._recovering = functools.partial(recovering, self.scheduler, self.outputs)
        self._ids = itertools.count()
        self._num_arrived = 0
        self.guard = Guard()  # held by step, submit, abort and discard

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

        With params.n > 1 the outputs have the ids `id-0`, `id-1`, ... The arrival time (by
        default now) sets order and metrics; one in the future does not delay the request.

        Raises:
            ValueError: the prompt is empty, too long, or not in the vocabulary; text without
                a tokenizer; the id is live. Nothing was enqueued.
        """
        requests = self.prepare(prompt, params, request_id, arrival_time, priority, cache_salt)
        self.submit(requests)
        return requests[0].group or requests[0].request_id

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
        check_stop(params.stop, self.tokenizer)
        token_ids = self._encode(prompt)  # before an id is used up
        sources = (self.runner, self.tokenizer)
        request = Request(
            self._new_id() if request_id is None else request_id,
            token_ids,
            params,
            arrival_time=self.clock.now() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            eos_token_ids=[t for s in sources for t in getattr(s, "eos_token_ids", ())],
        )
        extension, allocator = extension_for("n", params.n), self.scheduler.allocator
        requests = [request] if extension is None else extension.split(request, allocator)
        self._check(requests)
        return requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Enqueue what prepare() made; all or, with a ValueError, nothing."""
        with self.guard:
            self._check(requests)
            streams = [OutputStream(request, self.tokenizer) for request in requests]
            with self._recovering(ended=requests):
                for request, stream in zip(requests, streams, strict=True):
                    if request.seed is None:  # the same in a fresh engine, by order of arrival
                        text = f"{self.config.seed}/{self._num_arrived}".encode()
                        digest = hashlib.blake2b(text, digest_size=7).digest()
                        request.seed = int.from_bytes(digest, "big")
                    self._num_arrived += 1
                    self.scheduler.add(request)
                    self.outputs.add(stream)

    def _check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a request cannot be added, or an id or group id is live."""
        for request in requests:
            for name in (request.request_id, request.group):
                if self._is_live(name):
                    raise ValueError(f"request_id {name!r} is in use by a live request")
            self.scheduler.check(request)

    def _is_live(self, name: str | None) -> bool:
        return name in self.outputs.groups or self.scheduler.get(name) is not None

    def _new_id(self) -> str:
        return next(name for name in map(str, self._ids) if not self._is_live(name))

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "the prompt is text, and this engine has no tokenizer; pass tokenizer="
                )
            prompt.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
            prompt = self.tokenizer.encode(prompt) if prompt else []
        vocab_size = getattr(self.runner, "vocab_size", None)
        if vocab_size is not None and isinstance(prompt, Sequence):
            bad = next((t for t in prompt if isinstance(t, int) and t >= vocab_size), None)
            if bad is not None:
                raise ValueError(f"prompt_token_ids has {bad}; not in [0, {vocab_size})")
        return prompt

    def abort(self, request_id: str) -> bool:
        """End a request, or all of a group, at any time; False if none of that id is live."""
        check_request_id(request_id)
        with self.guard:
            ids = self.outputs.groups.get(request_id, [request_id])
            requests = [r for r in map(self.scheduler.get, ids) if r is not None]
            self._end(requests)
        return bool(requests)

    def discard(self, requests: Sequence[Request]) -> None:
        """End those of the requests that live, and show nothing more of any of them."""
        with self.guard:
            self._end([r for r in requests if self.scheduler.get(r.request_id) is r])
            ids = {request.request_id for request in requests}
            ready = self.outputs.ready
            self.outputs.ready = deque(out for out in ready if out.request_id not in ids)

    def _end(self, requests: Sequence[Request]) -> None:
        with self._recovering(ended=requests):
            self.outputs.mark(requests)
            for request in requests:
                self.scheduler.finish(request, "abort", self.clock.now())
            self.outputs.make_ready(requests)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or step() has an abort to show."""
        return bool(self.outputs.ready) or self.scheduler.has_unfinished()

    # ------------------------------------------------------------------------------ one step

    def step(self) -> list[RequestOutput]:
        """One iteration; outputs for every request that got a token or ended."""
        with self.guard:
            self.advance()
        with self.guard.lock:  # if Ctrl-C has waited, they wait for the next step
            ready, self.outputs.ready = self.outputs.ready, deque()
            return list(ready)

    def advance(self) -> None:
        """One iteration, which adds to outputs.ready. The guard is held."""
        plan = self.begin_step()
        if plan.scheduled:
            result = self.runner.run(plan)
            with self._recovering():
                self.outputs.make_ready(self.end_step(plan, result))

    def begin_step(self) -> SchedulerOutput:
        """Plan a step. With nothing to do the plan is empty."""
        with self._recovering():
            plan = self.scheduler.schedule(self.clock.now())
        self.stats.num_preemptions += len(plan.preempted)
        return plan

    def end_step(self, plan: SchedulerOutput, result: StepResult) -> list[Request]:
        """Record what the runner computed; return the requests that got a token or failed."""
        self.stats.count_step(plan, self.config, self.scheduler.allocator)
        live = [e.request for e in plan.scheduled if e.request.finish_reason is None]
        update = functools.partial(self.scheduler.update, plan, result.token_ids)
        return self.record(live, result, update)

    def record(
        self, live: list[Request], result: StepResult, update: Callable[[float], object]
    ) -> list[Request]:
        """End those that failed and take them out of `live`; update(now) gives the others their
        tokens. Return the requests that got a token or failed."""
        now = self.clock.now()
        self.outputs.mark(live)
        failed = [r for r in live if r.request_id in result.errors] if result.errors else []
        for request in failed:
            live.remove(request)
            self.outputs.streams[request.request_id].error = result.errors[request.request_id]
            self.scheduler.finish(request, "error", now)
        update(now)
        counts = [self._take_tokens(request, result, now) for request in live]
        self.stats.count_output(counts)
        return failed + list(itertools.compress(live, counts))  # a prompt's chunk gives none

    def _take_tokens(self, request: Request, result: StepResult, now: float) -> int:
        """Add a request's new tokens to its output; return how many it keeps. A stop string
        that is complete ends the request, and wins over "length"."""
        output = self.outputs.streams[request.request_id]
        num_new = output.extend(result.logprobs.get(request.request_id, ()))
        reason = "error" if output.error is not None else "stop" if output.stopped else None
        if reason is not None and request.is_finished:
            request.finish_reason = reason
        elif reason is not None:
            self.scheduler.finish(request, reason, now)
        return num_new
