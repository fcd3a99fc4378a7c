"""One step's plan: which requests compute how many tokens, and which are preempted.

There is no prefill mode and no decode mode. Every step gives each chosen request

    num_scheduled = min(num_tokens - num_computed_tokens, budget left)

That is 1 for a decode, a prompt or a chunk of it for a prefill, the rest of the prompt after a
prefix hit, and all tokens again after a preemption. (One token is set aside for each
running request that has not had its turn.) A step with a budget of 8 tokens:

    running   r0  computed 12 of 13   -> 1      decode
              r1  computed  4 of  9   -> 5      the rest of its prompt
    waiting   r2  computed  0 of  6   -> 2      admitted; a first chunk, cut by the budget
              r3                             no budget left: waits

The path of a request, and the calls of a step:

    add ---> waiting (by arrival) ---> running (by admission) ---> finished
                ^                         |
                +------- preempted -------+          abort: from anywhere

    plan = scheduler.schedule(now)           choose, allocate blocks, preempt, admit
    ... a runner computes the plan ...
    scheduler.update(plan, token_ids, now)   append tokens, cache full blocks, finish, free

policies/ decides which request is next (ordering.py), whether it has room (admission.py), how
a victim's blocks are freed (preemption.py), and when requests may join (static_batch.py).
Extensions replace the preemption or hook into the step (StepHook).

Always holds (invariants 7 to 11): the budget and max_num_seqs are kept; every running request
gets at least one token in each step, before anyone is admitted; a step schedules something or
the scheduler is idle; preempted requests wait in order of arrival; abort returns every block,
at any time; a refused request changes nothing. Plans are the same on every machine.

Taught in notebooks/03_iteration_level_scheduling.ipynb and 07_the_engine.ipynb. Source:
iteration-level scheduling of Orca (Yu et al., OSDI 2022), chunked prefill of Sarathi-Serve
(Agrawal et al., OSDI 2024), the token arithmetic and the queues of vLLM V1.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.plan import ScheduledRequest, SchedulerOutput, StepHook
from nanobatch.policies.admission import Admission, check_fits, limits, make_admission
from nanobatch.policies.lengths import observe
from nanobatch.policies.ordering import Policy, arrival, in_order, make_policy
from nanobatch.policies.preemption import Preemption, Recompute
from nanobatch.policies.prefix_hits import PrefixHits
from nanobatch.policies.static_batch import make_batching
from nanobatch.request import Request, RequestStatus, check_request_id
from nanobatch.utils.arithmetic import cdiv

RUNNING, ENDING = RequestStatus.RUNNING, RequestStatus.ENDING


class Scheduler:
    """Plans steps over a block allocator. Usable without a model, on made-up tokens.

    Args:
        config: the settings; config.num_blocks is set.
        allocator: the pool of blocks.
        policy: which request is next; by default the one that config.policy names.
        admission: which requests have room; by default the one that config.admission names.

    Raises:
        ValueError: allocator and config disagree, or a setting needs a missing extension.
    """

    def __init__(
        self,
        config: EngineConfig,
        allocator: BlockAllocator,
        policy: Policy | None = None,
        admission: Admission | None = None,
    ):
        pool = (allocator.num_blocks, allocator.block_size)
        if pool != (config.num_blocks, config.block_size):
            raise ValueError(
                f"the allocator has {allocator.num_blocks} blocks of {allocator.block_size}; "
                f"config.num_blocks is {config.num_blocks}, block_size {config.block_size}"
            )
        self.config = config
        self.allocator = allocator
        self.policy = make_policy(policy, config.policy)
        self.admission = admission or make_admission(config.admission, allocator)
        self._num_added = 0
        self.restart(())

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin with these requests waiting, nothing of them computed, and an unused pool."""
        self.batching = make_batching(self.config.batching)
        self.preemption: Preemption = Recompute(self.allocator)
        self._prefix_hits = PrefixHits(self.allocator)
        self.hooks: list[StepHook] = []
        self.waiting: list[Request] = sorted(requests, key=arrival)  # in order of arrival
        self.running: list[Request] = []  # in order of admission
        self._live = {request.request_id: request for request in self.waiting}
        for extension in self.config.extensions("preemption", "speculative"):
            extension.attach(self)

    # ---------------------------------------------------------------- requests come and go

    def check(self, request: Request) -> None:
        """Raise ValueError if the request may not be added: a live id, or too long."""
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is in use by a live request")
        if request.status is not RequestStatus.WAITING or request.output_token_ids:
            raise ValueError(f"{request} was added before; make a new Request")
        check_fits(request, self.config)

    def add(self, request: Request) -> None:
        """Enqueue a request, and cut its max_tokens to what can ever fit.

        Raises:
            ValueError: prompt + 1 exceeds a limit, or the id is live; nothing was changed.
        """
        self.check(request)
        room = min(limits(self.config).values()) - len(request.prompt_token_ids)
        request.max_tokens = min(request.params.max_tokens, room)
        request.arrival_order = self._num_added
        self._num_added += 1
        self._live[request.request_id] = request
        bisect.insort(self.waiting, request, key=arrival)

    def abort(self, request_id: str) -> bool:
        """End a live request, at any time; False if none has this id."""
        check_request_id(request_id)
        request = self._live.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request is not None

    def finish(self, request: Request, reason: str, now: float | None = None) -> None:
        """End a live request for a reason: take it off its queue and free its blocks."""
        is_running = request.status in (RUNNING, ENDING)
        request.drop_placeholder()
        del self._live[request.request_id]
        self.preemption.release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finish_time = now
        if is_running:
            self.batching.leave(request, self.running)
        else:
            self.waiting.remove(request)
        if reason in ("stop", "length"):
            observe(self.policy, request)
            observe(self.admission, request)

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id, or None."""
        return self._live.get(request_id)

    # ----------------------------------------------------------------------- plan one step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step at time now (seconds). With nothing to do the plan is empty."""
        for request in self.preemption.begin_step():
            self._requeue(request)  # a step failed: its cached tokens cannot be trusted
        for hook in self.hooks:
            hook.begin_step()
        plan = SchedulerOutput(padding=self.batching.padding(self.running))  # static batches
        budget = self._serve_running(plan, now)
        # Not after a preemption: the freed blocks are for those that run, not for the victim.
        if not plan.preempted:
            budget = self._admit(plan, budget, now)
        for hook in self.hooks:
            hook.end_step(plan, budget)
        return plan

    def _serve_running(self, plan: SchedulerOutput, now: float) -> int:
        """Give every running request tokens, and blocks for them; return the budget left."""
        block_size, scheduled = self.config.block_size, plan.scheduled
        budget = self.config.max_num_batched_tokens
        # After a failed step several may be within their prompts: a chunk then leaves one token
        # for each running request behind it (invariant 9).
        num_behind = len(self.running) - len(plan.padding)
        for request in self.running.copy():
            if request.status is not RUNNING:
                continue  # finished, or preempted by a request before it
            num_behind -= 1
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget - num_behind)
            num_slots = len(request.block_table) * block_size
            if request.num_computed_tokens + num_tokens > num_slots:
                while not self.allocate_blocks(request, num_tokens):
                    victim = self._preempt_one(plan, now)
                    num_given_back = plan.remove(victim)
                    budget += num_given_back
                    if victim is request:
                        break
                    if num_given_back == 0:
                        num_behind -= 1  # the victim was still to come
                    num_tokens = min(request.num_uncomputed_tokens, budget - num_behind)
                if request.status is not RUNNING:
                    continue
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return budget

    def allocate_blocks(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table by room for num_tokens more; False if the pool is short."""
        num_needed = cdiv(request.num_computed_tokens + num_tokens, self.config.block_size)
        # Not below 0: after a step that failed, the table already has room.
        num_blocks = max(0, num_needed - len(request.block_table))
        if num_blocks > self.allocator.num_free_blocks:
            return False
        request.block_table += self.allocator.allocate(num_blocks)
        return True

    # ----------------------------------------------------------------------------- preempt

    def _preempt_one(self, plan: SchedulerOutput, now: float) -> Request:
        """Preempt the request admitted last, or the one that the policy likes least."""
        running = [request for request in self.running if request.status is RUNNING]
        victim = running[-1]
        if getattr(self.policy, "preempts_worst", False):
            victim = max(running, key=lambda r: (self.policy.key(r, now), arrival(r)))
        victim.metrics.num_preemptions += 1
        plan.preempted.append(victim)
        plan.swap_out += self.preemption.evict(victim)
        self._requeue(victim)
        return victim

    def _requeue(self, request: Request) -> None:
        """Move a running request back to its place in `waiting`."""
        self.batching.leave(request, self.running)
        bisect.insort(self.waiting, request, key=arrival)

    # ------------------------------------------------------------------------------- admit

    def _admit(self, plan: SchedulerOutput, budget: int, now: float) -> int:
        """Let waiting requests join while budget, seats and blocks last; return the budget
        left. It ends at the first request that does not fit: none behind it may overtake."""
        config, admission = self.config, self.admission
        num_seats = config.max_num_seqs - len(self.running)
        if budget == 0 or num_seats == 0 or not self.waiting:
            return budget
        admission.begin([r for r in self.running if r.status is RUNNING])  # no padding
        if config.enable_prefix_caching and getattr(self.policy, "uses_hits", False):
            self._prefix_hits.refresh(self.waiting)
        candidates = self.batching.candidates(self.waiting, self.running)
        for request in in_order(candidates, self.policy, now, config.max_wait, num_seats):
            if budget == 0 or self.batching.must_wait(request):
                return budget
            cached = self._hit(request)
            num_cached = len(cached) * config.block_size or request.num_computed_tokens
            num_left = request.num_tokens - num_cached
            may_be_cut = config.enable_chunked_prefill or request.output_token_ids
            if num_left > budget and not may_be_cut:
                return budget  # only recompute after a preemption may be in chunks
            if not admission.has_room(request, cached):
                break
            num_tokens = min(num_left, budget)
            self._start(plan, ScheduledRequest(request, num_tokens), cached, now)
            admission.admitted(request)
            budget -= num_tokens
        self.batching.close()  # all have joined, or seats or blocks are short
        return budget

    def _hit(self, request: Request) -> list[int]:
        """Cached blocks of a request's prefix; [] if its computed tokens were kept (swap)."""
        if request.num_computed_tokens > 0:
            return []
        return self.allocator.match_prefix(request.token_ids, request.cache_salt)

    def _start(
        self, plan: SchedulerOutput, entry: ScheduledRequest, cached: list[int], now: float
    ) -> None:
        """Move a waiting request to `running`, with blocks for its first tokens."""
        request = entry.request
        if request.num_computed_tokens == 0:
            self.allocator.acquire(cached)
            request.block_table = cached
            request.start(len(cached) * self.config.block_size, now)
        has_blocks = self.allocate_blocks(request, entry.num_tokens)
        assert has_blocks, f"{request} was admitted without room"
        plan.swap_in += self.preemption.resume(request)
        request.status = RUNNING
        self.waiting.remove(request)
        self.running.append(request)
        plan.scheduled.append(entry)

    # ------------------------------------------------------------------- record the results

    def update(
        self, plan: SchedulerOutput, token_ids: Mapping[str, Sequence[int]], now: float | None
    ) -> list[Request]:
        """Record what the step computed; return the requests that finished by it.

        Args:
            plan: what schedule() returned.
            token_ids: the sampled tokens by request id, for the entries that sample; tokens
                after a stop are dropped.
            now: seconds; becomes the time of these tokens. None: they are placeholders.

        Raises:
            ValueError: an entry that samples has no token; nothing was changed.
        """
        for entry in plan.scheduled:
            request = entry.request
            has_none = not token_ids.get(request.request_id)
            if has_none and entry.samples and request.status is RUNNING:
                raise ValueError(f"token_ids has no token for request {request.request_id!r}")
        self.preemption.end_step()
        finished = []
        for entry in plan.scheduled:
            request = entry.request
            if request.status is not RUNNING:
                continue  # aborted since
            reason = self._advance(entry, token_ids, now)
            if reason is not None:
                self.finish(request, reason, now)
                finished.append(request)
        for hook in self.hooks:
            hook.update()
        return finished

    def _advance(
        self, entry: ScheduledRequest, token_ids: Mapping[str, Sequence[int]], now: float | None
    ) -> str | None:
        """Append its sampled tokens, count the computed ones; return why it ends, or None."""
        request, block_size = entry.request, self.config.block_size
        num_full_before = request.num_computed_tokens // block_size
        num_computed = request.num_computed_tokens + entry.num_tokens
        reason = None
        if num_computed >= len(request.token_ids):
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            for token_id in token_ids[request.request_id]:
                reason = request.append_token(token_id)
                if reason is not None:
                    break
            # The last token is not computed yet, and rejected drafts do not count.
            if num_computed >= len(request.token_ids):
                num_computed = len(request.token_ids) - 1
        request.num_computed_tokens = num_computed
        if num_computed // block_size > num_full_before:
            # Blocks that are full now become findable (invariant 4).
            self.allocator.cache_blocks(
                request.token_ids, request.block_table, num_computed, request.cache_salt
            )
        return reason
