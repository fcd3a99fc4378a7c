"""Who is next.

A policy is an object with `key(request, now)`; the smallest key goes first. Ties go by
arrival. To add one, write the class, and hand it to `Scheduler(config, allocator, policy=...)`.
Whoever is next and may not enter stops admission: nobody slips past.

    waiting, by arrival       r3 (4 s)   r4 (3 s)   r5 (1 s)   r6 (0 s)       max_wait 2 s
    tokens left to do           900        120         30         40
    "fcfs"                      1          2           3          4
    "sjf"                       4          3           1          2
    "sjf" with max_wait         1          2           3          4           r3, r4 are overdue

Always holds (invariant 9): whoever has waited max_wait comes before all who have not, in order
of arrival, whatever the policy says; so nobody starves.

Taught in notebooks/03_iteration_level_scheduling.ipynb. Sources: Orca (Yu et al., OSDI 2022)
for FCFS; FastServe (Wu et al., 2023) and learning to rank (Fu et al., NeurIPS 2024) for
shortest job first without knowing the length.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from nanobatch.request import Request

HISTORY = 1000  # finished requests that LearnedLengths remembers

PredictLength = Callable[[Request], float]  # expected output tokens in all


class Policy(Protocol):
    """What the scheduler asks of a policy.

    It may also have `observe(request)`, which is told of each request that has finished, and
    two attributes: `preempts_worst`, if the victim of a preemption is to be the running request
    with the largest key, not the last admitted; and `uses_hits`, if its keys look at
    `request.num_hit_tokens`.
    """

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


class SJF:
    """Shortest job first: the fewest tokens left to do.

    Left are the tokens that are in no cache, and the output that is yet expected. It is the
    best there is for the mean wait, and starves whoever is long (see max_wait).

    Args:
        predict: from a request to the output tokens expected of it in all; by default its
            max_tokens. LearnedLengths() learns it from those that finish.
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
        """Let the prediction learn, if it does."""
        observe(self.predict, request)


class Priority:
    """Lower request.priority first; the victim of a preemption is the one with the highest."""

    preempts_worst = True

    def key(self, request: Request, now: float) -> float:
        """What the user said."""
        return request.priority


def make_policy(name: str) -> Policy:
    """The policy that EngineConfig.policy names (config.py has checked the name)."""
    return {"fcfs": FCFS, "sjf": SJF, "priority": Priority}[name]()


def observe(who: object, request: Request) -> None:
    """Tell a policy, an admission rule or a prediction of a finished request, if it listens."""
    listen = getattr(who, "observe", None)
    if listen is not None:
        listen(request)


def in_order(
    waiting: Sequence[Request], policy: Policy, now: float, max_wait: float | None, most: int
) -> Iterator[Request]:
    """The first of the waiting requests, next one first. The caller may change `waiting`.

    Args:
        waiting: in order of arrival.
        policy: whose keys count.
        now: seconds.
        max_wait: seconds after which a request is overdue; None: never.
        most: how many will be asked for at most.
    """
    if isinstance(policy, FCFS):  # is in order already, the overdue ones first
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


# -------------------------------------------------------------- how long an output will be


def max_tokens(request: Request) -> int:
    """The most it can be."""
    return request.max_tokens


class LearnedLengths:
    """Expects of a request what finished ones came to: of those that were longer than it is
    now, the mean; at most its max_tokens. Knowing nothing yet, it expects max_tokens.

    Source: the history of output lengths in LightLLM's past-future scheduler (Gong et al.,
    ASPLOS 2025).
    """

    def __init__(self, history: int = HISTORY):
        self._recent: deque[int] = deque(maxlen=history)
        self._lengths: list[int] = []  # the same, ascending
        self._sums_from: list[int] = [0]  # of _lengths from each index on

    def observe(self, request: Request) -> None:
        """Remember the length of a finished request, and forget the oldest."""
        if len(self._recent) == self._recent.maxlen:
            self._lengths.pop(bisect.bisect_left(self._lengths, self._recent[0]))
        length = len(request.output_token_ids)
        self._recent.append(length)
        bisect.insort(self._lengths, length)
        self._sums_from = []

    def __call__(self, request: Request) -> float:
        """Expected output tokens in all."""
        if not self._sums_from:
            self._sums_from = [0]
            for length in reversed(self._lengths):
                self._sums_from.append(self._sums_from[-1] + length)
            self._sums_from.reverse()
        first = bisect.bisect_right(self._lengths, len(request.output_token_ids))
        num_longer = len(self._lengths) - first
        if num_longer == 0:
            return request.max_tokens
        return min(request.max_tokens, self._sums_from[first] / num_longer)
