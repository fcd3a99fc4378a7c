"""After something was raised in the middle of a step: back to what is certain.

    raised by     a policy, an admission rule, a clock, a second Ctrl-C, a lack of memory
    in doubt      queues, block tables, the pool, whatever of the step was recorded
    certain       the requests, and their tokens as they were before the step

So the step is undone: its tokens are dropped, and every request waits again with nothing
computed, as after a preemption. It gets the same tokens again (invariants 10 and 13). The pool
and the prefix cache start empty, since what a block holds is in doubt too.

(If only the runner raises, nothing has been recorded, and nothing is in doubt.)

Source: fail-stop recovery from a log of what was confirmed; here the log is the tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.outputs import Outputs
from nanobatch.request import Request, RequestStatus
from nanobatch.scheduler import Scheduler


@contextlib.contextmanager
def recovering(
    scheduler: Scheduler,
    outputs: Outputs,
    ended: Sequence[Request] = (),
) -> Iterator[None]:
    """If something is raised within, let all requests of `outputs` begin anew, and raise it.

    Args:
        outputs: what is marked within is taken back, and every placeholder.
        ended: requests that end by it, with "abort".
    """
    outputs.marked = []  # of what is done already
    try:
        yield
    except BaseException:
        for stream, num_tokens in outputs.in_doubt():
            stream.rewind(num_tokens)
            outputs.add(stream)
        for request in ended:
            request.status, request.finish_reason = RequestStatus.FINISHED, "abort"
        requests = [stream.request for stream in outputs.streams.values()]
        restart(scheduler, [request for request in requests if not request.is_finished])
        outputs.make_ready([request for request in requests if request.is_finished])
        raise


def restart(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Let a scheduler, in whatever state, begin anew with these requests, by recompute."""
    pool, requests = scheduler.allocator, list(requests)
    BlockAllocator.__init__(pool, pool.num_blocks, pool.block_size, pool.enable_prefix_caching)
    for request in requests:
        request.block_table, request.host_block_table = [], []
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
    scheduler.restart(requests)
