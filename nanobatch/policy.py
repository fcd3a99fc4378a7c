"""Who is next: the order in which waiting requests are admitted.

A policy is an object with `key(request, now)`; the smallest key goes first. Ties go by
arrival. Whoever is next and does not fit stops admission: nobody slips past.

To add one, write the class, and hand it to `Scheduler(config, allocator, policy=...)`.

Taught in notebooks/03_iteration_level_scheduling.ipynb.
"""

from __future__ import annotations

from typing import Protocol

from nanobatch.request import Request


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    def key(self, request: Request, now: float) -> object:
        """Comparable; the smallest is served next, the largest is preempted first."""
        ...


def arrival(request: Request) -> tuple[float, int]:
    """When a request came: its arrival time, then the order in which it was added."""
    return request.arrival_time, request.arrival_order


class FCFS:
    """First come, first served (Orca; the default of vLLM)."""

    def key(self, request: Request, now: float) -> tuple[float, int]:
        return arrival(request)


def make_policy(name: str) -> Policy:
    """The policy that EngineConfig.policy names (config.py has checked the name)."""
    return {"fcfs": FCFS}[name]()
