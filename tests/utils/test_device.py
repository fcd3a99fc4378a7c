"""What the CPU can do: as Linux tells it, and by either of torch's ways to ask."""

import platform
from pathlib import Path

import pytest
import torch

from nanobatch.utils.device import cpu_has, resolve_dtype

CPU_INFO = Path("/proc/cpuinfo")
TORCH_2_9 = {
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_bf16": "_is_amx_tile_supported",
}


@pytest.mark.parametrize("feature", TORCH_2_9)
def test_the_cpu_has_what_linux_says_it_has(feature):
    """Linux has the same names for them."""
    if platform.machine() != "x86_64" or not CPU_INFO.exists():
        pytest.skip("no /proc/cpuinfo of an x86-64")
    flags = [x for x in CPU_INFO.read_text().splitlines() if x.startswith("flags")][0].split()
    assert cpu_has(feature) == (feature in flags)


def make_cpu(features: set[str], has_capabilities: bool, monkeypatch) -> None:
    """A CPU with these features, as torch 2.9 tells of them, or a later torch."""
    for feature, name in TORCH_2_9.items():
        monkeypatch.setattr(torch.cpu, name, lambda f=feature: f in features)
    told = dict.fromkeys(features, True) | {"architecture": "x86_64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)
    if not has_capabilities:
        monkeypatch.delattr(torch.cpu, "get_capabilities")


@pytest.mark.parametrize("has_capabilities", [True, False])
@pytest.mark.parametrize(
    "features", [set(), {"avx512_bf16"}, {"amx_bf16"}, {"avx512_bf16", "amx_bf16"}]
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(features, has_capabilities, monkeypatch):
    make_cpu(features, has_capabilities, monkeypatch)
    assert {feature for feature in TORCH_2_9 if cpu_has(feature)} == features
    wanted = torch.bfloat16 if features else torch.float32
    assert resolve_dtype("auto", torch.device("cpu")) == wanted
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
