"""What each instruction does to a Machine: (machine, instruction, who), who: bool [threads]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx import warp as warps
from ptx.arithmetic import bits, meaning, numbers, size_of
from ptx.parse import Address, Instruction
from ptx.warp import LANES

if TYPE_CHECKING:
    from ptx.machine import Machine


# ---- what changes the flow ---------------------------------------------------------------


def branch(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    machine.pc[who] = machine.code.labels[instruction.operands[0]]


def finish(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    machine.is_done |= who


def wait_for_all(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    machine.whole_warps(who | machine.is_done)
    machine.is_waiting |= who


CONTROL = {"bra": branch, "ret": finish, "bar": wait_for_all}

# ---- the others --------------------------------------------------------------------------


def compute(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """Arithmetic: a result for each thread from its own numbers."""
    target, *sources = instruction.operands
    key = id(instruction)
    if key not in machine.meanings:
        machine.meanings[key] = meaning(instruction.name, instruction.modifiers, len(sources))
    kinds, function, result_kind = machine.meanings[key]
    values = [
        numbers(machine.read(x, kind), kind) for x, kind in zip(sources, kinds, strict=True)
    ]
    result = bits(function(*values), result_kind)
    signed = f"i{result.dtype.itemsize}" if result_kind[0] == "s" else result.dtype
    machine.write(target, result.view(signed), who)


def move(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """Copy a register; split it into smaller ones, low bits first; or join it of some."""
    target, source = instruction.operands
    kind = instruction.kind
    if isinstance(target, list):
        size = size_of(kind) // len(target)
        parts = machine.read(source, kind)[:, None].view(f"u{size}")
        for register, part in zip(target, parts.T, strict=True):
            if register != "_":
                machine.write(register, np.ascontiguousarray(part), who)
    elif isinstance(source, list):
        size = size_of(kind) // len(source)
        parts = np.stack([machine.read(x, f"b{8 * size}") for x in source], axis=1)
        machine.write(target, parts.view(f"u{size_of(kind)}")[:, 0], who)
    else:
        machine.write(target, machine.read(source, kind), who)


def load(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """ld.param, ld.global, ld.shared."""
    targets, source = instruction.operands
    targets = [targets] if isinstance(targets, str) else targets
    size = size_of(instruction.kind)
    if "param" in instruction.modifiers:
        value = machine.arguments[source.base]
        machine.write(targets[0], np.full(len(machine.pc), value), who)
        return
    lanes, width = np.flatnonzero(who), size * len(targets)
    if "global" in instruction.modifiers:
        address = machine.address(source, "u64", lanes)
        found = machine.memory.load(address, width, machine.launch_program[lanes])
    else:
        address = machine.address(source, "u32", lanes)
        found = machine.shared.load(machine.program[lanes], machine.warp[lanes], address, width)
    for register, value in zip(targets, found.view(f"u{size}").T, strict=True):
        machine.write_some(register, value, lanes)


def store(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """st.global, st.shared."""
    target, sources = instruction.operands
    sources = [sources] if isinstance(sources, str) else sources
    lanes, kind = np.flatnonzero(who), instruction.kind
    values = np.stack([machine.read(x, kind)[lanes] for x in sources], axis=1)
    word = f"u{min(size_of(kind) * len(sources), 8)}"
    values = np.ascontiguousarray(values).view(word)
    if "global" in instruction.modifiers:
        address = machine.address(target, "u64", lanes)
        machine.memory.store(address, values, machine.launch_program[lanes])
    else:
        address = machine.address(target, "u32", lanes)
        machine.shared.store(machine.program[lanes], machine.warp[lanes], address, values)


def copy_later(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """cp.async: start copies, close a group of them, wait for groups."""
    what = instruction.modifiers[1]
    if what == "commit_group":
        machine.num_groups[who] += 1
    elif what in ("wait_group", "wait_all"):
        num_open = int(instruction.operands[0], 0) if what == "wait_group" else 0
        last = np.where(who, machine.num_groups - num_open - (what == "wait_group"), -1)
        machine.shared.finish_copies(last, machine.warp)
    else:
        target, source, width, *size = instruction.operands
        lanes, width = np.flatnonzero(who), int(width, 0)
        num_bytes = machine.read(size[0], "u32")[lanes] if size else np.full(len(lanes), width)
        if not np.isin(num_bytes, (0, width)).all():
            raise NotImplementedError(f"{instruction.text}: a part of its {width} bytes")
        machine.shared.start_copy(
            lanes, machine.num_groups[lanes], machine.program[lanes], machine.warp[lanes],
            machine.address(target, "u32", lanes), machine.address(source, "u64", lanes),
            num_bytes > 0, width,
        )  # fmt: skip


def _by_warp(machine: Machine, operands: list[str], which: np.ndarray) -> np.ndarray:
    """Registers of 32 bits: [registers, warps, 32]."""
    return np.stack([machine.read(x, "b32").reshape(-1, LANES)[which] for x in operands])


def _write_warps(
    machine: Machine, targets: list[str], values: np.ndarray, which: np.ndarray
) -> None:
    lanes = (which[:, None] * LANES + np.arange(LANES)).ravel()
    for register, value in zip(targets, values, strict=True):
        machine.write_some(register, value.ravel(), lanes)


def multiply_matrices(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """mma.sync.m16n8k16 of 16-bit numbers, summed in float32."""
    shape, *_, out, kind, other, added = instruction.modifiers[2:]
    is_known = shape == "m16n8k16" and kind == other and out == added == "f32"
    if not is_known or kind not in ("f16", "bf16"):
        raise NotImplementedError(instruction.text)
    which = machine.whole_warps(who)
    target, *factors = instruction.operands
    a, b, c = (_by_warp(machine, x, which) for x in factors)
    _write_warps(machine, target, warps.mma(a, b, c, kind), which)


def _rows(machine: Machine, operand: Address, num: int, which: np.ndarray) -> tuple:
    """Threads and addresses of the rows that they name: the first 8 * num of each warp."""
    lanes = (which[:, None] * LANES + np.arange(8 * num)).ravel()
    return machine.program[lanes], machine.warp[lanes], machine.address(operand, "u32", lanes)


def load_matrices(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """ldmatrix: thread 8 * i + r of a warp says where row r of matrix i lies."""
    which = machine.whole_warps(who)
    targets, source = instruction.operands
    rows = machine.shared.load(*_rows(machine, source, len(targets), which), 16)
    matrices = rows.view(np.uint16).reshape(len(which), len(targets), 8, 8)
    values = warps.registers_of(matrices, "trans" in instruction.modifiers)
    _write_warps(machine, targets, values, which)


def store_matrices(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """stmatrix."""
    which = machine.whole_warps(who)
    target, sources = instruction.operands
    registers = _by_warp(machine, sources, which)
    matrices = warps.matrices_of(registers, "trans" in instruction.modifiers)
    rows = matrices.reshape(-1, 8).view(np.uint64)
    machine.shared.store(*_rows(machine, target, len(sources), which), rows)


def shuffle(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """shfl.sync between all threads of a warp."""
    target, source, by, clamp, members = instruction.operands
    if clamp != "31" or members != "-1":
        raise NotImplementedError(instruction.text)
    which = machine.whole_warps(who)
    x, amount = _by_warp(machine, [source, by], which)
    _write_warps(
        machine, [target], warps.shuffle(x, amount, instruction.modifiers[1])[None], which
    )


def ignore(machine: Machine, instruction: Instruction, who: np.ndarray) -> None:
    """A hint to the cache: no policy is kept."""
    machine.write(instruction.operands[0], np.zeros(len(machine.pc), np.uint64), who)


HANDLERS: dict[str, Callable[[Machine, Instruction, np.ndarray], None]] = {
    "mov": move,
    "ld": load,
    "st": store,
    "cp": copy_later,
    "mma": multiply_matrices,
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
    "shfl": shuffle,
    "createpolicy": ignore,
}
