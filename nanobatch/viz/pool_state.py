"""A pool of KV-cache blocks at one moment, copied so that it can be drawn later.

    take_state   from an allocator and some block tables
    state_of     from a scheduler and its running requests

Always holds: a state is a copy; it does not change when the allocator goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanobatch.block_allocator import BlockAllocator
from nanobatch.scheduler import Scheduler


@dataclass(frozen=True)
class PoolState:
    """A pool at one moment.

    Attributes:
        num_blocks, block_size: of the pool.
        tables: the block table of each request, by the request's number.
        num_tokens: tokens in the cache, by the request's number.
        cached_free: free blocks that a prefix match can still find.
        title: written above the figure.
    """

    num_blocks: int
    block_size: int
    tables: dict[int, tuple[int, ...]]
    num_tokens: dict[int, int]
    cached_free: frozenset[int]
    title: str = ""

    def holders(self, block_id: int) -> list[int]:
        """The numbers of the requests whose tables hold the block."""
        return [i for i, table in self.tables.items() if block_id in table]

    def filled(self, request: int, index: int) -> float:
        """Share of the slots in the index-th block of a request that hold a token."""
        num_here = self.num_tokens[request] - index * self.block_size
        return min(1.0, max(0.0, num_here / self.block_size))


def take_state(
    allocator: BlockAllocator,
    tables: Mapping[int, Sequence[int]],
    num_tokens: Mapping[int, int] | None = None,
    title: str = "",
) -> PoolState:
    """Copy the present state of an allocator and of some block tables.

    Args:
        allocator: the pool.
        tables: block tables, by the request's number.
        num_tokens: tokens in the cache, by the request's number; None: all blocks are full.
        title: written above the figure.
    """
    if num_tokens is None:
        num_tokens = {i: len(table) * allocator.block_size for i, table in tables.items()}
    cached_free = frozenset(
        block
        for block in range(allocator.num_blocks)
        if allocator.is_cached(block) and allocator.ref_count(block) == 0
    )
    copies = {i: tuple(table) for i, table in tables.items()}
    size = (allocator.num_blocks, allocator.block_size)
    return PoolState(*size, copies, dict(num_tokens), cached_free, title)


def state_of(scheduler: Scheduler, title: str = "") -> PoolState:
    """take_state for the running requests of a scheduler, numbered in order of arrival."""
    running = [request for request in scheduler.running if not request.is_finished]
    tables = {request.arrival_order: request.block_table for request in running}
    num_tokens = {request.arrival_order: request.num_computed_tokens for request in running}
    return take_state(scheduler.allocator, tables, num_tokens, title)
