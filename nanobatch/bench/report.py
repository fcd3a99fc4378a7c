"""What a subcommand prints and saves: a heading, tables, a file of JSON.

JSON keys follow `vllm bench`. No torch is needed, except to describe a device.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import nanobatch

# Of the systems' table: key of the JSON, factor, format. A column is shown if all have its key.
COLUMNS = {
    "req/s": ("request_throughput", 1, ".2f"),
    "goodput": ("request_goodput", 1, ".2f"),
    "out tok/s": ("output_throughput", 1, ".0f"),
    "P50 s": ("median_e2el_ms", 1e-3, ".2f"),
    "P99 s": ("p99_e2el_ms", 1e-3, ".2f"),
    "TTFT P50 ms": ("median_ttft_ms", 1, ".0f"),
    "TPOT P50 ms": ("median_tpot_ms", 1, ".2f"),
    "ITL P99 ms": ("p99_itl_ms", 1, ".1f"),
    "queue mean s": ("mean_queue_ms", 1e-3, ".2f"),
    "queue max s": ("max_queue_ms", 1e-3, ".2f"),
    "slots in use": ("slot_utilization", 1, ".0%"),
    "pool in use": ("pool_utilization", 1, ".0%"),
    "preempted": ("num_preemptions", 1, ".0f"),
    "recomputed": ("recompute_share", 1, ".1%"),
    "prefix hits": ("prefix_hit_rate", 1, ".0%"),
    "idlest busy": ("min_busy_share", 1, ".0%"),
    "busiest busy": ("max_busy_share", 1, ".0%"),
    "of roofline": ("roofline_utilization", 1, ".0%"),
    "NVML util.": ("nvml_gpu_utilization", 1, ".0%"),
}
ONLY_SIMULATED = {"queue mean s", "queue max s", "pool in use", "preempted", "recomputed"}
ABOUT_ROOFLINE = """
of roofline: the least time for the work that was needed (weights, keys and values read once,
products at full rate) as a share of the time it took. NVML util. is the share of time in which
any kernel ran, however little of the GPU it used."""


class Table:
    """Prints its header at once, and each line as soon as it is given.

    Args:
        label: above the first column, which is left-aligned.
        columns: names of the others, right-aligned.
        label_width: of the first column, at least.
    """

    def __init__(self, label: str, columns: Sequence[str], label_width: int = 18):
        self.label_width = max(label_width, len(label))
        self.widths = [max(14, len(name) + 2) for name in columns]
        self.line(label, columns)

    def line(self, label: str, cells: Sequence[str]) -> None:
        """Print a line; a cell for each column, "" for one without a figure."""
        padded = (f"{cell:>{width}}" for cell, width in zip(cells, self.widths, strict=True))
        print(f"{label:{self.label_width}}" + "".join(padded), flush=True)


def print_systems(
    systems: Mapping[str, Mapping[str, float]], is_simulated: bool = False
) -> None:
    """The table of systems, figures by the keys of the JSON (see metrics.summarize)."""
    known = set.intersection(*(set(figures) for figures in systems.values()))
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if column[0] in known and (is_simulated or name not in ONLY_SIMULATED)
    }
    table = Table("", list(columns), max(18, *map(len, systems)))
    for name, figures in systems.items():
        cells = [format(figures[k] * factor, spec) for k, factor, spec in columns.values()]
        table.line(name, cells)
    if "roofline_utilization" in known:
        print(ABOUT_ROOFLINE)


def print_heading(what: str, hardware: Mapping[str, object]) -> None:
    """What is measured, and where."""
    print(f"{what}\n" + ", ".join(f"{key} {value}" for key, value in hardware.items()))


def describe_hardware(device=None) -> dict[str, str | int]:
    """Date, hardware and versions.

    Args:
        device: a torch.device, whose GPU and torch are described too; None: without torch.
    """
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    described = {"date": datetime.date.today().isoformat(), "cpu": cpu}
    described |= {"python": platform.python_version(), "nanobatch": nanobatch.__version__}
    if device is None:
        return described
    import torch

    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def dtype_name(dtype) -> str:
    """A torch.dtype as the flags have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def args_of(args: Namespace) -> dict:
    """The flags as they go into the JSON."""
    return {name: finite(value) for name, value in vars(args).items() if name != "given"}


def finite(value: object) -> object:
    """The value, or "inf" for an infinity, which JSON lacks; `vllm bench` writes it so too."""
    if isinstance(value, list):
        return [finite(one) for one in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def save(report: Mapping, file: str) -> None:
    """Write a report as JSON."""
    Path(file).write_text(json.dumps(report, indent=2, allow_nan=False))
