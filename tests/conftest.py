"""One thread, since the models here are too small to share a product between cores; and
Triton's interpreter, so that kernels run where there is no GPU.

The interpreter must be asked for before triton is first imported, which is here. What needs
the compiler (test_compiled_kernels.py) starts a process of its own.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, not failed, where there is none."""
    import pytest

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
