"""The compiled library: whatever is wrong with the compiler, the cache or its place, torch or a
new library serves, one warning says why, and no library of somebody else is loaded.

The compilers here are shell scripts, which write down each file that they compile. Most give
out a copy of a library that was compiled before, from a C file of one line; its function tells
whose a library is: 42 is ours.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanobatch import LLM, SamplingParams
from nanobatch.attention import choose_backend
from nanobatch.extensions.cpu import compiler as cpu_compiler
from nanobatch.extensions.cpu import kernels as cpu_kernels
from nanobatch.extensions.cpu import library as cpu_library
from nanobatch.extensions.cpu.compiler import NoLibrary
from nanobatch.utils.device import cache_directory

REAL = cpu_compiler.find()
pytestmark = pytest.mark.skipif(
    REAL is None or os.name == "nt", reason="no C compiler, or no shell for those of the tests"
)
PROMPTS = ["Once upon a time", "One day, a little cat"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def compiled(code, folder):
    """A library that the real compiler makes."""
    (folder / "x.c").write_text(code)
    flags = ["-shared", "-fPIC", str(folder / "x.c"), "-o", str(folder / "x.so")]
    subprocess.run([REAL, *flags], check=True)
    return folder / "x.so"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return compiled("int answer(void) { return 42; }", tmp_path_factory.mktemp("ours"))


class Machine:
    """A cache directory, a folder for temporary files, a C file and a compiler of its own."""

    def __init__(self, folder, ours, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.copying = f'[ $IS_QUERY ] && echo gcc version 12.2 || cp {ours} "$OUT"'
        self.home, self.temporary = folder / "home", folder / "temporary"
        self.source, self.log = folder / "code" / "answer.c", folder / "log"
        for directory in (self.home, self.temporary, self.source.parent):
            directory.mkdir()
        self.source.write_text("int answer(void) { return 42; }\n")
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.home))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.compiler()

    @property
    def kept(self):
        return self.home / "nanobatch" / "cpu"

    @property
    def spare(self):
        return self.temporary / f"nanobatch-{os.geteuid()}"

    def compiler(self, body=None):
        """A script in place of the compiler; $OUT is the file that it must make."""
        body = body or self.copying
        script = self.folder / "bin" / "cc"
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f'#!/bin/sh\nREAL={REAL}\nIS_QUERY=\nfor x in "$@"; do\n'
            '  [ "$x" = -E ] && IS_QUERY=1\n  [ "$last" = -o ] && OUT=$x\n  last=$x\ndone\n'
            f'[ $IS_QUERY ] || echo "$OUT" >> {self.log}\n{body}\n'
        )
        script.chmod(0o755)
        self.use(str(script))
        return script

    def use(self, path):
        cpu_compiler._target.cache_clear()
        self.monkeypatch.setattr(cpu_compiler, "find", lambda: path)

    def load(self, source=None, names=("answer",)):
        return cpu_compiler.load(source or self.source, ["-DN=1"], names)

    def answer(self):
        return self.load().answer()

    @property
    def num_compiled(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def library(self, code):
        """The bytes of a library that is whole, but not ours."""
        return compiled(code, self.folder).read_bytes()

    def put(self, contents, is_stamped=True):
        """Put another file under the library's name, perhaps with its right checksum."""
        [file] = self.kept.glob("*.so")
        file.unlink()  # not written over: this process may have mapped it
        file.write_bytes(contents)
        file.chmod(0o700)
        if is_stamped:
            file.with_suffix(".sha256").write_bytes(cpu_compiler._checksum(file))
        return file

    def left_over(self):
        return list(self.folder.rglob("building-*"))


@pytest.fixture
def machine(tmp_path, ours, monkeypatch):
    return Machine(tmp_path, ours, monkeypatch)


def test_a_library_is_compiled_once_and_kept(machine):
    machine.compiler('exec "$REAL" "$@"')
    old = os.umask(0o002)  # Debian's for users: new files are the group's, too
    try:
        assert [machine.answer() for _ in range(3)] == [42] * 3 and machine.num_compiled == 1
    finally:
        os.umask(old)
    assert machine.kept.stat().st_mode & 0o077 == 0
    assert {path.suffix for path in machine.kept.iterdir()} == {".so", ".sha256"}
    assert not machine.spare.exists() and not machine.left_over()


# ---- what lies under the library's name ----------------------------------------------------


def of_another_architecture(library):
    """ELF's field e_machine: 0x28 is 32-bit Arm, 0xb7 64-bit."""
    other = 0x28 if library[18] == 0xB7 else 0xB7
    return library[:18] + bytes([other]) + library[19:]


def a_directory(file):
    file.unlink()
    (file / "within").mkdir(parents=True)


def a_pipe(file):
    file.unlink()
    os.mkfifo(file)


def a_link_to_nothing(file):
    file.unlink()
    file.symlink_to("nowhere")


ENTRIES = {
    "truncated": lambda m, file: m.put(file.read_bytes()[: file.stat().st_size // 2], False),
    "one bit": lambda m, file: m.put(file.read_bytes()[:-1] + b"\1", False),
    "empty": lambda m, file: m.put(b"", False),
    "empty and stamped": lambda m, file: m.put(b""),
    "text": lambda m, file: m.put(b"no library\n"),
    "another architecture": lambda m, file: m.put(of_another_architecture(file.read_bytes())),
    "another library": lambda m, file: m.put(m.library("int f(void) { return 1; }")),
    "another's answer": lambda m, file: m.put(m.library("int answer(void){return 1;}"), False),
    "no checksum": lambda m, file: file.with_suffix(".sha256").unlink(),
    "a wrong checksum": lambda m, file: file.with_suffix(".sha256").write_bytes(b"\xff" * 9),
    "a directory": lambda m, file: a_directory(file),
    "a directory for the checksum": lambda m, file: a_directory(file.with_suffix(".sha256")),
    "a pipe": lambda m, file: a_pipe(file),
    "a link to nothing": lambda m, file: a_link_to_nothing(file),
    "others can write": lambda m, file: file.chmod(0o777),
}


@pytest.mark.parametrize("fault", ENTRIES)
def test_a_spoiled_entry_is_compiled_again_and_replaced(machine, fault):
    assert machine.answer() == 42
    [file] = machine.kept.glob("*.so")
    ENTRIES[fault](machine, file)
    assert machine.answer() == 42 and machine.num_compiled == 2
    copy = shutil.copy(file, machine.folder)  # dlopen has one library for a name, for good
    assert ctypes.CDLL(copy).answer() == 42, "it was not replaced"
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    assert file.with_suffix(".sha256").read_text() == checksum
    assert not machine.left_over() and len(list(machine.kept.iterdir())) == 2


# ---- the compiler ----------------------------------------------------------------------------

SILENT = "exit 1"
COMPILERS = {
    "silent": (SILENT, "cc ended with status 1: no message"),
    "in words": (
        "echo this and that; echo 'x.c:1: error: \377bad' >&2; exit 3",
        "status 3: x.c:1: error: .*bad",
    ),
    "after its version": ("[ $IS_QUERY ] || exit 4", "status 4"),
    "killed": ("kill -9 $$", "ended with SIGKILL"),
    "asks": ("read answer && exit 0; exit 5", "status 5"),
    "makes nothing": ("exit 0", "cannot be loaded.*No such file|cannot be loaded.*cannot open"),
    "text": ("[ $IS_QUERY ] || echo garbage > $OUT", "cannot be loaded"),
    "half a library": (
        '"$REAL" "$@" && [ $OUT ] && half=$(($(wc -c < $OUT) / 2)) '
        "&& head -c $half $OUT > $OUT.x && mv $OUT.x $OUT; exit 0",
        "cannot be loaded",
    ),
    "another library": (
        '[ $IS_QUERY ] || echo "int f;" | "$REAL" -shared -fPIC -x c - -o $OUT',
        "cannot be loaded.*answer",
    ),
    "a library that crashes": (
        "[ $IS_QUERY ] || echo 'void abort(void); __attribute__((constructor)) void f(void)"
        '{ abort(); } int answer(void) { return 1; }\' | "$REAL" -shared -fPIC -x c - -o $OUT',
        "cannot be loaded.*SIGABRT",
    ),
}


@pytest.mark.parametrize("fault", COMPILERS)
def test_a_compiler_that_fails_says_why(machine, fault):
    body, why = COMPILERS[fault]
    machine.compiler(body)
    with pytest.raises(NoLibrary, match=why):
        machine.load()
    assert not machine.left_over() and not list(machine.folder.rglob("*.so"))


@pytest.mark.parametrize("python", [None, "", "/nowhere/python"])
def test_without_a_python_to_try_it_a_library_is_loaded(machine, python):
    machine.monkeypatch.setattr(sys, "executable", python)
    assert machine.answer() == 42
    machine.compiler(COMPILERS["another library"][0])
    with pytest.raises(NoLibrary, match="cannot be loaded.*answer"):
        machine.load()


def test_a_frozen_program_is_not_started_to_try_it(machine):
    """sys.executable is the program: it would start itself for ever."""
    program = machine.folder / "program"
    program.write_text(f"#!/bin/sh\ntouch {machine.folder}/started\n")
    program.chmod(0o755)
    machine.monkeypatch.setattr(sys, "executable", str(program))
    machine.monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert machine.answer() == 42 and not (machine.folder / "started").exists()


def test_what_is_no_program_is_no_compiler(machine):
    machine.use(str(machine.source))
    with pytest.raises(NoLibrary, match="cannot be used.*ermission"):
        machine.load()
    broken = machine.folder / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    for path, why in ((str(broken), "cannot be used"), ("/nowhere/cc", "No such file")):
        machine.use(path)
        with pytest.raises(NoLibrary, match=why):
            machine.load()


def has_ended(pid_file):
    """Whether the process that wrote its id there is gone (or waits for its parent's look)."""
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def hanging(machine, condition=""):
    """A compiler that starts another process, and waits for it without end."""
    pid_file = machine.folder / "pid"
    machine.compiler(
        f"{condition} sleep 1000 & echo $! > {pid_file}.x; mv {pid_file}.x {pid_file}; wait"
    )
    return pid_file


@pytest.mark.parametrize("condition", ["", "[ $IS_QUERY ] && exit;"])
def test_a_compiler_that_hangs_is_ended(machine, condition):
    machine.monkeypatch.setattr(cpu_compiler, "TIMEOUT_S", 0.3)
    pid_file, start = hanging(machine, condition), time.monotonic()
    with pytest.raises(NoLibrary, match="cc did not end within 0.3 s"):
        machine.load()
    assert time.monotonic() - start < 5 and has_ended(pid_file) and not machine.left_over()


def test_an_interrupt_ends_the_compiler(machine):
    pid_file = hanging(machine, "[ $IS_QUERY ] && exit;")

    def interrupt():
        while not pid_file.exists():
            time.sleep(0.01)
        time.sleep(0.1)  # by then it is waited for
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        machine.load()
    assert has_ended(pid_file) and not machine.left_over()


# ---- where it is kept ------------------------------------------------------------------------


def no_home(machine):
    """A user id of no user: `docker run --user 12345`."""
    machine.monkeypatch.delenv("XDG_CACHE_HOME")
    machine.monkeypatch.delenv("HOME", raising=False)

    def getpwuid(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    import pwd

    machine.monkeypatch.setattr(pwd, "getpwuid", getpwuid)


def a_file(machine):
    shutil.rmtree(machine.home)
    machine.home.write_text("")


def writable(*, mode):
    def prepare(machine):
        machine.kept.mkdir(parents=True)
        machine.kept.chmod(mode)

    return prepare


def somebody_else_s(machine):
    """The folder's owner is not this user, nor root."""
    machine.kept.mkdir(parents=True, mode=0o755)
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(machine.kept, 12345, -1)


def somebody_else_s_link(machine):
    machine.kept.parent.mkdir()
    (machine.folder / "mine").mkdir(mode=0o700)
    machine.kept.symlink_to(machine.folder / "mine")
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    os.chown(machine.kept, 12345, -1, follow_symlinks=False)


PLACES = {
    "no home": no_home,
    "a file": a_file,
    "in a device": lambda machine: machine.monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/x"),
    "a folder that is a file": lambda m: (m.kept.parent.mkdir(), m.kept.write_text("")),
    "all can write": writable(mode=0o1777),
    "the group can write": writable(mode=0o770),
    "somebody else's": somebody_else_s,
    "somebody else's link": somebody_else_s_link,
}


@pytest.mark.parametrize("fault", PLACES)
def test_where_it_cannot_be_kept_it_is_kept_elsewhere(machine, fault):
    PLACES[fault](machine)
    assert machine.answer() == machine.answer() == 42 and machine.num_compiled == 1
    assert machine.spare.stat().st_mode & 0o777 == 0o700
    assert len(list(machine.spare.glob("*.so"))) == 1
    assert not machine.kept.is_dir() or not list(machine.kept.iterdir())


def test_where_nothing_can_be_kept_it_serves_this_process(machine):
    a_file(machine)
    machine.spare.mkdir()
    machine.spare.chmod(0o777)
    assert machine.answer() == machine.answer() == 42 and machine.num_compiled == 2
    assert not list(machine.spare.iterdir()) and not machine.left_over()


def test_where_nothing_can_be_written_there_is_no_library(machine):
    a_file(machine)
    shutil.rmtree(machine.temporary)
    with pytest.raises(NoLibrary, match="No such file or directory"):
        machine.load()


def test_on_a_system_without_user_ids_and_process_groups(machine):
    """Windows: both places are the user's own there."""
    for name in ("geteuid", "killpg"):
        machine.monkeypatch.delattr(os, name)
    assert machine.answer() == 42 and len(list(machine.kept.glob("*.so"))) == 1
    a_file(machine)
    assert machine.answer() == 42
    assert len(list((machine.temporary / "nanobatch-user").glob("*.so"))) == 1
    machine.monkeypatch.setattr(cpu_compiler, "TIMEOUT_S", 0.1)
    machine.compiler("exec sleep 1000")
    with pytest.raises(NoLibrary, match="did not end"):
        machine.load()


@pytest.mark.parametrize("where", ["kept", "spare"])
def test_a_planted_library_is_not_loaded(machine, where):
    """In a folder that others can write to, with our name and its right checksum."""
    if where == "spare":
        a_file(machine)
    assert machine.answer() == 42
    folder = getattr(machine, where)
    [file] = folder.glob("*.so")
    file.unlink()
    file.write_bytes(machine.library("int answer(void) { return 666; }"))
    file.chmod(0o700)
    file.with_suffix(".sha256").write_bytes(cpu_compiler._checksum(file))
    folder.chmod(0o777)
    assert machine.answer() == 42


def test_a_relative_cache_directory_is_not_used(machine):
    """As the XDG specification says."""
    machine.monkeypatch.chdir(machine.folder)
    machine.monkeypatch.setenv("XDG_CACHE_HOME", "here")
    machine.monkeypatch.setenv("HOME", str(machine.home))
    assert cache_directory() == machine.home / ".cache" / "nanobatch"
    machine.monkeypatch.setenv("HOME", "there")
    with pytest.raises(OSError, match="no home directory"):
        cache_directory()


def test_a_file_system_that_maps_no_code_is_not_used(machine):
    """A noexec mount, as the loader reports it."""
    load, refused = ctypes.CDLL, []

    def cdll(name):
        if any(str(folder) in name for folder in refused):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name)

    machine.monkeypatch.setattr(ctypes, "CDLL", cdll)
    machine.answer()
    refused.append(machine.home)
    assert machine.answer() == machine.answer() == 42 and machine.num_compiled == 3
    assert len(list(machine.spare.glob("*.so"))) == 1
    refused.append(machine.temporary)
    with pytest.raises(NoLibrary, match="failed to map segment"):
        machine.load()


def test_folders_of_a_killed_process_are_removed_when_they_are_old(machine):
    machine.kept.mkdir(parents=True, mode=0o700)
    old, new = machine.kept / "building-old", machine.kept / "building-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "x.s").write_text("")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    assert machine.answer() == 42
    assert machine.left_over() == [new]


def test_all_who_compile_at_once_have_it(machine):
    machine.compiler(f"[ $IS_QUERY ] || sleep 0.1; {machine.copying}")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: machine.answer(), range(4)))
    num_compiled = machine.num_compiled
    assert answers == [42] * 4 and 1 < num_compiled <= 4 and not machine.left_over()
    assert machine.answer() == 42 and machine.num_compiled == num_compiled


# ---- its key ---------------------------------------------------------------------------------


def version(machine, text):
    machine.compiler(f'[ $IS_QUERY ] && echo "{text}"; {machine.copying}')


def change_path(machine):
    script = machine.folder / "bin" / "cc"
    shutil.copy(script, script.with_name("cc-2"))
    machine.use(str(script.with_name("cc-2")))


PARTS = {
    "source": lambda m: m.source.write_text("int answer(void) { return 40 + 2; }\n"),
    "header": lambda m: (m.source.parent / "x.h").write_text("#define N 2\n"),
    "one more header": lambda m: (m.source.parent / "y.h").write_text(""),
    "compiler's version": lambda m: version(m, "gcc version 12.3"),
    "CPU": lambda m: version(m, "cc1 -march=znver4 -mavx512bf16"),
    "compiler's path": change_path,
    "flags": lambda m: m.monkeypatch.setattr(
        cpu_compiler, "FLAGS", [*cpu_compiler.FLAGS, "-g"]
    ),
    "machine": lambda m: m.monkeypatch.setattr(platform, "machine", lambda: "riscv64"),
    "system": lambda m: m.monkeypatch.setattr(platform, "system", lambda: "Plan9"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_library_is_of_all_that_it_was_made_of(machine, part):
    """What is changed makes another library, under another name; the first stays."""
    (machine.source.parent / "x.h").write_text("#define N 1\n")
    version(machine, "gcc version 12.2, -march=znver3")
    machine.answer()
    PARTS[part](machine)
    machine.answer()
    assert machine.num_compiled == 2 and len(list(machine.kept.glob("*.so"))) == 2


def test_macros_are_in_the_key(machine):
    key = {cpu_compiler.key_of(REAL, machine.source, d) for d in (["-DN=1"], ["-DN=2"], [])}
    assert len(key) == 3


def test_the_compiler_tells_the_cpu(machine):
    """What the key takes for the CPU is in the compiler's own words: it changes with -march."""
    if platform.machine() != "x86_64":
        pytest.skip("-march=x86-64 is another machine's")
    native = cpu_compiler._target(REAL)
    cpu_compiler._target.cache_clear()
    assert cpu_compiler._target(REAL) == native, "each process would compile anew"
    flags = ["-march=x86-64" if x == "-march=native" else x for x in cpu_compiler.FLAGS]
    machine.monkeypatch.setattr(cpu_compiler, "FLAGS", flags)
    cpu_compiler._target.cache_clear()
    baseline = cpu_compiler._target(REAL)
    assert "__AVX2__" not in baseline
    assert ("__AVX2__" in native) == torch.cpu._is_avx2_supported()


# ---- the engine ------------------------------------------------------------------------------


@pytest.fixture
def fresh(machine):
    """Nothing built and no warning given yet in this process."""
    caches = (cpu_kernels._build, cpu_kernels.warn_once)
    for cache in caches:
        cache.cache_clear()
    yield machine
    for cache in caches:
        cache.cache_clear()


def reference(dtype):
    """Tokens of the torch backend."""
    llm = LLM("tiny", dtype=dtype, num_blocks=20, attention_backend="torch")
    return [out.token_ids for out in llm.generate(PROMPTS, GREEDY, progress=False)]


ENGINES = {
    "no compiler": (None, "there is no C compiler: install"),
    "a silent compiler": (SILENT, "cc ended with status 1"),
    "garbage": (COMPILERS["text"][0], "cannot be loaded"),
}


@pytest.mark.parametrize(
    "fault, dtype",
    [("no compiler", "float32"), ("a silent compiler", "bfloat16"), ("garbage", "float32")],
)
def test_the_engine_computes_in_torch_and_says_so_once(fresh, caplog, fault, dtype):
    body, why = ENGINES[fault]
    fresh.compiler(body) if body else fresh.use(None)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        for _ in range(2):
            llm = LLM("tiny", dtype=dtype, num_blocks=20)
            outs = llm.generate(PROMPTS, GREEDY, progress=False)
    [warning] = caught
    assert issubclass(warning.category, RuntimeWarning) and why in str(warning.message)
    assert "attention_backend='torch'" in str(warning.message)
    assert llm.engine.runner.backend.name == "torch"
    assert "attention_backend='torch'" in caplog.text and "='c'" not in caplog.text
    assert [out.token_ids for out in outs] == reference(dtype)
    with pytest.raises(ValueError, match=f"attention_backend is 'c'.*{why}"):
        LLM("tiny", dtype=dtype, attention_backend="c")
    assert fresh.num_compiled <= 3, "a compiler that failed was asked again"


def test_one_kernel_that_cannot_be_compiled_is_torch_s(fresh):
    """The others are C's, and so is the name; a warning says why one is not."""
    fresh.use(REAL)
    fresh.monkeypatch.delenv("XDG_CACHE_HOME")  # those that other tests keep
    load = cpu_compiler.load

    def without_attention(source, defines, names):
        if "paged_decode" in names:
            raise NoLibrary("the disk is full")
        return load(source, defines, names)

    fresh.monkeypatch.setattr(cpu_library.compiler, "load", without_attention)
    with pytest.warns(RuntimeWarning, match="more slowly: the disk is full") as caught:
        llm = LLM("tiny", dtype="float32", num_blocks=20)
        outs = llm.generate(PROMPTS, GREEDY, progress=False)
    assert len(caught) == 1 and llm.engine.runner.backend.name == "c"
    assert [out.token_ids for out in outs] == reference("float32")


def test_with_torch_by_name_nothing_is_compiled(fresh):
    fresh.compiler(SILENT)
    with warnings.catch_warnings(action="error"):
        assert choose_backend("torch", "cpu", 16).name == "torch"
        reference("float32")
    assert fresh.num_compiled == 0


SERVE = f"""
import logging
logging.basicConfig(level="INFO")
from nanobatch import LLM, SamplingParams
llm = LLM("tiny", dtype="float32", num_blocks=20)
params = SamplingParams(temperature=0, max_tokens={GREEDY.max_tokens})
for out in llm.generate({PROMPTS!r}, params, progress=False):
    print(out.token_ids)
print(llm.engine.runner.backend.name)
"""


def serve(machine, **env):
    """(standard output's lines, number of warnings) of a process with these variables."""
    env = {"CC": str(machine.folder / "bin" / "cc"), "TMPDIR": str(machine.temporary)} | env
    done = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, env=os.environ | env
    )
    assert done.returncode == 0, done.stderr
    assert f"attention_backend={done.stdout.split()[-1]!r}" in done.stderr
    return done.stdout.splitlines(), done.stderr.count("RuntimeWarning")


@pytest.mark.slow
@pytest.mark.parametrize("fault", COMPILERS)
def test_a_process_serves_with_each_compiler(machine, fault):
    machine.compiler(COMPILERS[fault][0])
    tokens = [str(token_ids) for token_ids in reference("float32")]
    assert serve(machine) == ([*tokens, "torch"], 1)


@pytest.mark.slow
def test_a_process_serves_with_truncated_libraries_and_without_a_home(machine):
    machine.compiler('exec "$REAL" "$@"')
    tokens = [str(token_ids) for token_ids in reference("float32")]
    assert serve(machine) == ([*tokens, "c"], 0)
    files = sorted(machine.kept.glob("*.so"))
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    num_compiled = machine.num_compiled
    for _ in range(2):
        assert serve(machine) == ([*tokens, "c"], 0)
        assert machine.num_compiled == num_compiled + len(files)
    assert serve(machine, XDG_CACHE_HOME="", HOME="nowhere") == ([*tokens, "c"], 0)
    assert len(list(machine.spare.glob("*.so"))) == len(files)
