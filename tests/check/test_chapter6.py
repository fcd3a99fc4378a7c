"""The checks and figures of chapter 6: right answers pass, plausible wrong ones are refused."""

import re

import pytest
import torch

from nanobatch import check
from nanobatch.kernels.work_list import keys_of_program
from nanobatch.utils.arithmetic import cdiv
from nanobatch.viz import kernel as viz

INF = torch.inf


# ---- 6.1 -------------------------------------------------------------------------------


def merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    largest = torch.maximum(max_a, max_b)
    base = torch.where(largest == -INF, 0.0, largest)
    weight_a, weight_b = torch.exp(max_a - base), torch.exp(max_b - base)
    total = sum_a * weight_a + sum_b * weight_b
    return largest, total, acc_a * weight_a[:, None] + acc_b * weight_b[:, None]


def merge_row_by_row(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    rows = []
    for ma, sa, xa, mb, sb, xb in zip(max_a, sum_a, acc_a, max_b, sum_b, acc_b, strict=True):
        if sa == 0:
            rows.append((mb, sb, xb))
        elif sb == 0:
            rows.append((ma, sa, xa))
        elif ma < mb:
            w = (ma - mb).exp()
            rows.append((mb, sb + w * sa, xb + w * xa))
        else:
            w = (mb - ma).exp()
            rows.append((ma, sa + w * sb, xa + w * xb))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))


def no_rescaling(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    return torch.maximum(max_a, max_b), sum_a + sum_b, acc_a + acc_b


def nan_for_two_empty_parts(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    largest = torch.maximum(max_a, max_b)
    weight_a, weight_b = torch.exp(max_a - largest), torch.exp(max_b - largest)
    total = sum_a * weight_a + sum_b * weight_b
    return largest, total, acc_a * weight_a[:, None] + acc_b * weight_b[:, None]


def without_a_maximum(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    weight_a, weight_b = torch.exp(max_a), torch.exp(max_b)
    total = sum_a * weight_a + sum_b * weight_b
    acc = acc_a * weight_a[:, None] + acc_b * weight_b[:, None]
    largest = torch.maximum(max_a, max_b)
    scale = torch.where(largest == -INF, 1.0, torch.exp(-largest))
    return largest, total * scale, acc * scale[:, None]


def counts_the_empty_as_zero(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    max_a, max_b = (torch.where(x == -INF, 0.0, x) for x in (max_a, max_b))
    return merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b)


@pytest.mark.parametrize("answer", [merge, merge_row_by_row])
def test_merges_that_are_right(answer, capsys):
    check.ex6_1(answer)
    assert "ex6_1: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, message",
    [
        (no_rescaling, r"for \(\[1.0\], .*right is \(tensor\(\[2.\]\)"),
        (nan_for_two_empty_parts, r"for \(\[-inf\], .*\[-inf\].*nan.*right is"),
        (without_a_maximum, r"for \(\[300.0\], .*right is \(tensor\(\[301.\]\)"),
        (counts_the_empty_as_zero, r"for \(\[-inf\], .*right is \(tensor\(\[-200.\]\)"),
        (lambda *parts: merge(*parts)[1:], r"for \(\[1.0\], "),
    ],
)
def test_merges_that_are_wrong(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex6_1(answer)


def test_messages_have_short_numbers():
    for answer in (
        no_rescaling,
        without_a_maximum,
        lambda *parts: parts[0] @ parts[2].T[0, :0],
    ):
        with pytest.raises(AssertionError) as refused:
            check.ex6_1(answer)
        assert not re.search(r"\.\d{5}", str(refused.value))
    with pytest.raises(AssertionError, match="it must be a function"):
        check.ex6_1(None)


# ---- 6.2 -------------------------------------------------------------------------------


def num_blocks(plan, starts):
    return sum(cdiv(starts[s + 1] - starts[s], plan.block_q) for s in range(len(starts) - 1))


def bytes_read(plan, query_start_loc, seq_lens, num_kv_heads, head_dim, itemsize):
    keys = 0
    for block in range(num_blocks(plan, query_start_loc)):
        for split in range(plan.num_splits):
            _, first, end = keys_of_program(plan, query_start_loc, seq_lens, block, split)
            keys += end - first
    return 2 * keys * num_kv_heads * head_dim * itemsize


def bytes_read_from_the_lengths(plan, query_start_loc, seq_lens, num_kv_heads, *sizes):
    """Each query block reads whole tiles up to its last query, and no key past the end."""
    keys = 0
    for s, seq_len in enumerate(seq_lens):
        query_len = query_start_loc[s + 1] - query_start_loc[s]
        for first in range(0, query_len, plan.block_q):
            last = min(first + plan.block_q, query_len) - 1
            tiles = cdiv(seq_len - query_len + last + 1, plan.tile)
            keys += min(tiles * plan.tile, seq_len)
    return 2 * keys * num_kv_heads * sizes[0] * sizes[1]


def half(*inputs):
    return bytes_read(*inputs) // 2


def one_kv_head(plan, starts, seq_lens, num_kv_heads, *sizes):
    return bytes_read(plan, starts, seq_lens, 1, *sizes)


def first_split_only(plan, query_start_loc, seq_lens, num_kv_heads, head_dim, itemsize):
    keys = 0
    for block in range(num_blocks(plan, query_start_loc)):
        _, first, end = keys_of_program(plan, query_start_loc, seq_lens, block)
        keys += end - first
    return 2 * keys * num_kv_heads * head_dim * itemsize


def each_key_once(plan, query_start_loc, seq_lens, num_kv_heads, head_dim, itemsize):
    return 2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize


@pytest.mark.parametrize("answer", [bytes_read, bytes_read_from_the_lengths])
def test_bytes_that_are_right(answer, capsys):
    check.ex6_2(answer)
    assert "ex6_2: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, message",
    [
        (half, r"\[0, 1\], \[9\], 1, 64, 2\) it gives 1152; right is 2304"),
        (one_kv_head, r"\[9, 40\], 8, 128, 2\) it gives 25088; right is 200704"),
        (first_split_only, r"num_splits=4.*\[200, 24, 9\]"),
        (each_key_once, r"\[0, 12\], \[12\], 2, 64, 2\)"),
        (lambda *inputs: None, "it gives None"),
    ],
)
def test_bytes_that_are_wrong(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex6_2(answer)


# ---- figures ---------------------------------------------------------------------------


def test_reads_have_a_row_for_each_program():
    batch, whole, split = viz._example()
    for plan in (whole, split):
        ax = viz.reads_of_programs(batch, plan).axes[0]
        programs = viz.programs_of(batch, plan)
        assert (
            len(ax.get_yticks()) == len(programs) == 4 * plan.num_splits
        )  # 1 + 2 + 1 query blocks
        busy = [p for p in programs if p.end > p.first]
        drawn = [(b.get_x(), b.get_width()) for b in ax.patches[1::2]]
        assert drawn == [(p.first, p.end - p.first) for p in busy]
        numbers = [t.get_text() for t in ax.texts if t.get_text().isdigit()]
        assert numbers == [str(p.seq) for p in busy]
        assert "key position" in ax.get_xlabel()


def test_a_window_reads_less():
    batch, whole, _ = viz._example()
    reads = [p.end - p.first for p in viz.programs_of(batch, whole)]
    narrow = [p.end - p.first for p in viz.programs_of(batch, whole, sliding_window=4)]
    assert sum(narrow) < sum(reads)
    assert len(viz.reads_of_programs(batch, whole, sliding_window=4).axes[0].patches) == 8


def test_bytes_are_the_same_in_all_with_any_number_of_splits():
    batch, whole, split = viz._example()
    plans = {"1 split": whole, "4 splits": split}
    axes = viz.bytes_of_programs(batch, plans, head_dim=16, itemsize=4).axes
    sums, highest = ([f(b.get_height() for b in ax.patches) for ax in axes] for f in (sum, max))
    assert sums[0] == pytest.approx(sums[1])
    assert highest[1] < highest[0]
    assert "KiB" in axes[0].get_ylabel() and axes[1].get_title(loc="left").startswith("4 sp")


def test_examples_draw():
    assert all(make().axes for make in viz.EXAMPLES.values())
