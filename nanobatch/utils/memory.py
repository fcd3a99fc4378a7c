"""How much memory this process can still take, by what Linux says.

    /proc/meminfo       of the machine: available, and the swap that is free
    control groups      of the container: its limit less what cannot be dropped, at each level
    RLIMIT_AS, _DATA    of the process: its limit less what it has

The least of them counts. Elsewhere nothing is known, and torch's own error is the only one.

Source: proc(5); the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
# In each version: where a group's files are, its limit, what it uses, and which of its
# memory.stat count pages of files, which the kernel can drop.
CGROUP_VERSIONS = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     ("total_inactive_file", "total_active_file")),
)  # fmt: skip


def free_memory() -> int | None:
    """Bytes that this process can still allocate; None if the system does not say."""
    known = [*_of_the_machine(), *_of_control_groups(), *_of_the_process()]
    return max(0, min(known)) if known else None


def _numbers(file: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number; none if there is no such file."""
    lines = []
    with contextlib.suppress(OSError, ValueError):
        lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if words[1:] and words[1].isdigit()}


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        return int(file.read_text())
    return None


def _of_the_machine() -> list[int]:
    kib = _numbers(PROC / "meminfo")
    if "MemAvailable" not in kib:
        return []
    return [1024 * (kib["MemAvailable"] + kib.get("SwapFree", 0))]


def _of_control_groups() -> list[int]:
    free = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for folder, limit_name, used_name, dropped in CGROUP_VERSIONS:
                if controllers.split(",") != [folder]:
                    continue
                group = CGROUP / folder / path.lstrip("/")
                while group.is_relative_to(CGROUP / folder):  # each level has its own limit
                    limit, used = _number(group / limit_name), _number(group / used_name)
                    if limit is not None and used is not None:
                        stat = _numbers(group / "memory.stat")
                        free.append(limit - used + sum(stat.get(name, 0) for name in dropped))
                    group = group.parent
    return free


def _of_the_process() -> list[int]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    used = _numbers(PROC / "self" / "status")
    free = []
    for limit_name, used_name in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit, _ = resource.getrlimit(getattr(resource, limit_name))
        if limit != resource.RLIM_INFINITY and used_name in used:
            free.append(limit - 1024 * used[used_name])
    return free
