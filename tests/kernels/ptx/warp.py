"""Instructions of a whole warp: its 32 threads hold the parts of small matrices.

Thread 4 * g + t of a warp (g in 0 .. 7, t in 0 .. 3) holds, two numbers of 16 bits a register:

    A [16, 16]   register i: row g + 8 * (i % 2), columns 2 * t and 2 * t + 1, + 8 * (i // 2)
    B [16, 8]    register i: rows 2 * t and 2 * t + 1, + 8 * i, column g
    C, D [16, 8] register i, one float32: row g + 8 * (i // 2), column 2 * t + i % 2
    ldmatrix     register i: row g of matrix i, columns 2 * t and 2 * t + 1

Arrays of registers are [registers, warps, 32], of unsigned integers.
"""

from __future__ import annotations

import numpy as np

from ptx.arithmetic import bits, numbers

LANES = 32


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    """mma.m16n8k16: a @ b + c in float32, of factors of kind f16 or bf16."""
    num_warps = a.shape[1]

    def split(x, shape):
        halves = numbers(np.ascontiguousarray(x).view(np.uint16), kind)
        return halves.reshape(*shape, num_warps, 8, 4, 2)  # ..., warp, g, t, half

    # Axes of a: column half, row half, warp, g, t, half. Of b: row half, warp, g, t, half.
    a_WMK = split(a, (2, 2)).transpose(2, 1, 3, 0, 4, 5).reshape(num_warps, 16, 16)
    b_WKN = split(b, (2,)).transpose(1, 0, 3, 4, 2).reshape(num_warps, 16, 8)
    c_WMN = numbers(c, "f32").reshape(2, 2, num_warps, 8, 4).transpose(2, 0, 3, 4, 1)
    d_WMN = a_WMK @ b_WKN + c_WMN.reshape(num_warps, 16, 8)
    d = d_WMN.reshape(num_warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return bits(np.ascontiguousarray(d).reshape(4, num_warps, LANES), "f32")


def registers_of(matrices: np.ndarray, is_transposed: bool) -> np.ndarray:
    """What ldmatrix gives: from uint16 [warps, registers, 8, 8], rows as they lie in memory."""
    if is_transposed:
        matrices = matrices.swapaxes(2, 3)
    num_warps, num_registers = matrices.shape[:2]
    pairs = np.ascontiguousarray(matrices).view(np.uint32)
    return pairs.reshape(num_warps, num_registers, LANES).swapaxes(0, 1)


def matrices_of(registers: np.ndarray, is_transposed: bool) -> np.ndarray:
    """The way back, for stmatrix."""
    num_registers, num_warps, _ = registers.shape
    pairs = np.ascontiguousarray(registers.swapaxes(0, 1)).view(np.uint16)
    matrices = pairs.reshape(num_warps, num_registers, 8, 8)
    return np.ascontiguousarray(matrices.swapaxes(2, 3) if is_transposed else matrices)


def shuffle(x: np.ndarray, by: np.ndarray, mode: str) -> np.ndarray:
    """shfl.sync: what the thread lane ^ by (bfly) or by (idx) holds; x, by: [warps, 32]."""
    lane = np.arange(LANES)
    source = {"bfly": lane ^ by, "idx": by % LANES}[mode]
    return np.take_along_axis(x, source.astype(np.int64), axis=1)
