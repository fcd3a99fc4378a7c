"""bench.py gpu: its parts at tiny sizes, parts that fail beside others that go on, the report.

What a card would say cannot be tested here; that all of it runs, and that faults are told, can.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench
from nanobatch import EngineConfig
from nanobatch.bench import cli
from nanobatch.bench.gpu import command, engines, parts, suite, summary
from nanobatch.bench.gpu import sweep as sweeping
from nanobatch.bench.gpu.published import nano_vllm_requests
from nanobatch.bench.gpu.summary import Outcome
from nanobatch.bench.hardware import Hardware
from nanobatch.kernels.launch_config import CHIPS, choose_launch_config
from nanobatch.utils.device import resolve_device

NAMES = list(parts.PARTS)


def calls_once(calls, device, min_seconds=0.0):
    """In place of seconds_of."""
    start = time.perf_counter()
    calls[0]()
    return time.perf_counter() - start


@pytest.fixture
def measured_at_once(monkeypatch):
    """The hardware's limits are made up, numbers are float32, and each call is timed once."""
    monkeypatch.setattr("nanobatch.utils.device.cpu_has", lambda feature: False)
    for module in (parts, engines):
        monkeypatch.setattr(module, "measure_hardware", lambda *of: Hardware(1e9, 1e12))
    monkeypatch.setattr("nanobatch.bench.kernels.seconds_of", calls_once)
    monkeypatch.setattr("nanobatch.bench.kernels.num_copies", lambda num_bytes: 1)
    monkeypatch.setattr(sweeping, "seconds_of", calls_once)


def rows_of(name):
    part = parts.PARTS[name]
    return list(part.measure(**part.tiny))


# ---- the parts -------------------------------------------------------------------------


def test_kernels_part(measured_at_once):
    copy, product, decode, prefill = rows_of("kernels")
    assert (copy["rate"], product["rate"]) == (1.0, 1.0)  # GB/s, TFLOP/s
    # keys and values of 2 sequences, 32 positions, 3 heads of 64, 4 bytes each
    gigabytes = 2 * 2 * 32 * 3 * 64 * 4 / 1e9
    assert decode["rate"] * decode["us"] / 1e6 == pytest.approx(gigabytes)
    assert decode["share"] == pytest.approx(decode["rate"]) and decode["SDPA"] > 0
    assert prefill["unit"] == "TFLOP/s" and "error" not in prefill


def test_a_kernel_that_fails_fails_its_part_after_the_others(
    measured_at_once, monkeypatch, tmp_path
):
    def fails(q_THD, *args, **more):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("nanobatch.bench.attention_systems.paged_attention", fails)
    file = tmp_path / "k.json"
    with pytest.raises(SystemExit, match="2 of 4 rows are errors"):
        parts.measure("kernels", file, is_dry=True)
    found = json.loads(file.read_text())
    errors = [row.get("error") for row in found["rows"]]
    assert found["failure"] == "2 of 4 rows are errors"
    assert errors == [None, None] + ["RuntimeError: out of resource: shared memory"] * 2


def test_decode_part_against_bytes_counted_by_hand(measured_at_once):
    (row,) = rows_of("decode")
    # Tiny: 4 layers, hidden 192, 6 heads and 2 KV heads of 32, MLP 256, 258 tokens; float32
    layer = 192 * (6 + 2 * 2) * 32 + 6 * 32 * 192 + 3 * 192 * 256
    weights = 4 * layer + 258 * 192
    # prompts of 26, and from 3 to 10 outputs in the cache while it is timed: 32 on average;
    # each of the 3 reads 32 and itself, and writes itself
    cache = 3 * (33 + 1) * 4 * 2 * 2 * 32
    assert row["floor ms"] == pytest.approx(4 * (weights + cache) / 1e9 * 1e3, rel=0.01)
    assert row["step / floor"] == pytest.approx(row["step ms"] / row["floor ms"])
    assert row["output tokens/s"] == pytest.approx(3 / row["step ms"] * 1e3)
    assert (row["graphs"], row["model"]) == (False, "tiny")


def test_a_step_without_a_token_for_each_is_no_decode_step():
    """A pool too small for all: some wait, and a figure would be of another batch."""
    loaded = engines.load_model("dummy:tiny", EngineConfig())
    config = EngineConfig(
        num_blocks=9, max_num_seqs=3, max_model_len=48, enable_prefix_caching=False
    )
    runner = engines.build_runner(loaded.model, config)
    with pytest.raises(RuntimeError, match="8 steps of 3 requests gave .* tokens, not 24"):
        engines.time_steps(engines.LLMEngine(runner.config, runner), 46, 8)


def test_ladder_part(measured_at_once):
    rows = rows_of("ladder")
    wanted = ["static", "continuous", "+ chunked prefill", "+ prefix cache", "sequential"]
    assert [row["rung"] for row in rows] == wanted
    assert [row["requests"] for row in rows] == [5, 5, 5, 5, 2]
    assert all(row["greedy tokens"] == "the same in all" for row in rows)
    assert all(row["requests/s"] > 0 and row["P50 s"] > 0 for row in rows)


def test_rungs_that_disagree_show_no_speed(measured_at_once, monkeypatch):
    """Also the sequential one, which runs some of the requests."""
    measure = engines.rungs.measure

    def other_tokens(chosen, *args):
        runs, said = measure(chosen, *args)
        if "sequential" in chosen:
            runs["sequential"][0].outputs[1][0] += 1
        return runs, said

    monkeypatch.setattr(engines.rungs, "measure", other_tokens)
    rows, part = [], parts.PARTS["ladder"]
    with pytest.raises(SystemExit, match="request 1: the first rung has the tokens"):
        for row in part.measure(**part.tiny):
            rows.append(row["rung"])
    assert rows == ["static", "continuous", "+ chunked prefill", "+ prefix cache"]


def test_the_workload_is_the_one_that_was_published():
    """nano-vllm's README says 133,966 output tokens; those who run its bench.py find 142,827
    of prompts."""
    prompts, output_lens = nano_vllm_requests(256, 1024)
    assert sum(output_lens) == 133_966 and sum(map(len, prompts)) == 142_827
    assert len(prompts) == len(output_lens) == 256


def test_published_part():
    ours, *others = rows_of("published")
    prompts, output_lens = nano_vllm_requests(4, 8, 2)
    assert ours["output tokens"] == sum(output_lens)
    assert ours["prompt tokens"] == sum(map(len, prompts))
    assert ours["output tokens/s"] == pytest.approx(sum(output_lens) / ours["seconds"])
    assert [row["source"] for row in others].count("this run") == 0


def test_start_up_part(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (row,) = rows_of("start-up")
    assert row["compiled kernels"] == "none"
    assert row["start-up s"] == pytest.approx(row["load s"] + row["runner s"])
    assert row["first request s"] > 0 and "graphs MiB" not in row


def test_a_smaller_model_where_the_first_does_not_fit(monkeypatch):
    """8B in 16 bits: 16.1 GB of weights, and 128 KiB of cache a token."""
    names = ["llama-3.1-8b", "qwen3-0.6b", "tiny"]

    def chosen(gib, num_tokens):
        monkeypatch.setattr(engines, "free_bytes", lambda device: gib * 2**30)
        return engines.model_that_fits(names, num_tokens, "cuda", torch.bfloat16)

    assert chosen(139, 64 * 1152) == "llama-3.1-8b"
    assert chosen(30, 64 * 1152) == "llama-3.1-8b"  # 15 + 9 GiB, a tenth more, and 3
    assert chosen(29, 64 * 1152) == "qwen3-0.6b"
    assert chosen(29, 1024) == "llama-3.1-8b"
    assert chosen(1, 64 * 1152) == "tiny"


# ---- the sweep -------------------------------------------------------------------------


@pytest.mark.kernels
def test_sweep_part(measured_at_once):
    """Real launches agree with the default's result."""
    decode, prefill = rows_of("sweep")
    assert (decode["failed"], prefill["failed"]) == (0, 0)
    for row in (decode, prefill):
        times = [one["us"] for one in row["tried"]]
        assert row["timed"] == len(times) and row["best us"] == min(times)
        assert row["chosen us"] > 0


GRID = {"block_m": (16, 64), "tile": (32, 64), "num_stages": (2, 3)}
TASK = sweeping.Task((8, 2, 16), 4, 1, 40)


def cost(launch):
    """Made-up seconds: least at tile 32, 3 stages, 4 splits."""
    return 1 + (launch.tile - 32) / 64 + (3 - launch.num_stages) + abs(4 - launch.num_splits)


@pytest.fixture
def made_up_times(monkeypatch):
    """Launches take what cost() says; those of 64 rows fail, one way or another."""
    sizes = {"block_m": 16, "tile": 64, "num_splits": 2, "num_warps": 4, "num_stages": 2}
    default = choose_launch_config(4, 4, 1, *TASK.shape, 4, CHIPS[90])
    default = TASK.with_sizes(default, **sizes, max_registers=None)
    monkeypatch.setattr(sweeping.Task, "default", lambda *of: default)
    last = []

    def attend(x, launch):
        launch = default if launch is None else launch
        if launch.block_m == 64 and launch.tile == 32:
            raise RuntimeError("out of resource: shared memory\nand more")
        last[:] = [launch]
        return torch.full((2, 2), 1.5 if launch.block_m == 64 else 1.0)

    def seconds_of(calls, device, min_seconds):
        calls[0]()
        return cost(last[0])

    monkeypatch.setattr(sweeping, "attend", attend)
    monkeypatch.setattr(sweeping, "seconds_of", seconds_of)


def test_the_best_is_found_and_what_fails_is_noted(made_up_times):
    options = {"compilers": None, "min_seconds": 0.0}
    one = sweeping.Sweep(TASK, torch.float32, torch.device("cpu"), **options)
    row = one.run(GRID)
    assert row["chosen us"] == pytest.approx(cost(one.default) * 1e6)
    # tile 32 and 3 stages; then 1, 4 and 8 splits beside the default's 2, and registers
    best = {"block_m": 16, "tile": 32, "num_warps": 4, "num_stages": 3, "num_splits": 4}
    assert (
        row["best"] == ", ".join(f"{k} {v}" for k, v in best.items()) + ", max_registers None"
    )
    assert row["best us"] == pytest.approx(1e6)
    assert (row["timed"], row["failed"]) == (4 + 3 + 3, 4)
    errors = [one["error"] for one in one.tried if "error" in one]
    assert sorted(set(errors)) == [
        "AssertionError: Tensor-likes are not close!",
        "RuntimeError: out of resource: shared memory",
    ]


@pytest.mark.parametrize("query_len", [1, 10, 500])
def test_a_launch_of_other_sizes_is_what_the_kernel_would_choose(query_len):
    """The sizes alone say the rest, as choose_launch_config says it on other chips."""
    task = sweeping.Task((8, 2, 64), 3, query_len, 600)
    sizes = (3 * query_len, 3, query_len, *task.shape, 2)
    launches = {
        choose_launch_config(*sizes, CHIPS[chip], max_rows)
        for chip in (75, 90)
        for max_rows in (16, 32, 128)
    }
    assert len(launches) > 1
    for wanted in launches:
        for start in launches:
            assert task.with_sizes(start, **sweeping.shown(wanted)) == wanted


@pytest.mark.kernels
def test_a_launch_that_was_made_once_can_be_captured(monkeypatch):
    """The second time nothing comes from the host: a graph may record it."""
    device = resolve_device("auto")
    task = sweeping.Task((2, 1, 16), 1, 1, 20)
    x, launch = task.inputs(torch.float32, device, 0), task.default(4, device)
    launch = task.with_sizes(launch, tile=16)
    once = sweeping.attend(x, launch)
    for name in ("from_numpy", "tensor"):
        monkeypatch.setattr(torch, name, lambda *args, **more: pytest.fail("copied"))
    assert torch.equal(sweeping.attend(x, launch), once)


# ---- tests in several processes --------------------------------------------------------

SOME_TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu
def is_alone(): return os.path.exists("second")
@pytest.mark.parametrize("i", range(4))
def test_fine(i): pass
def test_wrong(): assert 1 == 2
def test_skipped(): pytest.skip("not here")
def test_needs_to_be_alone(): assert is_alone()
def test_crashes_among_others():
    if not is_alone():
        open("second", "w").close()
        os._exit(3)
def test_after_the_crash(): pass
"""


def test_only_what_fails_alone_too_has_failed(tmp_path, capfd):
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    (tmp_path / "test_other.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "test_unmarked.py").write_text("def test_unmarked(): assert False\n")
    rows = []
    with pytest.raises(SystemExit, match="1 tests failed"):
        for row in suite.run_tests(["."], 1, 60.0, root=tmp_path):
            rows.append(row)
    counts = {"passed": 7, "failed": 1, "unfinished": 0, "skipped": 1, "not collected": 1}
    assert rows[0] == counts | {"processes": 1, "run again alone": 4}
    told = {row["test"]: row["why"] for row in rows[1:]}
    assert told["test_some.py::test_wrong"] == "assert 1 == 2"
    assert "there_is_no_such_module" in told["test_other.py"] and len(told) == 2


def test_tests_that_hang_leave_the_results_of_the_others(tmp_path, capfd):
    hangs = "def test_hangs(): time.sleep(60)\n@pytest.mark.gpu\ndef test_after(): pass\n"
    mark = "import pytest, time\n@pytest.mark.gpu\ndef test_fine(): pass\n@pytest.mark.gpu\n"
    (tmp_path / "test_some.py").write_text(mark + hangs)
    end = time.monotonic() + 4  # a start takes a second or two on a busy machine
    found = suite.run_processes(tmp_path, ["."], 1, end)
    assert time.monotonic() < end + 5
    outcomes = {name.partition("::")[2]: outcome for name, (outcome, _) in found.items()}
    wanted = {"test_fine": "passed", "test_hangs": "unfinished", "test_after": "unfinished"}
    assert outcomes == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_every_test_is_in_one_share(count, tmp_path):
    class Item:
        def __init__(self, name):
            self.nodeid = name

    class Session:
        pass

    names, seen = [f"t::{i}" for i in range(10)], []
    for index in range(count):
        session = Session()
        session.items = [Item(name) for name in names]
        file = tmp_path / str(index)
        suite.Recorder(file, (index, count)).pytest_collection_finish(session)
        seen += [item.nodeid for item in session.items]
        assert list(suite.read_results(file)) == [item.nodeid for item in session.items]
    assert sorted(seen) == names


def test_tests_that_cannot_run_say_so(tmp_path):
    with pytest.raises(SystemExit, match="has no tests"):
        next(suite.run_tests(["tests"], 2, 60.0, root=tmp_path))


# ---- processes -------------------------------------------------------------------------


def test_a_process_that_hangs_is_ended_with_those_it_started(tmp_path):
    child = "import time; time.sleep(60)"
    script = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
time.sleep(60)
"""
    with (tmp_path / "log").open("w") as log:
        status = command.run_process([sys.executable, "-c", script], 1.0, stdout=log)
    assert status is None
    pid = int((tmp_path / "log").read_text())
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(50):  # a zombie, until init has taken it
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"{pid} still runs")


def test_a_process_that_ends_gives_its_status():
    assert command.run_process([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


ENDS = {  # by part: what its process leaves behind and returns
    "tests": ({"failure": "2 tests failed", "rows": [{"failed": 2}]}, 1),
    "check": ({"rows": [{"differences": 0}]}, 0),
    "kernels": ({"rows": [{"kernel": "decode", "us": 12.5}]}, -11),
    "decode": ({"rows": [{"step ms": 7.25}]}, None),
    "ladder": (None, 1),
}


def test_no_part_stops_another(tmp_path, monkeypatch, capsys):
    """One finds a fault, one crashes, one hangs, one writes nothing, one has no time."""
    clock = iter([0.0, *[100.0 * i for i in range(1, 99)]])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock) / 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limits = {}

    def run_process(argv, limit, stdout, **options):
        name, file = argv[3:5]
        assert argv[5:] == [] and options["cwd"] == suite.ROOT
        found, status = ENDS[name]
        limits[name] = limit
        print("its output", file=stdout)
        if found is not None:
            found = {"machine": {"gpu": "A CARD"}, "failure": None} | found
            with open(file, "w") as out:
                json.dump(found, out)
        return status

    monkeypatch.setattr(command, "run_process", run_process)
    folder = tmp_path / "visit"
    with pytest.raises(SystemExit) as end:
        names = ",".join([*ENDS, "sweep"])
        bench.main(["gpu", "--output-dir", str(folder), "--parts", names, "--budget", "553.5"])
    assert end.value.code == "not all is well: tests, kernels, decode, ladder"
    saved = json.loads((folder / "gpu.json").read_text())
    assert saved["args"]["dry_run"] is False
    saved = saved["parts"]
    states = {name: (one["state"], one["why"]) for name, one in saved.items()}
    assert states == {
        "tests": ("failed", "2 tests failed"),
        "check": ("done", ""),
        "kernels": ("failed", "exit status -11"),
        "decode": ("stopped", f"not done after {limits['decode']:.0f} s"),
        "ladder": ("failed", "exit status 1"),
        "sweep": ("skipped", "it needs 45 s; 20 s were left"),
    }
    assert limits["tests"] == parts.PARTS["tests"].limit
    assert saved["kernels"]["rows"] == [{"kernel": "decode", "us": 12.5}]
    report = (folder / "gpu.md").read_text()
    for text in ("gpu A CARD", "| kernels | failed |", "| decode | 12.5 |", "| 7.25 |"):
        assert text in report
    assert "dry run" not in report
    assert (folder / "kernels.log").read_text() == "its output\n"
    assert "kernels" in capsys.readouterr().out


def test_a_part_s_limit_is_at_most_what_is_left(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(command, "run_process", lambda argv, limit, **more: given.append(limit))
    least = parts.PARTS["kernels"].least
    for left in (1000.0, least + 1, least - 1, -5.0):
        command.run_part("kernels", tmp_path, left, "", True)
    assert given == [parts.PARTS["kernels"].limit, least + 1]
    tests = parts.PARTS["tests"]
    assert tests.full["seconds"] < tests.least, "it ends by itself, with what it has"


def test_a_part_that_fails_says_why_in_its_file(tmp_path, monkeypatch):
    """Each row is there at once, should the process be killed; the text is that of the exit or
    of the error."""
    file = tmp_path / "p.json"

    def measure(what):
        yield {"row": 1}
        assert json.loads(file.read_text())["rows"] == [{"row": 1}]
        raise what

    for error, told in ((SystemExit("2 differ"), "2 differ"), (KeyError("x"), "KeyError: 'x'")):
        part = replace(parts.PARTS["check"], measure=measure, tiny={"what": error})
        monkeypatch.setitem(parts.PARTS, "check", part)
        with pytest.raises(type(error)):
            parts.measure("check", file, is_dry=True)
        found = json.loads(file.read_text())
        assert found["rows"] == [{"row": 1}] and found["failure"] == told
        assert found["machine"]["torch"] == torch.__version__


# ---- targets ---------------------------------------------------------------------------


def met(**rows):
    return [row["met"] for row in summary.target_rows(rows)]


def test_targets():
    assert met() == ["not measured"] * 9
    kernel = {"shape": "llama-3-8b"}
    decode = kernel | {"kernel": "decode", "size": "64 x 4096"}
    prefill = kernel | {"kernel": "prefill", "size": "8 x 2048"}
    step = {"model": "llama-3.1-8b", "sequences": 64, "context": 1024, "graphs": True}
    rungs = [
        {"model": "llama-2-7b", "rung": "static", "requests/s": 2.0, "P50 s": 4.0},
        {"model": "llama-2-7b", "rung": "continuous", "requests/s": 5.0, "P50 s": 2.5},
    ]
    speed = {"engine": "nanobatch", "model": "qwen3-0.6b", "output tokens/s": 1280.0}
    found = met(
        kernels=[decode | {"share": 0.85}, prefill | {"share": 0.44}],
        decode=[step | {"graphs": False, "step / floor": 9.0}, step | {"step / floor": 1.3}],
        ladder=rungs,
        published=[speed | {"card": "NVIDIA GeForce RTX 4070 Laptop GPU"}],
    )
    assert found[:5] == ["yes", "no", "yes", "yes", "no"]  # 2.5 / 4 is above 0.5
    assert found[5:] == ["no", "yes", "another card", "another card"]  # 90% of 1434 and 1362
    failed = decode | {"error": "out of resource"}
    smaller = [{**one, "model": "qwen3-0.6b"} for one in rungs]
    assert met(kernels=[failed], ladder=smaller)[:4] == ["not measured"] * 4


def test_what_compiling_takes():
    def row(kernels, start, first):
        return {"compiled kernels": kernels, "start-up s": start, "first request s": first}

    first, again = [row("none", 40.0, 2.0)], [row("kept", 15.0, 1.5)]
    of = {"start-up": first, "start-up again": again}
    assert summary.compile_seconds(of) == 25.5
    outcomes = {name: Outcome("done", "", 1.0, rows) for name, rows in of.items()}
    assert "takes 25.5 s more" in summary.markdown(outcomes, is_dry=False)
    for missing in ({"start-up": first}, {"start-up": first, "start-up again": first}):
        assert summary.compile_seconds(missing) is None


def test_markdown_has_one_line_for_each_row():
    rows = [
        {"a": 0.123456, "share": 0.5},
        {"a": 12345.6, "b": "x|y\nz"},
        {"tried": [1], "c": True},
    ]
    assert summary.table(rows) == [
        "| a | share | b | c |",
        "| ---: | ---: | --- | --- |",
        "| 0.1235 | 50.0% |  |  |",
        "| 12,346 |  | x\\|y |  |",
        "|  |  |  | yes |",
    ]
    report = summary.markdown({"check": Outcome("done", "", 3.0, rows)}, is_dry=True)
    assert "these figures say nothing" in report and "| check | done | 3 |  |" in report


# ---- the command line ------------------------------------------------------------------


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as end:
        cli.main(["gpu", *map(str, argv)])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run_process", lambda *args, **more: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    dry = ("--dry-run", "--output-dir")
    assert "--output-dir is file; it must be a directory" in refused(capsys, *dry, "file")
    assert "there is no such directory" in refused(capsys, *dry, "no/where")
    assert "--output-dir is /proc/gpu; it cannot be written" in refused(
        capsys, *dry, "/proc/gpu"
    )
    assert "--output-dir is /proc/gpu.json; it cannot" in refused(capsys, *dry, "/proc")
    assert "--parts is kernels,all; each" in refused(
        capsys, "--dry-run", "--parts", "kernels,all"
    )
    assert "--parts is check,check" in refused(capsys, "--dry-run", "--parts", "check,check")
    assert "--budget is 0.5" in refused(capsys, "--dry-run", "--budget", "0.5")
    with pytest.raises(ValueError, match="sees no CUDA device to measure"):
        cli.main(["gpu", "--output-dir", "new"])
    args = cli.parse_args(["gpu", "--dry-run", "--output-dir", "new"])
    assert args.parts == NAMES
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a look changes nothing"


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path):
    """As on a card, in processes of their own, but for the sizes."""
    argv = [sys.executable, bench.__file__, "gpu", "--dry-run", "--output-dir", "visit"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads((tmp_path / "visit" / "gpu.json").read_text())
    assert list(saved["parts"]) == NAMES and saved["failure"] is None
    for name, one in saved["parts"].items():
        assert one["state"] == "done" and one["rows"], name
        assert (tmp_path / "visit" / f"{name.replace(' ', '-')}.log").exists()
    report = (tmp_path / "visit" / "gpu.md").read_text()
    assert all(f"\n## {name}\n" in report for name in NAMES)
