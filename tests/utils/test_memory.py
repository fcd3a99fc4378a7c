"""How much memory is free, by files of /proc and /sys as Linux writes them."""

import pytest
import torch

from nanobatch.utils import device, memory
from nanobatch.utils.device import free_bytes

GIB = 2**30
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: {} kB\nSwapFree: {} kB\nHugePages_Total: 0\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files below folders that stand for /proc and /sys/fs/cgroup."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_of_the_process", lambda: [])

    def write(files: dict) -> None:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(text))

    return write


def test_nothing_is_known_where_there_is_no_proc(system):
    assert memory.free_memory() is None


def test_swap_counts(system):
    system({"proc/meminfo": MEMINFO.format(8 * GIB // 1024, 2 * GIB // 1024)})
    assert memory.free_memory() == 10 * GIB


V2 = {"memory.max": 4 * GIB, "memory.current": 3 * GIB,
      "memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}\n"}  # fmt: skip
V1 = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB,
      "memory.stat": f"active_file 7\ntotal_active_file {GIB}\n"
      f"total_inactive_file {GIB // 2}\n"}  # fmt: skip


@pytest.mark.parametrize("group", ["/", "/a", "/a/b"])
@pytest.mark.parametrize("version, line, folder", [
    (V2, "0::", "cgroup"), (V1, "4:memory:", "cgroup/memory")
])  # fmt: skip
def test_a_container_s_limit_at_any_level(system, version, line, folder, group):
    """Pages of files do not count as used: the kernel drops them."""
    system({"proc/meminfo": MEMINFO.format(8 * GIB // 1024, 0)})
    system({"proc/self/cgroup": f"9:name=systemd:/\n7:blkio:/\n{line}/a/b\n"})
    system({f"{folder}{group}/{name}": value for name, value in version.items()})
    assert memory.free_memory() == 4 * GIB - 3 * GIB + GIB + GIB // 2


@pytest.mark.parametrize("limit", ["max", 64 * GIB, 2**63 - 4096])
def test_a_container_without_a_limit(system, limit):
    system({"proc/meminfo": MEMINFO.format(8 * GIB // 1024, 0)})
    system({"proc/self/cgroup": "0::/\n"})
    system({f"cgroup/{name}": value for name, value in (V2 | {"memory.max": limit}).items()})
    assert memory.free_memory() == 8 * GIB


def test_a_container_over_its_limit_has_nothing(system):
    system({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": 5, "cgroup/memory.current": 9})
    assert memory.free_memory() == 0


def test_a_gpu_has_what_is_free_and_what_torch_keeps_for_later(monkeypatch):
    numbers = {"mem_get_info": (5, 100), "memory_reserved": 30, "memory_allocated": 20}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    assert free_bytes(torch.device("cuda")) == 15
    monkeypatch.setattr(device, "free_memory", lambda: 7)
    assert free_bytes(torch.device("cpu")) == 7
