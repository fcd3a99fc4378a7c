"""Tokens to text, token by token; the text ends at a stop string.

A character may be split over tokens, and so may a stop string. Only the part of the text that
can no longer change is shown:

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
        """Take one token; return the text that is certain now and was not before."""
        ...

    def pending(self) -> str:
        """The rest of the text, if it ended here."""
        ...


class Tokenizer(Protocol):
    """What the engine needs from a tokenizer. One with special tokens that have a name, such
    as <|im_end|>, gives their ids by name in `special_tokens`."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the token that begins a text if there is one."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        ...

    def stream(self, prompt_token_ids: Sequence[int]) -> Stream:
        """A decoder for the output that follows this prompt, token by token."""
        ...


def check_stop(stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise ValueError if a stop string could never stop: special tokens are not in the text,
    and without a tokenizer there is none."""
    if stop and tokenizer is None:
        raise ValueError(f"stop is {stop!r}; stop strings need a model with a tokenizer")
    special_tokens = getattr(tokenizer, "special_tokens", {}) if stop else {}
    for token, token_id in special_tokens.items():
        found = next((text for text in stop if token in text), None)
        if found is not None:
            raise ValueError(
                f"stop has {found!r}; the special token {token!r} is never in the text: use "
                f"stop_token_ids=[{token_id}]"
            )


class IncrementalDetokenizer:
    """The text of one request.

    Args:
        stream: a tokenizer's stream for the request's prompt.
        stop: stop strings, each at least one character.
        min_tokens: stop strings completed within this many tokens are ignored for good.

    Attributes:
        stopped: a stop string was completed.
        deltas: what was taken; it only grows.
    """

    def __init__(self, stream: Stream, stop: Sequence[str] = (), min_tokens: int = 0):
        self._stream = stream
        # If the prompt ends inside a character, the character's first part is not output.
        self._prompt_tail = stream.pending()
        self._stop = stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._rest = ""  # the text that was not taken yet; a stop string can begin only here
        self.deltas: list[str] = []
        self.stopped = False

    def append(self, token_id: int | None) -> bool:
        """Take one token (None: one without text); True if it completes a stop string."""
        self._num_tokens += 1
        return self._add_text("" if token_id is None else self._stream.step(token_id))

    def extend(self, token_ids: Sequence[int], hidden: Sequence[int]) -> int:
        """Take tokens up to the one that completes a stop string; return how many are left.

        Args:
            token_ids: the next tokens.
            hidden: tokens without text (the end of the text, stop ids).
        """
        for i, token_id in enumerate(token_ids):
            if self.append(None if token_id in hidden else token_id):
                return len(token_ids) - i - 1
        return 0

    def _add_text(self, new_text: str) -> bool:
        if new_text and self._prompt_tail:
            num_shared = len(os.path.commonprefix([self._prompt_tail, new_text]))
            new_text, self._prompt_tail = new_text[num_shared:], ""
        num_old = len(self._rest)
        self._rest += new_text
        if new_text and self._num_tokens > self._min_tokens:
            starts = [(self._rest.find(s, max(0, num_old - len(s) + 1)), s) for s in self._stop]
            found = [(start + len(s), start) for start, s in starts if start >= 0]
            if found:
                # The stop that ends first; min keeps the first of equals, in list order.
                _, start = min(found, key=lambda end_start: end_start[0])
                self._rest = self._rest[:start]
                self.stopped = True
        return self.stopped

    def finish(self) -> bool:
        """There are no more tokens: add the rest of the text. True if that completes a stop."""
        return self.stopped or self._add_text(self._stream.pending())

    def take_delta(self, finished: bool) -> str:
        """The text that is certain and was not taken yet; all of the rest if finished."""
        end = len(self._rest) if finished else len(self._rest) - self._num_held_back()
        delta, self._rest = self._rest[:end], self._rest[end:]
        if delta:
            self.deltas.append(delta)
        return delta

    @property
    def sent_text(self) -> str:
        """All deltas so far, joined."""
        return "".join(self.deltas)

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that may still become a stop string."""
        if not self._stop:
            return 0
        longest = min(len(self._rest), max(map(len, self._stop)))
        for n in range(longest, 0, -1):
            tail = self._rest[-n:]
            if any(n < len(s) and s.startswith(tail) for s in self._stop):
                return n
        return 0
