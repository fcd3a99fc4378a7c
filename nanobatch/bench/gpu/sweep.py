"""A sweep of launch configurations: is what the kernel chooses the best that the card can do?

First the sizes of a program are varied, all together (rows, tile, warps, stages), then the
splits and the registers of the best. Each launch is compiled, held against the kernel's own
choice and timed. What does not compile or does not fit is noted, and the others go on.

Kernels are compiled in several processes beforehand; they meet in Triton's cache on disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from nanobatch.bench.attention_systems import AttentionInputs, attention_inputs
from nanobatch.bench.gpu.rows import attempt
from nanobatch.bench.hardware import MAX_CALLS, num_copies, seconds_of
from nanobatch.bench.kernels import TOLERANCE
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import LaunchConfig
from nanobatch.kernels.ops import AttentionArgs

FACTORS_OF_SPLITS = (0.5, 2, 4)
REGISTERS = (None, 128, 168, 255)  # of a thread; None: the compiler's choice; 255: all
NUM_WARMED, WARMED_LEN = 2, 64  # sequences of a launch that only compiles, and their tokens
SHOWN = ("block_m", "tile", "num_warps", "num_stages", "num_splits", "max_registers")


class Task(NamedTuple):
    """What is computed.

    shape: query heads, KV heads, head dimension. query_len, seq_len: of each sequence.
    """

    shape: tuple[int, int, int]
    num_seqs: int
    query_len: int
    seq_len: int

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int) -> AttentionInputs:
        """Random inputs."""
        lens = (self.num_seqs, self.query_len, self.seq_len)
        return attention_inputs(self.shape, *lens, dtype, device, seed)

    def default(self, itemsize: int, device: torch.device) -> LaunchConfig:
        """The launch that the kernel chooses."""
        from nanobatch.paged_attention_kernel import TritonBackend, chip_of

        num_tokens = self.num_seqs * self.query_len
        sizes = (num_tokens, self.num_seqs, self.query_len, *self.shape, itemsize)
        return TritonBackend().launch_config(*sizes, chip_of(device))

    def with_sizes(self, launch: LaunchConfig, **sizes: int) -> LaunchConfig:
        """The launch with other sizes, and what follows from them."""
        H, K, _ = self.shape
        launch = replace(launch, **sizes)
        return replace(launch, block_q=launch.block_m // (H // K))


def variants(
    task: Task, default: LaunchConfig, grid: Mapping[str, Sequence[int]]
) -> list[LaunchConfig]:
    """The default, and all combinations of the sizes in `grid` that differ from it.

    A program has no fewer rows than a group has heads, and the registers that the compiler
    chooses.
    """
    H, K, _ = task.shape
    found, free = [default], replace(default, max_registers=None)
    for sizes in itertools.product(*grid.values()):
        launch = task.with_sizes(free, **dict(zip(grid, sizes, strict=True)))
        if launch.block_m >= H // K and shown(launch) not in map(shown, found):
            found.append(launch)
    return found


def shown(launch: LaunchConfig) -> dict[str, int]:
    """The sizes that are varied."""
    return {name: getattr(launch, name) for name in SHOWN}


def near(task: Task, best: LaunchConfig) -> list[LaunchConfig]:
    """The best launch with other splits, if it decodes, and with other registers."""
    splits = {int(best.num_splits * factor) for factor in FACTORS_OF_SPLITS} - {0}
    if task.query_len > 1:
        splits = set()
    found = [task.with_sizes(best, num_splits=n) for n in sorted(splits)]
    others = [n for n in REGISTERS if n != best.max_registers]
    return found + [replace(best, max_registers=n) for n in others]


class Sweep:
    """Times launches of one task.

    Args:
        min_seconds: to time each for, at least.
        compilers: processes that compile; None: nothing is compiled beforehand.
        max_copies: of the inputs, which are otherwise more than a cache holds.
    """

    def __init__(
        self,
        task: Task,
        dtype: torch.dtype,
        device: torch.device,
        *,
        compilers: ProcessPoolExecutor | None,
        min_seconds: float,
        max_copies: int = MAX_CALLS,
    ):
        H, K, D = task.shape
        kv_bytes = 2 * task.num_seqs * task.seq_len * K * D * dtype.itemsize
        count = min(num_copies(kv_bytes), max_copies)
        self.task, self.dtype, self.device = task, dtype, device
        self._min_seconds, self._compilers = min_seconds, compilers
        self._inputs = [task.inputs(dtype, device, seed) for seed in range(count)]
        self.default = task.default(dtype.itemsize, device)
        self._wanted = attend(self._inputs[0], None)
        self.tried: list[dict] = []

    def run(self, grid: Mapping[str, Sequence[int]]) -> dict:
        """Time the kernel's own choice, the grid and what is near its best; the best of all."""
        chosen = self._seconds(None) * 1e6
        self._time_all(variants(self.task, self.default, grid))
        self._time_all(near(self.task, self._best()["launch"]))
        best = self._best()
        return {
            "chosen": _text(self.default),
            "chosen us": chosen,
            "best": _text(best["launch"]),
            "best us": best["us"],
            "chosen / best": chosen / best["us"],
            "timed": sum("us" in one for one in self.tried),
            "failed": sum("error" in one for one in self.tried),
        }

    def _best(self) -> dict:
        return min((one for one in self.tried if "us" in one), key=lambda one: one["us"])

    def _time_all(self, launches: Sequence[LaunchConfig]) -> None:
        if self._compilers is not None:
            what = (self.task, launches, self.dtype, self.device.type)
            compile_beforehand(self._compilers, *what)
        for launch in launches:
            try:
                found = {"us": self._seconds(launch) * 1e6}
            except Exception as error:  # of any kind: it does not compile, fit or agree
                found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            self.tried.append({"launch": launch} | found)

    def _seconds(self, launch: LaunchConfig | None) -> float:
        found = attend(self._inputs[0], launch)
        atol = TOLERANCE[self.dtype]
        torch.testing.assert_close(found, self._wanted, atol=atol, rtol=0)
        calls = [lambda x=x: attend(x, launch) for x in self._inputs]
        return seconds_of(calls, self.device, self._min_seconds)


def attend(x: AttentionInputs, launch: LaunchConfig | None) -> Tensor:
    """Paged attention by a launch of the Triton kernel; None: its own choice."""
    from nanobatch.paged_attention_kernel import TritonBackend

    cache = KVCache(x.k_cache_NKPD, x.v_cache_NKPD)
    args = AttentionArgs(sliding_window=None, scale=x.q_THD.shape[-1] ** -0.5)
    return TritonBackend().paged_attention(x.q_THD, cache, x.batch, args, launch)


def _text(launch: LaunchConfig) -> str:
    return ", ".join(f"{name} {value}" for name, value in shown(launch).items())


# ------------------------------------------------------------------- in other processes


def compile_beforehand(
    compilers: ProcessPoolExecutor,
    task: Task,
    launches: Sequence[LaunchConfig],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Compile the kernels of these launches in other processes; faults show later, here."""
    few = task._replace(num_seqs=NUM_WARMED, seq_len=WARMED_LEN)
    few = few._replace(query_len=1 if task.query_len == 1 else WARMED_LEN)
    shares = [(few, few.with_sizes(launch), dtype, device) for launch in launches]
    try:
        list(compilers.map(_launch, shares))
    except BrokenProcessPool:
        print("a process that compiled has crashed")


def _launch(share: tuple[Task, LaunchConfig, torch.dtype, str]) -> None:
    task, launch, dtype, device = share
    with torch.inference_mode():
        try:
            attend(task.inputs(dtype, torch.device(device), seed=0), launch)
        except Exception as error:
            print(f"{_text(launch)}: {type(error).__name__}")


# --------------------------------------------------------------------------------- rows


def sweep(
    tasks: Mapping[str, Task],
    grids: Mapping[str, Mapping[str, Sequence[int]]],
    dtype: torch.dtype,
    device: torch.device,
    num_workers: int,
    **options,
) -> Iterator[dict]:
    """A row for each task.

    Args:
        tasks: by name.
        grids: by "decode" and "prefill", the sizes to combine.
        num_workers: processes that compile; 0: nothing is compiled beforehand.
        options: see Sweep.
    """
    num_workers = min(num_workers, os.cpu_count() or 1)
    with contextlib.ExitStack() as stack:
        compilers = None
        if num_workers:
            pool = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))
            compilers = stack.enter_context(pool)
        for name, task in tasks.items():

            def run_task(task=task) -> dict:
                one = Sweep(task, dtype, device, compilers=compilers, **options)
                row = one.run(grids["decode" if task.query_len == 1 else "prefill"])
                return row | {"tried": [shown(t.pop("launch")) | t for t in one.tried]}

            yield attempt({"case": name, "heads": "{}/{} x {}".format(*task.shape)}, run_task)
