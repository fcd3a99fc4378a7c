"""The READMEs and mutations.py: every name in them exists, and nothing is left out."""

import json
import re
import shlex
import sys

import pytest
from mutations import MUTATIONS, ROOT
from packaging.version import Version

from nanobatch.bench import cli
from nanobatch.models.families import ARCHITECTURES

TESTS = ROOT / "tests"
README = (TESTS / "README.md").read_text()
PAGES = [
    "README.md",
    "nanobatch/README.md",
    "nanobatch/bench/README.md",
    "notebooks/README.md",
    "tests/README.md",
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATH = re.compile(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|md|ipynb|c|h|txt|toml|cff|png)|/)")
TO_BE_WRITTEN = {"offline.py", "online.py", "script.py"}  # by the reader
STANDS_FOR = {
    "MODEL@GPU": "llama-2-7b@a100-80gb",
    "MODEL": "tiny",
    "SECONDS": "1",
    "VENV/bin/python": sys.executable,
}


def rows_of(heading):
    """{number: cells} of the table under a heading."""
    part = README.split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if "|" in line]
    return {int(cells[0]): cells for cells in lines if cells[0].isdigit()}


def test_each_invariant_has_its_tests():
    rows = rows_of("## Invariants")
    assert sorted(rows) == list(range(1, 18))
    for number, cells in rows.items():
        for file in re.findall(r"`([\w/]+\.py)`", cells[-1]):
            assert (TESTS / file).exists(), (number, file)


def test_each_file_of_tests_is_named():
    chapters = {f"check/test_chapter{i}.py" for i in range(1, 9)}
    files = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")} - chapters
    assert {file for file in files if file not in README} == set()
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", README))
    assert named <= files | chapters


def test_the_oldest_versions_that_are_run_are_the_stated_bounds():
    """What pip is told in tests/README.md, against pyproject.toml and requirements.txt."""
    stated = (ROOT / "pyproject.toml").read_text() + (ROOT / "requirements.txt").read_text()
    bounds = dict(re.findall(r"^[ \"]*([\w-]+)>=([\d.]+)", stated, re.M))
    [listing] = re.findall(r"oldest/bin/pip install (.*?)\n\n", README, re.S)
    listed = dict(re.findall(r"([\w-]+)==([\d.]+)", listing))
    of_package = set(re.findall(r'^ +"([\w-]+)>=', stated, re.M))
    assert of_package - {"setuptools"} <= listed.keys() and len(of_package) > 6
    for name, version in listed.items():
        assert Version(version) == Version(bounds[name]), name


def test_the_table_of_architectures_is_the_code_s():
    table = [f"| `{name}` | {what} |" for name, what in ARCHITECTURES.items()]
    lines = (ROOT / "nanobatch/README.md").read_text().splitlines()
    found = [line for line in lines if "ForCausalLM" in line]
    assert found == table


@pytest.mark.parametrize("page", PAGES)
def test_each_path_exists(page):
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", text)
    in_backticks = [re.split(r"[: ]", name)[0] for name in re.findall(r"`([^`\n]+)`", text)]
    in_trees = re.findall(r"^ {4,}[a-z_./ ]*?(?=  |$)", text, flags=re.M)
    names = in_backticks + [name for line in in_trees for name in line.split()]
    paths = set(links) | {name for name in names if PATH.fullmatch(name)} - TO_BE_WRITTEN
    folders = [(ROOT / page).parent, ROOT, ROOT / "nanobatch"]
    missing = [path for path in paths if not any((f / path).exists() for f in folders)]
    assert missing == []
    assert paths


def commands_of(text):
    """The command lines of bench.py in a text: lines of code, and what is in backticks."""
    text = re.sub(r"\\\n\s*", " ", text)  # a command that goes on in the next line
    at_start = r"^(?: {4})?(?:torchrun [^\n]*|python )bench\.py(.*?)(?:#.*|\s{3,}.*)?$"
    in_backticks = r"`(?:torchrun [^`]*|python )bench\.py((?:\s[^`]*)?)`"
    found = re.findall(at_start, text, flags=re.M) + re.findall(in_backticks, text)
    return [re.sub(r"\s+", " ", line).strip() for line in found]


@pytest.mark.parametrize("page", [*PAGES, *(f"notebooks/{n.name}" for n in NOTEBOOKS)])
def test_each_command_line_of_bench_is_accepted(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    for command in commands_of(text):
        if command.endswith("--help"):
            continue
        for name, example in STANDS_FOR.items():
            command = re.sub(rf"(?<!\w){name}(?!\w)", example, command)
        cli.parse_args(shlex.split(command))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_what_a_recap_points_to_exists(file):
    cells = json.loads(file.read_text())["cells"]
    recap = next(c["source"] for c in cells if "## Recap\n" in c["source"])
    found = re.findall(r"`([\w/]+\.py): ([\w.]+)[^`]*`", "".join(recap))
    assert found
    for path, name in found:
        source = (ROOT / "nanobatch" / path).read_text()
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), (path, name)


def test_each_fault_has_its_tests():
    rows = rows_of("## Faults that real engines have had")
    assert len(rows) > 60 and sorted(rows) == list(range(1, len(rows) + 1))
    for number, cells in rows.items():
        file = ""
        for name in re.findall(r"`([\w/]+(?:\.py)?)`", cells[-1]):
            if name.endswith(".py"):
                file = (TESTS / name).read_text()
            else:
                assert f"\ndef test_{name}(" in file, f"fault {number}: no test_{name}"


def test_the_example_of_a_policy_prints_what_its_page_says(capsys):
    text = (ROOT / "nanobatch/bench/README.md").read_text().split("## Your own policy", 1)[1]
    exec(re.search(r"```python\n(.*?)```", text, flags=re.S).group(1), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(f"`{line}`" in text for line in printed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_has_one_place(name):
    mutation = MUTATIONS[name]
    assert (ROOT / "nanobatch" / mutation.file).read_text().count(mutation.old) == 1
    assert all((ROOT / file).exists() for file in mutation.tests.split())
