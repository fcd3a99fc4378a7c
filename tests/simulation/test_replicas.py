"""Several engines on one virtual time, and the routers before them.

Oracles: the engine's own loop on a simulated runner; each replica's requests served by a
simulation of their own; what a router must have seen, from the times that came out.
"""

import math
import random
from dataclasses import dataclass, field

import pytest

import bench
from nanobatch import (
    EngineConfig,
    LeastLoaded,
    LLMEngine,
    PrefixAware,
    Request,
    RoundRobin,
    SamplingParams,
    SimulatedRunner,
    VirtualClock,
    simulate,
    simulate_replicas,
)
from nanobatch.bench.simulated import requests_of
from nanobatch.bench.workload import WorkItem, random_requests
from nanobatch.policies.ordering import FCFS
from nanobatch.simulation.replica import Replica
from nanobatch.simulation.router import ROUTERS, make_router
from nanobatch.simulation.simulator import make_cost_model

SMALL = EngineConfig(block_size=16, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=256)


def crowd(n=80, rate=30.0, prefix_len=64, num_prefixes=6, seed=0):
    """Enough at once that steps overlap with arrivals, and some idle time before and after."""
    items = random_requests(
        n, "uniform:5:100", "lognormal:30:1", request_rate=rate, prefix_len=prefix_len,
        num_prefixes=num_prefixes, seed=seed,
    )  # fmt: skip
    return list(requests_of(items, None))


@dataclass
class Watched:
    """Notes, for each choice: when, the loads seen, the hits seen, and who was chosen."""

    router: object
    seen: list = field(default_factory=list)

    def choose(self, request, replicas):
        loads = [replica.num_unfinished for replica in replicas]
        hits = [replica.num_hit_tokens(request) for replica in replicas]
        chosen = self.router.choose(request, replicas)
        self.seen.append((request.arrival_time, loads, hits, chosen))
        return chosen


# ---- one replica -----------------------------------------------------------------------


def test_a_plan_that_fails_takes_no_earlier_step_back():
    class FailsLater(FCFS):
        is_ill = False

        def key(self, request, now):
            assert not self.is_ill, "the policy fails"
            return super().key(request, now)

    policy = FailsLater()
    replica = Replica(SMALL, make_cost_model("llama-2-7b", "a100-80gb"), policy)
    first, second = (Request(name, [1, 2, 3], SamplingParams(max_tokens=9)) for name in "ab")
    replica.add(first)
    replica.advance(1e-9)  # a step is in flight
    replica.advance(replica.clock.now())  # it has ended
    assert len(first.output_token_ids) == 1
    replica.add(second)
    policy.is_ill = True
    with pytest.raises(AssertionError, match="the policy fails"):
        replica.advance(math.inf)
    assert len(first.output_token_ids) == 1


def engine_s_own_loop(requests, config):
    """LLMEngine, stepped; whoever has come is added before each step."""
    cost_model = make_cost_model("llama-2-7b", "a100-80gb", block_size=config.block_size)
    clock = VirtualClock()
    engine = LLMEngine(config, SimulatedRunner(cost_model, clock), clock=clock)
    metrics, requests = {}, sorted(requests, key=lambda r: r.arrival_time)
    while requests or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.sleep_until(requests[0].arrival_time)
        while requests and requests[0].arrival_time <= clock.now():
            r = requests.pop(0)
            engine.add_request(r.prompt_token_ids, r.params, request_id=r.request_id,
                               arrival_time=r.arrival_time)  # fmt: skip
        metrics |= {out.request_id: out.metrics for out in engine.step() if out.finished}
    return metrics


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("rate", [3.0, 30.0, float("inf")])
def test_one_replica_is_the_engine_s_own_loop(rate, batching):
    config = EngineConfig(
        num_blocks=60, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=900,
        batching=batching,
    )  # fmt: skip
    plain = simulate(crowd(rate=rate), config=config)
    assert plain.requests == engine_s_own_loop(crowd(rate=rate), config)
    for router in ROUTERS:
        result = simulate_replicas(crowd(rate=rate), 1, router, config=config)
        (replica,) = result.replicas
        assert plain.metrics.items() <= result.metrics.items()
        assert plain.metrics.items() <= replica.metrics.items()
        assert (replica.timeline, replica.requests) == (plain.timeline, plain.requests)


# ---- several ---------------------------------------------------------------------------


@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_do_not_meet(router):
    """Each does with what it was given what it would do alone."""
    requests = {r.request_id: r for r in crowd()}
    result = simulate_replicas(crowd(), 3, router, config=SMALL)
    given = [set(replica.requests) for replica in result.replicas]
    assert sorted(i for ids in given for i in ids) == sorted(requests)
    assert all(given)
    for replica, ids in zip(result.replicas, given, strict=True):
        alone = simulate([requests[i] for i in ids], config=SMALL)
        assert (alone.timeline, alone.requests) == (replica.timeline, replica.requests)


def test_no_replica_rests_while_it_has_work_and_the_figures_add_up():
    result = simulate_replicas(crowd(rate=8.0), 3, "least_loaded", config=SMALL)
    total, num_rests = result.metrics, 0
    for replica in result.replicas:
        spans = [(m.arrival_time, m.finish_time) for m in replica.requests.values()]
        free_at = 0.0
        for step in replica.timeline:
            rests = step.start > free_at
            num_rests += rests
            # Whoever has come by now came just now, if it was at rest.
            assert not rests or not any(a < step.start and free_at < end for a, end in spans)
            free_at = step.start + step.duration
        busy = sum(step.duration for step in replica.timeline)
        assert replica.metrics["busy_share"] == pytest.approx(busy / total["duration"])
        prompts = sum(m.num_prompt_tokens for m in replica.requests.values())
        cached = sum(m.num_cached_tokens for m in replica.requests.values())
        assert replica.metrics["prefix_hit_rate"] == cached / prompts
    assert num_rests > 3
    for name in ("completed", "total_output_tokens", "request_throughput", "num_preemptions"):
        assert total[name] == pytest.approx(sum(r.metrics[name] for r in result.replicas))
    shares = [replica.metrics["busy_share"] for replica in result.replicas]
    assert total["busy_share"] == pytest.approx(sum(shares) / 3)
    assert (total["min_busy_share"], total["max_busy_share"]) == (min(shares), max(shares))
    assert total["slot_utilization"] == pytest.approx(
        sum(len(step.num_tokens) for r in result.replicas for step in r.timeline)
        / sum(8 for r in result.replicas for step in r.timeline)
    )
    gaps = sum(m.num_output_tokens - 1 for r in result.replicas for m in r.requests.values())
    decode = [m for r in result.replicas for m in r.requests.values() if m.tpot is not None]
    itl = sum(m.tpot * (m.num_output_tokens - 1) for m in decode) / gaps
    assert total["mean_itl_ms"] == pytest.approx(1e3 * itl)


def test_the_same_run_twice_is_the_same():
    for router in ROUTERS:
        a, b = (simulate_replicas(crowd(), 3, router, config=SMALL) for _ in range(2))
        assert a == b


@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_sees_the_present(router):
    """Loads as the times that come out say: nobody who ends later has ended, nobody who has
    ended is still there."""
    watched = Watched(make_router(router))
    requests = crowd()
    result = simulate_replicas(requests, 3, watched, config=SMALL)
    metrics = [m for replica in result.replicas for m in replica.requests.items()]
    times = dict(metrics)
    given = [[], [], []]
    assert [when for when, *_ in watched.seen] == sorted(r.arrival_time for r in requests)
    for request, (when, loads, _, chosen) in zip(requests, watched.seen, strict=True):
        for load, ids in zip(loads, given, strict=True):
            assert load == sum(times[i].finish_time > when for i in ids)
        given[chosen].append(request.request_id)
    assert [set(ids) for ids in given] == [set(r.requests) for r in result.replicas]


def test_a_router_finds_what_was_computed_and_nothing_earlier():
    """One prompt three times: while it is computed, just when that is done, and later."""
    prompt = list(range(100))

    def at(*times):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        return [Request(str(t), prompt, params, arrival_time=t) for t in times]

    end = simulate(at(0.0), config=SMALL).requests["0.0"].first_token_time
    watched = Watched(RoundRobin())
    simulate_replicas(at(0.0, end / 2, end, 2 * end), 2, watched, config=SMALL)
    assert [hits for _, _, hits, _ in watched.seen] == [[0, 0], [0, 0], [96, 0], [96, 96]]


# ---- the routers -----------------------------------------------------------------------


@dataclass
class View:
    num_given: int
    num_unfinished: int
    num_cached: int

    def num_hit_tokens(self, request):
        return self.num_cached


def choices(*views):
    request = Request("r", [1] * 1000)
    return [make_router(name).choose(request, [View(*v) for v in views]) for name in ROUTERS]


@pytest.mark.parametrize(
    "views, chosen",
    [
        ([(12, 5, 0), (12, 2, 100), (11, 7, 900)], [2, 1, 2]),  # the docstring's
        ([(3, 1, 0), (3, 2, 300), (3, 0, 0)], [0, 2, 2]),  # a hit that is not above 0.3
        ([(3, 1, 0), (3, 2, 301), (3, 0, 0)], [0, 2, 1]),  # one that is
        ([(3, 2, 600), (3, 1, 600), (4, 0, 500)], [1, 2, 1]),  # of equal hits the less loaded
        ([(5, 0, 0), (4, 0, 0), (4, 0, 0)], [1, 1, 1]),  # of equal loads the one given less
        ([(80, 74, 900), (40, 10, 0)], [0, 1, 0]),  # 64 apart
        ([(80, 75, 900), (40, 10, 0)], [0, 1, 1]),  # 65 apart, and more than half as much again
        ([(400, 300, 900), (210, 200, 0)], [0, 1, 0]),  # 100 apart, and half as much again
        ([(400, 301, 900), (211, 200, 0)], [1, 1, 1]),
    ],
)
def test_choices_by_hand(views, chosen):
    assert choices(*views) == chosen


def test_round_robin_goes_by_arrival():
    requests = crowd(n=20)
    by_arrival = [r.request_id for r in requests]
    random.Random(0).shuffle(requests)
    result = simulate_replicas(requests, 3, config=SMALL)
    for i, replica in enumerate(result.replicas):
        assert set(replica.requests) == set(by_arrival[i::3])


def test_least_loaded_beats_round_robin_where_the_long_come_in_step():
    """Every fourth request is long: to round robin that is one replica's lot."""
    items = [WorkItem([i] * 50, 30 if i % 4 else 600, i / 8) for i in range(160)]
    rr, least = (
        simulate_replicas(requests_of(items, None), 4, router, config=SMALL)
        for router in ("round_robin", "least_loaded")
    )
    assert least.metrics["p99_ttft_ms"] < 0.2 * rr.metrics["p99_ttft_ms"]
    assert least.metrics["mean_e2el_ms"] < 0.8 * rr.metrics["mean_e2el_ms"]
    assert least.metrics["min_busy_share"] > rr.metrics["min_busy_share"]


def test_least_loaded_gives_to_nobody_who_has_more():
    watched = Watched(LeastLoaded())
    simulate_replicas(crowd(), 3, watched, config=SMALL)
    assert all(loads[chosen] == min(loads) for _, loads, _, chosen in watched.seen)


def test_prefix_aware_finds_more_where_no_pool_holds_all_prefixes():
    """24 prefixes of 32 blocks, pools of 400: a quarter of the prefixes fits, all do not."""
    config = EngineConfig(num_blocks=400, max_num_seqs=8)
    found = {}
    for router in ROUTERS:
        requests = crowd(n=300, rate=20.0, prefix_len=512, num_prefixes=24)
        result = simulate_replicas(requests, 4, router, config=config)
        found[router] = result.metrics
        counts = [replica.metrics["completed"] for replica in result.replicas]
        assert max(counts) < 2 * min(counts)
    aware = found.pop("prefix_aware")
    for other in found.values():
        assert aware["prefix_hit_rate"] > 1.5 * other["prefix_hit_rate"]
        assert aware["mean_ttft_ms"] < other["mean_ttft_ms"]


def test_one_prefix_that_everybody_has_drowns_nobody():
    """The first to come has a second to itself: then one replica, and no other, has it."""

    def run(**thresholds):
        watched = Watched(PrefixAware(**thresholds))
        requests = crowd(n=200, rate=100.0, prefix_len=512, num_prefixes=1)
        for request in requests[1:]:
            request.arrival_time += 1.0
        return watched.seen, simulate_replicas(requests, 4, watched, config=SMALL)

    seen, result = run(balance_abs_threshold=6)
    for _, loads, _, chosen in seen:
        assert loads[chosen] <= max(min(loads) + 6, 1.5 * min(loads))
    counts = [replica.metrics["completed"] for replica in result.replicas]
    assert max(counts) < 1.3 * min(counts)
    _, without = run(balance_abs_threshold=10**6)
    counts = [replica.metrics["completed"] for replica in without.replicas]
    assert max(counts) == 200
    assert result.metrics["p99_ttft_ms"] < 0.5 * without.metrics["p99_ttft_ms"]


def test_salts_share_nothing():
    def salted(salt, when):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        return Request(f"{salt}{when}", [7] * 100, params, arrival_time=when, cache_salt=salt)

    watched = Watched(PrefixAware())
    requests = [salted("a", 0.0), salted("a", 5.0), salted("b", 10.0)]
    simulate_replicas(requests, 2, watched, config=SMALL)
    assert [(hits, chosen) for _, _, hits, chosen in watched.seen] == [
        ([0, 0], 0), ([96, 0], 0), ([0, 0], 1)
    ]  # fmt: skip


# ---- what is refused -------------------------------------------------------------------


class Last:
    def choose(self, request, replicas):
        return len(replicas)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"num_replicas": 0}, "num_replicas is 0"),
        ({"router": "random"}, "router is 'random'; it must be one of 'round_robin'"),
        ({"router": Last()}, "the router's choice is 2"),
        ({"model": "gpt-5"}, "model is 'gpt-5'"),
        ({"config": EngineConfig(max_model_len=90)}, "max_model_len is 90"),
    ],
)
def test_what_there_is_not_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        simulate_replicas(crowd(), **({"num_replicas": 2} | how))


@pytest.mark.parametrize(
    "name, value",
    [
        ("cache_threshold", 1.1), ("cache_threshold", -0.1), ("balance_abs_threshold", -1),
        ("balance_abs_threshold", 1.5), ("balance_rel_threshold", 0.9),
    ],
)  # fmt: skip
def test_thresholds_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        PrefixAware(**{name: value})


def test_there_are_as_many_prefixes_as_asked():
    items = list(random_requests(200, 4, 1, prefix_len=10, num_prefixes=5))
    assert len({tuple(item.prompt_token_ids[:10]) for item in items}) == 5
    assert len({tuple(item.prompt_token_ids[10:]) for item in items}) > 150
    with pytest.raises(ValueError, match="num_prefixes is 0"):
        list(random_requests(1, 4, 1, num_prefixes=0))


# ---- bench.py --------------------------------------------------------------------------


def test_bench_shows_the_routers_side_by_side(capsys):
    argv = "simulate llama-2-7b@h100 --num-replicas 3 --num-prompts 60 --router least_loaded"
    report = bench.main(argv.split())
    printed = capsys.readouterr().out
    assert "3 times llama-2-7b on h100, simulated: 60 requests at 25 a second" in printed
    assert list(report["systems"]) == list(ROUTERS)
    lines = [line.split() for line in printed.splitlines()]
    start = lines.index(["least_loaded,", "replica", "requests", "busy", "prefix", "hits"])
    replicas = lines[start + 1 :]
    assert [row[0] for row in replicas] == ["0", "1", "2"]
    assert sum(int(row[1]) for row in replicas) == 60


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--num-replicas 2", "unrecognized arguments: --num-replicas"),
        ("simulate llama-2-7b@h100 --num-replicas 0", "--num-replicas is 0"),
        ("simulate llama-2-7b@h100 --num-replicas 2 --compare policy", "must be router"),
        ("simulate llama-2-7b@h100 --num-prefixes 0", "--num-prefixes is 0"),
    ],
)
def test_bench_refuses(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(argv.split())
    assert message in capsys.readouterr().err
