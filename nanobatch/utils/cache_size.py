"""How many blocks the KV cache gets: arithmetic on bytes, without torch.

    on a CPU    what max_num_seqs requests of max_model_len tokens need, at most 2 GiB
    on a GPU    what the weights and one step leave free (utils/device.py measures that)
    to swap to  as many as the pool, in at most 4 GiB of host memory

Used by the runner, the host's cache and the simulator.
"""

from __future__ import annotations

from nanobatch.utils.arithmetic import cdiv

GIB = 2**30
SCALE_BYTES = 2  # the scale of each row of 8-bit numbers (extensions/quantized_cache.py)
CPU_CACHE_BYTES = 2 * GIB  # at most, unless num_blocks is given
HOST_CACHE_BYTES = 4 * GIB  # at most, unless num_host_blocks is given; vLLM's swap_space
MAX_CACHE_BYTES = 2**40
MAX_AUTO_BLOCKS = 2**20  # for a small model on a large GPU, where memory sets no limit


def row_bytes(head_dim: int, itemsize: int) -> int:
    """Bytes of one token's keys (or values) of one KV head in the cache.

    Args:
        itemsize: bytes of one number. 8-bit numbers have a scale beside each row.
    """
    return head_dim * itemsize + (SCALE_BYTES if itemsize == 1 else 0)


def blocks_on_cpu(
    max_num_seqs: int, max_model_len: int, block_size: int, bytes_per_block: int
) -> int:
    """Enough for the largest batch of the longest requests, within CPU_CACHE_BYTES."""
    wanted = max_num_seqs * cdiv(max_model_len, block_size)
    return max(1, min(wanted, CPU_CACHE_BYTES // bytes_per_block))


def blocks_on_gpu(free_bytes: int, bytes_per_block: int) -> int:
    """Blocks that fit into free_bytes; below 1 if none does."""
    return min(free_bytes // bytes_per_block, MAX_AUTO_BLOCKS)


def blocks_to_swap_to(num_blocks: int, bytes_per_block: int) -> int:
    """As many as a pool of num_blocks, within HOST_CACHE_BYTES, but at least one."""
    return max(1, min(num_blocks, HOST_CACHE_BYTES // bytes_per_block))


def check_cache_size(name: str, num_blocks: int, block_size: int, bytes_per_block: int) -> None:
    """Raise ValueError if a block, or all of a cache, is larger than any machine's memory.

    Args:
        name: the setting that num_blocks comes from, for the message.
    """
    most = MAX_CACHE_BYTES // bytes_per_block
    if most == 0:
        raise ValueError(
            f"block_size is {block_size}; with {bytes_per_block // block_size} bytes a token "
            f"it must be <= {MAX_CACHE_BYTES * block_size // bytes_per_block}"
        )
    if num_blocks > most:
        raise ValueError(
            f"{name} is {num_blocks}; with {bytes_per_block} bytes a block it must be <= {most}"
        )
