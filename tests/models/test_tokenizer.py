"""Tokenizers, and text from tokens that arrive one by one.

Each character is shown whole and once, and no text is taken back. Three tokenizers are tested:
the byte tokenizer, and two of Hugging Face's kind, trained here on a few sentences. One is
byte-level BPE (GPT-2, Llama 3, SmolLM2). The other is BPE on pieces that begin with "▁", with a
token for each byte of an unknown character (Llama 2, Mistral). However a text is split into
tokens, and wherever the prompt ends:

    text         "a fox 🦊"        Python's own decoding of all bytes: the oracle
    prompt       "a f"             its text is not repeated
    deltas       "ox ", "🦊"       joined, they are the rest of the text

The oracle for stop strings is a brute-force search over the text so far, at each token.

Tests invariant 17 and faults 35 (stop strings within min_tokens), 38, 39.
"""

import functools
import json
import os.path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_bpe import CHARS

from nanobatch.detokenizer import IncrementalDetokenizer
from nanobatch.models.tokenizer import ByteTokenizer, HFTokenizer

FAMILY = "👩‍👩‍👧"  # five characters, three of them visible
SENTENCES = [
    "Once upon a time there was a small fox named Zoé, who loved plums.",
    "The fox 🦊 lived by the river and ate cherries with café crème.",
    f"naïve 漢字 text, a {FAMILY} family, 👍🏽 and 🇫🇷 flags 🦊🦊",
    "Don't stop there. Hello , world ! It 's over, said the fox.",
]
PROPERTY = settings(max_examples=120, deadline=None, derandomize=True, database=None)


# ---- the tokenizers --------------------------------------------------------------------


@functools.cache
def byte_level():
    """BPE on bytes: a token may hold the end of one character and the start of the next."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return wrap(backend)


@functools.cache
def byte_fallback():
    """BPE on ASCII text with "▁" for a space, and tokens like <0xF0> for all other bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = spaces
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    trained.train_from_iterator([s for s in SENTENCES if s.isascii()] * 3, trainer)
    model = json.loads(trained.to_str())["model"]

    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return wrap(backend)


def wrap(backend):
    from transformers import PreTrainedTokenizerFast

    return HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    )


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
}
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def cut_at_random(name, text, random, longest=8):
    """Split a text into tokens of the vocabulary, at random places."""
    if name == "bytes":
        return list(text.encode())
    vocab = TOKENIZERS[name]().hf.get_vocab()
    if name == "byte level":
        from tokenizers.pre_tokenizers import ByteLevel

        split = ByteLevel(add_prefix_space=False, use_regex=False)
        rest, in_bytes = split.pre_tokenize_str(text)[0][0] if text else "", None
    else:
        rest = "▁" + text.replace(" ", "▁")
        in_bytes = [[vocab[f"<0x{byte:02X}>"] for byte in c.encode()] for c in rest]
    ids, start = [], 0
    while start < len(rest):
        choices = [n for n in range(1, longest + 1) if rest[start : start + n] in vocab]
        choices = [n for n in choices if start + n <= len(rest)]
        if choices:
            n = random.choice(choices)
            ids.append(vocab[rest[start : start + n]])
        else:
            n = 1
            ids += in_bytes[start]
        start += n
    return ids


def cut_in_bytes(name, text):
    """A token for each byte of a character that is not ASCII."""
    return cut_at_random(name, text, Random(0), longest=1)


# ---- what must come out ----------------------------------------------------------------


def run(tokenizer, prompt, output, stop=(), min_tokens=0):
    """All deltas of an output: one for each token, and one at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer.stream(prompt), stop, min_tokens)
    deltas = []
    for token in output:
        stopped = detokenizer.append(token)
        deltas.append(detokenizer.take_delta(finished=stopped))
        assert detokenizer.sent_text == "".join(deltas)
        if stopped:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta(finished=True))
    assert detokenizer.sent_text == "".join(deltas)
    assert detokenizer.take_delta(finished=True) == ""
    return deltas


def expected_text(tokenizer, prompt, output):
    """The decoded prompt and output, without the text that the prompt already shows.

    The prompt may end inside a character, which is then the output's.
    """
    whole = tokenizer.decode([*prompt, *output])
    return whole[len(os.path.commonprefix([whole, tokenizer.decode(prompt)])) :]


PIECES = ["a", "b ", " ", "fox", " the", "é", "漢", "😀", "🦊", FAMILY, "👍🏽", "🇫🇷", "\n", "́"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join)


@each_tokenizer
@PROPERTY
@given(texts, st.randoms(use_true_random=False))
def test_deltas_are_the_text(name, text, random):
    """However the text is split, wherever the prompt ends: each character once, and whole.

    If the prompt ends inside a character, the output begins with that whole character.
    """
    tokenizer = TOKENIZERS[name]()
    ids = cut_at_random(name, text, random)
    end = random.randint(1, len(ids))
    prompt, output = ids[:end], ids[end:]
    deltas = run(tokenizer, prompt, output)
    assert "".join(deltas) == expected_text(tokenizer, prompt, output)
    assert "\ufffd" not in "".join(deltas)
    assert deltas[-1] == ""  # nothing was held back: the text is complete


@each_tokenizer
def test_each_sentence_by_the_tokenizer_itself(name):
    tokenizer = TOKENIZERS[name]()
    for sentence in SENTENCES:
        ids = tokenizer.encode(sentence)
        assert tokenizer.decode(ids) == sentence
        deltas = run(tokenizer, ids[:1], ids[1:])
        assert tokenizer.decode(ids[:1]) + "".join(deltas) == sentence


@each_tokenizer
def test_a_prompt_that_ends_in_characters_of_many_tokens(name):
    """The context that starts the decoder may begin inside a character."""
    tokenizer = TOKENIZERS[name]()
    ids = cut_in_bytes(name, "a fox 🐙🐙漢漢é🐙🐙")
    for end in range(2, len(ids) + 1):
        deltas = run(tokenizer, ids[:end], ids[end:])
        assert "".join(deltas) == expected_text(tokenizer, ids[:end], ids[end:])
        assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("character", ["é", "漢", "😀"])
def test_a_character_comes_with_its_last_token(character):
    """Fault 39: no text before, and the character once."""
    in_bytes = list(character.encode())
    deltas = run(ByteTokenizer(), [97], [*in_bytes, 98])
    assert deltas == [""] * (len(in_bytes) - 1) + [character, "b", ""]


def test_characters_that_are_joined_come_one_by_one():
    """An emoji with zero-width joiners is several characters; each comes when it is whole."""
    deltas = run(ByteTokenizer(), [97], list(FAMILY.encode()))
    assert [d for d in deltas if d] == list(FAMILY)


@each_tokenizer
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_unfinished_character_is_flushed_once(name, num_bytes):
    """Fault 39: at the very end, as the tokenizer's decoder shows it."""
    tokenizer = TOKENIZERS[name]()
    ids, end = cut_in_bytes(name, "a🐙"), len(cut_in_bytes(name, "a"))
    prompt, output = ids[:end], ids[end : end + num_bytes]
    deltas = run(tokenizer, prompt, output)
    assert deltas[:-1] == [""] * num_bytes
    assert deltas[-1] == expected_text(tokenizer, prompt, output)
    assert set(deltas[-1]) == {"\ufffd"}


@each_tokenizer
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(name, num_bytes):
    """Fault 39: the character is output once its last byte arrives."""
    tokenizer = TOKENIZERS[name]()
    ids = cut_in_bytes(name, "a🐙a")
    end = len(cut_in_bytes(name, "a")) + num_bytes
    assert "".join(run(tokenizer, ids[:end], [])) == ""
    assert "".join(run(tokenizer, ids[:end], ids[end:])) == "🐙a"
    assert "".join(run(tokenizer, ids[:end], ids[-1:])) == "a"  # never completed


# Bytes of characters, whole and cut, and bytes that begin none.
some_bytes = st.lists(
    st.sampled_from(
        [*"a é漢🦊\ufffd".encode(), 0x80, 0xC0, 0xE0, 0xED, 0xA0, 0xF4, 0xF5, 0xFF]
    ),
    min_size=1,
    max_size=24,
).map(bytes)


@each_tokenizer
@PROPERTY
@given(some_bytes, st.integers(1, 24))
@example(b"\xe2\x82\xff\xac", 2)
@example(b"\xe0\x80\x41", 1)
@example("🦊🦊".encode() + b"\xf0", 24)
def test_any_bytes_at_all(name, data, end):
    """Also bytes that are not UTF-8: U+FFFD for each maximal part of a character, no more."""
    tokenizer = TOKENIZERS[name]()
    ids = [byte_token(name, byte) for byte in b"a" + data]
    assert tokenizer.decode(ids) == (b"a" + data).decode(errors="replace")
    prompt, output = ids[:end], ids[end:]
    assert "".join(run(tokenizer, prompt, output)) == expected_text(tokenizer, prompt, output)


def byte_token(name, byte):
    if name == "bytes":
        return byte
    text = CHARS[byte] if name == "byte level" else f"<0x{byte:02X}>"
    return TOKENIZERS[name]().hf.convert_tokens_to_ids(text)


@each_tokenizer
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_cut_character_takes_no_other_along(name, num_bytes):
    """An answer that ends inside its third emoji: two, and one replacement character."""
    tokenizer = TOKENIZERS[name]()
    ids, prompt = cut_in_bytes(name, "a🦊🐙🦊"), cut_in_bytes(name, "a")
    output = ids[len(prompt) : len(ids) - 4 + num_bytes]
    assert "".join(run(tokenizer, prompt, output)) == "🦊🐙\ufffd"
    assert tokenizer.decode([*prompt, *output]) == "a🦊🐙\ufffd"


@each_tokenizer
@PROPERTY
@given(st.randoms(use_true_random=False))
def test_deltas_are_the_decoded_output(name, random):
    """For any tokens, special ones and those outside the vocabulary among them."""
    tokenizer = TOKENIZERS[name]()
    first = cut_in_bytes(name, "a")  # with it, the first space is the text's own
    output = [random.randrange(tokenizer.vocab_size + 9) for _ in range(random.randint(0, 40))]
    text = tokenizer.decode([*first, *output])
    assert "".join(run(tokenizer, first, output)) == text[1:]
    without = "".join(run(tokenizer, [], output))
    assert without == tokenizer.decode(output)


@PROPERTY
@given(st.randoms(use_true_random=False))
def test_byte_level_is_as_the_tokenizers_library_decodes(random):
    tokenizer = byte_level()
    ids = [random.randrange(tokenizer.vocab_size) for _ in range(random.randint(0, 40))]
    backend = tokenizer.hf.backend_tokenizer
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


@PROPERTY
@given(texts, st.randoms(use_true_random=False))
def test_byte_fallback_is_as_the_tokenizers_library_decodes(text, random):
    """Where all characters are whole."""
    tokenizer, ids = byte_fallback(), cut_at_random("byte fallback", text, random)
    backend = tokenizer.hf.backend_tokenizer
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def words(decoder):
    """A tokenizer whose tokens are whole words, and are joined by that decoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {
        word: i for i, word in enumerate(["<s>", "</s>", "walk", "##ing", "the", "fox", "a"])
    }
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoder
    return wrap(backend)


def test_tokens_that_are_not_joined_bytes():
    from tokenizers import decoders

    tokenizer = words(decoders.WordPiece())
    prompt, output = tokenizer.encode("the fox"), [2, 3, 0, 4, 5, 1]
    assert tokenizer.decode(prompt + output) == "the fox walking the fox"
    assert "".join(run(tokenizer, prompt, output)) == " walking the fox"
    assert "".join(run(tokenizer, [], output)) == "walking the fox"


def test_a_decoder_that_takes_text_back_never_raises():
    """DecodeStream does, and starts again."""
    from tokenizers import decoders

    decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("walkfox", "ran away")])
    tokenizer = words(decoder)
    assert tokenizer.decode([4, 2, 5]) == "theran away"
    assert "".join(run(tokenizer, [4], [2, 5, 4])) == "walkfoxthe"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@PROPERTY
@given(st.randoms(use_true_random=False))
def test_garbage_never_raises(name, random):
    """A model may sample any token after any other, and ids outside the tokenizer's."""
    tokenizer = TOKENIZERS[name]()
    ids = [random.randrange(tokenizer.vocab_size + 9) for _ in range(random.randint(2, 60))]
    end = random.randint(1, len(ids) - 1)
    run(tokenizer, ids[:end], ids[end:], stop=["a", "\ufffdb"], min_tokens=3)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_special_tokens_are_not_in_the_text(name):
    tokenizer = TOKENIZERS[name]()
    begin, end = tokenizer.hf.bos_token_id, tokenizer.hf.eos_token_id
    words = cut_at_random(name, "the fox", Random(1))
    output = [begin, *words, end, end, *cut_at_random(name, " ate", Random(1)), end]
    text = "".join(run(tokenizer, [begin], output))
    assert text.replace(" ", "") == "thefoxate"
    assert text == expected_text(tokenizer, [begin], output)


def test_the_first_word_keeps_its_space():
    """After a prompt, unlike at the start of a text, "▁fox" begins with a space."""
    tokenizer = byte_fallback()
    fox = tokenizer.encode("fox")[1:]
    prompt = tokenizer.encode("a")
    assert "".join(run(tokenizer, prompt, fox)) == " fox"
    assert "".join(run(tokenizer, tokenizer.encode(""), fox)) == "fox"


# ---- what the engine asks of a tokenizer -----------------------------------------------


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [256, 97, 0xC3, 0xA9]
    assert tokenizer.decode([256, 97, 0xC3, 0xA9, 257]) == "aé"
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((257,), 258)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_hf_tokenizer(name):
    tokenizer = TOKENIZERS[name]()
    assert tokenizer.eos_token_ids == (tokenizer.hf.convert_tokens_to_ids("</s>"),)
    assert tokenizer.vocab_size == len(tokenizer.hf)
    # Space before punctuation is the text's own: no "clean up" may take it away.
    assert tokenizer.decode(tokenizer.encode("Hello , it 's")) == "Hello , it 's"


def test_a_tokenizer_that_is_not_fast_is_refused():
    with pytest.raises(ValueError, match="object is not a fast tokenizer"):
        HFTokenizer(object())


# ---- stop strings ----------------------------------------------------------------------


class PieceStream:
    """A tokenizer's stream in which token i has the text pieces[i]."""

    def __init__(self, pieces, pending=""):
        self.pieces = pieces
        self.held = pending
        self.num_taken = 0

    def step(self, token_id):
        self.num_taken += 1
        return self.pieces[token_id]

    def pending(self):
        return self.held if self.num_taken == len(self.pieces) else ""


def detokenize(pieces, stop, min_tokens=0, pending=""):
    """(text, number of tokens taken, the shown text after each); shown text never shrinks."""
    detokenizer = IncrementalDetokenizer(PieceStream(pieces, pending), stop, min_tokens)
    shown = []
    for i in range(len(pieces)):
        stopped = detokenizer.append(i)
        assert stopped == detokenizer.stopped
        detokenizer.take_delta(finished=stopped)
        shown.append(detokenizer.sent_text)
        if stopped:
            break
    assert detokenizer.finish() == detokenizer.stopped
    detokenizer.take_delta(finished=True)
    text = detokenizer.sent_text
    assert all(text.startswith(s) for s in shown), "something shown was taken back"
    return text, len(shown), shown


def brute_force(pieces, stop, min_tokens=0, pending=""):
    """(text, number of tokens): the oracle, which tries each stop at each end."""
    text = ""
    for num_tokens, piece in enumerate([*pieces, pending], start=1):
        num_tokens = min(num_tokens, len(pieces))
        old, text = len(text), text + piece
        if num_tokens <= min_tokens:
            continue
        for end in range(old + 1, len(text) + 1):
            for s in stop:
                if text[:end].endswith(s):
                    return text[: end - len(s)], num_tokens
    return text, len(pieces)


short = st.text("ab\n", min_size=1, max_size=4)


@settings(PROPERTY, max_examples=500)
@given(
    st.lists(st.text("ab\n", max_size=3), min_size=1, max_size=12),
    st.lists(short, max_size=3),
    st.integers(0, 6),
    st.text("ab", max_size=2),
)
@example(["a", "ba", "b"], ["abb", "bab"], 0, "")
@example(["aa", "aa"], ["aaa"], 1, "")
@example(["a", "b"], ["ab", "b"], 0, "")
@example(["a", ""], ["ab"], 2, "b")
def test_stop_strings_by_brute_force(pieces, stop, min_tokens, pending):
    """Fault 38: the first stop to be complete wins, and no part of it is shown."""
    text, num_tokens, shown = detokenize(pieces, stop, min_tokens, pending)
    assert (text, num_tokens) == brute_force(pieces, stop, min_tokens, pending)
    for n, so_far in enumerate(shown, start=1):
        if n < num_tokens:
            held = "".join(pieces[:n])[len(so_far) :]
            assert held == "" or any(s.startswith(held) and s != held for s in stop), (
                f"{held!r} is held back for nothing"
            )


@each_tokenizer
@PROPERTY
@given(texts, st.lists(st.sampled_from(PIECES), min_size=1), st.randoms(use_true_random=False))
def test_stop_strings_with_real_tokens(name, text, stop, random):
    """The same for each tokenizer's tokens; the oracle gets the deltas without stops."""
    tokenizer = TOKENIZERS[name]()
    ids = cut_at_random(name, "a" + text, random)
    deltas = run(tokenizer, ids[:1], ids[1:])
    min_tokens = random.choice([0, 0, 1, 5])
    stopped = run(tokenizer, ids[:1], ids[1:], stop, min_tokens)
    expected, num_tokens = brute_force(deltas[:-1], stop, min_tokens, deltas[-1])
    assert "".join(stopped) == expected
    assert len(stopped) == num_tokens + 1


@pytest.mark.parametrize(
    "pieces, stop, text",
    [
        (["say ", "EN", "D now"], ["END"], "say "),  # over a token boundary
        (["E", "N", "D"], ["END"], ""),  # from the start; at the very last token
        (["a", "EN", "E", "ND"], ["END"], "aEN"),  # begun, given up, begun again
        (["aa", "ab"], ["aab"], "a"),  # overlaps with itself
        (["END and END"], ["END"], ""),  # the first of two
        (["x", "abcd"], ["bcd", "abc"], "x"),  # abc is complete before bcd
        (["x", "abc"], ["bc", "abc"], "xa"),  # both with the c: list order
        (["x", "abc"], ["abc", "bc"], "x"),
        (["x", "a", "b", "c"], ["b", "abc"], "xa"),
        (["no", "thing"], ["END"], "nothing"),
        (["the E", "N"], ["END"], "the EN"),  # held back, and let go at the end
        (["1\n", "\n2"], ["\n\n"], "1"),
    ],
    ids=str,
)
def test_stop_strings(pieces, stop, text):
    assert detokenize(pieces, stop)[0] == text


def test_shown_in_the_meantime():
    """The picture in the module's docstring."""
    shown = detokenize(["the E", "N", "A", " En", "D"], ["END"])[2]
    assert shown == ["the ", "the ", "the ENA", "the ENA En", "the ENA EnD"]
    shown = detokenize(["ab", "ab", "c"], ["ababc"])[2]
    assert shown == ["", "", ""]
    assert detokenize(["a", "b"], [])[2] == ["a", "ab"]  # no stops: nothing to wait for


def test_a_stop_within_min_tokens_is_ignored_for_good():
    """Fault 35."""
    pieces = ["a", "END", "b", "END", "c"]
    assert detokenize(pieces, ["END"], min_tokens=0)[0] == "a"
    assert detokenize(pieces, ["END"], min_tokens=1)[0] == "a"
    assert detokenize(pieces, ["END"], min_tokens=2)[0] == "aENDb"
    assert detokenize(pieces, ["END"], min_tokens=4)[0] == "aENDbENDc"
    # Begun within, completed after: that one counts.
    assert detokenize(["a", "EN", "D"], ["END"], min_tokens=2)[0] == "a"


def test_a_stop_in_what_was_held_back():
    """A character that the output leaves unfinished is flushed, and may complete a stop."""
    detokenizer = IncrementalDetokenizer(PieceStream(["a", ""], pending="\ufffd"), ["a\ufffd"])
    assert not detokenizer.append(0) and not detokenizer.append(1)
    assert detokenizer.take_delta(finished=False) == ""
    assert detokenizer.finish()
    assert detokenizer.take_delta(finished=True) == ""
