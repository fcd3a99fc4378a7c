"""Checks of arguments: a ValueError that names the parameter, the value and what is allowed.

Used by the configuration, by requests and by whatever reads files and command lines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

MAX_FLOAT = sys.float_info.max


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ValueError unless value is an int (not a bool) with low <= value <= high."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} is {shown(value)}; it must be an int {allowed}")


def check_float(
    name: str, value: object, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise ValueError unless value is a finite number with low <= value <= high.

    open_low: low itself is not allowed. An int counts as a number, a bool does not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Refuses NaN and inf, and ints that no float can hold.
    in_range = is_number and abs(value) <= MAX_FLOAT and low <= value <= high
    if not in_range or (open_low and value == low):
        upper = "inf)" if high == math.inf else f"{high}]"
        allowed = f"{'(' if open_low else '['}{low}, {upper}"
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number in {allowed}")


def shown(value: object) -> str:
    """A value for a message. Python writes no int of more than 4,300 digits."""
    try:
        return repr(value)
    except ValueError:
        return f"{type(value).__name__} with too many digits to show"


def check_token_ids(name: str, token_ids: object) -> None:
    """Raise ValueError unless token_ids is a sequence of ints >= 0."""
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise ValueError(f"{name} is {shown(token_ids)}; it must be a list of ints >= 0")
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise ValueError(f"{name} has {shown(token_id)}; each must be an int >= 0")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless value is one of the choices."""
    if value not in choices:
        raise ValueError(
            f"{name} is {shown(value)}; it must be one of {', '.join(map(repr, choices))}"
        )


def check_bool(name: str, value: object) -> None:
    """Raise ValueError unless value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")
