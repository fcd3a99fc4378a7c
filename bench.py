"""Measure batching: the same requests through every rung of the ladder.

    python bench.py                              a table, under a minute, nothing to download
    python bench.py --model smollm2 --num-prompts 16 --max-num-seqs 4 --output-len 16 --repeat 1
                                                 (a real model: a minute and a half)
    python bench.py --save-json out.json --plot out.png
    python bench.py --kernels                    each kernel against bandwidth and matrix rate
    python bench.py --host                       what the scheduler costs between two steps
    python bench.py --check 60                   a minute of random trials: is it right here?
    python bench.py --model smollm2 --baseline vllm --baseline hf --workload W1
                                                 other engines on the same requests, in turns
    python bench.py --speculative ngram --model smollm2
                                                 what drafts gain, on two kinds of text
    python bench.py --simulate llama-2-7b@a100-80gb --compare policy --request-rate 8
                                                 the real scheduler on a GPU that is not there
    python bench.py --simulate llama-2-7b@a100-80gb --num-replicas 4 --router prefix_aware
                                                 four of them: three routers side by side, and
                                                 what each engine did under this one
    torchrun --nproc-per-node 2 bench.py --tensor-parallel-size 2
                                                 the model shared by two processes

The rungs, each on the identical requests, which arrive at once unless --request-rate says when:

    sequential         one request at a time
    static             padded batches, each run until its last request has finished
    continuous         requests join and leave at every step; whole prompts
    + chunked prefill  prompts share the token budget with those that decode
    + prefix cache     blocks of the shared prefix are computed once

Before any speed is printed, all rungs must have produced the same greedy tokens. Every rung is
warmed up; rungs take turns over the repeats; the table shows medians. (16-bit formats round
differently at each size of a batch, and so may keys and values in 8 bits: there the table says
how many outputs agree.) Flags and JSON keys follow `vllm bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import nanobatch
from nanobatch.bench.hardware import GpuUtilization, Hardware, measure_hardware
from nanobatch.bench.ladder import Run, make_ladder
from nanobatch.bench.other_engines import BASELINES, WORKLOADS, make_workload
from nanobatch.bench.workload import (
    WorkItem,
    chat_requests,
    parse_lengths,
    random_requests,
    read_trace,
)
from nanobatch.config import (
    ADMISSIONS,
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    POLICIES,
    PREEMPTIONS,
    SPECULATIONS,
    EngineConfig,
)
from nanobatch.extensions.tensor_parallel import Ranks, join
from nanobatch.metrics import GOODPUT_METRICS
from nanobatch.models.loader import load
from nanobatch.simulation.router import ROUTERS
from nanobatch.utils.device import resolve_device, resolve_dtype


def compare_tokens(runs: dict[str, Run], rounding: str | None) -> str:
    """What to say of the systems' greedy tokens. Exits if they are not comparable: other
    tokens where no rounding explains it, else other numbers of tokens."""
    reference_name, reference = next(iter(runs.items()))
    differ = set()
    for name, run in runs.items():
        for i, (a, b) in enumerate(zip(reference.outputs, run.outputs, strict=True)):
            if len(a) != len(b) or (rounding is None and a != b):
                sys.exit(
                    f"request {i}: {reference_name} has the tokens {a},\n{name} has {b}.\n"
                    "Systems that disagree are not compared."
                )
            if a != b:
                differ.add(i)
    if not differ:
        return "the same in all"
    num_same = len(reference.outputs) - len(differ)
    return f"{num_same} of {len(reference.outputs)} outputs the same in all ({rounding})"


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


def print_table(systems: dict[str, dict[str, float]], is_simulated: bool = False) -> None:
    known = set.intersection(*(set(s) for s in systems.values()))
    columns = {
        name: column
        for name, column in COLUMNS.items()
        if column[0] in known and (is_simulated or name not in ONLY_SIMULATED)
    }
    width = max(18, *map(len, systems))
    print(" " * width + "".join(f"{name:>14}" for name in columns))
    for name, s in systems.items():
        cells = (format(s[key] * factor, spec) for key, factor, spec in columns.values())
        print(f"{name:{width}}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
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


# Defaults that differ: a small run for real, a large one on the simulator, a larger one with
# prefixes to share on several replicas there.
REAL = {
    "num_prompts": 48, "input_len": "lognormal:32:1", "output_len": "lognormal:48:1",
    "prefix_len": 32, "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_prefixes": 1,
    "request_rate": "inf", "compare": "ladder",
}  # fmt: skip
SIMULATED = {
    "num_prompts": 500, "input_len": "uniform:50:300", "output_len": "lognormal:200:0.5",
    "prefix_len": 0, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_prefixes": 1,
    "request_rate": "inf", "compare": "ladder",
}  # fmt: skip
REPLICAS = SIMULATED | {
    "num_prompts": 2000, "prefix_len": 1000, "num_prefixes": 200, "max_num_seqs": 64,
    "request_rate": "25", "compare": "router",
}  # fmt: skip


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--simulate", metavar="MODEL@GPU", help="the real scheduler on a made-up GPU")
    compare = ("ladder", "admission", "policy", "preemption", "router", "none")
    add("--compare", choices=compare, help="rows of --simulate (default: ladder)")
    add("--kernels", action="store_true", help="time the kernels, not the engine")
    add("--host", action="store_true", help="time the host's part of a step")
    add("--baseline", action="append", choices=BASELINES, default=[],
        help="another engine beside this one, on --workload (again for more)")  # fmt: skip
    add("--baseline-python", action="append", default=[], metavar="NAME=PATH",
        help="the interpreter that has it; default: this one")  # fmt: skip
    add("--workload", default="W1", choices=tuple(WORKLOADS), help="of --baseline")
    add("--check", type=float, metavar="SECONDS", help="is it right, on this machine?")
    add("--model", default="tiny", help="anything LLM() takes (default: %(default)s)")
    add("--dtype", choices=DTYPES, help="default: float32; with --kernels auto")
    add("--device", default="auto", choices=DEVICES)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")

    workload = parser.add_argument_group("workload (a length: 128, uniform:16:512, "
                                         "lognormal:200:1, bimodal:32:1000:0.9)")  # fmt: skip
    add = workload.add_argument
    add("--num-prompts", type=int, help="default: 48; simulated: 500; with replicas 2000")
    add("--input-len", metavar="LENGTH", help="of a prompt's own part, in tokens")
    add("--output-len", metavar="LENGTH", help="of an output, in tokens")
    add("--prefix-len", type=int, help="tokens that prompts share at their beginning")
    add("--num-prefixes", type=int, help="different ones (default: 1; with replicas 200)")
    add("--num-turns", type=int, default=1, help="of conversations, --num-prompts of them")
    add("--request-rate", metavar="R[,R...]", help="requests a second (default: all at once; "
        "with replicas 25); several: a sweep")  # fmt: skip
    add("--burstiness", type=float, default=1.0, help="1 is Poisson, less is burstier")
    add("--trace", metavar="FILE", help="JSON lines: arrival, prompt, output_tokens")
    add("--max-tokens", type=int, help="what requests ask for; default: what they will get")
    add("--seed", type=int, default=0)

    engine = parser.add_argument_group("engine (names as in EngineConfig)")
    add = engine.add_argument
    add("--max-num-seqs", type=int, help="slots of the batch")
    add("--max-num-batched-tokens", type=int, help="budget of a step with chunked prefill")
    add("--block-size", type=int, default=16)
    add("--num-blocks", type=int, help="of the pool, simulated; default: what the GPU holds")
    add("--num-host-blocks", type=int, default=0)
    add("--policy", default="fcfs", choices=POLICIES)
    add("--max-wait", type=float, help="seconds")
    add("--admission", default="on_demand", choices=ADMISSIONS)
    add("--preemption", default="recompute", choices=PREEMPTIONS)
    add("--attention-backend", default="auto", choices=ATTENTION_BACKENDS)
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    add("--speculative", choices=SPECULATIONS[1:], help="measure drafts, with and without")
    add("--num-speculative-tokens", type=int, default=4)
    add("--draft-model", metavar="MODEL", help="of --speculative draft")
    add("--no-enable-prefix-caching", action="store_true", help="not even where a rung has it")
    add("--tensor-parallel-size", type=int, default=1, help="simulated, or torchrun's")
    add("--num-replicas", type=int, help="engines side by side, simulated: compares routers")
    add("--router", default="prefix_aware", choices=ROUTERS,
        help="whose replicas are shown one by one (default: %(default)s)")  # fmt: skip

    report = parser.add_argument_group("measurement and report")
    add = report.add_argument
    add("--repeat", type=int, default=3)
    add("--threads", type=int, help="torch's; by default 1 for a very small model, else all")
    add("--goodput", nargs="+", metavar="NAME:MS", help="limits, such as ttft:200 tpot:50")
    add("--save-json", metavar="FILE")
    add("--plot", metavar="FILE", help="the table as a figure, and FILE's reference *_timeline")
    args = parser.parse_args(argv)
    try:
        _settle(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _settle(args: argparse.Namespace) -> None:
    """Fill in what was left open, and refuse what cannot be before anything is measured."""
    if args.num_replicas is not None and not args.simulate:
        raise ValueError("--num-replicas is only for --simulate")
    if args.num_replicas is not None and args.compare not in (None, "router"):
        raise ValueError(f"--compare is {args.compare}; with --num-replicas it must be router")
    has_replicas = args.num_replicas is not None or args.compare == "router"
    if args.num_replicas is None:
        args.num_replicas = 4 if has_replicas else 1
    defaults = REPLICAS if has_replicas else SIMULATED if args.simulate else REAL
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.dtype = args.dtype or ("auto" if args.kernels or args.baseline else "float32")
    for text in args.baseline_python:
        if text.partition("=")[0] not in args.baseline or "=" not in text:
            raise ValueError(
                f"--baseline-python is {text}; it must be NAME=PATH of a --baseline"
            )
    least = dict.fromkeys(("prefix_len", "num_host_blocks"), 0)
    least |= dict.fromkeys(("num_prompts", "block_size", "repeat", "max_num_seqs"), 1)
    least |= dict.fromkeys(("max_num_batched_tokens", "threads", "num_blocks"), 1)
    least |= dict.fromkeys(("max_tokens", "tensor_parallel_size", "num_turns"), 1)
    least |= dict.fromkeys(("num_prefixes", "num_replicas"), 1)
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= 1e9:
            raise ValueError(f"{_flag(name)} is {value}; it must be >= {low}")
    for name in ("input_len", "output_len"):
        parse_lengths(getattr(args, name))
    args.request_rate = [_rate(text) for text in args.request_rate.split(",")]
    if len(args.request_rate) > 1 and not args.simulate:
        raise ValueError("--request-rate takes several rates only with --simulate")
    args.goodput = None if args.goodput is None else dict(map(_limit, args.goodput))
    for name in ("save_json", "plot"):  # found out now, not after the measurement
        file = getattr(args, name)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{_flag(name)} is {file}; there is no such directory")
    if args.plot is not None and Path(args.plot).suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot is {args.plot}; it must end in .png, .pdf or .svg")
    shares = args.tensor_parallel_size > 1 and not args.simulate
    is_other = args.kernels or args.host or args.baseline or args.check is not None
    if shares and (is_other or args.speculative):
        raise ValueError(
            f"--tensor-parallel-size is {args.tensor_parallel_size}; only the ladder and "
            "--simulate take more than 1"
        )
    is_given = args.kv_cache_dtype != "auto" or args.attention_backend != "auto"
    if is_given and is_other:
        raise ValueError(
            f"--kv-cache-dtype is {args.kv_cache_dtype}, --attention-backend "
            f"{args.attention_backend}; only the ladder, --simulate and --speculative take them"
        )
    if args.simulate and args.simulate.count("@") != 1:
        raise ValueError(f"--simulate is {args.simulate}; it must be MODEL@GPU")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ValueError(f"--request-rate is {text}; it must be > 0, or inf")
    return rate


def _limit(text: str) -> tuple[str, float]:
    name, _, ms = text.partition(":")
    try:
        limit = float(ms)
    except ValueError:
        limit = 0.0
    if name not in GOODPUT_METRICS or not limit > 0:
        names = ", ".join(GOODPUT_METRICS)
        raise ValueError(f"--goodput is {text}; it must be NAME:MS with NAME of {names}")
    return name, limit


def main(argv: Sequence[str] | None = None) -> dict:
    args = parse_args(argv)
    if args.host:
        report = bench_host(args)
    elif args.simulate:
        report = bench_simulated(args)
    elif args.baseline:
        report = bench_baselines(args)
    else:
        ranks = join(args.tensor_parallel_size, args.device)
        device = resolve_device(args.device)
        if args.check is not None:
            report = check_engine(args, device)
        elif args.kernels:
            report = bench_kernels(args, device)
        elif args.speculative:
            report = bench_speculative(args, device)
        elif ranks.rank == 0:
            report = bench_engine(args, device, ranks)
        else:  # it does the same; one says so
            args.save_json = args.plot = None
            with contextlib.redirect_stdout(io.StringIO()):
                report = bench_engine(args, device, ranks)
    if args.save_json:
        Path(args.save_json).write_text(json.dumps(report, indent=2, allow_nan=False))
    return report


def make_items(args, request_rate: float, vocab_size: int, encode=None) -> list[WorkItem]:
    """The workload that the flags describe."""
    if args.trace:
        return read_trace(args.trace, encode=encode, vocab_size=vocab_size, seed=args.seed)
    how = {
        "request_rate": request_rate,
        "burstiness": args.burstiness,
        "vocab_size": vocab_size,
        "seed": args.seed,
    }
    lengths = (args.input_len, args.output_len)
    if args.num_turns > 1:
        return chat_requests(args.num_prompts, args.num_turns, *lengths, **how)
    how |= {"prefix_len": args.prefix_len, "num_prefixes": args.num_prefixes}
    return list(random_requests(args.num_prompts, *lengths, **how))


def engine_config(args, **more) -> EngineConfig:
    """What the flags say of the engine."""
    return EngineConfig(
        block_size=args.block_size,
        num_host_blocks=args.num_host_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_seqs, args.max_num_batched_tokens),
        policy=args.policy,
        max_wait=args.max_wait,
        admission=args.admission,
        preemption=args.preemption,
        attention_backend=args.attention_backend,
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=not args.no_enable_prefix_caching,
        cuda_graphs=not args.enforce_eager,
        **more,
    )


def args_of(args) -> dict:
    """The flags as JSON has them."""
    return vars(args) | {"request_rate": [_finite(rate) for rate in args.request_rate]}


def _finite(rate: float) -> float | str:
    return rate if rate < float("inf") else "inf"  # as `vllm bench` writes it


def longest_of(items: Sequence[WorkItem]) -> int:
    return max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)


def describe_items(items: Sequence[WorkItem], request_rate: float) -> str:
    outputs = [item.num_output_tokens for item in items]
    when = "at once" if request_rate == float("inf") else f"at {request_rate:g} a second"
    return f"{len(items)} requests {when}, outputs of {min(outputs)} to {max(outputs)} tokens"


def bench_host(args) -> dict:
    from nanobatch.bench.host import steady_decode

    torch.set_num_threads(args.threads or 1)
    machine = describe_machine(torch.device("cpu"))
    print_heading("the host's part of a step of steady decode, in us", machine, None)
    columns = ("schedule", "update", "both", "pack")
    print(f"{'requests':>10}" + "".join(f"{name:>12}" for name in columns))
    costs = []
    for num_requests in (16, 64, 256, 1024):
        cost = steady_decode(num_requests)
        both = cost.schedule + cost.update
        values = (cost.schedule, cost.update, both, cost.pack)
        print(f"{num_requests:>10}" + "".join(f"{value:>12.0f}" for value in values))
        costs.append(cost._asdict())
    return {"machine": machine, "args": args_of(args), "host": costs}


def check_engine(args, device: torch.device) -> dict:
    from nanobatch.bench.fuzz import Fuzz

    torch.set_num_threads(args.threads or 1)
    model = load(args.model, torch.float32, device).model
    machine = describe_machine(device)
    print_heading(f"{args.model}, float32: {args.check:g} s of random trials", machine, None)
    found = Fuzz(model, args.seed).run(args.check)
    print(
        f"{found.trials} configurations, {found.requests} requests, {found.tokens} tokens: "
        f"{len(found.faults) or 'no'} differences from each request alone"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(found.seen.items())))
    if found.faults:
        sys.exit(1)
    return {"machine": machine, "args": args_of(args), "check": vars(found)}


def bench_simulated(args) -> dict:
    from nanobatch.bench.simulated import COMPARISONS, run

    model, gpu = args.simulate.split("@")
    systems: dict[str, dict[str, float]] = {}
    for rate in args.request_rate:
        items = make_items(args, rate, vocab_size=256)
        config = engine_config(args, num_blocks=args.num_blocks)
        where = f"{model} on {gpu}"
        if args.compare == "router":
            where = f"{args.num_replicas} times {where}"
        print(f"{where}, simulated: {describe_items(items, rate)}")
        rows = COMPARISONS[args.compare](config, longest_of(items))
        of_rate, replicas = {}, []
        for name, system in rows.items():
            result = run(
                system,
                items,
                max_tokens=args.max_tokens,
                num_replicas=args.num_replicas,
                model=model,
                gpu=gpu,
                tensor_parallel_size=args.tensor_parallel_size,
                goodput=args.goodput,
                progress=len(items) > 5000,
            )
            of_rate[name] = result.metrics | {"request_rate": _finite(rate)}
            if name == args.router:
                replicas = result.replicas
        print_table(of_rate, is_simulated=True)
        if replicas:
            print_replicas(args.router, [replica.metrics for replica in replicas])
        suffix = f" @ {rate:g}" if len(args.request_rate) > 1 else ""
        systems |= {name + suffix: figures for name, figures in of_rate.items()}
    if args.plot:
        from nanobatch import viz

        title = f"{model} on {gpu}, simulated"
        is_sweep = len(args.request_rate) > 1
        draw = viz.throughput_against_latency if is_sweep else viz.ladder
        draw(systems, title).savefig(args.plot, dpi=150)
    return {"args": args_of(args), "systems": systems}


def print_replicas(router: str, replicas: Sequence[dict[str, float]]) -> None:
    print(f"\n{router + ', replica':24}{'requests':>10}{'busy':>10}{'prefix hits':>14}")
    for i, s in enumerate(replicas):
        busy, hits = s["busy_share"], s["prefix_hit_rate"]
        print(f"{i:>24}{s['completed']:>10}{busy:>10.0%}{hits:>14.0%}")


def print_heading(what: str, machine: dict, most: Hardware | None) -> None:
    print(f"{what}\n" + ", ".join(f"{key} {value}" for key, value in machine.items()))
    if most is not None:
        print(
            f"measured now: copy {most.bandwidth / 1e9:.0f} GB/s, matrix product "
            f"{most.flop_rate / 1e12:.4g} TFLOP/s"
        )


def bench_kernels(args, device: torch.device) -> dict:
    from nanobatch.bench.kernels import KernelBench, print_lines

    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = resolve_dtype(args.dtype, device)
    most, machine = measure_hardware(device, dtype), describe_machine(device)
    print_heading(f"kernels, {str(dtype).removeprefix('torch.')}", machine, most)
    with torch.inference_mode():
        lines = print_lines(KernelBench(device, dtype, most).lines())
    return {
        "machine": machine | most._asdict(),
        "args": args_of(args),
        "kernels": [line._asdict() for line in lines],
    }


def bench_baselines(args) -> dict:
    from nanobatch.bench.compare import compare, table

    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    dtype, machine = resolve_dtype(args.dtype, device), describe_machine(device)
    pythons = dict.fromkeys(args.baseline, sys.executable)
    pythons |= dict(text.split("=", 1) for text in args.baseline_python)
    what = f"{args.model}, {str(dtype).removeprefix('torch.')}: workload {args.workload}"
    print_heading(what, machine, None)
    standings = compare(
        args.model, dtype, args.workload, pythons, args.repeat, nanobatch.__version__
    )
    num_tokens = sum(make_workload(args.workload)[1])
    rows = table(standings, num_tokens)
    print(f"{num_tokens} output tokens; {args.repeat} passes in turns, medians\n")
    columns = [name for name in max(rows, key=len) if name not in ("engine", "version")]
    print(f"{'':22}" + "".join(f"{name:>19}" for name in columns))
    for row in rows:
        cells = (f"{row[name]:>19.4g}" if name in row else " " * 19 for name in columns)
        print(f"{row['engine'] + ' ' + row['version']:22}" + "".join(cells))
    print("\nratio: nanobatch's output tokens/s over this engine's")
    return {"machine": machine, "args": args_of(args), "engines": rows}


def bench_speculative(args, device: torch.device) -> dict:
    from nanobatch.bench.speculative import PROMPTS, measure

    if args.threads:
        torch.set_num_threads(args.threads)
    config = engine_config(
        args,
        speculative=args.speculative,
        num_speculative_tokens=args.num_speculative_tokens,
        draft_model=args.draft_model,
    )
    dtype = resolve_dtype(args.dtype, device)
    loaded = load(args.model, dtype, device)
    draft = load(args.draft_model, dtype, device).model if args.draft_model else None
    if loaded.tokenizer is None:
        raise ValueError(f"--model is {args.model}; the prompts need one with a tokenizer")
    prompts = {name: loaded.tokenizer.encode(text) for name, text in PROMPTS.items()}
    num_tokens = args.max_tokens or 128
    machine = describe_machine(device)
    print_heading(
        f"{args.model}, {args.dtype}: drafts of up to {args.num_speculative_tokens} tokens by "
        f"{args.draft_model or args.speculative}, one request of {num_tokens} tokens at a time",
        machine,
        None,
    )
    gains = measure(loaded.model, draft, config, prompts, num_tokens, args.repeat)
    columns = ("tok/s without", "with", "ratio", "tokens a step", "drafted", "accepted", "same")
    print(f"{'prompt':14}" + "".join(f"{name:>15}" for name in columns))
    for g in gains:
        cells = (f"{g.plain_speed:.1f}", f"{g.speed:.1f}", f"{g.speed / g.plain_speed:.2f}")
        cells += (f"{g.tokens_per_step:.2f}", f"{g.num_draft_tokens}")
        cells += (f"{g.acceptance_rate:.0%}", f"{g.same:.0%}")
        print(f"{g.prompt:14}" + "".join(f"{cell:>15}" for cell in cells))
    is_exact = dtype == torch.float32 and args.kv_cache_dtype == "auto"
    if is_exact and any(g.same < 1 for g in gains):
        sys.exit("With drafts the greedy tokens are others: that is wrong, in float32.")
    return {"machine": machine, "args": args_of(args), "gains": [g._asdict() for g in gains]}


def bench_engine(args, device: torch.device, ranks: Ranks) -> dict:
    dtype = resolve_dtype(args.dtype, device)
    loaded = load(args.model, dtype, device, ranks=ranks)
    model = loaded.model
    is_small = sum(p.numel() for p in model.parameters()) < 10_000_000
    if args.threads or is_small:  # its products are too small to be shared between cores
        torch.set_num_threads(args.threads or 1)
    encode = None if loaded.tokenizer is None else loaded.tokenizer.encode
    vocab_size = min(256, model.vocab_size)
    items = make_items(args, args.request_rate[0], vocab_size, encode)
    machine = describe_machine(device)
    most = measure_hardware(device, dtype) if device.type == "cuda" else None
    print_heading(
        f"{args.model}, {args.dtype}: {describe_items(items, args.request_rate[0])}, "
        f"{args.max_num_seqs} slots",
        machine,
        most,
    )
    config = engine_config(args, tensor_parallel_size=ranks.size)
    rounding = None if dtype == torch.float32 else "16-bit numbers"
    if config.kv_cache_dtype != "auto":
        rounding = f"a hair's breadth decides how {config.kv_cache_dtype} rounds"
    rungs = make_ladder(model, longest_of(items), config)
    for rung in rungs.values():
        few = items[: args.max_num_seqs]
        rung([replace(item, num_output_tokens=2, arrival_time=0.0) for item in few])
    runs: dict[str, list[Run]] = {name: [] for name in rungs}
    for _ in range(args.repeat):
        for name, rung in rungs.items():
            with GpuUtilization(device) as gpu:
                runs[name].append(rung(items))
            runs[name][-1].gpu_utilization = gpu.mean
        latest = {name: all_runs[-1] for name, all_runs in runs.items()}
        tokens = compare_tokens(latest, rounding)
    systems = {
        name: median_summary(all_runs, most, args.goodput) for name, all_runs in runs.items()
    }
    print(f"greedy tokens: {tokens}; medians of {args.repeat}\n")
    print_table(systems)
    if args.plot:
        plot(Path(args.plot), systems, runs, args)
    return {"machine": machine, "args": args_of(args), "systems": systems}


def median_summary(
    runs: Sequence[Run], machine: Hardware | None, goodput: dict[str, float] | None
) -> dict[str, float]:
    summaries = [run.summary(machine, goodput) for run in runs]
    return {key: statistics.median(s[key] for s in summaries) for key in summaries[0]}


def plot(file: Path, systems: dict, runs: dict[str, list[Run]], args) -> None:
    from nanobatch import viz

    num_requests = len(next(iter(runs.values()))[-1].metrics)
    title = f"{args.model}: {num_requests} requests, {args.max_num_seqs} slots"
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
