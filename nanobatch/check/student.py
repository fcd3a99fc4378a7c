"""Student versions of the notebooks, by nbgrader's own preprocessors.

    python -m nanobatch.check.student notebooks notebooks/student

Solutions are replaced by stubs, checks are locked and get a checksum, outputs are cleared: what
`nbgrader generate_assignment` does, without a course directory or a gradebook. The files it
writes are never edited; a test holds them against the notebooks they come from.

Source: nbgrader's GenerateAssignment.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode


def student_version(notebook: NotebookNode) -> NotebookNode:
    """A copy without solutions and outputs."""
    from nbgrader.preprocessors import ClearOutput, ClearSolutions, ComputeChecksums, LockCells

    student, resources = nbformat.from_dict(notebook), {}
    for step in (ClearSolutions, LockCells, ComputeChecksums, ClearOutput):
        student, resources = step().preprocess(student, resources)
    return student


def solved_version(student: NotebookNode, notebook: NotebookNode) -> NotebookNode:
    """A student's copy with the solutions of the notebook put back."""
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
    """Write the student version of every notebook of a folder into another."""
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.ipynb")):
        nbformat.write(student_version(nbformat.read(file, as_version=4)), target / file.name)


if __name__ == "__main__":
    main()
