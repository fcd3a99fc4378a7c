"""Text to tokens and back.

    ByteTokenizer   one token for each byte; the bundled model uses it
    HFTokenizer     any fast tokenizer of Hugging Face, with its chat template

Each also gives a stream, which turns a request's output into text token by token
(detokenizer.py). Most tokenizers' tokens are bytes, which are joined and then read as UTF-8:

    tokens     "▁a"   <0xF0>  <0x9F>  <0xA6>  <0x8A>  <0xF0>
    bytes      20 61    f0      9f      a6      8a      f0
    decode     " a🦊" and U+FFFD, once for each maximal part of a character
    stream     " a"     ""      ""      ""     "🦊"     ""      and U+FFFD if it ends here

Always holds: the stream's texts, joined, are the decoded output: no character is shown before
its last byte is there, and none is shown twice (invariant 17).

Why not the tokenizers library's own decoders: for one unfinished character, ByteFallback turns
the whole run of bytes that it ends into replacement characters.

Sources: Unicode 3.9, U+FFFD substitution of maximal subparts; DecodeStream of Hugging Face's
tokenizers.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from nanobatch.detokenizer import Stream
from nanobatch.models import chat_template
from nanobatch.utils.files import read_json

NAMED_TOKENS = {"bos_token", "eos_token", "pad_token", "unk_token"}


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
        return _ByteStream(_byte_token, prompt_token_ids)


def _byte_token(token_id: int, is_first: bool) -> bytes:
    return bytes([token_id]) if token_id < 256 else b""


class _ByteStream:
    """Bytes to text, by the standard library's incremental UTF-8 decoder.

    Args:
        bytes_of: a token's bytes, none for a special token; told whether the token is the
            first of the text, which may lose its space.
        prompt_token_ids: what comes before. It may end inside a character.
    """

    def __init__(self, bytes_of: Callable[[int, bool], bytes], prompt_token_ids: Sequence[int]):
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = bytes_of(token_id, False) + tail
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
        self._is_first = not tail
        self._decoder.decode(tail)

    def step(self, token_id: int) -> str:
        data = self._bytes_of(token_id, False)
        if self._is_first and data:
            data, self._is_first = self._bytes_of(token_id, True), False
        return self._decoder.decode(data)

    def pending(self) -> str:
        return self._decoder.getstate()[0].decode(errors="replace")


class HFTokenizer:
    """A fast tokenizer from transformers.

    Args:
        tokenizer: what AutoTokenizer.from_pretrained returned.
        eos_token_ids: a text ends at any of these; None: at the tokenizer's own.

    Raises:
        ValueError: it is not a fast tokenizer (one backed by the tokenizers library).
    """

    def __init__(self, tokenizer, eos_token_ids: Sequence[int] | None = None):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer")
        self.hf = tokenizer
        self.vocab_size = len(tokenizer)
        if eos_token_ids is None:
            eos = tokenizer.eos_token_id
            eos_token_ids = () if eos is None else (eos,)
        self.eos_token_ids = tuple(eos_token_ids)
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.special_tokens = {
            t.content: i for i, t in added.items() if t.special and t.content
        }
        self._bytes_of = _bytes_of_tokens(tokenizer.backend_tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.hf(text).input_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._bytes_of is None:
            return self.hf.backend_tokenizer.decode(list(token_ids), skip_special_tokens=True)
        data, is_first = [], True
        for token_id in token_ids:
            data.append(self._bytes_of(token_id, is_first))
            is_first = is_first and not self._bytes_of(token_id, False)
        return b"".join(data).decode(errors="replace")

    def stream(self, prompt_token_ids: Sequence[int]) -> Stream:
        if self._bytes_of is None:
            return _TextStream(self.hf.backend_tokenizer, prompt_token_ids)
        return _ByteStream(self._bytes_of, prompt_token_ids)

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


def _bytes_of_tokens(backend) -> Callable[[int, bool], bytes] | None:
    """The bytes of each token of a tokenizer of the tokenizers library, as _ByteStream takes
    them; None if its decoder does not join bytes."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if kinds == {"ByteLevel"}:
        return _ByteLevelTokens(backend)
    if "ByteFallback" in kinds and backend.token_to_id("<0x61>") is not None:
        return _ByteFallbackTokens(backend)
    return None


def _added_tokens(backend) -> dict[int, bytes]:
    """The text of added tokens, which are not encoded; none of special ones."""
    added = backend.get_added_tokens_decoder()
    return {i: b"" if token.special else token.content.encode() for i, token in added.items()}


class _ByteLevelTokens:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): a vocabulary writes each byte as a character."""

    def __init__(self, backend):
        self._backend = backend
        self._bytes = _added_tokens(backend)
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}

    def __call__(self, token_id: int, is_first: bool) -> bytes:
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id) or ""
            try:
                self._bytes[token_id] = bytes(map(self._byte_of.__getitem__, token))
            except KeyError:  # a token that is written as it is
                self._bytes[token_id] = token.encode()
        return self._bytes[token_id]


class _ByteFallbackTokens:
    """BPE on text with "▁" for a space, and tokens like <0xF0> for the bytes of characters
    that the vocabulary lacks (Llama 2, Mistral, Gemma)."""

    def __init__(self, backend):
        self._backend = backend
        special = {i for i, text in _added_tokens(backend).items() if not text}
        self._bytes = dict.fromkeys(special, b"")
        self._a = backend.token_to_id("<0x61>")

    def __call__(self, token_id: int, is_first: bool) -> bytes:
        if is_first and self(token_id, False) < b"\x80":  # not a part of a character
            return self._backend.decode([token_id]).encode()
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id) or ""
            byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
            # After an "a", so that it keeps its space.
            text = self._backend.decode([self._a, token_id], skip_special_tokens=False)[1:]
            self._bytes[token_id] = bytes.fromhex(byte[1]) if byte else text.encode()
        return self._bytes[token_id]


class _TextStream:
    """The tokenizers library's DecodeStream, for tokens that are whole characters.

    The last tokens of the prompt come first: they may decide whether there is a space before
    the output.
    """

    def __init__(self, backend, prompt_token_ids: Sequence[int]):
        self._backend = backend
        self._begin()
        for token_id in prompt_token_ids[-4:]:
            self.step(token_id)

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0  # how many characters of their text were returned

    def step(self, token_id: int) -> str:
        """The text that one more token adds."""
        try:
            text = self._stream.step(self._backend, token_id) or ""
        except Exception as error:
            # The decoded text no longer starts with what was returned. As in vLLM, start
            # again at this token.
            if "Invalid prefix" not in str(error):
                raise
            self._begin()
            return self.step(token_id)
        self._ids.append(token_id)
        self._num_shown += len(text)
        return text

    def pending(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=True)[self._num_shown :]


def read_tokenizer(directory: Path) -> HFTokenizer:
    """The tokenizer in a directory that transformers reads: tokenizer.json, or vocab.json and
    merges.txt, which GPT-2's and Qwen2's have.

    Raises:
        ValueError: it is not a fast one; vocab.json and merges.txt are of another class.
    """
    from transformers import AutoTokenizer, GPT2TokenizerFast, Qwen2TokenizerFast
    from transformers import PreTrainedTokenizerFast as PlainTokenizer

    config, settings = (
        read_json(directory / name) if (directory / name).exists() else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    if (directory / "tokenizer.json").exists():
        has_class = "model_type" in config or "tokenizer_class" in settings
        kind = AutoTokenizer if has_class else PlainTokenizer  # as version 5; version 4 raises
        return HFTokenizer(kind.from_pretrained(directory, trust_remote_code=False))
    is_qwen = str(config.get("model_type")).startswith("qwen")
    name = settings.get("tokenizer_class") or "PreTrainedTokenizerFast"  # which says nothing
    name = name.removesuffix("Fast")
    if name in ("PreTrainedTokenizer", "TokenizersBackend"):
        name = "Qwen2Tokenizer" if is_qwen else "GPT2Tokenizer"
    kinds = {"GPT2Tokenizer": GPT2TokenizerFast, "Qwen2Tokenizer": Qwen2TokenizerFast}
    if name not in kinds:
        raise ValueError(
            f"tokenizer_class is {name!r}; without tokenizer.json these are supported: "
            f"{', '.join(kinds)}"
        )
    vocab = read_json(directory / "vocab.json")
    # Both classes would add a token that ends a text if the vocabulary has none.
    none = {} if "<|endoftext|>" in vocab else dict.fromkeys(NAMED_TOKENS - settings.keys())
    return HFTokenizer(kinds[name].from_pretrained(directory, **none))
