"""Static batching: what closes a batch, and what does not.

A batch is gathered once. It waits for nothing but the budget of a step, so its members do not
depend on the prefix cache; and samples of one prompt join it together.
"""

import itertools
import random

import pytest

from nanobatch import EngineConfig, LLMEngine, SamplingParams, StepResult

MOST = 16  # seats


class MadeUpRunner:
    """The next token hangs on all tokens before it."""

    def run(self, plan):
        rows = [row.request for row in plan.scheduled if row.samples]
        return StepResult({r.request_id: [hash(tuple(r.token_ids)) % 50] for r in rows})


def engine_of(**knobs):
    knobs = {"batching": "static", "num_blocks": 1000, "block_size": 4} | knobs
    knobs = {"max_num_seqs": MOST, "max_num_batched_tokens": 1000} | knobs
    return LLMEngine(EngineConfig(**knobs), MadeUpRunner())


def add(engine, prompt, output, n=1, name=None):
    """Prompts of different tokens share no prefix: (token, how many)."""
    token, length = prompt
    params = SamplingParams(max_tokens=output, ignore_eos=True, n=n)
    engine.add_request([token] * length, params, request_id=name)


def serve(engine):
    """Until all is done: the number of steps, and the outputs by id."""
    num_steps, outputs = 0, {}
    while engine.has_unfinished():
        outputs |= {out.request_id: out.token_ids for out in engine.step()}
        num_steps += 1
        assert num_steps < 5000
    return num_steps, outputs


def step(engine):
    """One step: {id: tokens computed}."""
    plan = engine.begin_step()
    engine.end_step(plan, engine.runner.run(plan))
    return {row.request.request_id: row.num_tokens for row in plan.scheduled}


# ---- samples of one prompt -------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "n, num_before, num_after", [*itertools.product((2, 4, 9), (0, 1), (1, 3))]
)
def test_samples_and_strangers_share_batches(caching, n, num_before, num_after):
    """Batches are full, in order of arrival; each takes as many steps as its longest output."""
    engine = engine_of(enable_prefix_caching=caching, max_num_seqs=4)
    crowd = [(1, 3)] * num_before + [(n, 5)] + [(1, 3)] * num_after
    for token, (size, output) in enumerate(crowd):
        add(engine, (token, 9), output, n=size)
    rows = [output for size, output in crowd for _ in range(size)]
    expected = sum(max(rows[i : i + 4]) for i in range(0, len(rows), 4))
    assert serve(engine)[0] == expected


def random_crowd(rng):
    """(prompt, output, n): prompts of a few tokens, so that many share a prefix."""
    return [
        (
            (rng.randint(0, 3), rng.randint(1, 30)),
            rng.randint(1, 8),
            rng.choice((1, 1, 2, 4, 7)),
        )
        for _ in range(rng.randint(1, 6))
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_prefix_cache_costs_no_steps(seed):
    """Whatever the crowd, the budget and the seats: no step more than without the cache, and
    the same outputs."""
    rng = random.Random(seed)
    crowd, seats = random_crowd(rng), rng.randint(1, 8)
    knobs = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": rng.randint(max(seats, 30), 60),
        "enable_chunked_prefill": rng.random() < 0.5,
        "block_size": rng.randint(1, 8),
    }
    results = {}
    for caching in (True, False):
        engine = engine_of(enable_prefix_caching=caching, **knobs)
        for prompt, output, n in crowd:
            add(engine, prompt, output, n)
        results[caching] = serve(engine)
    assert results[True][1] == results[False][1]
    assert results[True][0] <= results[False][0], (knobs, crowd)


# ---- what closes a batch ---------------------------------------------------------------


def test_a_prompt_that_waits_for_its_budget_is_in_the_batch():
    """Without chunked prefill three prompts of 10 take three steps of 16, and one batch."""
    engine = engine_of(enable_chunked_prefill=False, max_num_batched_tokens=16)
    for name in "abc":
        add(engine, (ord(name), 10), 5, name=name)
    assert step(engine) == {"a": 10}
    add(engine, (1, 2), 1, name="late")  # would fit beside b
    assert step(engine) == {"a": 1, "b": 10}
    assert step(engine) == {"a": 1, "b": 1, "c": 10}
    assert [step(engine) for _ in range(2)] == [{"a": 1, "b": 1, "c": 1}] * 2
    assert [step(engine) for _ in range(2)] == [{"b": 1, "c": 1}, {"c": 1}]
    assert step(engine) == {"late": 2}


def test_a_prompt_as_long_as_the_budget_waits_for_the_batch_to_drain():
    engine = engine_of(enable_chunked_prefill=False, max_num_batched_tokens=16)
    add(engine, (1, 3), 4, name="a")
    add(engine, (2, 16), 2, name="whole")
    add(engine, (3, 3), 2, name="b")
    steps = [step(engine) for _ in range(7)]
    assert steps[:4] == [{"a": 3}] + [{"a": 1}] * 3
    assert steps[4:] == [{"whole": 16}, {"whole": 1, "b": 3}, {"b": 1}]


def test_a_batch_short_of_blocks_is_closed():
    """b would fit once a has ended, but by then the batch is what it is."""
    engine = engine_of(num_blocks=6, admission="reserve", enable_prefix_caching=False)
    add(engine, (1, 4), 2, name="a")  # 2 blocks
    add(engine, (2, 4), 5, name="longer")  # 2 blocks
    add(engine, (3, 9), 2, name="b")  # 3 blocks
    assert [set(step(engine)) for _ in range(5)] == [{"a", "longer"}] * 2 + [{"longer"}] * 3
    assert step(engine) == {"b": 9}


def test_a_finished_row_holds_no_blocks_when_others_join():
    """c needs 2 of 5 blocks, b 3 to its end; a has ended, and only its slot is taken."""
    engine = engine_of(
        num_blocks=5, admission="reserve", max_num_batched_tokens=8, max_num_seqs=4
    )
    add(engine, (1, 4), 1, name="a")
    add(engine, (2, 4), 9, name="b")
    add(engine, (3, 4), 5, name="c")
    assert step(engine) == {"a": 4, "b": 4}
    assert step(engine) == {"b": 1, "c": 4}


def test_a_preempted_row_closes_its_batch():
    """b gives way to a while `more` waits for the budget: both wait for the next batch."""
    engine = engine_of(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=12)
    add(engine, (1, 8), 5, name="a")
    add(engine, (2, 11), 2, name="b")
    add(engine, (3, 1), 2, name="more")
    assert step(engine) == {"a": 8, "b": 4}
    allocator = engine.scheduler.allocator
    kept = allocator.allocate(allocator.num_free_blocks)
    assert step(engine) == {"a": 1}
    assert engine.stats.num_preemptions == 1
    allocator.free(kept)
    assert [step(engine) for _ in range(3)] == [{"a": 1}] * 3
    assert step(engine) == {"b": 11, "more": 1}
