"""Order the waiting requests: which one is admitted next.

A policy is an object with `key(request, now)`; the request with the smallest key goes first,
ties by arrival. If the first in line cannot be admitted, none behind it is.

To try your own, write the class and pass an object of it: `LLMEngine(config, runner,
policy=obj)`, `Scheduler(config, allocator, policy=obj)` or `simulate(requests, policy=obj)`.
`LLM()` and bench.py take names only. A name goes into config.POLICIES and make_policy() here;
bench/README.md has an example, and the rest.

    waiting, by arrival       r3 (4 s)   r4 (3 s)   r5 (1 s)   r6 (0 s)       max_wait 2 s
    tokens left to compute      900        120         30         40
    "fcfs"                      1          2           3          4
    "sjf"                       4          3           1          2
    "sjf" with max_wait         1          2           3          4           r3, r4 are overdue

Always holds (invariant 9): a request that has waited max_wait goes before all that have not,
in order of arrival, under any policy. So no request starves.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Sources: Orca (Yu et al., OSDI 2022)
for FCFS; FastServe (Wu et al., 2023) and learning to rank (Fu et al., NeurIPS 2024) for
shortest job first without knowing the length.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol

from nanobatch.policies.lengths import PredictLength, max_tokens, observe
from nanobatch.request import Request


class Policy(Protocol):
    """What the scheduler asks of a policy.

    Optional: `observe(request)`, called with each finished request, and two attributes.
    `preempts_worst`: preempt the running request with the largest key, not the last admitted.
    `uses_hits`: the key reads `request.num_hit_tokens`, so keep that up to date.
    """

    def key(self, request: Request, now: float) -> object:
        """A comparable value; the request with the smallest is admitted next."""
        ...


def arrival(request: Request) -> tuple[float, int]:
    """The key of arrival: the arrival time, then the order in which requests were added."""
    return request.arrival_time, request.arrival_order


class FCFS:
    """First come, first served (Orca; the default of vLLM)."""

    def key(self, request: Request, now: float) -> tuple[float, int]:
        """Order of arrival."""
        return arrival(request)


class SJF:
    """Shortest job first: the fewest tokens left to compute.

    These are the prompt's tokens that no cache holds, and the output that is still expected.
    It gives the smallest mean wait, and starves long requests unless max_wait is set.

    Args:
        predict: the expected output tokens of a request in all; by default its max_tokens.
            LearnedLengths() learns them from finished requests.
    """

    uses_hits = True

    def __init__(self, predict: PredictLength | None = None):
        self.predict = max_tokens if predict is None else predict

    def key(self, request: Request, now: float) -> float:
        """Tokens left to do."""
        num_output_left = self.predict(request) - len(request.output_token_ids)
        num_uncached = request.num_uncomputed_tokens - request.num_hit_tokens
        return num_uncached + max(0, num_output_left)

    def observe(self, request: Request) -> None:
        """Pass a finished request on to the prediction."""
        observe(self.predict, request)


class Priority:
    """Lower request.priority first; the request with the highest is preempted first."""

    preempts_worst = True

    def key(self, request: Request, now: float) -> float:
        """The priority that the user gave."""
        return request.priority


def make_policy(policy: Policy | None, name: str) -> Policy:
    """The policy, or if it is None the one that EngineConfig.policy names.

    Raises:
        ValueError: it has no method `key`.
    """
    if policy is None:
        return {"fcfs": FCFS, "sjf": SJF, "priority": Priority}[name]()
    if not callable(getattr(policy, "key", None)):
        raise ValueError(
            f"policy is {policy!r}; it must be an object with a method key(request, now); a "
            "name goes into EngineConfig(policy=...)"
        )
    return policy


def in_order(
    waiting: Sequence[Request], policy: Policy, now: float, max_wait: float | None, most: int
) -> Iterator[Request]:
    """Yield the first `most` of the waiting requests, next one first.

    The caller may change `waiting` meanwhile.

    Args:
        waiting: in order of arrival.
        policy: gives the keys.
        now: seconds.
        max_wait: seconds after which a request is overdue; None: never.
        most: how many are asked for at most.
    """
    if type(policy) is FCFS:  # already in order, the overdue first
        yield from waiting[:most]
        return
    num_overdue = 0
    if max_wait is not None:
        num_overdue = bisect.bisect_right(waiting, now - max_wait, key=lambda r: r.arrival_time)
    overdue, others = waiting[:num_overdue], waiting[num_overdue:]
    yield from overdue[:most]
    if most > num_overdue:
        keys = ((policy.key(r, now), arrival(r), r) for r in others)
        yield from (r for *_, r in heapq.nsmallest(most - num_overdue, keys))
