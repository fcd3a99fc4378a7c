"""Threads: what each does next, their registers, branches and barriers.

All programs of a launch are run at once: a register is an array with a number for each thread
of each. The threads at the lowest instruction go first; where a branch parts them, those ahead
wait until the others have caught up, or have gone another way to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptx.arithmetic import size_of
from ptx.instructions import CONTROL, HANDLERS, compute
from ptx.memory import Fault, GlobalMemory
from ptx.parse import Address, Program
from ptx.shared import SharedMemory
from ptx.warp import LANES


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
