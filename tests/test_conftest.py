"""Which tests run where: conftest.py with a made-up torch and Triton, with a GPU and without.

The folder is called gpu. That is a keyword of every test in it, and no mark.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = """
float16, bfloat16 = object(), object()
class cuda:
    is_available = staticmethod(lambda: {has_gpu})
    get_device_capability = staticmethod(lambda: (7, 5))
def set_num_threads(number): pass
"""
KERNEL = """
class GridExecutor:
    def fn(): pass
    def __call__(self): pass
"""
OPS = """
def check_triton(on_cuda, block_size): {fault}
"""
TESTS = """
import pytest, torch
from triton.runtime.interpreter import GridExecutor
def test_plain(): assert not torch.cuda.is_available()
def test_launch(): GridExecutor()()
@pytest.mark.gpu
def test_gpu(): assert torch.cuda.is_available()
@pytest.mark.kernels
def test_kernels():
    GridExecutor()()
    assert torch.cuda.is_available() == {has_gpu}
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "bfloat16"], ids="abc")
def test_format(dtype): pass
"""


def run(folder, has_gpu, *flags, fault="pass"):
    """{test: its verdict} of the tests above."""
    for name, text in {
        "torch.py": TORCH.format(has_gpu=has_gpu),
        "triton/__init__.py": "",
        "triton/runtime/__init__.py": "",
        "triton/runtime/interpreter.py": KERNEL,
        "nanobatch/__init__.py": "",
        "nanobatch/kernels/__init__.py": "",
        "nanobatch/kernels/ops.py": OPS.format(fault=fault),
        "pytest.ini": "[pytest]\nmarkers = gpu\n kernels\n",
        "gpu/test_it.py": TESTS.format(has_gpu=has_gpu),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copy(Path(__file__).with_name("conftest.py"), folder / "gpu")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *flags, "gpu"],
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if "test_it.py::" in line]
    return {name.partition("::")[2]: word for name, word, *_ in lines if "::" in name}


def test_without_a_gpu(tmp_path):
    """A launch without the mark fails here, before it can on a machine with a GPU."""
    formats = {f"test_format[{x}]": "SKIPPED" for x in "abc"}
    assert run(tmp_path, False) == formats | {
        "test_plain": "PASSED",
        "test_launch": "FAILED",
        "test_gpu": "SKIPPED",
        "test_kernels": "PASSED",
    }


def test_an_interpreter_that_does_not_work_is_a_reason_to_skip(tmp_path):
    found = run(tmp_path, False, "-k", "kernels", fault="raise ValueError('numpy is 2.4.6')")
    assert found == {"test_kernels": "SKIPPED"}


def test_with_a_t4(tmp_path):
    """It has no bfloat16. What it launches, compiled, is not looked at."""
    for_gpu = {
        "test_gpu": "PASSED",
        "test_kernels": "PASSED",
        "test_format[a]": "PASSED",
        "test_format[b]": "SKIPPED",
        "test_format[c]": "SKIPPED",
    }
    assert run(tmp_path, True, "-m", "gpu") == for_gpu
    others = {"test_plain": "PASSED", "test_launch": "PASSED"}
    assert run(tmp_path, True) == for_gpu | others
