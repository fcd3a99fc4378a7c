"""Routers: choose which of several engines a request goes to.

A router is an object with `choose(request, replicas) -> index`. It is asked when a request
arrives, in order of arrival, and sees the state of each replica at that time. Three of them:

    replica                  0         1         2
    requests given          12        12        11
    requests unfinished      5         2         7
    cached of the prompt     0       100       900 of 1,000 tokens

    round_robin                                  x     each in turn
    least_loaded                       x               fewest unfinished requests
    prefix_aware                                 x     most of the prompt cached, while the
                                                       loads are not far apart

Load is the number of unfinished requests, as in SGLang's router, which knows it without asking.
The number of tokens left would say more, but the length of an output is not known before, and
max_tokens is mostly the client's default. Among equally loaded replicas the one that was given
the fewest requests so far is taken. Otherwise the first would get every new prefix when all are
idle.

Always holds: the same requests and replicas give the same choice; routers keep no state.

Source: the cache_aware policy of SGLang's router (Zheng et al., 2024;
sgl-model-gateway/src/policies/cache_aware.rs), rule and thresholds. It guesses what the engines
have cached from what it sent them; the router here looks into their caches, as routers do that
are told of each cached block (NVIDIA Dynamo).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanobatch.request import Request
from nanobatch.utils.checks import check_choice, check_float, check_int

ROUTERS = ("round_robin", "least_loaded", "prefix_aware")


class View(Protocol):
    """What a router sees of a replica (replica.Replica has it).

    num_given: requests given to it so far. num_unfinished: those that have not ended yet.
    """

    num_given: int
    num_unfinished: int

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that its prefix cache has."""
        ...


class Router(Protocol):
    """What simulate_replicas asks of a router."""

    def choose(self, request: Request, replicas: Sequence[View]) -> int:
        """The index of the replica that is to serve the request."""
        ...


class RoundRobin:
    """Each replica in turn, whatever its load."""

    def choose(self, request: Request, replicas: Sequence[View]) -> int:
        """The one after the last."""
        return sum(replica.num_given for replica in replicas) % len(replicas)


class LeastLoaded:
    """The fewest unfinished requests; of equals the one given fewest so far, then the first."""

    def choose(self, request: Request, replicas: Sequence[View]) -> int:
        """The least loaded one."""
        return min(range(len(replicas)), key=lambda i: _load(replicas[i]))


class PrefixAware:
    """The longest cached prefix; the least loaded where that is short, or loads are far apart.

    Args:
        cache_threshold: the least share of the prompt, exclusive, that makes a hit worth it.
        balance_abs_threshold, balance_rel_threshold: loads are far apart if the largest is
            more than the smallest by more than this many requests and by more than this factor.
            Then the cache counts for nothing, so that a prefix that all requests share does
            not overload one replica while others idle.

    Raises:
        ValueError: a threshold is out of its range.
    """

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
    ):
        check_float("cache_threshold", cache_threshold, 0.0, 1.0)
        check_int("balance_abs_threshold", balance_abs_threshold, 0)
        check_float("balance_rel_threshold", balance_rel_threshold, 1.0)
        self.cache_threshold = cache_threshold
        self.balance_abs_threshold = balance_abs_threshold
        self.balance_rel_threshold = balance_rel_threshold

    def choose(self, request: Request, replicas: Sequence[View]) -> int:
        """The one with the longest hit, or the least loaded one."""
        hits = [0] * len(replicas)
        if not self.are_far_apart([replica.num_unfinished for replica in replicas]):
            least = self.cache_threshold * request.num_tokens
            hits = [replica.num_hit_tokens(request) for replica in replicas]
            hits = [num_tokens if num_tokens > least else 0 for num_tokens in hits]
        return min(range(len(replicas)), key=lambda i: (-hits[i], _load(replicas[i])))

    def are_far_apart(self, loads: Sequence[int]) -> bool:
        """Whether these loads are out of balance."""
        low, high = min(loads), max(loads)
        return (
            high - low > self.balance_abs_threshold and high > self.balance_rel_threshold * low
        )


def _load(replica: View) -> tuple[int, int]:
    return replica.num_unfinished, replica.num_given


def make_router(name: str) -> Router:
    """The router of this name.

    Raises:
        ValueError: there is none.
    """
    check_choice("router", name, ROUTERS)
    routers = {
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "prefix_aware": PrefixAware,
    }
    return routers[name]()
