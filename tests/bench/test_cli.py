"""bench.py's command line: subcommands, flags that are refused, reports, and what runs without
torch. (Each flag with each wrong number is in test_flags.py.)"""

import contextlib
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from nanobatch import RequestMetrics
from nanobatch.bench import cli, ladder, report, simulated
from nanobatch.metrics import summarize

BENCH = Path(bench.__file__)
SIMULATE = "simulate llama-2-7b@h100"


def refused(argv, capsys):
    """What bench.py says of a command line that it refuses, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        bench.main(argv.split() if isinstance(argv, str) else argv)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def nothing_measured(monkeypatch):
    """Fails the test if a command begins to measure."""
    for name, (module, _) in cli.COMMANDS.items():
        where = f"nanobatch.bench.{module}.run_command"
        monkeypatch.setattr(where, lambda args, name=name: pytest.fail(f"{name} measured"))


# ---- subcommands -----------------------------------------------------------------------


def flags_of(command, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main([command, "--help"])
    assert end.value.code == 0
    words = capsys.readouterr().out.replace("[", " ").replace(",", " ").split()
    return {word.strip("]") for word in words if word.startswith("--")}


def test_each_subcommand_has_only_its_own_flags(capsys):
    of = {name: flags_of(name, capsys) for name in cli.COMMANDS}
    assert of["host"] == {"--help", "--save-json"}
    assert of["kernels"] == {"--help", "--dtype", "--device", "--threads", "--save-json"}
    assert of["check"] == {
        "--help",
        "--model",
        "--device",
        "--threads",
        "--seed",
        "--save-json",
    }
    assert of["compare"] == {
        "--help", "--baseline", "--baseline-python", "--workload", "--model", "--dtype",
        "--threads", "--repeat", "--save-json",
    }  # fmt: skip
    assert not of["speculative"] & {"--num-prompts", "--policy", "--goodput", "--plot"}
    only_real = {"--model", "--dtype", "--device", "--threads", "--enforce-eager", "--repeat",
                 "--no-async-scheduling", "--attention-backend"}  # fmt: skip
    only_simulated = {"--compare", "--num-replicas", "--router", "--num-blocks", "--max-tokens"}
    assert only_real <= of["ladder"] and not only_real & of["simulate"]
    assert only_simulated <= of["simulate"] and not only_simulated & of["ladder"]


def test_the_ladder_is_the_default():
    by_name, alone = (
        cli.parse_args(["ladder", "--repeat", "2"]),
        cli.parse_args(["--repeat", "2"]),
    )
    assert vars(by_name) == vars(alone)
    assert vars(cli.parse_args([])) == vars(cli.parse_args(["ladder"]))


def test_help_names_the_subcommands(capsys):
    for argv in (["--help"], ["-h"]):
        with pytest.raises(SystemExit) as end:
            bench.main(argv)
        assert end.value.code == 0
        printed = capsys.readouterr().out
        assert all(f"  {name}" in printed for name in cli.COMMANDS)
    assert "there is no 'laddr'; choose from ladder, simulate" in refused("laddr", capsys)


# ---- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, message",
    [
        # given, and without effect
        ("--num-turns 2 --prefix-len 500", "--prefix-len is 500; it has no effect"),
        ("--num-turns 2 --num-prefixes 3", "--num-prefixes is 3; it has no effect"),
        ("--prefix-len 0 --num-prefixes 3", "--num-prefixes is 3; it has no effect"),
        (f"{SIMULATE} --num-prefixes 3", "--num-prefixes is 3; it has no effect"),
        ("--burstiness 0.5", "--burstiness is 0.5; it has no effect without --request-rate"),
        ("--request-rate inf --burstiness 2", "--burstiness is 2.0; it has no effect"),
        ("--max-wait 1", "--max-wait is 1.0; it has no effect with --policy fcfs"),
        (f"{SIMULATE} --max-wait 1", "--max-wait is 1.0; it has no effect with --policy fcfs"),
        (
            "--num-host-blocks 9",
            "--num-host-blocks is 9; it has no effect without --preemption",
        ),
        (f"{SIMULATE} --num-host-blocks 9", "--num-host-blocks is 9; it has no effect"),
        (f"{SIMULATE} --router least_loaded", "--router is least_loaded; it has no effect"),
        (f"{SIMULATE} --compare policy --policy sjf", "--policy is sjf; it has no effect"),
        (f"{SIMULATE} --compare admission --admission predict", "--admission is predict; it"),
        (f"{SIMULATE} --compare preemption --preemption swap", "--preemption is swap; it"),
        ("speculative ngram --draft-model tiny", "--draft-model is 'tiny'"),
        ("--device cpu --enforce-eager", "--enforce-eager is True; it has no effect on a CPU"),
        (
            "--device cpu --no-async-scheduling",
            "--no-async-scheduling is True; it has no effect",
        ),
        ("compare --baseline hf --baseline hf", "--baseline names hf twice"),
        ("compare --baseline hf --baseline-python hf=a --baseline-python hf=b", "hf twice"),
        ("--goodput ttft:200 ttft:100", "it has a name twice"),
        (f"{SIMULATE} --request-rate 2,2.0", "--request-rate has a rate twice"),
        # no flags of this subcommand
        ("--kernels", "unrecognized arguments: --kernels"),
        ("--max-tokens 9", "unrecognized arguments: --max-tokens"),
        (
            f"{SIMULATE} --attention-backend torch",
            "unrecognized arguments: --attention-backend",
        ),
        ("host --dtype float32", "unrecognized arguments: --dtype"),
        ("--num-prompt 9", "unrecognized arguments: --num-prompt"),  # no abbreviations
        ("compare", "required: --baseline"),
        ("check", "required: SECONDS"),
        ("simulate", "required: MODEL@GPU"),
        # not finite, or out of range
        ("check nan", "SECONDS is nan"),
        ("check inf", "SECONDS is inf"),
        ("check 0", "SECONDS is 0.0"),
        ("--request-rate nan", "--request-rate is nan"),
        ("--request-rate 2 --burstiness nan", "--burstiness is nan"),
        ("--request-rate 2 --burstiness -1", "--burstiness is -1.0"),
        ("--goodput ttft:inf", "--goodput is ttft:inf"),
        ("--goodput ttft:nan", "--goodput is ttft:nan"),
        ("--policy sjf --max-wait nan", "--max-wait is nan"),
        ("--policy sjf --max-wait inf", "--max-wait is inf"),
        ("--input-len lognormal:inf:1", "--input-len: length 'lognormal:inf:1'"),
        (
            "--num-prompts 99999999999",
            "--num-prompts is 99999999999; it must be in [1, 1000000]",
        ),
        ("speculative --max-tokens 0", "--max-tokens is 0; it must be in [1, "),
        ("speculative --max-tokens 1", "--max-tokens is 1; it must be >= 2"),
        ("compare --baseline hf --baseline-python hf=/no/x", "there is no such program"),
        ("speculative --num-speculative-tokens 0", "--num-speculative-tokens is 0"),
        ("speculative --num-speculative-tokens 999", "--num-speculative-tokens is 999"),
        # what contradicts each other, or is not there
        ("--max-num-batched-tokens 8 --max-num-seqs 9", "--max-num-batched-tokens is 8"),
        ("--preemption swap --num-host-blocks 0", "--num-host-blocks is 0"),
        ("simulate llama-9@h100", "model is 'llama-9'"),
        ("simulate llama-2-7b@h9", "gpu is 'h9'"),
        (f"{SIMULATE} --tensor-parallel-size 5", "--tensor-parallel-size is 5"),
        ("--trace /no/such/file", "--trace is /no/such/file; there is no such file"),
        (f"--trace {'t' * 300}", f"--trace is {'t' * 300}; there is no such file"),
        (
            f"--plot {'d' * 300}/x.png",
            f"--plot is {'d' * 300}/x.png; there is no such directory",
        ),
        (
            f"--save-json {'d' * 300}/x.json",
            f"--save-json is {'d' * 300}/x.json; there is no such directory",
        ),
    ],
)
def test_bad_flags_are_refused_by_name(argv, message, capsys, nothing_measured):
    assert message in refused(argv, capsys)


@pytest.mark.parametrize(
    "given", ["--num-prompts 3", "--input-len 5", "--output-len 5", "--prefix-len 4",
              "--num-prefixes 2", "--num-turns 2", "--request-rate 3", "--burstiness 0.5"],
)  # fmt: skip
def test_a_trace_leaves_nothing_to_draw(given, tmp_path, capsys, nothing_measured):
    (tmp_path / "t").write_text("")
    name = given.split()[0]
    for command in ("ladder", SIMULATE):
        said = refused(f"{command} --trace {tmp_path / 't'} {given}", capsys)
        assert f"{name} is" in said and "it has no effect beside --trace" in said


@pytest.mark.parametrize(
    "argv",
    [
        "--num-turns 2",
        "--num-turns 1 --prefix-len 9 --num-prefixes 2",
        "--request-rate 3 --burstiness inf",
        f"{SIMULATE} --compare policy --max-wait 2",
        f"{SIMULATE} --compare preemption --num-host-blocks 9",
        f"{SIMULATE} --num-replicas 2 --router least_loaded --num-turns 2",
        f"{SIMULATE} --request-rate inf,2 --burstiness 2",
        f"{SIMULATE} --policy sjf --max-wait 2 --preemption swap --num-host-blocks 9",
        "--preemption swap",  # the host has as many blocks as the pool
        "--max-num-seqs 300",  # the default budget grows with the slots
    ],
)
def test_what_has_an_effect_is_taken(argv):
    cli.parse_args(argv.split())


def test_a_trace_without_requests(tmp_path):
    (tmp_path / "t").write_text("\n")
    with pytest.raises(ValueError, match="it has no requests"):
        bench.main([*SIMULATE.split(), "--trace", str(tmp_path / "t")])


def test_requests_ask_for_their_whole_output():
    with pytest.raises(ValueError, match="--max-tokens is 9; an output has 20 tokens"):
        bench.main([*SIMULATE.split(), "--output-len", "20", "--max-tokens", "9"])


# ---- reports ---------------------------------------------------------------------------


HAVE_PLOT = ("ladder", "simulate")
NEEDED = {"simulate": [SIMULATE.split()[1]], "compare": ["--baseline", "hf"], "check": ["1"]}
REPORTS = [(name, "--save-json") for name in cli.COMMANDS if name != "gpu"]  # has a folder
REPORTS += [(name, "--plot") for name in HAVE_PLOT]


def no_place(tmp_path, why):
    """A file's name, without its suffix, where no report can be written."""
    if why == "directory":
        (tmp_path / "folder.png").mkdir()
        return "folder"
    if why == "FIFO":
        os.mkfifo(tmp_path / "fifo.png")
        return "fifo"
    return {"no directory": "no/x", "no right": "/proc/x", "too long": "x" * 300}.get(why, "x")


@contextlib.contextmanager
def full_disk(room=0):
    """No file of this process grows beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command, flag", REPORTS)
@pytest.mark.parametrize(
    "why, message",
    [
        ("directory", "it must be a regular file"),
        ("FIFO", "it must be a regular file"),
        ("no directory", "there is no such directory"),
        ("no right", "it cannot be written"),
        ("too long", "it cannot be written: File name too long"),
        ("full disk", "it cannot be written: File too large"),
    ],
)
def test_a_report_that_cannot_be_written(
    command, flag, why, message, tmp_path, monkeypatch, capsys, nothing_measured
):
    monkeypatch.chdir(tmp_path)
    file = no_place(tmp_path, why) + ".png"  # JSON may be in a file of any name
    has_fifo = why == "FIFO"
    reader = os.open(file, os.O_RDWR) if has_fifo else None  # so that no write waits for one
    with full_disk() if why == "full disk" else contextlib.nullcontext():
        said = refused([command, *NEEDED.get(command, []), flag, file], capsys)
    if has_fifo:
        os.close(reader)
    assert f"{flag} is {file}; {message}" in said
    assert not (tmp_path / "x.png").exists()


def test_the_second_figure_is_looked_at_too(tmp_path, monkeypatch, capsys, nothing_measured):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y_timeline.png").mkdir()
    said = refused("--plot y.png", capsys)
    assert "--plot's second figure is y_timeline.png; it must be a regular file" in said


@pytest.mark.parametrize(
    "argv",
    [
        "--save-json t.png --trace t.png", "--plot t.png --trace t.png",
        "--plot x.png --save-json x.png", "--plot x.png --save-json ./x_timeline.png",
        "--plot link.png --save-json x.png", f"{SIMULATE} --plot x.png --save-json x.png",
        f"{SIMULATE} --save-json link.png --plot x.png",
    ],
)  # fmt: skip
def test_one_report_does_not_replace_another(
    argv, tmp_path, monkeypatch, capsys, nothing_measured
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.png").write_text("a trace")
    (tmp_path / "link.png").symlink_to("x.png")
    assert "is the same file" in refused(argv, capsys)
    assert (tmp_path / "t.png").read_text() == "a trace" and not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("what", ["directory", "fifo"])
def test_a_trace_that_is_no_file(what, tmp_path, capsys, nothing_measured):
    file = tmp_path / "t"
    file.mkdir() if what == "directory" else os.mkfifo(file)
    for command in ("ladder", SIMULATE):
        said = refused(f"{command} --trace {file}", capsys)
        assert f"--trace is {file}; it must be a regular file" in said


def test_a_look_whether_it_can_be_written_changes_nothing(tmp_path):
    old, new, link = (tmp_path / name for name in ("old.json", "new.json", "link.json"))
    old.write_text("before")
    link.symlink_to(tmp_path / "target.json")
    for file in (old, new, link):
        cli.parse_args(["host", "--save-json", str(file)])
    assert old.read_text() == "before" and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "old.json"]


@pytest.fixture
def measures_nothing(monkeypatch):
    """Each command that draws has its figures without measuring."""
    figures = summarize([RequestMetrics(0.0, 0.0, 1.0, 2.0, num_output_tokens=2)], 2.0)
    requests = [vars(RequestMetrics(0.0, 0.0, 1.0, 2.0))]
    found = {
        "systems": {"static": figures | {"slot_utilization": 1.0}},
        "requests": {"static": requests, "continuous": requests},
    }
    for module in (ladder, simulated):
        monkeypatch.setattr(module, "run_command", lambda args: dict(found))


class Drawn:
    """In place of nanobatch.viz and of its figures: each is a file of 100,000 bytes."""

    def __getattr__(self, name):
        return lambda *args, **more: self

    def savefig(self, file, dpi):
        file.write_bytes(bytes(100_000))


def no_font():
    raise OSError("no font")


@pytest.mark.parametrize("command", ["ladder", SIMULATE])
@pytest.mark.parametrize("why", ["no font", "File too large"])
def test_the_json_is_there_though_the_figure_failed(
    command, why, tmp_path, monkeypatch, measures_nothing
):
    file, plot = tmp_path / "b.json", tmp_path / "b.png"
    plot.write_text("an old figure")
    argv = [*command.split(), "--save-json", str(file), "--plot", str(plot)]
    if why == "no font":
        monkeypatch.setattr(Drawn, "savefig", lambda self, file, dpi: no_font())
    with full_disk(8192), pytest.raises(OSError, match=why):  # room for the JSON
        cli.main(argv, Drawn)
    assert json.loads(file.read_text())["systems"]["static"]["completed"] == 1
    assert plot.read_text() == "an old figure"
    assert sorted(os.listdir(tmp_path)) == ["b.json", "b.png"], "nothing is left over"


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    file, link = tmp_path / "b.json", tmp_path / "link.json"
    link.symlink_to(file)
    report.save({"a": 1}, str(file))
    file.chmod(0o640)
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        report.save({"a": "long" * 1000}, str(file))
    assert json.loads(file.read_text()) == {"a": 1}
    report.save({"a": 2}, str(link))
    assert link.is_symlink() and json.loads(file.read_text()) == {"a": 2}
    assert file.stat().st_mode & 0o777 == 0o640
    assert len(os.listdir(tmp_path)) == 2


def test_numbers_that_json_lacks(tmp_path):
    file = tmp_path / "b.json"
    inf, nan = math.inf, math.nan
    report.save(
        {"a": [1.5, inf, (nan, True)], "b": {"c": -inf, "d": None, "e": "x"}}, str(file)
    )
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert found == {"a": [1.5, "inf", [None, True]], "b": {"c": "-inf", "d": None, "e": "x"}}


def test_json_has_no_infinity(tmp_path):
    file = tmp_path / "s.json"
    flags = ["--num-prompts", "4", "--request-rate", "inf,5", "--burstiness", "inf"]
    bench.main([*SIMULATE.split(), "--compare", "none", *flags, "--save-json", str(file)])
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert found["args"]["request_rate"] == ["inf", 5.0]
    assert found["args"]["burstiness"] == "inf"
    assert [s["request_rate"] for s in found["systems"].values()] == ["inf", 5.0]


# ---- without torch ---------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "triton", "transformers", "matplotlib"):
    sys.modules[name] = None
import bench
from nanobatch.bench import host
host.NUM_REQUESTS = (4,)
host.NUM_OUTPUT_TOKENS, host.NUM_WAITING = (10,), (10,)
try:
    bench.main(sys.argv[1:])
finally:
    assert all(sys.modules[name] is None for name in ("torch", "numpy"))
"""


def without_torch(*argv):
    command = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=BENCH.parent)


def test_simulate_runs_without_torch(tmp_path):
    trace, file = tmp_path / "t.jsonl", tmp_path / "s.json"
    trace.write_text('{"arrival": 0, "prompt": 5, "output_tokens": 2}\n' * 3)
    for flags in (
        ["--compare", "ladder", "--num-prompts", "5"],
        ["--num-replicas", "2", "--num-prompts", "5"],
        ["--trace", str(trace), "--save-json", str(file)],
    ):
        done = without_torch(*SIMULATE.split(), *flags)
        assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["systems"]["static"]["completed"] == 3


def test_host_runs_without_torch(tmp_path):
    done = without_torch("host", "--save-json", str(tmp_path / "h.json"))
    assert done.returncode == 0, done.stderr
    assert "pack: not measured; torch is not installed" in done.stdout
    saved = json.loads((tmp_path / "h.json").read_text())
    assert all(cost["schedule"] > 0 and cost["pack"] is None for cost in saved["host"])
    assert [row["num_output_tokens"] for row in saved["long_outputs"]] == [10]
    assert [set(row) for row in saved["long_queue"]] == [{"num_waiting", "fcfs", "sjf"}]


def test_no_plot_without_matplotlib(tmp_path):
    done = without_torch(*SIMULATE.split(), "--plot", str(tmp_path / "x.png"))
    assert done.returncode == 2 and done.stdout == ""
    assert "--plot is" in done.stderr and "it needs matplotlib" in done.stderr


def test_what_needs_torch_says_so():
    for argv in ([], ["kernels"], ["check", "1"]):
        done = without_torch(*argv)
        assert done.returncode == 1
        assert "needs torch, which is not installed" in done.stderr
        assert "Traceback" not in done.stderr
