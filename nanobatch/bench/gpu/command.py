"""`bench.py gpu`: everything that one visit to a GPU should bring home, in under 12 minutes.

    tests           pytest -m gpu, in several processes; what fails there is run again alone
    check           random configurations against each request alone
    kernels         shares of bandwidth and matrix rate; SDPA and FlexAttention beside them
    decode          a decode step of an 8B model against its read floor
    ladder          five ways of batching, at 7B
    published       nano-vllm's own workload, beside what others have published
    sweep           launch configurations of attention: the best beside the kernel's choice
    start-up        twice: kernels compiled, then kept; the memory of CUDA graphs

    gpu.json  gpu.md                  all rows; tables, targets first
    NAME.log  NAME.json               each part's output and rows

Each part runs in a process of its own with a time limit, the most important first. One that
crashes, hangs or finds something wrong stops no other; one that would not fit into what is left
of the time is skipped. The report is written anew after each.

--dry-run goes through all of it with tiny sizes, on a CPU too: what it measures says nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from nanobatch.bench import report
from nanobatch.bench.gpu import parts
from nanobatch.bench.gpu.suite import ROOT, environment
from nanobatch.bench.gpu.summary import Outcome, load_outcome, markdown
from nanobatch.utils.checks import check_float
from nanobatch.utils.processes import end_with_children

FOLDER = "gpu-report"
BUDGET = 690.0  # seconds
MAX_BUDGET = 86400.0


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py gpu`."""
    text = f"folder for the report; made if it is not there (default: {FOLDER})"
    parser.add_argument("--output-dir", metavar="DIR", default=FOLDER, help=text)
    text = f"for all parts together (default: {BUDGET:g})"
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=BUDGET, help=text)
    text = "only these, in this order (default: all)"
    parser.add_argument("--parts", metavar="NAME,NAME", help=text)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU too")


def check_arguments(args: Namespace) -> None:
    """Raise ValueError for what cannot be; args.parts becomes a list of names."""
    check_float("--budget", args.budget, 1.0, MAX_BUDGET)
    names = list(parts.PARTS) if args.parts is None else args.parts.split(",")
    for name in names:
        if name not in parts.PARTS or names.count(name) > 1:
            known = ", ".join(parts.PARTS)
            raise ValueError(f"--parts is {args.parts}; each must be one of {known}, once")
    args.parts = names
    folder = Path(args.output_dir)
    if os.path.isdir(folder):
        folder = folder / "gpu.json"
    elif os.path.lexists(folder):
        raise ValueError(f"--output-dir is {folder}; it must be a directory")
    report.check_writable("--output-dir", folder)


def run_command(args: Namespace) -> dict:
    """Run the parts, each in its process, and write the report after each; the report.

    Raises:
        ValueError: there is no GPU, and this is no dry run.
    """
    if not args.dry_run and not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} sees no CUDA device to measure; --dry-run goes through "
            "all parts on a CPU"
        )
    folder = Path(args.output_dir)
    folder.mkdir(exist_ok=True)
    end = time.monotonic() + args.budget
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in args.parts:
            print(f"{name:16}", end="", flush=True)
            left = end - time.monotonic()
            outcomes[name] = run_part(name, folder, left, cache, args.dry_run)
            print(f"{outcomes[name].seconds:6.0f} s  {outcomes[name].said}", flush=True)
            found = report_of(outcomes) | {"args": report.args_of(args)}
            report.save(found, str(folder / "gpu.json"))
            (folder / "gpu.md").write_text(markdown(outcomes, args.dry_run))
    print(f"\n{(folder / 'gpu.md').read_text().partition('## The parts')[0]}")
    print(f"The whole report: {folder / 'gpu.md'}, {folder / 'gpu.json'}")
    return found


def report_of(outcomes: dict[str, Outcome]) -> dict:
    """The report: each part's outcome. A part that did not end well is a failure."""
    wrong = [name for name, one in outcomes.items() if one.state in ("failed", "stopped")]
    return {
        "parts": {name: outcome._asdict() for name, outcome in outcomes.items()},
        "failure": f"not all is well: {', '.join(wrong)}" if wrong else None,
    }


def run_part(name: str, folder: Path, left: float, cache: str, is_dry: bool) -> Outcome:
    """Run a part in a process of its own, for the seconds that are left at most.

    Args:
        folder: for its files; those of an earlier run go.
        cache: a folder for the kernels of parts that begin without any.
    """
    part = parts.PARTS[name]
    files = {kind: folder / f"{name.replace(' ', '-')}.{kind}" for kind in ("json", "log")}
    for file in files.values():
        file.unlink(missing_ok=True)
    if left < part.least:
        return Outcome(
            "skipped", f"it needs {part.least:g} s; {max(left, 0):.0f} s were left", 0.0
        )
    limit = min(part.limit, left)
    command = [sys.executable, "-m", parts.__name__, name, str(files["json"].resolve())]
    start = time.monotonic()
    with files["log"].open("w") as log:
        status = run_process(
            command + ["--dry-run"] * is_dry,
            limit,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment_of(part, cache),
        )
    seconds = time.monotonic() - start
    return load_outcome(status, limit, seconds, files["json"])


def environment_of(part: parts.Part, cache: str) -> dict[str, str]:
    """Of a part's process, which finds this package, and where there is no GPU the interpreter
    of Triton."""
    found = environment(PYTHONUNBUFFERED="1")
    if part.new_triton_cache:
        found["TRITON_CACHE_DIR"] = cache
    if not torch.cuda.is_available():
        found["TRITON_INTERPRET"] = "1"
    return found


def run_process(command: Sequence[str], limit: float, **options) -> int | None:
    """Run a process, and end it and those that it has started after so many seconds.

    Returns:
        its exit status; None: the limit was reached.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # after Ctrl-C too
        end_with_children(process)
