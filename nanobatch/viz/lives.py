"""Figures of each request over the engine's steps: one lane for each request.

    lives           the lanes of one watched engine, over steps or over time
    lives_compared  the lanes of several engines, one above the other on one axis

A lane has a cell for each step (colours as in all figures, see style.py, and three more marks):

    grey      waiting                     X        preempted: lost its blocks
    dark      prefill, with its tokens    hatched  tokens found in the prefix cache
    coloured  decode: one token           dotted   waiting, swapped out to the host

A number in a cell counts tokens. The first cell of a run of decodes names the request: "r2".

What they draw is what a Watch (watch.py) has recorded.

Used in notebooks/07_the_engine.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nanobatch.config import EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.plan import SchedulerOutput, StepResult
from nanobatch.request import SamplingParams
from nanobatch.viz.style import IDLE, INK, colour_of
from nanobatch.viz.watch import Cell, Step, Watch

HEIGHT = 0.8  # of a lane, whose place is 1


def lives(watch: Watch, title: str, by: str = "step") -> Figure:
    """The lanes of one watched engine.

    Args:
        watch: at least one step.
        title: of the figure.
        by: "step": all cells are equally wide; "time": as wide as the step took long.

    Raises:
        ValueError: by is neither, or the watch has recorded no step.
    """
    return lives_compared({title: watch}, by)


def lives_compared(watches: Mapping[str, Watch], by: str = "time") -> Figure:
    """The lanes of several watched engines, each under its title, on one axis.

    Raises:
        ValueError: as in lives.
    """
    if by not in ("step", "time"):
        raise ValueError(f"by is {by!r}; it must be 'step' or 'time'")
    if not watches or not all(watch.steps for watch in watches.values()):
        raise ValueError("a watch has recorded no step; run the engine before drawing")
    num_lanes = sum(len(watch.requests) for watch in watches.values())
    height = 0.32 * num_lanes + 0.5 * len(watches) + 0.9
    figure = Figure(figsize=(9, height), layout="constrained")
    ratios = [len(watch.requests) + 0.3 for watch in watches.values()]
    rows = figure.subplots(len(watches), 1, sharex=True, squeeze=False, height_ratios=ratios)
    longest = max(_edges(watch, by)[-1][1] for watch in watches.values())
    for ax, (title, watch) in zip(rows[:, 0], watches.items(), strict=True):
        ax.set_xlim(0, 1.07 * longest)  # room for the last finish reason
        _lanes(ax, watch, by, title)
    unit = "step of the engine" if by == "step" else "time (ms)"
    rows[-1, 0].set_xlabel(unit)
    rows[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = _legend([step for watch in watches.values() for step in watch.steps])
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7,
        frameon=False, columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip
    return figure


def _edges(watch: Watch, by: str) -> list[tuple[float, float]]:
    """Where each step begins and ends on the axis: in steps, or milliseconds from the first."""
    if by == "step":
        return [(i, i + 1) for i in range(len(watch.steps))]
    zero = watch.steps[0].start
    return [(1e3 * (step.start - zero), 1e3 * (step.end - zero)) for step in watch.steps]


def _lanes(ax: Axes, watch: Watch, by: str, title: str) -> None:
    requests, edges = watch.requests, _edges(watch, by)
    for number, request in enumerate(requests):
        last_end, last_kind = 0.0, ""
        for step, (left, right) in zip(watch.steps, edges, strict=True):
            cell = step.cells.get(request)
            if cell is None:
                continue
            _draw_cell(ax, cell, number, left, right, is_first=cell.kind != last_kind)
            if request in step.preempted:
                middle = (left + right) / 2
                ax.plot(middle, number, "X", color=INK, markersize=6, zorder=6)
            last_end, last_kind = right, cell.kind
        if request.is_finished:
            ends = {"color": INK, "linewidth": 2.2, "zorder": 6, "solid_capstyle": "butt"}
            ax.plot([last_end] * 2, [number - 0.46, number + 0.46], **ends)
            gap = 0.005 * ax.get_xlim()[1]
            ax.text(last_end + gap, number, request.finish_reason, va="center", fontsize=7)
    ax.set_ylim(len(requests) - 0.4, -0.6)
    ax.set_yticks(range(len(requests)))
    ax.set_ylabel("request", fontsize=9)
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _draw_cell(
    ax: Axes, cell: Cell, number: int, left: float, right: float, is_first: bool
) -> None:
    """One step of one request. is_first: of a run of one kind; a decode then has a number."""
    width, colour = right - left, colour_of(number)
    bar = {"left": left, "height": HEIGHT, "edgecolor": "white", "linewidth": 0.4}
    if cell.kind in ("waiting", "swapped"):
        hatch = "...." if cell.kind == "swapped" else None
        edge = {"edgecolor": "#999999"} if hatch else {}
        ax.barh(number, width, color=IDLE, hatch=hatch, zorder=1, **{**bar, **edge})
        return
    ax.barh(number, width, color=colour, zorder=2, **bar)
    if cell.kind == "prefill":
        ax.barh(number, width, color=INK, alpha=0.65, zorder=3, **bar)
    num_found, middle = cell.num_cached or cell.num_back, number
    if num_found:
        _draw_found(ax, cell, number, left, width)
        middle = number + HEIGHT / 4
    if cell.kind == "prefill":
        _write(ax, str(cell.num_tokens), left, width, middle, "white")
    elif is_first:
        _write(ax, f"r{number}", left, width, middle, _ink_on(colour))


def _ink_on(colour: str) -> str:
    """White or dark, whichever is legible on the colour."""
    red, green, blue = to_rgb(colour)
    is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
    return "white" if is_dark else INK


def _draw_found(ax: Axes, cell: Cell, number: int, left: float, width: float) -> None:
    """The upper half of a cell: tokens that need no computation."""
    hatch = "/////" if cell.num_cached else "...."
    top = number - HEIGHT / 4
    ax.barh(
        top, width, left=left, height=HEIGHT / 2, facecolor="white", hatch=hatch,
        edgecolor=colour_of(number), linewidth=0.8, zorder=4,
    )  # fmt: skip
    _write(ax, str(cell.num_cached or cell.num_back), left, width, top, INK, is_boxed=True)


def _write(
    ax: Axes,
    text: str,
    left: float,
    width: float,
    y: float,
    colour: str,
    is_boxed: bool = False,
) -> None:
    """Write a text into a cell if it fits."""
    points_per_unit = 8.2 * 72 / ax.get_xlim()[1]  # the axes are about 8.2 inch wide
    size = 6.5 if is_boxed else 7
    if len(text) * 0.62 * size > width * points_per_unit:
        return
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if is_boxed else None
    ax.text(
        left + width / 2, y, text, ha="center", va="center_baseline", fontsize=size,
        color=colour, bbox=box, zorder=7,
    )  # fmt: skip


def _legend(steps: list[Step]) -> list[Patch | Line2D]:
    """An entry for each mark that occurs in these steps."""
    cells = [cell for step in steps for cell in step.cells.values()]
    kinds = {cell.kind for cell in cells}
    colour = colour_of(0)
    entries = [
        ("waiting" in kinds, Patch(facecolor=IDLE, label="waits")),
        (
            any(cell.num_cached for cell in cells),
            Patch(facecolor="white", edgecolor=colour, hatch="/////", label="cached tokens"),
        ),
        (
            "prefill" in kinds,
            Patch(facecolor=INK, alpha=0.75, label="prefill, with its tokens"),
        ),
        ("decode" in kinds, Patch(facecolor=colour, label="decode: one token")),
        (
            "swapped" in kinds,
            Patch(facecolor=IDLE, edgecolor="#999999", hatch="....", label="on the host"),
        ),
        (
            any(step.preempted for step in steps),
            Line2D([], [], color=INK, marker="X", linestyle="", label="preempted"),
        ),
        (
            True,
            Line2D([], [], color=INK, marker="|", markersize=10, markeredgewidth=2,
                   linestyle="", label="ended"),
        ),
    ]  # fmt: skip
    return [handle for is_there, handle in entries if is_there]


# ---------------------------------------------------------------------------------- examples


class _StepClock:
    """A made-up time: a step takes 1 ms, and 0.1 ms more for each token."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


class _ExampleRunner:
    """No model: the sampled token is the number of tokens that the request has."""

    def __init__(self, clock: _StepClock):
        self.clock = clock

    def run(self, plan: SchedulerOutput) -> StepResult:
        self.clock.seconds += 1e-3 + 1e-4 * plan.num_tokens
        rows = [row for row in plan.scheduled if row.samples]
        return StepResult({row.request.request_id: [row.request.num_tokens] for row in rows})


def _watched(num_outputs: int, prompt_lens: list[int], **knobs: object) -> Watch:
    config = EngineConfig(block_size=4, max_num_seqs=4, **knobs)
    clock = _StepClock()
    engine = LLMEngine(config, _ExampleRunner(clock), clock=clock)
    watch = Watch(engine)
    for length in prompt_lens:
        params = SamplingParams(temperature=0, max_tokens=num_outputs)
        engine.add_request(list(range(length)), params)
        engine.step()
    while engine.has_unfinished():
        engine.step()
    return watch


def _example_lives() -> Figure:
    watch = _watched(12, [9, 14, 6], num_blocks=12, max_num_batched_tokens=8)
    return lives(watch, "three requests, a budget of 8 tokens, a pool of 12 blocks")


def _example_compared() -> Figure:
    knobs = {"num_blocks": 64, "enable_prefix_caching": False}
    return lives_compared(
        {
            "whole prompts": _watched(14, [4, 5, 90], max_num_batched_tokens=128, **knobs),
            "chunks: a budget of 16": _watched(
                14, [4, 5, 90], max_num_batched_tokens=16, **knobs
            ),
        }
    )


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "lives": _example_lives,
    "lives_compared": _example_compared,
}
