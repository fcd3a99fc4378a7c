"""Chapter 4's checks accept right answers and refuse wrong ones; its figures draw masks."""

from itertools import accumulate

import pytest
import torch
from matplotlib.colors import to_hex

from nanobatch import check
from nanobatch.attention_masks import (
    block_diagonal_mask,
    block_sparse_mask,
    needed_scores,
    padded_mask,
    paged_mask,
)
from nanobatch.viz import masks as draw
from nanobatch.viz.style import IDLE

LENS = [3, 6, 2]


def no_answer(*args):
    raise NotImplementedError


def refused(checked, answer, match):
    with pytest.raises(AssertionError, match=match):
        checked(answer)


# ---- 4.1 -------------------------------------------------------------------------------


def test_ex4_1_accepts(capsys):
    check.ex4_1(lambda lens: torch.tensor([0, *accumulate(lens)], dtype=torch.int32))
    check.ex4_1(lambda lens: torch.tensor([0, *lens]).cumsum(0).int())
    assert capsys.readouterr().out == "ex4_1: right\n" * 2


def test_ex4_1_refuses():
    refused(check.ex4_1, no_answer, "there is no answer yet")
    refused(
        check.ex4_1,
        lambda lens: torch.tensor(list(accumulate(lens)), dtype=torch.int32),
        r"for \(\[2, 3\]\) it gives \[2, 5\]; right is \[0, 2, 5\]",
    )
    refused(
        check.ex4_1,
        lambda lens: torch.tensor([0, *lens]).cumsum(0)[:-1].int(),
        r"for \(\[2, 3\]\) it gives \[0, 2\]; right is \[0, 2, 5\]",
    )
    refused(
        check.ex4_1,
        lambda lens: torch.tensor([0, *lens]).cumsum(0),
        r"for \(\[2, 3\]\) it gives torch.int64; right is torch.int32",
    )
    # Eight bits do not hold a prompt of 300 tokens.
    refused(
        check.ex4_1,
        lambda lens: torch.tensor([0, *lens]).cumsum(0).to(torch.int8).int(),
        r"for \(\[300, 1\]\)",
    )


# ---- 4.2 -------------------------------------------------------------------------------


def from_positions(query_lens, seq_lens):
    """Compare requests and positions of all pairs at once."""

    def requests(lens):
        return torch.cat([torch.full((n,), i) for i, n in enumerate(lens)])

    pairs = zip(query_lens, seq_lens, strict=True)
    queries = torch.cat([torch.arange(n - t, n) for t, n in pairs])
    keys = torch.cat([torch.arange(n) for n in seq_lens])
    same = requests(query_lens)[:, None] == requests(seq_lens)[None]
    return same & (keys[None] <= queries[:, None])


def top_left(query_lens, seq_lens):
    pairs = zip(query_lens, seq_lens, strict=True)
    return torch.block_diag(*[torch.ones(t, n).tril() for t, n in pairs]).bool()


def everybody(query_lens, seq_lens):
    """Bottom right in the whole matrix, whoever a key belongs to."""
    T, L = sum(query_lens), sum(seq_lens)
    return torch.ones(T, L, dtype=torch.bool).tril(L - T)


def only_positions(query_lens, seq_lens):
    pairs = zip(query_lens, seq_lens, strict=True)
    queries = torch.cat([torch.arange(n - t, n) for t, n in pairs])
    keys = torch.cat([torch.arange(n) for n in seq_lens])
    return keys[None] <= queries[:, None]


def not_itself(query_lens, seq_lens):
    mask = from_positions(query_lens, seq_lens)
    mask[torch.arange(len(mask)), [int(row.nonzero()[-1]) for row in mask]] = False
    return mask


def test_ex4_2_accepts(capsys):
    check.ex4_2(paged_mask)
    check.ex4_2(from_positions)
    assert capsys.readouterr().out == "ex4_2: right\n" * 2


def test_ex4_2_refuses():
    refused(check.ex4_2, no_answer, "there is no answer yet")
    refused(
        check.ex4_2,
        top_left,
        r"for \(\[1\], \[4\]\) row 0, a query of request 0, is\n    1 \. \. \.\nright is"
        r"\n    1 1 1 1",
    )
    refused(
        check.ex4_2,
        everybody,
        r"for \(\[2, 3\], \[2, 3\]\) row 2, a query of request 1, is\n    1 1 1 \. \.\n",
    )
    refused(check.ex4_2, only_positions, r"for \(\[2, 3\], \[2, 3\]\) row 0")
    refused(check.ex4_2, not_itself, r"for \(\[3\], \[3\]\) row 0.*is\n    \. \. \.\n")
    refused(
        check.ex4_2,
        lambda q, n: block_diagonal_mask(n),
        r"for \(\[1\], \[4\]\) its shape is \(4, 4\); right is \(1, 4\)",
    )
    refused(
        check.ex4_2,
        lambda q, n: paged_mask(q, n).int(),
        r"for \(\[3\], \[3\]\) it gives torch.int32; right is torch.bool",
    )
    refused(check.ex4_2, lambda q, n: paged_mask(q, n).tolist(), "it gives list")


# ---- 4.3 -------------------------------------------------------------------------------


def by_position(query_lens, seq_lens, window=None):
    return sum(
        position + 1 if window is None else min(position + 1, window)
        for t, n in zip(query_lens, seq_lens, strict=True)
        for position in range(n - t, n)
    )


def whole_requests(query_lens, seq_lens, window=None):
    return by_position(seq_lens, seq_lens, window)


def rectangles(query_lens, seq_lens, window=None):
    pairs = zip(query_lens, seq_lens, strict=True)
    return sum(t * (n if window is None else min(n, window)) for t, n in pairs)


def without_itself(query_lens, seq_lens, window=None):
    return by_position(query_lens, seq_lens, None if window is None else window + 1)


def no_window(query_lens, seq_lens, window=None):
    return by_position(query_lens, seq_lens)


def test_ex4_3_accepts(capsys):
    check.ex4_3(needed_scores)
    check.ex4_3(by_position)
    assert capsys.readouterr().out == "ex4_3: right\n" * 2


def test_ex4_3_refuses():
    refused(check.ex4_3, no_answer, "there is no answer yet")
    refused(check.ex4_3, whole_requests, r"for \(\[1\], \[4\]\) it gives 10; right is 4")
    refused(check.ex4_3, rectangles, r"for \(\[3\], \[3\]\) it gives 9; right is 6")
    refused(check.ex4_3, without_itself, r"for \(\[3\], \[3\], 1\) it gives 5; right is 3")
    refused(check.ex4_3, no_window, r"for \(\[3\], \[3\], 1\) it gives 6; right is 3")


# ---- figures ---------------------------------------------------------------------------


def image_of(figure, panel=0):
    """The colours of a panel's cells, as hex."""
    image = figure.axes[panel].images[0].get_array()
    return [[to_hex(cell).upper() for cell in row] for row in image]


def test_panels_show_each_layout_and_what_it_computes():
    masks = {
        "padded": padded_mask(LENS),
        "packed": block_diagonal_mask(LENS),
        "tiles": block_sparse_mask(LENS, 2),
    }
    figure = draw.mask_panels(masks, LENS)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == [
        "padded\n108 scores computed",
        "packed\n121 scores computed",
        "tiles\n56 scores computed",
    ]
    assert [ax.images[0].get_array().shape[:2] for ax in figure.axes] == [
        (18, 6),
        (11, 11),
        (11, 11),
    ]
    for ax in figure.axes:
        assert [label.get_text() for label in ax.get_yticklabels()] == ["r0", "r1", "r2"]
    # Needed cells are the same in number everywhere; white ones only in tiles, of which those
    # at the end stick out by 5 cells that are not drawn.
    counts = [sum(image_of(figure, i), []) for i in range(3)]
    needed = [sum(c not in (IDLE, "#FFFFFF") for c in cells) for cells in counts]
    assert needed == [6 + 21 + 3] * 3
    assert [cells.count("#FFFFFF") for cells in counts] == [0, 0, 121 - (56 - 5)]


def test_a_leak_is_marked_in_the_other_requests_colour():
    mask = block_diagonal_mask(LENS)
    assert not draw.mask_panels({"right": mask}, LENS).axes[0].texts
    mask[7, 1] = True
    figure = draw.mask_panels({"leak": mask}, LENS)
    assert [text.get_text() for text in figure.axes[0].texts] == ["x"]
    assert figure.axes[0].texts[0].get_position() == (1, 7)
    assert image_of(figure)[7][1] == draw.colour_of(0)


def test_rules_are_counted_by_what_they_allow():
    positions = torch.cat([torch.arange(n) for n in LENS])
    rule = positions.unsqueeze(0) <= positions.unsqueeze(1)
    figure = draw.mask_panels({"not after": rule}, LENS, are_rules=True)
    assert figure.axes[0].get_title() == f"not after\n{int(rule.sum())} of 121 entries allowed"
    assert figure.get_supxlabel().startswith("coloured: allowed by this rule")


def test_a_mixed_step_has_a_row_for_each_query():
    figure = draw.mask_panels({"step": paged_mask([1, 4, 2], [6, 4, 5])}, [6, 4, 5], [1, 4, 2])
    cells = image_of(figure)
    assert (len(cells), len(cells[0])) == (7, 15)
    assert cells[0] == [draw.colour_of(0)] * 6 + [IDLE] * 9


def test_bars_of_waste():
    masks = {"packed": block_diagonal_mask(LENS, 2), "tiles": block_sparse_mask(LENS, 2, 2)}
    figure = draw.waste_bars(masks, LENS, 2)
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches] == [5, 11, 3, 121 - 19, 5, 11, 3, 44 - 19]
    texts = [text.get_text() for text in ax.texts]
    assert "84% wasted" in texts and "57% wasted" in texts

    figure = draw.waste_against_spread([0, 1, 2], {"a": [0.1, 0.2, 0.3], "b": [0, 0, 1]}, "s")
    (ax,) = figure.axes
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == pytest.approx([10, 20, 30, 0, 0, 100])
    assert ax.get_xlabel() == "s"


@pytest.mark.parametrize("name", draw.EXAMPLES)
def test_the_examples_draw(name, tmp_path):
    draw.EXAMPLES[name]().savefig(tmp_path / "figure.png", dpi=50)
