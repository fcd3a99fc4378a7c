r"""Batching at the scale of real models, on a laptop: the real scheduler, a made-up GPU.

    requests, as they arrive --router--> Replica 0     each a whole engine with its own
                                     \-> Replica 1     scheduler, pool and prefix cache
                                      \-> ...          (replica.py), all on one virtual time

Engine, scheduler, allocator and policies are the real ones, so every plan is real too. Only the
time that a plan takes comes from a cost model (cost_model.py). Tokens have no meaning, and a
request ends after a number of tokens that is given.

Always holds: the same requests give the same result on every machine; on the same requests a
real engine makes the same plans, at other times; a router is asked in order of arrival and sees
the state of every replica at that time.

Taught in notebooks/03_iteration_level_scheduling.ipynb and 08_measuring_honestly.ipynb. Source:
Vidur (Agrawal et al., MLSys 2024), which simulates schedulers and clusters in this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nanobatch.config import EngineConfig
from nanobatch.metrics import duration_of
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.policies.admission import Admission
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request
from nanobatch.simulation.cost_model import GPUS, CostModel
from nanobatch.simulation.replica import Replica, SimulationResult, metrics_of, summarize_all
from nanobatch.simulation.router import Router, make_router
from nanobatch.utils.checks import check_choice, check_int


def make_cost_model(
    model: str,
    gpu: str,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
) -> CostModel:
    """The cost model of a model and a GPU by name.

    Raises:
        ValueError: there is no such model or GPU, or the heads do not divide.
    """
    check_choice("model", model, tuple(MODEL_PRESETS))
    check_choice("gpu", gpu, tuple(GPUS))
    check_int("tensor_parallel_size", tensor_parallel_size, 1)
    shape = MODEL_PRESETS[model]
    heads_left_over = shape.num_heads % tensor_parallel_size
    if heads_left_over:
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}; it must divide the "
            f"{shape.num_heads} heads of {model}"
        )
    return CostModel(shape, GPUS[gpu], tensor_parallel_size, block_size, kv_cache_dtype)


def simulate(
    requests: Iterable[Request],
    *,
    model: str = "llama-2-7b",
    gpu: str = "a100-80gb",
    config: EngineConfig | None = None,
    tensor_parallel_size: int = 1,
    policy: Policy | None = None,
    admission: Admission | None = None,
    output_lens: Mapping[str, int] | None = None,
    goodput: Mapping[str, float] | None = None,
    keep_timeline: bool = True,
    progress: bool = False,
) -> SimulationResult:
    """Serve the requests on a simulated GPU.

    Args:
        requests: a list in any order, or an iterator in order of arrival, which is read as
            time goes on. Make new ones for the next simulation.
        model, gpu: names from models.presets.MODEL_PRESETS and cost_model.GPUS.
        config: num_blocks None: as many as the GPU's memory holds; max_model_len None: the
            model's own.
        tensor_parallel_size: GPUs that share the model.
        policy, admission: used in place of those that config names.
        output_lens: see SimulatedRunner.
        goodput: see metrics.summarize.
        keep_timeline: a record for each step; without it memory does not grow with the steps.
        progress: show a progress bar.

    Raises:
        ValueError: no such model or GPU, a model that does not fit the GPU, a request that can
            never fit.
    """
    options = (policy, admission, output_lens, keep_timeline)
    [replica] = _make_replicas(1, config, model, gpu, tensor_parallel_size, *options)
    serve(requests, [replica], lambda request: 0, progress)
    return replica.result(duration_of(replica.requests.values()), goodput)


@dataclass
class ReplicasResult:
    """The result of a simulation of several replicas.

    metrics: as in SimulationResult, over all of them; prefix_hit_rate, the share of the tokens
        of the prompts that a prefix cache had; busy_share, the share of the time that was
        spent in steps; min_ and max_busy_share, of the idlest and the busiest replica.
    replicas: one result each, with its own prefix_hit_rate and busy_share. Rates are over the
        whole duration, so that they add up.
    """

    metrics: dict[str, float]
    replicas: list[SimulationResult]


def simulate_replicas(
    requests: Iterable[Request],
    num_replicas: int,
    router: str | Router = "round_robin",
    *,
    model: str = "llama-2-7b",
    gpu: str = "a100-80gb",
    config: EngineConfig | None = None,
    tensor_parallel_size: int = 1,
    output_lens: Mapping[str, int] | None = None,
    goodput: Mapping[str, float] | None = None,
    keep_timeline: bool = True,
    progress: bool = False,
) -> ReplicasResult:
    """Serve the requests on several equal engines, each with its own GPUs.

    Args:
        num_replicas: how many.
        router: one of router.ROUTERS, or an object with choose(request, replicas) -> index.
        The others: as in simulate(); config is that of each engine.

    Raises:
        ValueError: as in simulate(); no such router, or it names no replica.
    """
    check_int("num_replicas", num_replicas, 1)
    options = (None, None, output_lens, keep_timeline)
    replicas = _make_replicas(num_replicas, config, model, gpu, tensor_parallel_size, *options)
    chooser = make_router(router) if isinstance(router, str) else router
    serve(requests, replicas, lambda request: chooser.choose(request, replicas), progress)
    duration = duration_of(metrics_of(replicas))
    results = [replica.result(duration, goodput) for replica in replicas]
    for replica, result in zip(replicas, results, strict=True):
        result.metrics |= _shares([replica], duration)
    shares = [result.metrics["busy_share"] for result in results]
    metrics = summarize_all(replicas, duration, goodput) | _shares(replicas, duration)
    metrics |= {"min_busy_share": min(shares), "max_busy_share": max(shares)}
    return ReplicasResult(metrics, results)


def _make_replicas(
    num_replicas: int,
    config: EngineConfig | None,
    model: str,
    gpu: str,
    tensor_parallel_size: int,
    *options: object,
) -> list[Replica]:
    """Equal engines. options: Replica's arguments from the policy on."""
    config = EngineConfig() if config is None else config
    sizes = (tensor_parallel_size, config.block_size, config.kv_cache_dtype)
    cost_model = make_cost_model(model, gpu, *sizes)
    return [Replica(config, cost_model, *options) for _ in range(num_replicas)]


def _shares(replicas: Sequence[Replica], duration: float) -> dict[str, float]:
    done = metrics_of(replicas)
    num_prompt = sum(m.num_prompt_tokens for m in done)
    num_cached = sum(m.num_cached_tokens for m in done)
    busy_seconds = sum(replica.busy_seconds for replica in replicas)
    return {
        "prefix_hit_rate": num_cached / max(1, num_prompt),
        "busy_share": busy_seconds / (duration * len(replicas)),
    }


def serve(
    requests: Iterable[Request],
    replicas: Sequence[Replica],
    choose: Callable[[Request], int],
    progress: bool = False,
) -> None:
    """Give each request, when it arrives, to the replica that is chosen, until all have ended.

    Args:
        requests, progress: as in simulate().
        replicas: all are at the time of the arrival when choose is asked.
        choose: gives the index of a replica.
    """
    count = None
    if progress:
        from tqdm.auto import tqdm

        total = len(requests) if isinstance(requests, Sequence) else None
        count = tqdm(total=total, unit="request", mininterval=1.0).update
    if isinstance(requests, Sequence):
        requests = sorted(requests, key=lambda r: r.arrival_time)
    for request in requests:
        for replica in replicas:
            replica.advance(request.arrival_time, count)
        chosen = choose(request)
        check_int("the router's choice", chosen, 0, len(replicas) - 1)
        replicas[chosen].add(request)
    for replica in replicas:
        replica.advance(math.inf, count)
