"""`bench.py simulate MODEL@GPU`: the real scheduler on a simulated GPU. Needs no torch.

--compare says which systems are compared:

    ladder       sequential, static, continuous, + chunked prefill, + prefix cache (rungs.py)
    admission    static, on_demand, reserve, predict
    policy       fcfs, sjf (knowing the lengths), sjf with a max_wait, sjf (learning lengths)
    preemption   recompute, swap
    router       round_robin, least_loaded, prefix_aware: which of several engines
    none         the engine as it is configured

    bench.py simulate llama-2-7b@a100-80gb --compare policy --request-rate 8
    bench.py simulate llama-2-7b@a100-80gb --num-replicas 4

Several rates, --request-rate 1,2,4, are a sweep. Several replicas have other defaults: 2,000
prompts behind 200 shared prefixes of 1,000 tokens, 25 a second, 64 slots.

Always holds: every system is given the same requests on the same GPU, or on several of them.

Taught in notebooks/03_iteration_level_scheduling.ipynb and 08_measuring_honestly.ipynb.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nanobatch.bench import flags, report, workload_flags
from nanobatch.bench.rungs import make_rungs
from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.policies.lengths import LearnedLengths
from nanobatch.policies.ordering import SJF, Policy
from nanobatch.request import Request, SamplingParams
from nanobatch.simulation.cost_model import CostModel
from nanobatch.simulation.replica import SimulationResult
from nanobatch.simulation.router import ROUTERS
from nanobatch.simulation.simulator import (
    ReplicasResult,
    make_cost_model,
    simulate,
    simulate_replicas,
)

STOP_TOKEN = 1 << 30  # ends a text; in no vocabulary
PROGRESS_FROM = 5000  # requests; fewer take seconds
WORKLOAD = flags.WORKLOAD | {
    "num_prompts": 500, "input_len": "uniform:50:300", "output_len": "lognormal:200:0.5",
    "prefix_len": 0,
}  # fmt: skip
ENGINE = flags.ENGINE | {
    "max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_blocks": None,
}  # fmt: skip
# Of a comparison of routers: more requests, and prefixes for them to share.
REPLICAS = {
    "num_prompts": 2000, "prefix_len": 1000, "num_prefixes": 200, "request_rate": "25",
    "max_num_seqs": 64, "num_replicas": 4, "router": "prefix_aware",
}  # fmt: skip
REPORT = {"goodput": None, "save_json": None, "plot": None}


@dataclass(frozen=True)
class System:
    """One line of a comparison.

    policy: makes a new policy for each run, since policies may learn. router: with one, the
    system has several replicas.
    """

    config: EngineConfig
    policy: Callable[[], Policy] | None = None
    router: str | None = None


def ladder(config: EngineConfig, longest: int) -> dict[str, System]:
    """From one request at a time to all that the engine has (rungs.py)."""
    return {name: System(rung) for name, rung in make_rungs(config, longest).items()}


def admissions(config: EngineConfig, longest: int) -> dict[str, System]:
    """Which requests may enter when memory is short."""
    static = replace(config, batching="static", admission="reserve")
    names = ("on_demand", "reserve", "predict")
    return {"static": System(static)} | {
        name: System(replace(config, admission=name)) for name in names
    }


def policies(config: EngineConfig, longest: int) -> dict[str, System]:
    """Which request is next. max_wait is config's, or 10 seconds."""
    max_wait = 10.0 if config.max_wait is None else config.max_wait
    config = replace(config, max_wait=None)
    waits = replace(config, max_wait=max_wait)

    def learned() -> Policy:
        return SJF(LearnedLengths())

    return {
        "fcfs": System(config),
        "sjf": System(replace(config, policy="sjf")),
        f"sjf, {max_wait:g} s": System(replace(waits, policy="sjf")),
        "sjf, learned": System(config, learned),
    }


def preemptions(config: EngineConfig, longest: int) -> dict[str, System]:
    """What happens to a preempted request."""
    names = ("recompute", "swap")
    return {name: System(replace(config, preemption=name)) for name in names}


def routers(config: EngineConfig, longest: int) -> dict[str, System]:
    """Which of several engines a request goes to."""
    return {name: System(config, router=name) for name in ROUTERS}


COMPARISONS = {
    "ladder": ladder,
    "admission": admissions,
    "policy": policies,
    "preemption": preemptions,
    "router": routers,
    "none": lambda config, longest: {"engine": System(config)},
}


def requests_of(items: Iterable[WorkItem], max_tokens: int | None) -> Iterator[Request]:
    """New requests for the items, in their order.

    Args:
        items: in order of arrival.
        max_tokens: what each asks for, though its text may end earlier; None: each asks for
            exactly what it gets, which a real user cannot know.
    """
    for i, item in enumerate(items):
        asked = item.num_output_tokens if max_tokens is None else max_tokens
        yield Request(
            str(i),
            item.prompt_token_ids,
            SamplingParams(max_tokens=max(asked, item.num_output_tokens)),
            arrival_time=item.arrival_time,
            eos_token_ids=(STOP_TOKEN,),
        )


def run(
    system: System,
    items: list[WorkItem],
    *,
    max_tokens: int | None = None,
    num_replicas: int = 1,
    model: str,
    gpu: str,
    tensor_parallel_size: int = 1,
    goodput: Mapping[str, float] | None = None,
    progress: bool = False,
) -> SimulationResult | ReplicasResult:
    """Simulate one line of a comparison; no timeline is kept. num_replicas counts only for a
    system with a router."""
    options = {
        "model": model,
        "gpu": gpu,
        "config": system.config,
        "tensor_parallel_size": tensor_parallel_size,
        "output_lens": {str(i): item.num_output_tokens for i, item in enumerate(items)},
        "goodput": goodput,
        "keep_timeline": False,
        "progress": progress,
    }
    requests = requests_of(items, max_tokens)
    if system.router is not None:
        return simulate_replicas(requests, num_replicas, system.router, **options)
    policy = None if system.policy is None else system.policy()
    return simulate(requests, policy=policy, **options)


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py simulate`."""
    parser.add_argument("simulate", metavar="MODEL@GPU", help="such as llama-2-7b@a100-80gb")
    parser.add_argument("--compare", choices=tuple(COMPARISONS), help="(default: ladder)")
    text = f"engines; compares routers (default: {REPLICAS['num_replicas']})"
    parser.add_argument("--num-replicas", type=int, metavar="N", help=text)
    text = f"whose replicas are shown one by one (default: {REPLICAS['router']})"
    parser.add_argument("--router", choices=ROUTERS, help=text)
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="what requests ask for (default: what they will get)",
    )
    flags.add_flags(parser, WORKLOAD, f"workload ({flags.LENGTHS})")
    flags.add_flags(parser, ENGINE, "engine (names as in EngineConfig)")
    flags.add_flags(parser, REPORT, "report")


def check_arguments(args: Namespace) -> None:
    """Raise ValueError for what cannot be or would be ignored."""
    if args.simulate.count("@") != 1:
        raise ValueError(f"simulate {args.simulate}: it must be MODEL@GPU")
    if args.compare is None:
        args.compare = "router" if "num_replicas" in args.given else "ladder"
    where = f"with --compare {args.compare}"
    if args.compare == "router":
        vars(args).update((k, v) for k, v in REPLICAS.items() if k not in args.given)
    else:
        flags.refuse(args, ("num_replicas", "router"), f"{where}; it must be router")
    if args.compare in ("admission", "policy", "preemption"):
        flags.refuse(args, (args.compare,), f"{where}, which has them all")
    workload_flags.check_workload(args)
    if len(set(args.request_rate)) < len(args.request_rate):
        raise ValueError("--request-rate has a rate twice")
    flags.check_engine(args)
    with flags.named_as_flags(args):
        cost_model = _cost_model(args)
    if args.num_blocks is not None:
        most = cost_model.num_blocks(1.0)
        if args.num_blocks > most:
            raise ValueError(
                f"--num-blocks is {args.num_blocks}; it must be <= {most}: what the memory of "
                f"{args.simulate} has beside the weights"
            )


def _cost_model(args: Namespace) -> CostModel:
    sizes = (args.tensor_parallel_size, args.block_size, args.kv_cache_dtype)
    return make_cost_model(*args.simulate.split("@"), *sizes)


def run_command(args: Namespace) -> dict:
    """Simulate and print; the report."""
    systems: dict[str, dict[str, float]] = {}
    is_sweep = len(args.request_rate) > 1
    for rate in args.request_rate:
        suffix = f" @ {rate}".removesuffix(".0") if is_sweep else ""
        of_rate = _simulate_rate(args, rate)
        systems |= {name + suffix: one for name, one in of_rate.items()}
    return {"systems": systems}


def draw(found: Mapping, args: Namespace, figures) -> Iterator[tuple[str, object]]:
    """The figure of a report, after its file. figures: nanobatch.viz."""
    title = "{} on {}, simulated".format(*args.simulate.split("@"))
    is_sweep = len(args.request_rate) > 1
    draw_systems = figures.throughput_against_latency if is_sweep else figures.ladder
    yield args.plot, draw_systems(found["systems"], title)


def _simulate_rate(args: Namespace, rate: float | None) -> dict[str, dict[str, float]]:
    """All systems at one request rate, printed; their figures by name."""
    model, gpu = args.simulate.split("@")
    config, shape = flags.engine_config(args), MODEL_PRESETS[model]
    sizes = {"vocab_size": shape.vocab_size, "max_model_len": shape.max_position_embeddings}
    items = workload_flags.make_items(args, rate, **sizes)
    _check_pool(args, items, config)
    longest_output = max(item.num_output_tokens for item in items)
    if args.max_tokens is not None and args.max_tokens < longest_output:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}; an output has {longest_output} tokens, and it "
            "must ask for as many"
        )
    where = f"{model} on {gpu}"
    if args.compare == "router":
        where = f"{args.num_replicas} times {where}"
    print(f"{where}, simulated: {workload_flags.describe_items(items, rate)}")
    simulate_one = functools.partial(
        run,
        items=items,
        max_tokens=args.max_tokens,
        num_replicas=args.num_replicas,
        model=model,
        gpu=gpu,
        tensor_parallel_size=args.tensor_parallel_size,
        goodput=args.goodput,
        progress=len(items) > PROGRESS_FROM,
    )
    compared = COMPARISONS[args.compare](config, workload_flags.longest_of(items))
    results = {name: simulate_one(system) for name, system in compared.items()}
    systems = {name: r.metrics | {"request_rate": rate} for name, r in results.items()}
    report.print_systems(systems, is_simulated=True)
    if args.compare == "router":
        _print_replicas(args.router, [r.metrics for r in results[args.router].replicas])
    return systems


def _check_pool(args: Namespace, items: Sequence[WorkItem], config: EngineConfig) -> None:
    """Raise ValueError if a request cannot fit into the pool, or no block into the GPU."""
    with flags.named_as_flags(args):
        of_gpu = _cost_model(args).num_blocks(config.gpu_memory_utilization)
    num_blocks = config.num_blocks or of_gpu
    num_slots, longest = num_blocks * config.block_size, workload_flags.longest_of(items)
    if longest > num_slots:
        raise ValueError(
            f"--num-blocks is {num_blocks}: the pool has {num_slots} slots, and the longest "
            f"request has {longest} tokens"
        )


def _print_replicas(router: str, replicas: Sequence[Mapping[str, float]]) -> None:
    print()
    table = report.Table(f"{router}, replica", ("requests", "busy", "prefix hits"))
    for i, figures in enumerate(replicas):
        shares = (f"{figures[key]:.0%}" for key in ("busy_share", "prefix_hit_rate"))
        table.line(str(i), (str(figures["completed"]), *shares))
