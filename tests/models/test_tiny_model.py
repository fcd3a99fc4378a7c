"""The bundled model: small, readable, and ending by itself; its grammar and its recipe.

The stories are sampled at temperature 0.7 with the engine's own seed, so a run repeats.
"""

import random

import pytest
import torch

from nanobatch import LLM, SamplingParams
from nanobatch.models.loader import TINY_DIR
from nanobatch.tiny_model import train
from nanobatch.tiny_model.grammar import KINDS, NAMES, THINGS, WORDS, opening, story, words_of


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", dtype="float32")


@pytest.fixture(scope="module")
def sampled(llm):
    params = SamplingParams(temperature=0.7, max_tokens=401)
    bos = llm.tokenizer.bos_token_id
    return llm.generate([[bos]] * 100, params, progress=False)


def test_stories_end_by_themselves(sampled):
    ended = [o for o in sampled if o.finish_reason == "stop" and len(o.text) <= 400]
    assert len(ended) >= 90


def test_stories_use_the_words_of_the_grammar(sampled):
    strange = [set(words_of(o.text)) - WORDS for o in sampled]
    assert sum(not s for s in strange) >= 95, [s for s in strange if s]


def test_stories_differ_in_text_and_length(sampled):
    assert len({o.text for o in sampled}) >= 95
    lengths = [len(o.token_ids) for o in sampled]
    assert max(lengths) > 1.5 * min(lengths)


def test_a_story_keeps_its_hero(llm):
    """Greedy: whoever the opening names is named again in what the model adds."""
    openings = [opening(random.Random(seed)) for seed in range(40)]
    names = [next(n for n in train_names() if n in text) for text in openings]
    params = SamplingParams(temperature=0, max_tokens=400)
    outs = llm.generate(openings, params, progress=False)
    kept = sum(name in out.text for name, out in zip(names, outs, strict=True))
    assert kept >= 36


def test_a_story_keeps_its_thing(sampled):
    """What a leak between requests would show: another request's thing."""
    things = [set(words_of(o.text)) & set(THINGS) for o in sampled]
    assert sum(len(t) == 1 for t in things) >= 90


def train_names():
    return [name for names in NAMES.values() for name in names]


def test_size_and_shape(llm):
    config = llm.engine.runner.model.config
    assert config.num_heads // config.num_kv_heads == 3
    num_parameters = sum(p.numel() for p in llm.engine.runner.model.parameters())
    assert 0.8e6 < num_parameters < 1.3e6
    assert (TINY_DIR / "model.safetensors").stat().st_size <= 3_000_000


def test_the_grammar_keeps_its_promises():
    assert 200 <= len(WORDS) <= 600
    lengths = []
    for seed in range(2000):
        text = story(random.Random(seed))
        assert text.isascii() and set(words_of(text)) <= WORDS
        assert text.startswith(opening(random.Random(seed)))
        lengths.append(len(text))
    assert max(lengths) < 400
    assert max(lengths) > 2 * min(lengths)


def test_hero_and_friend_are_of_two_kinds():
    """Of two foxes, "the fox" would be either."""
    kinds = {kind for kinds in KINDS.values() for kind in kinds}
    for seed in range(500):
        text = story(random.Random(seed))
        assert len(kinds & set(words_of(text))) == 2, text


def test_training_repeats_itself():
    first, second = (train.train(seed=3, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = train.train(seed=4, steps=2).state_dict()
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_model_trained_by_the_recipe_takes_text(tmp_path):
    train.save(train.train(seed=0, steps=1), tmp_path)
    out = LLM(str(tmp_path), dtype="float32").generate("Once", progress=False)[0]
    assert len(out.token_ids) > 0
