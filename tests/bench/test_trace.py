"""Traces: which lines are requests, which are refused by number, and when the first comes.

The oracle is the list of requests that a file is written from, and, for random values, the
conditions that a request must meet.
"""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
from nanobatch.bench import trace
from nanobatch.bench.trace import read_trace
from nanobatch.bench.workload import WorkItem

GOOD = '{"arrival": 0, "prompt": 3, "output_tokens": 1}'
LIMITS = {"vocab_size": 50, "max_model_len": 20, "encode": lambda text: [ord(c) for c in text]}


def line(**fields):
    """A good line with other values, as JSON has them."""
    values = {"arrival": "0", "prompt": "3", "output_tokens": "1"} | fields
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


def write(tmp_path, data):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


def test_a_trace_file(tmp_path):
    lines = [
        {"arrival": 2.5, "prompt": 4, "output_tokens": 3},
        {"arrival": 0, "prompt": [1, 2, 3], "output_tokens": 1},
        {"arrival": 1.0, "prompt": "ab", "output_tokens": 2, "user": "u", "more": [{}, None]},
    ]
    file = write(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n")
    items = read_trace(file, encode=lambda text: list(text.encode()), vocab_size=100)
    assert [i.arrival_time for i in items] == [0.0, 1.0, 2.5]
    assert items[0].prompt_token_ids == [1, 2, 3] and items[1].prompt_token_ids == [97, 98]
    assert len(items[2].prompt_token_ids) == 4 and max(items[2].prompt_token_ids) < 100
    with pytest.raises(ValueError, match="line 3: prompt is text"):
        read_trace(file)


@pytest.mark.parametrize("start", [0, 4, 4.25, 1_790_000_000])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_first_request_comes_at_0(start, order, tmp_path):
    gaps = [0.0, 0.5, 7.25]
    lines = [line(arrival=start + gaps[i], prompt=[i + 1]) for i in order]
    items = read_trace(write(tmp_path, "\n".join(lines)))
    assert items == [WorkItem([i + 1], 1, gap) for i, gap in enumerate(gaps)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \t\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\r\n"])
def test_ends_of_lines(start, end, tmp_path):
    """A string may hold what str.splitlines takes for the end of a line."""
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x7fb", "plain"]
    lines = [json.dumps({"arrival": 0, "prompt": t, "output_tokens": 1}, ensure_ascii=False)
             for t in texts]  # fmt: skip
    file = write(tmp_path, start + end.join(lines).encode())
    items = read_trace(file, encode=lambda t: [ord(c) for c in t], vocab_size=9000)
    assert [i.prompt_token_ids for i in items] == [[ord(c) for c in t] for t in texts]


NESTED = "[" * 100_000 + "]" * 100_000
NEARLY = '{"a": ' * 900 + "1" + "}" * 900  # json can read it; its repr nests too

BAD_LINES = [
    "not json", "[1]", "3", "null", '"x"', "{}", "{", GOOD + GOOD, "\x0c", "\u2028",
    GOOD.replace(" ", "\u00a0", 1), NESTED, '{"a":' * 99_999, "\ufeff" + GOOD,
    '{"arrival": 1}', line(prompt='3, "prompt": 4'), line(more='{"a": 1, "a": 1}'),
    line(more="NaN"), line(more="-Infinity"), line(more="9" * 5000), line(more=NESTED),
]  # fmt: skip
BAD_VALUES = {
    "arrival": ["-1", "-0.5", "NaN", "Infinity", "1e999", "1e308", "1e12", "9" * 400, '"0"',
                '"2024-02-30T25:61:00Z"', "true", "null", "[]", NEARLY],
    "output_tokens": ["0", "-1", "1.0", "1e2", "true", "null", '"1"', "20", "999999999",
                      "9" * 400, "[1]"],
    "prompt": ["0", "-1", "2.0", "true", "null", "{}", "[]", '""', "20", "999999999", "9" * 400,
               "[1.0]", "[1, true]", "[-1]", "[50]", "[1, 999999999]", "[null]", '["a"]',
               "[[1]]", "[NaN]", f"[{'1, ' * 19} 1]", r'"\ud800"', '"a\tb"', '"\u00e9"', NESTED,
               NEARLY, f'"{"!" * 20}"'],
}  # fmt: skip
BAD = {"line": BAD_LINES} | {
    name: [line(**{name: value}) for value in values] for name, values in BAD_VALUES.items()
}


@pytest.mark.parametrize("kind", BAD)
def test_a_line_that_is_wrong_is_named(kind, tmp_path):
    for wrong in BAD[kind]:
        file = write(tmp_path, GOOD + "\n\n" + wrong + "\n" + GOOD)
        with pytest.raises(ValueError, match="trace.jsonl, line 3: ") as refused:
            read_trace(file, **LIMITS)
            pytest.fail(f"{wrong[:200]} was taken")
        assert len(str(refused.value)) < 1000, "a long value is not printed whole"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe" + GOOD.encode("utf-16-le"), GOOD.encode("utf-16"), b'{"\xe9": 1}',
     GOOD.encode() + b"\0", b"\0" * 100, (GOOD + "\r" + GOOD).encode(), bytes(range(256))],
)  # fmt: skip
def test_a_file_that_is_no_utf_8(data, tmp_path):
    with pytest.raises(ValueError, match="trace.jsonl, line 1: "):
        read_trace(write(tmp_path, data))


def test_what_no_memory_holds(tmp_path, monkeypatch):
    """Of a line, of all prompts, of all requests."""
    three = write(tmp_path, f"{GOOD}\n{GOOD}\n{GOOD}")
    for name, most in (("MAX_LINE", len(GOOD)), ("MAX_PROMPT_TOKENS", 8), ("MAX_REQUESTS", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(trace, name, most)
            with pytest.raises(ValueError, match=f"line {1 if name == 'MAX_LINE' else 3}: "):
                read_trace(three)
            patch.setattr(trace, name, most + 1)
            assert len(read_trace(three)) == 3


def test_a_time_that_nobody_waits_for(tmp_path):
    file = write(tmp_path, "\n".join(line(arrival=t) for t in (5, 1e9, 2)))
    with pytest.raises(ValueError, match="line 2: arrival is 1000000000.0"):
        read_trace(file, max_span=1e9 - 3)
    assert len(read_trace(file, max_span=1e9 - 2)) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
IDS = st.lists(st.integers(-1, 51), max_size=21)
FIELDS = {
    "arrival": JSON | st.floats(0, 1e11),
    "prompt": JSON | IDS | st.integers(-1, 21) | st.text("!#", max_size=21),
    "output_tokens": JSON | st.integers(-1, 21),
}


@settings(max_examples=50, deadline=None)
@given(raw=st.fixed_dictionaries({}, optional=FIELDS | {"more": JSON}))
def test_any_values_are_a_request_or_refused(raw, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_text(json.dumps(raw))
    try:
        [item] = read_trace(file, **LIMITS)
    except ValueError as error:
        assert "any.jsonl, line 1: " in str(error)
        return
    ids, num_output = item.prompt_token_ids, item.num_output_tokens
    assert type(num_output) is int and num_output == raw["output_tokens"] >= 1
    assert ids and all(type(token) is int and 0 <= token < 50 for token in ids)
    assert len(ids) + num_output <= 20
    assert item.arrival_time == 0.0 <= raw["arrival"] < math.inf


# ---- in bench.py -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ladder", "simulate tiny@t4 --compare none"])
def test_of_what_use_a_bad_trace_is(command, tmp_path, monkeypatch):
    """Refused by its line, with the limits of the model, before anything runs."""
    for name in ("ladder.make_ladder", "simulated.simulate"):
        monkeypatch.setattr(
            f"nanobatch.bench.{name}", lambda *args, **more: pytest.fail("measured")
        )
    wrong = {
        "prompt has 32000": line(prompt="[32000]"),  # past each vocabulary here
        "at most 1024": line(prompt=[1] * 1000, output_tokens=25),
        "output_tokens is 1024": line(output_tokens=1024),
        "prompt has 1.0": line(prompt=[1.0]),
        "prompt is true|prompt is True": line(prompt="true"),
        "seconds after the first": line(arrival=1e10),
    }
    for message, text in wrong.items():
        file = write(tmp_path, f"{GOOD}\n{text}")
        with pytest.raises(ValueError, match=f"line 2: .*({message})"):
            bench.main([*command.split(), "--trace", str(file)])
            pytest.fail(f"{text} was taken")


def test_a_trace_that_begins_late_loses_no_rate(tmp_path, capsys):
    """The same requests, counted from another start: the same figures, and nobody waits."""
    argv = ["simulate", "tiny@t4", "--compare", "none", "--trace"]
    found = []
    for start in (0, 4, 1_790_000_000):
        lines = [
            line(arrival=start + 0.25 * i, prompt="40", output_tokens="9") for i in range(4)
        ]
        report = bench.main([*argv, str(write(tmp_path, "\n".join(lines)))])
        found.append(report["systems"]["engine"])
        assert "4 requests of a trace within 0.75 s" in capsys.readouterr().out
    assert found[0] == found[1] == found[2]
    assert 0.75 < found[0]["duration"] < 1


def test_the_ladder_does_not_wait_for_a_late_start(tmp_path):
    lines = [line(arrival=2.5 + 0.01 * i, prompt="9", output_tokens="2") for i in range(3)]
    file = write(tmp_path, "\n".join(lines))
    report = bench.main(["--trace", str(file), "--repeat", "1", "--max-num-seqs", "2"])
    for name, figures in report["systems"].items():
        assert 0.02 <= figures["duration"] < 1, name
        assert figures["request_throughput"] == pytest.approx(3 / figures["duration"])
