"""The tests of a GPU, in several processes at once, so that kernels are compiled in parallel.

    process 0    test 0, 4, 8 ...    all use one cache of compiled kernels
    process 1    test 1, 5, 9 ...
    ...
    again        those that did not pass, one after another in one process

Tests of memory and of speed see what the other processes do, and one that crashes takes the
rest of its process along. So only what does not pass alone either has failed.

Run as a script it is one of the processes. Needs pytest, no plugin and no torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nanobatch

ROOT = Path(nanobatch.__file__).resolve().parent.parent
MARKER = "gpu"
UNFINISHED = "its process ended before it did"


class Recorder:
    """pytest's hooks: keeps a share of the tests, and writes a line of JSON for each event.

    Args:
        file: to write to.
        share: (index, of how many).
        only: the ids of tests to keep; empty: all.
    """

    def __init__(self, file: Path, share: tuple[int, int], only: Sequence[str] = ()):
        self._out = file.open("w")
        self._share, self._only = share, set(only)

    def _write(self, test: str, outcome: str, why: str = "") -> None:
        print(json.dumps([test, outcome, why]), file=self._out, flush=True)

    def pytest_collection_finish(self, session) -> None:
        """After `-m` has left its tests out."""
        index, count = self._share
        chosen = [i for i in session.items if not self._only or i.nodeid in self._only]
        session.items[:] = chosen[index::count]
        for item in session.items:
            self._write(item.nodeid, "unfinished", UNFINISHED)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self._write(report.nodeid, "not collected", _reason(report))

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", _reason(report))
        elif report.skipped:
            self._write(report.nodeid, "skipped")
        elif report.when == "call":
            self._write(report.nodeid, "passed")


def _reason(report) -> str:
    """The line of a report that says most."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    if crash is None:  # of a module that cannot be imported: the last line names the error
        lines = lines[::-1]
    return lines[0].removeprefix("E").strip() if lines else ""


def read_results(file: Path) -> dict[str, tuple[str, str]]:
    """(outcome, why) by test, of what a process wrote before it ended. A test that failed in
    one of its phases has failed."""
    results: dict[str, tuple[str, str]] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        test, outcome, why = json.loads(line)
        if results.get(test, ("",))[0] != "failed":
            results[test] = outcome, why
    return results


def run_processes(
    root: Path,
    paths: Sequence[str],
    num_processes: int,
    end: float,
    only: Sequence[str] = (),
) -> dict[str, tuple[str, str]]:
    """Run the marked tests of some paths below root; (outcome, why) by test.

    end: when time.monotonic() is past it, the processes are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / "only.json"
        chosen.write_text(json.dumps(list(only)))
        files = [Path(folder) / f"{i}.jsonl" for i in range(num_processes)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, f"{i}/{num_processes}", file, chosen,
                 *paths],
                cwd=root,
                # xdist's workers would share out the tests once more.
                env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"),
            )
            for i, file in enumerate(files)
        ]  # fmt: skip
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        results: dict[str, tuple[str, str]] = {}
        for file in files:
            results |= read_results(file)
    return results


def environment(**more: str) -> dict[str, str]:
    """Of a process that finds this package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


def run_tests(
    paths: Sequence[str],
    num_processes: int,
    seconds: float,
    needs_passes: bool = True,
    root: Path = ROOT,
) -> Iterator[dict]:
    """A row of counts, then one for each test that failed.

    Args:
        paths: below root.
        seconds: for all; a quarter is for those that run again.
        needs_passes: nothing passed is a failure.

    Raises:
        SystemExit: a test failed, or they cannot be run here.
    """
    if importlib.util.find_spec("pytest") is None:
        sys.exit("pytest is not installed: the tests were not run")
    if not all((root / path).exists() for path in paths):
        sys.exit(f"{root} has no {' '.join(paths)}: the tests were not run")
    end = time.monotonic() + seconds
    results = run_processes(root, paths, num_processes, end - seconds / 4)
    again = [t for t, (outcome, _) in results.items() if outcome in ("failed", "unfinished")]
    if again:
        files = sorted({test.partition("::")[0] for test in again})
        alone = run_processes(root, files, 1, end, again)
        results |= {t: found for t, found in alone.items() if found[0] != "unfinished"}
    outcomes = [outcome for outcome, _ in results.values()]
    names = ("passed", "failed", "unfinished", "skipped", "not collected")
    counts = {name: outcomes.count(name) for name in names}
    yield counts | {"processes": num_processes, "run again alone": len(again)}
    for test, (outcome, why) in results.items():
        if outcome in ("failed", "unfinished", "not collected"):
            yield {"test": test, "outcome": outcome, "why": why}
    num_wrong = counts["failed"] + counts["unfinished"]
    if num_wrong:
        sys.exit(f"{num_wrong} tests failed")
    if needs_passes and not counts["passed"]:
        sys.exit("no test was run")


def main() -> int:
    """One of the processes: INDEX/COUNT, the file to write, the file of chosen ids, paths."""
    import pytest

    share, file, chosen, *paths = sys.argv[1:]
    index, count = map(int, share.split("/"))
    recorder = Recorder(Path(file), (index, count), json.loads(Path(chosen).read_text()))
    options = ["-m", MARKER, "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    return pytest.main([*options, *paths], plugins=[recorder])


if __name__ == "__main__":
    sys.exit(main())
