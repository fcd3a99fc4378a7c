"""The static baseline and bench.py: the same tokens as everyone, and honest counts.

The oracle is the engine, which other tests hold against transformers.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
from nanobatch import LLM, EngineConfig, RequestMetrics, SamplingParams, viz
from nanobatch.bench.cli import parse_args
from nanobatch.bench.hardware import Hardware
from nanobatch.bench.host import steady_decode
from nanobatch.bench.ladder import compare_tokens, make_ladder
from nanobatch.bench.passes import Run
from nanobatch.bench.static_batching import run_static_batch
from nanobatch.bench.workload import lognormal_length, random_requests
from nanobatch.metrics import percentile, summarize
from nanobatch.models.loader import load
from nanobatch.simulation.roofline import weights_of_layers

BENCH = Path(bench.__file__)


@pytest.fixture(scope="module")
def items():
    lengths = ("lognormal:12:1", "lognormal:10:1")
    return list(random_requests(7, *lengths, prefix_len=20, seed=3))


@pytest.fixture(scope="module")
def model():
    return load("tiny", torch.float32).model


def test_static_batch_gives_the_engine_s_tokens(model, items):
    prompts = [i.prompt_token_ids for i in items]
    max_tokens = [i.num_output_tokens for i in items]
    outputs = [[] for _ in items]
    num_steps = 0
    for emitted in run_static_batch(model, prompts, max_tokens):
        num_steps += 1
        for row, token_id in emitted.items():
            outputs[row].append(token_id)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
    expected = LLM("tiny", dtype="float32").generate(prompts, params, progress=False)
    assert outputs == [o.token_ids for o in expected]
    assert num_steps == max(max_tokens), "the batch runs until its longest request has finished"


def test_static_rows_end_at_a_stop_token(model, items):
    prompt = items[0].prompt_token_ids
    free = [emitted[0] for emitted in run_static_batch(model, [prompt], [8])]
    stop = free[3]
    stopped = [emitted[0] for emitted in run_static_batch(model, [prompt], [8], {stop})]
    assert stopped == free[: free.index(stop) + 1]


def test_bench_writes_what_it_prints(tmp_path, capsys):
    report = bench.main(
        ["--num-prompts", "5", "--input-len", "8", "--output-len", "6", "--max-num-seqs", "3"]
        + ["--repeat", "1", "--prefix-len", "20"]
        + ["--save-json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    )
    names = ["sequential", "static", "continuous", "+ chunked prefill", "+ prefix cache"]
    assert list(report["systems"]) == names
    assert json.loads((tmp_path / "b.json").read_text())["systems"] == report["systems"]
    printed = capsys.readouterr().out
    for name, summary in report["systems"].items():
        assert summary["completed"] == 5
        assert 0 < summary["slot_utilization"] <= 1
        assert f"{summary['request_throughput']:.2f}" in printed, name
    for picture in ("b.png", "b_timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


def compared(a, b, rounding):
    return compare_tokens({n: Run(x, [], 1.0, []) for n, x in (("a", a), ("b", b))}, rounding)


def test_bench_at_a_rate_with_limits(capsys):
    flags = ["--num-prompts", "4", "--input-len", "8", "--output-len", "6", "--repeat", "1"]
    flags += ["--request-rate", "40", "--goodput", "ttft:100000", "tpot:100000"]
    report = bench.main([*flags, "--max-num-seqs", "2", "--policy", "sjf", "--max-wait", "1"])
    for name, s in report["systems"].items():
        assert s["request_goodput"] == s["request_throughput"], name
        # the last comes no earlier than three gaps of a fortieth of a second in the mean
        assert s["duration"] > 0.02 and s["mean_itl_ms"] > 0
    assert "goodput" in capsys.readouterr().out


def test_bench_reads_a_trace(tmp_path):
    trace = tmp_path / "t.jsonl"
    lines = [{"arrival": 0.01 * i, "prompt": "Once upon", "output_tokens": 3} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = bench.main(["--trace", str(trace), "--repeat", "1", "--max-num-seqs", "2"])
    assert all(s["total_output_tokens"] == 9 for s in report["systems"].values())
    report = bench.main(
        ["simulate", "tiny@t4", "--compare", "policy", "--trace", str(trace_of_counts(trace))]
    )
    assert all(s["total_input_tokens"] == 15 for s in report["systems"].values())


def trace_of_counts(trace):
    trace.write_text('{"arrival": 0, "prompt": 5, "output_tokens": 2}\n' * 3)
    return trace


@pytest.mark.parametrize("compare", ["ladder", "admission", "policy", "preemption"])
def test_bench_simulates(compare, tmp_path, capsys):
    file = tmp_path / "s.json"
    report = bench.main(
        ["simulate", "llama-2-7b@h100", "--compare", compare, "--num-prompts", "20"]
        + ["--save-json", str(file), "--plot", str(tmp_path / "s.png")]
    )
    assert json.loads(file.read_text())["systems"] == report["systems"]
    printed = capsys.readouterr().out
    for name, s in report["systems"].items():
        assert s["completed"] == 20 and name in printed
        assert f"{s['request_throughput']:.2f}" in printed
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_conversations_are_what_the_prefix_cache_is_for():
    report = bench.main(
        ["simulate", "llama-3.1-8b@a100-80gb", "--num-prompts", "20", "--num-turns", "5"]
        + ["--request-rate", "2"]
    )
    chunked, cached = (report["systems"][n] for n in ("+ chunked prefill", "+ prefix cache"))
    assert chunked["completed"] == cached["completed"] == 100
    assert cached["mean_ttft_ms"] < chunked["mean_ttft_ms"]


def test_a_sweep_of_rates_draws_a_curve(tmp_path):
    report = bench.main(
        ["simulate", "llama-2-7b@h100", "--compare", "admission", "--num-prompts", "20"]
        + ["--request-rate", "2,8", "--plot", str(tmp_path / "s.png")]
    )
    assert len(report["systems"]) == 8
    slow, fast = (report["systems"][f"on_demand @ {rate}"] for rate in (2, 8))
    assert slow["request_throughput"] < fast["request_throughput"]
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_what_the_simulator_refuses_is_said_in_a_line():
    done = subprocess.run(
        [sys.executable, BENCH, "simulate", "llama-2-70b@l4"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "does not fit" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_host_s_part_is_measured():
    """Small sizes; `bench.py host` has the figures."""
    cost = steady_decode(8, context=40)
    assert 0 < cost.schedule < 10_000 and 0 < cost.update < 10_000 and 0 < cost.pack < 10_000


def test_bench_refuses_to_compare_systems_that_disagree():
    tokens = [[1, 2], [3]]
    for rounding in (None, "16-bit numbers"):
        assert compared(tokens, tokens, rounding) == "the same in all"
        for wrong in ([[1], [3]], [[1, 2], [3, 4]]):
            with pytest.raises(SystemExit, match="request"):
                compared(tokens, wrong, rounding)
    with pytest.raises(SystemExit, match="request 1"):
        compared(tokens, [[1, 2], [4]], None)
    # 16-bit numbers round differently in batches of other sizes: said, not refused
    said = compared(tokens, [[1, 2], [4]], "16-bit numbers")
    assert said == "1 of 2 outputs the same in all (16-bit numbers)"


def test_bench_with_a_paged_cache_in_8_bits(capsys):
    flags = ["--num-prompts", "4", "--input-len", "8", "--output-len", "6", "--repeat", "1"]
    report = bench.main([*flags, "--max-num-seqs", "2", "--kv-cache-dtype", "int8"])
    assert report["args"]["kv_cache_dtype"] == "int8"
    with pytest.raises(SystemExit):
        bench.main(["--kv-cache-dtype", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err


def test_the_ladder_s_work_by_hand(model, items):
    """Steps, rows and logits of each rung are those that simulation/roofline.py is told."""
    config = EngineConfig(block_size=4, max_num_seqs=3, max_num_batched_tokens=16)
    longest = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    shape = model.config
    prompt_tokens = sum(len(i.prompt_token_ids) for i in items)
    for name, rung in make_ladder(model, longest, config).items():
        run = rung(items)
        # Whatever the steps: each prompt token, and each output token but the last, is
        # computed once (cached ones not at all), each output token takes one lm_head row.
        num_cached = sum(m.num_cached_tokens for m in run.metrics)
        assert (num_cached > 0) == (name == "+ prefix cache")
        tokens = prompt_tokens - num_cached + sum(i.num_output_tokens - 1 for i in items)
        num_logits = sum(i.num_output_tokens for i in items)
        scores = sum(
            position + 1
            for i, m in zip(items, run.metrics, strict=True)
            for position in range(
                m.num_cached_tokens, len(i.prompt_token_ids) + i.num_output_tokens - 1
            )
        )
        flops = 2 * (
            tokens * weights_of_layers(shape)
            + num_logits * shape.vocab_size * shape.hidden_size
            + scores * shape.num_layers * 2 * shape.num_heads * shape.head_dim
        )
        assert sum(w.flops for w in run.work) == flops, name
        at_best = sum(w.bytes for w in run.work) / 1e9
        duration = max(m.finish_time for m in run.metrics)
        summary = run.summary(Hardware(bandwidth=1e9, flop_rate=1e30))
        assert summary["roofline_utilization"] == pytest.approx(at_best / duration)
        assert "roofline_utilization" not in run.summary(None)


def test_bench_names_a_bad_flag():
    done = subprocess.run(
        [sys.executable, BENCH, "--num-prompts", "0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--num-prompts is 0; it must be in [1, 1000000]" in done.stderr


def test_summary_counts_by_hand():
    metrics = [
        RequestMetrics(0.0, 0.5, 1.0, 3.0, num_prompt_tokens=4, num_output_tokens=5),
        RequestMetrics(1.0, 1.0, 2.0, 2.0, num_prompt_tokens=6, num_output_tokens=1),
    ]
    s = summarize(metrics, duration=4.0)
    assert (s["request_throughput"], s["output_throughput"]) == (0.5, 1.5)
    assert (s["total_input_tokens"], s["total_token_throughput"]) == (10, 4.0)
    assert s["mean_ttft_ms"] == 1000.0  # 1 s each
    assert s["median_tpot_ms"] == 500.0  # (3 - 1) / 4; one token has no TPOT
    assert s["mean_e2el_ms"] == 2000.0  # 3 s and 1 s
    assert metrics[0].queue_time == 0.5


def test_percentile_is_numpy_s():
    import numpy as np

    rng = random.Random(0)
    for n in (1, 2, 3, 10, 101):
        values = [rng.random() for _ in range(n)]
        for p in (0, 1, 50, 90, 99, 100):
            assert percentile(values, p) == pytest.approx(np.percentile(values, p))
    assert percentile([], 50) == 0.0


def test_workload_repeats_and_keeps_its_promises():
    lengths = ("lognormal:32:1", "lognormal:48:1")
    a, again, other = (
        list(random_requests(200, *lengths, prefix_len=16, seed=seed)) for seed in (1, 1, 2)
    )
    assert a == again != other
    assert len({tuple(i.prompt_token_ids[:16]) for i in a}) == 1, "one shared prefix"
    assert all(16 < len(i.prompt_token_ids) <= 16 + 4 * 32 for i in a)
    assert all(1 <= i.num_output_tokens <= 4 * 48 for i in a)


def test_lognormal_length_has_the_mean_it_is_given():
    rng = random.Random(0)
    lengths = [lognormal_length(rng, 100, 0.5, 1, 10**6) for _ in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.02)
    assert lognormal_length(rng, 100, 0.0, 1, 1000) == 100
    assert lognormal_length(rng, 100, 0.0, 1, 64) == 64


def test_slots_are_assigned_without_overlap():
    rng = random.Random(0)
    metrics, free_at = [], [0.0] * 4  # four slots, each reused the moment it is free
    for _ in range(40):
        slot = min(range(4), key=free_at.__getitem__)
        start = free_at[slot]
        free_at[slot] = start + rng.uniform(0.5, 3)
        metrics.append(RequestMetrics(0.0, start, start + 0.1, free_at[slot]))
    slots = viz.assign_slots(metrics, 4)
    for slot in range(4):
        mine = sorted(
            (m.first_scheduled_time, m.finish_time)
            for m, s in zip(metrics, slots, strict=True)
            if s == slot
        )
        assert all(b <= c for (_, b), (c, _) in zip(mine, mine[1:], strict=False))
    spans = [(0, 2), (0, 1), (2, 3)]  # the lowest free slot, and free from the moment it is
    metrics = [RequestMetrics(0.0, start, start + 0.1, end) for start, end in spans]
    assert viz.assign_slots(metrics, 2) == [0, 1, 0]


@pytest.mark.parametrize(
    "flags, fault",
    [
        (["--dtype", "int8"], "invalid choice"),
        (["--input-len", "lognormal:5:nan"], "length 'lognormal:5:nan'"),
        (["--threads", "-1"], "--threads is -1"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--request-rate", "1,2"], "only with bench.py simulate"),
        (["--goodput", "itl:20"], "--goodput is itl:20"),
        (["--goodput", "ttft:-1"], "--goodput is ttft:-1"),
        (["simulate", "llama-2-7b"], "it must be MODEL@GPU"),
        (["--policy", "lifo"], "invalid choice"),
        (["--save-json", "no/such/directory/x"], "no such directory"),
        (["--plot", "x.txt"], ".png"),
    ],
)
def test_bench_refuses_flags_before_it_measures(flags, fault, capsys):
    with pytest.raises(SystemExit):
        parse_args(flags)
    assert fault in capsys.readouterr().err
