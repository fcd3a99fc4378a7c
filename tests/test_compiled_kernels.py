"""What the compiler makes of the kernels, for GPUs that need not be there.

The machine code is read with the tools inside Triton's package: no stack and no spills, keys
and values arrive by 16-byte asynchronous copies, products run on the matrix units, shared
memory fits the chip. Of a cache in 8 bits the values come by 8 bytes where the products are
those of Ampere (Triton's layout of them in shared memory). The table is printed (pytest -s), so
that a change shows.
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
# Caches in 8 bits; float8 where the hardware converts it.
COMMON_8 = [*COMMON[:5], "rope"]
TARGETS += [(chip, f"bf16:{x}", COMMON_8[:2]) for chip, x in ((80, "i8"), (90, "fp8e4nv"))]
OTHERS_8 = [
    (86, "bf16:i8"),
    (89, "bf16:i8"),
    (90, "bf16:i8"),
    (100, "bf16:i8"),
    (80, "fp16:i8"),
]
OTHERS_8 += [(80, "bf16:i8"), *((chip, "bf16:fp8e4nv") for chip in (89, 90, 100))]
TARGETS += [pytest.param(*other, COMMON_8, marks=pytest.mark.slow) for other in OTHERS_8]
TARGETS += [pytest.param(90, "fp32:i8", COMMON_8[:1], marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("capability, dtype, names", TARGETS, ids=lambda x: str(x)[:12])
def test_machine_code(capability, dtype, names):
    for name, row in compile_all(capability, dtype, names).items():
        where = f"sm_{capability} {dtype} {name}: {row}"
        assert row["stack"] == 0 and row["spills"] == 0, where
        assert row["shared"] <= SHARED_MEMORY[capability], where
        is_attention = name.split()[0] in ("decode", "split", "prefill")
        if is_attention or name == "experts":
            # K and V, and weights: every copy into shared memory is 16 bytes wide.
            num_wide = row["copies_16_byte"] + (row["copies_8_byte"] if ":" in dtype else 0)
            assert num_wide == row["copies"] > 0, where
            assert (row["matrix"] > 0) == (not dtype.startswith("fp32")), where


def test_a_t4_compiles_in_float16():
    """It has no asynchronous copies, and spills; it must work all the same."""
    names = ["decode smollm2", "rope", "reduce splits", "rms norm"]
    for dtype, some in (("fp16", names), ("fp16:i8", names[:2])):
        report = compile_all(75, dtype, some)
        assert all(row["shared"] <= SHARED_MEMORY[75] for row in report.values())


def test_float8_is_refused_where_the_hardware_has_none():
    """What kv_cache.resolve_cache_dtype says of a GPU is what Triton says."""
    with pytest.raises(AssertionError, match="fp8e4nv not supported in this architecture"):
        compile_all(86, "bf16:fp8e4nv", ["decode smollm2"])
