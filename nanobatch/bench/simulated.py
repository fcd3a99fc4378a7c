"""What to compare on the simulator: the ladder, and each choice with its alternatives.

    ladder       sequential, static, continuous, + chunked prefill, + prefix cache
    admission    static, on_demand, reserve, predict
    policy       fcfs, sjf (with the lengths known, and learned), each with max_wait
    preemption   recompute, swap
    router       round_robin, least_loaded, prefix_aware: which of several engines
    none         the engine as it is configured

Every row is given the same requests on the same GPU, or on several of them. Run by `python
bench.py --simulate MODEL@GPU --compare KIND`. Taught in
notebooks/03_iteration_level_scheduling.ipynb and 08_measuring_honestly.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.policies.ordering import SJF, LearnedLengths, Policy
from nanobatch.request import Request, SamplingParams
from nanobatch.simulation.replica import SimulationResult
from nanobatch.simulation.router import ROUTERS
from nanobatch.simulation.simulator import ReplicasResult, simulate, simulate_replicas

STOP_TOKEN = 1 << 30  # ends a text; in no vocabulary


@dataclass(frozen=True)
class System:
    """One row of a comparison. policy makes one anew, as policies may learn; a router makes it
    a row of several replicas."""

    config: EngineConfig
    policy: Callable[[], Policy] | None = None
    router: str | None = None


def ladder(config: EngineConfig, longest: int) -> dict[str, System]:
    """From one request at a time to all that the engine has."""
    chunked = replace(config, enable_prefix_caching=False)
    budget = max(longest, config.max_num_batched_tokens)
    whole = replace(chunked, enable_chunked_prefill=False, max_num_batched_tokens=budget)
    whole = replace(whole, max_model_len=longest)
    static = replace(chunked, batching="static", admission="reserve")
    return {
        "sequential": System(replace(whole, max_num_seqs=1)),
        "static": System(static),
        "continuous": System(whole),
        "+ chunked prefill": System(chunked),
        "+ prefix cache": System(config),
    }


def admissions(config: EngineConfig, longest: int) -> dict[str, System]:
    """Who may enter when memory is short."""
    static = replace(config, batching="static", admission="reserve")
    names = ("on_demand", "reserve", "predict")
    return {"static": System(static)} | {
        name: System(replace(config, admission=name)) for name in names
    }


def policies(config: EngineConfig, longest: int) -> dict[str, System]:
    """Who is next. max_wait is config's, or 10 seconds."""
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
    """What happens to whom gives way."""
    num_host_blocks = config.num_host_blocks or 100_000
    swap = replace(config, preemption="swap", num_host_blocks=num_host_blocks)
    return {"recompute": System(replace(config, preemption="recompute")), "swap": System(swap)}


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
        max_tokens: what each asks for, though its text ends earlier; None: it asks for exactly
            what it gets, as nobody can in earnest.
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
    """Simulate one row of a comparison; no timeline is kept. num_replicas counts only for a
    system with a router."""
    how = {
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
        return simulate_replicas(requests, num_replicas, system.router, **how)
    policy = None if system.policy is None else system.policy()
    return simulate(requests, policy=policy, **how)
