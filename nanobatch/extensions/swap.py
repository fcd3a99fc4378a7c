"""Swap: preempt a request by copying its blocks to host memory, and copy them back later.

    device   [ r2 b0 ][ r2 b1 ][ r1 b0 ]  --swap_out-->   host   [ r2 b0 ][ r2 b1 ][      ]
             [  free  ][  free  ][ r1 b0 ]  <--swap_in---

Recompute loses the work on all tokens; swap pays for two copies over the bus instead. Which is
cheaper depends on the length: computing a long prompt again costs more than moving its bytes.
A request that does not fit into host memory is recomputed.

The plan holds pairs of block ids. The runner, which owns the memory, makes the copies before
the step computes.

Always holds (invariants 10 and 11): a host block belongs to at most one request, whose status
is SWAPPED. If a step fails, its copies may be missing: those requests are recomputed.

Seam: policies/preemption.py. Taught in notebooks/07_the_engine.ipynb. Source: vLLM (Kwon et
al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from nanobatch.block_allocator import BlockAllocator
from nanobatch.policies.preemption import Copies, Recompute
from nanobatch.request import Request, RequestStatus
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv


def attach(scheduler: Scheduler) -> None:
    """Let a scheduler preempt by swap."""
    scheduler.preemption = Swap(scheduler.allocator, scheduler.config.num_swap_blocks)


class Swap(Recompute):
    """Preempt by swap while host memory lasts, else by recompute.

    Args:
        allocator: the device's pool.
        num_host_blocks: blocks of host memory.
    """

    def __init__(self, allocator: BlockAllocator, num_host_blocks: int):
        super().__init__(allocator)
        self.host = BlockAllocator(num_host_blocks, 1, enable_prefix_caching=False)
        self.unconfirmed: list[Request] = []  # their copies are made in the current step

    def evict(self, request: Request) -> Copies:
        """Move a request to host memory, if it fits; else free its blocks for recompute."""
        num_blocks = cdiv(request.num_computed_tokens, self.allocator.block_size)
        if not 0 < num_blocks <= self.host.num_free_blocks:
            return super().evict(request)
        request.host_block_table = self.host.allocate(num_blocks)
        copies = list(zip(request.block_table, request.host_block_table, strict=False))
        self.allocator.free(request.block_table)
        request.block_table = []
        request.status = RequestStatus.SWAPPED
        self.unconfirmed.append(request)
        return copies

    def resume(self, request: Request) -> Copies:
        if not request.host_block_table:
            return []  # it was recomputed
        copies = list(zip(request.host_block_table, request.block_table, strict=False))
        self.host.free(request.host_block_table)
        request.host_block_table = []
        self.unconfirmed.append(request)
        return copies

    def release(self, request: Request) -> None:
        super().release(request)
        if request.host_block_table:
            self.host.free(request.host_block_table)
            request.host_block_table = []

    def begin_step(self) -> list[Request]:
        """If the last step failed, recompute the requests that wait for its copies."""
        unfinished = [request for request in self.unconfirmed if not request.is_finished]
        running = [r for r in unfinished if r.status is RequestStatus.RUNNING]
        for request in unfinished:
            super().evict(request)
        self.unconfirmed.clear()
        return running

    def end_step(self) -> None:
        self.unconfirmed.clear()
