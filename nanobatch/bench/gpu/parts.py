"""The parts of `bench.py gpu`, each a generator of rows, and the process that one runs in.

    python -m nanobatch.bench.gpu.parts NAME FILE [--dry-run]

A part has a process of its own, because an error of CUDA's leaves a process unusable. What it
has measured is in FILE after each row, so that a crash or a time limit loses one row at most.
A part with an error among its rows, or that finds something wrong, ends after the last row with
a text and exit status 1.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nanobatch.bench import report
from nanobatch.bench.fuzz import Fuzz
from nanobatch.bench.gpu import engines
from nanobatch.bench.gpu.published import published_workload
from nanobatch.bench.gpu.rows import failure_of
from nanobatch.bench.gpu.suite import run_tests
from nanobatch.bench.gpu.sweep import Task, sweep
from nanobatch.bench.hardware import measure_hardware
from nanobatch.bench.kernels import OURS, PEERS, Case, KernelBench, Line, NoLine
from nanobatch.kernels.ops import HAS_TRITON
from nanobatch.models.loader import load
from nanobatch.utils.device import resolve_device

LLAMA_3, LLAMA_2, TINY = (32, 8, 128), (32, 32, 128), (2, 1, 16)


def check(seconds: float) -> Iterator[dict]:
    """Random trials on the bundled model: `bench.py check`."""
    device = resolve_device("auto")
    found = Fuzz(load("tiny", torch.float32, device).model, seed=0).run(seconds)
    yield {
        "configurations": found.trials,
        "requests": found.requests,
        "tokens": found.tokens,
        "differences": len(found.faults),
    }
    yield from ({"difference": fault.splitlines()[0]} for fault in found.faults)
    if found.faults:
        sys.exit(f"{len(found.faults)} differences")


@torch.inference_mode()
def kernels(
    first: Sequence[tuple[str, str, list[tuple[int, int]]]],
    then: Sequence[tuple[str, str, list[tuple[int, int]]]],
    with_others: bool = True,
) -> Iterator[dict]:
    """Kernels against what the card can do: `bench.py kernels`.

    Args:
        first: (kernel, shape, sizes) to compare with FlexAttention too, which is compiled.
        then: those to measure afterwards, without it.
        with_others: the operations between matrix products too.
    """
    device, dtype = engines.device_and_dtype()
    hardware = measure_hardware(device, dtype)
    yield {
        "kernel": "copy", "rate": hardware.bandwidth / 1e9, "unit": "GB/s", "share": 1.0,
    }  # fmt: skip
    yield {
        "kernel": "matrix product", "rate": hardware.flop_rate / 1e12, "unit": "TFLOP/s",
        "share": 1.0,
    }  # fmt: skip
    table = KernelBench(device, dtype, hardware)

    def cases() -> Iterator[Case]:
        for with_flex, chosen in ((True, first), (False, then)):
            for kernel, shape, sizes in chosen:
                yield from table.attention_cases(kernel, shape, sizes, with_flex)
        if with_others:
            yield from table.other_cases()

    yield from (row_of_line(case.line()) for case in cases())


def row_of_line(line: Line | NoLine) -> dict:
    """A line of the kernels' table, with the peers' rates in the same unit."""
    row = {"kernel": line.kernel, "shape": line.shape, "size": line.size}
    if isinstance(line, NoLine):
        return row | {"error" if line.is_fault else "note": line.error}
    ours = {"us": line.seconds[OURS] * 1e6, "rate": line.rate(OURS)}
    peers = {peer: line.rate(peer) for peer in PEERS if peer in line.seconds}
    return row | ours | {"unit": line.unit, "share": line.share} | peers


@torch.inference_mode()
def launches(**options) -> Iterator[dict]:
    """The sweep, if there is Triton."""
    if not HAS_TRITON:
        sys.exit("triton is not installed: no launch was timed")
    device, dtype = engines.device_and_dtype()
    yield from sweep(dtype=dtype, device=device, **options)


@dataclass(frozen=True)
class Part:
    """What is measured, and the seconds it may take.

    measure: gives rows; called with `full`, or in a dry run with `tiny`. limit: seconds after
    which it is ended. least: with fewer it is not begun. new_triton_cache: those parts that say
    so share a cache of compiled kernels, which is empty at first.
    """

    measure: Callable[..., Iterator[dict]]
    limit: float
    least: float
    full: dict
    tiny: dict
    new_triton_cache: bool = False


_STARTUP = {
    "measure": engines.startup, "new_triton_cache": True, "limit": 70, "least": 30,
    "full": {
        "models": ["llama-3.1-8b", "qwen3-0.6b", "smollm2-135m"],
        "max_num_seqs": 64, "max_model_len": 2048,
    },
    "tiny": {"models": ["tiny"], "max_num_seqs": 2, "max_model_len": 32},
}  # fmt: skip
PARTS = {  # the most important first
    "tests": Part(
        run_tests, limit=200, least=200,  # it divides its seconds itself
        full={"paths": ["tests"], "num_processes": 12, "seconds": 190.0},
        tiny={
            "paths": ["tests/test_gpu.py"], "num_processes": 2, "seconds": 190.0,
            "needs_passes": False,
        },
    ),
    "check": Part(check, limit=60, least=30, full={"seconds": 20.0}, tiny={"seconds": 0.5}),
    "kernels": Part(
        kernels, limit=130, least=40,
        full={
            "first": [
                ("decode", "llama-3-8b", [(64, 4096), (1, 32768)]),
                ("prefill", "llama-3-8b", [(8, 2048)]),
                ("decode", "llama-2-7b", [(64, 4096)]),
                ("prefill", "llama-2-7b", [(8, 2048)]),
            ],
            "then": [
                ("decode", "llama-3-8b", [(64, 1024), (16, 4096), (16, 1024), (1, 1024)]),
                ("prefill", "llama-3-8b", [(1, 2048)]),
                ("decode", "smollm2", [(64, 4096), (1, 32768)]),
                ("prefill", "smollm2", [(8, 2048)]),
            ],
        },
        tiny={
            "first": [("decode", "smollm2", [(2, 32)])],
            "then": [("prefill", "smollm2", [(1, 32)])],
            "with_others": False,
        },
    ),
    "decode": Part(
        engines.decode, limit=110, least=45,
        full={
            "models": ["llama-3.1-8b", "qwen3-0.6b", "smollm2-135m"],
            "num_seqs": 64, "context_len": 1024, "num_steps": 128,
        },
        tiny={"models": ["tiny"], "num_seqs": 3, "context_len": 32, "num_steps": 8},
    ),
    "ladder": Part(
        engines.ladder, limit=120, least=60,
        full={
            "models": ["llama-2-7b", "qwen3-0.6b", "smollm2-135m"],
            "num_prompts": 96, "num_sequential": 6, "max_num_seqs": 32,
            "input_len": "lognormal:200:1", "output_len": "lognormal:128:1",
            "max_num_batched_tokens": 512,
        },
        tiny={
            "models": ["tiny"], "num_prompts": 5, "num_sequential": 2, "max_num_seqs": 2,
            "input_len": "4", "output_len": "uniform:2:6", "max_num_batched_tokens": 32,
        },
    ),
    "published": Part(
        published_workload, limit=80, least=35,
        full={"models": ["qwen3-0.6b", "smollm2-135m"], "num_seqs": 256, "longest": 1024},
        tiny={"models": ["tiny"], "num_seqs": 4, "longest": 8, "shortest": 2},
    ),
    "sweep": Part(
        launches, limit=110, least=45,
        full={
            "tasks": {
                "decode 64 x 4096": Task(LLAMA_3, 64, 1, 4096),
                "prefill 8 x 2048": Task(LLAMA_3, 8, 2048, 2048),
                "decode 1 x 32768": Task(LLAMA_3, 1, 1, 32768),
                "prefill 8 x 2048, no groups": Task(LLAMA_2, 8, 2048, 2048),
            },
            "grids": {
                "decode": {
                    "tile": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4),
                },
                "prefill": {
                    "block_m": (64, 128), "tile": (32, 64, 128), "num_warps": (4, 8),
                    "num_stages": (2, 3, 4),
                },
            },
            "min_seconds": 0.03, "num_workers": 8,
        },
        tiny={
            "tasks": {"decode": Task(TINY, 1, 1, 20), "prefill": Task(TINY, 1, 10, 10)},
            "grids": {"decode": {"tile": (16,)}, "prefill": {"block_m": (16,)}},
            "min_seconds": 0.0, "num_workers": 0, "max_copies": 1,
        },
    ),
    "start-up": Part(**_STARTUP),
    "start-up again": Part(**_STARTUP),
}  # fmt: skip


def measure(name: str, file: Path, is_dry: bool) -> None:
    """Run one part. In the file, as soon as they are there: the machine, the rows, and under
    "failure" what ended it."""
    part, device = PARTS[name], resolve_device("auto")
    found = {"machine": describe_machine(device), "rows": [], "failure": None}
    try:
        report.save(found, file)
        for row in part.measure(**(part.tiny if is_dry else part.full)):
            print({key: value for key, value in row.items() if key != "tried"}, flush=True)
            found["rows"].append(row)
            report.save(found, file)
        if failure_of(found["rows"]) is not None:
            sys.exit(failure_of(found["rows"]))
    except (Exception, SystemExit) as error:
        is_text = isinstance(error, SystemExit)
        found["failure"] = str(error) if is_text else f"{type(error).__name__}: {error}"
        report.save(found, file)
        raise


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Date, hardware and versions; of a GPU its memory and capability too."""
    machine = report.describe_hardware(device)
    if HAS_TRITON:
        machine["triton"] = importlib.metadata.version("triton")
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        machine["GiB"] = round(total / 2**30)
        machine["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return machine


if __name__ == "__main__":
    _, part_name, target, *options = sys.argv
    measure(part_name, Path(target), "--dry-run" in options)
