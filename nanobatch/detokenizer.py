"""Tokens back to text while they arrive: one request's text grows token by token and ends at
a stop string.

A character may be split over tokens, a stop string too. What is shown of a text is only what
can no longer change:

    stop "END"   tokens   "the E"   "N"      "A"       " E"        "ND it"
                 text     the E     the EN   the ENA   the ENA E   the ENA    (cut: it ends)
                 shown    the_      the_     the ENA   the ENA_    the ENA_   _ is a space

Always holds (invariant 17): the deltas joined are the text; no replacement character appears
for a character that later tokens complete; no part of a stop string is ever shown.

Source: vLLM's incremental detokenizer.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    """Tokens in, text out as soon as it is certain."""

    def step(self, token_id: int) -> str:
        """The text that became certain with one more token."""
        ...

    def pending(self) -> str:
        """What would be shown beyond that if the text ended here."""
        ...


class IncrementalDetokenizer:
    """The text of one request.

    Args:
        stream: a tokenizer's stream for the request's prompt.
        stop: stop strings, each at least one character.
        min_tokens: stops that are complete within so many tokens are ignored for good.
    """

    def __init__(self, stream: Stream, stop: Sequence[str] = (), min_tokens: int = 0):
        self._stream = stream
        # The prompt may end inside a character. Its part of what comes next is not output.
        self._prompt_tail = stream.pending()
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._text = ""
        self._num_sent = 0
        self.stopped = False

    def append(self, token_id: int | None) -> bool:
        """Take one token (None: one that has no text); True if it completes a stop string."""
        self._num_tokens += 1
        return self._extend("" if token_id is None else self._stream.step(token_id))

    def _extend(self, new_text: str) -> bool:
        if new_text and self._prompt_tail:
            num_shared = len(os.path.commonprefix([self._prompt_tail, new_text]))
            new_text, self._prompt_tail = new_text[num_shared:], ""
        num_old = len(self._text)
        self._text += new_text
        if new_text and self._num_tokens > self._min_tokens:
            starts = [(self._text.find(s, max(0, num_old - len(s) + 1)), s) for s in self._stop]
            found = [(start + len(s), start) for start, s in starts if start >= 0]
            if found:
                # The earliest to be complete; min keeps the first of equals: list order.
                _, start = min(found, key=lambda end_start: end_start[0])
                self._text = self._text[:start]
                self.stopped = True
        return self.stopped

    def finish(self) -> bool:
        """No more tokens: let out what was held back. True if that completes a stop."""
        return self.stopped or self._extend(self._stream.pending())

    def take_delta(self, finished: bool) -> str:
        """The text that became certain since the last call; all of the rest if finished."""
        end = len(self._text) if finished else len(self._text) - self._num_held_back()
        delta = self._text[self._num_sent : end]
        self._num_sent = max(self._num_sent, end)
        return delta

    @property
    def sent_text(self) -> str:
        """All deltas so far, joined."""
        return self._text[: self._num_sent]

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that may yet become a stop string."""
        longest = min(len(self._text), max(map(len, self._stop), default=0))
        for n in range(longest, 0, -1):
            tail = self._text[-n:]
            if any(n < len(s) and s.startswith(tail) for s in self._stop):
                return n
        return 0
