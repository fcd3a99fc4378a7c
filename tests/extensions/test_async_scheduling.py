"""Asynchronous scheduling: the same outputs as without it, and the host's time hidden.

The device is made up. `Device` computes what it is given in order. Its cache holds tokens; a
token depends on all tokens before it, read from the blocks of the request's table. What a step
has sampled is on the device at once, and on the host only after wait(): until then the host has
placeholders, and the device checks that they are the right ones. The plain engine runs the same
requests on the same model; random traces compare the two to the last field.
"""

import random

import pytest
from test_interrupts import Tracer, raise_keyboard_interrupt

from nanobatch import EngineConfig, LLMEngine, SamplingParams, StepResult
from nanobatch.config import ADMISSIONS, BATCHING, POLICIES
from nanobatch.extensions.async_scheduling import AsyncEngine
from nanobatch.models.tokenizer import ByteTokenizer
from nanobatch.utils.clock import VirtualClock

LETTERS = b"abcdefgh"
NAN = "the model's logits are NaN"
BLOCK_SIZE = 4


def numbers(*key):
    """One in [0, 1) for each letter. Python hashes tuples of ints alike everywhere."""
    seed = hash(key)
    return [
        (seed * factor >> 20) % 4096 / 4096
        for factor in (3, 7, 31, 127, 709, 5381, 52711, 648391)
    ]


def choose(prefix, request, nan_share):
    """The next token after these tokens and its log-probabilities, or None: NaN. Penalties need
    the request's own tokens, on the host."""
    params, output = request.params, request.output_token_ids
    scores = numbers(prefix)
    if hash((prefix, 1)) % 1000 < 1000 * nan_share:
        return None
    best = LETTERS[scores.index(max(scores))]
    logprobs = {best: max(scores)}
    if params.presence_penalty:
        assert min([0, *output]) == 0, "a penalty is taken by a placeholder"
        scores = [
            s - params.presence_penalty * (t in output)
            for s, t in zip(scores, LETTERS, strict=True)
        ]
    if params.temperature > 0:
        noise = numbers(request.seed, len(output))
        scores = [s + x for s, x in zip(scores, noise, strict=True)]
    held_back = request.stop_token_ids if len(output) < params.min_tokens else ()
    score, token = max(
        (s, t) for s, t in zip(scores, LETTERS, strict=True) if t not in held_back
    )
    return token, logprobs | {token: score}


class FailureError(Exception):
    pass


class Device:
    """A runner whose results come to the host when they are waited for, and no earlier.

    host, device: seconds that a launch takes on either; they pass on the clock.
    """

    vocab_size, eos_token_ids = 258, (LETTERS[-1],)

    def __init__(self, nan_share=0.0, clock=None, host=0.0, device=0.0):
        self.cache, self.host_cache = {}, {}  # block -> {offset: token}
        self.nan_share, self.clock = nan_share, clock or VirtualClock()
        self.seconds, self.free_at = (host, device), 0.0
        self.fails = None  # "launch" or "wait": the next one raises
        self.launched = []  # steps that were not waited for
        self.num_overlapped = self.num_steps = 0

    def run(self, plan):
        return self.launch(plan, None).wait()

    def launch(self, plan, previous):
        assert len(self.launched) <= 1, "more than one step is ahead"
        assert previous is None or previous in self.launched, "it was waited for"
        self.may_fail("launch")
        host, device = self.seconds
        self.clock.sleep_until(self.clock.now() + host)
        self.free_at = max(self.free_at, self.clock.now()) + device
        step = Step(self, self.free_at)
        for source, target in plan.swap_out:
            self.host_cache[target] = dict(self.cache[source])
        for source, target in plan.swap_in:
            self.cache[target] = dict(self.host_cache[source])
        # As in a kernel, all rows write before any reads.
        sampling = [e.request for e in plan.scheduled if e.samples]
        prefixes = [self._write(entry, previous) for entry in plan.scheduled]
        prefixes = [self._read(*prefix) for prefix in prefixes]
        for entry, prefix in zip(plan.scheduled, prefixes, strict=True):
            if entry.samples:
                step.sampled.append(choose(prefix, entry.request, self.nan_share))
        step.ids = [request.request_id for request in sampling]
        self.launched.append(step)
        self.num_steps += 1
        return step

    def may_fail(self, where):
        if self.fails == where:
            self.fails = None
            raise FailureError

    def _write(self, entry, previous):
        request, start = entry.request, entry.request.num_computed_tokens
        end = start + entry.num_tokens
        for i, token in enumerate(request.token_ids[start:end], start):
            if token < 0:
                assert i == len(request.token_ids) - 1, "a placeholder is not the last token"
                sampled = previous.sampled[-1 - token]
                assert previous.ids[-1 - token] == request.request_id, "another's token"
                token = LETTERS[0] if sampled is None else sampled[0]
            elif i >= len(request.prompt_token_ids):
                assert token in LETTERS
            self.cache.setdefault(request.block_table[i // BLOCK_SIZE], {})[i % BLOCK_SIZE] = (
                token
            )
        return request.block_table, end

    def _read(self, block_table, end):
        places = ((block_table[i // BLOCK_SIZE], i % BLOCK_SIZE) for i in range(end))
        return tuple(self.cache[block][offset] for block, offset in places)


class Step:
    """What a launch gives. `sampled` and `ids` are the device's."""

    def __init__(self, device, done_at):
        self.device, self.done_at = device, done_at
        self.sampled, self.ids = [], []

    def wait(self):
        launched = self.device.launched
        assert self is launched[0], "it is waited for twice, or out of order"
        self.device.num_overlapped += len(launched) > 1
        launched.remove(self)
        try:
            self.device.may_fail("wait")
        except FailureError:
            launched.clear()  # what depends on it is worth nothing
            raise
        self.device.clock.sleep_until(self.done_at)
        result = StepResult({}, {}, {})
        for request_id, sampled in zip(self.ids, self.sampled, strict=True):
            if sampled is None:
                result.errors[request_id] = NAN
            else:
                result.token_ids[request_id] = [sampled[0]]
                result.logprobs[request_id] = [sampled[1]]
        return result


# ---- random traces ---------------------------------------------------------------------


def draw_config(rng):
    slots = rng.randint(2, 5)
    chunked = rng.random() < 0.7
    swap = rng.random() < 0.5
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=rng.choice([8, 8, 9, 40]),
        num_host_blocks=rng.randint(1, 12),
        max_num_seqs=slots,
        max_num_batched_tokens=rng.randint(slots, 16) if chunked else 32,
        max_model_len=32,
        batching=rng.choice([*BATCHING, "continuous", "continuous"]),
        policy=rng.choice(POLICIES),
        admission=rng.choice([*ADMISSIONS, "on_demand", "on_demand"]),
        max_wait=rng.choice([None, 0.01]),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.7,
        preemption="swap" if swap else "recompute",
        seed=rng.randrange(9),
    )


def draw_ask(rng, penalties):
    prompt = [*b"abababab"][: rng.choice([0, 0, 4, 5, 8])] + rng.choices(
        LETTERS, k=rng.randint(1, 9)
    )
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.choice([None, 1]),
        max_tokens=rng.choice([1, 2, rng.randint(3, 22), 22]),
        min_tokens=rng.choice([0, 0, 1]),
        stop=rng.choice([(), (), (), ("ab", "ca"), ("d",)]),
        stop_token_ids=rng.choice([(), (), (), (LETTERS[2],)]),
        ignore_eos=rng.random() < 0.8,
        logprobs=rng.choice([None, 0]),
        presence_penalty=rng.choice([0.0, 1.0]) if penalties else 0.0,
        n=rng.choice([1, 1, 1, 2]),
    )
    return prompt, params, rng.randrange(3)


def shown(out):
    metrics = out.metrics
    assert metrics.num_output_tokens == len(out.token_ids) and min([0, *out.token_ids]) == 0
    return out.text, out.token_ids, out.logprobs, out.finish_reason, out.error


def serve(make, config, asks, nan_share=0.0, failures={}):  # noqa: B006
    """{request id: what its last output shows} of one engine, and the engine.

    asks: (step, prompt, params, priority, cut): a request comes before this step, and is
        aborted when it has shown `cut` tokens (0: at once; None: never).
    failures: by step, what fails in it or in the next: a launch, or the step itself.
    """
    runner, clock = Device(nan_share), VirtualClock()
    engine = make(config, runner, tokenizer=ByteTokenizer(), clock=clock)
    last, texts, cuts, coming = {}, {}, {}, list(enumerate(asks))
    for step in range(2000):
        while coming and coming[0][1][0] <= step:
            name, (_, prompt, params, priority, cut) = coming.pop(0)
            engine.add_request(prompt, params, request_id=str(name), priority=priority)
            names = [str(name)] if params.n == 1 else [f"{name}-{i}" for i in range(params.n)]
            cuts |= dict.fromkeys(names, cut)
            if cut == 0:
                assert engine.abort(str(name))
        if not coming and not engine.has_unfinished():
            break
        clock.sleep_until(clock.now() + 1e-3)
        runner.fails = failures.get(step, runner.fails)
        try:
            outs = engine.step()
        except FailureError:
            outs = []
        for out in outs:
            name = out.request_id
            assert name not in last, "an output after the last one"
            texts[name] = texts.get(name, "") + out.delta
            assert out.text == texts[name]
            if out.finished:
                last[name] = shown(out)
            elif len(out.token_ids) == cuts[name]:
                assert engine.abort(name) and not engine.abort(name)
        engine.scheduler.allocator.check_invariants()
    assert not coming and not engine.has_unfinished(), "it does not end"
    pool = engine.scheduler.allocator
    assert pool.num_free_blocks == pool.num_blocks
    return last, engine


def compare_one_trace(seed):
    rng = random.Random(seed)
    config, nan_share = draw_config(rng), rng.choice([0.0, 0.0, 0.05])
    penalties = rng.random() < 0.3
    times = sorted(rng.choice([0, 0, rng.randrange(30)]) for _ in range(rng.randint(2, 9)))
    failures = {
        rng.randrange(40): rng.choice(["launch", "wait"]) for _ in range(rng.randrange(3))
    }
    asks = [(t, *draw_ask(rng, penalties), rng.choice([None] * 4 + [0, 1, 4])) for t in times]
    plain, plain_engine = serve(LLMEngine, config, asks, nan_share)
    ours, engine = serve(AsyncEngine, config, asks, nan_share, failures)
    assert ours == plain, f"seed {seed}: {config}"
    stats, plain_stats = engine.stats, plain_engine.stats
    assert stats.num_output_tokens == plain_stats.num_output_tokens
    assert stats.num_steps == engine.runner.num_steps
    reasons = [out[3] for out in ours.values()]
    seen = {reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")}
    seen["preempted"], seen["swapped"] = stats.num_preemptions, stats.num_swapped_blocks
    seen["steps"], seen["overlapped"] = engine.runner.num_steps, engine.runner.num_overlapped
    ends = [out[1][-1:] for out in ours.values() if out[3] == "stop"]
    seen["stop strings"] = sum(end not in ([LETTERS[-1]], [LETTERS[2]]) for end in ends)
    return seen


def compare_traces(seeds):
    counts = [compare_one_trace(seed) for seed in seeds]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    assert all(total.values()), f"nothing of a kind was tried: {total}"
    assert total["overlapped"] > 0.6 * total["steps"], total


def test_random_traces_say_the_same():
    compare_traces(range(40))


@pytest.mark.slow
def test_a_thousand_random_traces_say_the_same():
    compare_traces(range(40, 1040))


def test_a_step_fails_and_what_was_shown_stays():
    """The runner's exception comes out of step(); the next steps say the same as ever."""
    asks = [(0, list(b"abc"), SamplingParams(temperature=0, max_tokens=9), 0, None)]
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=9)
    wanted, _ = serve(LLMEngine, config, asks)
    for where in ("launch", "wait"):
        runner = Device()
        engine = AsyncEngine(config, runner, tokenizer=ByteTokenizer(), clock=VirtualClock())
        engine.add_request(*asks[0][1:3], request_id="0")
        outs = [engine.step() for _ in range(4)]
        runner.fails = where
        with pytest.raises(FailureError):
            engine.step()
        while engine.has_unfinished():
            outs.append(engine.step())
        outs = [out for step in outs for out in step]
        assert shown(outs[-1]) == wanted["0"]
        assert [len(out.token_ids) for out in outs] == list(range(1, 10)), "none is lost"


# ---- interrupted -----------------------------------------------------------------------


def serve_through_interrupts(tracer=None):
    """What each of some requests says, when a call of advance() is interrupted on its way."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=12
    )
    engine = AsyncEngine(config, Device(), tokenizer=ByteTokenizer(), clock=VirtualClock())
    for i, prompt in enumerate([b"abababab", b"c", b"ababd"]):
        stop = ("ca",) if i == 1 else ()
        params = SamplingParams(max_tokens=5 + 3 * i, seed=i, logprobs=0, stop=stop)
        engine.add_request(list(prompt), params)
    texts, last = dict.fromkeys("012", ""), {}
    while engine.has_unfinished():
        try:
            with engine.guard:
                engine.advance() if tracer is None else tracer.call(engine.advance)
        except KeyboardInterrupt:
            step = engine._in_flight  # of others nobody asks again
            engine.runner.launched = [] if step is None else [step.launched]
        while engine.outputs.ready:
            out = engine.outputs.ready.popleft()
            assert out.request_id not in last
            texts[out.request_id] += out.delta
            assert out.text == texts[out.request_id]
            if out.finished:
                last[out.request_id] = shown(out)
    pool = engine.scheduler.allocator
    pool.check_invariants()
    assert pool.num_free_blocks == pool.num_blocks
    return last


def interrupted_at_lines(every):
    wanted, tracer = serve_through_interrupts(), Tracer()
    assert serve_through_interrupts(tracer) == wanted
    places = sorted(tracer.counts)[::every]
    for i, place in enumerate(places):
        num_times = tracer.counts[place]
        for num_before in {0, num_times // 2, num_times - 1} if every == 1 else {i % num_times}:
            tracing = Tracer(raise_keyboard_interrupt, (*place, num_before))
            assert serve_through_interrupts(tracing) == wanted, (place, num_before)
            assert tracing.at is None, "nobody heard of it"
    return len(places)


def test_interrupted_at_lines():
    assert interrupted_at_lines(every=9) > 35


@pytest.mark.slow
def test_interrupted_at_each_line():
    assert interrupted_at_lines(every=1) > 350


# ---- the host's time -------------------------------------------------------------------


@pytest.mark.parametrize("host, device", [(2, 5), (5, 5), (5, 2)])
def test_the_host_s_time_is_hidden(host, device):
    """A launch takes the host 2 s and the device 5 s: a step takes 5 s, and not 7."""
    num_tokens, seconds = 50, {}
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=90)
    for make in (LLMEngine, AsyncEngine):
        clock = VirtualClock()
        engine = make(config, Device(clock=clock, host=host, device=device), clock=clock)
        for prompt in (b"abc", b"d"):
            engine.add_request(list(prompt), params)
        metrics = []
        while engine.has_unfinished():
            metrics += [out.metrics for out in engine.step() if out.finished]
        seconds[make] = clock.now()
        # A token's time is when the host has it.
        assert {m.finish_time for m in metrics} == {clock.now()}
        first = {m.first_token_time for m in metrics}
        assert first == {host + device if make is LLMEngine else max(2 * host, host + device)}
    assert seconds[LLMEngine] == num_tokens * (host + device)
    assert seconds[AsyncEngine] == num_tokens * max(host, device) + min(host, device)
    assert engine.runner.num_overlapped == num_tokens - 1, "all but the last"


def test_penalties_are_not_overlapped_and_others_are():
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=90)
    plain = SamplingParams(max_tokens=20, ignore_eos=True, min_tokens=20, seed=1)
    penalty = SamplingParams(max_tokens=5, ignore_eos=True, presence_penalty=1.0)
    asks = [(0, [97], plain, 0, None), (0, [98], penalty, 0, None)]
    ours, engine = serve(AsyncEngine, config, asks)
    assert ours == serve(LLMEngine, config, asks)[0]
    assert engine.runner.num_overlapped == 15, "from the step that the penalties' last is in on"
