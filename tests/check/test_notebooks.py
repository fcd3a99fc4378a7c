"""The notebooks as they are committed, their student versions, and grading.

That they run is checked by executing them (`python -m pytest --nbmake notebooks/*.ipynb`); that
the checks refuse wrong answers, in test_chapter1.py to test_chapter8.py. That students can
solve them and instructors grade them takes minutes: `python -m pytest -m slow tests/check`.
"""

import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from nanobatch import check

nbformat = pytest.importorskip("nbformat")
from nanobatch.check.student import (  # noqa: E402
    public_version,
    solved_version,
    student_version,
)

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
FILES = sorted(NOTEBOOKS.glob("*.ipynb"))
NAMES = [file.name for file in FILES]
PACKAGE = Path(check.__file__).parent.parent
MAX_LINES = 15  # but for imports, which ruff sorts one to a line
PATHS = re.compile(r"(?<![\w.])/(?:work|root|tmp|home/\w+|usr)/[\w./-]*")


def read(file):
    return nbformat.read(file, as_version=4)


def grader_of(cell):
    return cell.metadata.get("nbgrader", {})


def text_of(cell):
    """All that a cell's outputs say."""
    said = []
    for output in cell.get("outputs", []):
        said += [output.get("text", ""), *output.get("data", {}).values()]
    return "\n".join(str(x) for x in said if not isinstance(x, bytes))


def test_there_are_eight():
    assert [name[:2] for name in NAMES] == [f"0{i}" for i in range(1, 9)]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_what_every_notebook_has(file):
    notebook = read(file)
    nbformat.validate(notebook)
    assert file.stat().st_size < 1_500_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for phrase in ("After this chapter you can", "Predict", "What you should see", "Exercise"):
        assert phrase in prose, phrase
    taught = [cell for cell in code[2:] if not grader_of(cell)]
    long = [c.source[:60] for c in taught if c.source.count("\n") + 1 > MAX_LINES]
    assert len(long) <= 1, f"cells of more than {MAX_LINES} lines: {long}"
    assert any("image/png" in o.get("data", {}) for c in code for o in c.outputs), "no figure"
    for cell in code:
        assert cell.execution_count is not None, f"not run: {cell.source[:60]}"
        for output in cell.outputs:
            assert output.output_type != "error" and output.get("name") != "stderr", cell.source
        assert not PATHS.search(text_of(cell)), f"a path of a machine: {cell.source[:60]}"
        assert not PATHS.search(cell.source)
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "not run once, from top to bottom"


def setup_of(file):
    """The source of the first code cell, which installs the package where it is missing."""
    return next(cell.source for cell in read(file).cells if cell.cell_type == "code")


def test_every_notebook_begins_with_the_same_setup():
    student = [NOTEBOOKS / "student" / name for name in NAMES]
    assert len({setup_of(file) for file in [*FILES, *student]}) == 1


@pytest.mark.parametrize("there", ["package", "nothing", "folder"])
def test_the_setup_installs_only_where_the_package_is_missing(
    there, tmp_path, monkeypatch, capsys
):
    """A folder of that name, as `git clone` leaves one on Colab, is no package."""
    if there != "nothing":
        (tmp_path / "nanobatch").mkdir()
    if there == "package":
        (tmp_path / "nanobatch" / "__init__.py").touch()
    commands = []
    monkeypatch.delitem(sys.modules, "nanobatch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # not those of editable packages
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: commands.append((a, k)))
    exec(setup_of(FILES[0]), {})
    said = capsys.readouterr().out
    if there == "package":
        assert (commands, said) == ([], "")
        return
    [([command], options)] = commands
    assert options == {"check": True}  # a cell that fails, not one that goes on
    assert command[:5] == [sys.executable, "-m", "pip", "install", "-q"]
    assert re.fullmatch(r"git\+https://github\.com/\w+/\w+", command[5]) and not command[6:]
    assert "Internet" in said  # off on Kaggle, until it is switched on


def lines_of(text):
    """Its lines without indentation, none of them empty."""
    return "".join(f"\n{line.strip()}" for line in text.splitlines() if line.strip()) + "\n"


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_source_that_a_cell_printed_is_the_source_as_it_is(file):
    source = "".join(lines_of(path.read_text()) for path in PACKAGE.rglob("*.py"))
    num_found = 0
    for cell in read(file).cells:
        if not re.search(r"getsource|^show\(", cell.source, flags=re.M):
            continue
        # Between empty lines, dots and headings, either source from end to end or none.
        for part in re.split(r"\n\s*\n|^\.{3}$|^\w+:$", text_of(cell), flags=re.M):
            lines = lines_of(part)
            is_source = any(f"\n{line}\n" in source for line in lines.split("\n") if line)
            assert not is_source or lines in source, f"run again:\n{part}"
            num_found += is_source
    assert num_found > 0


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_exercises_can_be_graded(file):
    graders = [grader_of(cell) for cell in read(file).cells if grader_of(cell)]
    chapter = int(file.name[:2])
    answers = [g for g in graders if g["solution"]]
    graded = [g for g in graders if g["grade"]]
    assert 2 <= len(answers) <= 5
    ids = [g["grade_id"] for g in graders]
    assert len(set(ids)) == len(ids)
    assert all(g["points"] > 0 for g in graded)
    written = [g for g in graded if g["solution"]]
    assert written, "one exercise needs thought, not code"
    for g in answers:
        assert re.fullmatch(rf"ex{chapter}_\d", g["grade_id"])
        if g not in written:
            assert f"{g['grade_id']}_check" in ids
            assert callable(getattr(check, g["grade_id"]))


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_student_versions_are_those_that_are_committed(file):
    committed = read(NOTEBOOKS / "student" / file.name)
    made = public_version(read(file), file.name)
    assert [c.source for c in committed.cells] == [c.source for c in made.cells]
    assert [c.metadata for c in committed.cells] == [c.metadata for c in made.cells]
    text = "\n".join(c.source for c in committed.cells)
    assert "BEGIN SOLUTION" not in text and "NotImplementedError" in text
    assert all(not c.get("outputs") for c in committed.cells)


def run(notebook):
    """Execute all cells, also after errors; the grade ids (or sources) of those that failed."""
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.from_dict(notebook)
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    client = nbclient.NotebookClient(
        notebook, timeout=300, allow_errors=True, resources=resources
    )
    client.execute()
    failed = []
    for cell in notebook.cells:
        if any(o.output_type == "error" for o in cell.get("outputs", [])):
            failed.append(grader_of(cell).get("grade_id", cell.source))
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_students_fail_at_the_graded_cells_until_they_solve_them(file):
    notebook = read(file)
    student = student_version(notebook)
    graded = [
        grader_of(cell)["grade_id"]
        for cell in notebook.cells
        if grader_of(cell).get("grade") and cell.cell_type == "code"
    ]
    assert run(student) == graded
    assert run(solved_version(student, notebook)) == []


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_nbgrader_makes_validates_and_grades_them(file, tmp_path):
    """An instructor's commands: one student who solved it, one who did not."""
    pytest.importorskip("nbgrader")

    def nbgrader(*command):
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", *command],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    source = tmp_path / "source" / "chapter" / file.name
    source.parent.mkdir(parents=True)
    source.write_bytes(file.read_bytes())
    (tmp_path / "nbgrader_config.py").write_text(
        "c = get_config()\nc.CourseDirectory.course_id = 'course'\n"
        "c.ExecutePreprocessor.timeout = 300\nc.Execute.timeout = 300\n"
    )
    nbgrader("generate_assignment", "chapter", "--create")
    released = tmp_path / "release" / "chapter" / file.name
    student = read(released)
    for name, answer in (
        ("solver", solved_version(student, read(file))),
        ("idler", student),
    ):
        submitted = tmp_path / "submitted" / name / "chapter" / file.name
        submitted.parent.mkdir(parents=True)
        nbformat.write(answer, submitted)
    said = nbgrader("validate", str(tmp_path / "submitted" / "solver" / "chapter" / file.name))
    assert "Success" in said
    nbgrader("autograde", "chapter", "--create")
    from nbgrader.api import Gradebook

    points = {
        grader_of(c)["grade_id"]: grader_of(c)["points"]
        for c in read(file).cells
        if grader_of(c).get("grade") and c.cell_type == "code"
    }
    with Gradebook(f"sqlite:///{tmp_path}/gradebook.db") as gradebook:
        for name, is_solved in (("solver", True), ("idler", False)):
            grades = gradebook.find_submission("chapter", name).notebooks[0].grades
            auto = {g.name: g.auto_score for g in grades if g.name in points}
            assert auto == (points if is_solved else dict.fromkeys(points, 0.0))


def test_the_gallery_draws_every_figure(tmp_path):
    from nanobatch.viz.__main__ import examples

    found = examples()
    assert len(found) >= 8
    for name, example in found.items():
        file = tmp_path / f"{name}.png"
        example().savefig(file, dpi=60)
        assert file.stat().st_size > 3000, name


def test_no_attribute_is_no_exercise():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = check.nothing


def test_chapter_6_says_which_numpy_triton_s_interpreter_needs(monkeypatch):
    """It raises before the first kernel, whose own error would name a function of NumPy."""
    pytest.importorskip("nanobatch.paged_attention_kernel")  # as it is, for other tests
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the cells set for good
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.4.6")
    namespace = {}
    cells = [cell.source for cell in read(FILES[5]).cells if cell.cell_type == "code"]
    with pytest.raises(ValueError, match="numpy is 2.4.6; it must be < 2.4 for"):
        for source in cells[:3]:
            exec(re.sub("^%.*", "", source, flags=re.M), namespace)
