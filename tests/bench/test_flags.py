"""Every flag of every subcommand, with every value that is not meant: exit code 2, the flag's
name, and nothing was measured.

The parsers say which flags there are, so that a new one is tried without being named here. What
is legal is in a small table; the oracle is that table.
"""

import importlib
import itertools
from argparse import ArgumentParser

import pytest

import bench
from nanobatch.bench import cli

NEEDED = {"simulate": ["llama-2-7b@h100"], "compare": ["--baseline=hf"], "check": ["1"]}
NEEDED["gpu"] = ["--dry-run"]
NO_NUMBERS = ("x", "", "nan", "-inf")
OUT_OF_RANGE = ("-1", "0", "1e999", "1e-320", "1.5", "999999999", str(10**20))
TEXTS = {"model", "draft_model", "trace", "save_json", "plot", "baseline_python", "simulate"}
TEXTS |= {"output_dir"}
# So that the flag has an effect, and only its value can be wrong.
BESIDE = {
    "burstiness": ["--request-rate=2"], "max_wait": ["--policy=sjf"],
    "num_host_blocks": ["--preemption=swap"], "num_replicas": ["--compare=router"],
    "num_prefixes": ["--prefix-len=5"],
}  # fmt: skip
LEGAL = {
    "request_rate": {"inf", "1e999", "1.5"},
    "burstiness": {"inf", "1e999", "1.5"},
    "goodput": {"1.5", "1e-320", "999999999", str(10**20)},
    "check": {"1.5", "1e-320"},
    "budget": {"1.5"},
    "max_wait": {"0", "1.5", "1e-320"},
    "prefix_len": {"0"},
    "seed": {"0", "-1", "999999999"},
}


class MeasuredError(Exception):
    """A command has begun to measure."""


@pytest.fixture
def stops_before_it_measures(monkeypatch):
    def run_command(args):
        raise MeasuredError

    for name in cli.COMMANDS:
        monkeypatch.setattr(module_of(name), "run_command", run_command)


def module_of(command):
    return importlib.import_module(f"nanobatch.bench.{cli.COMMANDS[command][0]}")


def actions_of(command):
    """What a subcommand takes, flags and positionals, without --help."""
    parser = ArgumentParser(add_help=False)
    module_of(command).add_arguments(parser)
    return parser._actions


def command_line(command, action, value):
    """A command line that is right but for this value."""
    needed, name = NEEDED.get(command, []), action.dest
    if not action.option_strings:
        return [command, value]
    flag = action.option_strings[0]
    given = [flag, f"ttft:{value}"] if name == "goodput" else [f"{flag}={value}"]
    needed = [one for one in needed if not one.startswith(f"{flag}=")]
    return [command, *needed, *given, *BESIDE.get(name, [])]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_number_of_every_flag(command, capsys, stops_before_it_measures):
    for action in actions_of(command):
        name = action.dest
        has_no_value = action.nargs == 0
        if name in TEXTS or has_no_value:
            continue
        shown = action.option_strings[0] if action.option_strings else name
        shown = {"check": "SECONDS"}.get(shown, shown)
        for value in (*NO_NUMBERS, "inf", *OUT_OF_RANGE):
            argv = command_line(command, action, value)
            if value in LEGAL.get(name, ()):
                with pytest.raises(MeasuredError):
                    bench.main(argv)
                continue
            with pytest.raises(SystemExit) as end:
                bench.main(argv)
                pytest.fail(f"{argv} was taken")
            said = capsys.readouterr().err.splitlines()[-1]
            assert end.value.code == 2 and shown in said, (argv, said)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_flags_of_the_other_subcommands_are_unknown(command, capsys, stops_before_it_measures):
    own = {flag for action in actions_of(command) for flag in action.option_strings}
    of_all = itertools.chain.from_iterable(map(actions_of, cli.COMMANDS))
    others = {flag for action in of_all for flag in action.option_strings} - own
    assert others
    for flag in sorted(others):
        with pytest.raises(SystemExit) as end:
            bench.main([command, *NEEDED.get(command, []), f"{flag}=1"])
        assert end.value.code == 2
        assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--num-prompts 1000000 --input-len 1000", "--num-prompts is 1000000"),
        (
            "--num-prompts 300 --input-len bimodal:5:1000000:1",
            "--input-len is bimodal:5:1000000",
        ),
        ("--num-turns 1000 --num-prompts 100", "--num-turns is 1000"),
        ("--num-prefixes 1000000 --prefix-len 200", "--num-prefixes is 1000000"),
        ("--input-len lognormal:3e6:1", "--input-len: "),
        ("--output-len uniform:1:99999999", "--output-len: "),
        ("--output-len uniform:1.5:3", "--output-len: "),
        ("--input-len lognormal:9:1e200", "--input-len: "),
        ("simulate llama-2-7b@h100 --num-blocks 50000", "--num-blocks is 50000; it must be <="),
        ("--max-num-seqs 9 --max-num-batched-tokens 8", "--max-num-batched-tokens is 8"),
    ],
)
def test_what_no_memory_holds(argv, message, capsys, stops_before_it_measures):
    with pytest.raises(SystemExit) as end:
        bench.main(argv.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--output-len 1001", "--output-len 1001.* made for at most 1024"),
        ("--prefix-len 1000 --num-prompts 2", "--prefix-len 1000.* made for at most 1024"),
        ("--num-turns 30 --num-prompts 1", "--num-turns 30.* made for at most 1024"),
        ("--request-rate 1e-6", "--request-rate is 1e-06; .* within 86400"),
        ("speculative --max-tokens 1025", "--max-tokens is 1025; it must be <= "),
        ("simulate llama-2-7b@h100 --output-len 4000", "--output-len 4000.* at most 4096"),
        ("simulate llama-2-7b@l4 --block-size 65536", "--block-size is 65536; it must be <= 1"),
        ("simulate tiny@t4 --num-blocks 9", "--num-blocks is 9: the pool has 144 slots"),
    ],
)
def test_what_the_model_has_no_room_for(argv, message, monkeypatch):
    """Known once the model is; still before anything runs."""
    for name in ("ladder.make_ladder", "simulated.simulate", "speculative.measure"):
        monkeypatch.setattr(
            f"nanobatch.bench.{name}", lambda *args, **more: pytest.fail("measured")
        )
    with pytest.raises(ValueError, match=message):
        bench.main(argv.split())
