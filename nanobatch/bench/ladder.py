"""`bench.py`, `bench.py ladder`: the same requests through each way of batching (rungs.py).

Sequential and static batches run padded, over a dense cache (static_batching.py); the other
rungs run the engine. All on the identical requests, which arrive at once unless --request-rate
says when.

Always holds: every rung is warmed up; rungs take turns over the repeats; medians are shown; and
no speed is shown unless all rungs have produced the same greedy tokens. (16-bit numbers round
differently at each batch size, and keys and values in 8 bits may: there the table says how many
outputs agree.)

Several processes share the model: torchrun --nproc-per-node 2 bench.py --tensor-parallel-size 2

Taught in notebooks/08_measuring_honestly.ipynb.
"""

from __future__ import annotations

import contextlib
import functools
import io
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanobatch.bench import flags, report, workload_flags
from nanobatch.bench.hardware import GpuUtilization, Hardware, describe_rates, measure_hardware
from nanobatch.bench.passes import Run, run_engine, run_static
from nanobatch.bench.rungs import make_rungs
from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.llm import build_runner, join_ranks, load_model
from nanobatch.models.decoder import Decoder
from nanobatch.request import RequestMetrics
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.device import resolve_device, resolve_dtype

if TYPE_CHECKING:
    from nanobatch.extensions.ranks import Ranks

MAX_WAIT = 86400.0  # seconds until the last request arrives; each rung waits for it
SMALL_MODEL = 10_000_000  # parameters; its products are too small to be shared between cores
MODEL = {"model": "tiny", "dtype": "float32", "device": "auto", "threads": None}
ENGINE = flags.ENGINE | {
    "attention_backend": "auto",
    "enforce_eager": False,
    "no_async_scheduling": False,
}
REPORT = {"repeat": 3, "goodput": None, "save_json": None, "plot": None}

Rung = Callable[[Sequence[WorkItem]], Run]


def make_ladder(
    model: Decoder, longest: int, config: EngineConfig, ranks: Ranks | None = None
) -> dict[str, Rung]:
    """The rungs by name; each takes the requests to run.

    Args:
        model: with its weights.
        longest: tokens of the longest request, prompt and output.
        config: block_size, max_num_seqs, the budget of the chunked rungs, cuda_graphs; of the
            continuous rungs the policy, the admission, the paged cache and its backend.
        ranks: the processes that share the model, if there are several.
    """
    slots = config.max_num_seqs
    configs = make_rungs(replace(config, max_model_len=longest), longest)
    # One runner serves all; on a GPU its pool is what they need, not all memory there is.
    on_cuda = model.embed.weight.is_cuda
    num_blocks = slots * cdiv(longest, config.block_size) if on_cuda else None
    runner_config = replace(configs["continuous"], num_blocks=num_blocks)
    runner = build_runner(model, runner_config, ranks=ranks)
    rungs: dict[str, Rung] = {}
    for name, rung in configs.items():
        if name in ("sequential", "static"):
            sizes = {"batch_size": rung.max_num_seqs, "num_slots": slots}
            rungs[name] = functools.partial(run_static, runner, **sizes)
        else:
            rungs[name] = functools.partial(run_engine, runner, config=rung)
    return rungs


def compare_tokens(runs: Mapping[str, Run], rounding: str | None) -> str:
    """What to say of the systems' greedy tokens.

    Exits if the systems are not comparable: other tokens where no rounding explains it, else
    other numbers of tokens.
    """
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


def measure(
    rungs: Mapping[str, Rung],
    items: Sequence[WorkItem],
    repeat: int,
    device: torch.device,
    rounding: str | None,
) -> tuple[dict[str, list[Run]], str]:
    """Run the rungs in turns, `repeat` times; their runs, and what to say of their tokens.

    The rungs are warm already. rounding: why greedy tokens may differ; None: they may not.
    """
    runs: dict[str, list[Run]] = {name: [] for name in rungs}
    said = ""
    for _ in range(repeat):
        for name, rung in rungs.items():
            with GpuUtilization(device) as gpu:
                runs[name].append(rung(items))
            runs[name][-1].gpu_utilization = gpu.mean
        said = compare_tokens({name: passes[-1] for name, passes in runs.items()}, rounding)
    return runs, said


def median_summary(
    runs: Sequence[Run], hardware: Hardware | None, goodput: Mapping[str, float] | None
) -> dict[str, float]:
    """Each figure's median over the runs."""
    summaries = [run.summary(hardware, goodput) for run in runs]
    return {key: statistics.median(s[key] for s in summaries) for key in summaries[0]}


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py ladder`."""
    flags.add_flags(parser, MODEL)
    flags.add_flags(parser, flags.WORKLOAD, f"workload ({flags.LENGTHS})")
    flags.add_flags(parser, ENGINE, "engine (names as in EngineConfig)")
    flags.add_flags(parser, REPORT, "measurement and report")


def check_arguments(args: Namespace) -> None:
    """Raise ValueError for what cannot be or would be ignored."""
    workload_flags.check_workload(args)
    if len(args.request_rate) > 1:
        raise ValueError("--request-rate takes several rates only with bench.py simulate")
    flags.check_engine(args)
    if args.plot is not None:
        flags.check_files(args, {"--plot's second figure": timeline_file(args.plot)})


def run_command(args: Namespace) -> dict:
    """Measure and print; the report, with the times that --plot draws."""
    ranks = join_ranks(
        EngineConfig(tensor_parallel_size=args.tensor_parallel_size, device=args.device)
    )
    if ranks is None or ranks.rank == 0:
        return _run(args, ranks)
    args.save_json = args.plot = None  # every rank does the same; one of them reports it
    with contextlib.redirect_stdout(io.StringIO()):
        return _run(args, ranks)


def _run(args: Namespace, ranks: Ranks | None) -> dict:
    config = replace(flags.engine_config(args), device=args.device, dtype=args.dtype)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    loaded = load_model(args.model, config, ranks)
    model, rate = loaded.model, args.request_rate[0]
    is_small = sum(p.numel() for p in model.parameters()) < SMALL_MODEL
    if args.threads or is_small:
        torch.set_num_threads(args.threads or 1)
    encode = None if loaded.tokenizer is None else loaded.tokenizer.encode
    items = workload_flags.make_items(
        args,
        rate,
        vocab_size=model.vocab_size,
        max_model_len=model.config.max_position_embeddings,
        max_span=MAX_WAIT,
        encode=encode,
    )
    info = report.describe_hardware(device)
    what = workload_flags.describe_items(items, rate)
    report.print_heading(f"{args.model}, {args.dtype}: {what}, {args.max_num_seqs} slots", info)
    hardware = measure_hardware(device, dtype) if device.type == "cuda" else None
    if hardware is not None:
        print(describe_rates(hardware))
    rungs = make_ladder(model, workload_flags.longest_of(items), config, ranks)
    for rung in rungs.values():  # warm up
        few = items[: args.max_num_seqs]
        rung([replace(item, num_output_tokens=2, arrival_time=0.0) for item in few])
    rounding = None if dtype == torch.float32 else "16-bit numbers"
    if args.kv_cache_dtype != "auto":
        rounding = f"near ties that {args.kv_cache_dtype} rounds differently"
    runs, said = measure(rungs, items, args.repeat, device, rounding)
    systems = {
        name: median_summary(passes, hardware, args.goodput) for name, passes in runs.items()
    }
    print(f"greedy tokens: {said}; medians of {args.repeat}\n")
    report.print_systems(systems)
    found = {"machine": info, "systems": systems}
    if args.plot:
        drawn = {name: runs[name][-1].metrics for name in ("static", "continuous")}
        found["requests"] = {name: list(map(asdict, timed)) for name, timed in drawn.items()}
    return found


def draw(found: Mapping, args: Namespace, figures) -> Iterator[tuple[str | Path, object]]:
    """The figures of a report, each after its file. figures: nanobatch.viz."""
    timed = {
        name: [RequestMetrics(**one) for one in requests]
        for name, requests in found["requests"].items()
    }
    title = f"{args.model}: {len(timed['static'])} requests, {args.max_num_seqs} slots"
    yield args.plot, figures.ladder(found["systems"], title)
    timeline = figures.static_against_continuous(**timed, num_slots=args.max_num_seqs)
    yield timeline_file(args.plot), timeline


def timeline_file(plot: str) -> Path:
    """Where the second figure of --plot goes."""
    file = Path(plot)
    return file.with_stem(file.stem + "_timeline")
