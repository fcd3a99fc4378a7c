"""Compile every kernel for a GPU that need not be there, and read its machine code.

    python tests/kernels/compile_kernels.py 90 bf16 > report.json
    python tests/kernels/compile_kernels.py 90 bf16:i8 "decode llama3"      (a cache of int8)

A script of its own, since Triton's interpreter must be off in the process that compiles.
For each kernel and shape it prints registers, stack, shared memory, and counts of the
instructions that decide its speed, read with the tools inside Triton's own package.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanobatch import paged_attention_kernel
from nanobatch.extensions import quantized_kernels
from nanobatch.extensions.quantized_cache import LARGEST, SMALLEST_SCALE
from nanobatch.kernels import grouped_matmul as experts
from nanobatch.kernels import triton_ops as elementwise_kernels
from nanobatch.kernels.launch_config import CHIPS, MAX_SPLITS, Chip, choose_launch_config

SPILL = r"\b(?:STL|LDL)\b"  # a store to the stack, a load from it
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
INT_POINTERS = dict.fromkeys(
    [
        "block_tables_ptr",
        "seq_lens_ptr",
        "query_start_ptr",
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
# (name, H, K, D): Llama-2-7B, Llama-3-8B, SmolLM2, and shapes that are no powers of two;
# large heads, and the same with Gemma 2's soft cap and window
SHAPES = [("llama2", 32, 32, 128), ("llama3", 32, 8, 128), ("smollm2", 9, 3, 64)]
SHAPES += [("d80", 32, 8, 80), ("d96", 32, 8, 96), ("d256", 16, 8, 256), ("gemma2", 16, 8, 256)]
# (name, T, S, query tokens of the longest)
STEPS = [("decode", 64, 64, 1), ("split", 1, 1, 1), ("prefill", 8192, 8, 1024)]
STEPS += [("draft", 40, 8, 5), ("chunk", 128, 8, 16)]


def kernels(dtype: str, cache: str, chip: Chip):
    """(name, function, constants, options) of everything that is launched."""
    is_8 = cache in CACHES
    for name, H, K, D in SHAPES:
        is_gemma2 = name == "gemma2"
        for kind, T, S, longest in STEPS:
            sizes = (T, S, longest, H, K, D, ITEMSIZE[dtype], chip)
            choose = quantized_kernels.quantized_launch_config if is_8 else choose_launch_config
            launch = choose(*sizes)
            constants = {
                "K": K, "G": H // K, "D": D, "D_PAD": triton.next_power_of_2(D), "P": 16,
                "BLOCK_M": launch.block_m, "BLOCK_Q": launch.block_q, "TILE": launch.tile,
                "WINDOW": 4096 if is_gemma2 else 0, "HAS_SOFTCAP": is_gemma2,
                "NUM_SPLITS": launch.num_splits,
                "WIDEN": False,
            }  # fmt: skip
            options = {
                "num_warps": launch.num_warps, "num_stages": launch.num_stages,
                "maxnreg": launch.max_registers,
            }  # fmt: skip
            function = paged_attention_kernel.paged_attention_kernel
            if is_8:
                function = quantized_kernels.quantized_attention_kernel
            yield f"{kind} {name}", function, constants, options
    constants = {"D": 128, "D_PAD": 128, "NUM_SPLITS": MAX_SPLITS}
    yield "reduce splits", paged_attention_kernel.reduce_splits_kernel, constants, {}
    constants = {"E": 4096, "E_PAD": 4096, "HAS_RESIDUAL": True}
    yield "rms norm", elementwise_kernels.rms_norm_kernel, constants, {}
    constants = {"H": 32, "K": 8, "D": 128, "P": 16, "R": 64, "R_PAD": 64}
    constants["HEADS"] = elementwise_kernels.ROPE_HEADS
    rope = elementwise_kernels.rope_and_write_kernel
    if is_8:
        rope = quantized_kernels.quantized_rope_and_write_kernel
        constants |= {"LARGEST": LARGEST[CACHES[cache]], "SMALLEST_SCALE": SMALLEST_SCALE}
    yield "rope", rope, constants, {}
    blocks = {name: getattr(experts, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
    blocks["WIDEN"] = False
    options = {"num_warps": experts.NUM_WARPS, "num_stages": experts.NUM_STAGES}
    yield "experts", experts.grouped_matmul_kernel, blocks, options
    yield "silu", elementwise_kernels.silu_mul_kernel, {"F": 11008, "BLOCK": 1024}, {}


def signature(function, constants: dict, dtype: str, cache: str) -> dict[str, str]:
    types = {}
    scale = "bf16" if cache in CACHES else cache
    for name in function.arg_names:
        is_float_pointer = name in FLOAT_POINTERS
        if name in constants:
            types[name] = "constexpr"
        elif name == "slot_ptr":
            types[name] = "*i64"
        elif name in CACHE_POINTERS | SCALE_POINTERS:
            types[name] = f"*{cache if name in CACHE_POINTERS else scale}"
        elif name.endswith("_ptr"):
            types[name] = INT_POINTERS.get(name, "*fp32" if is_float_pointer else f"*{dtype}")
        else:
            types[name] = "fp32" if name in FLOATS else "i32"
    return types


def report(
    function, constants: dict, options: dict, dtype: str, cache: str, capability: int
) -> dict:
    names = function.arg_names
    # The launcher promises that pointers, sizes and strides are multiples of 16 when they are.
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith(("_ptr", "q_stride"))
        or (name in ("k_stride", "v_stride", "N", "K") and name not in constants)
    }
    by_position = {(names.index(name),): value for name, value in constants.items()}
    types = signature(function, constants, dtype, cache)
    source = ASTSource(function, types, by_position, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = output(TOOLS / "cuobjdump", "--dump-resource-usage", file.name)
        code = output(TOOLS / "nvdisasm", "-c", file.name)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()

    def count(pattern: str) -> int:
        return len(re.findall(rf"\b(?:{pattern})\b", code))

    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.M)),
        "spills": count(SPILL),
        "spills_in_loops": sum(len(re.findall(SPILL, loop)) for loop in loops(code)),
        "matrix": count(r"HMMA[.\w]*|[HQ]GMMA[.\w]*|UTC\w*MMA[.\w]*"),
        "copies_8_byte": count(r"LDGSTS[.\w]*\.64"),
        "copies_16_byte": count(r"LDGSTS[.\w]*128"),
        "loads_16_byte": count(r"LDG[.\w]*128"),
        "copies": count(r"LDGSTS[.\w]*"),
    }


def loops(code: str) -> list[str]:
    """From each label to a branch back to it."""
    found = []
    for label in re.finditer(r"^(\.L\w+):", code, re.M):
        rest = code[label.end() :]
        if back := re.search(rf"\bBRA[.\w]* `\({re.escape(label[1])}\)", rest):
            found.append(rest[: back.end()])
    return found


def output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    capability, (dtype, _, cache) = int(sys.argv[1]), sys.argv[2].partition(":")
    cache = cache or dtype
    wanted = sys.argv[3:]
    rows = {
        name: report(function, constants, options, dtype, cache, capability)
        for name, function, constants, options in kernels(dtype, cache, CHIPS[capability])
        if not wanted or name in wanted
    }
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
