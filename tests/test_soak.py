"""Ten minutes of everything that is drawn at random.

    python -m pytest -m slow tests/test_soak.py

The default run has a bounded share of each: the same machines with few examples, the shadow
cache's 4,000 traces, 30 fuzz trials. Here they go on with new draws until the time is
over. `-k` picks one; a failure prints the calls, or the prompt and the configuration, that show
it.
"""

import itertools
import os
import random
import time

import pytest
import torch
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test
from test_block_allocator import AllocatorMachine
from test_engine_machine import EngineMachine
from test_shadow_cache import run_traces

from nanobatch.bench.fuzz import Fuzz
from nanobatch.models.loader import load

SECONDS = float(os.environ.get("SOAK_SECONDS", 150))  # for each of the four

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("machine", [AllocatorMachine, EngineMachine])
def test_state_machines(machine):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        fresh = seed(random.getrandbits(64))(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(
            fresh,
            settings=settings(machine.TestCase.settings, max_examples=100, derandomize=False),
        )


def test_traces_over_a_shadow_cache():
    end, first = time.monotonic() + SECONDS, random.getrandbits(48)
    for number in itertools.count(first):
        if time.monotonic() > end:
            return
        run_traces([number], is_wide=number % 2 == 1)


def test_differential():
    fuzz = Fuzz(load("tiny", torch.float32).model, random.getrandbits(48))
    assert fuzz.run(SECONDS).faults == []
