"""The engine under anything that may happen to it, against each request alone.

Hypothesis draws a configuration, then calls in any order: requests of every kind are added,
refused and aborted, steps are taken, steps fail before or after they computed, single rows
fail, everything is drained and begun anew. Pools are small, so that requests are preempted, by
recompute or by swap; prompts share prefixes, so that they are found in the cache; every slot
that nobody owns is full of NaN.

The oracle is a dense forward pass that recomputes everything for every token: no cache, no
blocks, no batch. The model is a random Llama of some 8,000 parameters in float32.

What is proved, after every call: invariants 1, 7, 8, 9, 11, 14 and 17; at the end of every
request 10, 12, 13 and 15: its tokens, samples, log-probabilities, text and finish reason.
"""

import functools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_engine import TOKENIZER, Poison, Watch, dense_attend

from nanobatch import EngineConfig, LLMEngine, RequestStatus, SamplingParams
from nanobatch.bench.fuzz import choose, make_noise
from nanobatch.config import ADMISSIONS, BATCHING, POLICIES, PREEMPTIONS
from nanobatch.extensions.async_scheduling import AsyncEngine
from nanobatch.llm import build_runner
from nanobatch.models.config import ModelConfig
from nanobatch.models.loader import make_dummy
from nanobatch.plan import Launched
from nanobatch.sampler import SamplingRow
from nanobatch.simulation.replica import VirtualClock
from nanobatch.utils.arithmetic import cdiv

LONGEST = 40  # tokens of a request
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=258,
    hidden_size=12,
    intermediate_size=16,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    max_position_embeddings=LONGEST,
    eos_token_ids=(257, *range(3, 250, 25)),  # so many that texts end by themselves
)
NOISE_XV = make_noise(MODEL.vocab_size)


@functools.cache
def model():
    return make_dummy(MODEL, torch.float32, seed=3)


@functools.lru_cache(10_000)
def logits_after(token_ids):
    """float32 [1, V], by the dense oracle of test_engine.py."""
    ids_T = torch.tensor(token_ids)
    with torch.inference_mode():
        return model().logits(model()(ids_T, torch.arange(len(ids_T)), dense_attend)[-1:])


class Alone:
    """How a request goes by itself: what its last output must show.

    num_sure: how many of its tokens do not hang on the rounding of logits.
    """

    def __init__(self, request):
        params, prompt = request.params, request.prompt_token_ids
        self.token_ids, self.logprobs, self.num_sure = [], [], 0
        self.finish_reason, is_sure = None, True
        shown = []
        while self.finish_reason is None:
            row = SamplingRow(
                params, prompt, self.token_ids, request.stop_token_ids, request.seed
            )
            logits_1V = logits_after((*prompt, *self.token_ids))
            first, is_tie = choose(logits_1V, row, NOISE_XV)
            is_sure = is_sure and not is_tie
            self.num_sure += is_sure
            self.token_ids.append(first.token_id)
            self.logprobs.append(first.logprobs)
            may_stop = len(self.token_ids) > params.min_tokens
            # Stop strings are single letters here: complete with a token of their own.
            is_stop_string = chr(first.token_id) in params.stop
            if may_stop and (first.token_id in request.stop_token_ids or is_stop_string):
                self.finish_reason = "stop"
            elif len(self.token_ids) == request.max_tokens:
                self.finish_reason = "length"
            has_text = first.token_id not in MODEL.eos_token_ids + params.stop_token_ids
            if has_text and not (may_stop and is_stop_string):
                shown.append(first.token_id)
        self.text = TOKENIZER.decode(shown)


class Faulty:
    """A runner that fails when it is told to, and looks at the plans (invariants 7 to 9).

    A step may fail before it computes or after, or one of its rows that sample.
    """

    def __init__(self, runner):
        self.runner = runner
        self.vocab_size, self.eos_token_ids = runner.vocab_size, runner.eos_token_ids
        self.scheduler = None
        self.fails = None  # in the next step: "before", "after", or the number of a row
        self.failed = []  # requests of rows that failed

    def run(self, plan):
        return self.launch(plan, None).wait()

    def launch(self, plan, previous):
        config, served = self.scheduler.config, [row.request for row in plan.scheduled]
        total = sum(row.num_tokens for row in plan.scheduled)
        assert 0 < total == plan.num_tokens <= config.max_num_batched_tokens, "7"
        assert len(self.scheduler.running) <= config.max_num_seqs, "7"
        assert all(row.num_tokens > 0 for row in plan.scheduled), "8"
        running = [r for r in self.scheduler.running if r.status is RequestStatus.RUNNING]
        assert set(map(id, running)) == set(map(id, served)), "9: somebody is left out"
        fails, self.fails = self.fails, None
        if fails == "before":
            raise RuntimeError("the step failed")
        sampling = [row.request for row in plan.scheduled if row.samples]
        launched = self.runner.launch(plan, previous)
        return Launched(lambda: self.wait(launched, sampling, fails), launched.tokens_S)

    def wait(self, launched, sampling, fails):
        result = launched.wait()
        if fails == "after":
            raise RuntimeError("the step failed")
        if fails is not None and sampling:
            failed = sampling[fails % len(sampling)]
            result.errors[failed.request_id] = "the row failed"
            result.token_ids.pop(failed.request_id, None)
            if not failed.is_finished:
                self.failed.append(failed)
        return result


@st.composite
def configs(draw):
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    slots = draw(st.integers(1, 5))
    chunks = draw(st.booleans())
    budget = draw(st.integers(slots, 20)) if chunks else LONGEST
    largest = cdiv(LONGEST, block_size)
    is_async = draw(st.booleans())
    return EngineConfig(
        async_scheduling=is_async,
        block_size=block_size,
        num_blocks=draw(st.integers(max(2, largest // 3), largest + 2)),
        num_host_blocks=draw(st.integers(1, largest)),
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        batching=draw(st.sampled_from(BATCHING)),
        policy=draw(st.sampled_from(POLICIES)),
        max_wait=draw(st.sampled_from([None, 0.004])),
        admission=draw(st.sampled_from([*ADMISSIONS, "on_demand"])),
        enable_chunked_prefill=chunks,
        enable_prefix_caching=draw(st.booleans()),
        preemption=draw(st.sampled_from(PREEMPTIONS)),
        speculative=None if is_async else draw(st.sampled_from([None, "ngram"])),
        num_speculative_tokens=draw(st.integers(1, 5)),
        prompt_lookup_min=1,
        attention_backend=draw(st.sampled_from(["torch", "auto"])),
        dtype="float32",
        seed=draw(st.integers(0, 3)),
    )


SHARED = [256, *b"abbabaabbaababba"]
prompts = st.builds(
    lambda shared, own: (SHARED[:shared] + own) or [256],
    st.sampled_from([0, 0, 4, 7, 8, 9, 17]),
    st.lists(st.sampled_from(list(b"ab")), max_size=16),
)
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.6, 1.3]),
    top_k=st.sampled_from([0, 0, 7]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    seed=st.sampled_from([None, 0, 1]),
    max_tokens=st.integers(3, 16),
    min_tokens=st.integers(0, 3),
    stop=st.sampled_from([(), (), tuple("aeiounrstlbd")]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(60, 250, 9))]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    n=st.sampled_from([1, 1, 1, 2]),
)


class EngineMachine(RuleBasedStateMachine):
    """One engine, and all that was ever asked of it."""

    @initialize(config=configs())
    def build(self, config):
        runner = build_runner(model(), config)
        poison = Poison(runner)
        self.faulty = Faulty(poison)
        self.clock = VirtualClock()
        make = AsyncEngine if config.async_scheduling else LLMEngine
        self.engine = make(runner.config, self.faulty, tokenizer=TOKENIZER, clock=self.clock)
        poison.scheduler = self.faulty.scheduler = self.engine.scheduler
        self.watch = Watch(self.engine)
        self.live, self.families = {}, {}

    @rule(
        asks=st.lists(
            st.tuples(prompts, some_params, st.integers(0, 2), st.sampled_from([None, ""])),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, asks):
        for ask in asks:
            self.add_one(*ask)

    def add_one(self, prompt, params, priority, salt):
        config = self.engine.config
        room = min(config.max_model_len, config.num_blocks * config.block_size)
        before = self.seen_from_outside()
        try:
            added = self.engine.add_request(prompt, params, priority=priority, cache_salt=salt)
        except ValueError as error:
            assert len(prompt) + 1 > room, f"8: refused though it fits: {error}"
            assert str(len(prompt)) in str(error) and str(room) in str(error)
            assert self.seen_from_outside() == before, "8: a refused request changed something"
            return
        assert len(prompt) + 1 <= room, "8: it can never fit"
        ids = [added] if params.n == 1 else [f"{added}-{i}" for i in range(params.n)]
        self.families[added] = ids
        for request_id in ids:
            self.live[request_id] = self.engine.scheduler.get(request_id)

    @rule(
        wrong=st.sampled_from(
            [
                ([], {}),
                ([258], {}),
                ([-1], {}),
                ("", {}),
                ([97] * LONGEST, {}),
                ([97], {"cache_salt": 5}),
                ([97], {"priority": "high"}),
                ([97], {"params": "greedy"}),
            ]
        )
    )
    def add_what_is_refused(self, wrong):
        prompt, kwargs = wrong
        before = self.seen_from_outside()
        with pytest.raises(ValueError):
            self.engine.add_request(prompt, **kwargs)
        if self.live:
            with pytest.raises(ValueError, match="in use"):
                self.engine.add_request([97], request_id=next(iter(self.live)))
        assert self.seen_from_outside() == before

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.one_step()

    @precondition(lambda self: self.live)
    @rule(when=st.sampled_from(["before", "after"]))
    def a_step_fails(self, when):
        self.faulty.fails = when
        num_steps = (
            1 + self.engine.config.async_scheduling
        )  # launched in one, waited for in two
        try:
            for _ in range(num_steps):
                self.one_step()
        except RuntimeError as error:
            assert str(error) == "the step failed"
        else:
            assert num_steps == 2 and self.faulty.fails is not None, "nobody heard of it"
        self.faulty.fails = None

    @precondition(lambda self: self.live)
    @rule(row=st.integers(0, 4))
    def a_row_fails(self, row):
        self.faulty.fails = row
        for _ in range(1 + self.engine.config.async_scheduling):
            self.one_step()
        self.faulty.fails = None
        for request in self.faulty.failed:
            assert self.watch.last[request.request_id].finish_reason == "error", "15"
            assert request.finish_reason == "error"
        self.faulty.failed.clear()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        one = data.draw(st.sampled_from(sorted(self.families) + sorted(self.live)))
        lives = any(i in self.live for i in self.families.get(one, [one]))
        assert self.engine.abort(one) == lives
        assert not self.engine.abort(one), "11"
        assert not any(self.engine.scheduler.get(i) for i in self.families.get(one, [one])), (
            "11"
        )
        if lives:
            self.one_step()  # shows them

    @rule()
    def abort_nobody(self):
        assert not self.engine.abort("nobody")

    @rule()
    def drain(self):
        # A token a step, all of it thrice, and one more if the last one is in flight.
        for _ in range(3 * LONGEST * len(self.live) + 1):
            if not self.live:
                break
            self.one_step()
        assert not self.live and not self.engine.has_unfinished(), "8: it does not end"
        allocator = self.engine.scheduler.allocator
        assert allocator.num_free_blocks == allocator.num_blocks, "11"
        assert self.engine.step() == []

    def one_step(self):
        self.clock.sleep_until(self.clock.now() + 1e-3)
        for out in self.watch.step():
            if out.finished:
                self.check_end(out, self.live.pop(out.request_id))

    def seen_from_outside(self):
        scheduler = self.engine.scheduler
        return (
            [r.request_id for r in scheduler.waiting],
            [r.request_id for r in scheduler.running],
            scheduler.allocator.num_free_blocks,
        )

    def check_end(self, out, request):
        """The last output against the request alone, as far as that is sure."""
        assert request.block_table == request.host_block_table == [], "11"
        wanted = Alone(request)
        is_cut = out.finish_reason in ("abort", "error")
        num_tokens = min(wanted.num_sure, len(out.token_ids))
        assert out.token_ids[:num_tokens] == wanted.token_ids[:num_tokens], "10, 12, 13"
        assert (out.logprobs is None) == (request.params.logprobs is None)
        if out.logprobs is not None:
            assert len(out.logprobs) == len(out.token_ids)
            for i in range(num_tokens):
                ours, theirs = out.logprobs[i], wanted.logprobs[i]
                common = ours.keys() & theirs.keys()  # of two equal ones either may be shown
                assert out.token_ids[i] in common and len(ours) == len(theirs)
                assert all(abs(ours[t] - theirs[t]) < 1e-4 for t in common), "10"
        is_sure = wanted.num_sure == len(wanted.token_ids)
        if is_cut:
            assert is_sure <= (len(out.token_ids) < len(wanted.token_ids)), "11, 15"
            assert not is_sure or wanted.text.startswith(out.text.rstrip("\ufffd")), "17"
        elif is_sure:
            assert out.token_ids == wanted.token_ids
            assert (out.finish_reason, out.text) == (wanted.finish_reason, wanted.text), "17"
        assert out.metrics.num_output_tokens == len(out.token_ids)

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "engine"):
            return
        scheduler, held = self.engine.scheduler, {}
        for request in scheduler.running + scheduler.waiting:
            for block in request.block_table:
                held[block] = held.get(block, 0) + 1
        allocator = scheduler.allocator
        allocator.check_invariants()
        counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
        assert counts == [held.get(block, 0) for block in range(allocator.num_blocks)], "1"
        assert allocator.num_free_blocks == counts.count(0), "1"
        on_host = [block for r in scheduler.waiting for block in r.host_block_table]
        assert len(set(on_host)) == len(on_host), "1"

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,  # the same examples on every machine; test_soak.py draws new ones
    suppress_health_check=list(HealthCheck),
)
TestEngineAgainstEachRequestAlone = EngineMachine.TestCase
