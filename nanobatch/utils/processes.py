"""Processes that start others: to end one is to end all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def end_with_children(process: subprocess.Popen) -> None:
    """End a process, if it still runs, and those that it has started, if they do.

    Args:
        process: made with start_new_session=True, so that its children are in its group.
    """
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
