"""Bytes of the KV cache."""

from __future__ import annotations

SCALE_BYTES = 2  # of the scale of each row of 8-bit numbers (extensions/quantized_cache.py)


def row_bytes(head_dim: int, itemsize: int) -> int:
    """Bytes of one token's keys (or values) of one KV head in the cache.

    Args:
        itemsize: bytes of one number. Those of one byte have a scale beside them.
    """
    return head_dim * itemsize + (SCALE_BYTES if itemsize == 1 else 0)
