"""Launch configuration: the sizes of the attention kernel's programs, for any GPU.

Plain arithmetic on shapes: it can be read, tested and drawn without a GPU and without Triton.
It depends on the batch's shape alone, never on sequence lengths on the device: a captured graph
stays right while its sequences grow. Which program does what: work_list.py.

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: the unified Triton attention of vLLM;
Flash-Decoding (Dao et al., 2023) for the splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nanobatch.utils.arithmetic import cdiv, next_power_of_two

MAX_SPLITS = 64


class Chip(NamedTuple):
    """What a launch must know of a GPU."""

    capability: tuple[int, int]  # its compute capability
    num_sms: int  # multiprocessors
    shared_memory: int  # bytes that one program may have


CHIPS = {  # by compute capability
    75: Chip((7, 5), 40, 65_536),  # T4
    80: Chip((8, 0), 108, 166_912),  # A100
    86: Chip((8, 6), 84, 101_376),  # A40
    89: Chip((8, 9), 128, 101_376),  # RTX 4090
    90: Chip((9, 0), 132, 232_448),  # H100, H200
    100: Chip((10, 0), 148, 232_448),  # B200
    120: Chip((12, 0), 170, 101_376),  # RTX 5090
}


@dataclass(frozen=True)
class LaunchConfig:
    """The sizes of one launch: rows, keys, splits."""

    block_m: int  # rows of a program's products
    block_q: int  # query tokens of a program
    tile: int  # keys of one iteration
    num_splits: int  # programs that share one query block's keys, if lengths are not known
    num_warps: int
    num_stages: int
    # Of a thread; None: the compiler's choice. It may spill a few to fit one more program; but
    # a decode and the largest products take fewer without spills than if given all there are.
    max_registers: int | None = None

    @property
    def variant(self) -> tuple[int | None, ...]:
        """What the compiler is told. Launches that are equal in it run the same code.

        Of one model on one chip it follows from the longest query alone.
        """
        sizes = (self.block_m, self.block_q, self.tile)
        return (*sizes, self.num_warps, self.num_stages, self.max_registers)


def choose_launch_config(
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    chip: Chip,
    max_rows: int = 128,
) -> LaunchConfig:
    """Choose the launch from shapes alone, never from sequence lengths on the device.

    Rows: as many as the longest query fills, from 16 (tl.dot's least) to max_rows and to what
    the chip's registers hold (_sizes_on). Splits: enough for two programs a multiprocessor, a
    power of two, at most MAX_SPLITS; where lengths are known, they decide (balanced_work).

    Args:
        num_tokens, num_seqs, max_query_len: T, S, and the most query tokens of a sequence.
        num_heads, num_kv_heads, head_dim: H, K, D.
        itemsize: bytes of one number of the products, the queries'.
        chip: the GPU.
        max_rows: the most rows of a program, a power of two.
    """
    group = num_heads // num_kv_heads
    sizes = _sizes_on(chip, head_dim, itemsize)
    rows = min(max_query_len * group, max_rows, sizes.max_rows)
    block_m = max(16, next_power_of_two(group), next_power_of_two(rows))
    block_q = block_m // group
    num_query_blocks = max(num_seqs, num_tokens // block_q)  # at least
    num_splits = next_power_of_two(cdiv(2 * chip.num_sms, num_query_blocks * num_kv_heads))
    num_warps = 8 if block_m >= sizes.rows_of_8_warps else 4
    has_matrix_units = chip.capability >= (8, 0) and itemsize < 4
    return LaunchConfig(
        block_m=block_m,
        block_q=block_q,
        tile=sizes.tile,
        num_splits=min(num_splits, MAX_SPLITS),
        num_warps=num_warps,
        num_stages=sizes.num_stages,
        max_registers=None if has_matrix_units and block_m in (16, 128) else 255,
    )


class _Sizes(NamedTuple):
    """What one program can hold."""

    max_rows: int
    tile: int  # keys
    rows_of_8_warps: int  # from so many rows on 4 warps have too few registers
    num_stages: int  # of the loop's pipeline: 3 keep two tiles on their way


def _sizes_on(chip: Chip, head_dim: int, itemsize: int) -> _Sizes:
    """The largest sizes that neither spill nor exceed shared memory, for heads of up to 256.

    Read from the machine code (tests/kernels/test_compiled_kernels.py). Matrix units of compute
    capability 9 and 10 (wgmma, tcgen05) take keys and values from shared memory, of which these
    chips have most. Those of others take them from registers: half the keys. Without matrix
    units (in float32; in Triton on any GPU before 8.0) all numbers pass through registers.
    """
    is_large, is_float32 = head_dim > 128, itemsize == 4
    has_async_copies = chip.capability >= (8, 0)
    num_stages = 3 if has_async_copies else 1
    if is_float32 or not has_async_copies:
        tile = 16 if is_large else 32
        return _Sizes(16 if is_float32 else 32, tile, rows_of_8_warps=16, num_stages=num_stages)
    takes_from_shared_memory = chip.capability[0] in (9, 10)
    tile = 64 * 64 // next_power_of_two(head_dim) * (2 if takes_from_shared_memory else 1)
    return _Sizes(
        max_rows=64 if is_large else 128,
        tile=min(tile, 64),
        rows_of_8_warps=64,
        num_stages=num_stages,
    )
