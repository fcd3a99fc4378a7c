"""Attention masks as grids: which scores are needed, and which are wasted.

    coloured   a query sees a key of its own request (in the request's colour); for a single
               rule: the rule allows it
    grey       computed, then discarded
    white      not computed
    x          a leak: a query sees a key of another request (in that request's colour)

Rows are queries, columns are keys; the numbers at the sides are the requests. The figures
take the same masks as attention (attention_masks.py), dense or as a BlockMask.

Always holds: a figure shows the mask's own entries, so a wrong mask is drawn wrong.

Taught in notebooks/04_ragged_batches_and_masks.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from nanobatch.attention_masks import (
    block_diagonal_mask,
    block_sparse_mask,
    computed_scores,
    needed_scores,
    padded_mask,
    paged_mask,
)
from nanobatch.viz.style import IDLE, INK, OKABE_ITO, colour_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

PAD = -1  # stands for the request of a padding row or column
LEGEND = "coloured: needed    grey: wasted    white: not computed    x: a leak"
RULES_LEGEND = "coloured: allowed by this rule    grey: not allowed    x: a leak"
HATCHES = ("", "//", "..", "\\\\")  # tell layouts apart without colour
MOST_LINES = 60  # with more rows than this, lines between cells would hide the cells


def requests_of(lens: Sequence[int]) -> Tensor:
    """The request of each packed token: [2, 3] gives 0 0 1 1 1."""
    return torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))


def mask_grid(
    ax: Axes,
    mask_RC: Tensor,
    query_requests_R: Tensor,
    key_requests_RC: Tensor,
    title: str = "",
    *,
    is_computed_RC: Tensor | None = None,
    tile_size: int | None = None,
) -> None:
    """Draw one boolean mask, coloured by request.

    Args:
        ax: where to draw.
        mask_RC: bool [rows, columns], True where the query sees the key.
        query_requests_R: int [rows], the request of each query; PAD: padding.
        key_requests_RC: int [columns], or [rows, columns] where it differs by row.
        title: of the axes.
        is_computed_RC: bool [rows, columns]; None: all scores are computed.
        tile_size: if set, lines around tiles of this many cells.
    """
    rows, columns = mask_RC.shape
    by_row_R1, key_RC = query_requests_R.unsqueeze(1), key_requests_RC.expand(rows, columns)
    is_seen_RC = mask_RC & (by_row_R1 != PAD)
    is_leak_RC = is_seen_RC & (key_RC != by_row_R1)
    image = torch.ones(rows, columns, 3)
    image[:] = torch.tensor(to_rgb(IDLE))
    if is_computed_RC is not None:
        image[~is_computed_RC] = 1.0
    for request in key_RC[is_seen_RC].unique().tolist():
        colour = OKABE_ITO[5] if request == PAD else colour_of(request)
        image[is_seen_RC & (key_RC == request)] = torch.tensor(to_rgb(colour))
    ax.imshow(image.numpy(), interpolation="nearest", aspect="equal")
    for row, column in is_leak_RC.nonzero().tolist():
        ax.text(column, row, "x", ha="center", va="center_baseline", fontsize=8, weight="bold")
    if rows <= MOST_LINES:
        _lines(ax, range(1, rows), range(1, columns), color="white", linewidth=0.6)
    _number_requests(ax, "y", query_requests_R.tolist())
    if key_requests_RC.dim() == 1:
        _number_requests(ax, "x", key_requests_RC.tolist())
    else:
        ax.set_xticks([])
    if tile_size is not None:
        tiles = (range(tile_size, n, tile_size) for n in (rows, columns))
        _lines(ax, *tiles, color=INK, linewidth=0.8)
    ax.set_xlabel("keys")
    ax.set_ylabel("queries")
    ax.set_title(title, fontsize=9)
    ax.tick_params(length=0, labelsize=8)


def _lines(ax: Axes, at_rows: Sequence[int], at_columns: Sequence[int], **line: object) -> None:
    """Lines above these rows and left of these columns."""
    for row in at_rows:
        ax.axhline(row - 0.5, **line)
    for column in at_columns:
        ax.axvline(column - 0.5, **line)


def _number_requests(ax: Axes, side: str, requests: list[int]) -> None:
    """The request's number at the middle of its rows (columns), a line between requests."""
    ticks, names, first = [], [], 0
    for request, run in groupby(requests):
        size = len(list(run))
        if first:
            draw = ax.axhline if side == "y" else ax.axvline
            draw(first - 0.5, color=INK, linewidth=0.5, linestyle=":")
        if request != PAD:
            ticks.append(first + (size - 1) / 2)
            names.append(f"r{request}")
        first += size
    axis = ax.yaxis if side == "y" else ax.xaxis
    axis.set_ticks(ticks, names)


def mask_panels(
    masks: Mapping[str, Tensor | BlockMask],
    seq_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    are_rules: bool = False,
) -> Figure:
    """Masks of the same ragged batch side by side, each with its count of scores.

    Args:
        masks: by title; padded [S, 1, L, L], packed [T, L] or a BlockMask.
        seq_lens: keys of each request.
        query_lens: tokens that each request computes; None: all of seq_lens.
        are_rules: the masks are single rules, packed [T, L]. A rule may allow more than is
            needed, so the titles count allowed entries instead.
    """
    query_lens = seq_lens if query_lens is None else query_lens
    width = 9 if len(masks) > 1 else 6
    shapes = [
        (sum(query_lens), sum(seq_lens)) if _is_packed(m) else (1, 1) for m in masks.values()
    ]
    tallest = max(rows / columns for rows, columns in shapes) * width / len(masks)
    figure = Figure(figsize=(width, min(3.9, tallest + 1)), layout="constrained")
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    for ax, (name, mask) in zip(axes, masks.items(), strict=True):
        title = f"{name}\n{computed_scores(mask)} scores computed"
        if are_rules:
            title = f"{name}\n{int(mask.sum())} of {mask.numel()} entries allowed"
        if _is_packed(mask):
            mask_grid(ax, mask, requests_of(query_lens), requests_of(seq_lens), title)
        elif isinstance(mask, Tensor):
            _draw_padded(ax, mask, seq_lens, title)
        else:
            _draw_block_mask(ax, mask, seq_lens, title)
    figure.supxlabel(RULES_LEGEND if are_rules else LEGEND, fontsize=8, color=INK)
    return figure


def _is_packed(mask: Tensor | BlockMask) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 2


def _draw_padded(ax: Axes, mask_S1LL: Tensor, seq_lens: Sequence[int], title: str) -> None:
    """The requests' matrices one below the other; columns are padded positions."""
    S, _, L, _ = mask_S1LL.shape
    is_pad_SL = torch.arange(L) < L - torch.tensor(seq_lens).unsqueeze(1)
    request_SL = torch.arange(S).unsqueeze(1).expand(S, L).masked_fill(is_pad_SL, PAD)
    key_request_SLL = request_SL.unsqueeze(1).expand(S, L, L)
    mask_grid(
        ax, mask_S1LL.flatten(0, 2), request_SL.flatten(), key_request_SLL.flatten(0, 1), title
    )
    for request in range(1, S):
        ax.axhline(request * L - 0.5, color=INK, linewidth=1.2)


def _draw_block_mask(ax: Axes, mask: BlockMask, seq_lens: Sequence[int], title: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    T, tile_size = sum(seq_lens), mask.BLOCK_SIZE[0]
    device = mask.kv_num_blocks.device
    seen_TT = create_mask(mask.mask_mod, 1, 1, T, T, device=device)[0, 0].cpu()
    is_computed = mask.to_dense()[0, 0].bool().cpu()
    is_computed_TT = is_computed.repeat_interleave(tile_size, 0).repeat_interleave(tile_size, 1)
    requests_T = requests_of(seq_lens)
    mask_grid(
        ax, seen_TT, requests_T, requests_T, title,
        is_computed_RC=is_computed_TT[:T, :T], tile_size=tile_size,
    )  # fmt: skip


def waste_bars(
    masks: Mapping[str, Tensor | BlockMask],
    seq_lens: Sequence[int],
    sliding_window: int | None = None,
) -> Figure:
    """A bar for each layout: the needed scores of each request, and the wasted ones in grey.

    Args:
        masks: by name, all for seq_lens and sliding_window.
        seq_lens: tokens of each request.
        sliding_window: keys that a query sees, its own included; None: all up to it.
    """
    figure = Figure(figsize=(9, 0.5 * len(masks) + 1.2), layout="constrained")
    ax = figure.subplots()
    needed = [needed_scores([n], [n], sliding_window) for n in seq_lens]
    most = max(map(computed_scores, masks.values()))
    for row, mask in enumerate(masks.values()):
        left, total = 0, computed_scores(mask)
        for request, size in enumerate(needed):
            ax.barh(row, size, left=left, color=colour_of(request), edgecolor="white")
            is_wide = size > 0.025 * most
            if is_wide:
                middle = left + size / 2
                ax.text(middle, row, f"r{request}", ha="center", va="center", fontsize=7)
            left += size
        ax.barh(row, total - left, left=left, color=IDLE)
        share = f"{1 - left / total:.0%} wasted"
        ax.text(total + 0.01 * most, row, share, va="center", fontsize=8)
    ax.set_yticks(range(len(masks)), list(masks))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * most)
    ax.set_xlabel("scores computed for each head (coloured: needed; grey: wasted)")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def waste_against_spread(
    spreads: Sequence[float], shares: Mapping[str, Sequence[float]], xlabel: str
) -> Figure:
    """Grouped bars: the share of wasted scores, for each spread of lengths.

    Args:
        spreads: one for each group of bars.
        shares: by layout, a share between 0 and 1 for each spread.
        xlabel: what the spread measures.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ax = figure.subplots()
    width = 0.84 / len(shares)
    for i, (name, values) in enumerate(shares.items()):
        at = [group + (i - (len(shares) - 1) / 2) * width for group in range(len(spreads))]
        bars = ax.bar(
            at, [100 * v for v in values], 0.92 * width, label=name,
            color=OKABE_ITO[i % len(OKABE_ITO)], edgecolor="white", hatch=HATCHES[i % 4],
        )  # fmt: skip
        ax.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    ax.set_xticks(range(len(spreads)), [f"{s:g}" for s in spreads])
    ax.set_xlabel(xlabel)
    ax.set_ylabel("wasted scores (%)")
    ax.set_ylim(0, 112)
    ax.set_yticks(range(0, 101, 20))
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=len(shares))
    return figure


def _example_masks(window: int | None = None) -> dict[str, Tensor | BlockMask]:
    return {
        "padded": padded_mask([3, 6, 2], sliding_window=window),
        "block-diagonal": block_diagonal_mask([3, 6, 2], window),
        "block-sparse": block_sparse_mask([3, 6, 2], 2, window),
    }


def _example_leak() -> Figure:
    leaking = block_diagonal_mask([3, 6, 2])
    leaking[7, 1] = True
    return mask_panels({"right": block_diagonal_mask([3, 6, 2]), "leaking": leaking}, [3, 6, 2])


EXAMPLES: dict[str, Callable[[], Figure]] = {
    "ragged_batch": lambda: mask_panels(_example_masks(), [3, 6, 2]),
    "window": lambda: mask_panels(_example_masks(2), [3, 6, 2]),
    "leak": _example_leak,
    "cached_prefixes": lambda: mask_panels(
        {"decode, prompt, chunk": paged_mask([1, 4, 2], [6, 4, 5])}, [6, 4, 5], [1, 4, 2]
    ),
    "waste": lambda: waste_bars(_example_masks(), [3, 6, 2]),
    "waste_against_spread": lambda: waste_against_spread(
        [0, 1], {"padded": [0.5, 0.8], "block-sparse": [0.1, 0.2]}, "spread of the lengths"
    ),
}
