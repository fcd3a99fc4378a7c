"""When requests may join the batch and when they leave it: at every step, or all together.

                        step  1  2  3  4  5  6  7              step  1  2  3  4  5  6  7
    continuous   slot 0       a  a  d  d  d  e  e    static slot 0   a  a  .  .  .  d  d
                 slot 1       b  b  b  b  f  f  f           slot 1   b  b  b  b  .  e  e
                 slot 2       c  c  c  c  c  g  g           slot 2   c  c  c  c  c  f  f

A static batch is gathered once, from the requests that wait when it is empty. Prefilling it may
take several steps. A finished request gives back its blocks at once and keeps its slot (a dot)
until all have finished: padding, which a padded batch computes like any other row.

The batch is closed when all of them have joined, when seats or blocks are short, or when one is
preempted. A short budget does not close it: the others join in the next steps. Samples of one
prompt do not wait for the first of them to compute it (Request.must_wait), which would make
the batch longer by a step.

Always holds: nothing joins a static batch once it is closed, until all in it have finished.

Taught in notebooks/02_static_batching.ipynb. Source: Orca (Yu et al., OSDI 2022), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nanobatch.request import Request


class Batching(Protocol):
    """What the scheduler asks of the rule."""

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request]
    ) -> Sequence[Request]:
        """The waiting requests that may join in this step, in the same order."""
        ...

    def must_wait(self, request: Request) -> bool:
        """Whether the next one in line, and so all behind it, may not join in this step."""
        ...

    def close(self) -> None:
        """All that may join have joined, or seats or blocks are short."""
        ...

    def leave(self, request: Request, running: list[Request]) -> None:
        """A request has finished or was preempted: update `running`."""
        ...

    def padding(self, running: Sequence[Request]) -> list[Request]:
        """The finished requests that still have a slot in `running`."""
        ...


class ContinuousBatch:
    """Requests join at any step and leave when they finish."""

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request]
    ) -> Sequence[Request]:
        return waiting

    def must_wait(self, request: Request) -> bool:
        return request.must_wait is not None and request.must_wait()

    def close(self) -> None:
        pass

    def leave(self, request: Request, running: list[Request]) -> None:
        running.remove(request)

    def padding(self, running: Sequence[Request]) -> list[Request]:
        return []


class StaticBatch:
    """Requests join while the batch is gathered, and leave it together."""

    def __init__(self):
        self._gathered_before = 0  # requests added before this many may join

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request]
    ) -> Sequence[Request]:
        if not running:
            self._gathered_before = 1 + max(r.arrival_order for r in waiting)
        return [r for r in waiting if r.arrival_order < self._gathered_before]

    def must_wait(self, request: Request) -> bool:
        return False

    def close(self) -> None:
        self._gathered_before = 0

    def leave(self, request: Request, running: list[Request]) -> None:
        if not request.is_finished:
            running.remove(request)
            self.close()
        if all(other.is_finished for other in running):
            running.clear()

    def padding(self, running: Sequence[Request]) -> list[Request]:
        return [request for request in running if request.is_finished]


def make_batching(name: str) -> Batching:
    """The rule that EngineConfig.batching names (config.py has checked the name)."""
    return {"continuous": ContinuousBatch, "static": StaticBatch}[name]()
