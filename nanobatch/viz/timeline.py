"""Timelines: requests as bars over time, in the slots of the batch.

Used in notebooks/02_static_batching.ipynb and for the README's figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanobatch.request import RequestMetrics
from nanobatch.viz.style import IDLE, INK, colour_of


def assign_slots(metrics: Sequence[RequestMetrics], num_slots: int) -> list[int]:
    """A slot to draw each request in: the lowest that is free when it starts."""
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
    """Requests as bars over time, one line for each slot of the batch; grey where it is idle.

    Args:
        ax: where to draw.
        metrics: of finished requests, in order of their numbers; seconds from 0.
        num_slots: slots of the batch.
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


def _example() -> Figure:
    """Twelve requests on four slots, half of them long, served both ways."""
    lengths = [6, 2, 2, 5, 1, 4, 2, 6, 1, 3, 2, 5]
    static, free_at = [], 0.0
    for first in range(0, len(lengths), 4):
        batch = lengths[first : first + 4]
        static += [RequestMetrics(0.0, free_at, free_at + 0.5, free_at + n) for n in batch]
        free_at += max(batch)
    continuous, slots = [], [0.0] * 4
    for n in lengths:
        slot = min(range(4), key=slots.__getitem__)
        start = slots[slot]
        continuous.append(RequestMetrics(0.0, start, start + 0.5, start + n))
        slots[slot] = start + n
    return static_against_continuous(static, continuous, 4)


EXAMPLES = {"static_against_continuous": _example}
