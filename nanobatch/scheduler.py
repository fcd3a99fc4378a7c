"""One step's plan: which requests compute how many tokens, and who has to give way.

There is no prefill mode and no decode mode. Every step gives each chosen request

    num_scheduled = min(num_tokens - num_computed_tokens, budget left)

which is 1 for a request that decodes, a whole prompt or a chunk of it for one that
prefills, the prompt without its cached blocks after a prefix hit, and everything anew after
a preemption. One step of a budget of 8 tokens:

    running   r0  computed 12 of 13   -> 1      decode
              r1  computed  4 of  9   -> 5      the rest of its prompt
    waiting   r2  computed  0 of  6   -> 2      admitted; a first chunk, cut by the budget
              r3                             no budget left: waits

The life of a step:

    plan = scheduler.schedule(now)           choose, allocate blocks, preempt, admit
    ... the runner computes the plan ...
    scheduler.update(plan, token_ids, now)   advance, append, cache full blocks, finish, free

Always holds (invariants 7 to 11): the budget and max_num_seqs are kept; each running request
gets at least one token in each step, before anyone is admitted; a step schedules something or
the scheduler is idle; whoever was preempted comes back in order of arrival; abort returns
every block at any time. The plan is plain Python, and the same on every machine.

Taught in notebooks/03_iteration_level_scheduling.ipynb and 07_the_engine.ipynb. Source:
iteration-level scheduling of Orca (Yu et al., OSDI 2022), chunked prefill of Sarathi-Serve
(Agrawal et al., OSDI 2024), the unified token arithmetic of vLLM V1.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig, cdiv
from nanobatch.policy import (
    FCFS,
    Policy,
    admits_on_demand,
    arrival,
    make_policy,
    waits_for_leader,
)
from nanobatch.request import Request, RequestStatus


@dataclass(frozen=True)
class ScheduledRequest:
    """One row of a plan: the next num_tokens uncomputed tokens of a request."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the request's last known token is computed here: then one is sampled."""
        return self.request.num_uncomputed_tokens == self.num_tokens


@dataclass
class SchedulerOutput:
    """The plan of one step. Block copies, if any, come before the step computes.

    scheduled: who computes how many tokens.
    preempted: who lost its blocks to make room.
    padding: finished rows of a static batch that still cost their share.
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
        return sum(row.num_tokens for row in self.scheduled)


class Scheduler:
    """Plans steps over a block allocator; usable without a model, on made-up tokens.

    Args:
        config: the knobs; config.num_blocks is set.
        allocator: the pool of blocks.
        policy: who is next; by default what config.policy names.

    Raises:
        ValueError: the pool is not the one that config describes.
    """

    def __init__(
        self, config: EngineConfig, allocator: BlockAllocator, policy: Policy | None = None
    ):
        pool = (allocator.num_blocks, allocator.block_size)
        if pool != (config.num_blocks, config.block_size):
            raise ValueError(
                f"the allocator has {allocator.num_blocks} blocks of {allocator.block_size}; "
                f"config.num_blocks is {config.num_blocks}, block_size {config.block_size}"
            )
        self.config = config
        self.allocator = allocator
        self.policy = make_policy(config.policy) if policy is None else policy
        self.waiting: list[Request] = []  # in order of arrival
        self.running: list[Request] = []  # in order of admission
        self._live: dict[str, Request] = {}
        self._num_added = 0

    # ------------------------------------------------------------------ requests come and go

    def check(self, request: Request) -> None:
        """Raise ValueError if the request may not be added: a live id, or too long."""
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is in use by a live request")
        if request.status is not RequestStatus.WAITING or request.output_token_ids:
            raise ValueError(f"{request} was added before; make a new Request")
        num_prompt = len(request.prompt_token_ids)
        for limit, size in self._limits().items():
            if num_prompt + 1 > size:
                raise ValueError(
                    f"request {request.request_id!r}: a prompt of {num_prompt} tokens and one "
                    f"token of output need {num_prompt + 1}, but {limit} is {size}"
                )

    def _limits(self) -> dict[str, int]:
        """What prompt + output of one request must fit into, by name, in tokens."""
        config = self.config
        limits = {"the pool (num_blocks * block_size)": config.num_blocks * config.block_size}
        if config.max_model_len is not None:
            limits["max_model_len"] = config.max_model_len
        if not config.enable_chunked_prefill:
            # After a preemption, prompt and output must be recomputed in one step.
            limits["max_num_batched_tokens (chunked prefill is off)"] = (
                config.max_num_batched_tokens
            )
        return limits

    def add(self, request: Request) -> None:
        """Enqueue a request, and cut its max_tokens to what can ever fit.

        Raises:
            ValueError: prompt + 1 exceeds a limit, or the id is live; nothing was changed.
        """
        self.check(request)
        room = min(self._limits().values()) - len(request.prompt_token_ids)
        request.max_tokens = min(request.params.max_tokens, room)
        request.arrival_order = self._num_added
        self._num_added += 1
        self._live[request.request_id] = request
        bisect.insort(self.waiting, request, key=arrival)

    def abort(self, request_id: str) -> bool:
        """End a live request, at any time; False if no such request lives."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(self, request: Request, reason: str, now: float | None = None) -> None:
        """End a live request for a reason, take it off its queue and free its blocks."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        del self._live[request.request_id]
        self._release_blocks(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finish_time = now

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id, or None."""
        return self._live.get(request_id)

    # ------------------------------------------------------------------------------ one step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step at time now (seconds). With nothing to do the plan is empty."""
        plan = SchedulerOutput()
        tokens: dict[Request, int] = {}  # the plan being made
        self._serve_running(tokens, plan.preempted)
        if not plan.preempted:
            self._admit(tokens, now)
        for request, num_tokens in tokens.items():
            plan.scheduled.append(ScheduledRequest(request, num_tokens))
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
        return plan

    def _serve_running(self, tokens: dict[Request, int], preempted: list[Request]) -> None:
        """Give every running request its tokens, and the blocks for them."""
        budget = self.config.max_num_batched_tokens
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for the sake of one before it
            # A long chunk leaves one token for each of those behind it (invariant 9).
            num_behind = len(self.running) - len(tokens) - 1
            num_tokens = min(request.num_uncomputed_tokens, budget - num_behind)
            num_blocks = self._num_new_blocks(request, num_tokens)
            while num_blocks > self.allocator.num_free_blocks:
                victim = self.running[-1]
                budget += tokens.pop(victim, 0)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                request.block_table += self.allocator.allocate(num_blocks)
                tokens[request] = num_tokens
                budget -= num_tokens

    def _num_new_blocks(self, request: Request, num_tokens: int) -> int:
        num_needed = cdiv(request.num_computed_tokens + num_tokens, self.config.block_size)
        # Not below 0: after a step that failed the table has room already.
        return max(0, num_needed - len(request.block_table))

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it will compute all of its tokens again."""
        self.running.remove(request)
        self._release_blocks(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        bisect.insort(self.waiting, request, key=arrival)

    def _release_blocks(self, request: Request) -> None:
        self.allocator.free(request.block_table)
        request.block_table = []

    def _admit(self, tokens: dict[Request, int], now: float) -> None:
        """Let waiting requests join while budget, slots and blocks last."""
        config = self.config
        budget = config.max_num_batched_tokens - sum(tokens.values())
        for request in self._in_order(now):
            is_full = budget == 0 or len(self.running) == config.max_num_seqs
            if is_full or waits_for_leader(request, self.allocator):
                return
            cached = self.allocator.match_prefix(request.token_ids, request.cache_salt)
            num_cached = len(cached) * config.block_size
            num_left = request.num_tokens - num_cached
            num_tokens = min(num_left, budget)
            is_forbidden_chunk = num_tokens < num_left and not config.enable_chunked_prefill
            has_room = admits_on_demand(request, cached, tokens, self.allocator)
            if is_forbidden_chunk or not has_room:
                return
            self.allocator.acquire(cached)
            request.block_table = cached
            request.num_computed_tokens = num_cached
            if request.metrics.num_preemptions == 0:
                request.metrics.num_cached_tokens = num_cached
            num_blocks = self._num_new_blocks(request, num_tokens)
            request.block_table += self.allocator.allocate(num_blocks)
            request.status = RequestStatus.RUNNING
            self.waiting.remove(request)
            self.running.append(request)
            tokens[request] = num_tokens
            budget -= num_tokens

    def _in_order(self, now: float) -> list[Request]:
        """The waiting requests, next one first; a copy, as admission takes them out."""
        if isinstance(self.policy, FCFS):
            return list(self.waiting)  # is in order of arrival
        return sorted(self.waiting, key=lambda r: (self.policy.key(r, now), arrival(r)))

    def update(
        self, plan: SchedulerOutput, token_ids: Mapping[str, Sequence[int]], now: float
    ) -> list[Request]:
        """Record what the step computed; return the requests that finished by it.

        Args:
            plan: what schedule() returned.
            token_ids: the sampled tokens by request id, for those rows that sample.
            now: seconds; becomes the time of these tokens.

        Raises:
            ValueError: a row that samples has no token; nothing was changed.
        """
        rows = [row for row in plan.scheduled if row.request.status is RequestStatus.RUNNING]
        for row in rows:
            if row.samples and not token_ids.get(row.request.request_id):
                raise ValueError(
                    f"token_ids has no token for request {row.request.request_id!r}"
                )
        finished = []
        for row in rows:
            request = row.request
            sampled = token_ids[request.request_id] if row.samples else ()
            self._advance(request, row.num_tokens)
            if sampled and request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            reason = self._append(request, sampled)
            if reason is not None:
                self.finish(request, reason, now)
                finished.append(request)
        return finished

    def _advance(self, request: Request, num_tokens: int) -> None:
        """Count tokens as computed; blocks that are full now become findable (invariant 4)."""
        block_size = self.config.block_size
        num_full_before = request.num_computed_tokens // block_size
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens // block_size > num_full_before:
            args = (request.block_table, request.num_computed_tokens, request.cache_salt)
            self.allocator.cache_blocks(request.token_ids, *args)

    def _append(self, request: Request, sampled: Sequence[int]) -> str | None:
        for token_id in sampled:
            reason = request.append_token(token_id)
            if reason is not None:
                return reason
        return None
