"""How one launch of the attention kernel is cut into programs, and what each of them reads.

Plain arithmetic on shapes: it can be read, tested and drawn without a GPU and without Triton.
The cut depends on the batch's shape alone, never on sequence lengths on the device: a captured
graph stays right while its sequences grow, and the grid is known without waiting for the GPU.

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: the unified Triton attention of vLLM;
Flash-Decoding (Dao et al., 2023) for the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanobatch.utils.arithmetic import cdiv, next_power_of_two

MAX_SPLITS = 64


@dataclass(frozen=True)
class LaunchConfig:
    """How one launch is cut up. Numbers of rows, keys, programs."""

    block_m: int  # rows of a program's products
    block_q: int  # query tokens of a program
    tile: int  # keys of one iteration
    num_splits: int  # programs that share one query block's keys
    grid: tuple[int, int, int]  # query blocks, KV heads, splits
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None: the compiler's choice


def choose_launch_config(
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_sms: int,
    is_quantized: bool = False,
) -> LaunchConfig:
    """Choose the launch from shapes alone, never from sequence lengths on the device.

    Rows: as many as the longest query fills, from 16 (tl.dot's least) to 128; 64 for large
    heads, 16 in float32, which has no matrix units and would run out of registers (read from
    the machine code: tests/test_compiled_kernels.py). Keys: tiles of 64, fewer for large
    heads. Warps: 8 where a product's result would fill the registers of 4. Caches in 8 bits
    take registers for their conversion: at most 64 rows, half the keys, and all the registers
    there are, since the compiler would rather spill a few to fit one more program. Splits:
    only when all decode, and then enough for two programs a multiprocessor, a power of two,
    at most MAX_SPLITS.

    Args:
        num_tokens, num_seqs, max_query_len: T, S, and the most query tokens of a sequence.
        num_heads, num_kv_heads, head_dim: H, K, D.
        itemsize: bytes of one number of the products, the queries'.
        num_sms: multiprocessors of the GPU.
        is_quantized: the cache is in 8 bits, and converted in registers.
    """
    group = num_heads // num_kv_heads
    is_large, is_float32 = head_dim > 128, itemsize == 4
    most_rows = 16 if is_float32 else 64 if is_large or is_quantized else 128
    tile = 64 if not is_large else 16 if is_float32 else 32
    rows = min(max_query_len * group, most_rows)
    block_m = max(16, next_power_of_two(group), next_power_of_two(rows))
    block_q = block_m // group
    num_warps = 8 if block_m >= (128 if head_dim <= 64 else 64) else 4
    if is_quantized and is_float32:
        tile, num_warps = 16, 8
    elif is_quantized:
        tile //= 2
    num_splits = 1
    if max_query_len == 1:
        num_splits = next_power_of_two(cdiv(2 * num_sms, num_seqs * num_kv_heads))
    num_splits = min(num_splits, MAX_SPLITS)
    return LaunchConfig(
        block_m=block_m,
        block_q=block_q,
        tile=tile,
        num_splits=num_splits,
        grid=(num_tokens // block_q + num_seqs, num_kv_heads, num_splits),
        num_warps=num_warps,
        num_stages=2,
        max_registers=255 if is_quantized else None,
    )


def keys_of_program(
    plan: LaunchConfig,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    query_block: int,
    split: int = 0,
    sliding_window: int | None = None,
) -> tuple[int, int, int]:
    """What one program reads, computed as the kernel does: (sequence, first key, end key).

    Keys are positions; first == end for a program that reads nothing. It reads
    2 * (end - first) * head_dim numbers of the cache: keys and values of one KV head.
    """
    owns = [start // plan.block_q + s for s, start in enumerate(query_start_loc[:-1])]
    seq = max(s for s, first in enumerate(owns) if first <= query_block)
    query_len = query_start_loc[seq + 1] - query_start_loc[seq]
    first_query = (query_block - owns[seq]) * plan.block_q
    if first_query >= query_len:
        return seq, 0, 0
    context_len = seq_lens[seq] - query_len
    last_query = min(first_query + plan.block_q, query_len) - 1
    end_tile = cdiv(context_len + last_query + 1, plan.tile)
    first_tile = 0
    if sliding_window is not None:
        first_tile = max(context_len + first_query - sliding_window + 1, 0) // plan.tile
    tiles_per_split = cdiv(end_tile - first_tile, plan.num_splits)
    first_tile += split * tiles_per_split
    end_tile = min(end_tile, first_tile + tiles_per_split)
    end = min(end_tile * plan.tile, seq_lens[seq])
    return seq, min(first_tile * plan.tile, end), end
