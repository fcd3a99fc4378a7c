"""Parallel sampling: n independent outputs of one prompt, SamplingParams(n=3).

    add_request("x")  ->  x-0   seed        computes the prompt
                          x-1   seed + 1    wait for x-0, then find the prompt in the
                          x-2   seed + 2    prefix cache

The samples are ordinary requests. They share a group id, under which they are aborted together.
In a static batch nobody waits: all start at once, and those that start together each compute
the prompt.

Always holds: the samples are those of n separate requests with these seeds; with continuous
batching and the prefix cache on, the first one's full blocks of the prompt are shared, not
computed again.

Seam: Request.group and Request.must_wait. Source: parallel sampling in vLLM (Kwon et al., SOSP
2023, section 4.4).
"""

from __future__ import annotations

from functools import partial

from nanobatch.block_allocator import BlockAllocator
from nanobatch.request import Request, RequestStatus


def split(parent: Request, allocator: BlockAllocator) -> list[Request]:
    """Make n requests, one for each sample, from a request with params.n = n."""
    params = parent.params
    samples = [
        Request(
            f"{parent.request_id}-{i}",
            parent.prompt_token_ids,
            params,
            arrival_time=parent.arrival_time,
            priority=parent.priority,
            cache_salt=parent.cache_salt,
            eos_token_ids=parent.eos_token_ids,
        )
        for i in range(params.n)
    ]
    for i, sample in enumerate(samples):
        sample.group = parent.request_id
        sample.seed = None if params.seed is None else params.seed + i
        if i > 0 and allocator.enable_prefix_caching:
            sample.must_wait = partial(is_computing_prompt, samples[0], allocator.block_size)
    return samples


def is_computing_prompt(first: Request, block_size: int) -> bool:
    """Whether the first sample is computing blocks of the prompt that the others will share."""
    num_shared = (len(first.prompt_token_ids) - 1) // block_size * block_size
    is_running = first.status is RequestStatus.RUNNING
    return is_running and first.num_computed_tokens < num_shared
