"""Text to tokens and back.

    ByteTokenizer   one token for each byte; the bundled model uses it
    HFTokenizer     any fast tokenizer of Hugging Face, with its chat template

Each also gives a stream, which turns a request's output into text token by token
(detokenizer.py).

Always holds: the stream's texts, joined, are the decoded output: no character is shown before
its last byte is there, and none is shown twice (invariant 17).

Source: DecodeStream of Hugging Face's tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from nanobatch.detokenizer import Stream
from nanobatch.models import chat_template


class ByteTokenizer:
    """Tokens 0 to 255 are the bytes of UTF-8, 256 begins a text and 257 ends it."""

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
    """Bytes to text, by the standard library's incremental UTF-8 decoder.

    Args:
        prompt_tail: the prompt's last three tokens: an unfinished character has at most three
            bytes.
    """

    def __init__(self, prompt_tail: Sequence[int]):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_tail:  # the start of a character that the prompt ends in
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
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: there is no chat template; or it cannot be rendered, and why.
        """
        template = self.hf.chat_template
        if isinstance(template, dict):  # several, by name
            template = template.get("default")
        if template is None:
            raise ValueError("this model's tokenizer has no chat template")
        where = self.hf.name_or_path or "this model's tokenizer"
        text = chat_template.render(template, messages, self.hf.special_tokens_map, where)
        token_ids = self.hf(text, add_special_tokens=False).input_ids
        if not token_ids:
            raise ValueError(f"{where}: the chat template renders {text!r}, which is no token")
        return token_ids


class _HFStream:
    """The tokenizers library's DecodeStream, started on the end of the prompt.

    The first output token needs the prompt's last tokens: they decide whether it starts with a
    space, and they may hold the first bytes of its character.
    """

    def __init__(self, tokenizer, prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer  # of the tokenizers library
        self._begin()
        for token_id in self._context(prompt_token_ids):
            self.step(token_id)

    def _context(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """A short end of the prompt that starts at a whole character; else all of it."""
        for n in range(4, min(24, len(prompt_token_ids))):
            tail = prompt_token_ids[-n:]
            if "\ufffd" not in self._tokenizer.decode(tail, skip_special_tokens=True):
                return tail
        return prompt_token_ids

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0  # how many characters of their text were returned

    def step(self, token_id: int) -> str:
        """The text that one more token completes; "" if it ends inside a character."""
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # After bytes that are not UTF-8, the decoded text may no longer start with what
            # was returned; DecodeStream raises then. As in vLLM, start again at this token.
            if "Invalid prefix" not in str(error):
                raise
            self._begin()
            return self.step(token_id)
        self._ids.append(token_id)
        self._num_shown += len(text)
        return text

    def pending(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._num_shown :]
