"""The tokenizer inside a GGUF file: all names of pre-tokenizers that llama.cpp knows.

Three oracles. Splits of one text, worked out by hand. A plain splitter and BPE (plain_bpe.py)
with each name's patterns as llama.cpp's source writes them, while the package writes them as
the models' own tokenizers do. And, for vocabularies with scores, a plain loop that merges the
best two neighbours until none are left, as SentencePiece describes it.
"""

import functools
import json
import logging
import unicodedata
from random import Random

import pytest
from plain_bpe import CHARS, CORPUS, GPT2, SUFFIX, PlainBpe, random_text, split
from small_checkpoint import V, configure, fault_in, greedy, load, write_gguf

from nanobatch import SamplingParams
from nanobatch.models import loader
from nanobatch.models.gguf_tokenizer import gguf_tokenizer
from nanobatch.models.pre_tokenizers import PRE_TOKENIZERS

KEY = "tokenizer.ggml."
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
SIGNS, SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = SUFFIX + WORDS + r"\p{N}{1,3}" + SIGNS + SPACES
QWEN2 = SUFFIX + WORDS + r"\p{N}" + SIGNS + SPACES
# llama.cpp writes these two for ASCII capitals only; so they are as in tokenizer.json.
UP, LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UP}*{LOW}+{SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?{UP}+{LOW}*{SUFFIX}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
)
PATTERNS = {
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "exaone4 mpt olmo jais trillion granite-docling": [GPT2],
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": [r"\p{N}", GPT2],
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx "
    "smaug-bpe glm4 chatglm-bpe": [LLAMA3],
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": [QWEN2],
    "qwen35": [
        SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        + SPACES
    ],
    "bailingmoe bailingmoe2 llada-moe": [
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])" + WORDS + r"\p{N}" + SIGNS
        + r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [SUFFIX + WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES],
    "minicpm5": [r"\p{N}{1,3}", SUFFIX + WORDS + r"\p{N}+" + SIGNS + SPACES],
    "tekken": [TEKKEN],
    "gpt-4o llama4 kanana2 talkie minimax-m2": [GPT4O],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [
        "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "poro-chat bloom gpt3-finnish": [r" ?[^(\s|.,!?…。，、।۔،)]+"],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
}  # fmt: skip
FIRST = [names.split()[0] for names in PATTERNS]
PATTERNS = {name: patterns for names, patterns in PATTERNS.items() for name in names.split()}
REFUSED = (
    "deepseek-llm spark2_5 youtu jais-2 gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en "
    "jina-v2-code roberta-bpe whitespace exaone-moe chameleon granite-embed-multi-97m tiny_aya "
    "cohere2moe superbpe kimi-k2 ufakzeka afmoe laguna"
)
TAKES_WHOLE = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken", "minicpm5"),
)
each_name = pytest.mark.parametrize("name", PATTERNS)


@functools.cache
def trained():
    """Tokens and merges of BPE on all bytes, trained on the corpus unsplit: its merges run
    over spaces, digits and lines, so that each wrong split shows in the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=CHARS, show_progress=False, max_token_length=6
    )
    random = Random(0)
    texts = CORPUS * 3 + [random_text(random) for _ in range(100)]
    backend.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return [*CHARS, *dict.fromkeys(a + b for a, b in merges)], merges


def fields(**changes):
    tokens, merges = trained()
    known = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in merges],
        "add_bos_token": False,
    } | changes
    return {KEY + name: value for name, value in known.items() if value is not None}


def refusal(**changes) -> str:
    with pytest.raises(ValueError) as refused:
        gguf_tokenizer(fields(**changes))
    return str(refused.value)


# ---- how a text is split ---------------------------------------------------------------


@each_name
def test_ids_are_those_of_a_plain_splitter(name):
    """More texts for the first name of those that share their patterns."""
    tokens, merges = trained()
    tokenizer = gguf_tokenizer(fields(pre=name))
    plain = PlainBpe(tokens, merges, PATTERNS[name], takes_whole=name in TAKES_WHOLE)
    texts, random = [CORPUS[0], CORPUS[3]], Random(name)
    if name in FIRST:
        texts = [*CORPUS, *(random_text(random) for _ in range(20))]
    for text in texts:
        wanted = plain.encode(composed(name, text))
        assert tokenizer.encode(text) == wanted, split(PATTERNS[name], text)
        assert tokenizer.decode(wanted) == composed(name, text)


def composed(name, text):
    """Qwen's own tokenizers compose characters first."""
    is_qwen = name in ("qwen2", "qwen35", "deepseek-r1-qwen")
    return unicodedata.normalize("NFC", text) if is_qwen else text


TEXT = "He'll  pay $1234 CamelCase\n\n5 \n x=é漢字!/\n'VE 12a.b"


@pytest.mark.parametrize(
    "name, pieces",
    {
        "gpt-2": "He|'ll| | pay| $|1234|"
        " CamelCase|\n|\n|5| \n| x|=|é漢字|!/|\n|'|VE| 12|a|.|b",
        "smollm": "He|'ll| | pay| $|1|2|3|4|"
        " CamelCase|\n\n|5| \n| x|=|é漢字|!/|\n|'|VE| |1|2|a|.|b",
        "default": "He|'|ll| | pay| |$|123|4|"
        " CamelCase|\n|\n|5| \n| x|=|é漢字|!/|\n|'|VE| |12|a|.|b",
        "llama-bpe": "He|'ll| | pay| $|123|4|"
        " CamelCase|\n\n|5| \n| x|=é漢字|!/\n|'VE| |12|a|.b",
        "qwen2": "He|'ll| | pay| $|1|2|3|4|"
        " CamelCase|\n\n|5| \n| x|=é漢字|!/\n|'VE| |1|2|a|.b",
        "seed-coder": "He|'ll| | pay| $|1|2|3|4|"
        " CamelCase|\n\n|5| \n| x|=é漢字|!/|\n|'VE| |1|2|a|.b",
        "tekken": "He|'ll| | pay| $|1|2|3|4|"
        " Camel|Case|\n\n|5| \n| x|=é漢字|!/\n|'VE| |1|2|a|.b",
        "gpt-4o": "He'll| | pay| $|123|4|"
        " Camel|Case|\n\n|5| \n| x|=é漢字|!/\n|'VE| |12|a|.b",
        "deepseek-v3": "He|'ll| | pay| $|123|4|"
        " CamelCase|\n\n|5| \n| x|=|é|漢字|!/\n|'VE| |12|a|.b",
        "deepseek-coder": "He|'|ll| | pay| $|1|2|3|4|"
        " CamelCase|\n|\n|5| |\n| x|=|é|漢字|!/|\n|'|VE| |1|2|a|.|b",
        "bloom": "He'll| | pay| $1234|"
        " CamelCase|\n\n|5| \n| x=é漢字|!|/|\n|'VE| 12a|.|b",
        "viking": "He'll| | pay| $|1|2|3|4|"
        " CamelCase|\n\n|5| \n| x=é漢字|!|/|\n|'VE| |1|2|a|.|b",
    }.items(),
)  # fmt: skip
def test_splits_by_hand(name, pieces):
    backend = gguf_tokenizer(fields(pre=name)).hf.backend_tokenizer
    found = [TEXT[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert found == pieces.split("|")


def test_names_are_supported_or_refused():
    assert set(PATTERNS) == set(PRE_TOKENIZERS)
    for name in [*REFUSED.split(), "smolm", "SMOLLM", "smollm "]:
        message = refusal(pre=name)
        assert f"tokenizer.ggml.pre is {name!r}" in message
        assert all(other in message for other in PATTERNS)


def test_a_refused_name_names_the_file(tmp_path):
    file = write_gguf(tmp_path, more={KEY + "pre": "kimi-k2"})
    assert "tokenizer.ggml.pre is 'kimi-k2'" in fault_in(file)


def test_without_a_name_the_split_is_llama_cpp_s_default_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = gguf_tokenizer(fields(pre=None))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    plain = PlainBpe(*trained(), PATTERNS["default"])
    assert all(tokenizer.encode(text) == plain.encode(text) for text in CORPUS)


def test_a_piece_that_is_a_token_is_taken_where_the_name_says_so():
    tokens, merges = [*CHARS, "ab", "abc"], ["a b"]  # no merge makes "abc"
    for name, wanted in (("llama-bpe", [257]), ("smaug-bpe", [256, CHARS.index("c")])):
        tokenizer = gguf_tokenizer(fields(pre=name, tokens=tokens, merges=merges))
        assert tokenizer.encode("abc") == wanted


def test_qwen2_is_as_its_own_tokenizer(tmp_path):
    """transformers' class, from Qwen2's kind of files. It composes characters."""
    from transformers import Qwen2TokenizerFast

    tokens, merges = trained()
    write_vocab_and_merges(tmp_path, [*tokens, "<|endoftext|>"], merges)
    theirs, ours = (
        Qwen2TokenizerFast.from_pretrained(tmp_path),
        gguf_tokenizer(fields(pre="qwen2")),
    )
    for text in [*CORPUS, "e\u0301"]:
        assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode("e\u0301")) == "\u00e9"


# ---- vocabularies with scores ----------------------------------------------------------


@functools.cache
def pieces_with_scores():
    """Tokens, scores and types in the order of Llama 2's: control, bytes, then the pieces."""
    from tokenizers import Tokenizer, models, trainers

    backend = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=8)
    lines = ("▁" + line.replace(" ", "▁") for text in CORPUS[:4] for line in text.split("\n"))
    backend.train_from_iterator(lines, trainer)
    merged = sorted(backend.get_vocab(), key=lambda t: (len(t) == 1, backend.token_to_id(t)))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged]
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * len(merged)


def scored(**changes):
    tokens, scores, types = pieces_with_scores()
    known = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    known |= changes
    return {KEY + name: value for name, value in known.items() if value is not None}


def merge_best(text):
    """SentencePiece's BPE, one pair at a time: the best token, the leftmost of equals."""
    tokens, scores, _ = pieces_with_scores()
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        found = [(-scores[ids[pair]], n) for n, pair in enumerate(pairs) if pair in ids]
        if not found:
            break
        n = min(found)[1]
        parts[n : n + 2] = [pairs[n]]
    in_bytes = [[3 + byte for byte in part.encode()] for part in parts]
    return [
        i
        for part, split_up in zip(parts, in_bytes, strict=True)
        for i in ([ids[part]] if part in ids else split_up)
    ]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_the_best_pair_is_merged_first(has_prefix):
    """Also after a special token: there, too, the text gets a space, as in llama.cpp."""
    tokenizer = gguf_tokenizer(scored(add_space_prefix=has_prefix))
    prefix, random = " " * has_prefix, Random(1)
    for text in [*CORPUS, *(random_text(random) for _ in range(150))]:
        if text:
            assert tokenizer.encode(text) == [1, *merge_best(prefix + text)]
            assert tokenizer.decode(tokenizer.encode(text)) == text
            twice = [1, *merge_best(prefix + text), 2, *merge_best(prefix + text)]
            assert tokenizer.encode(f"{text}</s>{text}") == twice
    assert tokenizer.encode("") == [1]


def test_scores_that_leave_the_order_open_are_refused():
    tokens, scores, _ = pieces_with_scores()
    same = [*scores[:260], scores[259], *scores[261:]]
    with pytest.raises(ValueError, match="tokenizer.ggml.scores has .*equal score"):
        gguf_tokenizer(scored(scores=same))
    with pytest.raises(ValueError, match="tokenizer.ggml.scores is missing"):
        gguf_tokenizer(scored(scores=None))


# ---- tokens that are no text -----------------------------------------------------------


def test_control_tokens_are_found_in_a_text_and_not_shown():
    """User-defined ones are text, as it is written, whatever byte-level BPE would call it."""
    tokens = [*CHARS, "<|im_end|>", "<é>", "<s>"]
    types = [1] * 256 + [3, 4, 3]
    tokenizer = gguf_tokenizer(fields(tokens=tokens, merges=[], token_type=types))
    assert tokenizer.encode("!<|im_end|><é>!") == [33, 256, 257, 33]
    assert tokenizer.decode([33, 256, 257, 33, 258]) == "!<é>!"
    stream = tokenizer.stream([33])
    assert [stream.step(i) for i in (256, 257, 33)] == ["", "<é>", "!"]


def test_without_types_the_ends_of_a_text_are_control_tokens():
    tokens = [*CHARS, "<s>", "</s>", "<eot>"]
    ids = {"bos_token_id": 256, "eos_token_id": 257, "eot_token_id": 258}
    tokenizer = gguf_tokenizer(fields(tokens=tokens, merges=[], **ids))
    assert tokenizer.encode("!<s></s><eot>") == [33, 256, 257, 258]
    assert tokenizer.decode([33, 256, 257, 258]) == "!"


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_tokens_that_begin_and_end_a_text(add_bos, add_eos):
    changes = {"tokens": [*CHARS, "<s> :0", "</s>"], "merges": [], "bos_token_id": 256}
    changes |= {"eos_token_id": 257, "add_bos_token": add_bos, "add_eos_token": add_eos}
    for name, default in (("smollm", False), ("llama-bpe", True), ("tekken", True)):
        begins = default if add_bos is None else add_bos
        tokenizer = gguf_tokenizer(fields(pre=name, **changes))
        assert tokenizer.encode("!") == [256] * begins + [33] + [257] * bool(add_eos)


def test_the_chat_template_of_the_file():
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    changes = {
        "tokens": [*CHARS, "<s>", "</s>"],
        "merges": [],
        "token_type": [1] * 256 + [3, 3],
    }
    known = fields(bos_token_id=256, eos_token_id=257, **changes)
    tokenizer = gguf_tokenizer(known | {"tokenizer.chat_template": template})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "!"}]) == [256, 33, 257]


# ---- what ends a text ------------------------------------------------------------------


@pytest.mark.parametrize("names", [["eos"], ["eot"], ["eom"], ["eos", "eot", "eom"]])
def test_each_end_of_a_text_ends_it(tmp_path, names):
    """The token that comes next, whichever key names it, ends the text before max_tokens."""
    free = greedy(load(write_gguf(tmp_path)), [1, 2])
    last = free[-1]
    num_tokens = free.index(last) + 1
    other = next(i for i in range(V) if i not in free)
    for name in names:
        ids = {f"{KEY}{other_name}_token_id": other for other_name in ["eos", *names]}
        ids[f"{KEY}{name}_token_id"] = last
        llm = load(write_gguf(tmp_path, more=ids))
        [out] = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=3), False)
        assert (out.token_ids, out.finish_reason) == (free[:num_tokens], "stop")
        assert set(llm.engine.runner.eos_token_ids) == set(ids.values())


def test_ends_that_are_known_by_name():
    """llama.cpp ends a text at these too, where they are control tokens."""
    tokens = [*CHARS, "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|tool|>", "</s>"]
    types = [1] * 256 + [3, 3, 1, 3, 3]
    tokenizer = gguf_tokenizer(
        fields(tokens=tokens, merges=[], token_type=types, eos_token_id=0)
    )
    assert set(tokenizer.eos_token_ids) == {0, 256, 257, 260}


@pytest.mark.parametrize("name", ["eos", "eot", "eom"])
@pytest.mark.parametrize("value", [V, -1, "a", True])
def test_an_end_that_is_no_token_is_refused(tmp_path, name, value):
    file = write_gguf(tmp_path, more={f"{KEY}{name}_token_id": value})
    assert f"tokenizer.ggml.{name}_token_id is {value!r}" in fault_in(file)


# ---- fields that are malformed ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        *(("model", model) for model in ("bert", "t5", "rwkv", "plamo2", "gemma4", "GPT2", 3)),
        *(("tokens", value) for value in (None, [], [1, 2], "ab", [*CHARS, "a"])),
        *(("merges", value) for value in (None, ["ab"], ["a \u0394"], ["a b"], [1], "a b")),
        *(("token_type", value) for value in ([1], [3] * 300, ["1"] * 256, 1)),
        *((f"add_{kind}_token", 1) for kind in ("bos", "eos")),
        *((f"add_{kind}_token", True) for kind in ("bos", "eos", "sep")),
        *(("bos_token_id", value) for value in (256, -1, 1.0)),
        ("suppress_tokens", [3]),
        ("pre", 3),
    ],
    ids=str,
)
def test_a_field_that_is_malformed_is_refused_by_key(name, value):
    message = refusal(**({"tokens": CHARS, "merges": []} | {name: value}))
    assert "tokenizer.ggml." + name in message


def test_a_chat_template_that_is_no_text():
    with pytest.raises(ValueError, match="tokenizer.chat_template is 3"):
        gguf_tokenizer(fields() | {"tokenizer.chat_template": 3})


def test_an_empty_token_takes_its_place():
    tokenizer = gguf_tokenizer(fields(tokens=["", *CHARS, ""], merges=[]))
    assert tokenizer.encode("!") == [34]


# ---- a directory with vocab.json and merges.txt ----------------------------------------


def write_vocab_and_merges(path, tokens, merges, **settings):
    vocab = {token: i for i, token in enumerate(tokens)}
    (path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (path / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "changes, settings, patterns",
    [
        ({}, {}, [GPT2]),
        ({}, {"tokenizer_class": "GPT2Tokenizer"}, [GPT2]),
        ({"model_type": "mistral"}, {"tokenizer_class": "GPT2TokenizerFast"}, [GPT2]),
        ({"model_type": "olmo2"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, [GPT2]),
        ({}, {"tokenizer_class": "Qwen2Tokenizer"}, [QWEN2]),
        ({"model_type": "qwen3"}, {}, [QWEN2]),
        ({"model_type": "qwen2"}, {"tokenizer_class": "GPT2Tokenizer"}, [GPT2]),
    ],
)
@pytest.mark.parametrize("has_end", [True, False])
def test_vocab_and_merges_are_a_tokenizer(checkpoint, changes, settings, patterns, has_end):
    tokens, merges = trained()
    tokens = [*tokens, *["<|endoftext|>"] * has_end]
    write_vocab_and_merges(checkpoint, tokens, merges, **settings)
    configure(checkpoint, **changes)
    tokenizer = loader._tokenizer_of(checkpoint)
    plain, random = PlainBpe(tokens, merges, patterns), Random(2)
    for text in [*CORPUS, *(random_text(random) for _ in range(20))]:
        if text == unicodedata.normalize("NFC", text):
            assert tokenizer.encode(text) == plain.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.eos_token_ids == (len(tokens) - 1,) * has_end


def test_vocab_and_merges_of_another_class_are_refused(checkpoint):
    write_vocab_and_merges(checkpoint, *trained(), tokenizer_class="CLIPTokenizer")
    fault = fault_in(checkpoint / "vocab.json", checkpoint)
    assert "tokenizer_class is 'CLIPTokenizer'" in fault and "GPT2Tokenizer" in fault


def test_vocab_and_merges_that_cannot_be_read(checkpoint):
    write_vocab_and_merges(checkpoint, *trained())
    (checkpoint / "merges.txt").unlink()
    assert load(checkpoint).tokenizer is None  # vocab.json alone is not enough
    write_vocab_and_merges(checkpoint, *trained())
    (checkpoint / "vocab.json").write_text("{")
    assert "tokenizer" in fault_in(checkpoint / "vocab.json", checkpoint)
