"""Who is next, and who may enter.

A policy is an object with `key(request, now)`; the smallest key goes first. Ties go by
arrival. Whoever is next and may not enter stops admission: nobody slips past. To add one,
write the class, and hand it to `Scheduler(config, allocator, policy=...)`.

Admission decides whether there is memory for whoever is next.

Taught in notebooks/03_iteration_level_scheduling.ipynb.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import cdiv
from nanobatch.request import Request, RequestStatus


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    def key(self, request: Request, now: float) -> object:
        """Comparable; the request with the smallest is admitted next."""
        ...


def arrival(request: Request) -> tuple[float, int]:
    """When a request came: its arrival time, then the order in which it was added."""
    return request.arrival_time, request.arrival_order


class FCFS:
    """First come, first served (Orca; the default of vLLM)."""

    def key(self, request: Request, now: float) -> tuple[float, int]:
        """Order of arrival."""
        return arrival(request)


def make_policy(name: str) -> Policy:
    """The policy that EngineConfig.policy names (config.py has checked the name)."""
    return {"fcfs": FCFS}[name]()


def admits_on_demand(
    request: Request,
    cached: Sequence[int],
    scheduled: Iterable[Request],
    allocator: BlockAllocator,
) -> bool:
    """Admission "on_demand" (vLLM; TensorRT-LLM's MAX_UTILIZATION): is there room now?

    Room for all tokens the request has so far, not for those it may yet generate; when that
    turns out wrong, somebody is preempted. It looks one step ahead: the blocks that those in
    the plan will want next must be there too, else somebody would be preempted at once.

    Args:
        request: who wants in.
        cached: blocks of its prefix hit. Those that are free now count as taken by it.
        scheduled: who is in the plan already, their blocks for this step allocated.
        allocator: the pool.
    """

    def num_blocks_next_step(r: Request) -> int:
        # All known tokens and one more; the very last token of a request is never computed.
        return cdiv(min(r.num_tokens + 1, r.max_total_tokens - 1), allocator.block_size)

    num_taken_by_hit = sum(allocator.ref_count(block) == 0 for block in cached)
    num_needed = num_blocks_next_step(request) - len(cached) + num_taken_by_hit
    num_needed += sum(num_blocks_next_step(r) - len(r.block_table) for r in scheduled)
    return num_needed <= allocator.num_free_blocks


def waits_for_leader(request: Request, allocator: BlockAllocator) -> bool:
    """Whether waiting a little turns the prompt of one of n siblings into a prefix hit."""
    leader = request.leader
    if leader is None or not allocator.enable_prefix_caching:
        return False
    num_full_blocks = (len(leader.prompt_token_ids) - 1) // allocator.block_size
    num_shared = num_full_blocks * allocator.block_size
    is_running = leader.status is RequestStatus.RUNNING
    return is_running and leader.num_computed_tokens < num_shared
