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

What is left of the budget then goes to drafts, guesses at the tokens to come of those that
decode (extensions/speculative.py): r0 would compute 1 + 4 tokens, if r1 and r2 left four.

Who is next is the policy's business (ordering.py), who may enter that of the admission rule
(admission.py). With static batching the batch is gathered once, from those who wait when it is
empty (if need be over several steps, as far as the budget goes); a finished row gives back its
blocks and keeps its slot until all have finished.

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

from nanobatch.plan import ScheduledRequest, SchedulerOutput
from nanobatch.policies.admission import OnDemand, waits_for_leader
from nanobatch.policies.ordering import arrival, in_order
from nanobatch.queues import Queues
from nanobatch.request import Request, RequestStatus
from nanobatch.utils.arithmetic import cdiv

RUNNING = RequestStatus.RUNNING


class Scheduler(Queues):
    """Plans steps over a block allocator; usable without a model, on made-up tokens.

    Args:
        config: the knobs; config.num_blocks is set.
        allocator: the pool of blocks.
        policy: who is next; by default what config.policy names.
        admission: who may enter; by default what config.admission names.

    Raises:
        ValueError: the pool is not the one that config describes.
    """

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step at time now (seconds). With nothing to do the plan is empty."""
        self._forget_copies()
        if self.drafter is not None:
            self._take_back_blocks()
        plan = SchedulerOutput()
        budget = self._serve_running(plan, now)
        if self.config.batching == "static":
            budget = self._gather(plan, budget, now)
        elif not plan.preempted:
            budget = self._admit(plan, self.waiting, budget, now)
        if self.drafter is not None:
            self._add_drafts(plan, budget)
        return plan

    def _gather(self, plan: SchedulerOutput, budget: int, now: float) -> int:
        """Let a static batch be joined by those who waited when it was empty, until anything
        but the budget stops one of them; return what is left of the budget."""
        if not self.running:
            self._batch_before = self._num_added
        waited = [r for r in self.waiting if r.arrival_order < self._batch_before]
        if not plan.preempted:
            budget = self._admit(plan, waited, budget, now)
        if plan.preempted or budget > 0:
            self._batch_before = 0
        plan.padding = [request for request in self.running if request.is_finished]
        return budget

    def _serve_running(self, plan: SchedulerOutput, now: float) -> int:
        """Give every running request its tokens, and blocks for them; return what is left of
        the budget."""
        block_size, scheduled = self.config.block_size, plan.scheduled
        budget = self.config.max_num_batched_tokens
        # A long chunk leaves one token for each of those behind it (invariant 9).
        num_behind = len(self.running)
        if self.config.batching == "static":
            num_behind = sum(request.status is RUNNING for request in self.running)
        for request in self.running.copy():
            if request.status is not RUNNING:
                continue  # finished, or preempted for the sake of one before it
            num_behind -= 1
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget - num_behind)
            num_slots = len(request.block_table) * block_size
            if request.num_computed_tokens + num_tokens > num_slots:
                while not self._add_blocks(request, num_tokens):
                    victim = self._preempt_one(plan, now)
                    num_given_back = plan.give_back(victim)
                    budget += num_given_back
                    if victim is request:
                        break
                    num_behind -= num_given_back == 0
                    num_uncomputed = request.num_uncomputed_tokens
                    num_tokens = min(num_uncomputed, budget - num_behind)
                if request.status is not RUNNING:
                    continue
            scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return budget

    def _add_blocks(self, request: Request, num_tokens: int) -> bool:
        """Let the request's table hold num_tokens more; False if the pool has not enough."""
        num_needed = cdiv(request.num_computed_tokens + num_tokens, self.config.block_size)
        # Not below 0: after a step that failed the table has room already.
        num_blocks = max(0, num_needed - len(request.block_table))
        if num_blocks > self.allocator.num_free_blocks:
            return False
        request.block_table += self.allocator.allocate(num_blocks)
        return True

    def _add_drafts(self, plan: SchedulerOutput, budget: int) -> None:
        """Let those who decode have guesses checked, with what is left of the budget, and with
        blocks that nobody who runs needs in this step or, if all guesses are right, in the
        next: a draft preempts nobody and keeps nobody out."""
        allocator, block_size = self.allocator, self.config.block_size
        look_ahead = OnDemand(allocator)
        look_ahead.begin([request for request in self.running if request.status is RUNNING])
        num_spare = allocator.num_free_blocks - look_ahead.num_promised
        for row in plan.scheduled:
            request = row.request
            if request.num_uncomputed_tokens > 1:
                continue
            num_next = request.num_tokens + 1
            num_blocks = look_ahead.num_blocks(request)
            most = min(
                self.config.num_speculative_tokens,
                budget,
                (num_blocks + num_spare) * block_size - num_next,
                # The very last token of a request is never computed.
                request.max_total_tokens - num_next,
            )
            if most > 0:
                draft = self.drafter.propose(request.token_ids, most)
                row.draft_token_ids = draft
                row.num_tokens += len(draft)
                budget -= len(draft)
                num_spare -= max(0, cdiv(num_next + len(draft), block_size) - num_blocks)
                self._add_blocks(request, row.num_tokens)

    # ------------------------------------------------------------------------- who gives way

    def _preempt_one(self, plan: SchedulerOutput, now: float) -> Request:
        """Take the blocks of the last admitted, or of whom the policy likes least."""
        running = [request for request in self.running if request.status is RUNNING]
        victim = running[-1]
        if getattr(self.policy, "preempts_worst", False):
            victim = max(running, key=lambda r: (self.policy.key(r, now), arrival(r)))
        self.running.remove(victim)
        self._drain()
        victim.metrics.num_preemptions += 1
        plan.preempted.append(victim)
        plan.swap_out += self.preemption.take_blocks(victim)
        bisect.insort(self.waiting, victim, key=arrival)
        return victim

    def _forget_copies(self) -> None:
        """After a step that failed nobody knows which of its copies were made: whoever they
        were for computes its tokens again."""
        for request in self.preemption.unconfirmed:
            if request.status is RUNNING:
                self.running.remove(request)
                self._drain()
                bisect.insort(self.waiting, request, key=arrival)
            if not request.is_finished:
                self.preemption.start_anew(request)
        self.preemption.unconfirmed.clear()

    # ------------------------------------------------------------------------ who comes next

    def _admit(
        self, plan: SchedulerOutput, waiting: Sequence[Request], budget: int, now: float
    ) -> int:
        """Let waiting requests join while budget, slots and blocks last; return what is left
        of the budget."""
        config, admission = self.config, self.admission
        num_slots = config.max_num_seqs - len(self.running)
        if budget == 0 or num_slots == 0 or not waiting:
            return budget
        admission.begin(self.running)
        self._look_up_hits()
        for request in in_order(waiting, self.policy, now, config.max_wait, num_slots):
            if budget == 0 or waits_for_leader(request, self.allocator):
                return budget
            cached = self._hit(request)
            num_cached = len(cached) * config.block_size or request.num_computed_tokens
            num_left = request.num_tokens - num_cached
            num_tokens = min(num_left, budget)
            is_forbidden_chunk = num_tokens < num_left and not config.enable_chunked_prefill
            if is_forbidden_chunk or not admission.has_room(request, cached):
                return budget
            self._enter(request, cached, num_tokens, plan, now)
            admission.admitted(request)
            plan.scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return budget

    def _hit(self, request: Request) -> list[int]:
        """Cached blocks of its prefix; none for one whose blocks come back from the host."""
        if request.status is RequestStatus.SWAPPED:
            return []
        return self.allocator.match_prefix(request.token_ids, request.cache_salt)

    def _look_up_hits(self) -> None:
        if self.config.enable_prefix_caching and getattr(self.policy, "uses_hits", False):
            for request in self.waiting:
                request.num_hit_tokens = len(self._hit(request)) * self.config.block_size

    def _enter(
        self,
        request: Request,
        cached: list[int],
        num_tokens: int,
        plan: SchedulerOutput,
        now: float,
    ) -> None:
        """Make a waiting request a running one, with blocks for its first tokens."""
        is_swapped = request.status is RequestStatus.SWAPPED
        if not is_swapped:
            self.allocator.acquire(cached)
            request.block_table = cached
            request.start(len(cached) * self.config.block_size, now)
        has_blocks = self._add_blocks(request, num_tokens)
        assert has_blocks, f"{request} was admitted without room"
        if is_swapped:
            plan.swap_in += self.preemption.bring_back(request)
        request.status = RUNNING
        self.waiting.remove(request)
        self.running.append(request)

    # ------------------------------------------------------------------- what became of it

    def update(
        self, plan: SchedulerOutput, token_ids: Mapping[str, Sequence[int]], now: float
    ) -> list[Request]:
        """Record what the step computed; return the requests that finished by it.

        Args:
            plan: what schedule() returned.
            token_ids: the sampled tokens by request id, for those rows that sample: the drafts
                that were accepted, and one more. What lies behind a stop is dropped.
            now: seconds; becomes the time of these tokens.

        Raises:
            ValueError: a row that samples has no token; nothing was changed.
        """
        for row in plan.scheduled:
            request_id = row.request.request_id
            if not token_ids.get(request_id) and row.samples and row.request.status is RUNNING:
                raise ValueError(f"token_ids has no token for request {request_id!r}")
        self.preemption.unconfirmed.clear()
        finished = []
        for row in plan.scheduled:
            request = row.request
            if request.status is not RUNNING:
                continue  # aborted since
            reason = self._advance(row, token_ids, now)
            if reason is not None:
                self.finish(request, reason, now)
                finished.append(request)
        return finished

    def _advance(
        self, row: ScheduledRequest, token_ids: Mapping[str, Sequence[int]], now: float
    ) -> str | None:
        """Append a row's tokens and count what is computed of them; why it ends, or None."""
        request, block_size = row.request, self.config.block_size
        num_drafts = len(row.draft_token_ids)
        num_full_before = request.num_computed_tokens // block_size
        num_computed = request.num_computed_tokens + row.num_tokens - num_drafts
        reason = None
        if num_computed == len(request.token_ids):
            num_before = num_computed
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            for token_id in token_ids[request.request_id]:
                reason = request.append_token(token_id)
                if reason is not None:
                    break
            if num_drafts:
                # The last one is the model's own, and not computed yet.
                num_accepted = min(len(request.token_ids) - num_before - 1, num_drafts)
                request.metrics.num_draft_tokens += num_drafts
                request.metrics.num_accepted_tokens += num_accepted
                num_computed += num_accepted
        request.num_computed_tokens = num_computed
        if num_computed // block_size > num_full_before:
            # Blocks that are full now become findable (invariant 4).
            self.allocator.cache_blocks(
                request.token_ids, request.block_table, num_computed, request.cache_salt
            )
        return reason
