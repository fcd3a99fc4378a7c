"""The checks behind the exercises: `check.ex5_2(answer)` says at once what is wrong.

Each exercise `exN_M` of chapter N has a check of that name. It tries the answer on inputs and
compares with the right result; what is wrong is an AssertionError that names the input, what
the answer gave and what is right. Nothing is asked of an answer but its behaviour.

Used by the notebooks and, through nbgrader, for grading.
"""

import importlib
import re


def __getattr__(name: str):
    chapter = re.fullmatch(r"ex(\d+)_\d+", name)
    if chapter is None:
        raise AttributeError(f"module 'nanobatch.check' has no attribute {name!r}")
    module = importlib.import_module(f"nanobatch.check.chapter{chapter[1]}")
    return getattr(module, name)
