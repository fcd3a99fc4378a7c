"""Fixtures of the tests that load checkpoints."""

from pathlib import Path

import pytest
from small_checkpoint import write_checkpoint

from nanobatch.models import loader


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A directory with a good checkpoint of one tiny layer, and no tokenizer."""
    return write_checkpoint(tmp_path)


@pytest.fixture
def kept(tmp_path_factory, monkeypatch):
    """An empty directory in the place of the one where converted tokenizers are kept."""
    directory = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(loader, "cache_directory", lambda: directory)
    return directory
