"""Predict how many tokens a request will generate, from its parameters or from experience.

A prediction is any function from a request to its expected output tokens in all. SJF orders by
it, and the admission rule "predict" counts memory with it.

    lengths of finished requests      4   9   30   41        the request has 10 tokens so far
    longer than that                          30   41   ->   35.5 expected

Taught in notebooks/03_iteration_level_scheduling.ipynb. Source: the history of output lengths
in LightLLM's past-future scheduler (Gong et al., ASPLOS 2025).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

from nanobatch.request import Request

HISTORY = 1000  # finished requests that LearnedLengths remembers

PredictLength = Callable[[Request], float]  # expected output tokens in all


def max_tokens(request: Request) -> int:
    """Predict the largest length that the request allows."""
    return request.max_tokens


class LearnedLengths:
    """Predict the mean length of the finished requests that are longer than this one is now.

    At most the request's max_tokens; exactly that while no longer request has finished.

    Args:
        history: finished requests to remember.
    """

    def __init__(self, history: int = HISTORY):
        self._recent: deque[int] = deque(maxlen=history)
        self._lengths: list[int] = []  # the same lengths, ascending
        self._sums_from: list[int] = [0]  # sums of _lengths from each index on

    def observe(self, request: Request) -> None:
        """Add the length of a finished request; forget the oldest one."""
        if len(self._recent) == self._recent.maxlen:
            self._lengths.pop(bisect.bisect_left(self._lengths, self._recent[0]))
        length = len(request.output_token_ids)
        self._recent.append(length)
        bisect.insort(self._lengths, length)
        self._sums_from = []

    def __call__(self, request: Request) -> float:
        """Expected output tokens in all."""
        if not self._sums_from:
            self._sums_from = [0]
            for length in reversed(self._lengths):
                self._sums_from.append(self._sums_from[-1] + length)
            self._sums_from.reverse()
        first = bisect.bisect_right(self._lengths, len(request.output_token_ids))
        num_longer = len(self._lengths) - first
        if num_longer == 0:
            return request.max_tokens
        return min(request.max_tokens, self._sums_from[first] / num_longer)


def observe(observer: object, request: Request) -> None:
    """Show a finished request to a policy, rule or prediction, if it has `observe`."""
    callback = getattr(observer, "observe", None)
    if callback is not None:
        callback(request)
