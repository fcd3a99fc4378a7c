"""How the tests run: on all cores, each process on one thread, kernels in Triton's interpreter.

The models here are too small to share a product between cores, so torch has one thread, and
pytest-xdist (if it is installed) runs a worker on each core. A single file, a debugger, `-s`
and a machine with a GPU get one process; `-n 0` and `-n 4` say it on the command line.

Tests marked `kernels` run Triton's kernels: compiled where there is a GPU (they are then marked
`gpu` too), else in Triton's interpreter. A test that launches one without the mark fails: on a
machine with a GPU it would find neither. The interpreter must be asked for before triton is
first imported, which is here. What needs the compiler (test_compiled_kernels.py) starts a
process of its own.
"""

import importlib.util
import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; for subprocesses too

import pytest
import torch

sees_gpu = torch.cuda.is_available
HAS_GPU = sees_gpu()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
torch.set_num_threads(1)
Launch = None  # of a kernel, in Triton's interpreter
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.interpreter import GridExecutor as Launch

        launch = Launch.__call__
MAX_WORKERS = 8
EXTENSIONS = Path(__file__).parent.parent / "nanobatch" / "extensions"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Choose the number of xdist's workers, where the command line does not."""
    has_xdist = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    if not has_xdist or config.option.numprocesses is not None:
        return
    is_interactive = (
        config.option.usepdb or config.option.trace or config.option.capture == "no"
    )
    is_large = any(Path(arg).is_dir() for arg in config.args)
    if is_large and not is_interactive and not HAS_GPU:
        has_affinity = hasattr(os, "sched_getaffinity")
        num_cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
        config.option.numprocesses = min(num_cores, MAX_WORKERS)
        config.option.dist = "loadfile"  # what a file's tests share is made once


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` chooses
def pytest_collection_modifyitems(items):
    """What runs kernels, runs them on the GPU where there is one."""
    for item in items:
        if HAS_GPU and item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item):
    """Tests marked gpu are skipped where there is none. To the others there never is one, so
    that they are the same everywhere."""
    is_for_gpu = item.get_closest_marker("gpu") is not None
    if is_for_gpu and not HAS_GPU:
        pytest.skip("no CUDA device")
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    is_of_bfloat16 = any(x in (torch.bfloat16, "bfloat16") for x in params)
    if is_for_gpu and is_of_bfloat16 and torch.cuda.get_device_capability() < (8, 0):  # a T4
        pytest.skip("bfloat16 needs compute capability 8.0")
    torch.cuda.is_available = sees_gpu if is_for_gpu else lambda: False
    if Launch is not None:
        runs_kernels = item.get_closest_marker("kernels") is not None
        Launch.__call__ = launch if runs_kernels else refuse_to_launch
        if runs_kernels:
            skip_unless_the_interpreter_works()


def skip_unless_the_interpreter_works():
    """Triton before 3.7 fails with NumPy 2.4 and later: one reason instead of many faults."""
    from nanobatch.kernels.ops import check_triton

    try:
        check_triton(on_cuda=False, block_size=16)
    except ValueError as error:
        pytest.skip(str(error))


def refuse_to_launch(self, *args, **kwargs):
    """In place of a kernel's launch."""
    raise AssertionError(f"{self.fn.__name__} was launched: mark the test `kernels`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """In a copy without nanobatch/extensions/, tests that need an extension are skipped."""
    try:
        return (yield)
    except ValueError as error:
        if "needs nanobatch/extensions/" in str(error) and not EXTENSIONS.exists():
            pytest.skip(str(error))
        raise
