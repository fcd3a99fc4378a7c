"""Fixtures of the tests that load checkpoints."""

import signal
from pathlib import Path

import pytest
from small_checkpoint import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A directory with a good checkpoint of one tiny layer, and no tokenizer."""
    return write_checkpoint(tmp_path)


@pytest.fixture
def no_waiting():
    """A read that waits for ever is an error."""

    def fail(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
