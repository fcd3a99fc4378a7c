"""The engine: what a request says does not depend on what happens around it.

The oracle is `alone` below: the request by itself, through the bundled model's own weights,
with dense attention that recomputes everything for every token. No cache, no blocks, no
batch. (That this is the model Hugging Face means is checked first, against transformers.)
Then the same requests go through the engine in a crowd, in chunks, with prefix hits, on
pools that are too small, with NaN in every slot that nobody owns: the tokens must be the
same, the log-probabilities too.

Where no model is needed, a runner of a few lines stands in for it and says the text that the
test gives it (`Scripted`).

What is proved: invariants 10 to 15 and 17; faults 2 to 5, 8, 14, 15, 20 to 25, 27, 28,
32, 35 to 38 and 40, and the names that users rely on. No test knows a word that the
bundled model says: it may be trained anew.
"""

import copy
import dataclasses
import functools
import inspect
import math
import pickle
import re
import subprocess
import sys
import tracemalloc
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

import nanobatch
from nanobatch import LLM, EngineConfig, LLMEngine, SamplingParams, StepResult
from nanobatch.llm import build_runner
from nanobatch.models.loader import load
from nanobatch.models.tokenizer import ByteTokenizer, HFTokenizer
from nanobatch.request import RequestStatus
from nanobatch.sampler import SamplingRow, sample
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.device import resolve_dtype

REPOSITORY = Path(__file__).resolve().parent.parent
TOKENIZER = ByteTokenizer()
BOS, EOS = 256, 257
NAN = math.nan
DEVICE = "cpu"  # of the engines; test_gpu.py runs many of these tests with "cuda"


# ---- the oracle ------------------------------------------------------------------------


@functools.cache
def tiny(device="cpu"):
    """The bundled model in float32; shared, so nobody may change it."""
    return load("tiny", torch.float32, device).model


def dense_attend(layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, sliding_window=None):
    """Each token over all tokens up to itself, written out."""

    def rotate(x_TXD):
        cos_T1D, sin_T1D = (torch.cat([a, a], dim=-1)[:, None] for a in (cos_TR, sin_TR))
        first, second = x_TXD.chunk(2, dim=-1)
        return x_TXD * cos_T1D + torch.cat([-second, first], dim=-1) * sin_T1D

    group_size = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group_size, dim=1) for x in (rotate(k_TKD), v_TKD))
    scores_HTT = torch.einsum("thd,shd->hts", rotate(q_THD), k_THD) * q_THD.shape[-1] ** -0.5
    is_future_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(diagonal=1)
    weights_HTT = scores_HTT.masked_fill(is_future_TT, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights_HTT, v_THD)


@torch.inference_mode()
def dense_logits(token_ids):
    """float32 [T, V]: the next token's logits after each of the tokens."""
    ids_T = torch.tensor(token_ids)
    return tiny().logits(tiny()(ids_T, torch.arange(len(ids_T)), dense_attend))


@functools.cache
def alone(prompt, params):
    """(token_ids, finish_reason, log-probabilities [n, V]) of a request by itself."""
    output, rows = [], []
    stop = params.stop_token_ids + (() if params.ignore_eos else (EOS,))
    reason = "length"
    while len(output) < params.max_tokens:
        logits_1V = dense_logits([*prompt, *output])[-1:]
        row = SamplingRow(params, prompt, output, stop, params.seed)
        output = [*output, sample(logits_1V, [row])[0].token_id]
        rows.append(logits_1V.log_softmax(dim=-1))
        if output[-1] in stop and len(output) > params.min_tokens:
            reason = "stop"
            break
    return output, reason, torch.cat(rows)


def assert_as_if_alone(out, prompt, params):
    """An output of the engine against the oracle.

    The first difference between greedy outputs counts, unless it is a tie: the two best
    within 1e-3, so that rounding may decide.
    """
    tokens, reason, logprobs_NV = alone(tuple(prompt), params)
    num_same = next(
        (i for i, (a, b) in enumerate(zip(out.token_ids, tokens, strict=False)) if a != b),
        min(len(out.token_ids), len(tokens)),
    )
    is_same = out.token_ids == tokens
    if not is_same and params.temperature == 0 and num_same < len(tokens):
        best, second = logprobs_NV[num_same].topk(2).values.tolist()
        is_same = best - second < 1e-3
    assert is_same, f"{out.request_id}: {out.token_ids} != {tokens}"
    if num_same == len(tokens):
        assert out.finish_reason == reason
        # What ended it is no part of the text.
        assert out.text == TOKENIZER.decode(tokens[:-1] if reason == "stop" else tokens)
    if params.logprobs is None:
        assert out.logprobs is None
        return
    assert len(out.logprobs) == len(out.token_ids)
    for i in range(num_same):
        assert_logprobs(out.logprobs[i], out.token_ids[i], logprobs_NV[i], params.logprobs)


def assert_logprobs(given, token, logprobs_V, k):
    """Fault 37: the k best and the sampled one (of a tie at the k-th, either)."""
    assert token in given
    assert given == pytest.approx({t: float(logprobs_V[t]) for t in given}, abs=1e-3)
    k = min(k, len(logprobs_V))
    assert k <= len(given) <= k + 1
    others = sorted(
        (v for t, v in given.items() if t != token or len(given) == k), reverse=True
    )
    assert others[:k] == pytest.approx(
        logprobs_V.topk(k).values.tolist()[: len(others)], abs=1e-3
    )


def test_the_oracle_is_the_model_that_transformers_loads():
    from transformers import LlamaForCausalLM

    directory = Path(nanobatch.__file__).parent / "tiny_model"
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    random = Random(0)
    ids = [BOS, *(random.randrange(256) for _ in range(99))]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(dense_logits(ids), expected, atol=1e-3, rtol=1e-4)


# ---- engines ---------------------------------------------------------------------------


def tiny_engine(wrap=lambda runner: runner, **knobs):
    """An engine on the bundled model; wrap may put something around its runner."""
    knobs = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8} | knobs
    runner = build_runner(tiny(DEVICE), EngineConfig(dtype="float32", **knobs))
    return LLMEngine(runner.config, wrap(runner), tokenizer=TOKENIZER)


def tiny_llm(**knobs):
    knobs = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8} | knobs
    return LLM("tiny", dtype="float32", device=DEVICE, **knobs)


class Watch:
    """Collects what an engine puts out, and checks what holds for every output."""

    def __init__(self, engine):
        self.engine = engine
        self.deltas = {}
        self.tokens = {}
        self.last = {}

    def step(self):
        outs = self.engine.step()
        for out in outs:
            assert out.request_id not in self.last, "an output after the last one"
            text = self.deltas.get(out.request_id, "") + out.delta
            assert out.text == text, "the deltas are not the text"
            before = self.tokens.get(out.request_id, [])
            assert out.token_ids[: len(before)] == before, "a token was taken back"
            assert out.finished == (out.finish_reason is not None)
            self.deltas[out.request_id], self.tokens[out.request_id] = text, out.token_ids
            if out.finished:
                self.last[out.request_id] = out
                del self.deltas[out.request_id], self.tokens[out.request_id]
        self.engine.scheduler.allocator.check_invariants()
        return outs

    def run(self, max_steps=2000):
        """Until nothing is left; {request_id: last output}."""
        while self.engine.has_unfinished():
            assert max_steps > 0, "it does not end"
            max_steps -= 1
            self.step()
        assert_all_blocks_free(self.engine)
        return self.last


def assert_all_blocks_free(engine):
    allocator = engine.scheduler.allocator
    allocator.check_invariants()
    assert allocator.num_free_blocks == allocator.num_blocks
    assert not engine.has_unfinished()


def run_one(engine, prompt, params, **kwargs):
    request_id = engine.add_request(list(prompt), params, **kwargs)
    return Watch(engine).run()[request_id]


def check_crowd(engine, crowd, at_once=3):
    """Requests arrive a few in each step; each must say what it says alone."""
    watch, waiting, ids = Watch(engine), list(crowd), []
    while waiting:
        for prompt, params in waiting[:at_once]:
            ids.append(engine.add_request(list(prompt), params))
        waiting = waiting[at_once:]
        watch.step()
    last = watch.run()
    for request_id, (prompt, params) in zip(ids, crowd, strict=True):
        assert_as_if_alone(last[request_id], prompt, params)
    return [last[request_id] for request_id in ids]


def greedy(max_tokens=10, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def prompt_of(length, seed=0):
    """Ordinary letters, so that the model has something to go on."""
    random = Random(seed)
    return (BOS, *random.choices(b"etaoin shrdlu", k=length - 1))[:length]


SHARED = prompt_of(17, seed=99)
CROWD = [
    (prompt_of(16), greedy(logprobs=300)),  # the whole vocabulary: all logits (fault 24)
    (SHARED + prompt_of(14), greedy(12)),
    (SHARED + prompt_of(15), SamplingParams(seed=1, max_tokens=12, logprobs=2)),
    (SHARED + prompt_of(16), SamplingParams(seed=2, top_p=0.8, top_k=20, max_tokens=9)),
    (tuple(TOKENIZER.encode("Once upon a time")), SamplingParams(temperature=0, max_tokens=14)),
    (
        prompt_of(9),
        greedy(14, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4),
    ),
    (
        SHARED + prompt_of(3),
        SamplingParams(
            seed=3,
            temperature=1.5,
            min_p=0.05,
            frequency_penalty=1.0,
            logprobs=0,
            max_tokens=12,
        ),
    ),
    (prompt_of(5), greedy(12, stop_token_ids=list(b"aeiou "), min_tokens=4)),
    ((104,), greedy(8, logprobs=1)),
    (SHARED, SamplingParams(seed=4, max_tokens=11, ignore_eos=True)),
]


# ---- what happens around a request changes nothing -------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "chunk, block_size", [(1, 4), (2, 4), (3, 4), (5, 4), (64, 4), (5, 1), (64, 16)]
)
def test_a_crowd_in_chunks(chunk, block_size, caching):
    """Invariants 12 and 13, faults 24, 25, 32, 37: twice, the second time with hits."""
    engine = tiny_engine(
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 8),
        block_size=block_size,
        num_blocks=640 // block_size,
        enable_prefix_caching=caching,
    )
    check_crowd(engine, CROWD)
    again = check_crowd(engine, CROWD)
    num_cached = [out.metrics.num_cached_tokens for out in again]
    full_blocks = [(len(prompt) - 1) // block_size * block_size for prompt, _ in CROWD]
    assert num_cached == (full_blocks if caching else [0] * len(CROWD))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 15])
def test_a_crowd_on_a_small_pool(num_blocks, caching):
    """Invariant 10, faults 15, 36, 37: preempted and computed anew, and nobody notices."""
    engine = tiny_engine(
        num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=16
    )
    check_crowd(engine, CROWD)
    check_crowd(engine, CROWD[::-1])
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13])
def test_preempted_at_each_length(length, caching):
    """Fault 15: around the ends of blocks, where tables grow."""
    params = [greedy(9), SamplingParams(seed=5, max_tokens=9, logprobs=1, ignore_eos=True)]
    crowd = [(prompt_of(length, seed), params[seed % 2]) for seed in range(4)]
    num_blocks = 2 * cdiv(length + 8, 4) - 1  # two may enter, but not both stay to the end
    engine = tiny_engine(num_blocks=num_blocks, enable_prefix_caching=caching)
    outs = check_crowd(engine, crowd, at_once=4)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_preemptions == sum(out.metrics.num_preemptions for out in outs)


def test_a_pool_that_holds_one():
    """Fault 14: four requests, each as large as the pool, in a bounded number of steps."""
    engine = tiny_engine(num_blocks=5)
    check_crowd(engine, [(prompt_of(11, seed), greedy(9)) for seed in range(4)], at_once=4)
    assert engine.stats.num_steps <= 4 * (9 + 2)


def test_one_after_another_leaves_nothing_behind():
    """Fault 8."""
    engine = tiny_engine(num_blocks=5)
    for seed in range(6):
        run_one(engine, prompt_of(11, seed), greedy(9))


@pytest.mark.parametrize("length", [7, 8, 9, 11, 12, 13])
def test_each_length_twice(length):
    """Fault 4: the second run finds what is full and computes at least one token."""
    engine = tiny_engine()
    prompt, params = prompt_of(length), greedy(6, logprobs=3)
    for num_cached in (0, (length - 1) // 4 * 4):
        out = run_one(engine, prompt, params)
        assert_as_if_alone(out, prompt, params)
        assert out.metrics.num_cached_tokens == num_cached


def test_the_same_prompt_in_the_same_step():
    """Fault 3: neither reads blocks that the other has not computed yet."""
    for knobs in ({}, {"max_num_batched_tokens": 8}):
        check_crowd(tiny_engine(**knobs), [(prompt_of(21), greedy())] * 4, at_once=4)


@pytest.mark.parametrize("num_steps, num_cached", [(0, 0), (1, 4), (2, 12), (3, 16)])
def test_aborted_and_submitted_again(num_steps, num_cached):
    """Fault 3: what the first one did not compute to the end of a block is not found."""
    engine = tiny_engine(max_num_batched_tokens=6, max_num_seqs=6)
    engine.add_request(list(prompt_of(21)), greedy(), request_id="a")
    for _ in range(num_steps):
        engine.step()
    assert engine.abort("a")
    out = run_one(engine, prompt_of(21), greedy(), request_id="b")
    assert_as_if_alone(out, prompt_of(21), greedy())
    assert out.metrics.num_cached_tokens == num_cached


def test_equal_blocks_after_different_prefixes():
    """Fault 5: [a b | c d] and [x y | c d]."""
    first, other, second = prompt_of(4, 1), prompt_of(4, 2), prompt_of(8, 3)
    engine = tiny_engine()
    for prompt in (first + second, other + second, first + second):
        assert_as_if_alone(run_one(engine, prompt, greedy()), prompt, greedy())


def test_evicted_blocks_are_not_found():
    """Fault 2: A, then B in A's blocks, then A again."""
    engine = tiny_engine(num_blocks=8)
    for seed in (0, 1, 0, 1):
        prompt = prompt_of(21, seed)
        out = run_one(engine, prompt, greedy(8))
        assert_as_if_alone(out, prompt, greedy(8))
        assert out.metrics.num_cached_tokens < 20


def test_a_hit_in_chunks_beside_misses():
    """Fault 25."""
    engine = tiny_engine(max_num_batched_tokens=8)
    run_one(engine, SHARED, greedy(2))
    crowd = [(prompt_of(30, 1), greedy()), (SHARED + prompt_of(25, 2), greedy(logprobs=2))]
    outs = check_crowd(engine, [*crowd, (prompt_of(19, 3), greedy())])
    assert [out.metrics.num_cached_tokens for out in outs] == [0, 16, 0]


def test_salts_keep_prefixes_apart():
    engine = tiny_engine()
    for salt in (None, "a", "b", ""):
        for num_cached in (0, 16):
            out = run_one(engine, SHARED, greedy(2), cache_salt=salt)
            assert out.metrics.num_cached_tokens == num_cached


# ---- what lies in memory ---------------------------------------------------------------


class Poison:
    """Before each step, NaN in every slot that holds nothing anybody may still read.

    Spared are the computed tokens of running requests, blocks that were once full (those may
    be found in the prefix cache), and blocks on their way to the host.
    """

    def __init__(self, runner):
        self.runner = runner
        self.vocab_size, self.eos_token_ids = runner.vocab_size, runner.eos_token_ids
        self.scheduler = None
        self.full = set()

    def run(self, plan):
        return self.launch(plan, None).wait()

    def launch(self, plan, previous):
        config = self.runner.config
        is_free_NP = torch.ones(config.num_blocks, config.block_size, dtype=torch.bool)
        for request in self.scheduler.running:
            for i, block in enumerate(request.block_table):
                num_computed = request.num_computed_tokens - i * config.block_size
                is_full = num_computed >= config.block_size
                (self.full.add if is_full else self.full.discard)(block)
                is_free_NP[block, : max(0, num_computed)] = False
        if config.enable_prefix_caching:
            is_free_NP[list(self.full)] = False
        is_free_NP[[device for device, _ in plan.swap_out]] = False  # yet to be copied
        is_free_N1P1 = is_free_NP[:, None, :, None].to(self.runner.device)
        for k_cache_NKPD, v_cache_NKPD in (cache.parts for cache in self.runner.caches):
            k_cache_NKPD.masked_fill_(is_free_N1P1, NAN)
            v_cache_NKPD.masked_fill_(is_free_N1P1, NAN)
        launched = self.runner.launch(plan, previous)
        for row in plan.scheduled:  # full now; it may be preempted before it runs again
            num_full = (row.request.num_computed_tokens + row.num_tokens) // config.block_size
            self.full.update(row.request.block_table[:num_full])
        return launched


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks, chunk", [(64, 64), (15, 8)])
def test_nan_in_every_slot_that_nobody_owns(num_blocks, chunk, caching):
    """Invariant 14, fault 27: free blocks, and the tail of each last block."""
    engine = tiny_engine(
        Poison,
        num_blocks=num_blocks,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    )
    engine.runner.scheduler = engine.scheduler
    check_crowd(engine, CROWD)
    check_crowd(engine, CROWD)


class Shuffled:
    """Every block lies somewhere else than its id says."""

    def __init__(self, runner):
        self.runner = runner
        self.vocab_size, self.eos_token_ids = runner.vocab_size, runner.eos_token_ids
        self.place = list(range(runner.config.num_blocks))
        Random(0).shuffle(self.place)

    def run(self, plan):
        tables = [(row.request, row.request.block_table) for row in plan.scheduled]
        for request, table in tables:
            request.block_table = [self.place[block] for block in table]
        try:
            return self.runner.run(plan)
        finally:
            for request, table in tables:
                request.block_table = table


def test_blocks_in_any_order_and_any_padding(monkeypatch):
    """Fault 28: shuffled blocks; in the padding of block tables, ids of others."""
    from nanobatch import model_runner

    random = Random(1)

    def pack_and_pad(rows, block_size, device="cpu"):
        batch = pack(rows, block_size, device)
        for i, row in enumerate(rows):
            for b in range(len(row.block_table), batch.block_tables_SB.shape[1]):
                batch.block_tables_SB[i, b] = random.randrange(64)
        return batch

    pack = model_runner.pack
    monkeypatch.setattr(model_runner, "pack", pack_and_pad)
    engine = tiny_engine(Shuffled, max_num_batched_tokens=24)
    check_crowd(engine, CROWD)
    check_crowd(engine, CROWD)


def test_a_row_of_nan_ends_that_request_alone():
    """Invariant 15, with its keys left in the cache for others to trip over (14).

    Token 255 is in no text; here its embedding is broken, so that whoever has it in the
    prompt gets logits that are NaN.
    """
    llm = tiny_llm(num_blocks=14, max_num_batched_tokens=12)
    model = llm.engine.runner.model
    embedding = model.embed.weight.clone()
    embedding[255] = NAN
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), False)
    model.embed.weight = torch.nn.Parameter(embedding, False)
    crowd = [(prompt, params) for prompt, params in CROWD if params.logprobs != 300]
    for position in (0, 9, 20):
        broken = list(prompt_of(21))
        broken[position] = 255
        prompts = [broken, *(list(prompt) for prompt, _ in crowd), broken]
        outs = llm.generate(prompts, [greedy(), *(p for _, p in crowd), greedy()], False)
        for out in (outs[0], outs[-1]):
            assert (out.finish_reason, out.token_ids, out.text) == ("error", [], "")
            assert "NaN" in out.error
        for out, (prompt, params) in zip(outs[1:-1], crowd, strict=True):
            assert_as_if_alone(out, prompt, params)
        assert_all_blocks_free(llm.engine)


# ---- a model of a few lines ------------------------------------------------------------


class Scripted:
    """Says a text for each request, byte by byte, and then the end."""

    vocab_size = 258
    eos_token_ids = (EOS,)

    def __init__(self, script, default="abcdefghijklmnopqrstuvwxyz"):
        self.script = {
            request_id: list(text.encode() if isinstance(text, str) else text)
            for request_id, text in script.items()
        }
        self.default = list(default.encode())
        self.errors = {}  # {request_id: after how many tokens}
        self.before = lambda plan: None  # what else happens in the next runs

    def run(self, plan):
        self.before(plan)
        result = StepResult({}, {}, {})
        for row in plan.scheduled:
            request = row.request
            num_output = len(request.output_token_ids)
            if self.errors.get(request.request_id) == num_output:
                result.errors[request.request_id] = "broken"
            elif row.samples:
                tokens = [*self.script.get(request.request_id, self.default), EOS]
                token = tokens[min(num_output, len(tokens) - 1)]
                result.token_ids[request.request_id] = [token]
                result.logprobs[request.request_id] = [{token: -1.0}]
        return result


def scripted(script=(), tokenizer=TOKENIZER, clock=None, **knobs):
    knobs = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    } | knobs
    runner = Scripted(dict(script))
    return LLMEngine(EngineConfig(**knobs), runner, tokenizer=tokenizer, clock=clock)


def say(text, prompt="x", tokenizer=TOKENIZER, **params):
    """The last output of a request to a model that says just this text."""
    engine = scripted({"a": text}, tokenizer)
    engine.add_request(prompt, SamplingParams(**params), request_id="a")
    return Watch(engine).run()["a"]


# ---- how a request ends, and its text --------------------------------------------------


def test_eos_ends_it_and_is_not_in_the_text():
    out = say("hello")
    assert (out.text, out.finish_reason) == ("hello", "stop")
    assert out.token_ids == [*b"hello", EOS]


def test_ignore_eos_goes_on_past_it():
    out = say([*b"one", EOS, *b"two"], ignore_eos=True, max_tokens=7)
    assert (out.text, out.finish_reason) == ("onetwo", "length")


def test_stop_ids_act_under_ignore_eos_too():
    out = say("one.two", ignore_eos=True, stop_token_ids=[ord(".")])
    assert (out.text, out.finish_reason, out.token_ids) == ("one", "stop", [*b"one."])


def test_max_tokens_one_gives_one_token():
    """Fault 23."""
    out = say("hello", max_tokens=1)
    assert (out.token_ids, out.finish_reason) == ([*b"h"], "length")


def test_stop_wins_over_length():
    assert say("abc", max_tokens=4).finish_reason == "stop"
    out = say("abcd", max_tokens=3, stop="bc")
    assert (out.text, out.finish_reason) == ("a", "stop")


def test_stop_strings():
    """Fault 38: the text is cut, token_ids keep the token that completed it."""
    out = say("one END two", stop=["two", "END"])
    assert (out.text, out.finish_reason) == ("one ", "stop")
    assert out.token_ids == [*b"one END"]


def tokenizer_with_added_tokens():
    """The bytes of ASCII, two special tokens and one that is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({chr(i): i for i in range(128)}, []))
    backend.decoder = decoders.Fuse()
    special = [AddedToken(text, special=True) for text in ("<|im_end|>", "</s>")]
    backend.add_tokens([*special, AddedToken("<think>", special=False)])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_stop_string_that_can_never_be_in_the_text():
    """It is refused with the stop id to use, which does stop."""
    tokenizer = tokenizer_with_added_tokens()
    for token in ("<|im_end|>", "</s>"):
        token_id = tokenizer.hf.convert_tokens_to_ids(token)
        for stop in (token, f"ab{token}", ["ab", f"{token}\n"]):
            engine = scripted(tokenizer=tokenizer)
            params = SamplingParams(stop=stop)
            with pytest.raises(ValueError) as refused:
                engine.add_request("x", params)
            assert f"stop_token_ids=[{token_id}]" in str(refused.value)
            assert repr(token) in str(refused.value) and not engine.has_unfinished()
        out = say([*b"ab", token_id, *b"cd"], tokenizer=tokenizer, stop_token_ids=[token_id])
        assert (out.text, out.finish_reason) == ("ab", "stop")


def test_a_stop_string_that_is_an_added_token_with_text():
    tokenizer = tokenizer_with_added_tokens()
    token_id = tokenizer.hf.convert_tokens_to_ids("<think>")
    text = [*b"ab", token_id, *b"cd"]
    out = say(text, tokenizer=tokenizer, stop=["<|im", "<think>"])
    assert (out.text, out.finish_reason) == ("ab", "stop")


def test_an_unfinished_character_at_the_end():
    """Fault 39: shown at the end, once, as the decoder shows it."""
    out = say("aé", max_tokens=2)
    assert out.text == TOKENIZER.decode(out.token_ids) == "a\ufffd"
    out = say([*b"a\xc3"])  # cut by EOS
    assert (out.text, out.finish_reason) == ("a\ufffd", "stop")


def test_a_prompt_that_ends_inside_a_character():
    out = say([*"é".encode()[1:], *b"!"], prompt=[120, *"é".encode()[:1]])
    assert out.text == "é!"


def test_min_tokens_holds_back_stop_strings():
    """Fault 35."""
    assert say("aXbXc", stop="X", min_tokens=1).text == "a"
    assert say("aXbXc", stop="X", min_tokens=2).text == "aXb"
    assert say("aXbXc", stop="X", min_tokens=4).text == "aXbXc"


def test_a_stop_id_within_min_tokens_ends_nothing():
    """The sampler masks stop ids until then; without a sampler they end nothing."""
    out = say([EOS, *b"ab"], min_tokens=2)
    assert (out.text, out.finish_reason) == ("ab", "stop")
    assert out.token_ids == [EOS, *b"ab", EOS]


def test_every_token_counts_towards_min_tokens():
    """An end of text that was ignored is a token like any other."""
    out = say([EOS, *b"aXbXc"], stop="X", min_tokens=2, ignore_eos=True, max_tokens=6)
    assert (out.text, out.finish_reason) == ("a", "stop")


def test_a_stop_string_that_the_model_says():
    """With the real model: whatever it says, ended anywhere within."""
    llm = tiny_llm()
    whole = llm.generate("Once", greedy(24), False)[0].text
    for start, length in ((0, 1), (3, 4), (11, 2), (20, 4)):
        stop = whole[start : start + length]
        shown = ""
        for out in llm.stream("Once", greedy(24, stop=stop)):
            shown += out.delta
            assert stop not in shown
        assert (shown, out.finish_reason) == (whole[: whole.find(stop)], "stop")
        assert_all_blocks_free(llm.engine)


def test_outputs_are_snapshots():
    """A later step does not change what an earlier one gave out."""
    engine = scripted()
    engine.add_request("x", SamplingParams(max_tokens=3, logprobs=0))
    outs = [engine.step()[0] for _ in range(3)]
    assert [out.token_ids for out in outs] == [[97], [97, 98], [97, 98, 99]]
    assert [len(out.logprobs) for out in outs] == [1, 2, 3]


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, dataclasses.replace, lambda o: pickle.loads(pickle.dumps(o))],
)
def test_an_output_is_a_plain_record(again):
    """Whenever it is first read, copied or sent elsewhere: what it was at its step."""
    engine = scripted()
    engine.add_request("x", SamplingParams(max_tokens=4, logprobs=0))
    out = [engine.step()[0] for _ in range(4)][1]
    other = again(out)
    logprobs = [{97: -1}, {98: -1}]
    assert (other.text, other.token_ids, other.logprobs) == ("ab", [97, 98], logprobs)
    assert type(other.token_ids) is list and other == out
    assert "text='ab', delta='b', token_ids=[97, 98]" in repr(again(out))
    assert dataclasses.asdict(out)["logprobs"] == logprobs
    assert not hasattr(out, "txt")


def test_a_step_copies_nothing_of_what_is_there():
    """The memory that a step takes does not grow with the output: 40,000 tokens of 8 bytes, as
    many characters, and as many log-probabilities."""
    num_before = 40_000

    class Long(Scripted):
        def run(self, plan):
            (entry,) = plan.scheduled
            request_id, is_first = entry.request.request_id, not entry.request.output_token_ids
            ids = [97] * (num_before if is_first else 1)
            return StepResult({request_id: ids}, {request_id: [{97: 0.0}] * len(ids)})

    config = EngineConfig(num_blocks=4000, max_num_batched_tokens=50_000)
    engine = LLMEngine(config, Long({}), tokenizer=TOKENIZER)
    engine.add_request("x", SamplingParams(max_tokens=50_000, logprobs=0, stop="b"))
    kept = [engine.step(), engine.step()]
    tracemalloc.start()
    try:
        kept.append(engine.step())
        assert tracemalloc.get_traced_memory()[1] < 40_000
    finally:
        tracemalloc.stop()
    assert [len(out.text) for (out,) in kept] == [num_before + i for i in range(3)]
    assert [len(out.token_ids) for (out,) in kept] == [num_before + i for i in range(3)]


def test_without_a_tokenizer():
    engine = scripted(tokenizer=None)
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.add_request("text")
    with pytest.raises(ValueError, match="stop.*tokenizer"):
        engine.add_request([1], SamplingParams(stop="x"))
    out = run_one(engine, [1, 2], SamplingParams(max_tokens=3))
    assert out.request_id == "0", "a prompt that is refused uses up no id"
    assert (out.text, out.delta, out.token_ids) == ("", "", [97, 98, 99])


@pytest.mark.parametrize("field, value", [("block_size", 8), ("num_blocks", 65)])
def test_a_config_that_does_not_fit_the_runner_s_cache_is_refused(field, value):
    runner = scripted().runner
    runner.config = EngineConfig(block_size=16, num_blocks=64)
    config = dataclasses.replace(runner.config, **{field: value})
    with pytest.raises(ValueError, match=f"config.{field} is {value}; the runner's"):
        LLMEngine(config, runner)


class Clock:
    """Time passes when it is looked at."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1.0
        return self.time


@pytest.mark.parametrize("way", ["length", "stop", "string", "abort", "error"])
def test_however_it_ends_its_times_are_known(way):
    engine = scripted({"a": "ab"}, clock=Clock())
    params = {"length": {"max_tokens": 1}, "string": {"stop": "b"}}.get(way, {})
    engine.add_request("x", SamplingParams(**params), request_id="a")
    engine.runner.errors = {"a": 1} if way == "error" else {}
    outs = engine.step()
    if way == "abort":
        engine.abort("a")
    while not outs[-1].finished:
        outs = engine.step()
    metrics = outs[-1].metrics
    assert outs[-1].finish_reason == {"string": "stop"}.get(way, way)
    assert 0 < metrics.arrival_time < metrics.first_scheduled_time < metrics.first_token_time
    assert metrics.first_token_time <= metrics.finish_time
    assert metrics.num_output_tokens == len(outs[-1].token_ids)


# ---- ids and aborts --------------------------------------------------------------------


def test_a_live_id_is_refused():
    """Fault 21: and it may be used again afterwards, as a new request."""
    engine = scripted({"a": "one"})
    assert engine.add_request("x", request_id="a") == "a"
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("y", request_id="a")
    engine.step()
    with pytest.raises(ValueError, match="'a'"):
        engine.add_request("y", request_id="a")
    first = run_to_end(engine)["a"]
    engine.add_request("y", request_id="a")
    second = run_to_end(engine)["a"]
    assert first.text == second.text == "one"
    assert first.metrics is not second.metrics


def run_to_end(engine):
    last = {}
    while engine.has_unfinished():
        last.update((out.request_id, out) for out in engine.step())
    assert_all_blocks_free(engine)
    return last


def test_ids_are_made_up_where_none_is_given():
    engine = scripted()
    engine.add_request("x", request_id="1")
    ids = [engine.add_request("x") for _ in range(4)]
    assert len({"1", *ids}) == 5


STATES = ["waiting", "in mid-prompt", "decoding", "preempted"]


def engine_with_a(state):
    """An engine in which request "a" is in that state, beside others."""
    engine = scripted(num_blocks=6, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=12)
    if state == "waiting":
        engine.add_request("x" * 9, params, request_id="b")
        engine.add_request("x" * 9, params, request_id="a")
        engine.step()
    elif state == "in mid-prompt":
        engine.add_request("x" * 15, params, request_id="a")
        engine.step()
    elif state == "decoding":
        engine.add_request("x", params, request_id="a")
        engine.add_request("y" * 5, params, request_id="b")
        engine.step()
        engine.step()
    else:
        engine.add_request("y" * 7, params, request_id="b")
        engine.add_request("x" * 7, params, request_id="a")
        while engine.stats.num_preemptions == 0:
            engine.step()
    request = engine.scheduler.get("a")
    in_state = {
        "waiting": request.status is RequestStatus.WAITING and not request.output_token_ids,
        "in mid-prompt": 0 < request.num_computed_tokens < len(request.prompt_token_ids),
        "decoding": len(request.output_token_ids) > 0 and request.block_table != [],
        "preempted": request.status is RequestStatus.WAITING and request.output_token_ids != [],
    }
    assert in_state[state]
    return engine


@pytest.mark.parametrize("state", STATES)
def test_abort_in_each_state(state):
    """Invariant 11, fault 20: shown once, in the next step; the others go on."""
    engine = engine_with_a(state)
    assert engine.abort("a")
    assert not engine.abort("a")
    outs = engine.step()
    [aborted] = [out for out in outs if out.request_id == "a"]
    assert (aborted.finish_reason, aborted.finished) == ("abort", True)
    assert aborted.text == TOKENIZER.decode(aborted.token_ids)
    last = run_to_end(engine)
    assert "a" not in last
    if "b" in last:
        assert last["b"].text == "abcdefghijkl"
    assert engine.step() == []


@pytest.mark.parametrize("state", STATES)
def test_an_aborted_id_may_be_used_at_once(state):
    engine = engine_with_a(state)
    engine.abort("a")
    engine.add_request("z", SamplingParams(max_tokens=2), request_id="a")
    outs = engine.step()
    assert [out.finish_reason for out in outs if out.request_id == "a"][0] == "abort"
    assert run_to_end(engine)["a"].token_ids == [97, 98]


@pytest.mark.parametrize("target, num_ended", [("a", 1), ("x", 3)])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_the_usual_loop_sees_the_abort_of_the_last_request(target, num_ended, num_steps):
    """has_unfinished() is true until step() has shown it, of a group too; then it is not."""
    engine = scripted()
    params = SamplingParams(n=3 if target == "x" else 1, max_tokens=9)
    engine.add_request("abcabc", params, request_id=target)
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(target)
    assert not engine.scheduler.has_unfinished() and engine.has_unfinished()
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
        assert len(outputs) <= num_ended
    assert [out.finish_reason for out in outputs] == ["abort"] * num_ended
    assert engine.step() == []
    assert_all_blocks_free(engine)


def test_what_is_discarded_is_not_shown():
    """Aborted before, running or waiting: nobody is there to see it; others are."""
    engine = scripted(max_num_seqs=2)
    requests = {name: engine.prepare("abc", SamplingParams(), name) for name in "abcd"}
    for family in requests.values():
        engine.submit(family)
    engine.step()
    engine.abort("a"), engine.abort("d")
    engine.discard([r for name in "abc" for r in requests[name]])
    assert engine.has_unfinished(), "d is to be shown"
    assert [out.request_id for out in engine.step()] == ["d"]
    assert not engine.has_unfinished()
    engine.discard(requests["a"])  # and again, which changes nothing
    assert_all_blocks_free(engine)


def test_abort_of_the_finished_and_of_the_unknown():
    engine = scripted()
    engine.add_request("x", SamplingParams(max_tokens=1), request_id="a")
    assert not engine.abort("b")
    engine.step()
    assert not engine.abort("a")
    assert engine.step() == []


@pytest.mark.parametrize("no_id", [[], {}, ["a"], {"a"}, None, 0, 1.0, b"a", True, ("a",), ""])
def test_abort_of_what_is_no_id(no_id):
    engine = scripted()
    engine.add_request("x", SamplingParams(max_tokens=1), request_id="a")
    for abort in (engine.abort, engine.scheduler.abort):
        with pytest.raises(ValueError, match="request_id is .*; it must be a non-empty string"):
            abort(no_id)
    [out] = engine.step()
    assert (out.request_id, out.finish_reason) == ("a", "length")


@pytest.mark.parametrize("reuse", [False, True])
def test_abort_while_the_step_is_computed(reuse):
    """From a signal handler, say. What the model made of it is dropped."""
    engine = scripted()
    for request_id in "abc":
        engine.add_request("x", SamplingParams(max_tokens=3), request_id=request_id)
    engine.step()

    def abort_b(plan):
        engine.runner.before = lambda plan: None
        assert engine.abort("b")
        if reuse:
            engine.add_request("y", SamplingParams(max_tokens=2), request_id="b")

    engine.runner.before = abort_b
    outs = []
    while engine.has_unfinished():
        outs += engine.step()
    ended = [(o.request_id, o.text, o.finish_reason) for o in outs if o.finished]
    expected = [("a", "abc", "length"), ("b", "a", "abort"), ("c", "abc", "length")]
    assert sorted(ended) == sorted(expected + [("b", "ab", "length")] * reuse)
    assert_all_blocks_free(engine)


# ---- n outputs of one prompt -----------------------------------------------------------


def test_n_outputs_are_n_requests_with_seeds_of_their_own():
    prompt = prompt_of(10)
    llm = tiny_llm()
    params = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    together = llm.generate([list(prompt)], SamplingParams(n=3, seed=7, **params), False)
    assert len({tuple(out.token_ids) for out in together}) > 1
    for i, out in enumerate(together):
        assert_as_if_alone(out, prompt, SamplingParams(seed=7 + i, **params))
    assert len({out.request_id.rpartition("-")[0] for out in together}) == 1
    assert [out.request_id.rpartition("-")[2] for out in together] == ["0", "1", "2"]


def test_greedy_n_gives_equal_outputs():
    outs = tiny_llm().generate(["Once", "One"], greedy(8, n=3), False)
    assert len(outs) == 6
    for group in (outs[:3], outs[3:]):
        assert [out.token_ids for out in group] == [group[0].token_ids] * 3


@pytest.mark.parametrize("chunk, seats", [(16, 4), (5, 4), (3, 3), (16, 2), (1, 1)])
def test_siblings_share_the_blocks_of_their_prompt(chunk, seats):
    """The prompt is computed once; only its last, unfilled block is everybody's own."""
    engine = scripted(max_num_batched_tokens=chunk, max_num_seqs=seats, num_blocks=32)
    engine.add_request("x" * 9, SamplingParams(n=4, max_tokens=12), request_id="x")
    children = [engine.scheduler.get(f"x-{i}") for i in range(4)]
    most_shared = 0
    while engine.has_unfinished():
        engine.step()
        running = [c for c in children if c.status is RequestStatus.RUNNING]
        for block in running[0].block_table[:2] if running else []:
            most_shared = max(most_shared, engine.scheduler.allocator.ref_count(block))
    assert [c.num_cached_tokens for c in children] == [0, 8, 8, 8]
    assert most_shared == seats
    assert engine.stats.num_tokens == 10 + 3 * 2 + 4 * 11
    assert_all_blocks_free(engine)


@pytest.mark.parametrize("num_blocks", [6, 8, 11])
def test_siblings_on_a_small_pool(num_blocks):
    """Preempted leaders and siblings: all come to their end, and say what they say alone."""
    engine = tiny_engine(num_blocks=num_blocks, max_num_batched_tokens=8)
    prompts = [prompt_of(10, 1), prompt_of(13, 2)]
    params = {"max_tokens": 9, "ignore_eos": True}
    for i, prompt in enumerate(prompts):
        engine.add_request(
            list(prompt), SamplingParams(n=3, seed=i, **params), request_id=str(i)
        )
    last = Watch(engine).run()
    assert engine.stats.num_preemptions > 0
    for i, prompt in enumerate(prompts):
        for child in range(3):
            seeded = SamplingParams(seed=i + child, **params)
            assert_as_if_alone(last[f"{i}-{child}"], prompt, seeded)


def test_siblings_without_a_prefix_cache():
    engine = tiny_engine(enable_prefix_caching=False)
    engine.add_request(list(prompt_of(10)), greedy(5, n=3), request_id="x")
    last = Watch(engine).run()
    assert [last[f"x-{i}"].metrics.num_cached_tokens for i in range(3)] == [0, 0, 0]
    for out in last.values():
        assert_as_if_alone(out, prompt_of(10), greedy(5))


def test_abort_by_the_parents_id():
    engine = scripted()
    engine.add_request("x", SamplingParams(n=3), request_id="x")
    engine.add_request("y", SamplingParams(max_tokens=5), request_id="y")
    engine.step()
    assert engine.abort("x-1")
    assert engine.abort("x")
    assert not engine.abort("x")
    ended = [out.request_id for out in engine.step() if out.finish_reason == "abort"]
    assert ended == ["x-1", "x-0", "x-2"]
    assert list(run_to_end(engine)) == ["y"]
    assert engine.add_request("x", SamplingParams(n=2, max_tokens=1), request_id="x") == "x"
    assert sorted(run_to_end(engine)) == ["x-0", "x-1"]


@pytest.mark.parametrize(
    "live, new",
    [
        (("x", 2), ("x", 2)),
        (("x", 2), ("x", 3)),
        (("x", 2), ("x", 1)),  # abort("x") must mean one thing
        (("x", 1), ("x", 2)),
        (("x", 2), ("x-1", 1)),
        (("x-1", 1), ("x", 2)),
        (("x", 2), ("x-1", 2)),
        (("x-1", 2), ("x", 2)),
    ],
)
def test_ids_of_parents_and_children_are_refused_while_they_live(live, new):
    """Fault 21, for the id that n outputs were asked for under, and for theirs."""
    engine = scripted()
    (live_id, live_n), (new_id, new_n) = live, new
    engine.add_request("x", SamplingParams(n=live_n, max_tokens=3), request_id=live_id)
    waiting = list(engine.scheduler.waiting)
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("y", SamplingParams(n=new_n), request_id=new_id)
    assert engine.scheduler.waiting == waiting
    run_to_end(engine)
    engine.add_request("y", SamplingParams(n=new_n), request_id=new_id)


# ---- when the model fails --------------------------------------------------------------


def test_an_error_ends_one_request():
    """Invariant 15: what it said so far stays, its blocks come back, the id too."""
    engine = scripted()
    engine.runner.errors = {"b": 2}
    for request_id in "abc":
        engine.add_request("x", SamplingParams(max_tokens=4), request_id=request_id)
    last = run_to_end(engine)
    assert [last[i].text for i in "abc"] == ["abcd", "ab", "abcd"]
    assert (last["b"].finish_reason, last["b"].error) == ("error", "broken")
    engine.runner.errors = {}
    engine.add_request("x", SamplingParams(max_tokens=4), request_id="b")
    assert run_to_end(engine)["b"].text == "abcd"


def test_an_error_in_mid_prompt_is_shown_too():
    """A row that samples nothing may fail as well: whoever waits for it must hear of it."""
    engine = scripted(max_num_batched_tokens=4)
    engine.runner.errors = {"a": 0}
    engine.add_request("x" * 20, request_id="a")
    engine.add_request("y", SamplingParams(max_tokens=3), request_id="b")
    last = run_to_end(engine)
    assert last["b"].text == "abc"
    assert last["a"].finish_reason == "error"


@pytest.mark.parametrize("num_blocks", [64, 12])
@pytest.mark.parametrize("when", [1, 2, 5, 9])
def test_a_runner_that_raises_once_loses_nothing(when, num_blocks):
    """The step is planned again; written twice, a slot holds the same."""

    class FailsOnce:
        def __init__(self, runner):
            self.runner, self.num_runs = runner, 0

        def run(self, plan):
            self.num_runs += 1
            result = self.runner.run(plan)
            if self.num_runs == when:
                raise RuntimeError("out of memory")
            return result

    engine = tiny_engine(FailsOnce, num_blocks=num_blocks, max_num_batched_tokens=16)
    watch = Watch(engine)
    crowd = CROWD[1:6]
    ids = [engine.add_request(list(prompt), params) for prompt, params in crowd]
    with pytest.raises(RuntimeError, match="out of memory"):
        watch.run()
    last = watch.run()
    for request_id, (prompt, params) in zip(ids, crowd, strict=True):
        assert_as_if_alone(last[request_id], prompt, params)


EXTREMES = [
    *(0, -1, 1, True, 2**31, 2**63, 2**64, -(2**64), 10**27, 10**400, 10**5000),
    *(0.5, -0.5, 1e308, -1e308, 1e-320, 5e-324, NAN, math.inf, -math.inf, 1e40, 1e-40),
    *(np.int64(3), np.float32(0.5), np.float64(0.5), Fraction(1, 2), Decimal("0.5")),
    *("1", b"1", None, [], [1], ["x"], {}, (2**64,), ("\ud800",), object()),
]


def extreme_params():
    """What is accepted of one extreme field beside others that put all rules to work."""
    usual = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "max_tokens": 2, "seed": 1}
    usual |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "ignore_eos": True}
    for name in (field.name for field in dataclasses.fields(SamplingParams)):
        for value in EXTREMES:
            try:
                yield SamplingParams(**(usual | {name: value}))
            except ValueError as error:
                assert re.match(f"{name} (is|has) ", str(error)), error


def test_no_value_that_is_accepted_stops_the_others():
    """A field at its ends is refused by name, or its request ends and the others go on."""
    accepted = [p for p in extreme_params() if p.n == 1 and p.max_tokens < 2**31]
    assert len(accepted) > 80
    engine = tiny_engine()
    others = [(prompt_of(5, seed), greedy(40)) for seed in range(2)]
    others.append((prompt_of(9), SamplingParams(seed=5, top_p=0.8, max_tokens=40)))
    ids = [engine.add_request(list(prompt), params) for prompt, params in others]
    extreme = [engine.add_request(list(prompt_of(4)), params) for params in accepted]
    last = Watch(engine).run()
    for request_id, (prompt, params) in zip(ids, others, strict=True):
        assert_as_if_alone(last[request_id], prompt, params)
    for request_id, params in zip(extreme, accepted, strict=True):
        # No float32 is so small: all logits are infinite then.
        reason = "error" if params.repetition_penalty < 1e-38 else "length"
        assert last[request_id].finish_reason == reason, params


# ---- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, params, what",
    [
        ("", {}, "prompt.*empty"),
        ([], {}, "prompt.*empty"),
        ([65, 258], {}, r"258.*\[0, 258\)"),
        ([65, -1], {}, "-1"),
        ([65, 1.5], {}, "1.5"),
        ([65, None], {}, "None"),
        (None, {}, "prompt.*None"),
        (5, {}, "prompt.*5"),
        (b"bytes", {}, "prompt.*bytes"),
        ("x" * 64, {}, "64|65|66"),  # with the first token and one to say, more than 16 * 4
        ("x", "greedy", "params.*greedy"),
        ("x", {"priority": "high"}, "priority.*high"),
        ("x", {"cache_salt": 5}, "cache_salt.*5"),
        ("x", {"arrival_time": NAN}, "arrival_time.*nan"),
        ("x", {"request_id": 5}, "request_id.*5"),
        ("x", {"request_id": ""}, "request_id.*''"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_refused_by_name_while_others_go_on(prompt, params, what):
    """Faults 40, and 12 at the engine's door: nothing was changed."""
    engine = scripted()
    engine.add_request("x", SamplingParams(max_tokens=3), request_id="other")
    engine.step()
    with pytest.raises(ValueError, match=what):
        if isinstance(params, dict):
            engine.add_request(prompt, **params)
        else:
            engine.add_request(prompt, params)
    assert engine.scheduler.waiting == []
    assert run_to_end(engine)["other"].text == "abc"


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1.0},
        {"temperature": NAN},
        {"top_p": 0.0},
        {"top_p": 2.0},
        {"max_tokens": 0},
        {"min_tokens": 65},
        {"n": 0},
        {"stop": ""},
        {"logprobs": -1},
    ],
    ids=str,
)
def test_fields_out_of_their_range(field):
    """Fault 40; every field and type is in test_scheduler.py."""
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingParams(**field)


@pytest.mark.parametrize("bad", ["", [], [300], [65, "b"], "x" * 300])
def test_all_prompts_are_checked_before_the_first_is_queued(bad):
    llm = tiny_llm()
    with pytest.raises(ValueError):
        llm.generate(["fine", [65, 66], bad], greedy(4), False)
    assert_all_blocks_free(llm.engine)
    assert llm.engine.step() == []
    with pytest.raises(ValueError):
        llm.stream(bad)  # at the call, not at the first output
    assert len(llm.generate("fine", greedy(4), False)) == 1


def test_as_many_params_as_prompts():
    llm = tiny_llm()
    with pytest.raises(ValueError, match="params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [greedy()], False)
    with pytest.raises(ValueError, match="params"):
        llm.generate(["a", "b"], ["greedy", "greedy"], False)
    assert not llm.engine.has_unfinished()


def test_llm_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="'blocksize' is no field of EngineConfig.*block_size"):
        LLM("tiny", blocksize=4)
    with pytest.raises(ValueError, match="max_model_len is 5000000"):
        LLM("tiny", max_model_len=5_000_000)
    with pytest.raises(ValueError, match="chat template"):
        tiny_llm().chat([{"role": "user", "content": "hello"}])


def test_it_says_what_auto_came_to(caplog):
    with caplog.at_level("INFO", "nanobatch.llm"):
        llm = LLM("tiny", dtype="auto", device="cpu", num_blocks=4)
    dtype = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    assert repr(llm) == f"LLM('tiny', dtype='{dtype}', device='cpu')"
    assert repr(llm) in caplog.text and "attention_backend=" in caplog.text


def test_keywords_win_over_config():
    llm = LLM("tiny", EngineConfig(block_size=8, num_blocks=9), num_blocks=7, dtype="float32")
    assert (llm.engine.config.block_size, llm.engine.config.num_blocks) == (8, 7)


# ---- generate and stream ---------------------------------------------------------------


def test_results_come_in_the_order_of_the_prompts():
    """Fault 22: short ones finish first, texts and tokens mixed, a params for each."""
    llm = tiny_llm(max_num_seqs=3, max_num_batched_tokens=16)
    for round_number in range(3):
        crowd = CROWD[round_number : round_number + 5]
        outs = llm.generate([list(p) for p, _ in crowd], [q for _, q in crowd], False)
        for out, (prompt, params) in zip(outs, crowd, strict=True):
            assert_as_if_alone(out, prompt, params)
            assert out.metrics.num_prompt_tokens == len(prompt)
    text, tokens = llm.generate(["Once", TOKENIZER.encode("Once")], greedy(6), False)
    assert text.token_ids == tokens.token_ids


def test_one_prompt_or_many():
    llm = tiny_llm()
    ids = TOKENIZER.encode("Once")
    [as_text] = llm.generate("Once", greedy(5), progress=False)
    [as_tokens] = llm.generate(ids, greedy(5), progress=False)
    [in_a_list] = llm.generate(["Once"], [greedy(5)], progress=False)
    assert as_text.token_ids == as_tokens.token_ids == in_a_list.token_ids
    assert llm.generate([], progress=False) == []
    assert llm.generate("Once", progress=False)[0].metrics.num_output_tokens <= 64


def test_streams_and_generate_interleave():
    """Each gets its own outputs, one for each token, and none is lost."""
    llm = tiny_llm(max_num_batched_tokens=12)
    crowd = CROWD[1:4]
    streams = [llm.stream(list(prompt), params) for prompt, params in crowd]
    seen = [[], [], []]
    turns = [0, 1, 0, 0, 1, 2, "generate", 1, 0, 2, 2, 0, "generate"]
    for turn in turns:
        if turn == "generate":
            prompt, params = CROWD[5]
            [out] = llm.generate([list(prompt)], params, False)
            assert_as_if_alone(out, prompt, params)
        else:
            seen[turn].append(next(streams[turn]))
    for outs, stream, (prompt, params) in zip(seen, streams, crowd, strict=True):
        outs += stream
        assert_as_if_alone(outs[-1], prompt, params)
        assert [len(out.token_ids) for out in outs] == list(range(1, len(outs) + 1))
        assert "".join(out.delta for out in outs) == outs[-1].text
    assert_all_blocks_free(llm.engine)


def test_a_stream_of_siblings():
    llm = tiny_llm()
    outs = list(llm.stream("Once", SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)))
    assert len(outs) == 15
    assert sum(out.finished for out in outs) == 3


def test_a_dropped_stream_aborts():
    llm = tiny_llm()
    dropped, never_begun = llm.stream("Once", greedy(50, n=2)), llm.stream("One", greedy(50))
    kept = llm.stream("Then", greedy(5))
    next(dropped), next(kept)
    assert len(llm.engine.scheduler.running) == 3
    dropped.close()
    del never_begun
    assert len(llm.engine.scheduler.running) == 1
    assert [out.finish_reason for out in kept][-1] == "length"
    assert_all_blocks_free(llm.engine)
    last = llm.stream("Once", greedy(50, n=2))
    next(last)
    last.close()
    assert not llm.engine.has_unfinished(), "nobody steps any more"


def test_a_stream_whose_request_is_aborted_ends():
    llm = tiny_llm()
    stream = llm.stream("Once", greedy(50))
    first = next(stream)
    assert llm.engine.abort(first.request_id)
    assert [out.finish_reason for out in stream] == ["abort"]


def test_interrupting_generate_leaves_a_usable_engine():
    llm = tiny_llm(num_blocks=24, max_num_batched_tokens=16)
    runner_run, num_runs = llm.engine.runner.run, 0

    def interrupted(plan):
        nonlocal num_runs
        num_runs += 1
        if num_runs == 4:
            raise KeyboardInterrupt
        return runner_run(plan)

    prompt, params = CROWD[1]
    stream = llm.stream(list(prompt), params)
    outs = [next(stream)]
    llm.engine.runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate([list(p) for p, _ in CROWD], greedy(30), False)
    assert [r.request_id for r in llm.engine.scheduler.running] == [outs[0].request_id]
    assert llm.engine.scheduler.waiting == []
    outs += stream  # whoever else used the engine goes on
    assert_as_if_alone(outs[-1], prompt, params)
    assert "".join(out.delta for out in outs) == outs[-1].text
    prompt, params = CROWD[2]
    assert_as_if_alone(llm.generate([list(prompt)], params, False)[0], prompt, params)
    assert_all_blocks_free(llm.engine)


def test_unseeded_requests_repeat_on_a_fresh_engine():
    """Their streams come from the engine's seed and the order of arrival."""

    def tokens(seed):
        llm = tiny_llm(seed=seed)
        params = {"temperature": 3.0, "max_tokens": 12, "ignore_eos": True}
        outs = llm.generate(["Once", "Once"], SamplingParams(**params), False)
        outs += llm.generate("Once", SamplingParams(n=2, **params), False)
        return [tuple(out.token_ids) for out in outs]

    first, again, other = tokens(0), tokens(0), tokens(1)
    assert first == again
    assert first != other
    assert len(set(first)) == 4  # each arrival has a stream of its own


def test_what_a_seeded_request_samples_is_nobody_elses_business():
    """Seeded requests neither use nor shift the streams of the unseeded."""
    unseeded = SamplingParams(temperature=3.0, max_tokens=8, ignore_eos=True)
    for others in ([], [greedy(3)] * 2):
        llm = tiny_llm()
        outs = llm.generate(["Once", *["One"] * len(others)], [unseeded, *others], False)
        if not others:
            expected = outs[0].token_ids
    assert outs[0].token_ids == expected


# ---- the package -----------------------------------------------------------------------

SECTION_4 = (
    "LLM LLMEngine StepResult EngineConfig SamplingParams Request RequestStatus RequestOutput "
    "RequestMetrics Scheduler SchedulerOutput ScheduledRequest BlockAllocator OutOfBlocks "
    "paged_attention Batch"
)


@pytest.mark.parametrize("name", SECTION_4.split())
def test_public_names(name):
    assert getattr(nanobatch, name).__name__ == name
    assert name in dir(nanobatch) and name in nanobatch.__all__


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        nanobatch.LLMM  # noqa: B018


def test_signatures():
    """Names that users rely on, of the keywords too."""
    names = {
        LLM.generate: "self prompts params progress",
        LLM.stream: "self prompt params",
        LLMEngine: "config runner tokenizer clock policy admission",
        LLMEngine.add_request: (
            "self prompt params request_id arrival_time priority cache_salt"
        ),
        LLMEngine.abort: "self request_id",
        StepResult: "token_ids logprobs errors",
        nanobatch.RequestOutput: (
            "request_id text delta token_ids logprobs finish_reason finished metrics error"
        ),
    }
    for function, expected in names.items():
        assert list(inspect.signature(function).parameters) == expected.split()


def in_a_fresh_process(script):
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=60)


def test_import_is_quick():
    in_a_fresh_process(
        "import sys, time; start = time.perf_counter(); import nanobatch; "
        "took = time.perf_counter() - start; "
        "assert not {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules); "
        "assert took < 2.5, took"
    )


def test_the_engine_needs_no_torch():
    """With a runner of its own it runs, and still none is loaded."""
    in_a_fresh_process(
        "import sys; from nanobatch import Scheduler, LLMEngine, Request, EngineConfig, "
        "SamplingParams, StepResult\n"
        "class Runner:\n"
        "    def run(self, plan):\n"
        "        return StepResult({r.request.request_id: [1] for r in plan.scheduled})\n"
        "engine = LLMEngine(EngineConfig(num_blocks=4), Runner())\n"
        "engine.add_request([1, 2], SamplingParams(max_tokens=2))\n"
        "assert engine.step() and engine.step()[0].token_ids == [1, 1]\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )


def test_llm_loads_neither_transformers_nor_matplotlib():
    """Not even when it is used, as long as the model is the bundled one."""
    in_a_fresh_process(
        "import sys; from nanobatch import LLM, SamplingParams; "
        "LLM('tiny', num_blocks=8).generate('x', SamplingParams(max_tokens=2), False); "
        "assert not {'transformers', 'matplotlib'} & set(sys.modules)"
    )


def test_an_id_taken_between_prepare_and_submit():
    """As when a stream is made now and begun later."""
    engine = scripted()
    family = engine.prepare("x", SamplingParams(n=2), "x")
    engine.add_request("y", SamplingParams(max_tokens=2), request_id="x")
    with pytest.raises(ValueError, match="in use"):
        engine.submit(family)
    assert list(run_to_end(engine)) == ["x"]


def test_chat_refuses_what_is_no_conversation():
    llm = LLM("tiny", dtype="float32")
    for messages in ("hello", [1], None, {"role": "user"}):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(messages)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("request_id", ["", 5, [5]])
def test_request_ids_that_are_no_names(request_id, n):
    engine = scripted()
    with pytest.raises(ValueError, match="request_id"):
        engine.add_request("x", SamplingParams(n=n), request_id=request_id)
    assert not engine.has_unfinished()


def test_arguments_of_the_wrong_type_are_named():
    llm = LLM("tiny", dtype="float32")
    for prompts in (None, 5, {"a": 1}, {1, 2}, (p for p in "ab")):
        with pytest.raises(ValueError, match="prompts"):
            llm.generate(prompts, progress=False)
    for params in (3, {"temperature": 0}, SamplingParams):
        with pytest.raises(ValueError, match="params"):
            llm.generate("x", params, progress=False)
    with pytest.raises(ValueError, match="surrogate"):
        llm.generate("\ud800", progress=False)
    for config in ({"dtype": "float32"}, "float32"):
        with pytest.raises(ValueError, match="config"):
            LLM("tiny", config)
    with pytest.raises(ValueError, match="num_blocks"):
        LLM("tiny", num_blocks=10**12)
    with pytest.raises(FileNotFoundError):
        LLM("")


def test_a_chat_is_one_answer_to_whole_messages():
    llm = LLM("tiny", dtype="float32")
    for message in (
        {},
        {"role": "user"},
        {"role": 5, "content": "a"},
        {"role": "user", "content": 5},
    ):
        with pytest.raises(ValueError, match="messages"):
            llm.chat([message])
    with pytest.raises(ValueError, match="n is 2"):
        llm.chat([{"role": "user", "content": "a"}], SamplingParams(n=2))
