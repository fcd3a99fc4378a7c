"""Compile all that the engine can launch, for GPUs that need not be there; read the code.

    python tests/kernels/compile_kernels.py "90/bf16/llama3 *" "75/*/experts" > report.json
    python tests/kernels/compile_kernels.py --list "120/bf16:i8/*"       (a cache of int8)

Everything has a name, chip/format/kernel, and what matches one of the patterns is compiled, on
all cores. The attention kernels' shapes are not listed here: they are those that the launch
configuration chooses for any step. `llama3 16x64` takes 16 rows and 64 keys at a time.

A script of its own, since Triton's interpreter must be off in the process that compiles.
For each kernel it prints registers, stack, shared memory, and counts of what decides its speed:
instructions, read with the tools inside Triton's own package, and from Triton's own language
(TTGIR) how many tiles of keys and values there is room for, and how many are on their way while
one is waited for.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanobatch import paged_attention_kernel
from nanobatch.extensions import quantized_kernels
from nanobatch.extensions.quantized_cache import LARGEST, SMALLEST_SCALE
from nanobatch.kernels import grouped_matmul as experts
from nanobatch.kernels import triton_ops as elementwise_kernels
from nanobatch.kernels.launch_config import (
    CHIPS,
    MAX_SPLITS,
    LaunchConfig,
    choose_launch_config,
)

SPILL = r"\b(?:STL|LDL)\b"  # a store to the stack, a load from it
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
INT_POINTERS = dict.fromkeys(
    [
        "block_tables_ptr",
        "seq_lens_ptr",
        "query_start_ptr",
        "work_ptr",
        "expert_ptr",
        "start_ptr",
        "end_ptr",
    ],
    "*i32",
)
CACHES = {"i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}  # those in 8 bits
CACHE_POINTERS = {"k_cache_ptr", "v_cache_ptr"}
SCALE_POINTERS = {"k_scale_ptr", "v_scale_ptr"}
FLOAT_POINTERS = {"acc_ptr", "max_ptr", "sum_ptr", "cos_ptr", "sin_ptr", "residual_ptr"}
FLOATS = {"scale_log2", "softcap", "eps"}


class Shape(NamedTuple):
    """A model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0
    has_softcap: bool = False


SHAPES = {
    "smollm2": Shape(9, 3, 64),
    "d80": Shape(32, 8, 80),
    "phi3": Shape(32, 32, 96, 2047),
    "llama3": Shape(32, 8, 128),
    "d160": Shape(32, 8, 160),
    "d192": Shape(32, 8, 192),
    "d256": Shape(16, 8, 256),
    "gemma2": Shape(16, 8, 256, 4096, True),
}
OTHER_SHAPES = {  # group sizes, and what else may change a head dimension of those above
    "llama2": Shape(32, 32, 128),
    "qwen2": Shape(28, 4, 128),
    "gemma2-27b": Shape(32, 16, 128, 4096, True),
    "mqa": Shape(71, 1, 64),
}
# Steps to launch: numbers of requests, and of the query tokens of the longest.
NUM_SEQS = [2**i for i in range(11)]
QUERY_LENS = [*range(1, 10), *(2**i for i in range(4, 14))]


class Kernel(NamedTuple):
    """What is compiled."""

    function: triton.JITFunction
    constants: dict
    options: dict


class Target(NamedTuple):
    """What it is compiled for."""

    capability: int
    dtype: str  # of queries, weights and everything else
    cache: str  # of keys and values

    def __str__(self) -> str:
        cache = f":{self.cache}" if self.cache in CACHES else ""
        return f"{self.capability}/{self.dtype}{cache}"


def matching(patterns: list[str], all_formats: bool) -> Iterator[tuple[Target, str]]:
    """Targets, each with the names of kernels that match a pattern."""
    for target in targets(all_formats):
        on_it = [p for p in patterns if fnmatchcase(str(target), p.rpartition("/")[0])]
        for name in kernels(target) if on_it else ():
            if any(fnmatchcase(f"{target}/{name}", pattern) for pattern in on_it):
                yield target, name


def targets(all_formats: bool) -> Iterator[Target]:
    """Chips, with the formats that each has: bfloat16 from 8.0 on, float8 from 8.9 on."""
    for capability, dtype in product(CHIPS, ITEMSIZE):
        for cache in (dtype, *CACHES):
            lacks = {"bf16": capability < 80, "fp8e4nv": capability < 89}
            if all_formats or not (lacks.get(dtype) or lacks.get(cache)):
                yield Target(capability, dtype, cache)


@functools.cache
def kernels(target: Target) -> dict[str, Kernel]:
    """Everything that is launched on this target, by name."""
    return dict(_kernels(target))


def _kernels(target: Target) -> Iterator[tuple[str, Kernel]]:
    capability, dtype, cache = target
    is_8 = cache in CACHES
    # A format of 16 bits is like the other, and a cache in 8 bits has the same launches.
    is_like_another = is_8 or (dtype == "fp16" and capability >= 80)
    shapes = SHAPES if is_like_another else SHAPES | OTHER_SHAPES
    for name, shape in shapes.items():
        for variant, launch in launches(shape, target).items():
            yield f"{name} {variant}", attention(shape, launch, is_8)
        sizes = {"H": shape.num_heads, "K": shape.num_kv_heads, "D": shape.head_dim, "P": 16}
        R = shape.head_dim // 2
        heads = min(triton.next_power_of_2(shape.num_heads), elementwise_kernels.ROPE_HEADS)
        sizes |= {"R": R, "R_PAD": triton.next_power_of_2(R), "HEADS": heads}
        rope = elementwise_kernels.rope_and_write_kernel
        if is_8:
            rope = quantized_kernels.quantized_rope_and_write_kernel
            sizes |= {"LARGEST": LARGEST[CACHES[cache]], "SMALLEST_SCALE": SMALLEST_SCALE}
        yield f"{name} rope", Kernel(rope, sizes, {})
    if not is_8:
        yield from other_kernels(target)


def launches(shape: Shape, target: Target) -> dict[str, LaunchConfig]:
    """Those that are chosen for any step. How many splits there are is not compiled in."""
    choose = choose_launch_config
    if target.cache in CACHES:
        choose = quantized_kernels.quantized_launch_config
    found = {}
    for S, longest in product(NUM_SEQS, QUERY_LENS):
        for T in {S * longest, S - 1 + longest}:
            sizes = (T, S, longest, *shape[:3], ITEMSIZE[target.dtype])
            launch = choose(*sizes, CHIPS[target.capability])
            launch = dataclasses.replace(launch, num_splits=1)
            other = found.setdefault(f"{launch.block_m}x{launch.tile}", launch)
            assert launch == other, f"two launches of these sizes: {launch}, {other}"
    return found


def attention(shape: Shape, launch: LaunchConfig, is_8: bool) -> Kernel:
    H, K, D = shape[:3]
    constants = {
        "K": K, "G": H // K, "D": D, "D_PAD": triton.next_power_of_2(D), "P": 16,
        "BLOCK_M": launch.block_m, "BLOCK_Q": launch.block_q, "TILE": launch.tile,
        "WINDOW": shape.window, "HAS_SOFTCAP": shape.has_softcap,
        "WIDEN": False,
    }  # fmt: skip
    options = {
        "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        "maxnreg": launch.max_registers,
    }  # fmt: skip
    function = paged_attention_kernel.paged_attention_kernel
    if is_8:
        function = quantized_kernels.quantized_attention_kernel
    return Kernel(function, constants, options)


def other_kernels(target: Target) -> Iterator[tuple[str, Kernel]]:
    reduce = paged_attention_kernel.reduce_splits_kernel
    for D in (64, 80, 128, 256):
        sizes = {"K": 8, "G": 4, "D": D, "D_PAD": triton.next_power_of_2(D)}
        sizes["MAX_SPLITS"] = MAX_SPLITS
        options = {"num_warps": paged_attention_kernel.REDUCE_WARPS}
        yield f"reduce splits d{D}", Kernel(reduce, sizes, options)
    norm = elementwise_kernels.rms_norm_kernel
    for E, has_residual in product((128, 576, 4096, 16384), (False, True)):
        # 128: Qwen3, each of 32 heads
        sizes = {"H": 32 if E == 128 else 1, "E": E, "E_PAD": triton.next_power_of_2(E)}
        sizes["HAS_RESIDUAL"] = has_residual
        options = {"num_warps": elementwise_kernels.warps_of_row(E)}
        yield f"rms norm {E}" + " residual" * has_residual, Kernel(norm, sizes, options)
    sizes = {"F": 11008, "BLOCK": elementwise_kernels.SILU_BLOCK}
    yield "silu", Kernel(elementwise_kernels.silu_mul_kernel, sizes, {})
    sizes = {name: getattr(experts, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    sizes["WIDEN"] = False
    options = {
        "num_warps": experts.num_warps_on(CHIPS[target.capability].capability),
        "num_stages": experts.NUM_STAGES,
    }
    yield "experts", Kernel(experts.grouped_matmul_kernel, sizes, options)


def signature(kernel: Kernel, target: Target) -> dict[str, str]:
    types = {}
    scale = "bf16" if target.cache in CACHES else target.cache
    for name in kernel.function.arg_names:
        is_float_pointer = name in FLOAT_POINTERS
        if name in kernel.constants:
            types[name] = "constexpr"
        elif name == "slot_ptr":
            types[name] = "*i64"
        elif name in CACHE_POINTERS | SCALE_POINTERS:
            types[name] = f"*{target.cache if name in CACHE_POINTERS else scale}"
        elif name.endswith("_ptr"):
            usual = "*fp32" if is_float_pointer else f"*{target.dtype}"
            types[name] = INT_POINTERS.get(name, usual)
        else:
            types[name] = "fp32" if name in FLOATS else "i32"
    return types


def compiled(kernel: Kernel, target: Target):
    names = kernel.function.arg_names
    # The launcher promises that pointers, sizes and strides are multiples of 16 when they are.
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith(("_ptr", "q_stride", "x_stride"))
        or (name in ("k_stride", "v_stride", "N", "K") and name not in kernel.constants)
    }
    by_position = {(names.index(name),): value for name, value in kernel.constants.items()}
    source = ASTSource(kernel.function, signature(kernel, target), by_position, hints)
    gpu = GPUTarget("cuda", target.capability, 32)
    return triton.compile(source, target=gpu, options=kernel.options)


def report(job: tuple[Target, str]) -> dict:
    """What the compiler made of a kernel, or said."""
    target, name = job
    try:
        kernel = kernels(target)[name]
        code = compiled(kernel, target)
    except Exception as error:  # whatever Triton raises: the others are compiled all the same
        cause = error.__cause__ or error
        return {"error": f"{type(cause).__name__}: {cause}"}
    name_of_function = {"kernel": kernel.function.fn.__name__}
    return name_of_function | in_flight(code.asm["ttgir"]) | machine_code(code)


def in_flight(ttgir: str) -> dict:
    """Of tiles that a loop copies into shared memory: how many there is room for, of each kind,
    and how many copies are still on their way when the loop has waited for one."""
    buffers = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    waits = re.findall(r"async_wait .*?\bnum = (\d+)", ttgir)
    return {"buffers": [int(x) for x in buffers], "wait": max(map(int, waits), default=0)}


def machine_code(code) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage = output(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        text = output(TOOLS / "nvdisasm", "-c", file.name)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b(?:{pattern})\b", text))

    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": code.metadata.shared,
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", text, re.M)),
        "spills": count(SPILL),
        "spills_in_loops": sum(len(re.findall(SPILL, loop)) for loop in loops(text)),
        "matrix": count(r"HMMA[.\w]*|[HQ]GMMA[.\w]*|UTC\w*MMA[.\w]*"),
        "copies_16_byte": count(r"LDGSTS[.\w]*128"),
        "loads_16_byte": count(r"LDG[.\w]*128"),
        "copies": count(r"LDGSTS[.\w]*"),
    }


def loops(code: str) -> list[str]:
    """From each label to a branch back to it."""
    found = []
    for label in re.finditer(r"^(\.L\w+):", code, re.M):
        rest = code[label.end() :]
        if back := re.search(rf"\bBRA\b[^`\n]*`\({re.escape(label[1])}\)", rest):
            found.append(rest[: back.end()])
    return found


def output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="+", help='such as "90/bf16/llama3 *"')
    parser.add_argument("--list", action="store_true", help="the names, nothing compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--all-formats", action="store_true", help="those a chip lacks too")
    args = parser.parse_args()
    jobs = list(matching(args.patterns, args.all_formats))
    names = [f"{target}/{name}" for target, name in jobs]
    if args.list:
        print(*names, sep="\n")
        return
    # Its children have Triton imported, and know the kernels.
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        reports = pool.imap(report, jobs)
        json.dump(dict(zip(names, reports, strict=True)), sys.stdout)


if __name__ == "__main__":
    main()
