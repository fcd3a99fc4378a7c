"""The tokenizer inside a GGUF file, built from what the file says.

    tokenizer.ggml.model    "gpt2"    BPE on bytes, by a list of merges
                            "llama"   BPE on text, by scores; bytes for what it lacks
    tokenizer.ggml.pre      how "gpt2" splits a text before BPE (models/pre_tokenizers.py)

Why not transformers' conversion: it splits by GPT-2's pattern whatever the file says, and
differently from version to version.

Always holds: what would change the tokens and is not supported is a ValueError that names the
key.

Source: llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Real

from nanobatch.models.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from nanobatch.models.tokenizer import HFTokenizer
from nanobatch.utils.checks import check_bool, check_int

logger = logging.getLogger(__name__)

KEY, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
ENDS = tuple(f"{KEY}{name}_token_id" for name in ("eos", "eot", "eom"))
LLAMA_IDS = tuple(f"{KEY}{name}_token_id" for name in ("unknown", "bos", "eos"))  # 0, 1, 2
# Control tokens that end a text in any file, as in llama.cpp.
ENDS_BY_NAME = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>", "</s>"),
    "<｜end▁of▁sentence｜>",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # token types


def ends_of_text(fields: Mapping, vocab_size: int) -> tuple[int, ...]:
    """The token ids at which a text ends: of its end, of a turn's and of a message's.

    Raises:
        ValueError: one is not in the vocabulary.
    """
    for key in ENDS:
        _token_id(fields, key, vocab_size)
    return tuple(dict.fromkeys(fields[key] for key in ENDS if key in fields))


def _token_id(fields: Mapping, key: str, vocab_size: int) -> int | None:
    if key in fields:
        check_int(key, fields[key], 0, vocab_size - 1)
    return fields.get(key)


def gguf_tokenizer(fields: Mapping) -> HFTokenizer | None:
    """The tokenizer that a GGUF file's fields describe; None if they describe none.

    Args:
        fields: the file's fields whose names begin with "tokenizer.".

    Raises:
        ValueError: a field is missing or malformed, or of a kind that is not supported.
    """
    from transformers import PreTrainedTokenizerFast

    model = fields.get(KEY + "model")
    if model is None:
        return None
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{KEY}model is {model!r}; these are supported: 'gpt2', 'llama'")
    for name in ("add_sep_token", "suppress_tokens"):
        if fields.get(KEY + name):
            raise ValueError(f"{KEY}{name} is {fields[KEY + name]!r}; it is not supported")
    if not isinstance(fields.get(TEMPLATE, ""), str):
        raise ValueError(f"{TEMPLATE} is {fields[TEMPLATE]!r}; it must be a string")
    if model == "llama":
        fields = dict(zip(LLAMA_IDS, (0, 1, 2), strict=True)) | dict(fields)
    tokens = _tokens(fields)
    types = (
        _list(fields, "token_type", int, len(tokens)) if KEY + "token_type" in fields else None
    )
    ends = ends_of_text(fields, len(tokens))
    bos = _token_id(fields, KEY + "bos_token_id", len(tokens))
    if types is None:
        types = [CONTROL if i in (bos, *ends) else NORMAL for i in range(len(tokens))]
    make = _byte_level if model == "gpt2" else _by_scores
    backend, add_bos = make(fields, tokens, types)
    _add_tokens(backend, tokens, types)
    _add_ends(backend, fields, tokens, bos, add_bos)
    named = {"bos_token": bos, "eos_token": fields.get(ENDS[0])}
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: None if i is None else tokens[i] for name, i in named.items()},
    )
    hf.chat_template = fields.get(TEMPLATE)
    by_name = (i for i, t in enumerate(types) if t == CONTROL and tokens[i] in ENDS_BY_NAME)
    return HFTokenizer(hf, tuple(dict.fromkeys((*ends, *by_name))))


def _list(fields: Mapping, name: str, kind: type, length: int | None = None) -> list:
    """A field that is a list of that kind, and of that length."""
    value = fields.get(KEY + name)
    if not isinstance(value, list) or not all(isinstance(x, kind) for x in value):
        raise ValueError(f"{KEY}{name} is missing, or no list of {kind.__name__}")
    if length is not None and len(value) != length:
        raise ValueError(f"{KEY}{name} has {len(value)} entries; there are {length} tokens")
    return value


def _tokens(fields: Mapping) -> list[str]:
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(_list(fields, "tokens", str))]
    if not tokens:
        raise ValueError(f"{KEY}tokens is empty")
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if ids.setdefault(token, i) != i:
            raise ValueError(f"{KEY}tokens has {token!r} twice: {ids[token]} and {i}")
    return tokens


def _pre_tokenizer(fields: Mapping) -> PreTokenizer:
    name = fields.get(KEY + "pre")
    if not name:
        logger.warning(
            f"{KEY}pre is missing: the text is split as llama.cpp does by default, perhaps not "
            "as this model has learned; files that are converted anew have it"
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(
            f"{KEY}pre is {name!r}, which is not supported; these are: {supported}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(fields: Mapping, tokens: list[str], types: Sequence[int]):
    """BPE on bytes, and whether it adds the token that begins a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre_tokenizer(fields)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = {}
    for merge in _list(fields, "merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[: max(cut, 0)], merge[cut + 1 :]
        if not all(token in vocab for token in (left, right, left + right)):
            raise ValueError(
                f"{KEY}merges has {merge!r}; it must be two tokens that make a third"
            )
        merges.setdefault((left, right))
    backend = Tokenizer(models.BPE(vocab, list(merges), ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _by_scores(fields: Mapping, tokens: list[str], types: Sequence[int]):
    """BPE on text, where the best token that two neighbours make is merged first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    unk = tokens[_token_id(fields, LLAMA_IDS[0], len(tokens))]
    merges = _merges_by_score(fields, vocab, types)
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    spaces, texts = [normalizers.Replace(" ", "▁")], [decoders.Replace("▁", " ")]
    texts += [decoders.ByteFallback(), decoders.Fuse()]
    if _flag(fields, "add_space_prefix", True):  # before the text and after a special token
        spaces.insert(0, normalizers.Prepend("▁"))
        texts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(texts)
    return backend, True


def _merges_by_score(
    fields: Mapping, vocab: Mapping[str, int], types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the highest score first."""
    scores = _list(fields, "scores", Real, len(vocab))
    found, pairs_of = {}, {}
    for token, i in vocab.items():
        if types[i] in (NORMAL, UNUSED):
            cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
            pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
            if pairs:
                pairs_of[i] = sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
                other = found.setdefault(scores[i], token)
                if other != token:  # the order of merges would depend on the text
                    raise ValueError(
                        f"{KEY}scores has {scores[i]} for both {other!r} and {token!r}; tokens "
                        "of equal score are not supported"
                    )
    best_first = sorted(pairs_of, key=lambda i: -scores[i])
    return [pair for i in best_first for pair in pairs_of[i]]


def _add_tokens(backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Make the backend find the tokens that are never split, in a text."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )


def _add_ends(backend, fields: Mapping, tokens: Sequence[str], bos: int | None, add_bos: bool):
    """Make the backend add the tokens that begin and end a text, if the file says so."""
    from tokenizers.processors import TemplateProcessing

    single, special = ["$A"], []
    for name, i, default in (("bos", bos, add_bos), ("eos", fields.get(ENDS[0]), False)):
        if _flag(fields, f"add_{name}_token", default):
            if i is None:
                raise ValueError(f"{KEY}add_{name}_token is True; {name}_token_id is missing")
            special.append({"id": name, "ids": [i], "tokens": [tokens[i]]})
            single = [name, *single] if name == "bos" else [*single, name]
    if special:
        backend.post_processor = TemplateProcessing(single=single, special_tokens=special)


def _flag(fields: Mapping, name: str, default: bool) -> bool:
    value = fields.get(KEY + name, default)
    check_bool(KEY + name, value)
    return value
