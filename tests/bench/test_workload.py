"""Workloads, and what is computed from them: arrivals, lengths, percentiles, goodput."""

import itertools
import math
import random
import statistics

import pytest

from nanobatch import BlockAllocator, EngineConfig, Request, RequestMetrics
from nanobatch.bench.passes import Run
from nanobatch.bench.workload import (
    arrival_times,
    chat_requests,
    parse_lengths,
    random_requests,
)
from nanobatch.metrics import (
    EngineStats,
    InterTokenLatencies,
    duration_of,
    percentile,
    summarize,
)
from nanobatch.plan import ScheduledRequest, SchedulerOutput


def gaps(rate, burstiness, n=20_000):
    times = list(arrival_times(n, rate, burstiness, random.Random(0)))
    assert times[0] == 0.0 and times == sorted(times)
    return [b - a for a, b in zip(times, times[1:], strict=False)]


@pytest.mark.parametrize("burstiness, spread", [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_arrivals_have_the_rate_and_the_spread(burstiness, spread):
    """The coefficient of variation of a gamma distribution of shape b is b ** -0.5."""
    between = gaps(5.0, burstiness)
    mean = statistics.mean(between)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(between) / mean == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("rate", [1e-6, 1e6])
@pytest.mark.parametrize("burstiness", [1e-3, 1e6])
def test_times_are_finite_at_the_ends_of_the_ranges(rate, burstiness):
    assert all(0 <= gap < math.inf for gap in gaps(rate, burstiness, 1000))


def test_constant_and_all_at_once():
    assert gaps(4.0, math.inf, 5) == [0.25] * 4
    assert gaps(math.inf, 1.0, 5) == [0.0] * 4
    refused = [(0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1e-300, 1.0), (1e20, 1.0)]
    for rate, burstiness in [*refused, (1.0, 0.0), (1.0, 1e-320), (1.0, math.nan)]:
        with pytest.raises(ValueError, match="request_rate|burstiness"):
            list(arrival_times(3, rate, burstiness, random.Random(0)))


def draw(spec, n=5000):
    rng = random.Random(0)
    lengths = parse_lengths(spec)
    return [lengths(rng) for _ in range(n)]


def test_lengths():
    assert set(draw(7)) == set(draw("7")) == {7}
    assert set(draw("uniform:3:6")) == {3, 4, 5, 6}
    values = draw("lognormal:100:0.5")
    assert statistics.mean(values) == pytest.approx(100, rel=0.05) and max(values) <= 400
    values = draw("bimodal:10:500:0.9")
    assert set(values) == {10, 500} and values.count(10) / 5000 == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    "spec",
    ["0", "-3", "x", "", "uniform:5:3", "uniform:0:3", "uniform:5", "lognormal:100",
     "lognormal:0:1", "lognormal:5:-1", "lognormal:nan:1", "bimodal:1:2", "bimodal:1:2:1.5",
     "zipf:1:2", "uniform:1:inf", "1.5", "uniform:1.5:3", "bimodal:1:2.5:0.5", "10000001",
     "999999999", "uniform:1:999999999", "bimodal:999999999:1:0.5", "lognormal:999999999:1",
     "lognormal:9:11", "lognormal:9:1e200", "lognormal:1e999:1", "9" * 5000],
)  # fmt: skip
def test_lengths_that_are_none_are_refused(spec):
    with pytest.raises(ValueError, match="length"):
        parse_lengths(spec)


def test_another_rate_brings_the_same_requests():
    fast, slow = (
        list(random_requests(50, "uniform:5:9", "lognormal:20:1", request_rate=r, seed=3))
        for r in (math.inf, 2.0)
    )
    assert [i.prompt_token_ids for i in fast] == [i.prompt_token_ids for i in slow]
    assert [i.num_output_tokens for i in fast] == [i.num_output_tokens for i in slow]
    assert slow[-1].arrival_time > 10


def test_conversations_grow_turn_by_turn():
    items = chat_requests(3, 4, "uniform:2:5", 3, request_rate=1.0, seed=1)
    assert len(items) == 12
    assert [i.arrival_time for i in items] == sorted(i.arrival_time for i in items)
    by_length = sorted(items, key=lambda i: len(i.prompt_token_ids))
    continued = 0
    for short in by_length:
        for long in by_length:
            n = len(short.prompt_token_ids)
            is_next = n + 3 + 2 <= len(long.prompt_token_ids) <= n + 3 + 5
            if is_next and long.prompt_token_ids[:n] == short.prompt_token_ids:
                assert long.arrival_time > short.arrival_time
                continued += 1
    assert continued == 9, "each turn but the last of each is continued once"


# ---- metrics ---------------------------------------------------------------------------


def test_inter_token_latencies_by_hand():
    itl = InterTokenLatencies()
    itl.step(["a", "b"], 1.0)
    itl.step(["a"], 1.5)
    itl.step(["a", "b"], 2.0)  # a: 0.5, 0.5; b: 1.0
    assert itl.mean == pytest.approx(2 / 3)
    assert itl.percentile(50) == pytest.approx(0.5, rel=0.01)
    assert itl.percentile(99) == itl.percentile(100) == pytest.approx(1.0, rel=0.01)
    itl.forget("b")
    itl.step(["b"], 9.0)  # a new request of that name: its first token
    assert itl.mean == pytest.approx(2 / 3)
    assert InterTokenLatencies().percentile(99) == InterTokenLatencies().mean == 0.0


def test_inter_token_latencies_against_a_list():
    rng, itl, last, values, now = random.Random(0), InterTokenLatencies(), {}, [], 0.0
    for _ in range(2000):
        now += rng.lognormvariate(-4, 1)
        ids = [name for name in "abcdef" if rng.random() < 0.8]
        values += [now - last[name] for name in ids if name in last]
        last |= dict.fromkeys(ids, now)
        itl.step(ids, now)
    assert itl.mean == pytest.approx(statistics.mean(values))
    for p in (10, 50, 90, 99):
        assert itl.percentile(p) == pytest.approx(percentile(values, p), rel=0.02)


def test_goodput_counts_those_that_meet_all_limits():
    """Each request misses other limits; the oracle is the list of those that it meets."""
    spans = {  # seconds: first token, time per output token (of 3), end to end
        "none": (9.0, 9.0), "ttft": (0.5, 9.0), "tpot": (9.0, 0.25), "ttft tpot": (1.0, 2.0),
        "ttft tpot e2el": (0.5, 0.25),
    }  # fmt: skip
    limits = {"ttft": 1000, "tpot": 2000, "e2el": 3000}
    metrics = []
    for first, each in spans.values():
        m = RequestMetrics(10.0, 10.0, 10.0 + first, 10.0 + first + 2 * each)
        m.num_output_tokens = 3
        metrics.append(m)
    for n in (1, 2, 3):
        for names in itertools.combinations(limits, n):
            num_good = sum(set(names) <= set(met.split()) for met in spans)
            found = summarize(metrics, 1.0, goodput={name: limits[name] for name in names})
            assert found["request_goodput"] == num_good, names


def test_a_duration_runs_from_the_first_arrival():
    """Of a pass here; of a simulation in test_trace.py."""
    late = [  # from 4 s to 6.5 s, given in the order of their ends
        RequestMetrics(4.5, 4.5, 5.0, 6.0, num_output_tokens=2),
        RequestMetrics(4.0, 5.0, 5.5, 6.5, num_output_tokens=3),
    ]
    assert duration_of(late) == 2.5
    summary = Run([[1, 2], [1, 2, 3]], late, 1.0, []).summary(None)
    assert (summary["duration"], summary["output_throughput"]) == (2.5, 2.0)
    assert 0 < duration_of([]) < 1e-6 and 0 < duration_of([RequestMetrics(3, 3, 3, 3)]) < 1e-6


def test_goodput_and_queue_by_hand():
    metrics = [  # ttft 1 s, tpot 0.5 s, latency 3 s; ttft 0.1 s, one token; not good
        RequestMetrics(0.0, 0.5, 1.0, 3.0, num_prompt_tokens=4, num_output_tokens=5),
        RequestMetrics(1.0, 1.05, 1.1, 1.1, num_prompt_tokens=6, num_output_tokens=1),
        RequestMetrics(0.0, 3.0, 4.0, 5.0, num_prompt_tokens=6, num_output_tokens=2),
    ]
    s = summarize(metrics, 5.0, goodput={"ttft": 1000, "tpot": 500})
    assert s["request_goodput"] == 2 / 5
    assert summarize(metrics, 5.0, goodput={"e2el": 2999})["request_goodput"] == 1 / 5
    assert "request_goodput" not in summarize(metrics, 5.0)
    assert s["mean_queue_ms"] == pytest.approx((500 + 50 + 3000) / 3)
    assert s["max_queue_ms"] == 3000 and s["max_e2el_ms"] == 5000
    assert "p99_itl_ms" not in s


def test_shares_by_hand():
    config = EngineConfig(num_blocks=10, max_num_seqs=4, max_num_batched_tokens=20)
    stats = EngineStats()
    rows = [ScheduledRequest(Request(str(i), [1] * n), n) for i, n in enumerate((5, 1))]
    padding = [Request("p", [1])] * 2
    pool = BlockAllocator(10, 16)
    held = pool.allocate(7)
    stats.count_step(SchedulerOutput(rows, padding=padding, swap_in=[(0, 1)]), config, pool)
    pool.free(held[3:])
    stats.count_step(SchedulerOutput(rows[:1]), config, pool)
    assert (stats.num_steps, stats.num_tokens, stats.num_rows) == (2, 11, 3)
    assert stats.utilizations() == {
        "slot_utilization": 3 / 8,
        "budget_utilization": 11 / 40,
        "pool_utilization": 10 / 20,
        "padding_share": 2 / 5,
    }
    assert stats.num_swapped_blocks == 1


def test_recomputed_share_by_hand():
    m = RequestMetrics(0.0, 0.0, 1.0, 2.0, num_prompt_tokens=10, num_output_tokens=10)
    m.num_cached_tokens, m.num_recomputed_tokens = 5, 5
    assert summarize([m], 1.0)["recompute_share"] == 5 / (20 - 5 + 5)
