"""The loop: requests in, steps, outputs out. It is given a runner and a clock.

    add_request ---> Scheduler.waiting
    step():
      plan   = scheduler.schedule(now)            how many tokens each request computes
      result = runner.run(plan)                   the only part that needs a model
      done   = scheduler.update(plan, ids, now)   append, finish, free
      detokenize ---> RequestOutput

The runner may be a model (ModelRunner), a cost model (SimulatedRunner) or three lines in a
test: anything with `run(plan) -> StepResult`. If it raises, nothing of the step is recorded,
and the next step plans the same work again.

Always holds: a request that is refused changes nothing; nothing is kept of a finished one. An
abort shows once, in the outputs of the next step, and frees every block (invariant 11). NaN
logits end one request with "error" (15). The deltas joined are the text (17).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's LLMEngine.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig, extension_for
from nanobatch.detokenizer import OutputStream, Tokenizer, check_stop
from nanobatch.metrics import EngineStats
from nanobatch.plan import Runner, SchedulerOutput, StepResult
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request, RequestOutput, SamplingParams, check_request_id
from nanobatch.scheduler import Scheduler
from nanobatch.utils.clock import WallClock


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
        check_same_cache(config, getattr(runner, "config", config))
        allocator = BlockAllocator(
            config.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self.clock = WallClock() if clock is None else clock
        self.scheduler = Scheduler(config, allocator, policy, admission)
        self.stats = EngineStats()
        self._outputs: dict[str, OutputStream] = {}  # by request id
        self._groups: dict[str, list[str]] = {}  # live request ids by Request.group
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
        self._check(requests)
        for request in requests:
            if request.seed is None:
                # From the engine's seed and the order of arrival: a fresh engine repeats it.
                text = f"{self.config.seed}/{self._num_arrived}".encode()
                digest = hashlib.blake2b(text, digest_size=7).digest()
                request.seed = int.from_bytes(digest, "big")
            self._num_arrived += 1
            self.scheduler.add(request)
            self._outputs[request.request_id] = OutputStream(request, self.tokenizer)
            if request.group is not None:
                self._groups.setdefault(request.group, []).append(request.request_id)

    def _check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a request cannot be added, or an id or group id is live."""
        for request in requests:
            for name in (request.request_id, request.group):
                if self._is_live(name):
                    raise ValueError(f"request_id {name!r} is in use by a live request")
            self.scheduler.check(request)

    def _is_live(self, name: str | None) -> bool:
        return name in self._groups or self.scheduler.get(name) is not None

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
        ids = self._groups.get(request_id, [request_id])
        requests = [r for r in map(self.scheduler.get, ids) if r is not None]
        for request in requests:
            self.scheduler.finish(request, "abort", self.clock.now())
            self._aborted.append(self.output(request))
        return bool(requests)

    def discard(self, requests: Sequence[Request]) -> None:
        """End those of the requests that live, and show nothing more of any of them."""
        ids = {request.request_id for request in requests}
        for request in requests:
            if self.scheduler.get(request.request_id) is request:
                self.abort(request.request_id)
        self._aborted = [output for output in self._aborted if output.request_id not in ids]

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, or step() has an abort to show."""
        return bool(self._aborted) or self.scheduler.has_unfinished()

    # ------------------------------------------------------------------------------ one step

    def step(self) -> list[RequestOutput]:
        """One iteration; outputs for every request that got a token or ended."""
        plan = self.begin_step()
        requests = []
        if plan.scheduled:
            requests = self.end_step(plan, self.runner.run(plan))
        aborted, self._aborted = self._aborted, []
        return aborted + [self.output(request) for request in requests]

    def begin_step(self) -> SchedulerOutput:
        """Plan a step. With nothing to do the plan is empty."""
        plan = self.scheduler.schedule(self.clock.now())
        self.stats.num_preemptions += len(plan.preempted)
        return plan

    def end_step(self, plan: SchedulerOutput, result: StepResult) -> list[Request]:
        """Record what the runner computed; return the requests that got a token or failed."""
        now = self.clock.now()
        pool = self.scheduler.allocator
        self.stats.count_step(plan, self.config, pool.num_blocks - pool.num_free_blocks)
        live = [e.request for e in plan.scheduled if e.request.finish_reason is None]
        failed = [r for r in live if r.request_id in result.errors] if result.errors else []
        for request in failed:
            live.remove(request)
            self._outputs[request.request_id].error = result.errors[request.request_id]
            self.scheduler.finish(request, "error", now)
        self.scheduler.update(plan, result.token_ids, now)
        counts = [self._take_tokens(request, result, now) for request in live]
        self.stats.count_output(counts)
        if 0 in counts:  # a chunk of a prompt gives no token
            live = [r for r, num_new in zip(live, counts, strict=True) if num_new > 0]
        return failed + live

    def _take_tokens(self, request: Request, result: StepResult, now: float) -> int:
        """Add a request's new tokens to its output; return how many it keeps. A stop string
        that is complete ends the request, and wins over "length"."""
        output = self._outputs[request.request_id]
        num_new = output.extend(result.logprobs.get(request.request_id, ()))
        if output.stopped and request.is_finished:
            request.finish_reason = "stop"
        elif output.stopped:
            self.scheduler.finish(request, "stop", now)
        return num_new

    def output(self, request: Request) -> RequestOutput:
        """A request's output so far. A finished request is forgotten by this call."""
        output = self._outputs[request.request_id].take()
        if request.is_finished:
            del self._outputs[request.request_id]
        if request.is_finished and request.group is not None:
            self._groups[request.group].remove(request.request_id)
            if not self._groups[request.group]:
                del self._groups[request.group]
        return output


def check_same_cache(config: EngineConfig, of_runner: EngineConfig) -> None:
    """Raise ValueError if the engine's plans would not fit into the runner's KV cache."""
    if config.block_size != of_runner.block_size:
        raise ValueError(
            f"config.block_size is {config.block_size}; the runner's is "
            f"{of_runner.block_size}: use runner.config"
        )
    for name, asked, there in (
        ("num_blocks", config.num_blocks, of_runner.num_blocks),
        ("num_host_blocks", config.num_swap_blocks, of_runner.num_swap_blocks),
    ):
        if asked > there:
            raise ValueError(f"config.{name} is {asked}; the runner's cache has {there}")
