"""Requests come and go: who waits, who runs, and what is done when somebody ends.

    add -----> waiting (by arrival) -----> running (by admission) -----> finished
                  ^                           |
                  +------- preempted ---------+            abort: from anywhere

Always holds (invariants 8 and 11): a request that can never fit is refused when it is added,
and nothing is changed; whoever ends gives back every block, at any time; an id may be used
again once its request has ended.

Source: the queues of vLLM's scheduler.
"""

from __future__ import annotations

import bisect

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.extensions.speculative import make_drafter
from nanobatch.policies.admission import Admission, check_fits, limits, make_admission
from nanobatch.policies.ordering import Policy, arrival, make_policy, observe
from nanobatch.policies.preemption import Preemption
from nanobatch.request import Request, RequestStatus
from nanobatch.utils.arithmetic import cdiv


class Queues:
    """The two queues and all live requests by id. Arguments: see Scheduler."""

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
        self.policy = make_policy(config.policy) if policy is None else policy
        self.admission = (
            make_admission(config.admission, allocator) if admission is None else admission
        )
        self.drafter = make_drafter(config)
        num_host_blocks = config.num_host_blocks if config.preemption == "swap" else 0
        self.preemption = Preemption(allocator, num_host_blocks)
        self.waiting: list[Request] = []  # in order of arrival
        self.running: list[Request] = []  # in order of admission; finished rows of a batch too
        self._live: dict[str, Request] = {}
        self._num_added = 0
        self._batch_before = 0  # a static batch may be joined by those added before this many

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
        """End a live request, at any time; False if no such request lives."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(self, request: Request, reason: str, now: float | None = None) -> None:
        """End a live request for a reason, take it off its queue and free its blocks."""
        is_running = request.status is RequestStatus.RUNNING
        del self._live[request.request_id]
        self.preemption.release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.metrics.finish_time = now
        if not is_running:
            self.waiting.remove(request)
        elif self.config.batching == "static":
            self._drain()
        else:
            self.running.remove(request)
        if reason in ("stop", "length"):
            observe(self.policy, request)
            observe(self.admission, request)

    def _drain(self) -> None:
        """Give up the slots of a static batch when all of its rows have finished."""
        if all(request.is_finished for request in self.running):
            self.running.clear()

    def _take_back_blocks(self) -> None:
        """What rejected drafts took is anybody's again."""
        for request in self.running:
            num_blocks = cdiv(request.num_computed_tokens, self.config.block_size)
            if len(request.block_table) > num_blocks:
                self.allocator.free(request.block_table[num_blocks:])
                del request.block_table[num_blocks:]

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._live)

    def get(self, request_id: str) -> Request | None:
        """The live request of this id, or None."""
        return self._live.get(request_id)
