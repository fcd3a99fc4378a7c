"""Checks of the exercises: `check.ex5_2(answer)` says at once what is wrong.

Exercise `exN_M` of chapter N has a check of the same name. It calls the answer with some inputs
and compares the results. The first difference raises an AssertionError that names the input,
the answer's result and the right one. Only behaviour is checked, never the source.

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
