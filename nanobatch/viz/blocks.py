"""Figures of the pool of KV-cache blocks: which are held, free, cached or partly wasted.

    pool              the blocks in a grid, beside the block tables
    pool_steps        one line of blocks for each of several moments
    animate, as_gif   the grid and the tables over many steps
    fragmentation     reserved slots that hold no token, by block size
    prefix_hits       prompt tokens found in the prefix cache, and those computed

A block has the colour and the number of the request that holds it (of several, if it is
shared). The part of a block whose slots hold no token yet is pale. Grey is free; hatched grey
is free but still cached, so that a prefix match can find it.

What they draw are the copies that pool_state.py takes.

Used in notebooks/05_paged_kv_blocks.ipynb.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nanobatch.block_allocator import BlockAllocator
from nanobatch.config import EngineConfig
from nanobatch.request import Request, RequestMetrics, SamplingParams
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv
from nanobatch.viz.pool_state import PoolState, state_of
from nanobatch.viz.style import IDLE, INK, OKABE_ITO, colour_of

COLUMNS = 8  # blocks in a row of the grid
PALE = 0.3  # opacity of slots that hold no token yet


# ---------------------------------------------------------------------- the pool at a moment


def pool(state: PoolState) -> Figure:
    """The pool as a grid of blocks, beside the block tables of the requests."""
    figure, axes = _pool_axes([state])
    _draw_both(axes, state, sorted(state.tables), _longest_table([state]))
    return figure


def pool_steps(states: Sequence[PoolState]) -> Figure:
    """One line of blocks for each state, with its title at the left."""
    figure = Figure(figsize=(9, 0.36 * len(states) + 1.2), layout="constrained")
    ax = figure.subplots()
    for row, state in enumerate(states):
        for block_id in range(state.num_blocks):
            _draw_block(ax, state, block_id, block_id, row, with_id=False)
    widest = max(state.num_blocks for state in states)
    _frame(ax, widest, len(states))
    ax.set_yticks([row + 0.5 for row in range(len(states))], [s.title for s in states])
    ax.set_xticks([x + 0.5 for x in range(widest)], [str(x) for x in range(widest)])
    ax.set_xlabel("block of the pool")
    _legend(figure)
    return figure


def animate(states: Sequence[PoolState], interval_ms: int = 600) -> FuncAnimation:
    """pool() over time, a frame for each state. Keep what it returns until it is shown."""
    figure, axes = _pool_axes(states, width=7.2)  # small, since a GIF stores every frame
    FigureCanvasAgg(figure)
    requests = sorted({i for state in states for i in state.tables})
    longest = _longest_table(states)

    def draw(frame: int) -> None:
        for ax in axes:
            ax.clear()
        _draw_both(axes, states[frame], requests, longest)

    draw(0)
    return FuncAnimation(
        figure, draw, frames=len(states), init_func=lambda: None, interval=interval_ms
    )


def as_gif(animation: FuncAnimation, frames_per_second: float = 2, dpi: int = 70) -> bytes:
    """The animation as the bytes of a GIF file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "blocks.gif"
        animation.save(path, writer=PillowWriter(fps=frames_per_second), dpi=dpi)
        return path.read_bytes()


def _pool_axes(states: Sequence[PoolState], width: float = 9) -> tuple[Figure, Sequence[Axes]]:
    num_rows = cdiv(max(state.num_blocks for state in states), COLUMNS)
    num_requests = len({i for state in states for i in state.tables})
    height = width * 0.06 * max(num_rows, num_requests, 2) + 1.5
    figure = Figure(figsize=(width, height), layout="constrained")
    widths = [COLUMNS, max(4, _longest_table(states)) + 2]
    axes = figure.subplots(1, 2, width_ratios=widths)
    _legend(figure)
    return figure, axes


def _longest_table(states: Sequence[PoolState]) -> int:
    return max((len(table) for state in states for table in state.tables.values()), default=1)


def _draw_both(
    axes: Sequence[Axes], state: PoolState, requests: Sequence[int], longest: int
) -> None:
    pool_ax, tables_ax = axes
    for block_id in range(state.num_blocks):
        _draw_block(pool_ax, state, block_id, block_id % COLUMNS, block_id // COLUMNS)
    _frame(pool_ax, COLUMNS, cdiv(state.num_blocks, COLUMNS))
    pool_ax.set_yticks([])
    pool_ax.set_xticks([])
    pool_ax.set_xlabel("the pool; small: the block's id")
    pool_ax.set_title(state.title, loc="left", fontsize=10)

    for row, i in enumerate(requests):
        table = state.tables.get(i, ())
        for index, block_id in enumerate(table):
            _draw_cell(tables_ax, index, row, [i], state.filled(i, index), str(block_id))
        words = f"{state.num_tokens[i]} tokens" if i in state.tables else "not running"
        tables_ax.text(len(table) + 0.15, row + 0.5, words, va="center", fontsize=8)
    _frame(tables_ax, longest + 2, max(1, len(requests)))
    tables_ax.set_yticks(
        [row + 0.5 for row in range(len(requests))], [f"r{i}" for i in requests]
    )
    tables_ax.set_xticks([x + 0.5 for x in range(longest)], [str(x) for x in range(longest)])
    tables_ax.set_xlabel("place in the block table")
    tables_ax.set_title("block tables (in a cell: the block's id)", loc="left", fontsize=10)


def _draw_block(
    ax: Axes, state: PoolState, block_id: int, x: int, y: int, with_id: bool = True
) -> None:
    """A block of the pool at column x, row y."""
    holders = state.holders(block_id)
    if holders:
        filled = max(state.filled(i, state.tables[i].index(block_id)) for i in holders)
        _draw_cell(ax, x, y, holders, filled, "+".join(map(str, holders)))
    else:
        hatch = "///" if block_id in state.cached_free else None
        ax.add_patch(_rectangle(x, y, 0.92, 0.88, facecolor=IDLE, edgecolor="#777777",
                                hatch=hatch, linewidth=0))  # fmt: skip
    if with_id:
        badge = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        ax.text(x + 0.09, y + 0.12, str(block_id), fontsize=7, va="top", color=INK, bbox=badge)


def _draw_cell(
    ax: Axes, x: float, y: float, requests: Sequence[int], filled: float, text: str
) -> None:
    """A block in the colours of its requests, one band each; the filled part is solid."""
    height = 0.88 / len(requests)
    for band, request in enumerate(requests):
        top, colour = y + band * height, colour_of(request)
        ax.add_patch(_rectangle(x, top, 0.92, height, color=colour, alpha=PALE, linewidth=0))
        ax.add_patch(_rectangle(x, top, 0.92 * filled, height, color=colour, linewidth=0))
    badge = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=INK, bbox=badge)


def _rectangle(x: float, y: float, width: float, height: float, **kwargs) -> Rectangle:
    return Rectangle((x + 0.04, y + 0.06), width, height, **kwargs)


def _frame(ax: Axes, width: float, height: float) -> None:
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=8)


def _legend(figure: Figure) -> None:
    blue = colour_of(0)
    handles = [
        Patch(facecolor=blue, label="holds tokens (number: the request)"),
        Patch(facecolor=blue, alpha=PALE, label="held, not filled yet"),
        Patch(facecolor=IDLE, label="free"),
        Patch(facecolor=IDLE, edgecolor="#777777", hatch="///", linewidth=0,
              label="free, can be found by content"),
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )


# ------------------------------------------------------------------ waste, and what is saved


def empty_share(lengths: Sequence[int], reserved: Sequence[int]) -> float:
    """Share of the reserved slots that hold no token, both counted for each request."""
    return 1 - sum(lengths) / sum(reserved)


def fragmentation(
    lengths: Sequence[int],
    max_len: int,
    block_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
) -> Figure:
    """Share of reserved slots that hold no token, by block size.

    Args:
        lengths: tokens that each request has in the cache, at most max_len.
        max_len: tokens that a contiguous reservation takes for each request.
        block_sizes: in tokens; one bar for each.
    """
    shares = [empty_share(lengths, [max_len] * len(lengths))]
    for size in block_sizes:
        shares.append(empty_share(lengths, [cdiv(n, size) * size for n in lengths]))
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    ax = figure.subplots()
    colours = [OKABE_ITO[5]] + [OKABE_ITO[0]] * len(block_sizes)
    bars = ax.bar(range(len(shares)), [100 * share for share in shares], color=colours)
    ax.bar_label(bars, [f"{share:.1%}" for share in shares], padding=2, fontsize=8)
    ax.set_xticks(range(len(shares)), [f"reserve\n{max_len}", *map(str, block_sizes)])
    ax.set_xlabel("block size (tokens); leftmost: one contiguous reservation of the maximum")
    ax.set_ylabel("reserved slots\nwithout a token (%)")
    ax.set_ylim(0, 109)
    mean = sum(lengths) / len(lengths)
    ax.set_title(
        f"{len(lengths)} requests, {mean:.0f} tokens in the mean", loc="left", fontsize=10
    )
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def prefix_hits(turns: Sequence[Sequence[RequestMetrics]]) -> Figure:
    """Prompt tokens that were found in the prefix cache, and those that were computed.

    Args:
        turns: for each turn, the metrics of all conversations in the same order.
    """
    num_chats = len(turns[0])
    figure = Figure(figsize=(9, 0.24 * num_chats * len(turns) + 1.5), layout="constrained")
    ax = figure.subplots()
    labels = []
    for turn, metrics in enumerate(turns):
        for i, m in enumerate(metrics):
            y, cached = turn * (num_chats + 0.6) + i, m.num_cached_tokens
            labels.append((y, f"turn {turn + 1}, chat {i}"))
            ax.barh(y, cached, color=IDLE, hatch="///", edgecolor="#777777", linewidth=0)
            ax.barh(y, m.num_prompt_tokens - cached, left=cached, color=colour_of(i))
            middle = (cached + m.num_prompt_tokens) / 2
            badge = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            ax.text(middle, y, str(i), ha="center", va="center", fontsize=7, bbox=badge)
    ax.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("prompt tokens")
    ax.spines[["top", "right"]].set_visible(False)
    found = Patch(facecolor=IDLE, edgecolor="#777777", hatch="///", linewidth=0)
    figure.legend(
        [found, Patch(facecolor=colour_of(0))],
        ["found in the prefix cache", "computed (colour: the chat)"],
        loc="outside lower center", ncols=2, frameon=False, fontsize=8,
    )  # fmt: skip
    return figure


# ---------------------------------------------------------------------------------- examples


def _example_states(num_steps: int = 12) -> list[PoolState]:
    """Four made-up requests, two with a common prefix, on a pool of 16 blocks of 4 slots."""
    config = EngineConfig(
        num_blocks=16, block_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64
    )
    scheduler = Scheduler(config, BlockAllocator(config.num_blocks, config.block_size))
    prompts = [range(9), range(20, 26), range(12), range(40, 45)]
    for i, (prompt, num_new) in enumerate(zip(prompts, (4, 12, 8, 6), strict=True)):
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        scheduler.add(Request(f"r{i}", list(prompt), params))
    states = []
    for step in range(num_steps):
        plan = scheduler.schedule(now=step)
        tokens = {row.request.request_id: [99] for row in plan.scheduled if row.samples}
        scheduler.update(plan, tokens, now=step)
        states.append(state_of(scheduler, f"after step {step}"))
    return states


def _example_metrics() -> list[list[RequestMetrics]]:
    sizes = [[(60, 0), (48, 32), (75, 32)], [(110, 80), (95, 64), (128, 112)]]
    return [
        [RequestMetrics(num_prompt_tokens=n, num_cached_tokens=c) for n, c in turn]
        for turn in sizes
    ]


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "blocks_pool": lambda: pool(_example_states()[5]),
    "blocks_pool_steps": lambda: pool_steps(_example_states()[3:9]),
    "blocks_fragmentation": lambda: fragmentation([12, 70, 130, 300, 1100], 2048),
    "blocks_prefix_hits": lambda: prefix_hits(_example_metrics()),
}
