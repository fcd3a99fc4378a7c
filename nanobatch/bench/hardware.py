"""The hardware's measured limits, and how busy it is.

    measure_hardware    bandwidth of a large copy, rate of a large matrix product
    seconds_of          how long a call takes when its inputs are not in a cache
    GpuUtilization      NVML's utilization of the GPU while something runs

NVML's utilization is the share of time in which *some* kernel ran: a GPU that runs one slow
kernel on one of its multiprocessors is "100% utilized". The share of the roofline
(roofline.py) is the work that was done as a share of what the GPU could have done in that time.

Source: vLLM's and Triton's benchmarks; the NVML API reference for what utilization means.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nanobatch.utils.arithmetic import cdiv

WORKING_SET = 256 * 2**20  # bytes to go through before the first are read again
GPU_SAMPLE_SECONDS = 0.02
MAX_CALLS = 64


class Hardware(NamedTuple):
    """bandwidth: bytes/s of a copy, read and write both counted. flop_rate: FLOP/s of a
    matrix product in the number format that was asked for."""

    bandwidth: float
    flop_rate: float


def measure_hardware(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Time a copy and a square matrix product, both large enough to reach the limit."""
    is_gpu = device.type == "cuda"
    source = torch.ones((2**30 if is_gpu else 2**27) // 4, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of([lambda: target.copy_(source)], device)
    size = 8192 if is_gpu else 1024
    a, b = torch.randn(2, size, size, device=device).to(dtype)  # zeros would draw less power
    product_seconds = seconds_of([lambda: a @ b], device)
    return Hardware(2 * source.nbytes / copy_seconds, 2 * size**3 / product_seconds)


def describe_rates(hardware: Hardware) -> str:
    """The measured rates in a line."""
    return (
        f"measured now: copy {hardware.bandwidth / 1e9:.0f} GB/s, matrix product "
        f"{hardware.flop_rate / 1e12:.4g} TFLOP/s"
    )


def num_copies(num_bytes: int) -> int:
    """How many sets of inputs of this size fill WORKING_SET: 1 to MAX_CALLS."""
    return min(MAX_CALLS, cdiv(WORKING_SET, max(1, num_bytes)))


def seconds_of(
    calls: Sequence[Callable[[], object]], device: torch.device, min_seconds: float = 0.1
) -> float:
    """Seconds that one of the calls takes: the median over rounds through all of them.

    The calls do the same on different inputs, as the layers of a model do, so that no input
    is in a cache. On a GPU a round is the replay of a captured graph, as a decode step is:
    Python's time to launch is not counted.
    """
    for _ in range(2):  # compiles what has to be compiled
        for call in calls:
            call()
    if device.type == "cuda":
        run_round = _captured_round(calls, device)
    else:

        def run_round() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return time.perf_counter() - start

    run_round()
    rounds = [run_round()]
    while sum(rounds) < min_seconds or len(rounds) < 5:
        rounds.append(run_round())
    return statistics.median(rounds) / len(calls)


def _captured_round(calls: Sequence[Callable[[], object]], device: torch.device):
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run_round() -> float:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000  # it gives milliseconds

    return run_round


class GpuUtilization:
    """Polls NVML while the `with` block runs.

    mean: share of time in which a kernel ran, 0 to 1; None on a CPU, or where nvidia-ml-py is
    not installed.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._samples: list[int] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> GpuUtilization:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        is_done = False
        while not is_done:
            try:
                self._samples.append(torch.cuda.utilization(self._device))
            except Exception:  # no nvidia-ml-py, or NVML does not have it: no figure
                return
            is_done = self._done.wait(GPU_SAMPLE_SECONDS)

    @property
    def mean(self) -> float | None:
        return statistics.mean(self._samples) / 100 if self._samples else None
