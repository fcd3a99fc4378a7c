"""Compare the result of an answer with the right one, and report the difference."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def call(answer: Callable, *args: object, **kwargs: object) -> object:
    """answer(*args); an exception becomes an AssertionError that names the input."""
    assert callable(answer), f"the answer is {answer!r}; it must be a function"
    try:
        return answer(*args, **kwargs)
    except NotImplementedError:
        raise AssertionError("there is no answer yet: it raises NotImplementedError") from None
    except Exception as error:
        raise AssertionError(f"{show(*args, **kwargs)} raises {error!r}") from error


def expect(found: object, wanted: object, *args: object, **kwargs: object) -> None:
    """AssertionError unless found equals wanted; it names the inputs, args and kwargs.

    Numbers and tensors: to a relative 1e-5. Lists and dicts: element by element.
    """
    if not _same(found, wanted):
        inputs = show(*args, **kwargs)
        gives = f"for {inputs} it gives {_short(found)}"
        raise AssertionError(f"{gives}; right is {_short(wanted)}")


def right(name: str) -> None:
    """Say that an answer has passed."""
    print(f"{name}: right")


def show(*args: object, **kwargs: object) -> str:
    """The inputs, written as in a call."""
    named = [f"{key}={_short(value)}" for key, value in kwargs.items()]
    return "(" + ", ".join([*map(_short, args), *named]) + ")"


def _short(value: object) -> str:
    text = repr(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _same(found: object, wanted: object) -> bool:
    if isinstance(wanted, Tensor):
        if not isinstance(found, Tensor) or found.shape != wanted.shape:
            return False
        if not wanted.is_floating_point():
            return torch.equal(found.to(wanted.dtype), wanted)
        close = torch.allclose(found.double(), wanted.double(), rtol=1e-5, atol=1e-6)
        return close or torch.equal(found, wanted)
    if isinstance(wanted, bool) or wanted is None or isinstance(wanted, str):
        return type(found) is type(wanted) and found == wanted
    if isinstance(wanted, (int, float)):
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        return is_number and math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-9)
    if isinstance(wanted, (list, tuple)):
        is_list = isinstance(found, (list, tuple)) and len(found) == len(wanted)
        return is_list and all(map(_same, found, wanted))
    if isinstance(wanted, dict):
        is_dict = isinstance(found, dict) and found.keys() == wanted.keys()
        return is_dict and all(_same(found[key], wanted[key]) for key in wanted)
    return found == wanted
