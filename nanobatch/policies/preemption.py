"""Who gives way: its blocks are taken, and what it takes to come back.

    recompute    the blocks are freed; all tokens, prompt and output, are computed again
    swap         the blocks' contents go to host memory and come back later

    device   [ r2 b0 ][ r2 b1 ][ r1 b0 ]  --swap_out-->   host   [ r2 b0 ][ r2 b1 ][      ]
             [  free  ][  free  ][ r1 b0 ]  <--swap_in---

Recompute loses the work of the prompt and of every token since; swap pays for two copies over
the bus instead. Which is cheaper depends on the length: to compute a long prompt anew costs
more than to move its bytes. What does not fit into host memory is recomputed.

The plan names copies only as pairs of block ids. Whoever has the memory (ModelRunner) makes
them before the step computes.

Always holds (invariants 10 and 11): a host block belongs to at most one request, which has
status SWAPPED; whose copies were planned in a step that failed computes its tokens anew, since
nobody knows whether they were made.

Taught in notebooks/07_the_engine.ipynb. Source: vLLM (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from nanobatch.block_allocator import BlockAllocator
from nanobatch.request import Request, RequestStatus
from nanobatch.utils.arithmetic import cdiv

Copies = list[tuple[int, int]]


class Preemption:
    """Takes blocks from requests and gives them back.

    Args:
        allocator: the device's pool.
        num_host_blocks: blocks of host memory to swap to; 0: recompute.
    """

    def __init__(self, allocator: BlockAllocator, num_host_blocks: int = 0):
        self.allocator = allocator
        self.host = BlockAllocator(num_host_blocks, 1, False) if num_host_blocks else None
        self.unconfirmed: list[Request] = []  # whose copies the step has yet to make

    def take_blocks(self, request: Request) -> Copies:
        """Take a running request's blocks; (device, host) pairs to copy, if it is swapped."""
        num_blocks = cdiv(request.num_computed_tokens, self.allocator.block_size)
        num_host_blocks = 0 if self.host is None else self.host.num_free_blocks
        if not 0 < num_blocks <= num_host_blocks:
            self.start_anew(request)
            return []
        request.host_block_table = self.host.allocate(num_blocks)
        pairs = list(zip(request.block_table, request.host_block_table, strict=False))
        self.allocator.free(request.block_table)
        request.block_table = []
        request.status = RequestStatus.SWAPPED
        self.unconfirmed.append(request)
        return pairs

    def start_anew(self, request: Request) -> None:
        """It will wait, without blocks, and compute all of its tokens again."""
        self.release(request)
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING

    def bring_back(self, request: Request) -> Copies:
        """(host, device) pairs to copy for a swapped request that has device blocks again."""
        pairs = list(zip(request.host_block_table, request.block_table, strict=False))
        self.host.free(request.host_block_table)
        request.host_block_table = []
        self.unconfirmed.append(request)
        return pairs

    def release(self, request: Request) -> None:
        """Free whatever blocks a request holds, here and on the host."""
        self.allocator.free(request.block_table)
        request.block_table = []
        if request.host_block_table:
            self.host.free(request.host_block_table)
            request.host_block_table = []
