"""Chapter 2: its checks refuse what students get wrong; its figures draw what was run."""

import itertools
import random

import pytest
import torch

from nanobatch import check
from nanobatch.bench.static_batching import PaddedAttend, run_static_batch
from nanobatch.check.chapter2 import LENGTHS, _padding
from nanobatch.models.loader import load
from nanobatch.viz.padding import EXAMPLES, KINDS, padded_batch, places_of, waste_bars


@pytest.fixture(scope="module")
def model():
    return load("tiny", torch.float32).model


def positions(num_pads, length):
    return (torch.arange(length) - torch.tensor(num_pads).unsqueeze(1)).clamp(min=0)


def positions_by_row(num_pads, length):
    return torch.tensor([[0] * n + list(range(length - n)) for n in num_pads])


@pytest.mark.parametrize("answer", [positions, positions_by_row])
def test_ex2_1_takes_right_answers(answer, capsys):
    check.ex2_1(answer)
    assert "ex2_1: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda n, length: torch.arange(length).expand(len(n), -1), r"for \(\[2, 0\], 4\)"),
        (
            lambda n, length: torch.arange(length) - torch.tensor(n)[:, None],
            r"\[-2, -1, 0, 1\]",
        ),
        (lambda n, length: positions(n, length).flatten(), r"for \(\[2, 0\], 4\) it gives"),
        (lambda n, length: positions(n, length).float(), "dtype is torch.float32"),
        (lambda n, length: positions_by_row(n, length) + 1, r"right is \[\[0, 0, 0, 1\]"),
        (lambda n, length: torch.arange(length) - n, r"\(\[2, 0\], 4\) raises"),
    ],
)
def test_ex2_1_refuses_wrong_answers(answer, says):
    with pytest.raises(AssertionError, match=says):
        check.ex2_1(answer)


def test_ex2_1_agrees_with_the_package(model):
    attend = PaddedAttend(model, [2, 5, 4], max_len=9)
    assert torch.equal(attend.advance(5), positions([3, 0, 1], 5).flatten())


def wasted_turns(output_lens):
    return len(output_lens) * max(output_lens) - sum(output_lens)


@pytest.mark.parametrize(
    "answer", [wasted_turns, lambda lens: sum(max(lens) - n for n in sorted(lens))]
)
def test_ex2_2_takes_right_answers(answer, capsys):
    check.ex2_2(answer)
    assert "ex2_2: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda lens: len(lens) * max(lens), r"\[2, 7, 3\]\) it gives 21; right is 9"),
        (lambda lens: max(lens) - min(lens), r"\[2, 7, 3\]\) it gives 5; right is 9"),
        (lambda lens: sum(max(lens) - n + 1 for n in lens if n < max(lens)), "it gives 11"),
        (
            lambda lens: sum(lens[1] - n for n in lens),
            r"for \(\[5\]\) it gives|\(\[5\]\) raises",
        ),
        (lambda lens: sum(n < max(lens) for n in lens), "right is 9"),
    ],
)
def test_ex2_2_refuses_wrong_answers(answer, says):
    with pytest.raises(AssertionError, match=says):
        check.ex2_2(answer)


def test_ex2_2_agrees_with_a_run(model):
    output_lens = [3, 8, 1]
    steps = list(run_static_batch(model, [[1, 2], [3], [4, 5, 6]], output_lens))
    assert sum(len(output_lens) - len(step) for step in steps) == wasted_turns(output_lens)


def batches(lengths, batch_size):
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def batches_longest_first(lengths, batch_size):
    rest = [i for _, i in sorted((-n, i) for i, n in enumerate(lengths))]
    groups = []
    while rest:
        group, rest = rest[:batch_size], rest[batch_size:]
        groups.append(tuple(reversed(group)))
    return tuple(groups)


@pytest.mark.parametrize("answer", [batches, batches_longest_first])
def test_ex2_3_takes_right_answers(answer, capsys):
    check.ex2_3(answer)
    assert "ex2_3: right" in capsys.readouterr().out


def batches_as_they_came(lengths, batch_size):
    order = list(range(len(lengths)))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def batches_of_lengths(lengths, batch_size):
    order = sorted(lengths)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def batches_by_first_index(lengths, batch_size):
    return [
        [lengths.index(n) for n in group] for group in batches_of_lengths(lengths, batch_size)
    ]


@pytest.mark.parametrize(
    "answer, says",
    [
        (batches_as_they_came, r"\(\[5, 1, 4, 2\], 2\) .* pads 6 tokens; 2 are enough"),
        (batches_of_lengths, r"\(\[5, 1, 4, 2\], 2\) .*4 is the index of no request"),
        (batches_by_first_index, r"\(\[2, 9, 2, 9, 2, 9\], 3\) .* request 0 is in 3 batches"),
        (
            lambda n, b: [g for g in batches(n, b) if len(g) == b],
            r"\(\[6, 3\], 8\) .* request 0 is in 0 batches",
        ),
        (lambda n, b: [[i] for i in range(len(n))], "4 batches, 2 are enough"),
        (lambda n, b: [list(range(len(n)))], "a batch of 4 is over 2"),
        (lambda n, b: sorted(range(len(n))), "a list of lists of indices"),
    ],
)
def test_ex2_3_refuses_wrong_answers(answer, says):
    with pytest.raises(AssertionError, match=says):
        check.ex2_3(answer)


def test_sorting_wastes_least():
    """Of all ways to split 6 requests into full batches of 2 or 3, by brute force."""
    rng = random.Random(0)
    for batch_size in (2, 3):
        for _ in range(3):
            lengths = [rng.randint(1, 20) for _ in range(6)]
            least = min(
                _padding(lengths, [order[i : i + batch_size] for i in range(0, 6, batch_size)])
                for order in itertools.permutations(range(6))
            )
            assert _padding(lengths, batches(lengths, batch_size)) == least
    assert any(len(n) % b for n, b in LENGTHS), "a batch that is left short is tried"


def test_padded_batch_draws_what_was_run(model):
    prompts, max_tokens = [[65, 66, 67], [65]], [2, 4]
    outputs = [[], []]
    for emitted in run_static_batch(model, prompts, max_tokens):
        for row, token_id in emitted.items():
            outputs[row].append(token_id)
    prompt_lens, output_lens = [len(p) for p in prompts], [len(o) for o in outputs]
    texts = ["abcde", "fghij"]
    figure = padded_batch(prompt_lens, output_lens, texts, "two requests")
    (ax,) = figure.axes
    written = [t.get_text() for t in ax.texts]
    assert written == list("abcde××") + list("··fghij")
    assert ax.images[0].get_array().shape[:2] == (2, 7)
    assert "column" in ax.get_xlabel() and ax.get_title(loc="left") == "two requests"


def test_waste_bars_add_up_to_all_places():
    places = [kind for row in places_of([2, 5], [3, 1]) for kind in row]
    counts = {kind: places.count(kind) for kind in KINDS}
    assert counts == {"prompt": 7, "output": 4, "pad": 3, "discarded": 2}
    (ax,) = waste_bars({"a": counts, "b": counts}, "two batches").axes
    widths = [bar.get_width() for bars in ax.containers for bar in bars]
    assert len(widths) == 2 * len(KINDS) and sum(widths) == pytest.approx(200)
    assert "%" in ax.get_xlabel()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_draw(name, tmp_path):
    EXAMPLES[name]().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000
