"""Ctrl-C between two steps, never within one; and one thread at a time.

    guard entered      Ctrl-C         guard left
         |--------------- x ------------|
                          noted         KeyboardInterrupt

A step changes queues, block tables and outputs together. An interrupt in the middle would leave
some of them changed. While a guard is held on the main thread, the first SIGINT is noted, and
its handler is called when the guard is left. The second one goes to its handler at once, for
steps that last too long; what is in doubt then is begun anew (recovery.py).

Always holds: no SIGINT is lost; the handler that was there before is there again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Guard:
    """A lock that its thread may take again, and that keeps Ctrl-C waiting.

    Attributes:
        lock: the lock alone.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._delays: list[_Delay] = []  # of the thread that has the lock

    def __enter__(self) -> None:
        self.lock.acquire()
        try:
            self._delays.append(_Delay())
            self._delays[-1].begin()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *raised: object) -> None:
        delay = self._delays.pop()
        self.lock.release()
        delay.end()


class _Delay:
    """Notes one SIGINT, if this is the main thread and the signal has a handler in Python."""

    def __init__(self):
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number, frame
        else:
            self._handler(number, frame)

    def end(self) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._noted is not None:
                self._handler(*self._noted)
