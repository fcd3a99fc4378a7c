"""Fixtures of the tests that load checkpoints."""

from pathlib import Path

import pytest
from small_checkpoint import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A directory with a good checkpoint of one tiny layer, and no tokenizer."""
    return write_checkpoint(tmp_path)
