"""Text to tokens, and tokens back to text while they arrive.

    ByteTokenizer           one token a byte; what the bundled model speaks
    HFTokenizer             any fast tokenizer of Hugging Face, its chat template included
    IncrementalDetokenizer  one request's text: grows token by token, stops at stop strings

A character may be split over tokens, a stop string too. What is shown of a text is only what
can no longer change:

    stop "END"   tokens   "the E"   "N"      "A"       " E"        "ND it"
                 text     the E     the EN   the ENA   the ENA E   the ENA    (cut: it ends)
                 shown    the_      the_     the ENA   the ENA_    the ENA_   _ is a space

Always holds (invariant 17): the deltas joined are the text; no replacement character appears
for a character that later tokens complete; no part of a stop string is ever shown.

Source: the decode stream of Hugging Face's tokenizers; vLLM's incremental detokenizer.
"""

from __future__ import annotations

import codecs
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


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def stream(self, prompt_token_ids: Sequence[int]) -> Stream: ...


class ByteTokenizer:
    """A token for each byte of UTF-8, one that begins a text and one that ends it."""

    bos_token_id, eos_token_id = 256, 257
    vocab_size = 258
    eos_token_ids = (eos_token_id,)

    def encode(self, text: str) -> list[int]:
        return [self.bos_token_id, *text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def stream(self, prompt_token_ids: Sequence[int]) -> Stream:
        return _ByteStream(prompt_token_ids[-3:])


class _ByteStream:
    """UTF-8 from the standard library's incremental decoder."""

    def __init__(self, prompt_tail: Sequence[int]):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_tail:  # a cut character has at most three of its bytes here
            self.step(token_id)

    def step(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def pending(self) -> str:
        return self._decoder.getstate()[0].decode(errors="replace")


class HFTokenizer:
    """A fast tokenizer from transformers.

    Args:
        tokenizer: what AutoTokenizer.from_pretrained returned.

    Raises:
        ValueError: it is not a fast tokenizer (one backed by the tokenizers library).
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer")
        self.hf = tokenizer
        self.vocab_size = len(tokenizer)
        eos = tokenizer.eos_token_id
        self.eos_token_ids = () if eos is None else (eos,)

    def encode(self, text: str) -> list[int]:
        return self.hf(text).input_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.hf.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def stream(self, prompt_token_ids: Sequence[int]) -> Stream:
        return _HFStream(self.hf.backend_tokenizer, prompt_token_ids)

    def apply_chat_template(self, messages: Sequence[dict]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""
        if self.hf.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template")
        text = self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.hf(text, add_special_tokens=False).input_ids


class _HFStream:
    """The tokenizers library's DecodeStream, begun in the prompt.

    The prompt's last tokens give the first output token its context: whether it starts with
    a space, and the beginning of a character that the prompt cuts in two.
    """

    def __init__(self, tokenizer, prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer  # of the tokenizers library
        self._begin()
        for token_id in self._context(prompt_token_ids):
            self.step(token_id)

    def _context(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """A short end of the prompt that begins with a whole character, else all of it."""
        for n in range(4, min(24, len(prompt_token_ids))):
            tail = prompt_token_ids[-n:]
            if "\ufffd" not in self._tokenizer.decode(tail, skip_special_tokens=True):
                return tail
        return prompt_token_ids

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0  # characters of their text that were returned

    def step(self, token_id: int) -> str:
        """The text that became certain with one more token."""
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # Bytes that are no UTF-8 can make the decoder take back what it said, and all it
            # does then is raise. As in vLLM, the stream begins anew at this token.
            if "Invalid prefix" not in str(error):
                raise
            self._begin()
            return self.step(token_id)
        self._ids.append(token_id)
        self._num_shown += len(text)
        return text

    def pending(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._num_shown :]


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
