"""Clocks: where an engine gets the time from.

A clock is anything with now() -> seconds. The virtual one lets a simulation run as fast as it
can be computed.
"""

from __future__ import annotations

import time


class WallClock:
    """Seconds of real time, from an arbitrary start."""

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def sleep_until(self, t: float) -> None:
        """Wait until the time is t."""
        time.sleep(max(0.0, t - self.now()))


class VirtualClock:
    """Time that passes only when it is told to.

    Args:
        start: seconds.
    """

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        """Seconds."""
        return self._now

    def sleep_until(self, t: float) -> None:
        """Move the time on to t, unless it is later already."""
        self._now = max(self._now, t)
