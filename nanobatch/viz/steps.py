"""Steps as pictures: what each request computes in each step, and how the budget is used.

    step_timelines   x: step, y: request; waiting, prefill, decode, preempted
    token_budget     the tokens of each step, stacked by request, and the budget
    token_budgets    the same for several runs, to one scale

A step is a scheduler's plan (SchedulerOutput), a record of the simulator (StepRecord), or a
plain dict {request id: tokens}.

Always holds: the tokens drawn are those of the plans. A request that computes several tokens
is drawn dark (a prefill, or a chunk of one); one that computes a single token has its plain
colour (a decode). Source: the timelines of Orca (Yu et al., OSDI
2022, figure 4) and of Sarathi-Serve (Agrawal et al., OSDI 2024).

Taught in notebooks/03_iteration_level_scheduling.ipynb.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nanobatch.plan import SchedulerOutput
from nanobatch.simulation.replica import SimulationResult, StepRecord
from nanobatch.utils.arithmetic import cdiv
from nanobatch.viz.style import IDLE, INK, OKABE_ITO, colour_of

AnyStep = SchedulerOutput | StepRecord | Mapping[str, int]
Steps = Sequence[AnyStep] | SimulationResult

MOST_COUNTS = 40  # with more steps than this, cells are too narrow for a number
MOST_LABELS = 28  # with more requests than this, not every one is labelled


@dataclass(frozen=True)
class Step:
    """What is drawn of one step.

    num_tokens: computed, by request id. preempted: ids.
    padding: ids of finished requests that keep their slot (static batching).
    """

    num_tokens: dict[str, int]
    preempted: frozenset[str] = frozenset()
    padding: frozenset[str] = frozenset()


def as_step(step: AnyStep) -> Step:
    """The part of a plan, a record or a dict that is drawn."""
    if isinstance(step, SchedulerOutput):
        return Step(
            {row.request.request_id: row.num_tokens for row in step.scheduled},
            frozenset(request.request_id for request in step.preempted),
            frozenset(request.request_id for request in step.padding),
        )
    if isinstance(step, StepRecord):
        return Step(dict(step.num_tokens), frozenset(step.preempted))
    return Step(dict(step))


def numbers_of(steps: Sequence[Step]) -> dict[str, int]:
    """A number for each request, in ascending order: the digits at the end of its id, else the
    order in which the requests first appear."""
    ids = list(dict.fromkeys(name for step in steps for name in step.num_tokens))
    digits = [re.search(r"\d+$", name) for name in ids]
    numbers = [int(found[0]) if found else -1 for found in digits]
    is_usable = -1 not in numbers and len(set(numbers)) == len(numbers)
    if not is_usable:
        numbers = list(range(len(ids)))
    return dict(sorted(zip(ids, numbers, strict=True), key=lambda item: item[1]))


def arrival_steps(result: SimulationResult) -> dict[str, int]:
    """The first step of a simulation that each request could have been part of."""
    return {
        name: sum(record.start < metrics.arrival_time for record in result.timeline)
        for name, metrics in result.requests.items()
    }


def states_of(name: str, steps: Sequence[Step], arrival: int) -> list[str]:
    """What a request does in each step: absent, waits, prefills, decodes or pads.

    Args:
        name: the request's id.
        steps: all steps.
        arrival: the first step that the request could have been part of.
    """
    turns = [i for i, step in enumerate(steps) if name in step.num_tokens]
    states = []
    for i, step in enumerate(steps):
        num_tokens = step.num_tokens.get(name, 0)
        if num_tokens > 0:
            states.append("prefills" if num_tokens > 1 else "decodes")
        elif name in step.padding:
            states.append("pads")
        else:
            states.append("waits" if arrival <= i < turns[-1] else "absent")
    return states


def draw_steps(
    ax: Axes, steps: Steps, arrivals: Mapping[str, int] | None = None, title: str = ""
) -> None:
    """Requests over steps on given axes: one line for each request, a column for each step.

    Args:
        ax: where to draw.
        steps: plans, records or dicts, in order; or the result of a simulation with its
            timeline, which also has the arrivals.
        arrivals: by request id, the first step that it could have been part of; default 0.
        title: of the axes.
    """
    if isinstance(steps, SimulationResult):
        arrivals, steps = arrival_steps(steps), steps.timeline
    drawn, arrivals = [as_step(step) for step in steps], arrivals or {}
    numbers = numbers_of(drawn)
    for y, (name, number) in enumerate(numbers.items()):
        _draw_request(ax, y, number, states_of(name, drawn, arrivals.get(name, 0)))
        for x, step in enumerate(drawn):
            if name in step.num_tokens and len(drawn) <= MOST_COUNTS:
                num_tokens = step.num_tokens[name]
                is_on_dark = num_tokens > 1 or colour_of(number) == OKABE_ITO[0]
                ink = {"color": "white" if is_on_dark else INK, "fontsize": 7, "zorder": 4}
                ax.text(x, y, str(num_tokens), ha="center", va="center", **ink)
            if name in step.preempted:
                ax.plot(x, y, marker="X", color=INK, mec="white", ms=8, zorder=5)
    ax.set_xlim(-0.5, max(1, len(drawn)) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(len(numbers) - 0.4, -0.6)
    labels = [f"r{number}" for number in numbers.values()]
    every = cdiv(len(labels), MOST_LABELS)
    ax.set_yticks(range(0, len(labels), every), labels[::every], fontsize=7)
    ax.set_ylabel("request")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _draw_request(ax: Axes, y: int, number: int, states: Sequence[str]) -> None:
    """One request: a bar for each run of steps in one state."""
    left = -0.5  # a column is centred on its step
    for state, run in groupby(states):
        width = len(list(run))
        box = {"left": left, "edgecolor": "white", "linewidth": 0.5}
        if state == "waits":
            ax.barh(y, width, height=0.3, color=IDLE, zorder=1, **box)
        elif state == "pads":
            ax.barh(y, width, height=0.8, color=IDLE, hatch="////", zorder=1, **box)
        elif state != "absent":
            ax.barh(y, width, height=0.8, color=colour_of(number), zorder=2, **box)
            if state == "prefills":
                ax.barh(y, width, height=0.8, color=INK, alpha=0.62, zorder=3, **box)
        left += width


def step_timelines(
    runs: Mapping[str, Steps],
    arrivals: Mapping[str, int] | None = None,
    side_by_side: bool = False,
) -> Figure:
    """Requests over steps, one picture below the other, with the same scale of steps.

    Args:
        runs: by title, the steps of each picture; see draw_steps.
        arrivals: by request id, the first step that it could have been part of.
        side_by_side: draw them next to each other instead.
    """
    drawn = {
        title: [
            as_step(s) for s in (run.timeline if isinstance(run, SimulationResult) else run)
        ]
        for title, run in runs.items()
    }
    rows = [max(1, len(numbers_of(steps))) for steps in drawn.values()]
    num_down, num_across = (1, len(runs)) if side_by_side else (len(runs), 1)
    num_rows = max(rows) if side_by_side else sum(rows)
    height = min(0.2 * num_rows, 3.8) + 0.32 * num_down + 0.75
    figure = Figure(figsize=(9, height), layout="constrained")
    ratios = None if side_by_side else rows
    axes = figure.subplots(
        num_down, num_across, sharex=True, squeeze=False, height_ratios=ratios
    ).flat
    for ax, (title, run) in zip(axes, runs.items(), strict=True):
        draw_steps(ax, run, arrivals, title)
    most = max(1, *(len(steps) for steps in drawn.values()))
    axes[-1].set_xlim(-0.5, most - 0.5)
    for ax in axes if side_by_side else axes[-1:]:
        ax.set_xlabel("step")
    every_step = [step for steps in drawn.values() for step in steps]
    figure.legend(
        handles=_key(every_step),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8,
    )
    return figure


def _key(steps: Sequence[Step]) -> list[Patch | Line2D]:
    """The legend; rare marks only if they occur."""
    colour = OKABE_ITO[0]
    handles = [
        Patch(facecolor=IDLE, label="waits"),
        Patch(facecolor="#174256", label="several tokens (prefill)"),
        Patch(facecolor=colour, label="one token (decode)"),
    ]
    if any(step.padding for step in steps):
        label = "finished, keeps its slot"
        handles.append(Patch(facecolor=IDLE, edgecolor="white", hatch="////", label=label))
    if any(step.preempted for step in steps):
        mark = {"marker": "X", "color": INK, "markeredgecolor": "white", "markersize": 8}
        handles.append(Line2D([], [], linestyle="none", label="preempted", **mark))
    return handles


def draw_budget(ax: Axes, steps: Steps, budget: int, title: str = "") -> None:
    """The token budget on given axes; see token_budget."""
    records = steps.timeline if isinstance(steps, SimulationResult) else steps
    drawn = [as_step(step) for step in records]
    xs = range(len(drawn))
    width = 0.86 if len(drawn) <= 100 else 1.0
    ax.bar(xs, budget, width, color=IDLE, zorder=1)
    tops = [0] * len(drawn)
    for name, number in numbers_of(drawn).items():
        heights = [step.num_tokens.get(name, 0) for step in drawn]
        box = {"color": colour_of(number), "edgecolor": "white", "linewidth": 0.5, "zorder": 2}
        ax.bar(xs, heights, width, bottom=tops, **box)
        for x, height in enumerate(heights):
            is_tall = height >= 0.07 * budget and len(drawn) <= MOST_COUNTS
            if is_tall:
                is_on_dark = colour_of(number) == OKABE_ITO[0]
                middle = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 3}
                middle["color"] = "white" if is_on_dark else INK
                ax.text(x, tops[x] + height / 2, f"r{number}", **middle)
            tops[x] += height
    ax.axhline(budget, color=INK, linewidth=1, linestyle="--", zorder=4)
    ax.annotate(
        f"budget {budget}", (1, budget), xycoords=("axes fraction", "data"), fontsize=8,
        xytext=(-2, 3), textcoords="offset points", ha="right",
    )  # fmt: skip
    ax.set_xlim(-0.6, len(drawn) - 0.4)
    ax.set_ylim(0, 1.12 * budget)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("step")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def token_budget(steps: Steps, budget: int, title: str = "") -> Figure:
    """How the token budget is used: a bar for each step, stacked by request.

    Args:
        steps: plans, records or dicts, in order; or the result of a simulation.
        budget: tokens that a step may compute (max_num_batched_tokens).
        title: of the figure.
    """
    return token_budgets({title: steps}, [budget])


def token_budgets(runs: Mapping[str, Steps], budgets: Sequence[int]) -> Figure:
    """The same for several runs side by side, to one scale of tokens.

    Args:
        runs: by title, the steps of each picture; see token_budget.
        budgets: one for each run.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for ax, (title, steps), budget in zip(axes, runs.items(), budgets, strict=True):
        draw_budget(ax, steps, budget, title)
        ax.set_ylim(0, 1.12 * max(budgets))
    axes[0].set_ylabel("tokens in the step")
    return figure


def _example_timelines() -> Figure:
    fcfs = [{"r0": 6}, {"r0": 1, "r1": 5}, {"r0": 1, "r1": 1}, {"r1": 1, "r2": 4}, {"r2": 1}]
    preempted = [
        StepRecord(0.0, 1.0, {"r0": 6, "r1": 2}, []),
        StepRecord(1.0, 1.0, {"r0": 1, "r1": 3}, []),
        StepRecord(2.0, 1.0, {"r0": 1}, ["r1"]),
        StepRecord(3.0, 1.0, {"r1": 6}, []),
    ]
    runs = {"two slots": fcfs, "a pool too small": preempted}
    return step_timelines(runs, {"r1": 0, "r2": 1})


def _example_budget() -> Figure:
    steps = [{"r0": 6, "r1": 2}, {"r0": 1, "r1": 7}, {"r0": 1, "r1": 3, "r2": 4}, {"r2": 1}]
    return token_budget(steps, 8, "a long prompt in chunks")


def _example_budgets() -> Figure:
    whole = [{"r0": 1}, {"r0": 1, "r1": 9}, {"r0": 1, "r1": 1}]
    chunked = [{"r0": 1}, {"r0": 1, "r1": 3}, {"r0": 1, "r1": 3}, {"r0": 1, "r1": 3}]
    return token_budgets({"whole": whole, "chunked": chunked}, [10, 4])


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "step_timelines": _example_timelines,
    "token_budget": _example_budget,
    "token_budgets": _example_budgets,
}
