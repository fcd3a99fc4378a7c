"""Ctrl-C, exceptions and threads, at any moment: the next call works, and says the right thing.

The oracle is `said`: what a model of one line says, token after token, with no engine. A call
is interrupted at each of its lines: by a real SIGINT, which waits for the end of the step, and
by a KeyboardInterrupt out of nowhere, after which the step is undone. Callbacks raise at each
of their calls. After each, every block is back and nothing is kept of what has ended.
"""

import functools
import itertools
import signal
import sys
import threading
from pathlib import Path

import pytest

import nanobatch
from nanobatch import LLM, EngineConfig, LLMEngine, SamplingParams, StepResult
from nanobatch.models.tokenizer import ByteTokenizer
from nanobatch.policies.ordering import SJF
from nanobatch.utils.clock import WallClock
from nanobatch.utils.interrupts import Guard

PACKAGE = str(Path(nanobatch.__file__).parent)
TOKENIZER = ByteTokenizer()
PROMPTS = [[65] * 9, [66, 67], [65] * 8 + [68, 69], [70]]  # two of them begin alike
MAX_TOKENS = [9, 12, 4, 15]
BLOCK_SIZE = 4
POOL = {
    "num_blocks": 9,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 12,
}


def next_token(token_ids):
    return 97 + sum(i * t for i, t in enumerate(token_ids, start=3)) % 26


def said(prompt, max_tokens):
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class Model:
    """A runner for the model of one line. Its KV cache holds tokens; it says nothing unless all
    that a request has computed is there."""

    vocab_size, eos_token_ids = 258, ()

    def __init__(self):
        self.cache, self.host = {}, {}  # block -> {offset: token}

    def run(self, plan):
        for device, host in plan.swap_out:
            self.host[host] = dict(self.cache[device])
        for host, device in plan.swap_in:
            self.cache[device] = dict(self.host[host])
        sampling = [e.request for e in plan.scheduled if e.samples]
        for entry in plan.scheduled:
            request = entry.request
            num_computed = request.num_computed_tokens
            end = num_computed + entry.num_tokens
            for i, token in enumerate(request.token_ids[:end]):
                block = self.cache.setdefault(request.block_table[i // BLOCK_SIZE], {})
                if i >= num_computed:
                    block[i % BLOCK_SIZE] = token
                assert block.get(i % BLOCK_SIZE) == token, f"{request}: {i} is not cached"
        token_ids = {r.request_id: [next_token(r.token_ids)] for r in sampling}
        return StepResult(token_ids, {name: [{0: 0.0}] for name in token_ids})


def params(n=0, **others):
    return SamplingParams(max_tokens=MAX_TOKENS[n], ignore_eos=True, logprobs=0, **others)


PARAMS = [params(n) for n in range(len(PROMPTS))]


@functools.cache
def loaded():
    return LLM("tiny", dtype="float32", device="cpu", **POOL)


def make_llm():
    llm = loaded()
    llm.engine = LLMEngine(EngineConfig(**POOL), Model(), tokenizer=TOKENIZER)
    llm._inboxes.clear()
    return llm


def assert_right(outs):
    for out, prompt, max_tokens in zip(outs, PROMPTS, MAX_TOKENS, strict=True):
        assert out.token_ids == said(prompt, max_tokens)
        assert out.text == TOKENIZER.decode(out.token_ids)
        assert len(out.logprobs) == max_tokens and out.finish_reason == "length"


def assert_nothing_is_left(engine):
    allocator = engine.scheduler.allocator
    allocator.check_invariants()
    assert allocator.num_free_blocks == allocator.num_blocks
    assert not engine.has_unfinished() and not any(vars(engine.outputs).values())
    assert not engine.scheduler.running and not engine.scheduler.waiting


# ---- at each line of a call ------------------------------------------------------------


def raise_keyboard_interrupt():
    raise KeyboardInterrupt


def send_sigint():
    signal.raise_signal(signal.SIGINT)


class Tracer:
    """Counts the lines of nanobatch that a call runs, and interrupts it at one of them.

    Args:
        interrupt: what to do there.
        at: (file, line, how often it was run before); None: only count.
        left_out: files whose lines do not count.
    """

    def __init__(self, interrupt=None, at=None, left_out=()):
        self.interrupt, self.at, self.left_out = interrupt, at, left_out
        self.counts = {}

    def call(self, function):
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(None)

    def __call__(self, frame, event, arg):
        file = frame.f_code.co_filename
        is_counted = file.startswith(PACKAGE) and not file.endswith(self.left_out)
        return self.line if is_counted else None

    def line(self, frame, event, arg):
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            num_before = self.counts.get(place, 0)
            self.counts[place] = num_before + 1
            if self.at == (*place, num_before):
                self.at = None
                self.interrupt()
        return self.line


def interrupted_at_lines(interrupt, left_out, every):
    """Interrupt a call at its lines, when they are run for the first time, halfway and for the
    last time (with every > 1, at each so-manieth line and one of these times). A stream that
    is open meanwhile loses nothing."""

    def call():
        return llm.generate(PROMPTS, PARAMS, progress=False)

    llm = make_llm()
    tracer = Tracer(left_out=left_out)
    assert_right(tracer.call(call))
    places, num_interrupted = sorted(tracer.counts)[::every], 0
    for i, place in enumerate(places):
        for which in [i % 3] if every > 1 else [0, 1, 2]:
            num_times = tracer.counts[place]
            num_before = (0, num_times // 2, num_times - 1)[which]
            llm = make_llm()
            stream = llm.stream(PROMPTS[3], PARAMS[3])
            outs = [next(stream)]
            tracing = Tracer(interrupt, (*place, num_before), left_out)
            try:
                tracing.call(call)
            except KeyboardInterrupt:
                num_interrupted += 1
            else:  # with the stream it may run a line less often
                assert tracing.at is not None, f"{place}: nobody heard of it"
                continue
            if interrupt is send_sigint:
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, place
            else:  # no signal: it may have come as a guard was left
                signal.signal(signal.SIGINT, signal.default_int_handler)
            outs += stream
            where = f"{place} run {num_before} times"
            assert outs[-1].token_ids == said(PROMPTS[3], MAX_TOKENS[3]), where
            assert "".join(out.delta for out in outs) == outs[-1].text, where
            assert_nothing_is_left(llm.engine)
            assert not llm._inboxes, where
            assert_right(call())
            assert_nothing_is_left(llm.engine)
    return num_interrupted


KINDS = [(send_sigint, ()), (raise_keyboard_interrupt, ("utils/interrupts.py",))]


@pytest.mark.parametrize("interrupt, left_out", KINDS)
def test_interrupted_at_lines_of_a_call(interrupt, left_out):
    assert interrupted_at_lines(interrupt, left_out, every=7) > 40


@pytest.mark.slow
@pytest.mark.parametrize("interrupt, left_out", KINDS)
def test_interrupted_at_each_line_of_a_call(interrupt, left_out):
    assert interrupted_at_lines(interrupt, left_out, every=1) > 800


def test_the_first_ctrl_c_waits_for_the_step_and_the_second_does_not():
    llm = make_llm()
    run = llm.engine.runner.run
    for num_signals in (1, 2):
        ends = []

        def interrupted(plan, num_signals=num_signals, ends=ends):
            if len(ends) == 3:
                for _ in range(num_signals):
                    send_sigint()
            result = run(plan)
            ends.append(plan)
            return result

        llm.engine.runner.run = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, progress=False)
        assert len(ends) == (4 if num_signals == 1 else 3)
        llm.engine.runner.run = run
        assert_nothing_is_left(llm.engine)
        assert_right(llm.generate(PROMPTS, PARAMS, progress=False))


def test_outputs_of_a_step_that_ctrl_c_waited_for_are_shown_later():
    engine = LLMEngine(EngineConfig(**POOL), Model(), tokenizer=TOKENIZER)
    engine.add_request(PROMPTS[0], PARAMS[0], request_id="a")
    engine.runner.run = lambda plan: (send_sigint(), Model.run(engine.runner, plan))[1]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del engine.runner.run
    outs = engine.step()
    assert [len(out.token_ids) for out in outs] == [1, 2]
    assert "".join(out.delta for out in outs) == outs[-1].text


def test_a_guard_leaves_other_handlers_and_threads_alone():
    heard = []
    for handler in (lambda *signal: heard.append(signal), signal.SIG_IGN):
        old = signal.signal(signal.SIGINT, handler)
        try:
            guard = Guard()
            with guard, guard:
                send_sigint()
                assert heard == []
            assert len(heard) == callable(handler)
            assert signal.getsignal(signal.SIGINT) is handler
            with guard, Guard():
                pass
        finally:
            signal.signal(signal.SIGINT, old)
        heard.clear()

    def enter():
        with guard:
            heard.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert heard == [signal.default_int_handler]


# ---- callbacks -------------------------------------------------------------------------


class BoomError(Exception):
    pass


class Raises:
    """A callback that raises at one of its calls."""

    def __init__(self, function, at):
        self.function, self.num_left = function, at

    def __call__(self, *args):
        self.num_left -= 1
        if self.num_left == -1:
            raise BoomError
        return self.function(*args)


def engine_with(callback, at, **knobs):
    """An engine one of whose callbacks raises once, and that callback."""
    policy, clock = SJF(), WallClock()
    engine = LLMEngine(
        EngineConfig(**POOL | {"policy": "sjf"} | knobs),
        Model(),
        tokenizer=TOKENIZER,
        policy=policy,
        clock=clock,
    )
    owner, name = {
        "key": (policy, "key"),
        "observe": (policy, "observe"),
        "predict": (policy, "predict"),
        "has_room": (engine.scheduler.admission, "has_room"),
        "now": (clock, "now"),
        "run": (engine.runner, "run"),
    }[callback]
    raises = Raises(getattr(owner, name), at)
    setattr(owner, name, raises)
    return engine, raises


@pytest.mark.parametrize("callback", ["key", "observe", "predict", "has_room", "now", "run"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_callback_that_raises_undoes_the_step(callback, preemption):
    swap = {"preemption": "swap", "num_host_blocks": 8} if preemption == "swap" else {}
    for at in itertools.count():
        has_raised = False
        engine, raises = engine_with(callback, 10_000, **swap)
        for n, (prompt, param) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(prompt, param, request_id=str(n))
        raises.num_left = at
        deltas, last = dict.fromkeys("0123", ""), {}
        while engine.has_unfinished():
            try:
                outs = engine.step()
            except BoomError:
                has_raised = True
                engine.scheduler.allocator.check_invariants()
                continue
            for out in outs:
                assert out.request_id not in last
                deltas[out.request_id] += out.delta
                assert out.text == deltas[out.request_id]
                if out.finished:
                    last[out.request_id] = out
        assert_right([last[n] for n in "0123"])
        assert_nothing_is_left(engine)
        if not has_raised:
            break
    assert at > 3, "it is called more often"


def test_a_progress_bar_that_raises(monkeypatch):
    llm = make_llm()
    stream = llm.stream(PROMPTS[3], PARAMS[3])
    outs = [next(stream)]
    bar = llm._bar(4, False)
    bar.update = Raises(bar.update, 1)
    monkeypatch.setattr(llm, "_bar", lambda *args: bar)
    with pytest.raises(BoomError):
        llm.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    outs += stream
    assert "".join(out.delta for out in outs) == outs[-1].text
    assert outs[-1].token_ids == said(PROMPTS[3], MAX_TOKENS[3])
    assert_nothing_is_left(llm.engine)


@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_tokenizer_that_raises_ends_that_request_alone(at):
    """Whether it is at its first token, at another or at its last."""

    class Broken(ByteTokenizer):
        def stream(self, prompt_token_ids):
            stream = super().stream(prompt_token_ids)
            if list(prompt_token_ids) == PROMPTS[0]:
                step, count = stream.step, iter(range(100))
                stream.step = lambda token: step(token) if next(count) != at else 1 / 0
            return stream

    engine = LLMEngine(EngineConfig(**POOL), Model(), tokenizer=Broken())
    for n, (prompt, param) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(prompt, param, request_id=str(n))
    last = {}
    while engine.has_unfinished():
        last |= {out.request_id: out for out in engine.step() if out.finished}
    assert last["0"].finish_reason == "error" and "ZeroDivisionError" in last["0"].error
    assert last["0"].token_ids == said(PROMPTS[0], at + 1)
    for n in (1, 2, 3):
        assert last[str(n)].token_ids == said(PROMPTS[n], MAX_TOKENS[n])
        assert last[str(n)].text == TOKENIZER.decode(last[str(n)].token_ids)
    assert_nothing_is_left(engine)


# ---- threads ---------------------------------------------------------------------------


def test_threads_take_turns():
    """Several threads on one LLM, switched as often as can be: each gets its own outputs."""
    llm, wrong = make_llm(), []

    def generate():
        for _ in range(3):
            assert_right(llm.generate(PROMPTS, PARAMS, progress=False))

    def stream():
        for _ in range(4):
            outs = list(llm.stream(PROMPTS[3], PARAMS[3]))
            assert outs[-1].token_ids == said(PROMPTS[3], MAX_TOKENS[3])
            assert "".join(out.delta for out in outs) == outs[-1].text

    def run(function):
        try:
            function()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(f,)) for f in (generate, stream) * 2]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert_nothing_is_left(llm.engine)
