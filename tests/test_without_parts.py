"""The engine without what can be left out: a copy that has no nanobatch/extensions/.

The copy serves the bundled model greedily, as the whole package does, and its core passes its
own tests. (A test whose settings ask for an extension is skipped there: conftest.py.)
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanobatch import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
CORE_TESTS = [
    ("policies/test_policy.py", "test_masks.py"),
    pytest.param(
        ("test_scheduler.py", "test_sampler.py", "test_block_allocator.py", "test_minimal.py",
         "models/test_experts.py"),
        marks=pytest.mark.slow,
    ),
]  # fmt: skip
PROMPTS = ["Once upon a time", "One day, a little cat", "Long ago"]
SERVE = f"""
from nanobatch import LLM, SamplingParams
llm = LLM("tiny", dtype="float32", block_size=4, num_blocks=24, max_num_batched_tokens=8,
          max_num_seqs=3)
for out in llm.generate({PROMPTS!r}, SamplingParams(temperature=0), progress=False):
    print(out.token_ids)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The repository without notebooks, and without nanobatch/extensions/."""
    copy = tmp_path_factory.mktemp("core")
    for name in ("nanobatch", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "extensions")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "bench.py"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(*args, cwd):
    env = os.environ | {"PYTHONPATH": str(cwd)}
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_extensions_it_serves_the_same_tokens(core):
    params = SamplingParams(temperature=0)
    outs = LLM("tiny", dtype="float32").generate(PROMPTS, params, progress=False)
    assert run("-c", SERVE, cwd=core).splitlines() == [str(out.token_ids) for out in outs]


@pytest.mark.parametrize("names", CORE_TESTS, ids=["share", "rest"])
def test_without_extensions_the_core_passes_its_tests(core, names):
    tests = [f"tests/{name}" for name in names]
    text = run("-m", "pytest", "-p", "no:xdist", "-p", "no:nbmake", *tests, cwd=core)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped)", text)}
    assert counts["passed"] > 10 * counts.get("skipped", 0), text
