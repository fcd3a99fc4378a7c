"""Figures on why decoding is slow: token times, the roofline, steps of a large model.

    token_times    time of each token, without and with a KV cache
    roofline       measured products below what bandwidth and arithmetic allow
    step_times     time of a decode step against the batch size, and its throughput

Always holds: the caller measured or computed everything that is drawn; the roof is that of
nanobatch.simulation.roofline.Work.seconds.

Taught in notebooks/01_why_decoding_is_slow.ipynb. Source: the roofline model (Williams,
Waterman and Patterson, CACM 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from nanobatch.simulation.roofline import Work
from nanobatch.viz.style import INK, OKABE_ITO

MEMORY, ARITHMETIC = OKABE_ITO[4], OKABE_ITO[1]  # one colour for each limit
MARKERS = "os^Dv"


def token_times(naive: Sequence[float], cached: Sequence[float], prompt_len: int) -> Figure:
    """Milliseconds of each output token against the length of the sequence before it.

    Args:
        naive, cached: seconds of each output token, in order.
        prompt_len: tokens of the prompt.
    """
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ax = figure.subplots()
    for i, (name, seconds) in enumerate((("no cache", naive), ("KV cache", cached))):
        lengths = range(prompt_len, prompt_len + len(seconds))
        ms = [1e3 * s for s in seconds]
        style = {"color": OKABE_ITO[5 * i], "marker": MARKERS[i], "markersize": 3}
        ax.plot(lengths, ms, linestyle="none", label=name, **style)
    # The axis ignores outliers: one delayed token must not flatten all others.
    ordinary = sorted([*naive, *cached])[int(0.98 * (len(naive) + len(cached))) - 1]
    ax.set_ylim(0, 1.4e3 * ordinary)
    ax.set_xlabel("tokens in the sequence before the step")
    ax.set_ylabel("time for the next token (ms)")
    ax.legend(frameon=False, loc="upper left")
    _plain(ax)
    return figure


def roofline(
    bandwidth: float, flop_rate: float, measured: Mapping[int, tuple[Work, float]], title: str
) -> Figure:
    """Measured products below the roof of their hardware, and how long each took.

    Args:
        bandwidth: bytes/s. flop_rate: FLOP/s.
        measured: by batch size, the work of a product and its seconds.
        title: of the figure.
    """
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_roof(left, bandwidth, flop_rate, [w.flops / w.bytes for w, _ in measured.values()])
    for i, (batch, (work, seconds)) in enumerate(measured.items()):
        x, y = work.flops / work.bytes, work.flops / seconds
        left.plot(x, y, "o", color=OKABE_ITO[0], markersize=6, zorder=3)
        # Right and below the point, away from the roof.
        left.annotate(str(batch), (x, y), (4, -11), textcoords="offset points", fontsize=8)
        label = "measured" if i == 0 else None
        right.plot(batch, 1e3 * seconds, "o", color=OKABE_ITO[0], label=label, zorder=3)
    batches = list(measured)
    roof = [1e3 * work.seconds(bandwidth, flop_rate) for work, _ in measured.values()]
    right.plot(batches, roof, color=INK, label="the least time (roofline)")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(batches[::2], [str(b) for b in batches[::2]])
    _plain_log(right)
    right.set_xlabel("batch size (rows of the input)")
    right.set_ylabel("time of one product (ms)")
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for ax in (left, right):
        _plain(ax)
    figure.suptitle(title, fontsize=10)
    return figure


def step_times(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Figure:
    """Time of a decode step, and tokens per second, against the batch size.

    Args:
        curves: by name, (batch size, seconds of a step), in ascending order of batch size.
        title: of the figure.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, points) in enumerate(curves.items()):
        batches = [batch for batch, _ in points]
        style = {"color": OKABE_ITO[i % len(OKABE_ITO)], "marker": MARKERS[i % 5]}
        left.plot(batches, [1e3 * s for _, s in points], label=name, markersize=4, **style)
        right.plot(batches, [b / s for b, s in points], markersize=4, **style)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.set_xlabel("batch size (requests that decode)")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        _plain(ax)
    left.set_ylabel("time of one step (ms)")
    right.set_ylabel("output tokens per second")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_roof(
    ax: Axes, bandwidth: float, flop_rate: float, intensities: Sequence[float]
) -> None:
    """The roof: its slope and its flat part, a little wider than the intensities."""
    knee = flop_rate / bandwidth
    low, high = min([*intensities, knee]) / 2, max([*intensities, knee]) * 2.5
    ax.plot([low, knee], [low * bandwidth, flop_rate], color=MEMORY, label="memory limits")
    ax.plot([knee, high], [flop_rate, flop_rate], color=ARITHMETIC, label="arithmetic limits")
    ax.axvline(knee, color=INK, linestyle=":", linewidth=1)
    floor = low * bandwidth / 4
    ax.text(
        knee * 1.06,
        floor * 1.25,
        f"knee: {knee:.1f}\noperations\nper byte",
        fontsize=8,
        va="bottom",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(floor, flop_rate * 3)
    ax.set_xlabel("arithmetic intensity (operations per byte)")
    ax.set_ylabel("FLOP/s")
    ax.legend(frameon=False, fontsize=8, loc="upper left")


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)


def _plain_log(ax: Axes) -> None:
    """Plain numbers (1, 2, 5, 10) on a logarithmic y axis."""
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _example_products() -> Figure:
    bandwidth, flop_rate, size = 2.0e12, 312e12, 4096
    measured = {}
    for batch in (1, 4, 16, 64, 256, 1024):
        work = Work(2 * (size * size + 2 * batch * size), 2 * batch * size * size)
        # 80% of the peak of each is ordinary.
        measured[batch] = work, work.bytes / (0.8 * bandwidth) + work.flops / (0.8 * flop_rate)
    return roofline(bandwidth, flop_rate, measured, "made-up times, the data sheet of an A100")


def _example_steps() -> Figure:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    curves = {
        f"contexts of {context} tokens": [
            (b, 7e-3 + 4e-5 * b + 2.6e-7 * b * context) for b in sizes
        ]
        for context in (1, 1000)
    }
    return step_times(curves, "made-up times of a 7B model")


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "token_times": lambda: token_times(
        [1e-3 + 2e-5 * n for n in range(100)], [1e-3 + 2e-7 * n for n in range(100)], 16
    ),
    "roofline": _example_products,
    "step_times": _example_steps,
}
