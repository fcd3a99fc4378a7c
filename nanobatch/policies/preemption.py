"""Preemption: reclaim a running request's blocks, and resume it later.

    recompute    free the blocks; later compute all tokens again, prompt and output
    swap         copy the blocks to host memory; later copy them back (extensions/swap.py)

    before   block table [7, 2]   9 tokens computed
    after    block table []       0 tokens computed    waits, by arrival

Recompute needs no memory and no copies, and often little work: freed blocks stay in the prefix
cache until they are handed out again.

Always holds (invariant 10): the tokens of a preempted request are kept, so its output is the
same as without the preemption.

Taught in notebooks/07_the_engine.ipynb. Source: vLLM (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanobatch.block_allocator import BlockAllocator
from nanobatch.request import Request, RequestStatus

Copies = list[tuple[int, int]]  # pairs of block ids, (from, to)


class Preemption(Protocol):
    """What the scheduler calls. The copies go into the plan; the runner makes them."""

    def evict(self, request: Request) -> Copies:
        """Free the blocks of a request; return the copies (device, host) to make first."""
        ...

    def resume(self, request: Request) -> Copies:
        """An evicted request has device blocks again; return the copies (host, device)."""
        ...

    def release(self, request: Request) -> None:
        """Free every block that a request holds; it has ended."""
        ...

    def begin_step(self) -> Sequence[Request]:
        """A step is planned next; return the running requests whose cached tokens were lost."""
        ...

    def end_step(self) -> None:
        """The step was computed, and its copies were made."""
        ...


class Recompute:
    """Free a victim's blocks; it starts again with nothing computed.

    Args:
        allocator: the pool of blocks.
    """

    def __init__(self, allocator: BlockAllocator):
        self.allocator = allocator

    def evict(self, request: Request) -> Copies:
        self.release(request)
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        return []

    def resume(self, request: Request) -> Copies:
        return []

    def release(self, request: Request) -> None:
        self.allocator.free(request.block_table)
        request.block_table = []

    def begin_step(self) -> Sequence[Request]:
        return ()

    def end_step(self) -> None:
        pass
