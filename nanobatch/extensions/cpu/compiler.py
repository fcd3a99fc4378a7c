"""C files compiled at first use, and the libraries kept for the next process.

    load(source, ...)  --kept?-->  FOLDER/KEY.so, whole by the checksum beside it
                       --else--->  cc, in FOLDER/building-XXXX  -->  tried by another process
                                   -->  loaded, and moved to FOLDER/KEY.so

FOLDER is nanobatch/cpu/ in the user's cache directory, or else nanobatch-UID/ in the system's
folder for temporary files; where nothing can be kept, a library serves this process only. KEY
is a hash of everything that the library depends on: sources, flags, compiler and CPU.

Always holds: what cannot be compiled or loaded is a NoLibrary that says why, never a crash: a
truncated library ends the process that maps it, so none is loaded before its checksum is
compared, and a new one is first loaded by a process of its own. Nobody else can put a library
here: a folder that others may write to is not used.

Source: Triton's cache of compiled kernels, which also moves whole files into place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nanobatch.utils.device import cache_directory
from nanobatch.utils.processes import end_with_children

FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
# Sums in any order, as vectors need it. Not -ffast-math: NaN must stay NaN (invariant 15).
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
if platform.machine() == "x86_64":
    FLAGS += ["-mprefer-vector-width=512"]
TIMEOUT_S = 60  # for one run of the compiler, which takes 1 to 5 s
BUILDING, OLD_S = "building-", 3600  # folders this old were left by a process that was killed
TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    getattr(library, name)
"""


class NoLibrary(Exception):  # noqa: N818 - no error of the user's: torch computes
    """Why a file's library cannot be had on this machine."""


@functools.cache
def find() -> str | None:
    """The C compiler that would be used: $CC (or cc), else gcc."""
    found = map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))
    return next((os.path.abspath(path) for path in found if path), None)


def load(source: Path, defines: Sequence[str], names: Sequence[str]) -> ctypes.CDLL:
    """The library of a C file: kept earlier, or compiled now and kept.

    Args:
        defines: more of the compiler's arguments, for example "-DGROUP=3".
        names: functions that it must have.

    Raises:
        NoLibrary: there is no compiler, it failed or took longer than TIMEOUT_S, or what it
            made cannot be loaded.
    """
    cc = find()
    if cc is None:
        raise NoLibrary("there is no C compiler: install gcc or clang, or name one in $CC")
    try:
        name = f"{key_of(cc, source, defines)}.so"
        for folder in folders():
            library = _kept(folder / name, names)
            if library is not None:
                return library
        return _compiled([cc, *FLAGS, *defines, str(source), "-lm"], name, names)
    except subprocess.TimeoutExpired as error:
        raise NoLibrary(f"{error.cmd[0]} did not end within {error.timeout:g} s") from None
    except OSError as error:
        raise NoLibrary(f"{cc} cannot be used: {error}") from None


def key_of(cc: str, source: Path, defines: Sequence[str]) -> str:
    """A hash of everything that the library depends on."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    texts = [(file.name, file.read_bytes()) for file in files]
    machine = (platform.system(), platform.machine())
    parts = repr((texts, FLAGS, list(defines), machine, cc, _target(cc)))
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


@functools.cache
def _target(cc: str) -> str:
    """The compiler's version, and the CPU that -march=native means, in its own words: -v shows
    the features that it found, and the macros name them."""
    return _run([cc, "-v", *FLAGS, "-dM", "-E", "-x", "c", os.devnull])


# ---------------------------------------------------------------------- where they are kept


def folders() -> Iterator[Path]:
    """Where libraries may be kept, best first. Not each is there, or private."""
    with contextlib.suppress(OSError):
        yield cache_directory() / "cpu"
    with contextlib.suppress(OSError):
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        yield Path(tempfile.gettempdir()) / f"nanobatch-{user}"


def _check_private(path: Path) -> None:
    """Raise PermissionError if anybody but this user and root may write there."""
    if hasattr(os, "geteuid"):  # on Windows both folders are the user's own
        link, found = path.lstat(), path.stat()
        is_ours = {link.st_uid, found.st_uid} <= {0, os.geteuid()}
        if not is_ours or found.st_mode & 0o022:
            raise PermissionError(f"{path} is not private to this user")


def _kept(file: Path, names: Sequence[str]) -> ctypes.CDLL | None:
    """A library that was kept, if it is there, whole, private and of this machine."""
    try:
        if not file.is_file():
            return None
        for path in (file.parent, file):
            _check_private(path)
        has_same_sum = _checksum(file) == file.with_suffix(".sha256").read_bytes()
        return _open(file, names) if has_same_sum else None
    except (OSError, AttributeError):
        return None


def _keep(built: Path, folder: Path) -> None:
    """Move a library into its folder, in place of what has its name; or leave it."""
    with contextlib.suppress(OSError):
        built.chmod(0o700)
        stamp = built.with_suffix(".sha256")
        stamp.write_bytes(_checksum(built))
        for file in (built, stamp):
            kept = folder / file.name
            if kept.is_dir():
                kept.rename(file.with_suffix(".old"))
            file.replace(kept)  # atomic: another process may build it too


def _checksum(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).hexdigest().encode()


def _open(file: Path, names: Sequence[str]) -> ctypes.CDLL:
    """Load a library. AttributeError: a function is missing. OSError: it cannot be loaded."""
    library = ctypes.CDLL(str(file))
    for name in names:
        getattr(library, name)
    return library


# ----------------------------------------------------------------------- how they are made


def _compiled(command: list[str], name: str, names: Sequence[str]) -> ctypes.CDLL:
    """Compile, load and keep a library in the first folder that allows it: one may be full, or
    on a file system that maps no code (noexec). The last is a temporary one, not kept."""
    for folder in [*folders(), None]:
        try:
            if folder is not None:
                folder.mkdir(mode=0o700, exist_ok=True)
                _check_private(folder)
                _remove_old(folder)
            with tempfile.TemporaryDirectory(
                prefix=BUILDING, dir=folder, ignore_cleanup_errors=True
            ) as work:
                built = Path(work) / name
                _run([*command, "-o", str(built)], work)
                library = _tried(built, names)
                if folder is not None:
                    _keep(built, folder)
                return library
        except (OSError, NoLibrary) as error:
            problem = error
    raise NoLibrary(str(problem))


def _tried(built: Path, names: Sequence[str]) -> ctypes.CDLL:
    """Load what the compiler made, after another process has survived it, if there is a Python
    to run (in a frozen program sys.executable is the program)."""
    trial = [sys.executable or "", "-I", "-S", "-c", TRIAL, str(built), *names]
    try:
        with contextlib.suppress(OSError):
            if not getattr(sys, "frozen", False):
                _run(trial, str(built.parent))
        return _open(built, names)
    except (OSError, AttributeError, NoLibrary) as error:
        raise NoLibrary(f"what the compiler made cannot be loaded: {error}") from None


def _remove_old(folder: Path) -> None:
    for left in folder.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD_S:
                shutil.rmtree(left, ignore_errors=True)


def _run(command: list[str], work: str | None = None) -> str:
    """Run a command to its end and return what it printed.

    Args:
        work: a folder for its temporary files; None: the system's.

    Raises:
        NoLibrary: it failed. OSError: it cannot be run. subprocess.TimeoutExpired.
    """
    env = os.environ | {"LC_ALL": "C"} | ({} if work is None else {"TMPDIR": work})
    with tempfile.TemporaryFile(dir=work) as printed:  # a pipe could stay open in a child
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:  # it hangs, or this process was interrupted
            if process.poll() is None:
                end_with_children(process)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if status != 0:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        how = f"status {status}" if status > 0 else signal.Signals(-status).name
        raise NoLibrary(f"{command[0]} ended with {how}: {said[0]}")
    return text
