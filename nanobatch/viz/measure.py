"""Measurements of bench.py as figures: a table as bars, a sweep of rates as curves."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from nanobatch.viz.style import OKABE_ITO, colour_of


def ladder(systems: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """bench.py's table as bars: requests/s, and P50 and P99 latency of each system."""
    figure = Figure(figsize=(10, 0.55 * len(systems) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = list(systems)
    rows = range(len(names))
    rates = [systems[n]["request_throughput"] for n in names]
    left.bar_label(
        left.barh(rows, rates, color=OKABE_ITO[0]), fmt="%.1f", padding=3, fontsize=8
    )
    left.set_xlabel("requests per second (more is better)")
    left.set_yticks(rows, names)
    left.invert_yaxis()
    for key, offset, colour in (("median", -0.2, OKABE_ITO[4]), ("p99", 0.2, OKABE_ITO[5])):
        seconds = [systems[n][f"{key}_e2el_ms"] / 1e3 for n in names]
        label = {"median": "P50", "p99": "P99"}[key]
        bars = right.barh([r + offset for r in rows], seconds, 0.38, color=colour, label=label)
        right.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    right.set_xlabel("latency in seconds (less is better)")
    right.legend(frameon=False, loc="lower right")
    for ax in (left, right):
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return figure


def throughput_against_latency(
    systems: Mapping[str, Mapping[str, float]], title: str
) -> Figure:
    """Throughput (requests/s served) against P50 and P99 latency, a curve for each system.

    Args:
        systems: figures by "NAME @ RATE", in ascending order of rate; see metrics.summarize.
        title: of the figure.
    """
    curves: dict[str, list[Mapping[str, float]]] = {}
    for name, figures in systems.items():
        curves.setdefault(name.rpartition(" @ ")[0], []).append(figures)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for ax, (key, label) in zip(
        figure.subplots(1, 2, sharex=True), (("median", "P50"), ("p99", "P99")), strict=True
    ):
        for i, (name, points) in enumerate(curves.items()):
            ax.plot(
                [p["request_throughput"] for p in points],
                [p[f"{key}_e2el_ms"] / 1e3 for p in points],
                color=colour_of(i),
                marker="os^Dv"[i % 5],
                # Smaller for later curves, so that each shows where they meet.
                markersize=max(3, 10 - 2 * i),
                linewidth=max(1, 4 - i),
                label=name,
            )
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("requests per second served")
        ax.set_ylabel(f"{label} end-to-end latency (s)")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _example_systems() -> dict[str, dict[str, float]]:
    return {
        name: {
            "request_throughput": rate,
            "median_e2el_ms": 1000 * seconds,
            "p99_e2el_ms": 2500 * seconds,
        }
        for name, rate, seconds in (
            ("static @ 1", 1.0, 4.0),
            ("static @ 4", 3.8, 9.0),
            ("static @ 8", 4.7, 40.0),
            ("continuous @ 1", 1.0, 2.0),
            ("continuous @ 4", 4.0, 2.4),
            ("continuous @ 8", 8.0, 3.2),
        )
    }


EXAMPLES = {
    "ladder": lambda: ladder(_example_systems(), "an example"),
    "throughput_against_latency": lambda: throughput_against_latency(
        _example_systems(), "an example"
    ),
}
