"""What the compiler makes of all that the engine can launch, for GPUs that need not be there.

The machine code is read with the tools inside Triton's package: nothing spills, keys and values
arrive by 16-byte asynchronous copies, a tile ahead of the products, products run on the matrix
units, shared memory fits the chip. The default run has a share, -m slow all of it. The table is
printed (pytest -s), so that a change shows.
"""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from nanobatch.kernels.launch_config import CHIPS

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Triton 3.9's assembler may keep one number on the stack over the loop.
MAX_STACK = 8 if VERSION >= (3, 9) else 0
FORMATS = ["fp16", "fp16:i8", "fp32", "fp32:i8"]
FORMATS_80 = [*FORMATS, "bf16", "bf16:i8"]
FORMATS_89 = [*FORMATS_80, *(f"{x}:fp8e4nv" for x in ("fp16", "bf16", "fp32"))]
LACKS_FLOAT8 = "86/bf16:fp8e4nv/smollm2 16x*"
# One chip's launches of one model, and of every chip the smallest and the largest.
SHARE = [f"90/bf16/{x}" for x in ("llama3 *", "gemma2 64x*", "silu", "experts")]
SHARE += ["90/bf16/reduce splits d256", "90/bf16/rms norm 4096 residual"]
SHARE += [f"75/fp16/{x}" for x in ("llama3 *", "d256 32x*", "experts")]
SHARE += ["75/fp32/llama3 32x*", "75/fp32/d256 16x*", "75/fp16:i8/llama3 32x*"]
SHARE += ["90/fp32/llama3 16x*", "80/bf16:i8/llama3 *", "90/bf16:fp8e4nv/llama3 *"]
SHARE += ["120/bf16:i8/d256 64x*", "90/bf16:i8/d80 16x*", LACKS_FLOAT8]
for chip in (80, 86, 89, 90, 100, 120):
    SHARE += [f"{chip}/bf16/{x}" for x in ("llama3 16x*", "llama3 128x*", "d256 64x*")]
# What may spill: bytes of stack that a thread may have, and why.
MANY_HEADS = "71 query heads share one KV head: 128 rows, which take more without matrix units"
ONE_NUMBER = "outside the loop, one number: 64 rows take all 255 registers"
SPILLS = {"*/fp32/mqa 128x*": (296, MANY_HEADS), "75/fp16/mqa 128x*": (344, MANY_HEADS)}
AT_64 = "the compiler keeps to 64 registers, though a thread may have more"
for chip in (86, 89):
    SPILLS[f"{chip}/bf16:i8/llama3 64x32"] = (8, ONE_NUMBER)
    SPILLS[f"{chip}/fp32/reduce splits d128"] = (8, AT_64)


def compile_all(*arguments: str) -> dict[str, dict]:
    """The script's table. Where tests have several processes, each has its share of cores."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent.parent)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    num_jobs = max(os.cpu_count() // num_workers, 1)
    done = subprocess.run(
        [sys.executable, SCRIPT, "--jobs", str(num_jobs), *arguments],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    for name, row in report.items():
        print(f"  {name:40}", ", ".join(f"{key} {value}" for key, value in row.items()))
    return report


def faults(name: str, row: dict) -> list[str]:
    """What is wrong with this kernel on this chip."""
    if "error" in row:
        return [f"{name}: {row['error'][-500:]}"]
    capability, dtype, _ = name.split("/")
    chip, function = CHIPS[int(capability)], row["kernel"]
    is_attention, is_float32 = "attention" in function, dtype.startswith("fp32")
    allowed = [stack for pattern, (stack, _) in SPILLS.items() if fnmatchcase(name, pattern)]
    found = {
        "spills": row["stack"] > max([MAX_STACK, *allowed]),
        "spills in a loop": row["spills_in_loops"] > 0 and not allowed,
        "shared memory": row["shared"] > chip.shared_memory,
    }
    has_products = is_attention or function == "grouped_matmul_kernel"
    # Before compute capability 8.0 there are no asynchronous copies, nor, from Triton, matrix
    # units: nothing of this applies.
    if has_products and chip.capability >= (8, 0):
        found["matrix units"] = (row["matrix"] > 0) == is_float32
        # Float32 does without copies of 8 bits (quantized_launch_config).
        if not dtype.startswith("fp32:"):
            # Keys and values, and weights: every copy into shared memory is 16 bytes wide.
            found["narrow copies"] = not row["copies_16_byte"] == row["copies"] > 0
            # Room for two tiles of keys and of values, one of each on its way in a product.
            found["one tile at a time"] = len(row["buffers"]) != 2 or min(row["buffers"]) < 2
            found["waits for all copies"] = row["wait"] == 0
    return [f"{name}: {what}: {row}" for what, is_so in found.items() if is_so]


def assert_sound(report: dict[str, dict]) -> None:
    if found := [fault for name, row in report.items() for fault in faults(name, row)]:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.fixture(scope="module")
def share():
    return compile_all("--all-formats", *SHARE)


@pytest.mark.parametrize("capability", CHIPS)
def test_machine_code(share, capability):
    rows = {
        name: row
        for name, row in share.items()
        if name.startswith(f"{capability}/") and not fnmatchcase(name, LACKS_FLOAT8)
    }
    assert len(rows) >= 3  # the patterns still name something
    assert_sound(rows)


def test_float8_is_refused_where_the_hardware_has_none(share):
    """What resolve_cache_dtype says of a GPU is what Triton says."""
    errors = [row["error"] for name, row in share.items() if fnmatchcase(name, LACKS_FLOAT8)]
    assert errors
    assert all("fp8e4nv not supported in this architecture" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability, dtype",
    [
        (chip, dtype)
        for chip in CHIPS
        for dtype in (FORMATS if chip < 80 else FORMATS_80 if chip < 89 else FORMATS_89)
    ],
)
def test_all_machine_code(capability, dtype):
    """Whatever the launch configuration chooses, for head dimensions of 64 to 256."""
    assert_sound(compile_all(f"{capability}/{dtype}/*"))
