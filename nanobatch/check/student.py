"""Make the student versions of the notebooks with nbgrader's preprocessors.

    python -m nanobatch.check.student notebooks notebooks/student

Solutions become stubs, checks are locked and get a checksum, outputs are cleared. This is what
`nbgrader generate_assignment` does, without a course directory or a gradebook. What it writes
also has badges, which open it on Colab and Kaggle. Never edit the files it writes: a test
compares them with the notebooks.

Source: nbgrader's GenerateAssignment.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

COLAB = "https://colab.research.google.com"
KAGGLE = "https://kaggle.com"


def badges(url: str) -> str:
    """Markdown: two pictures that open a notebook of a GitHub repository, given its page."""
    on_colab = url.replace("https://github.com", f"{COLAB}/github")
    on_kaggle = f"{KAGGLE}/kernels/welcome?src={url}"
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({on_colab})\n"
        f"[![Open in Kaggle]({KAGGLE}/static/images/open-in-kaggle.svg)]({on_kaggle})"
    )


def public_version(notebook: NotebookNode, name: str) -> NotebookNode:
    """The student version as it is published: with badges that open it, under its title.

    It lies in notebooks/student/ of the repository that its first code cell installs from.
    """
    public = student_version(notebook)
    setup = next(cell.source for cell in public.cells if cell.cell_type == "code")
    repository = re.search(r'^REPOSITORY = "(.+)"$', setup, flags=re.M).group(1)
    title, text = public.cells[0].source.split("\n", 1)
    url = f"{repository}/blob/main/notebooks/student/{name}"
    public.cells[0].source = f"{title}\n\n{badges(url)}\n{text}"
    return public


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
    """Write the public student version of every notebook in one folder into another."""
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.ipynb")):
        public = public_version(nbformat.read(file, as_version=4), file.name)
        nbformat.write(public, target / file.name)


if __name__ == "__main__":
    main()
