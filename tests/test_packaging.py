"""A built wheel is complete: it serves the bundled model where there is no repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nanobatch import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
NEEDED_TO_BUILD = ("pyproject.toml", "README.md", "LICENSE")
# What the package reads at run time: modules, C, headers, the bundled model.
KINDS = {".py", ".c", ".h", ".json", ".safetensors", ""}
SERVE = """
import nanobatch
from nanobatch import LLM, SamplingParams
[out] = LLM("tiny", dtype="float32").generate("Once upon", SamplingParams(temperature=0))
print(nanobatch.__file__)
print(out.text)
"""


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
