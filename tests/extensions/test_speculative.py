"""Speculative decoding: a draft decides how many tokens a step yields, and never which.

The oracles: the dense solo run of test_engine.py for tokens, samples and log-probabilities;
a brute-force search for prompt lookup; the exact distribution of a model of six tokens, by
enumeration, for what rejection sampling gives; counts by hand.

Random traces with drafts are in test_shadow_cache.py; prompt lookup is one of the dimensions of
test_engine_machine.py and test_fuzz.py.
"""

import copy
import functools
import itertools
import json
import math
import time
from collections import Counter
from random import Random

import pytest
import torch
from test_engine import (
    CROWD,
    EOS,
    NAN,
    TOKENIZER,
    Poison,
    Watch,
    assert_as_if_alone,
    check_crowd,
    dense_attend,
    greedy,
    prompt_of,
    run_one,
    tiny,
)

import bench
from nanobatch import (
    LLM,
    BlockAllocator,
    EngineConfig,
    LLMEngine,
    Request,
    SamplingParams,
    Scheduler,
    StepResult,
    simulate,
)
from nanobatch.bench.speculative import Gain
from nanobatch.extensions.speculative import PromptLookup
from nanobatch.llm import build_runner
from nanobatch.models.config import ModelConfig
from nanobatch.models.loader import make_dummy

NGRAM = {"speculative": "ngram", "prompt_lookup_min": 1}
DRAFT = {"speculative": "draft", "draft_model": "given below"}


@functools.cache
def noisy(noise=0.1):
    """The bundled model with noise on its weights: it guesses well, not always."""
    model, generator = copy.deepcopy(tiny()), torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data += (
            noise * weight.data.std() * torch.randn(weight.shape, generator=generator)
        )
    return model


def engine_of(draft=None, wrap=lambda runner: runner, model=None, **knobs):
    knobs = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "dtype": "float32"} | knobs
    knobs |= NGRAM if draft is None else DRAFT
    runner = build_runner(model or tiny(), EngineConfig(**knobs), draft)
    wrapped = wrap(runner)
    engine = LLMEngine(runner.config, wrapped, tokenizer=TOKENIZER)
    if isinstance(wrapped, Poison):
        wrapped.scheduler = engine.scheduler
    return engine


# ---- prompt lookup ---------------------------------------------------------------------


def looked_up(token_ids, most, longest, shortest):
    """Brute force: the longest end that is there before, the latest place of it."""
    size = len(token_ids)
    for n in range(longest, shortest - 1, -1):
        for start in range(size - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[size - n :]:
                known = list(token_ids)
                shift = size - (start + n)
                while len(known) < size + most:
                    known.append(known[-shift])
                return known[size:]
    return []


def test_prompt_lookup_by_brute_force():
    random = Random(0)
    for _ in range(3000):
        # 256 and the like: bytes that look the same between two tokens
        alphabet = random.choice([[0], [0, 1], [0, 1, 256, 257, 65536], list(range(9))])
        token_ids = random.choices(alphabet, k=random.randint(1, 30))
        shortest = random.randint(1, 3)
        longest, most = random.randint(shortest, 5), random.randint(1, 6)
        found = PromptLookup(longest, shortest).propose(token_ids, most)
        assert found == looked_up(token_ids, most, longest, shortest), (token_ids, longest)


@pytest.mark.parametrize("alphabet", [1, 2, 50_000])
def test_prompt_lookup_of_4000_tokens_takes_no_time(alphabet):
    token_ids = Random(0).choices(range(alphabet), k=4000)
    lookup = PromptLookup(4, 2)
    start = time.perf_counter()
    for _ in range(20):
        lookup.propose(token_ids, 4)
    assert time.perf_counter() - start < 20 * 5e-3  # it takes 0.1 ms


# ---- the same tokens -------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"block_size": 1, "num_blocks": 46, "num_speculative_tokens": 1},
        {"block_size": 2, "num_blocks": 24, "num_speculative_tokens": 3},
        {"block_size": 4, "num_blocks": 12, "num_speculative_tokens": 7},
        {"block_size": 16},
        {"num_blocks": 15, "preemption": "swap", "num_host_blocks": 40},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"batching": "static"},
        {"enable_prefix_caching": False, "num_blocks": 15, "policy": "priority"},
    ],
    ids=str,
)
def test_a_crowd_with_drafts(drafter, knobs):
    """Invariants 10, 12, 13: greedy tokens, seeded samples and log-probabilities are those
    of each request alone without drafts (a model that drafts for itself is always right)."""
    engine = engine_of(tiny() if drafter == "draft" else None, **knobs)
    outs = check_crowd(engine, CROWD) + check_crowd(engine, CROWD[::-1])
    stats = engine.stats
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(out.metrics.num_accepted_tokens for out in outs)
    assert stats.num_draft_tokens == sum(out.metrics.num_draft_tokens for out in outs)
    if "num_blocks" in knobs:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_drafts_over_nan_in_every_slot_that_nobody_owns(drafter):
    """Invariant 14, in both models' caches: rejected drafts too."""
    draft = noisy() if drafter == "draft" else None
    engine = engine_of(draft, wrap=Poison, num_blocks=15, max_num_batched_tokens=16)
    check = [(prompt, params) for prompt, params in CROWD if params.temperature == 0]
    check_crowd(engine, check)
    check_crowd(engine, check)
    assert engine.stats.num_preemptions > 0
    assert 0 < engine.stats.acceptance_rate < 1


@functools.cache
def by_itself(prompt, params):
    """Tokens of a request alone in an engine, with the noisy model's drafts."""
    return run_one(engine_of(noisy(), block_size=16), prompt, params).token_ids


@pytest.mark.parametrize(
    "knobs",
    [
        {"block_size": 1, "num_blocks": 46, "num_speculative_tokens": 1},
        {"num_blocks": 12, "num_speculative_tokens": 7},
        {"num_blocks": 15, "preemption": "swap", "num_host_blocks": 40},
        {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_seeded_samples_do_not_depend_on_the_room_for_drafts(knobs):
    """Invariant 13: with a draft model they are not those without, but they are the same in
    any crowd, and for any number of drafts."""
    engine = engine_of(noisy(), **knobs)
    watch = Watch(engine)
    ids = [engine.add_request(list(prompt), params) for prompt, params in CROWD]
    last = watch.run()
    for request_id, (prompt, params) in zip(ids, CROWD, strict=True):
        if params.temperature == 0:
            assert_as_if_alone(last[request_id], prompt, params)
        else:
            assert last[request_id].token_ids == by_itself(tuple(prompt), params)
    assert engine.stats.num_accepted_tokens > 0
    if "num_blocks" in knobs:
        assert engine.stats.num_preemptions > 0 and engine.stats.acceptance_rate < 1


# ---- the same distribution -------------------------------------------------------------

SIX = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=6,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)


@functools.cache
def six(seed):
    """A model of six tokens that has opinions."""
    model = make_dummy(SIX, torch.float32, seed=seed)
    model.lm_head.weight.data *= 0.8 / model.lm_head.weight.std()
    return model


@torch.inference_mode()
def exact(prompt, params, num_tokens):
    """{tokens: probability} of all outputs, by the formulas, one token after another."""
    probs = {}
    for output in itertools.product(range(6), repeat=num_tokens):
        p = 1.0
        for n, token in enumerate(output):
            ids_T = torch.tensor([*prompt, *output[:n]])
            hidden_TE = six(0)(ids_T, torch.arange(len(ids_T)), dense_attend)
            logits_V = six(0).logits(hidden_TE[-1:])[0].double()
            for seen, count in Counter(output[:n]).items():
                logits_V[seen] -= params.frequency_penalty * count
            kept = logits_V.argsort(descending=True)[: params.top_k or 6]
            weights = {int(i): math.exp(logits_V[i] / params.temperature) for i in kept}
            p *= weights.get(token, 0.0) / sum(weights.values())
        probs[output] = p
    return probs


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7, "top_k": 4, "frequency_penalty": 0.6}]
)
def test_samples_have_the_model_s_distribution(drafter, how):
    """Chi-squared over all outputs of three tokens, where drafts are often wrong."""
    prompt, num_samples = [1, 2, 3, 1, 2, 3, 1, 2], 2500
    draft = six(1) if drafter == "draft" else None
    engine = engine_of(draft, model=six(0), max_num_seqs=256, num_blocks=2000)
    engine.tokenizer = None
    params = {"max_tokens": 3, "ignore_eos": True} | how
    for seed in range(num_samples):
        engine.add_request(prompt, SamplingParams(seed=seed, **params))
    counts = Counter()
    while engine.has_unfinished():
        counts.update(tuple(out.token_ids) for out in engine.step() if out.finished)
    expected = exact(prompt, SamplingParams(**params), 3)
    assert set(counts) <= {output for output, p in expected.items() if p > 0}
    usual = [output for output, p in expected.items() if num_samples * p >= 5]
    cells = [(counts[output], num_samples * expected[output]) for output in usual]
    cells.append(
        (num_samples - sum(c for c, _ in cells), num_samples - sum(e for _, e in cells))
    )
    cells = [cell for cell in cells if cell[1] > 1]
    chi2, free = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    assert free > 20 and chi2 < free + 4 * math.sqrt(2 * free), (chi2, free)
    assert 0.1 < engine.stats.acceptance_rate < 0.9


# ---- by hand ---------------------------------------------------------------------------


class Script:
    """Says a text, and checks drafts against it."""

    vocab_size = 258
    eos_token_ids = (EOS,)

    def __init__(self, text, fails_at=None):
        self.tokens, self.fails_at, self.rows = [*text.encode(), EOS], fails_at, []

    def run(self, plan):
        result = StepResult({}, {}, {})
        self.rows.append([row.num_tokens for row in plan.scheduled])
        for row in plan.scheduled:
            request_id, said = row.request.request_id, []
            num_output = len(row.request.output_token_ids)
            for draft in (*row.draft_token_ids, None):
                place = num_output + len(said)
                if place == self.fails_at:
                    break
                said.append(self.tokens[min(place, len(self.tokens) - 1)])
                if said[-1] != draft:
                    break
            if not said:
                result.errors[request_id] = "broken"
                continue
            result.token_ids[request_id] = said
            result.logprobs[request_id] = [{token: -float(token)} for token in said]
        return result


def scripted(text, k=4, fails_at=None, **knobs):
    speculative = {} if k == 0 else NGRAM | {"num_speculative_tokens": k}
    knobs = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4} | speculative | knobs
    return LLMEngine(EngineConfig(**knobs), Script(text, fails_at), tokenizer=TOKENIZER)


def test_acceptance_of_what_repeats_itself_by_hand():
    """A step that samples the first token, then 4 drafts and 1 of its own, twice."""
    engine = scripted("abc" * 10)
    out = run_one(engine, b"abcabc", greedy(11))
    assert out.text == "abcabcabcab" and out.finish_reason == "length"
    assert engine.runner.rows == [[6], [5], [5]]
    stats = engine.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_steps) == (8, 8, 3)
    assert stats.acceptance_rate == 1 and stats.tokens_per_turn == 11 / 3
    assert (out.metrics.num_draft_tokens, out.metrics.num_accepted_tokens) == (8, 8)


def test_acceptance_of_a_draft_that_is_half_right_by_hand():
    """'a' is sampled. 'bcab' is guessed, 'b' is right, and X comes. X was never seen before, so
    'a' comes by itself. It was, lately with 'b' behind it: that is right, and 'c' comes. (More
    than 'b' is not guessed: only two tokens are left to go.)"""
    engine = scripted("abXabc")
    out = run_one(engine, b"abcabc", greedy(6))
    assert out.text == "abXabc"
    assert engine.runner.rows == [[6], [5], [1], [2]]
    assert (out.metrics.num_draft_tokens, out.metrics.num_accepted_tokens) == (5, 2)


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize(
    "how",
    [
        {"stop": "bca"},
        {"stop": ["cabca", "ab"], "min_tokens": 3},
        {"stop": "cab", "stop_token_ids": [ord("X")]},
        {"stop_token_ids": [ord("c")]},
        {"stop_token_ids": [ord("c")], "min_tokens": 4},
        {"stop": "X"},
        {"max_tokens": 7},
        {"max_tokens": 7, "stop": "abcabca"},
        {},
        {"ignore_eos": True, "max_tokens": 20},
    ],
    ids=str,
)
def test_stops_inside_of_accepted_drafts(k, how):
    """Tokens behind a stop are dropped; text, reason and log-probabilities are those of a
    run without drafts, and the deltas join (invariant 17)."""
    params = SamplingParams(temperature=0, logprobs=0, **({"max_tokens": 30} | how))
    text = "abcabcabcabXabcabc"
    plain, drafted = (run_one(scripted(text, k=n), b"abcabcab", params) for n in (0, k))
    for name in ("text", "token_ids", "logprobs", "finish_reason"):
        assert getattr(drafted, name) == getattr(plain, name), name
    assert drafted.metrics.num_output_tokens == len(plain.token_ids)
    assert drafted.metrics.num_accepted_tokens > 0
    assert drafted.metrics.num_accepted_tokens < len(plain.token_ids)


def test_an_error_behind_accepted_drafts_comes_with_the_next_step():
    """Invariant 15: what was sampled before it is put out."""
    out = run_one(scripted("abc" * 9, fails_at=7), b"abcabc", greedy(20))
    assert out.finish_reason == "error" and out.text == "abcabca"


@pytest.mark.parametrize("which", ["draft", "model"])
def test_logits_that_are_no_numbers(which):
    """A draft model that says NaN guesses nothing; a model's NaN ends the request."""
    prompt, params = prompt_of(9), greedy(12)
    if which == "draft":
        broken = copy.deepcopy(tiny())
        broken.norm.weight.data.fill_(NAN)
        for how in (params, SamplingParams(seed=1, max_tokens=12, ignore_eos=True)):
            assert_as_if_alone(run_one(engine_of(broken), prompt, how), prompt, how)
        return
    model = copy.deepcopy(tiny())
    logits, calls = model.logits, itertools.count()

    def third_position_fails(hidden_SE):
        logits_SV = logits(hidden_SE)
        if next(calls) in (1, 2):
            logits_SV[2:] = NAN
        return logits_SV

    model.logits = third_position_fails
    engine = engine_of(tiny(), model=model)
    assert_as_if_alone(run_one(engine, prompt, params), prompt, params)
    assert engine.stats.num_steps == 5  # 1, then 2 and 2 for the NaN, 5 and 2


# ---- the scheduler ---------------------------------------------------------------------


class Right:
    """Drafts that are always right, in a world of a single token."""

    def propose(self, token_ids, most):
        return [7] * most


def step(scheduler):
    plan = scheduler.schedule(0.0)
    token_ids = {s.request.request_id: [7] * s.num_logits for s in plan.scheduled}
    scheduler.update(plan, {name: ids for name, ids in token_ids.items() if ids}, 0.0)
    return {s.request.request_id: s.num_tokens for s in plan.scheduled}


def scheduler_of(**knobs):
    config = EngineConfig(**({"num_blocks": 64, "block_size": 4} | NGRAM | knobs))
    pool = BlockAllocator(config.num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(config, pool)
    scheduler.hooks[0].drafter = Right()
    return scheduler


def test_drafts_take_what_is_left_of_the_budget():
    """Invariants 7 and 9: prompts come first, those that run and those that wait."""
    scheduler = scheduler_of(max_num_seqs=3, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=30)
    scheduler.add(Request("a", [7] * 3, params))
    assert step(scheduler) == {"a": 3}
    scheduler.add(Request("b", [7] * 9, params))
    assert step(scheduler) == {"a": 1, "b": 7}
    assert step(scheduler) == {"a": 5, "b": 2}
    scheduler.add(Request("c", [7] * 2, params))
    assert step(scheduler) == {"a": 5, "b": 1, "c": 2}
    assert step(scheduler) == {"a": 5, "b": 2, "c": 1}


def test_drafts_preempt_nobody():
    """Two that fit without drafts, to the last block, fit with them."""
    scheduler = scheduler_of(num_blocks=6, max_num_seqs=2)
    for name in "ab":
        scheduler.add(Request(name, [7] * 4, SamplingParams(max_tokens=9)))
    seen = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        assert plan.preempted == []
        seen += [s.num_logits for s in plan.scheduled]
        token_ids = {s.request.request_id: [7] * s.num_logits for s in plan.scheduled}
        scheduler.update(plan, token_ids, 0.0)
    assert max(seen) == 5


def test_rejected_drafts_give_their_blocks_back():
    scheduler = scheduler_of(num_blocks=20, block_size=1, num_speculative_tokens=6)
    scheduler.add(Request("a", [7] * 3, SamplingParams(max_tokens=12)))
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan.scheduled[0].num_tokens == 7
    request = plan.scheduled[0].request
    assert len(request.block_table) == 10
    scheduler.update(plan, {"a": [7, 7, 1]}, 0.0)
    assert request.num_computed_tokens == 6 and request.num_tokens == 7
    scheduler.hooks[0].drafter = PromptLookup(1, 1)  # 1 was never seen: no drafts
    scheduler.schedule(0.0)
    assert len(request.block_table) == 7
    scheduler.abort("a")
    assert scheduler.allocator.num_free_blocks == 20


def test_a_step_with_drafts_that_fails_is_planned_again():
    scheduler = scheduler_of()
    scheduler.add(Request("a", [7] * 3, SamplingParams(max_tokens=12)))
    step(scheduler)
    first, again = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [s.num_tokens for s in first.scheduled] == [s.num_tokens for s in again.scheduled]
    assert len(again.scheduled[0].request.block_table) == 2


# ---- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs, what",
    [
        ({"speculative": "draft"}, "draft_model is None"),
        ({"speculative": "ngram", "draft_model": "tiny"}, "draft_model is 'tiny'"),
        ({"draft_model": "tiny"}, "draft_model is 'tiny'; with speculative None"),
        ({"prompt_lookup_min": 5}, r"prompt_lookup_max is 4; .* >= 5"),
    ],
)
def test_fields_that_contradict_each_other(knobs, what):
    with pytest.raises(ValueError, match=what):
        EngineConfig(**knobs)


def test_a_draft_model_that_does_not_fit_is_refused():
    config = EngineConfig(num_blocks=8, max_num_seqs=4, **DRAFT)
    with pytest.raises(ValueError, match="draft_model has a vocabulary of 6 .* of 258"):
        build_runner(tiny(), config, six(0))
    with pytest.raises(ValueError, match="speculative is 'draft'.*none is given"):
        build_runner(tiny(), config)
    with pytest.raises(ValueError, match="speculative is None.*one is given"):
        build_runner(tiny(), EngineConfig(num_blocks=8), tiny())
    shorter = copy.deepcopy(six(1))
    shorter.config = ModelConfig(**{**vars(SIX), "max_position_embeddings": 32})
    with pytest.raises(ValueError, match="max_model_len is 64.*draft_model.*at most 32"):
        build_runner(six(0), config, shorter)


def test_the_simulator_has_no_tokens_to_guess():
    with pytest.raises(ValueError, match="speculative is 'ngram'"):
        simulate([], config=EngineConfig(**NGRAM))


# ---- what users call -------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"speculative": "ngram"}, DRAFT | {"draft_model": "tiny"}])
def test_llm_with_drafts_says_what_it_says_without(how):
    prompts = ["Once upon a time", "One day"]
    params = [greedy(24), SamplingParams(seed=3, max_tokens=24, logprobs=1, n=2)]
    knobs = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "block_size": 4}
    plain, drafted = LLM("tiny", **knobs), LLM("tiny", **knobs, **how)
    for a, b in zip(
        plain.generate(prompts, params, False),
        drafted.generate(prompts, params, False),
        strict=True,
    ):
        assert (a.text, a.token_ids) == (b.text, b.token_ids)
    deltas = [out.delta for out in drafted.stream(prompts[0], params[0])]
    assert "".join(deltas) == plain.generate(prompts[0], params[0], False)[0].text
    assert drafted.engine.stats.num_accepted_tokens > 0


def test_what_is_wrong_is_saved_before_the_exit(tmp_path, monkeypatch, capsys):
    file = tmp_path / "s.json"
    gains = [Gain("ordinary", 5.0, 9.0, 2.0, 8, 0.5, same) for same in (1.0, 0.25)]
    monkeypatch.setattr("nanobatch.bench.speculative.measure", lambda *args: gains)
    with pytest.raises(SystemExit, match="greedy tokens are others"):
        bench.main(["speculative", "--max-tokens", "2", "--save-json", str(file)])
    assert [g["same"] for g in json.loads(file.read_text())["gains"]] == [1.0, 0.25]
    assert "25%" in capsys.readouterr().out
    bench.main(["speculative", "--max-tokens", "2", "--dtype", "bfloat16"])  # it rounds


def test_bench_says_what_drafts_gain(tmp_path, capsys):
    file = tmp_path / "s.json"
    flags = ["speculative", "ngram", "--max-tokens", "24", "--repeat", "1", "--threads", "1"]
    bench.main([*flags, "--save-json", str(file)])
    gains = json.loads(file.read_text())["gains"]
    assert [g["prompt"] for g in gains] == ["repetitive", "ordinary"]
    assert all(g["same"] == 1 and g["speed"] > 0 for g in gains)
    assert "tokens a step" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["speculative", "draft"])
    assert "--draft-model is None" in capsys.readouterr().err
