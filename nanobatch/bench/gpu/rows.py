"""Rows: what the parts of a visit to a GPU give, one dict for each line of a table.

error    a fault: the part goes on, and has failed in the end
note     why there is no figure, which is no fault
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def attempt(row: Mapping, measure: Callable[[], Mapping]) -> dict:
    """The row with what measure() returns, or with the error that it raised."""
    try:
        return {**row, **measure()}
    except Exception as error:  # of any kind: Triton's and CUDA's have no common one
        return {**row, "error": f"{type(error).__name__}: {error}"}


def failure_of(rows: Sequence[Mapping]) -> str | None:
    """What to say if there are errors among the rows."""
    num_failed = sum("error" in row for row in rows)
    return f"{num_failed} of {len(rows)} rows are errors" if num_failed else None
