"""Measure batching: the same requests through every rung of the ladder.

    python bench.py                              a table, under a minute, nothing to download
    python bench.py --model smollm2 --num-prompts 16 --max-num-seqs 4 --output-len 16 --repeat 1
                                                 (a real model: a minute and a half)
    python bench.py --save-json out.json --plot out.png

The rungs, each on the identical requests, all of which arrive at once:

    sequential         one request at a time
    static             padded batches, each run until its last request has finished
    continuous         requests join and leave at every step; whole prompts
    + chunked prefill  prompts share the token budget with those that decode
    + prefix cache     blocks of the shared prefix are computed once

Before any speed is printed, all rungs must have produced the same greedy tokens. Every rung is
warmed up; rungs take turns over the repeats; the table shows medians. Flags and JSON keys
follow `vllm bench`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import nanobatch
from nanobatch.config import DTYPES, EngineConfig
from nanobatch.device import resolve_dtype
from nanobatch.engine import LLMEngine, WallClock
from nanobatch.loader import load
from nanobatch.metrics import summarize
from nanobatch.model_runner import ModelRunner
from nanobatch.request import RequestMetrics, SamplingParams
from nanobatch.static_batching import run_static_batch
from nanobatch.workload import WorkItem, random_requests


@dataclass
class Run:
    """One system's pass over the requests; times in seconds from its start."""

    outputs: list[list[int]]
    metrics: list[RequestMetrics]
    slot_utilization: float

    def summary(self) -> dict[str, float]:
        duration = max(m.finish_time for m in self.metrics)
        return summarize(self.metrics, duration) | {"slot_utilization": self.slot_utilization}


def run_static(model, items: Sequence[WorkItem], batch_size: int, num_slots: int) -> Run:
    """Batches of batch_size in order of arrival. A row is credited at its own last token,
    though a server that returns whole batches would make it wait for the longest."""
    clock, outputs, metrics, num_turns, num_steps = WallClock(), [], [], 0, 0
    start = clock.now()
    for first in range(0, len(items), batch_size):
        batch = items[first : first + batch_size]
        now = clock.now() - start
        rows = [
            RequestMetrics(first_scheduled_time=now, num_prompt_tokens=len(i.prompt_token_ids))
            for i in batch
        ]
        tokens: list[list[int]] = [[] for _ in batch]
        prompts = [i.prompt_token_ids for i in batch]
        for emitted in run_static_batch(model, prompts, [i.num_output_tokens for i in batch]):
            now = clock.now() - start
            num_steps += 1
            num_turns += len(emitted)
            for row, token_id in emitted.items():
                tokens[row].append(token_id)
                if len(tokens[row]) == 1:
                    rows[row].first_token_time = now
                rows[row].finish_time = now
                rows[row].num_output_tokens = len(tokens[row])
        outputs += tokens
        metrics += rows
    return Run(outputs, metrics, num_turns / (num_steps * num_slots))


def run_engine(model, items: Sequence[WorkItem], config: EngineConfig) -> Run:
    """A fresh engine, cold prefix cache included."""
    runner = ModelRunner(model, config)
    engine = LLMEngine(runner.config, runner)
    start = engine.clock.now()
    for i, item in enumerate(items):
        params = SamplingParams(
            temperature=0, max_tokens=item.num_output_tokens, ignore_eos=True
        )
        engine.add_request(item.prompt_token_ids, params, request_id=str(i), arrival_time=start)
    done = {}
    while engine.has_unfinished():
        done |= {out.request_id: out for out in engine.step() if out.finished}
    outs = [done[str(i)] for i in range(len(items))]
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "finish_time")
    metrics = [
        replace(o.metrics, **{n: getattr(o.metrics, n) - start for n in names}) for o in outs
    ]
    return Run([o.token_ids for o in outs], metrics, engine.stats.slot_utilization)


def make_ladder(model, items: Sequence[WorkItem], args) -> dict[str, Callable[..., Run]]:
    """The rungs by name; each takes the requests to run."""
    longest = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    slots = args.max_num_seqs
    chunked = EngineConfig(
        block_size=args.block_size,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots, args.max_num_batched_tokens),
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    whole = replace(
        chunked,
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(longest, chunked.max_num_batched_tokens),
    )
    cached = replace(chunked, enable_prefix_caching=True)
    return {
        "sequential": lambda items: run_static(model, items, 1, slots),
        "static": lambda items: run_static(model, items, slots, slots),
        "continuous": lambda items: run_engine(model, items, whole),
        "+ chunked prefill": lambda items: run_engine(model, items, chunked),
        "+ prefix cache": lambda items: run_engine(model, items, cached),
    }


def check_same_tokens(runs: dict[str, Run]) -> None:
    """Exit with a message unless all systems produced the same greedy tokens."""
    reference_name, reference = next(iter(runs.items()))
    for name, run in runs.items():
        for i, (a, b) in enumerate(zip(reference.outputs, run.outputs, strict=True)):
            if a != b:
                sys.exit(
                    f"request {i}: {reference_name} has the tokens {a},\n{name} has {b}.\n"
                    "Systems that disagree are not compared."
                )


def print_table(systems: dict[str, dict[str, float]]) -> None:
    columns = {
        "req/s": ("request_throughput", 1, ".2f"),
        "out tok/s": ("output_throughput", 1, ".0f"),
        "P50 s": ("median_e2el_ms", 1e-3, ".2f"),
        "P99 s": ("p99_e2el_ms", 1e-3, ".2f"),
        "TTFT P50 ms": ("median_ttft_ms", 1, ".0f"),
        "TPOT P50 ms": ("median_tpot_ms", 1, ".2f"),
        "slots in use": ("slot_utilization", 1, ".0%"),
    }
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for name, s in systems.items():
        cells = (format(s[key] * factor, spec) for key, factor, spec in columns.values())
        print(f"{name:18}" + "".join(f"{cell:>14}" for cell in cells))


def describe_machine() -> dict[str, str | int]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nanobatch": nanobatch.__version__,
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="anything LLM() takes (default: %(default)s)")
    add(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="float32 keeps greedy tokens comparable",
    )
    add("--num-prompts", type=int, default=48)
    add("--input-len", type=int, default=32, help="mean tokens of a prompt's own part")
    add("--output-len", type=int, default=48, help="mean tokens of an output")
    add("--prefix-len", type=int, default=32, help="tokens that all prompts begin with")
    add("--sigma", type=float, default=1.0, help="spread of the lognormal lengths")
    add("--max-num-seqs", type=int, default=16, help="slots of the batch")
    add("--max-num-batched-tokens", type=int, default=128, help="budget with chunked prefill")
    add("--block-size", type=int, default=16)
    add("--repeat", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="torch's; by default 1 for a very small model, else all")
    add("--save-json", metavar="FILE")
    add("--plot", metavar="FILE", help="bars of the table, and FILE's twin *_timeline")
    args = parser.parse_args(argv)
    least = dict.fromkeys(("prefix_len", "sigma"), 0)
    least |= dict.fromkeys(
        ("num_prompts", "input_len", "output_len", "block_size", "repeat"), 1
    )
    least |= dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "threads"), 1)
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= 1e9:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be >= {low}")
    for name in ("save_json", "plot"):  # found out now, not after the measurement
        file = getattr(args, name)
        if file is not None and not Path(file).absolute().parent.is_dir():
            parser.error(f"--{name.replace('_', '-')} is {file}; there is no such directory")
    if args.plot is not None and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--plot is {args.plot}; it must end in .png, .pdf or .svg")
    return args


def main(argv: Sequence[str] | None = None) -> dict:
    args = parse_args(argv)
    model = load(args.model, resolve_dtype(args.dtype, torch.device("cpu"))).model
    is_small = sum(p.numel() for p in model.parameters()) < 10_000_000
    if args.threads or is_small:  # its products are too small to be shared between cores
        torch.set_num_threads(args.threads or 1)
    items = random_requests(
        args.num_prompts,
        args.input_len,
        args.output_len,
        prefix_len=args.prefix_len,
        sigma=args.sigma,
        vocab_size=min(256, model.config.vocab_size),
        seed=args.seed,
    )
    machine = describe_machine()
    print(
        f"{args.model}, {args.dtype}: {len(items)} requests at once, outputs of "
        f"{min(i.num_output_tokens for i in items)} to "
        f"{max(i.num_output_tokens for i in items)} tokens, {args.max_num_seqs} slots\n"
        + ", ".join(f"{key} {value}" for key, value in machine.items())
    )
    rungs = make_ladder(model, items, args)
    for rung in rungs.values():
        rung([replace(item, num_output_tokens=2) for item in items[: args.max_num_seqs]])
    runs: dict[str, list[Run]] = {name: [] for name in rungs}
    for _ in range(args.repeat):
        for name, rung in rungs.items():
            runs[name].append(rung(items))
        check_same_tokens({name: all_runs[-1] for name, all_runs in runs.items()})
    systems = {name: median_summary(all_runs) for name, all_runs in runs.items()}
    print(f"greedy tokens: the same in all; medians of {args.repeat}\n")
    print_table(systems)
    report = {"machine": machine, "args": vars(args), "systems": systems}
    if args.save_json:
        Path(args.save_json).write_text(json.dumps(report, indent=2))
    if args.plot:
        plot(Path(args.plot), systems, runs, args)
    return report


def median_summary(runs: Sequence[Run]) -> dict[str, float]:
    summaries = [run.summary() for run in runs]
    return {key: statistics.median(s[key] for s in summaries) for key in summaries[0]}


def plot(file: Path, systems: dict, runs: dict[str, list[Run]], args) -> None:
    from nanobatch import viz

    title = f"{args.model}: {args.num_prompts} requests, {args.max_num_seqs} slots"
    viz.ladder(systems, title).savefig(file, dpi=150)
    timeline = viz.static_against_continuous(
        runs["static"][-1].metrics, runs["continuous"][-1].metrics, args.max_num_seqs
    )
    timeline.savefig(file.with_stem(file.stem + "_timeline"), dpi=150)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:  # what the user asked for cannot be
        sys.exit(f"bench.py: {error}")
