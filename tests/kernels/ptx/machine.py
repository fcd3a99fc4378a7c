"""Threads: what each does next, their registers, branches and barriers.

All programs of a launch are run at once: a register is an array with a number for each thread
of each. The threads at the lowest instruction go first; where a branch parts them, those ahead
wait until the others have caught up, or have gone another way to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx import warp as warps
from ptx.arithmetic import bits, meaning, numbers, size_of
from ptx.memory import Fault, GlobalMemory
from ptx.parse import Address, Instruction, Program
from ptx.shared import SharedMemory

LANES = warps.LANES


class Machine:
    """Some programs of one kernel.

    arguments: bits of each parameter, by its name in the PTX. ids: int [programs, 3].
    first_program: the number of the first among those of the launch.
    """

    def __init__(
        self, program: Program, memory: GlobalMemory, shared_size: int,
        arguments: dict[str, np.ndarray], ids: np.ndarray, first_program: int = 0,
    ):  # fmt: skip
        self.code, self.memory, self.arguments = program, memory, arguments
        self.num_programs, size = len(ids), program.num_threads
        num_threads = self.num_programs * size
        self.program = np.repeat(np.arange(self.num_programs), size)
        self.launch_program = self.program + first_program
        thread = np.tile(np.arange(size), self.num_programs)
        self.warp = thread // LANES
        self.num_warps = size // LANES
        self.shared = SharedMemory(shared_size, self.num_programs, self.num_warps, memory)
        self.registers = {"%tid.x": thread.astype(np.uint32)}
        self.registers |= {
            f"%ctaid.{axis}": np.repeat(ids[:, i], size).astype(np.uint32)
            for i, axis in enumerate("xyz")
        }
        self.constants: dict[tuple[str, str], np.ndarray] = {}
        self.pc = np.zeros(num_threads, np.int64)
        self.is_waiting = np.zeros(num_threads, bool)
        self.is_done = np.zeros(num_threads, bool)
        self.num_groups = np.zeros(num_threads, np.int64)  # of asynchronous copies, committed
        self.active, self.is_whole = ~self.is_done, True
        self.meanings: dict[int, tuple] = {}

    def run(self, order: Sequence[Sequence[int]] | None = None) -> None:
        """Run all threads to their end.

        Args:
            order: warps of a program; those of one entry go together, from barrier to
                barrier, one entry after the other. None: all together.

        Raises:
            Fault: the programs do what they must not do.
        """
        turns = [np.isin(self.warp, some) for some in order or [range(self.num_warps)]]
        with np.errstate(all="ignore"):
            while not self.is_done.all():
                for turn in turns:
                    while self._advance(turn):
                        pass
                self._release()

    def _advance(self, turn: np.ndarray) -> bool:
        """Run the threads at the lowest instruction up to where others are, or a branch."""
        is_running = turn & ~self.is_waiting & ~self.is_done
        if not is_running.any():
            return False
        pcs = self.pc[is_running]
        start = pcs.min()
        ahead = pcs[pcs > start]
        stop = ahead.min() if ahead.size else len(self.code.instructions)
        self.active = is_running & (self.pc == start)
        self.is_whole = bool((self.active | self.is_done).all())
        for pc in range(start, stop):
            instruction = self.code.instructions[pc]
            who = self.active
            if instruction.guard is not None:
                holds = self.read(instruction.guard, "pred")
                who = who & (~holds if instruction.is_guard_negated else holds)
            if instruction.name in CONTROL:
                self.pc[self.active] = pc + 1
                CONTROL[instruction.name](self, instruction, who)
                return True
            if who is self.active or who.any():
                try:
                    HANDLERS.get(instruction.name, compute)(self, instruction, who)
                except Fault as fault:
                    raise Fault(f"{instruction.text}: {fault}") from None
        self.pc[self.active] = stop
        return True

    def _release(self) -> None:
        """Let programs pass whose threads have all arrived; of several barriers the first."""
        size = self.code.num_threads
        is_here = (self.is_waiting | self.is_done).reshape(-1, size).all(1)
        is_here &= self.is_waiting.reshape(-1, size).any(1)
        if not is_here.any():
            return
        waiting = self.is_waiting & np.repeat(is_here, size)
        first = self.pc[waiting].min()
        is_here &= ((self.pc == first) & waiting).reshape(-1, size).any(1)
        self.is_waiting &= ~np.repeat(is_here, size)
        self.shared.barrier(is_here)

    def read(self, operand: str, kind: str) -> np.ndarray:
        """A register's or a constant's bits, as unsigned integers of the type's size."""
        x = self.registers.get(operand)
        if x is None:
            key = operand, kind
            if key not in self.constants:
                self.constants[key] = self._constant(operand, kind)
            return self.constants[key]
        size = size_of(kind)
        if x.dtype.itemsize == size:
            return x
        return x.astype(f"u{size}")  # cut, or extended by the sign of what was stored

    def _constant(self, text: str, kind: str) -> np.ndarray:
        if text.startswith("%"):  # not written yet
            return np.full(len(self.pc), kind != "pred" and -1).astype(_storage(kind))
        if text.startswith(("0f", "0d")):
            value = int(text[2:], 16)
        elif text == "global_smem":
            value = 0  # where shared memory begins
        else:
            value = int(text.rstrip("U"), 0)
        if kind == "pred":
            return np.full(len(self.pc), value != 0)
        value &= (1 << 8 * size_of(kind)) - 1
        return np.full(len(self.pc), value, _storage(kind))

    def write(self, register: str, value: np.ndarray, who: np.ndarray) -> None:
        """Set a register of some threads; what it holds of others stays."""
        if not (who is self.active and self.is_whole):
            value = np.where(who, *self._alike(value, register))
        self.registers[register] = value

    def write_some(self, register: str, value: np.ndarray, lanes: np.ndarray) -> None:
        """Set a register of the threads `lanes`, to one value for each."""
        value, old = self._alike(value, register)
        new = old.copy()
        new[lanes] = value
        self.registers[register] = new

    def _alike(self, value: np.ndarray, register: str) -> tuple[np.ndarray, np.ndarray]:
        """value, and what the register holds, in a type that has room for both."""
        old = self.registers.get(register)
        if old is None:
            old = np.full(len(self.pc), value.dtype != bool and -1).astype(value.dtype)
        if old.dtype.itemsize == value.dtype.itemsize:
            return value, old.view(value.dtype)
        size = max(old.dtype.itemsize, value.dtype.itemsize)
        return value.astype(f"u{size}"), old.astype(f"u{size}")

    def address(self, operand: Address, kind: str, lanes: np.ndarray) -> np.ndarray:
        """Addresses of some threads; kind: u64 in global memory, u32 in shared memory."""
        base = self.read(operand.base, kind)[lanes]
        return base + base.dtype.type(operand.offset & (1 << 8 * size_of(kind)) - 1)

    def whole_warps(self, who: np.ndarray) -> np.ndarray:
        """The warps that take part; each must with all of its threads."""
        by_warp = who.reshape(-1, LANES)
        takes_part = by_warp.all(1)
        if (by_warp.any(1) != takes_part).any():
            raise Fault("some threads of a warp do not take part")
        return np.flatnonzero(takes_part)


def _storage(kind: str) -> np.dtype:
    return np.dtype(bool if kind == "pred" else f"u{size_of(kind)}")


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
