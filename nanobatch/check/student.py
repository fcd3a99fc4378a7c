"""Make the student versions of the notebooks with nbgrader's preprocessors.

    python -m nanobatch.check.student notebooks notebooks/student

Solutions become stubs, checks are locked and get a checksum, outputs are cleared. This is what
`nbgrader generate_assignment` does, without a course directory or a gradebook. Never edit the
files it writes: a test compares them with the notebooks.

Source: nbgrader's GenerateAssignment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode


def student_version(notebook: NotebookNode) -> NotebookNode:
    """A copy of the notebook without solutions and outputs."""
    from nbgrader.preprocessors import ClearOutput, ClearSolutions, ComputeChecksums, LockCells

    student, resources = nbformat.from_dict(notebook), {}
    for step in (ClearSolutions, LockCells, ComputeChecksums, ClearOutput):
        student, resources = step().preprocess(student, resources)
    return student


def solved_version(student: NotebookNode, notebook: NotebookNode) -> NotebookNode:
    """A student version with the solutions of the notebook put back."""
    answers = {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("solution")
    }
    solved = nbformat.from_dict(student)
    for cell in solved.cells:
        grader = cell.metadata.get("nbgrader", {})
        if grader.get("solution"):
            cell.source = answers[grader["grade_id"]]
    return solved


def main() -> None:
    """Write the student version of every notebook in one folder into another."""
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.ipynb")):
        nbformat.write(student_version(nbformat.read(file, as_version=4)), target / file.name)


if __name__ == "__main__":
    main()
