"""Padded batches: what each entry of the grid is for, and how many are wasted.

    padded_batch   a batch as a grid: rows are requests, columns are token positions
    waste_bars     several batches: which share of their entries is useful

Always holds: useful entries are coloured, wasted ones are grey (with a mark or a hatch, since
there are two kinds).

Taught in notebooks/02_static_batching.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanobatch.viz.style import IDLE, INK, OKABE_ITO, colour_of

KINDS = ("prompt", "output", "pad", "discarded")  # what an entry of the grid can be for
LABELS = {
    "prompt": "prompt",
    "output": "output",
    "pad": "pad",
    "discarded": "computed, then discarded",
}
PALE = 0.35  # opacity of a prompt, in its request's colour


def padded_batch(
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    texts: Sequence[Sequence[str]] | None = None,
    title: str = "",
) -> Figure:
    """A static batch as a grid: pads, prompts, outputs, and tokens that are discarded.

    Args:
        prompt_lens, output_lens: tokens of each request, in order of the rows.
        texts: for each row one character for each token of its prompt and output, written on
            it; None: nothing is written.
        title: of the figure.
    """
    kinds = places_of(prompt_lens, output_lens)
    num_rows, num_columns = len(kinds), len(kinds[0])
    figure = Figure(figsize=(9, 0.27 * num_rows + 1.3), layout="constrained")
    ax = figure.subplots()
    colours = [[_colour(row, kind) for kind in line] for row, line in enumerate(kinds)]
    ax.imshow(np.array(colours), aspect="auto", interpolation="nearest")
    ax.vlines(np.arange(0.5, num_columns - 1), -0.5, num_rows - 0.5, "white", linewidth=0.5)
    ax.hlines(np.arange(0.5, num_rows - 1), -0.5, num_columns - 0.5, "white", linewidth=2)
    ax.axvline(max(prompt_lens) - 0.5, color=INK, linewidth=1.5)
    if texts is not None:
        _write(ax, kinds, texts)
    ax.set_yticks(range(num_rows))
    ax.set_ylabel("request")
    ax.set_xlabel("column of the batch (tokens); line: the prompts end, decoding begins")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    handles = [
        Patch(color=_colour(0, kind), label=f"{LABELS[kind]} ({shade})")
        for kind, shade in (("prompt", "pale"), ("output", "full colour"))
    ]
    handles += [
        Patch(facecolor=IDLE, edgecolor=INK, hatch=hatch, label=LABELS[kind], linewidth=0)
        for kind, hatch in (("pad", "..."), ("discarded", "xxx"))
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def places_of(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> list[list[str]]:
    """What each entry of the grid is for: one of KINDS for each column of each row."""
    longest_prompt, longest_output = max(prompt_lens), max(output_lens)
    return [
        ["pad"] * (longest_prompt - num_prompt)
        + ["prompt"] * num_prompt
        + ["output"] * num_output
        + ["discarded"] * (longest_output - num_output)
        for num_prompt, num_output in zip(prompt_lens, output_lens, strict=True)
    ]


def _colour(row: int, kind: str) -> tuple[float, ...]:
    if kind in ("pad", "discarded"):
        return to_rgb(IDLE)
    share = PALE if kind == "prompt" else 1.0
    return tuple(1 - share * (1 - c) for c in to_rgb(colour_of(row)))


def _write(ax: Axes, kinds: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]) -> None:
    """A mark or a character on each entry."""
    marks = {"pad": "·", "discarded": "×"}
    for row, (line, text) in enumerate(zip(kinds, texts, strict=True)):
        own = iter(text)
        for column, kind in enumerate(line):
            mark = marks[kind] if kind in marks else next(own)
            is_dark = sum(_colour(row, kind)) < 1.5
            ax.text(
                column,
                row,
                mark.replace("$", r"\$"),  # a "$" alone would open a formula
                color="white" if is_dark else INK,
                fontsize=8,
                family="monospace",
                ha="center",
                va="center",
            )


def waste_bars(counts: Mapping[str, Mapping[str, int]], title: str = "") -> Figure:
    """What the entries of batches were for, in percent: a bar for each batch or workload.

    Args:
        counts: by name of the bar, the number of entries of each kind (KINDS).
        title: of the figure.
    """
    figure = Figure(figsize=(9, 0.42 * len(counts) + 1.3), layout="constrained")
    ax = figure.subplots()
    style = {
        "prompt": {"color": OKABE_ITO[4]},
        "output": {"color": OKABE_ITO[2]},
        "pad": {"facecolor": IDLE, "hatch": "..."},
        "discarded": {"facecolor": IDLE, "hatch": "xxx"},
    }
    totals = [sum(kinds[k] for k in KINDS) for kinds in counts.values()]
    left = np.zeros(len(counts))
    for kind in KINDS:
        number = np.array([kinds[kind] for kinds in counts.values()])
        share = 100 * number / np.array(totals)
        look = {"edgecolor": "white", "linewidth": 0.8, "height": 0.75} | style[kind]
        if kind in ("pad", "discarded"):
            look["edgecolor"] = "#888888"
        bars = ax.barh(list(counts), share, left=left, label=LABELS[kind], **look)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
        written = [f"{s:.0f}%" if s >= 5 else "" for s in share]
        labels = ax.bar_label(bars, written, label_type="center", fontsize=8, color=INK)
        for label in labels:
            if label.get_text():
                label.set_bbox(box)
        left = left + share
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of all entries of the grids (%)")
    ax.set_title(title, loc="left", fontsize=10)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _example_counts() -> dict[str, dict[str, int]]:
    batches = {
        "all alike": ((8, 8, 8, 8), (12, 12, 12, 12)),
        "a little apart": ((7, 8, 6, 8), (10, 12, 14, 8)),
        "one is long": ((8, 3, 5, 8), (4, 6, 40, 3)),
    }
    counts = {}
    for name, (prompt_lens, output_lens) in batches.items():
        places = [kind for row in places_of(prompt_lens, output_lens) for kind in row]
        counts[name] = {kind: places.count(kind) for kind in KINDS}
    return counts


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "padded_batch": lambda: padded_batch(
        (5, 3, 8),
        (4, 9, 2),
        ["A fox named", "One day a cr", "Long ago, "],
        "3 requests, padded on the left",
    ),
    "waste_bars": lambda: waste_bars(_example_counts(), "What is in three batches"),
}
