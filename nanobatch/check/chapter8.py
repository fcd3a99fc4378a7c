"""Checks of notebooks/08_measuring_honestly.ipynb.

    ex8_1   percentile
    ex8_2   TPOT and ITL
    ex8_3   goodput

The right values come from nanobatch.metrics and RequestMetrics, or are counted here.
"""

from __future__ import annotations

from collections.abc import Callable

from nanobatch.check.compare import call, expect, right
from nanobatch.metrics import percentile
from nanobatch.request import RequestMetrics


def ex8_1(answer: Callable[[list[float], float], float]) -> None:
    """percentile(values, p): linear between ranks; values in any order, unchanged."""
    cases = [
        ([10.0, 20.0, 30.0, 40.0], 50),
        ([40.0, 10.0, 30.0, 20.0], 50),
        ([3.0, 1.0, 2.0], 50),
        ([5.0, 1.0], 25),
        ([7.0], 99),
        ([9.0, 1.0, 4.0, 1.0], 0),
        ([9.0, 1.0, 4.0, 1.0], 100),
        ([float(x) for x in range(100, 0, -1)], 99),
        ([8.0, 8.0, 2.0, 5.0, 1000.0], 90),
    ]
    for values, p in cases:
        given = list(values)
        found = call(answer, given, p)
        expect(found, percentile(values, p), values, p)
        assert given == values, (
            f"for {(values, p)} it leaves values as {given}; copy them first"
        )
    right("ex8_1")


def ex8_2(answer: Callable[[list[float]], tuple[float | None, list[float]]]) -> None:
    """tpot_and_itl(token_times) -> (tpot, itl), from the times (s) of a request's tokens."""
    cases = [
        [1.0, 1.5, 2.0],
        [0.25, 0.26, 0.27, 0.78],
        [10.0, 10.01],
        [3.0],
        [0.0, 0.5, 0.5, 1.25, 2.0],  # two tokens in one step
    ]
    for times in cases:
        metrics = RequestMetrics(0.0, 0.0, times[0], times[-1], num_output_tokens=len(times))
        itl = [times[i] - times[i - 1] for i in range(1, len(times))]
        expect(call(answer, list(times)), (metrics.tpot, itl), times)
    right("ex8_2")


def ex8_3(
    answer: Callable[[list[tuple[float, float | None]], float, float, float], float],
) -> None:
    """goodput(requests, duration_s, ttft_limit, tpot_limit): requests/s within both limits."""
    mixed = [(100.0, 10.0), (250.0, 10.0), (100.0, 60.0), (900.0, 90.0), (50.0, None)]
    cases = [
        (mixed, 2.0, 200.0, 50.0),
        (mixed, 10.0, 1000.0, 100.0),
        ([(200.0, 50.0), (200.1, 50.0), (200.0, 50.1)], 1.0, 200.0, 50.0),
        ([(80.0, None), (300.0, None)], 4.0, 200.0, 50.0),
        ([(300.0, 10.0), (100.0, 70.0)], 5.0, 200.0, 50.0),
        ([], 3.0, 200.0, 50.0),
    ]
    for requests, duration, ttft_limit, tpot_limit in cases:
        num_good = 0
        for ttft, tpot in requests:
            is_steady = tpot is None or tpot <= tpot_limit
            num_good += ttft <= ttft_limit and is_steady
        found = call(answer, list(requests), duration, ttft_limit, tpot_limit)
        expect(found, num_good / duration, requests, duration, ttft_limit, tpot_limit)
    right("ex8_3")
