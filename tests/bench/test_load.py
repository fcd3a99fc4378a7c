"""Under load: many requests through one engine, many aborted; nothing is kept of any of them.

Invariants 1 and 11.
"""

import gc
import random
import resource
import weakref

import pytest
import torch

from nanobatch import EngineConfig, LLMEngine, Request, SamplingParams
from nanobatch.llm import build_runner
from nanobatch.models.loader import load

KNOBS = {"num_blocks": 900, "block_size": 4, "max_num_seqs": 128, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def model():
    return load("tiny", torch.float32).model


def make_engine(model, **knobs):
    runner = build_runner(model, EngineConfig(dtype="float32", **(KNOBS | knobs)))
    return LLMEngine(runner.config, runner)


def serve(engine, num_requests, rng, abort_share=0.0):
    """Requests arrive as others end; some are aborted at any moment. How many ended how."""
    ends = {}
    coming = iter(range(num_requests))
    live = set()
    is_over = False
    while not is_over or engine.has_unfinished():
        while not is_over and len(live) < 2 * engine.config.max_num_seqs:
            if next(coming, None) is None:
                is_over = True
                break
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
            params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 3))
            live.add(engine.add_request(prompt, params))
        while live and rng.random() < abort_share:
            engine.abort(rng.choice(sorted(live)))
        for out in engine.step():
            if out.finished:
                live.discard(out.request_id)
                ends[out.finish_reason] = ends.get(out.finish_reason, 0) + 1
    for out in engine.step():  # an abort shows in the step after it
        ends[out.finish_reason] = ends.get(out.finish_reason, 0) + 1
    return ends


def assert_nothing_is_kept(engine):
    scheduler = engine.scheduler
    scheduler.allocator.check_invariants()
    assert scheduler.allocator.num_free_blocks == scheduler.allocator.num_blocks
    assert not scheduler.waiting and not scheduler.running and not scheduler._live
    assert not any(vars(engine.outputs).values())
    host = getattr(scheduler.preemption, "host", None)
    assert host is None or host.num_free_blocks == host.num_blocks


def test_memory_does_not_grow_with_requests_that_have_ended(model, num_requests=10_000):
    engine, rng = make_engine(model), random.Random(0)
    serve(engine, num_requests // 4, rng)
    assert_nothing_is_kept(engine)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    ends = serve(engine, num_requests, rng)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(ends.values()) == num_requests
    assert grown < 10_000, f"{grown} KiB more after {num_requests} requests"
    assert_nothing_is_kept(engine)


def test_no_request_outlives_its_end(model, monkeypatch):
    alive = weakref.WeakSet()
    init = Request.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(Request, "__init__", watched)
    engine = make_engine(model)
    serve(engine, 500, random.Random(1), abort_share=0.3)
    gc.collect()
    assert len(alive) == 0, f"{len(alive)} requests are still held"


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_thousand_aborted_at_random_moments(model, preemption):
    engine = make_engine(
        model, num_blocks=40, max_num_seqs=32, preemption=preemption, num_host_blocks=20
    )
    ends = serve(engine, 3000, random.Random(2), abort_share=0.9)
    assert ends["abort"] >= 1000 and sum(ends.values()) == 3000
    assert_nothing_is_kept(engine)
