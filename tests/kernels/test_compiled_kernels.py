"""What the compiler makes of the kernels, for GPUs that need not be there.

The machine code is read with the tools inside Triton's package: no stack and no spills in
loops, keys and values arrive by 16-byte asynchronous copies, products run on the matrix units,
shared memory fits the chip. The table is printed (pytest -s), so that a change shows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
# Triton 3.9's assembler may keep one number on the stack over the loop.
MAX_STACK = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 0
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
SHAPES = ("llama2", "llama3", "smollm2", "d80", "d96", "d256", "gemma2")
OTHERS = ["reduce splits", "rms norm", "rope", "silu", "experts"]
COMMON = ["decode llama3", "prefill llama3", "decode smollm2", "prefill smollm2"]
COMMON += ["split llama3", "draft llama3", *OTHERS]
KINDS = ("decode", "split", "prefill")
ALL = [
    f"{kind} {shape}" for kind in KINDS for shape in SHAPES if shape not in ("llama2", "d96")
]
ALL += ["draft llama3", *OTHERS]
# Everything for one chip (but shapes that are much like others); for the others what is most
# used: it is the same source.
TARGETS = [(80, "bf16", [*COMMON, "prefill d256"]), (90, "bf16", ALL)]
# Chips 86 and 89 are much like 80, fp16 like bf16; float32 is not used where speed counts.
SLOW = [(86, "bf16", COMMON), (89, "bf16", COMMON), (80, "fp16", COMMON[:2])]
SLOW += [(90, "fp32", [*COMMON[:2], "prefill d256", "split d96"])]
TARGETS += [pytest.param(*target, marks=pytest.mark.slow) for target in SLOW]
TARGETS += [(100, "bf16", COMMON)]
# Caches in 8 bits; float8 where the hardware converts it.
COMMON_8 = ["decode llama3", "prefill llama3", "draft llama3", "split d80", "rope"]
TARGETS += [(chip, f"bf16:{x}", COMMON_8) for chip, x in ((80, "i8"), (90, "fp8e4nv"))]
ALL_8 = [f"{kind} {shape}" for kind in (*KINDS, "draft", "chunk") for shape in SHAPES]
OTHERS_8 = [(chip, "bf16:i8") for chip in (80, 86, 89, 90, 100)] + [(80, "fp16:i8")]
OTHERS_8 += [(chip, "bf16:fp8e4nv") for chip in (89, 90, 100)]
ALL_8.append("rope")
TARGETS += [pytest.param(*other, ALL_8, marks=pytest.mark.slow) for other in OTHERS_8]
TARGETS += [pytest.param(90, "fp32:i8", COMMON_8[:2], marks=pytest.mark.slow)]


def compile_all(capability: int, dtype: str, names: list[str]) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent.parent)
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
        assert row["stack"] <= MAX_STACK and row["spills_in_loops"] == 0, where
        assert row["shared"] <= SHARED_MEMORY[capability], where
        is_attention = name.split()[0] in ("decode", "split", "prefill")
        if is_attention or name == "experts":
            # K and V, and weights: every copy into shared memory is 16 bytes wide; but 8 bits
            # that float32 multiplies have room for 16 keys: too few for that.
            num_wide = row["copies_16_byte"]
            num_wide += row["copies_8_byte"] if dtype.startswith("fp32:") else 0
            assert num_wide == row["copies"] > 0, where
            assert (row["matrix"] > 0) == (not dtype.startswith("fp32")), where


@pytest.mark.parametrize(
    "dtype, names",
    [
        ("fp16", ["decode smollm2", "rope", "reduce splits", "rms norm"]),
        pytest.param("fp16:i8", ["decode smollm2", "rope"], marks=pytest.mark.slow),
    ],
)
def test_a_t4_compiles_in_float16(dtype, names):
    """It has no asynchronous copies and, from Triton, no matrix units."""
    report = compile_all(75, dtype, names)
    assert all(row["shared"] <= SHARED_MEMORY[75] for row in report.values())
    assert report["decode smollm2"]["spills_in_loops"] == 0


def test_float8_is_refused_where_the_hardware_has_none():
    """What kv_cache.resolve_cache_dtype says of a GPU is what Triton says."""
    with pytest.raises(AssertionError, match="fp8e4nv not supported in this architecture"):
        compile_all(86, "bf16:fp8e4nv", ["decode smollm2"])
