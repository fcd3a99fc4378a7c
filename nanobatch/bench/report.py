"""What a subcommand prints and saves: a heading, tables, a file of JSON.

JSON keys follow `vllm bench`. No torch is needed, except to describe a device.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
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
    return {name: value for name, value in vars(args).items() if name != "given"}


def finite(value: object) -> object:
    """The value as JSON has it: "inf" for an infinity, as `vllm bench` writes it, and null for
    what is not a number. What it contains likewise."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


# ---------------------------------------------------------------------------------- files


def check_writable(name: str, file: Path) -> None:
    """Raise ValueError if the file cannot be written; one that is there stays as it is.

    Args:
        name: of the flag, for the message.
    """
    if not os.path.isdir(file.absolute().parent):  # Path.is_dir raises for too long a name
        raise ValueError(f"{name} is {file}; there is no such directory")
    try:
        if file.exists() and not file.is_file():
            raise ValueError(f"{name} is {file}; it must be a regular file")
        if file.exists():
            file.open("ab").close()
        new = _beside(file)
        try:  # permissions alone do not say it: a disk may be full, or read-only
            new.write_bytes(bytes(4096))
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{name} is {file}; it cannot be written: {error.strerror}") from None


def save(report: Mapping, file: str) -> None:
    """Write a report as JSON."""
    text = json.dumps(finite(report), indent=2, allow_nan=False)
    _replace(Path(file), lambda new: new.write_text(text))


def save_figure(figure, file: str | Path) -> None:
    """Write a figure of matplotlib's in the format of the file's suffix."""
    _replace(Path(file), lambda new: figure.savefig(new, dpi=150))


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file: all of it, or what was there stays. A link stays a link.

    write: is given the file to write, which then takes the place of the other.
    """
    new, target = _beside(file), os.path.realpath(file)
    try:
        write(new)
        if os.path.exists(target):
            shutil.copymode(target, new)
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)


def _beside(file: Path) -> Path:
    """A new file in the same directory, that of a link's target."""
    target = Path(os.path.realpath(file))
    return target.with_name(f".bench-{os.getpid()}{target.suffix}")
