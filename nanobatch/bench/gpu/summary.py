"""The report of `bench.py gpu` as Markdown: targets, what became of each part, its rows.

A target is met, not met, or not measured: because its part did not run, or because the card had
no room for the model that it is about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nanobatch.bench.gpu.published import PUBLISHED

NEAR = 0.9  # of a published speed: within 10%
HIDDEN = {"tried"}  # columns for gpu.json only
SHARES = {"share", "slots in use", "of roofline"}


class Outcome(NamedTuple):
    """What became of a part.

    state: "done"; "failed", which includes what it found wrong; "stopped" at its limit;
    "skipped". why: of the last three. rows: what it measured; machine: where.
    """

    state: str
    why: str
    seconds: float
    rows: Sequence[Mapping] = ()
    machine: Mapping | None = None

    @property
    def said(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


def load_outcome(status: int | None, limit: float, seconds: float, file: Path) -> Outcome:
    """The outcome of a part's process.

    Args:
        status: of its exit; None if it was ended at its limit (seconds).
        seconds: that it took.
        file: what it wrote (parts.measure), if it came that far.
    """
    found = json.loads(file.read_text()) if file.exists() else {}
    state, why = "done", ""
    if status is None:
        state, why = "stopped", f"not done after {limit:.0f} s"
    elif status != 0:
        state, why = "failed", found.get("failure") or f"exit status {status}"
    return Outcome(state, why, seconds, found.get("rows", ()), found.get("machine"))


# ------------------------------------------------------------------------------- targets


class Target(NamedTuple):
    """What is aimed at. value: from the rows by part; None: not measured."""

    what: str
    sign: str
    aim: float
    value: Callable[[Mapping[str, Sequence[Mapping]]], float | None]

    def is_met(self, value: float) -> bool:
        """Whether a value is as good as what is aimed at, or better."""
        return value >= self.aim if self.sign == ">=" else value <= self.aim


def find(rows: Iterable[Mapping], column: str, **wanted) -> float | None:
    """The column's value in the first row with these values that has it."""
    for row in rows:
        if column in row and all(row.get(name) == value for name, value in wanted.items()):
            return row[column]
    return None


def _share(kernel: str, size: str) -> Callable[[Mapping], float | None]:
    where = {"kernel": kernel, "shape": "llama-3-8b", "size": size}
    return lambda of: find(of.get("kernels", ()), "share", **where)


def _decode(of: Mapping[str, Sequence[Mapping]]) -> float | None:
    where = {"model": "llama-3.1-8b", "sequences": 64, "context": 1024, "graphs": True}
    return find(of.get("decode", ()), "step / floor", **where)


def _ladder(column: str) -> Callable[[Mapping], float | None]:
    def value(of: Mapping[str, Sequence[Mapping]]) -> float | None:
        found = [
            find(of.get("ladder", ()), column, model="llama-2-7b", rung=rung)
            for rung in ("continuous", "static")
        ]
        return None if None in found else found[0] / found[1]

    return value


TARGETS = (
    Target("decode attention, 64 x 4096: share of the copy bandwidth", ">=", 0.85,
           _share("decode", "64 x 4096")),
    Target("prefill attention, 8 x 2048: share of the matrix rate", ">=", 0.45,
           _share("prefill", "8 x 2048")),
    Target("Llama-3.1-8B, a decode step at 64 x 1024: time / read floor", "<=", 1.35, _decode),
    Target("Llama-2-7B, continuous / static: requests/s", ">=", 2.0, _ladder("requests/s")),
    Target("Llama-2-7B, continuous / static: P50 latency", "<=", 0.5, _ladder("P50 s")),
)  # fmt: skip


def target_rows(of: Mapping[str, Sequence[Mapping]]) -> list[dict]:
    """A row for each target, and for each published speed: one of another card proves nothing.

    Args:
        of: rows by part.
    """
    rows = []
    for target in TARGETS:
        value = target.value(of)
        met = "yes" if value is not None and target.is_met(value) else "no"
        met = "not measured" if value is None else met
        wanted = f"{target.sign} {target.aim:g}"
        rows.append({"target": target.what, "wanted": wanted, "measured": value, "met": met})
    published = of.get("published", ())
    ours = {"engine": "nanobatch", "model": "qwen3-0.6b"}
    speed = find(published, "output tokens/s", **ours)
    card = find(published, "card", **ours) or ""
    for one in PUBLISHED:
        met = "not measured"
        if speed is not None:
            met = "yes" if speed >= NEAR * one.tokens_per_second else "no"
            met = met if one.card in card else "another card"
        rows.append(
            {
                "target": f"output tokens/s of {one.engine} on {one.card}",
                "wanted": f">= {cell('', NEAR * one.tokens_per_second)}",
                "measured": speed,
                "met": met,
            }
        )
    return rows


def compile_seconds(of: Mapping[str, Sequence[Mapping]]) -> float | None:
    """What compiling adds to a first start, its first request included; None: not measured."""
    seconds = []
    for part, kernels in (("start-up", "none"), ("start-up again", "kept")):
        for column in ("start-up s", "first request s"):
            where = {"compiled kernels": kernels}
            seconds.append(find(of.get(part, ()), column, **where))
    return None if None in seconds else sum(seconds[:2]) - sum(seconds[2:])


# ------------------------------------------------------------------------------- Markdown


def markdown(outcomes: Mapping[str, Outcome], is_dry: bool) -> str:
    """The report."""
    machine = next((one.machine for one in outcomes.values() if one.machine), {})
    lines = ["# bench.py gpu", ""]
    if is_dry:
        lines += ["**A dry run with tiny sizes: these figures say nothing.**", ""]
    lines += [", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    rows = {name: one.rows for name, one in outcomes.items()}
    lines += table(target_rows(rows))
    if (seconds := compile_seconds(rows)) is not None:
        lines += ["", f"A first start takes {seconds:.1f} s more than the next: it compiles."]
    lines += ["", "## The parts", ""]
    lines += table(
        [
            {"part": name, "state": one.state, "seconds": round(one.seconds), "why": one.why}
            for name, one in outcomes.items()
        ]
    )
    for name, one in outcomes.items():
        if one.rows:
            lines += ["", f"## {name}", "", *table(one.rows)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping]) -> list[str]:
    """Lines of a table with all columns of the rows, in the order of their first appearance."""
    columns = [c for c in dict.fromkeys(c for row in rows for c in row) if c not in HIDDEN]
    lines = [columns, ["---:" if _has_numbers(rows, column) else "---" for column in columns]]
    lines += [[cell(column, row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _has_numbers(rows: Sequence[Mapping], column: str) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return all(isinstance(value, (int, float)) and value is not True for value in values)


def cell(column: str, value: object) -> str:
    """A value as it is shown: one line, four digits, shares in percent."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        large = abs(value) >= 1000
        return f"{value:.1%}" if column in SHARES else f"{value:{',.0f' if large else '.4g'}}"
    text = str(value).strip()
    first = text.splitlines()[0] if text else ""
    return first.replace("|", "\\|")
