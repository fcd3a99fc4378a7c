"""Latencies as cumulative distributions; goodput against the request rate.

    latency_cdf             one quantity: a curve for each system, P50 and P99 marked
    request_latencies       TTFT, TPOT and end-to-end latency side by side
    goodput_against_rate    requests/s offered, served, and served within the limits

A point (x, y) of a curve: a share y of the values is at most x. Curves go through the linearly
interpolated percentiles of metrics.percentile, so the marks lie on them.

Always holds: a system has the same colour, line and marks in each panel.

Taught in notebooks/08_measuring_honestly.ipynb.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from nanobatch.metrics import percentile
from nanobatch.request import RequestMetrics
from nanobatch.viz.style import IDLE, INK, colour_of

LINES = ("-", "--", "-.", ":")
LOG_FROM = 10  # logarithmic axis if the largest value is this many times the smallest


def draw_cdf(
    ax: Axes,
    systems: Mapping[str, Sequence[float]],
    xlabel: str,
    *,
    limit: float | None = None,
    of: str = "requests",
) -> None:
    """Cumulative distributions on the axes; a circle marks P50, a square P99.

    Args:
        ax: where to draw.
        systems: values in ms by name, at least one each.
        xlabel: of the axis, without the unit.
        limit: in ms, drawn as a line.
        of: what the values belong to (for the label of the y axis).
    """
    for i, (name, values) in enumerate(systems.items()):
        ordered = sorted(values)
        last = max(1, len(ordered) - 1)
        xs = ordered if len(ordered) > 1 else ordered * 2
        p50, p99 = percentile(ordered, 50), percentile(ordered, 99)
        look = {"color": colour_of(i), "linestyle": LINES[i % len(LINES)], "linewidth": 1.8}
        label = f"{name}: P50 {_ms(p50)}, P99 {_ms(p99)}"
        ax.plot(xs, [k / last for k in range(len(xs))], label=label, **look)
        marks = {"color": colour_of(i), "markeredgecolor": "white", "linestyle": "none"}
        ax.plot([p50], [0.50], marker="o", markersize=8, **marks)
        ax.plot([p99], [0.99], marker="s", markersize=7, **marks)
    for share in (0.50, 0.99):
        ax.axhline(share, color=IDLE, linewidth=0.8, zorder=0)
    if limit is not None:
        ax.axvline(limit, color=INK, linewidth=1, linestyle=":", label=f"limit {_ms(limit)}")
    lows, highs = zip(*((min(v), max(v)) for v in systems.values()), strict=True)
    if min(lows) > 0 and max(highs) >= LOG_FROM * min(lows):
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    ax.set_xlabel(f"{xlabel} (ms)")
    ax.set_ylabel(f"share of {of}")
    ax.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "0.25", "P50", "0.75", "P99"])
    ax.set_ylim(-0.02, 1.04)
    ax.spines[["top", "right"]].set_visible(False)


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def latency_cdf(
    systems: Mapping[str, Sequence[float]],
    xlabel: str,
    *,
    limit: float | None = None,
    of: str = "requests",
) -> Figure:
    """The cumulative distribution of one quantity for several systems; see draw_cdf."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ax = figure.subplots()
    draw_cdf(ax, systems, xlabel, limit=limit, of=of)
    figure.legend(loc="outside upper left", frameon=False, fontsize=9, ncols=2)
    return figure


def request_latencies(
    systems: Mapping[str, Sequence[RequestMetrics]], limits: Mapping[str, float] | None = None
) -> Figure:
    """TTFT, TPOT and end-to-end latency of the same requests, a panel each.

    Args:
        systems: metrics of finished requests by name. Requests with one output token have no
            TPOT.
        limits: in ms on "ttft", "tpot", "e2el", as in metrics.summarize; drawn as lines.
    """
    limits = {} if limits is None else limits
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    panels = (
        ("ttft", "TTFT", lambda m: m.ttft),
        ("tpot", "TPOT", lambda m: m.tpot),
        ("e2el", "end-to-end latency", lambda m: m.latency),
    )
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (key, xlabel, span) in zip(axes, panels, strict=True):
        spans = {name: list(map(span, metrics)) for name, metrics in systems.items()}
        ms = {name: [1e3 * s for s in v if s is not None] for name, v in spans.items()}
        draw_cdf(ax, {n: v for n, v in ms.items() if v}, xlabel, limit=limits.get(key))
        ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7.5)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure


def goodput_against_rate(systems: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """For each rate offered: the rate served, and the rate served within the limits.

    Args:
        systems: figures by "NAME @ RATE", in ascending order of rate, with request_goodput;
            see metrics.summarize.
        title: of the figure.
    """
    curves: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for key, figures in systems.items():
        name, _, rate = key.rpartition(" @ ")
        curves.setdefault(name, []).append((float(rate), figures))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    most = max(rate for points in curves.values() for rate, _ in points)
    ax.plot([0, most], [0, most], color=IDLE, linewidth=4, label="served = offered", zorder=0)
    for i, (name, points) in enumerate(curves.items()):
        rates = [rate for rate, _ in points]
        look = {"color": colour_of(i), "marker": "os^Dv"[i % 5], "markersize": 6}
        served = [p["request_throughput"] for _, p in points]
        good = [p["request_goodput"] for _, p in points]
        ax.plot(rates, served, linestyle="--", label=f"{name}: served", alpha=0.7, **look)
        ax.plot(rates, good, linestyle="-", label=f"{name}: goodput", linewidth=2.2, **look)
    ax.set_xlabel("requests per second offered")
    ax.set_ylabel("requests per second")
    ax.set_ylim(bottom=-0.03 * most)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="upper left", frameon=False, fontsize=8)
    ax.set_title(title, loc="left", fontsize=10)
    return figure


# ------------------------------------------------------------------------------ examples


def _example_metrics(slowness: float) -> list[RequestMetrics]:
    """Made-up requests: TTFT skewed, TPOT narrow, outputs of 1 to 60 tokens."""
    rng = random.Random(0)
    metrics = []
    for _ in range(200):
        ttft, tpot = slowness * rng.lognormvariate(-3, 1), rng.uniform(0.010, 0.014)
        num_output = rng.randint(1, 60)
        finish = ttft + tpot * (num_output - 1)
        metrics.append(RequestMetrics(0.0, 0.0, ttft, finish, 32, num_output_tokens=num_output))
    return metrics


def _example_systems() -> dict[str, list[RequestMetrics]]:
    return {"slow": _example_metrics(8.0), "fast": _example_metrics(1.0)}


def _latency_cdf_example() -> Figure:
    systems = _example_systems()
    ms = {name: [1e3 * m.ttft for m in metrics] for name, metrics in systems.items()}
    return latency_cdf(ms, "TTFT", limit=200.0)


def _goodput_example() -> Figure:
    served = {1: (1.0, 1.0), 2: (2.0, 1.9), 4: (3.6, 3.1), 8: (4.4, 1.2), 12: (4.5, 0.2)}
    systems = {
        f"engine @ {rate}": {"request_throughput": all_of_them, "request_goodput": good}
        for rate, (all_of_them, good) in served.items()
    }
    return goodput_against_rate(systems, "served, and served within the limits")


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "latency_cdf": _latency_cdf_example,
    "request_latencies": lambda: request_latencies(_example_systems(), {"ttft": 200.0}),
    "goodput_against_rate": _goodput_example,
}
