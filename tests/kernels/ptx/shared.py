"""Shared memory of the programs that run together, with a check for races.

Between two barriers of a program each byte remembers which of its warps wrote it and which read
it, one bit for each. A read of what another warp wrote, and a write of what another warp read
or wrote, is a race: some order of the warps gives something else. But a write that changes
nothing is none: where several warps hold the same numbers, Triton lets each write them.

    byte        0  1  2  3                    warp 1 reads byte 2: a race, since warp 0 wrote it
    written by  .  .  w0 w0                   and no barrier came between
    read by     w1 w1 .  .

An asynchronous copy lands when its wait says so, no sooner. From its start until then nobody
may touch the bytes: on a GPU it lands at any time between.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ptx.memory import Fault, GlobalMemory, each_byte, words

UNWRITTEN = 0xFF  # NaN in every format of floating point


class Copy(NamedTuple):
    """Some threads' asynchronous copies of one instruction."""

    threads: np.ndarray  # [n]
    group: np.ndarray  # [n] the number of each thread's group
    target: np.ndarray  # [n, words] positions in shared memory
    source: np.ndarray  # [n] addresses in global memory
    is_copied: np.ndarray  # [n] False: zeros are written
    width: int


class SharedMemory:
    """size bytes for each program.

    Threads are given by their arrays [n]: program, warp (within the program), and address
    (within the program's memory).
    """

    def __init__(self, size: int, num_programs: int, num_warps: int, memory: GlobalMemory):
        assert num_warps <= 8, f"{num_warps} warps; a byte has a bit for each of 8"
        self.size, self.num_warps, self.memory = size, num_warps, memory
        self.stride = -(-size // 16) * 16
        num_bytes = num_programs * self.stride
        self.bytes = np.full(num_bytes, UNWRITTEN, np.uint8)
        self.writers, self.readers, self.awaited = np.zeros((3, num_bytes), np.uint8)
        self.copies: list[Copy] = []

    def barrier(self, programs: np.ndarray) -> None:
        """All warps of these programs have arrived: what they did before is settled."""
        for marks in (self.writers, self.readers):
            marks.reshape(-1, self.stride)[programs] = 0

    def load(self, program, warp, address, width: int) -> np.ndarray:
        """[n, width] bytes, as words."""
        at = self._check(program, address, width)
        self._note(at, warp, width)
        return self.bytes.view(words(width))[at]

    def store(self, program, warp, address, values: np.ndarray) -> None:
        """Write [n, width // itemsize] words."""
        width = values.shape[1] * values.itemsize
        at = self._check(program, address, width)
        self._note(at, warp, width, values)

    def start_copy(
        self, threads, group, program, warp, address, source, is_copied, width
    ) -> None:
        """Begin copies of width bytes from source (global memory) to address."""
        self.memory.check(source[is_copied], width)
        at = self._check(program, address, width)
        word = words(width)
        anything = ~self.bytes.view(word)[at]  # it is no write of what is there already
        self._note(at, warp, width, anything)
        self.awaited.view(word)[at] = ~word.type(0)
        self.copies.append(Copy(threads, group, at, source, is_copied, width))

    def finish_copies(self, last_group: np.ndarray, warp: np.ndarray) -> None:
        """Land each thread's copies up to its group last_group[thread] (-1: none)."""
        waiting = []
        for copy in self.copies:
            is_due = copy.group <= last_group[copy.threads]
            due, later = _select(copy, is_due), _select(copy, ~is_due)
            if len(due.threads):
                word = words(copy.width)
                values = np.zeros(due.target.shape, word)
                source = self.memory.check(due.source[due.is_copied], copy.width)
                values[due.is_copied] = self.memory.bytes.view(word)[source]
                self.awaited.view(word)[due.target] = 0
                self._note(due.target, warp[due.threads], copy.width, values)
            if len(later.threads):
                waiting.append(later)
        self.copies = waiting

    def _check(self, program, address, width: int) -> np.ndarray:
        """Positions in words."""
        address = address.astype(np.int64)
        if ((address < 0) | (address + width > self.size)).any():
            raise Fault(f"{width} bytes past shared memory's {self.size}: {address.max()}")
        if (address % width).any():
            raise Fault(f"misaligned in shared memory: {width} bytes at {address[:4]}")
        itemsize = words(width).itemsize
        first = (program * self.stride + address) // itemsize
        return first[:, None] + np.arange(width // itemsize)

    def _note(self, at, warp, width: int, values: np.ndarray | None = None) -> None:
        """Remember a read, or a write of values, warp by warp; raise Fault for a race."""
        word = words(width)
        writers, readers, awaited, memory = (
            x.view(word) for x in (self.writers, self.readers, self.awaited, self.bytes)
        )
        if awaited[at].any():
            raise Fault("an asynchronous copy has not landed where shared memory is used")
        for w in range(self.num_warps):
            mine = at[warp == w]
            if not mine.size:
                continue
            others = ~(word.type(1 << w) * each_byte(word))
            if values is None:
                is_race = writers[mine] & others != 0
                readers[mine] |= ~others
            else:
                new = values[warp == w]
                is_race = (writers[mine] | readers[mine]) & others != 0
                is_race &= memory[mine] != new
                writers[mine] |= ~others
                memory[mine] = new
            if is_race.any():
                what = "reads" if values is None else "writes"
                raise Fault(f"race: warp {w} {what} shared memory that another warp uses")


def _select(copy: Copy, which: np.ndarray) -> Copy:
    return Copy(*(x[which] for x in copy[:-1]), copy.width)
