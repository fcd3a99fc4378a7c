"""The READMEs and mutations.py: every name in them exists, and nothing is left out."""

import re

import pytest
from mutations import MUTATIONS, ROOT

from nanobatch.models.families import ARCHITECTURES

TESTS = ROOT / "tests"
README = (TESTS / "README.md").read_text()


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


def test_the_table_of_architectures_is_the_code_s():
    table = [f"| `{name}` | {what} |" for name, what in ARCHITECTURES.items()]
    found = [
        line for line in (ROOT / "README.md").read_text().splitlines() if "ForCausalLM" in line
    ]
    assert found == table


def test_each_fault_has_its_tests():
    rows = rows_of("## Faults that real engines have had")
    assert sorted(rows) == list(range(1, 41))
    for number, cells in rows.items():
        file = ""
        for name in re.findall(r"`([\w/]+(?:\.py)?)`", cells[-1]):
            if name.endswith(".py"):
                file = (TESTS / name).read_text()
            else:
                assert f"\ndef test_{name}(" in file, f"fault {number}: no test_{name}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_has_one_place(name):
    mutation = MUTATIONS[name]
    assert (ROOT / "nanobatch" / mutation.file).read_text().count(mutation.old) == 1
    assert all((ROOT / file).exists() for file in mutation.tests.split())
