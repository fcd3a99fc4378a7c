"""What the compiler makes of the kernels, for GPUs that need not be there.

The machine code is read with the tools inside Triton's package: no stack and no spills, keys
and values arrive by 16-byte asynchronous copies, products run on the matrix units, shared
memory fits the chip. The table is printed (pytest -s), so that a change shows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
COMMON = [
    f"{kind} {shape}" for shape in ("llama3", "smollm2") for kind in ("decode", "prefill")
]
COMMON += ["split llama3", "reduce splits", "rms norm", "rope", "silu", "experts"]
# Everything for one chip; for the others what is most used: it is the same source.
TARGETS = [(80, "bf16", COMMON), (86, "bf16", COMMON), (89, "bf16", COMMON), (90, "bf16", [])]
TARGETS += [
    (100, "bf16", COMMON),
    (80, "fp16", COMMON[:2]),
    (90, "fp32", [*COMMON[:2], "prefill d256", "split d96"]),
]


def compile_all(capability: int, dtype: str, names: list[str]) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent)
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability), dtype, *names],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    print(f"\nsm_{capability} {dtype}")
    for name, row in report.items():
        print(f"  {name:16}", ", ".join(f"{key} {value}" for key, value in row.items()))
    return report


@pytest.mark.parametrize("capability, dtype, names", TARGETS, ids=lambda x: str(x)[:4])
def test_machine_code(capability, dtype, names):
    for name, row in compile_all(capability, dtype, names).items():
        where = f"sm_{capability} {dtype} {name}: {row}"
        assert row["stack"] == 0 and row["spills"] == 0, where
        assert row["shared"] <= SHARED_MEMORY[capability], where
        is_attention = name.split()[0] in ("decode", "split", "prefill")
        if is_attention or name == "experts":
            # K and V, and weights: every copy into shared memory is 16 bytes wide.
            assert row["copies_16_byte"] == row["copies"] > 0, where
            assert (row["matrix"] > 0) == (dtype != "fp32"), where


def test_a_t4_compiles_in_float16():
    """It has no asynchronous copies, and spills; it must work all the same."""
    report = compile_all(75, "fp16", ["decode smollm2", "reduce splits", "rms norm", "rope"])
    assert all(row["shared"] <= SHARED_MEMORY[75] for row in report.values())
