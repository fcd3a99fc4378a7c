"""Chapter 8: its checks refuse wrong answers and take right ones; figures draw live data."""

import math
import statistics

import numpy as np
import pytest

from nanobatch import EngineConfig, check
from nanobatch.bench.simulated import System, run
from nanobatch.bench.workload import random_requests
from nanobatch.viz.latency import (
    EXAMPLES,
    goodput_against_rate,
    latency_cdf,
    request_latencies,
)

# ---- ex8_1: percentile ------------------------------------------------------------------


def percentile_by_hand(values, p):
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low, high = math.floor(rank), math.ceil(rank)
    return (1 - (rank - low)) * ordered[low] + (rank - low) * ordered[high]


def percentile_of_numpy(values, p):
    return float(np.percentile(values, p))


@pytest.mark.parametrize("answer", [percentile_by_hand, percentile_of_numpy])
def test_right_percentiles(answer, capsys):
    check.ex8_1(answer)
    assert "ex8_1: right" in capsys.readouterr().out


def nearest_rank(values, p):
    return sorted(values)[max(0, math.ceil(len(values) * p / 100) - 1)]


def without_sorting(values, p):
    rank = (len(values) - 1) * p / 100
    low, high = math.floor(rank), math.ceil(rank)
    return values[low] + (values[high] - values[low]) * (rank - low)


def sorting_in_place(values, p):
    values.sort()
    return without_sorting(values, p)


def past_the_end(values, p):
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = int(rank)
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (rank - low)


@pytest.mark.parametrize(
    "answer, message",
    [
        (nearest_rank, r"\[10.0, 20.0, 30.0, 40.0\], 50.*gives 20.0; right is 25.0"),
        (without_sorting, r"\[40.0, 10.0, 30.0, 20.0\], 50.*right is 25.0"),
        (sorting_in_place, r"\[40.0, 10.0, 30.0, 20.0\], 50.*copy them first"),
        (past_the_end, r"\(\[7.0\], 99\) raises IndexError"),
    ],
)
def test_wrong_percentiles(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex8_1(answer)


# ---- ex8_2: TPOT and ITL ----------------------------------------------------------------


def by_pairs(times):
    itl = [b - a for a, b in zip(times, times[1:], strict=False)]
    return (statistics.mean(itl) if itl else None), itl


def by_ends(times):
    n = len(times) - 1
    tpot = None if n == 0 else (times[-1] - times[0]) / n
    return tpot, [float(gap) for gap in np.diff(times)]


@pytest.mark.parametrize("answer", [by_pairs, by_ends])
def test_right_tpot(answer):
    check.ex8_2(answer)


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            lambda t: ((t[-1] - t[0]) / len(t), by_pairs(t)[1]),
            r"\[1.0, 1.5, 2.0\].*gives \(0.33.*right is \(0.5",
        ),
        (
            lambda t: (t[-1] / len(t), [t[0], *by_pairs(t)[1]]),
            r"\[1.0, 1.5, 2.0\].*right is \(0.5, \[0.5, 0.5\]\)",
        ),
        (
            lambda t: ((t[-1] - t[0]) / (len(t) - 1), by_pairs(t)[1]),
            r"\[3.0\].*raises ZeroDivisionError",
        ),
        (
            lambda t: (by_pairs(t)[0] or 0.0, by_pairs(t)[1]),
            r"\[3.0\].*right is \(None, \[\]\)",
        ),
    ],
)
def test_wrong_tpot(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex8_2(answer)


# ---- ex8_3: goodput ---------------------------------------------------------------------


def goodput_by_sum(requests, duration_s, ttft_limit, tpot_limit):
    good = [t <= ttft_limit and (p is None or p <= tpot_limit) for t, p in requests]
    return sum(good) / duration_s


def goodput_by_removal(requests, duration_s, ttft_limit, tpot_limit):
    left = [r for r in requests if not r[0] > ttft_limit]
    left = [r for r in left if r[1] is None or not r[1] > tpot_limit]
    return len(left) / duration_s


@pytest.mark.parametrize("answer", [goodput_by_sum, goodput_by_removal])
def test_right_goodput(answer):
    check.ex8_3(answer)


def share_of_requests(requests, duration_s, ttft_limit, tpot_limit):
    return goodput_by_sum(requests, 1.0, ttft_limit, tpot_limit) / max(1, len(requests))


def without_one_token_requests(requests, duration_s, ttft_limit, tpot_limit):
    known = [r for r in requests if r[1] is not None]
    return goodput_by_sum(known, duration_s, ttft_limit, tpot_limit)


def either_limit(requests, duration_s, ttft_limit, tpot_limit):
    return sum(t <= ttft_limit or (p or 0) <= tpot_limit for t, p in requests) / duration_s


def below_the_limits(requests, duration_s, ttft_limit, tpot_limit):
    return sum(t < ttft_limit and (p or 0) < tpot_limit for t, p in requests) / duration_s


@pytest.mark.parametrize(
    "answer, message",
    [
        (share_of_requests, r"\(50.0, None\)\], 2.0.*gives 0.4; right is 1.0"),
        (without_one_token_requests, r"\(50.0, None\)\], 2.0.*gives 0.5; right is 1.0"),
        (either_limit, r"\(50.0, None\)\], 2.0.*right is 1.0"),
        (below_the_limits, r"\[\(200.0, 50.0\).*gives 0.0; right is 1.0"),
        (lambda r, d, t, p: sum(a <= t and b <= p for a, b in r) / d, "raises TypeError"),
    ],
)
def test_wrong_goodput(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex8_3(answer)


# ---- figures ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    """Two systems, each at two rates, simulated."""
    engines = {"static": "static", "continuous": "continuous"}
    limits = {"ttft": 200.0, "tpot": 15.0}
    results = {}
    for name, batching in engines.items():
        for rate in (10, 40):
            items = list(random_requests(40, 32, "lognormal:16:1", request_rate=rate))
            config = EngineConfig(max_num_seqs=8, batching=batching)
            results[f"{name} @ {rate}"] = run(
                System(config), items, model="llama-2-7b", gpu="a100-80gb", goodput=limits
            )
    return results


def test_a_cdf_marks_the_percentiles_that_were_measured(results):
    ms = {n: [1e3 * m.ttft for m in r.requests.values()] for n, r in results.items()}
    figure = latency_cdf(ms, "TTFT", limit=200.0)
    (ax,) = figure.axes
    assert ax.get_xlabel() == "TTFT (ms)" and ax.get_ylabel() == "share of requests"
    of_curve = 3  # the curve, P50, P99
    assert len(ax.lines) == of_curve * len(ms) + 3  # two levels and the limit
    for i, result in enumerate(results.values()):
        _, p50, p99 = ax.lines[of_curve * i : of_curve * (i + 1)]
        assert p50.get_xdata()[0] == pytest.approx(result.metrics["median_ttft_ms"])
        assert p99.get_xdata()[0] == pytest.approx(result.metrics["p99_ttft_ms"])


def test_three_latencies_side_by_side(results):
    systems = {name: list(result.requests.values()) for name, result in results.items()}
    figure = request_latencies(systems, {"ttft": 200.0})
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels == ["TTFT (ms)", "TPOT (ms)", "end-to-end latency (ms)"]
    assert all(len(ax.get_legend().get_texts()) >= len(systems) for ax in figure.axes)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0].startswith("static @ 10: P50 ") and texts[-1] == "limit 200 ms"


def test_goodput_is_drawn_against_the_rate_asked_for(results):
    figure = goodput_against_rate({n: r.metrics for n, r in results.items()}, "title")
    (ax,) = figure.axes
    diagonal, served, good, *_ = ax.lines
    assert list(served.get_xdata()) == list(good.get_xdata()) == [10, 40]
    goodputs = [results[f"static @ {rate}"].metrics["request_goodput"] for rate in (10, 40)]
    assert list(good.get_ydata()) == goodputs
    assert len(ax.lines) == 1 + 2 * 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_need_nothing(name):
    assert EXAMPLES[name]().axes


def test_one_value_is_a_distribution_too():
    (ax,) = latency_cdf({"once": [5.0]}, "ITL", of="gaps").axes
    assert list(ax.lines[0].get_xdata()) == [5.0, 5.0]
    assert ax.get_ylabel() == "share of gaps"
