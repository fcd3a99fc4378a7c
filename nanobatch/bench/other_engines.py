"""`bench.py compare`: nanobatch and other engines on one workload, taking turns.

    workload W1    64 requests at once, prompts and outputs of 16 to 256 tokens
             W2    16 requests at once, prompts of 512 to 1024, outputs of 64 to 128
             one   a single request, 700 tokens and 128

    bench.py compare --model smollm2 --baseline vllm --baseline hf --workload W1

Each other engine runs in a process of its own (engine_process.py), driven over a pipe, under
whatever interpreter has it (--baseline-python). Models are loaded once; then the engines take
turns, so that each has the machine to itself while it works.

Always holds: the same weights, prompts and output lengths, greedy, the end of text ignored;
each engine is warmed up. On a machine that others use too, only ratios of neighbouring passes
mean anything: their median is what is shown.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import nanobatch
from nanobatch.bench import engine_process, flags, report
from nanobatch.bench.passes import run_engine
from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.llm import build_runner
from nanobatch.models.loader import load, save
from nanobatch.utils.device import resolve_dtype

PROCESS = Path(engine_process.__file__)
PAUSE = 0.5  # seconds between two engines: threads of the one before may still spin
OURS = "nanobatch"
BASELINES = ("vllm", "hf")
# Requests, seed, bounds of the lengths of prompts and outputs (both included).
WORKLOADS = {
    "W1": (64, 0, (16, 256), (16, 256)),
    "W2": (16, 1, (512, 1024), (64, 128)),
    "one": (1, 2, (700, 700), (128, 128)),
}
FLAGS = {
    "model": "tiny", "dtype": "auto", "threads": None, "repeat": 3, "save_json": None,
}  # fmt: skip


def make_workload(name: str) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths): first all prompts are drawn, then all output lengths.

    Raises:
        ValueError: there is no workload of that name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload is {name!r}; it must be one of {', '.join(WORKLOADS)}")
    num_requests, seed, input_len, output_len = WORKLOADS[name]
    rng = random.Random(seed)
    prompts = [
        [rng.randint(10, 40000) for _ in range(rng.randint(*input_len))]
        for _ in range(num_requests)
    ]
    return prompts, [rng.randint(*output_len) for _ in range(num_requests)]


class Baseline:
    """An engine in its own process.

    Args:
        name: one of BASELINES.
        python: the interpreter that has it.
        directory: the checkpoint, as Hugging Face has it.
        dtype: "bfloat16", "float32" or "float16".
        threads: cores to use.

    Raises:
        ValueError: it cannot be started there. What it printed went to stderr.
    """

    def __init__(self, name: str, python: str, directory: Path, dtype: str, threads: int):
        self.name = name
        extra = _vllm_environment(python, threads) if name == "vllm" else {}
        try:
            self._process = subprocess.Popen(
                [python, str(PROCESS), name, str(directory), dtype, str(threads)],
                env=extra | os.environ,  # what the user has set wins
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"--baseline-python {name}={python}: {error}") from error
        self.version = self._read()["version"]

    def run(self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> dict:
        """{"seconds", "first_token" (seconds; None if not known), "tokens"} of one pass."""
        request = {"prompts": prompts, "output_lens": output_lens}
        self._process.stdin.write(json.dumps(request, allow_nan=False) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(
                f"--baseline {self.name}: {self._process.args[0]} cannot run it; see above"
            )
        return json.loads(line)


def _vllm_environment(python: str, threads: int) -> dict[str, str]:
    """What vLLM's documentation advises for a CPU: all cores (by default it takes one), and
    tcmalloc and libiomp5 preloaded where they are found."""
    where = [Path(python).parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu")]
    names = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    found = [str(d / n) for n in names for d in where if (d / n).exists()]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join(found),
    }


@dataclass
class Standing:
    """One engine's passes: seconds, and seconds to the first token of the first request."""

    version: str
    seconds: list[float] = field(default_factory=list)
    first_token: list[float | None] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)


def compare(
    model: str,
    dtype: torch.dtype,
    workload: str,
    pythons: Mapping[str, str],
    repeat: int,
) -> dict[str, Standing]:
    """Run the workload `repeat` times on nanobatch and on each of the others, in turns.

    Args:
        model: anything LLM() takes.
        dtype: of the weights, in all engines.
        workload: a name in WORKLOADS.
        pythons: by name of a baseline, the interpreter that has it.

    Raises:
        ValueError: an engine cannot be started, or there is no such workload.
    """
    prompts, output_lens = make_workload(workload)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(model, dtype).model
        vocab_size = loaded.config.vocab_size
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
        directory = Path(model)
        if not (directory / "config.json").exists():
            directory = Path(folder)
            save(loaded, directory)
        threads = torch.get_num_threads()
        name = str(dtype).removeprefix("torch.")
        others = {}
        try:
            for baseline, python in pythons.items():
                others[baseline] = Baseline(baseline, python, directory, name, threads)
            return _take_turns(loaded, others, prompts, output_lens, repeat)
        finally:
            for other in others.values():
                other.close()


def _take_turns(model, others, prompts, output_lens, repeat) -> dict[str, Standing]:
    # The activations of a step of 1024 tokens fit into a CPU's caches; those of 2048 do not.
    config = EngineConfig(enable_prefix_caching=False, max_num_batched_tokens=1024)
    runner = build_runner(model, config)

    def ours(prompts, output_lens):
        items = [WorkItem(prompt, n) for prompt, n in zip(prompts, output_lens, strict=True)]
        start = time.perf_counter()
        run = run_engine(runner, items, runner.config)
        seconds = time.perf_counter() - start
        first_token = run.metrics[0].first_token_time
        return {"seconds": seconds, "first_token": first_token, "tokens": run.outputs}

    engines = {OURS: ours} | {name: other.run for name, other in others.items()}
    standings = {OURS: Standing(nanobatch.__version__)}
    standings |= {name: Standing(other.version) for name, other in others.items()}
    for run in engines.values():
        run(prompts[:4], [4] * len(prompts[:4]))
    for _ in range(repeat):
        for name, run in engines.items():
            time.sleep(PAUSE)
            result, standing = run(prompts, output_lens), standings[name]
            standing.seconds.append(result["seconds"])
            standing.first_token.append(result["first_token"])
            standing.outputs = result["tokens"]
    return standings


def table(standings: Mapping[str, Standing], num_output_tokens: int) -> Sequence[dict]:
    """The figures of each engine.

    Ratios are nanobatch's figure over the other's, medians over neighbouring passes: of output
    tokens/s; and for a single request of the time to its first token and of tokens/s after it.
    """
    ours = standings[OURS]

    def decode_rate(standing: Standing, i: int) -> float:
        return (num_output_tokens - 1) / (standing.seconds[i] - standing.first_token[i])

    lines = []
    for name, other in standings.items():
        passes = range(len(other.seconds))
        line = {
            "engine": name,
            "version": other.version,
            "output_throughput": num_output_tokens / statistics.median(other.seconds),
            "ratio": statistics.median(other.seconds[i] / ours.seconds[i] for i in passes),
            "num_same_outputs": sum(map(list.__eq__, other.outputs, ours.outputs)),
        }
        if len(other.outputs) == 1 and None not in other.first_token:
            rates = [decode_rate(other, i) for i in passes]
            line["ttft_ms"] = statistics.median(other.first_token) * 1e3
            line["ttft_ratio"] = statistics.median(
                ours.first_token[i] / other.first_token[i] for i in passes
            )
            line["decode_throughput"] = statistics.median(rates)
            line["decode_ratio"] = statistics.median(
                decode_rate(ours, i) / rates[i] for i in passes
            )
        lines.append(line)
    return lines


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py compare`."""
    text = "another engine (again for more)"
    parser.add_argument(
        "--baseline", action="append", required=True, choices=BASELINES, help=text
    )
    text = "the interpreter that has it (default: this one)"
    parser.add_argument(
        "--baseline-python", action="append", default=[], metavar="NAME=PATH", help=text
    )
    parser.add_argument("--workload", default="W1", choices=tuple(WORKLOADS))
    flags.add_flags(parser, FLAGS)


def check_arguments(args: Namespace) -> None:
    """Raise ValueError for what cannot be or would be ignored."""
    names = [text.partition("=")[0] for text in args.baseline_python]
    for flag, given in (("--baseline", args.baseline), ("--baseline-python", names)):
        if len(set(given)) < len(given):
            raise ValueError(f"{flag} names {max(given, key=given.count)} twice")
    for text in args.baseline_python:
        name, _, python = text.partition("=")
        if name not in args.baseline or not python:
            raise ValueError(
                f"--baseline-python is {text}; it must be NAME=PATH of a --baseline"
            )
        if shutil.which(python) is None:
            raise ValueError(f"--baseline-python is {text}; there is no such program")


def run_command(args: Namespace) -> dict:
    """Measure and print; the report."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    dtype, info = resolve_dtype(args.dtype, device), report.describe_hardware(device)
    pythons = dict.fromkeys(args.baseline, sys.executable)
    pythons |= dict(text.split("=", 1) for text in args.baseline_python)
    what = f"{args.model}, {report.dtype_name(dtype)}: workload {args.workload}"
    report.print_heading(what, info)
    standings = compare(args.model, dtype, args.workload, pythons, args.repeat)
    num_tokens = sum(make_workload(args.workload)[1])
    lines = table(standings, num_tokens)
    print(f"{num_tokens} output tokens; {args.repeat} passes in turns, medians\n")
    columns = [name for name in max(lines, key=len) if name not in ("engine", "version")]
    printed = report.Table("", columns, label_width=22)
    for line in lines:
        cells = [f"{line[name]:.4g}" if name in line else "" for name in columns]
        printed.line(f"{line['engine']} {line['version']}", cells)
    print("\nratio: nanobatch's output tokens/s over this engine's")
    return {"machine": info, "engines": lines}
