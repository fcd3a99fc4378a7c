"""bench.py's command line: subcommands, flags that are refused, and what runs without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from nanobatch.bench import cli, host, ladder, simulated

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
    for module in (ladder, simulated, host):
        monkeypatch.setattr(
            module, "run_command", lambda *args, **more: pytest.fail("measured")
        )


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
                 "--attention-backend"}  # fmt: skip
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
        ("speculative ngram --draft-model tiny", "draft_model is 'tiny'"),
        ("--device cpu --enforce-eager", "--enforce-eager is True; it has no effect on a CPU"),
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
        ("--policy sjf --max-wait nan", "max_wait is nan"),
        ("--policy sjf --max-wait inf", "max_wait is inf"),
        ("--input-len lognormal:inf:1", "--input-len: length 'lognormal:inf:1'"),
        ("--num-prompts 99999999999", "--num-prompts is 99999999999; it must be <="),
        ("speculative --max-tokens 0", "--max-tokens is 0; it must be >= 1"),
        ("speculative --max-tokens 1", "--max-tokens is 1; it must be >= 2"),
        ("compare --baseline hf --baseline-python hf=/no/x", "there is no such program"),
        ("speculative --num-speculative-tokens 0", "--num-speculative-tokens is 0"),
        ("speculative --num-speculative-tokens 999", "num_speculative_tokens is 999"),
        # what contradicts each other, or is not there
        ("--max-num-batched-tokens 8 --max-num-seqs 9", "max_num_batched_tokens is 8"),
        ("--preemption swap", "num_host_blocks is 0"),
        ("simulate llama-9@h100", "model is 'llama-9'"),
        ("simulate llama-2-7b@h9", "gpu is 'h9'"),
        (f"{SIMULATE} --tensor-parallel-size 5", "tensor_parallel_size is 5"),
        ("--trace /no/such/file", "--trace is /no/such/file; there is no such file"),
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


@pytest.mark.parametrize("command", ["ladder", SIMULATE, "host"])
@pytest.mark.parametrize(
    "file, why",
    [
        (".", "it cannot be written: Is a directory"),
        ("no/such/x.json", "there is no such directory"),
        ("/proc/x.json", "it cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written(
    command, file, why, tmp_path, monkeypatch, capsys, nothing_measured
):
    monkeypatch.chdir(tmp_path)
    assert f"--save-json is {file}; {why}" in refused(f"{command} --save-json {file}", capsys)
    if command != "host":
        (tmp_path / "folder.png").mkdir()
        assert "--plot is folder.png; it cannot" in refused(
            f"{command} --plot folder.png", capsys
        )
        assert "no such directory" in refused(f"{command} --plot no/x.png", capsys)
        (tmp_path / "y_timeline.png").mkdir()
    if command == "ladder":
        assert "--plot is y_timeline.png; it" in refused(f"{command} --plot y.png", capsys)


def test_a_look_whether_it_can_be_written_changes_nothing(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("before")
    for file in (old, new):
        cli.parse_args(["host", "--save-json", str(file)])
    assert old.read_text() == "before" and not new.exists()


def test_json_has_no_infinity(tmp_path):
    file = tmp_path / "s.json"
    flags = ["--num-prompts", "4", "--request-rate", "inf,5", "--burstiness", "inf"]
    bench.main([*SIMULATE.split(), "--compare", "none", *flags, "--save-json", str(file)])
    report = json.loads(file.read_text())
    assert report["args"]["request_rate"] == ["inf", 5.0]
    assert report["args"]["burstiness"] == "inf"
    assert [s["request_rate"] for s in report["systems"].values()] == ["inf", 5.0]


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
