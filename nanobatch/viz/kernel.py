"""What each program of one attention launch reads from the cache.

    reads_of_programs    which keys: one line for each program, over key positions
    bytes_of_programs    how much: one bar for each program, with and without splits

Both draw the programs of one KV head; the other heads read the same positions of their own
keys. What a program reads comes from work_list.keys_of_program, computed as in the kernel.

Taught in notebooks/06_the_triton_kernel.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanobatch.batch import Batch, Row, pack
from nanobatch.kernels.launch_config import LaunchConfig
from nanobatch.kernels.work_list import keys_of_program, query_blocks
from nanobatch.utils.arithmetic import cdiv
from nanobatch.viz.style import IDLE, INK, colour_of


class Program(NamedTuple):
    """One program; it reads the key positions first to end - 1 of a sequence."""

    query_block: int
    split: int
    seq: int
    first: int
    end: int


def programs_of(
    batch: Batch, launch: LaunchConfig, sliding_window: int | None = None
) -> list[Program]:
    """The programs of one KV head, in order of query block and split."""
    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens_S.tolist()
    seq_of_block_X, _ = query_blocks(batch.query_start_loc.diff(), launch.block_q)
    return [
        Program(
            block,
            split,
            *keys_of_program(launch, starts, seq_lens, block, split, sliding_window),
        )
        for block in range(len(seq_of_block_X))
        for split in range(launch.num_splits)
    ]


def reads_of_programs(
    batch: Batch, launch: LaunchConfig, sliding_window: int | None = None
) -> Figure:
    """Which keys each program reads, coloured by request; grey: keys that it skips.

    Args:
        batch: the step's batch; row i is request i.
        launch: the launch configuration.
        sliding_window: keys that a query sees, its own included; None: all up to it.
    """
    programs = programs_of(batch, launch, sliding_window)
    seq_lens = batch.seq_lens_S.tolist()
    figure = Figure(figsize=(9, 0.25 * len(programs) + 1.3), layout="constrained")
    ax = figure.subplots()
    for y, program in enumerate(programs):
        num_keys = program.end - program.first
        if num_keys == 0:
            ax.annotate(
                "reads nothing",
                (0, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                color="#666666",
                zorder=4,
            )
            continue
        ax.barh(y, seq_lens[program.seq], height=0.8, color=IDLE, zorder=1)
        ax.barh(
            y, num_keys, left=program.first, height=0.8, color=colour_of(program.seq), zorder=2
        )
        middle = program.first + min(num_keys, launch.tile) / 2  # of its first tile
        ax.text(middle, y, str(program.seq), ha="center", va="center", fontsize=8, zorder=4)
    longest = max(seq_lens)
    ticks = [tile * launch.tile for tile in range(cdiv(longest, launch.tile) + 1)]
    for tick in ticks:
        ax.axvline(tick, color="white", linewidth=1.2, zorder=3)
    ax.set_xticks(ticks[:: cdiv(len(ticks), 16)])
    ax.set_xlim(0, longest)
    _label_programs(ax, programs, launch)
    ax.set_xlabel(f"key position in its sequence (ticks at tiles of {launch.tile})")
    ax.set_title(
        "Keys read by each program; the number is the request; grey: its other keys",
        loc="left",
        fontsize=10,
    )
    return figure


def _label_programs(ax: Axes, programs: list[Program], launch: LaunchConfig) -> None:
    """One line of the axes for each program, the first on top."""
    has_splits = launch.num_splits > 1
    labels = [
        f"{p.query_block}, {p.split}" if has_splits else f"{p.query_block}" for p in programs
    ]
    ax.set_yticks(range(len(programs)), labels, fontsize=8)
    ax.set_ylim(len(programs) - 0.5, -0.5)
    ax.set_ylabel("query block, split" if has_splits else "query block")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def bytes_of_programs(
    batch: Batch,
    launches: Mapping[str, LaunchConfig],
    head_dim: int,
    itemsize: int,
    sliding_window: int | None = None,
) -> Figure:
    """Bytes of keys and values that each program reads, one panel for each configuration.

    Args:
        batch: the step's batch; row i is request i.
        launches: launch configurations by the title of their panel.
        head_dim: D.
        itemsize: bytes of one number of the cache.
        sliding_window: keys that a query sees, its own included; None: all up to it.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(launches), sharey=True, squeeze=False)[0]
    for ax, (name, launch) in zip(axes, launches.items(), strict=True):
        programs = programs_of(batch, launch, sliding_window)
        kib = [2 * (p.end - p.first) * head_dim * itemsize / 1024 for p in programs]
        bars = ax.bar(
            range(len(programs)), kib, width=0.8, color=[colour_of(p.seq) for p in programs]
        )
        labels = [str(p.seq) if p.end > p.first else "" for p in programs]
        ax.bar_label(bars, labels, fontsize=8, padding=1)
        ax.set_title(
            f"{name}: {sum(kib):.1f} KiB in all,\nbusiest program {max(kib):.1f} KiB",
            loc="left",
            fontsize=9,
        )
        ax.set_xlabel("program (number on the bar: its request)")
        ax.set_xticks(range(len(programs)))
        ax.set_xlim(-0.6, len(programs) - 0.4)
        ax.tick_params(labelsize=8)
        ax.margins(y=0.12)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("keys and values read (KiB)")
    return figure


def _example() -> tuple[Batch, LaunchConfig, LaunchConfig]:
    """Two decodes and a chunk of a prompt; group size 3; one split and four."""
    lens, block_size = [(1, 41), (6, 22), (1, 9)], 4
    rows = [Row([0] * t, n - t, range(cdiv(n, block_size))) for t, n in lens]
    batch = pack(rows, block_size)
    launches = [LaunchConfig(16, 5, 8, splits, num_warps=4, num_stages=2) for splits in (1, 4)]
    return batch, *launches


def _example_reads() -> Figure:
    batch, whole, _ = _example()
    return reads_of_programs(batch, whole)


def _example_bytes() -> Figure:
    batch, whole, split = _example()
    launches = {"1 split": whole, "4 splits": split}
    return bytes_of_programs(batch, launches, head_dim=16, itemsize=4)


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "reads": _example_reads,
    "bytes": _example_bytes,
}
