"""Every figure, drawn from live state: what was measured, not what should have been.

One visual grammar: a request has one colour everywhere; grey is a slot that does nothing; the
dark start of a bar is the time to its first token. The palette is Okabe and Ito's, which the
colour-blind can tell apart; bars carry their request's number too.

Always holds: functions draw on the axes they are given and change no other state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from nanobatch.request import RequestMetrics

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
IDLE = "#DDDDDD"
INK = "#222222"


def colour_of(request: int) -> str:
    """The colour of a request, by its number."""
    return OKABE_ITO[request % len(OKABE_ITO)]


def assign_slots(metrics: Sequence[RequestMetrics], num_slots: int) -> list[int]:
    """Which slot each request can be drawn in: the lowest that is free when it starts."""
    order = sorted(range(len(metrics)), key=lambda i: (metrics[i].first_scheduled_time, i))
    free_at = [float("-inf")] * num_slots
    slots = [0] * len(metrics)
    for i in order:
        start = metrics[i].first_scheduled_time
        free = [s for s in range(num_slots) if free_at[s] <= start]
        slots[i] = free[0] if free else min(range(num_slots), key=free_at.__getitem__)
        free_at[slots[i]] = metrics[i].finish_time
    return slots


def slot_timeline(
    ax: Axes, metrics: Sequence[RequestMetrics], num_slots: int, until: float, title: str
) -> None:
    """Requests as bars over time, a row for each slot of the batch; grey where it is idle.

    Args:
        ax: where to draw.
        metrics: of finished requests, in order of their numbers; seconds from 0.
        num_slots: rows of the batch.
        until: the end of the time axis in seconds.
        title: of the axes.
    """
    end = max(m.finish_time for m in metrics)
    ax.barh(range(num_slots), end, left=0, height=0.86, color=IDLE, zorder=1)
    for i, (m, slot) in enumerate(zip(metrics, assign_slots(metrics, num_slots), strict=True)):
        start, first, finish = m.first_scheduled_time, m.first_token_time, m.finish_time
        bar = {"height": 0.86, "edgecolor": "white", "linewidth": 0.6, "zorder": 2}
        ax.barh(slot, finish - start, left=start, color=colour_of(i), **bar)
        ax.barh(slot, first - start, left=start, color=INK, alpha=0.45, height=0.86, zorder=3)
        is_wide = finish - first > 0.025 * until
        if is_wide:
            middle = (first + finish) / 2
            ax.text(middle, slot, str(i), ha="center", va="center", fontsize=7, zorder=4)
    ax.set_xlim(0, until)
    ax.set_ylim(num_slots - 0.5, -0.5)
    ax.set_yticks(range(num_slots))
    ax.set_ylabel("slot of the batch")
    ax.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0, labelsize=7)


def static_against_continuous(
    static: Sequence[RequestMetrics], continuous: Sequence[RequestMetrics], num_slots: int
) -> Figure:
    """Two timelines of the same requests on one time axis."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    until = 1.02 * max(m.finish_time for m in (*static, *continuous))
    for ax, metrics, name in zip(
        axes, (static, continuous), ("static batching", "continuous batching"), strict=True
    ):
        busy = sum(m.finish_time - m.first_scheduled_time for m in metrics)
        end = max(m.finish_time for m in metrics)
        title = (
            f"{name}: {len(metrics)} requests in {end:.2f} s, slots busy "
            f"{busy / (end * num_slots):.0%} of the time"
        )
        slot_timeline(ax, metrics, num_slots, until, title)
    axes[-1].set_xlabel("time (s); dark: until the first token; grey: an idle slot")
    return figure


def ladder(systems: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """bench.py's table as bars: requests/s, and P50 and P99 latency, a row for each system."""
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
    """Requests/s that were served against P50 and P99 latency, a curve for each system.

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
                # The later the smaller: where curves meet, each still shows.
                markersize=max(3, 10 - 2 * i),
                linewidth=max(1, 4 - i),
                label=name,
            )
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_formatter(ScalarFormatter())
        ax.tick_params(axis="y", which="minor", labelsize=6)
        ax.set_xlabel("requests per second served")
        ax.set_ylabel(f"{label} latency (s)")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure
