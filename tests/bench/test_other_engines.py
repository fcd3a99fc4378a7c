"""bench.py compare: other engines in processes of their own, on the same requests.

transformers stands for all of them here, since it is installed; in float32 its tokens must be
this engine's. And a checkpoint that is saved for them is the model that was loaded.
"""

import json
import random
import sys
from dataclasses import replace

import pytest
import torch

import bench
from nanobatch.bench.cli import parse_args
from nanobatch.bench.other_engines import (
    WORKLOADS,
    Baseline,
    Standing,
    _vllm_environment,
    make_workload,
    table,
)
from nanobatch.models.loader import load, make_dummy, save
from nanobatch.models.presets import MODEL_PRESETS


def test_workloads_are_drawn_as_they_are_described():
    """First all prompts, each its length and then its ids, then all output lengths."""
    prompts, output_lens = make_workload("W1")
    random.seed(0)
    for prompt in prompts:
        assert len(prompt) == random.randint(16, 256)
        assert prompt == [random.randint(10, 40000) for _ in prompt]
    assert output_lens == [random.randint(16, 256) for _ in prompts]
    assert (len(prompts), len(make_workload("W2")[0])) == (64, 16)
    with pytest.raises(ValueError, match="workload is 'W3'.*W1, W2"):
        make_workload("W3")


@pytest.mark.parametrize("workload", ["W1", pytest.param("one", marks=pytest.mark.slow)])
def test_transformers_beside_this_engine(workload, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(WORKLOADS, "W1", (6, 0, (3, 40), (2, 20)))
    monkeypatch.setitem(WORKLOADS, "one", (1, 0, (20, 20), (9, 9)))
    file = tmp_path / "b.json"
    report = bench.main(
        ["compare", "--baseline", "hf", "--workload", workload, "--repeat", "2",
         "--dtype", "float32", "--save-json", str(file)]
    )  # fmt: skip
    ours, theirs = report["engines"]
    assert ours["engine"] == "nanobatch" and ours["ratio"] == 1
    assert theirs["num_same_outputs"] == ours["num_same_outputs"] == WORKLOADS[workload][0]
    assert theirs["output_throughput"] > 0 and theirs["ratio"] > 0
    assert json.loads(file.read_text())["engines"] == report["engines"]
    if workload == "one":
        assert theirs["ttft_ms"] > 0 and theirs["decode_throughput"] > 0
    assert "hf " in capsys.readouterr().out


def test_ratios_by_hand():
    """Of neighbouring passes, not of medians: a slow moment slows both."""
    ours = Standing("1", [1.0, 10.0, 2.0], [0.5, 5.0, 1.0], [[1, 2, 3]])
    other = Standing("2", [2.0, 20.0, 3.0], [1.0, 4.0, 2.0], [[1, 2, 4]])
    _, row = table({"nanobatch": ours, "hf": other}, num_output_tokens=11)
    assert row["ratio"] == 2.0  # of 2, 2 and 1.5
    assert row["output_throughput"] == 11 / 3
    assert row["ttft_ratio"] == 0.5  # of 0.5, 1.25 and 0.5
    assert row["decode_ratio"] == 2.0  # 10 / 0.5 over 10 / 1; 5 and 16 s; 1 and 1 s
    assert row["num_same_outputs"] == 0


def test_an_engine_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="--baseline-python hf=/nowhere/python"):
        Baseline("hf", "/nowhere/python", tmp_path, "float32", 1)
    with pytest.raises(ValueError, match="--baseline hf: .* cannot run it"):
        Baseline("hf", sys.executable, tmp_path, "float32", 1)  # no checkpoint


@pytest.mark.parametrize("text", ["vllm=/x/python", "hf"])
def test_an_interpreter_of_no_baseline(text, capsys):
    with pytest.raises(SystemExit):
        parse_args(["compare", "--baseline", "hf", "--baseline-python", text])
    assert f"--baseline-python is {text}" in capsys.readouterr().err


def test_vllm_is_given_all_cores(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").write_text("")
    environment = _vllm_environment(str(tmp_path / "bin" / "python"), 4)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert environment["LD_PRELOAD"].endswith(str(tmp_path / "lib" / "libiomp5.so"))


def small_qwen3(windows):
    shape = replace(
        MODEL_PRESETS["qwen3-0.6b"], vocab_size=50, hidden_size=16, intermediate_size=24,
        num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, **windows,
    )  # fmt: skip
    return make_dummy(shape, torch.float32)


@pytest.mark.parametrize("windows", [None, {}, {"sliding_window": 4}])
def test_what_is_saved_is_what_was_loaded(windows, tmp_path):
    if windows:
        windows = windows | {"full_attention_layers": frozenset({1})}
    model = load("tiny", torch.float32).model if windows is None else small_qwen3(windows)
    save(model, tmp_path)
    again = load(str(tmp_path), torch.float32).model
    for i in range(model.config.num_layers):
        assert again.config.window(i) == model.config.window(i)
    same = {"full_attention_layers": model.config.full_attention_layers}
    assert replace(again.config, **same) == model.config
    for (ours, a), (theirs, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert ours == theirs and torch.equal(a, b)


def test_scaled_rope_is_not_saved(tmp_path):
    model = small_qwen3({"rope_divisors": (1.0,) * 4})
    with pytest.raises(ValueError, match="scaled RoPE"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())
