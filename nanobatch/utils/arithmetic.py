"""Integer arithmetic that several layers share."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Ceiling division: how many pieces of size b hold a things."""
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def keys_seen(start: int, num_tokens: int, window: int | None) -> tuple[int, int]:
    """(keys that any of the queries sees, scores: keys summed over the queries).

    The queries are at positions start .. start + num_tokens - 1; each sees what is before it,
    itself included, at most `window` keys.
    """
    end = start + num_tokens
    if window is None:
        window = end
    first = max(0, start - window + 1)
    short = max(0, min(end, window) - start)  # queries that see all there is before them
    scores = short * start + short * (short + 1) // 2 + (num_tokens - short) * window
    return end - first, scores
