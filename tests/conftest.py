"""One thread, since the models here are too small to share a product between cores; and
Triton's interpreter, so that kernels run where there is no GPU.

The interpreter must be asked for before triton is first imported, which is here. What needs
the compiler (test_compiled_kernels.py) starts a process of its own.
"""

import os

import pytest
import torch

sees_gpu = torch.cuda.is_available
HAS_GPU = sees_gpu()
torch.set_num_threads(1)
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item):
    """Tests marked gpu are skipped where there is none. To the others there never is one, so
    that they are the same everywhere."""
    is_for_gpu = "gpu" in item.keywords
    if is_for_gpu and not HAS_GPU:
        pytest.skip("no CUDA device")
    torch.cuda.is_available = sees_gpu if is_for_gpu else lambda: False
