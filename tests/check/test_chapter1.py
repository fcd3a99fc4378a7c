"""Chapter 1: checks accept what is right and refuse what is wrong; figures are drawn."""

import pytest
from matplotlib.figure import Figure

from nanobatch import check
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.simulation.cost_model import CostModel
from nanobatch.simulation.roofline import Work
from nanobatch.viz import roofline as viz


def kv_bytes(m, itemsize):
    return 2 * m.num_layers * m.num_kv_heads * m.head_dim * itemsize


def kv_bytes_by_layer(m, itemsize):
    key_bytes = m.num_kv_heads * m.head_dim * itemsize
    return sum(key_bytes + key_bytes for _ in range(m.num_layers))


@pytest.mark.parametrize("answer", [kv_bytes, kv_bytes_by_layer])
def test_ex1_1_accepts(answer, capsys):
    check.ex1_1(answer)
    assert capsys.readouterr().out == "ex1_1: right\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda m, i: kv_bytes(m, i) // 2, r"'llama-2-7b'\], 2\) .* right is 524288"),
        (
            lambda m, i: 2 * m.num_layers * m.num_heads * m.head_dim * i,
            r"'llama-3.1-8b'\], 2\) it gives 524288; right is 131072",
        ),
        (
            lambda m, i: 2 * m.num_layers * m.hidden_size // m.num_heads * m.num_kv_heads * i,
            r"'qwen3-0.6b'\], 2\)",
        ),
        (lambda m, i: 2 * m.num_kv_heads * m.head_dim * i, "'llama-2-7b'"),
        (lambda m, i: kv_bytes(m, 2), r"'llama-3.1-8b'\], 1\)"),
        (lambda m, i: m.kv_heads, "AttributeError"),
    ],
    ids=["no 2", "query heads", "E / H", "one layer", "always 16 bits", "raises"],
)
def test_ex1_1_refuses(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex1_1(answer)


def test_ex1_1_agrees_with_the_cost_model():
    for name in ("llama-2-7b", "llama-3.1-70b"):
        cost_model = CostModel(MODEL_PRESETS[name], gpu=None, block_size=16)
        assert cost_model.block_bytes == 16 * kv_bytes(MODEL_PRESETS[name], 2)


def knee(bandwidth, flop_rate, itemsize):
    return itemsize * flop_rate / (2 * bandwidth)


def knee_by_times(bandwidth, flop_rate, itemsize):
    read_seconds_per_weight = itemsize / bandwidth
    return read_seconds_per_weight / (2 / flop_rate)


@pytest.mark.parametrize("answer", [knee, knee_by_times])
def test_ex1_2_accepts(answer):
    check.ex1_2(answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda b, f, i: i * f / b, r"bandwidth=2.*it gives 306.*right is 153"),
        (lambda b, f, i: f / b, "bandwidth=2039000000000.0, flop_rate=624.*itemsize=1"),
        (lambda b, f, i: b / f, "right is 153"),
        (lambda b, f, i: max(1.0, knee(b, f, i)), "flop_rate=500000000000.0, .*right is 0.5"),
        (lambda b, f, i: int(knee(b, f, i)), "right is 153.0"),
        (lambda b, f, i: print(knee(b, f, i)), "it gives None"),
    ],
    ids=["add and multiply as one", "no itemsize", "upside down", "one", "rounded", "printed"],
)
def test_ex1_2_refuses(answer, message):
    with pytest.raises(AssertionError, match=message):
        check.ex1_2(answer)


def test_token_times_has_both_series():
    figure = viz.token_times([0.001 * n for n in range(1, 30)], [0.001] * 29, prompt_len=5)
    (ax,) = figure.axes
    assert [line.get_label() for line in ax.lines] == ["no cache", "KV cache"]
    assert list(ax.lines[0].get_xdata())[:2] == [5, 6]
    assert "ms" in ax.get_ylabel()


def test_roofline_shows_each_product_under_the_roof():
    measured = {b: (Work(4_000, 2_000 * b), 1e-6 * b) for b in (1, 2, 4, 8)}
    figure = viz.roofline(8e9, 4e9, measured, "a title")
    left, right = figure.axes
    assert [t.get_text() for t in left.texts if t.get_text().isdigit()] == ["1", "2", "4", "8"]
    assert "operations per byte" in left.get_xlabel() and left.get_ylabel() == "FLOP/s"
    roof = right.lines[-1]
    assert list(roof.get_ydata()) == pytest.approx([5e-4, 1e-3, 2e-3, 4e-3])


def test_step_times_draws_a_curve_in_each_panel():
    curves = {"short": [(1, 0.01), (2, 0.02)], "long": [(1, 0.02), (2, 0.04)]}
    left, right = viz.step_times(curves, "a title").axes
    assert list(left.lines[1].get_ydata()) == pytest.approx([20, 40])
    assert list(right.lines[0].get_ydata()) == pytest.approx([100, 100])
    assert len(left.get_legend().get_texts()) == 2


@pytest.mark.parametrize("name", viz.EXAMPLES)
def test_examples_are_figures(name):
    assert isinstance(viz.EXAMPLES[name](), Figure)
