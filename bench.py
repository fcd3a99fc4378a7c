"""Measure batching: the same requests through every rung of the ladder.

    python bench.py                              a table, under a minute, nothing to download
    python bench.py --model smollm2 --num-prompts 16 --max-num-seqs 4 --output-len 16 --repeat 1
                                                 (a real model: a minute and a half)
    python bench.py --save-json out.json --plot out.png
    python bench.py --kernels                    each kernel against bandwidth and matrix rate

The rungs, each on the identical requests, all of which arrive at once:

    sequential         one request at a time
    static             padded batches, each run until its last request has finished
    continuous         requests join and leave at every step; whole prompts
    + chunked prefill  prompts share the token budget with those that decode
    + prefix cache     blocks of the shared prefix are computed once

Before any speed is printed, all rungs must have produced the same greedy tokens. Every rung is
warmed up; rungs take turns over the repeats; the table shows medians. (16-bit formats round
differently at each size of a batch: there the table says how many outputs agree.) Flags and
JSON keys follow `vllm bench`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import nanobatch
from nanobatch.config import DEVICES, DTYPES, EngineConfig
from nanobatch.device import resolve_device, resolve_dtype
from nanobatch.ladder import Run, make_ladder
from nanobatch.loader import load
from nanobatch.machine import GpuUtilization, Machine, measure_machine
from nanobatch.workload import random_requests


def compare_tokens(runs: dict[str, Run], is_exact: bool) -> str:
    """What to say of the systems' greedy tokens. Exits if they are not comparable: other
    tokens where is_exact, else other numbers of tokens."""
    reference_name, reference = next(iter(runs.items()))
    differ = set()
    for name, run in runs.items():
        for i, (a, b) in enumerate(zip(reference.outputs, run.outputs, strict=True)):
            if len(a) != len(b) or (is_exact and a != b):
                sys.exit(
                    f"request {i}: {reference_name} has the tokens {a},\n{name} has {b}.\n"
                    "Systems that disagree are not compared."
                )
            if a != b:
                differ.add(i)
    if not differ:
        return "the same in all"
    num_same = len(reference.outputs) - len(differ)
    return f"{num_same} of {len(reference.outputs)} outputs the same in all (16-bit numbers)"


def print_table(systems: dict[str, dict[str, float]]) -> None:
    columns = {
        "req/s": ("request_throughput", 1, ".2f"),
        "out tok/s": ("output_throughput", 1, ".0f"),
        "P50 s": ("median_e2el_ms", 1e-3, ".2f"),
        "P99 s": ("p99_e2el_ms", 1e-3, ".2f"),
        "TTFT P50 ms": ("median_ttft_ms", 1, ".0f"),
        "TPOT P50 ms": ("median_tpot_ms", 1, ".2f"),
        "slots in use": ("slot_utilization", 1, ".0%"),
        "of roofline": ("roofline_utilization", 1, ".0%"),
        "NVML util.": ("nvml_gpu_utilization", 1, ".0%"),
    }
    known = set.intersection(*(set(s) for s in systems.values()))
    columns = {name: column for name, column in columns.items() if column[0] in known}
    print(f"{'':18}" + "".join(f"{name:>14}" for name in columns))
    for name, s in systems.items():
        cells = (format(s[key] * factor, spec) for key, factor, spec in columns.values())
        print(f"{name:18}" + "".join(f"{cell:>14}" for cell in cells))
    if "roofline_utilization" in known:
        print(
            "\nof roofline: the least time for the work that was needed (weights, keys and "
            "values read once,\nproducts at full rate) against the time it took. NVML util. is "
            "another thing: the share of time in\nwhich any kernel ran, however little of the "
            "GPU it used."
        )


def describe_machine(device: torch.device) -> dict[str, str | int]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "date": datetime.date.today().isoformat(),
        **gpu,
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
        choices=DTYPES,
        help="default: float32, which keeps greedy tokens comparable; auto with --kernels",
    )
    add("--device", default="auto", choices=DEVICES)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--kernels", action="store_true", help="time the kernels, not the engine")
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
    args.dtype = args.dtype or ("auto" if args.kernels else "float32")
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
    device = resolve_device(args.device)
    report = bench_kernels(args, device) if args.kernels else bench_engine(args, device)
    if args.save_json:
        Path(args.save_json).write_text(json.dumps(report, indent=2))
    return report


def print_heading(what: str, machine: dict, most: Machine | None) -> None:
    print(f"{what}\n" + ", ".join(f"{key} {value}" for key, value in machine.items()))
    if most is not None:
        print(
            f"measured now: copy {most.bandwidth / 1e9:.0f} GB/s, matrix product "
            f"{most.flop_rate / 1e12:.4g} TFLOP/s"
        )


def bench_kernels(args, device: torch.device) -> dict:
    from nanobatch.kernel_bench import KernelBench, print_lines

    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = resolve_dtype(args.dtype, device)
    most, machine = measure_machine(device, dtype), describe_machine(device)
    print_heading(f"kernels, {str(dtype).removeprefix('torch.')}", machine, most)
    with torch.inference_mode():
        lines = print_lines(KernelBench(device, dtype, most).lines())
    return {
        "machine": machine | most._asdict(),
        "args": vars(args),
        "kernels": [line._asdict() for line in lines],
    }


def bench_engine(args, device: torch.device) -> dict:
    dtype = resolve_dtype(args.dtype, device)
    model = load(args.model, dtype, device).model
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
    machine = describe_machine(device)
    most = measure_machine(device, dtype) if device.type == "cuda" else None
    print_heading(
        f"{args.model}, {args.dtype}: {len(items)} requests at once, outputs of "
        f"{min(i.num_output_tokens for i in items)} to "
        f"{max(i.num_output_tokens for i in items)} tokens, {args.max_num_seqs} slots",
        machine,
        most,
    )
    longest = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    config = EngineConfig(
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_seqs, args.max_num_batched_tokens),
        cuda_graphs=not args.enforce_eager,
    )
    rungs = make_ladder(model, longest, config)
    for rung in rungs.values():
        rung([replace(item, num_output_tokens=2) for item in items[: args.max_num_seqs]])
    runs: dict[str, list[Run]] = {name: [] for name in rungs}
    for _ in range(args.repeat):
        for name, rung in rungs.items():
            with GpuUtilization(device) as gpu:
                runs[name].append(rung(items))
            runs[name][-1].gpu_utilization = gpu.mean
        latest = {name: all_runs[-1] for name, all_runs in runs.items()}
        tokens = compare_tokens(latest, is_exact=dtype == torch.float32)
    systems = {name: median_summary(all_runs, most) for name, all_runs in runs.items()}
    print(f"greedy tokens: {tokens}; medians of {args.repeat}\n")
    print_table(systems)
    if args.plot:
        plot(Path(args.plot), systems, runs, args)
    return {"machine": machine, "args": vars(args), "systems": systems}


def median_summary(runs: Sequence[Run], machine: Machine | None) -> dict[str, float]:
    summaries = [run.summary(machine) for run in runs]
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
