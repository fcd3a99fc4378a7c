"""How a text is split before byte-level BPE: what the names in tokenizer.ggml.pre stand for.

A name stands for regular expressions, which llama.cpp has in its source:

    "smollm"    "foo 12 bar"  ->  "foo ", "1", "2", " bar"       digits alone
                              ->  "foo", " ", "1", "2", " bar"   then GPT-2's pattern

Each expression splits the pieces that the one before has left; what lies between its matches
is a piece, too. llama.cpp knows more names: of models that are not supported here, or that
need more than expressions.

Sources: llama.cpp's llama-vocab.cpp; the patterns as the models' own tokenizer.json have them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """What tokenizer.ggml.pre stands for.

    patterns: each splits the pieces that those before have left.
    ignore_merges: a piece that is a token is not merged, but taken.
    add_bos: the token that begins a text is added, unless the file says otherwise.
    nfc: characters are composed first, as in the models' own tokenizers; no key says so.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + _WORD + r"\p{N}{1,3}" + _SIGNS + _SPACES
_QWEN2 = _SUFFIX + _WORD + r"\p{N}" + _SIGNS + _SPACES
_QWEN35 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)" + _WORD + r"\p{N}" + _SIGNS + r"|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _SUFFIX + _WORD + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
# Words end before a capital that follows a small letter.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITAL = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
)
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _CAPITAL % ("", "") + r"\p{N}" + _SLASHES + _SPACES
_GPT4O = _CAPITAL % (_SUFFIX + "?", _SUFFIX + "?") + r"\p{N}{1,3}" + _SLASHES + _SPACES
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_BY_NAMES = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
    "modern-bert jina-es jina-de jina-v2-es jina-v2-de": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _SUFFIX + _WORD + r"\p{N}+" + _SIGNS + _SPACES), ignore_merges=True
    ),
    "qwen2 deepseek-r1-qwen": PreTokenizer((_QWEN2,), nfc=True),
    "kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((_SEED,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK)
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}")
    ),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
PRE_TOKENIZERS = {name: pre for names, pre in _BY_NAMES.items() for name in names.split()}
