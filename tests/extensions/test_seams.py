"""The control plane without its extensions, and without torch.

A copy of the package lacks swap.py, speculative.py and parallel_sampling.py: what asks for one
is refused with a message that names the setting and the file, and all else works.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanobatch

PACKAGE = Path(nanobatch.__file__).parent
MODULES = [
    "config", "request", "plan", "block_allocator", "scheduler", "engine", "detokenizer",
    "metrics", *(f"policies.{p.stem}" for p in (PACKAGE / "policies").glob("[!_]*.py")),
    *(f"simulation.{p.stem}" for p in (PACKAGE / "simulation").glob("[!_]*.py")),
    "extensions.swap", "extensions.speculative", "extensions.parallel_sampling",
]  # fmt: skip
RUNNER = """
from nanobatch import EngineConfig, LLMEngine, SamplingParams, StepResult
class Runner:
    def run(self, plan):
        return StepResult({r.request.request_id: [1] for r in plan.scheduled if r.samples})
def serve(params=None, **knobs):
    knobs = {"num_blocks": 4, "block_size": 2, "max_num_seqs": 3} | knobs
    engine = LLMEngine(EngineConfig(**knobs), Runner())
    engine.add_request([1, 2, 3], params or SamplingParams(max_tokens=4))
    engine.add_request([1, 2], SamplingParams(max_tokens=4))
    outs = {}
    while engine.has_unfinished():
        outs |= {out.request_id: out.token_ids for out in engine.step()}
    return outs
"""
CASES = {
    "swap": ("preemption='swap', num_host_blocks=2", "preemption is 'swap'"),
    "speculative": ("speculative='ngram'", "speculative is 'ngram'"),
    "parallel_sampling": ("SamplingParams(n=3, max_tokens=4)", "n is 3"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package without the three files."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "nanobatch", ignore=ignored)
    for name in CASES:
        (folder / "nanobatch" / "extensions" / f"{name}.py").unlink()
    return folder


def run(code, folder):
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_a_missing_extension_is_named(name, copy):
    how, setting = CASES[name]
    code = RUNNER + f"try:\n    serve({how})\nexcept ValueError as error:\n    print(error)"
    assert run(code, copy).strip() == (
        f"{setting}; it needs nanobatch/extensions/{name}, which is missing"
    )
    assert run(RUNNER + f"print(len(serve({how})))", PACKAGE.parent).strip() in ("2", "4")


@pytest.mark.parametrize("knobs", ["", "batching='static'", "admission='reserve'"])
def test_without_extensions_the_plain_engine_serves(knobs, copy):
    """The pool of 4 blocks is too small for both to the end: one is preempted or waits."""
    code = RUNNER + f"print(serve({knobs}))"
    assert run(code, copy) == run(code, PACKAGE.parent) != ""


def test_without_torch_the_control_plane_and_the_simulator_are_whole():
    """torch and the rest cannot even be imported; drafts, swap and n samples are used."""
    imports = "".join(f"import nanobatch.{name}\n" for name in MODULES)
    code = f"""
import sys
for name in ("torch", "numpy", "triton", "transformers"):
    sys.modules[name] = None  # import raises ImportError
{imports}{RUNNER}
assert serve(preemption="swap", num_host_blocks=2) == serve(speculative="ngram") == serve()
assert list(serve(SamplingParams(n=2, max_tokens=4))) == ["0-0", "0-1", "1"]
from nanobatch import Request, simulate
result = simulate([Request("a", [1] * 40, SamplingParams(max_tokens=5))])
assert result.requests["a"].num_output_tokens == 5
"""
    run(code, PACKAGE.parent)
