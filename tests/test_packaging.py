"""Installing: a wheel is complete, the bounds admit what others have, links lead here.

A wheel serves the bundled model where there is no repository. `pip install -e .` replaces
nothing that Colab and Kaggle bring. Every copy of the repository's address is the same.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nanobatch import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
NEEDED_TO_BUILD = ("pyproject.toml", "README.md", "LICENSE")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
# What is installed there in 2026; Triton comes with torch.
PLATFORMS = {
    "colab": {"python": "3.13.0", "torch": "2.11.0+cu128", "numpy": "2.0.2",
              "transformers": "5.0.0"},
    "kaggle": {"torch": "2.10.0+cu128"},
}  # fmt: skip
# What the package reads at run time: modules, C, headers, the bundled model.
KINDS = {".py", ".c", ".h", ".json", ".safetensors", ""}
SERVE = """
import nanobatch
from nanobatch import LLM, SamplingParams
[out] = LLM("tiny", dtype="float32").generate("Once upon", SamplingParams(temperature=0))
print(nanobatch.__file__)
print(out.text)
"""


def bounds():
    """{name: Requirement} of pyproject.toml."""
    [listed] = re.findall(r"^dependencies = (\[.*?^\])", PYPROJECT, re.M | re.S)
    requirements = map(Requirement, ast.literal_eval(listed))
    return {requirement.name: requirement for requirement in requirements}


def repository():
    [url] = re.findall(r'^Repository = "(.*)"$', PYPROJECT, re.M)
    return url


def setup_cell():
    """The source of the notebooks' first code cell, the same in all (test_notebooks.py)."""
    cells = json.loads(NOTEBOOKS[0].read_text())["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))


def run(*command, cwd, **variables):
    env = os.environ | {key: str(value) for key, value in variables.items()}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since building leaves files beside the sources."""
    pytest.importorskip("setuptools", minversion="70.1")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanobatch", copy / "nanobatch", ignore=ignored)
    for name in NEEDED_TO_BUILD:
        shutil.copy(ROOT / name, copy)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-build-isolation", "-w", folder, copy, cwd=folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_wheel_holds_every_file_of_the_package(wheel):
    files = {path.relative_to(ROOT) for path in (ROOT / "nanobatch").rglob("*")}
    wanted = {
        path.as_posix()
        for path in files
        if path.suffix in KINDS and "__pycache__" not in path.parts and (ROOT / path).is_file()
    }
    found = set(zipfile.ZipFile(wheel).namelist())
    assert wanted - found == set()
    others = {name for name in found if not name.startswith("nanobatch")}
    assert others == set()
    examples = {"minimal.py", "kernels/ops.py", "extensions/cpu/kernels.c",
                "extensions/cpu/cache.h", "tiny_model/model.safetensors",
                "tiny_model/byte_tokenizer"}  # fmt: skip
    assert {f"nanobatch/{name}" for name in examples} <= wanted


@pytest.mark.slow
def test_an_installed_wheel_serves_from_another_folder(wheel, tmp_path):
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--target", site, wheel, cwd=tmp_path)
    home, text = run(
        sys.executable, "-c", SERVE, cwd=tmp_path, PYTHONPATH=site, XDG_CACHE_HOME=tmp_path
    ).split("\n", 1)
    assert Path(home).is_relative_to(site)
    [out] = LLM("tiny", dtype="float32").generate("Once upon", SamplingParams(temperature=0))
    assert text.strip() == out.text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("has_clone", [False, True], ids=["empty", "beside_a_clone"])
def test_a_notebook_installs_what_it_needs(has_clone, tmp_path):
    """pip gets a commit of this repository in the place of what lies on GitHub."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a git repository")
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    home.mkdir()
    if has_clone:  # leaves a folder of that name, which is no package
        (home / "nanobatch").mkdir()
    program = setup_cell() + "\nfrom nanobatch import Scheduler\n"
    program += "import nanobatch, pathlib\nprint(pathlib.Path(nanobatch.__file__).parent)"
    said = run(
        # -S: no installed package is seen. pip, in a process of its own, sees them.
        sys.executable, "-S", "-c", program, cwd=home, PYTHONPATH=site,
        PIP_TARGET=site, PIP_NO_DEPS=1, PIP_NO_BUILD_ISOLATION=0, GIT_CONFIG_COUNT=1,
        GIT_CONFIG_KEY_0=f"url.file://{ROOT}.insteadOf", GIT_CONFIG_VALUE_0=repository(),
    )  # fmt: skip
    *_, found = said.splitlines()
    assert Path(found) == site / "nanobatch"
    for name in ("tiny_model/model.safetensors", "tiny_model/byte_tokenizer",
                 "extensions/cpu/kernels.c", "extensions/cpu/cache.h"):  # fmt: skip
        assert (site / "nanobatch" / name).exists(), name


@pytest.mark.parametrize("platform", PLATFORMS)
def test_pip_keeps_what_a_platform_has(platform):
    versions = dict(PLATFORMS[platform])
    [pythons] = re.findall(r'^requires-python = "(.*)"$', PYPROJECT, re.M)
    assert versions.pop("python", "3.10") in SpecifierSet(pythons)
    requirements = bounds()
    assert "triton" not in requirements  # torch pins its own
    for name, version in versions.items():
        assert version in requirements[name].specifier, name


def test_what_requirements_txt_installs_lies_within_the_bounds():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    named = {requirement.name: requirement.specifier for requirement in listed}
    for name, requirement in bounds().items():
        pins = [s.version for s in named[name] if s.operator == "=="]
        within = pins and pins[0] in requirement.specifier
        assert within or named[name] == requirement.specifier, name


def test_every_link_to_the_repository_leads_to_the_same_one():
    url = repository()
    assert f'repository-code: "{url}"' in (ROOT / "CITATION.cff").read_text()
    pages = [ROOT / "README.md", ROOT / "notebooks" / "README.md"]
    files = [*pages, *NOTEBOOKS, *(ROOT / "notebooks" / "student").glob("*.ipynb")]
    num_opened = dict.fromkeys(files, 0)
    for file in files:
        # Links of GitHub, and those of Colab, which leave its name out.
        text = re.sub(r"//colab[^/]*/github/", "//github.com/", file.read_text())
        for link in re.findall(r"https://github\.com/[^\s)\"\\]*", text):
            assert link == url or link.startswith(f"{url}/blob/main/"), (file.name, link)
            if link != url:
                target = ROOT / link.removeprefix(f"{url}/blob/main/")
                assert target.is_file() and target.parent.name == "student", link
                num_opened[file] += 1
    for file, count in num_opened.items():
        if file.parent.name == "student":
            assert count == 2  # Colab, Kaggle
    assert (num_opened[pages[0]], num_opened[pages[1]]) == (1, 2 * len(NOTEBOOKS))


def test_badges_open_a_page_of_github():
    """By hand, from the two sites' documentation."""
    student = pytest.importorskip("nanobatch.check.student")  # needs nbformat
    text = student.badges("https://github.com/a/b/blob/main/c.ipynb")
    _, colab, _, kaggle = re.findall(r"\]\((\S+?)\)", text)
    assert colab == "https://colab.research.google.com/github/a/b/blob/main/c.ipynb"
    assert kaggle == (
        "https://kaggle.com/kernels/welcome?src=https://github.com/a/b/blob/main/c.ipynb"
    )
