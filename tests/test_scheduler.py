"""The scheduler alone, driven with made-up tokens: one small test for each promise.

What is proved: what is refused at the door and with which words; how a step's tokens are
dealt out (invariants 7, 8 and 9, faults 12 to 18); preemption and its order (faults
16 and 19); abort and ids in every state (invariant 11, faults 20 and 21); when a request
ends (faults 23 and 35); what is found in the prefix cache (faults 3 and 4); the times
in the metrics; and that a field of the wrong type or range never gets in (fault 40).

Random traces are in test_shadow_cache.py; here each trace is short enough to do by hand.
Unless a test says otherwise: blocks of 4 tokens, a budget of 16 tokens, 4 seats.
"""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nanobatch import (
    BlockAllocator,
    EngineConfig,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
)

REPOSITORY = Path(__file__).resolve().parent.parent
TOKEN = 7  # what the made-up model always samples
EOS = 2


def make(num_blocks=16, **knobs):
    """A scheduler and its allocator."""
    knobs = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16} | knobs
    config = EngineConfig(num_blocks=num_blocks, **knobs)
    allocator = BlockAllocator(num_blocks, config.block_size, config.enable_prefix_caching)
    return Scheduler(config, allocator), allocator


def request(request_id, prompt, max_tokens=4, arrival_time=0.0, salt=None, eos=(), **params):
    """A request; prompt is a list of tokens, or how many (nobody else has the same ones)."""
    if isinstance(prompt, int):
        start = 1000 * sum(request_id.encode())
        prompt = range(start, start + prompt)
    return Request(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=max_tokens, **params),
        arrival_time=arrival_time,
        cache_salt=salt,
        eos_token_ids=eos,
    )


def added(scheduler, *args, **kwargs):
    new = request(*args, **kwargs)
    scheduler.add(new)
    return new


def sampled(plan, token=TOKEN):
    """The model's part: one token for each request whose last token is computed."""
    return {
        item.request.request_id: [token]
        for item in plan.scheduled
        if item.request.num_computed_tokens + item.num_tokens == item.request.num_tokens
    }


def step(scheduler, now=0.0, token=TOKEN):
    """One iteration; returns who got how many tokens, in order."""
    plan = scheduler.schedule(now)
    scheduler.update(plan, sampled(plan, token), now)
    return planned(plan)


def planned(plan):
    return {item.request.request_id: item.num_tokens for item in plan.scheduled}


def run_until_idle(scheduler, max_steps=200):
    """Step until nothing is left; returns the plans, none of them empty."""
    plans = []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(0.0)
        assert plan.scheduled, "a step that does nothing while somebody waits"
        scheduler.update(plan, sampled(plan), 0.0)
        plans.append(plan)
        assert len(plans) <= max_steps
    return plans


def ids(requests):
    return [r.request_id for r in requests]


# ---- the door --------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused():
    """Fault 12: 40 tokens, 8 blocks of 4. The error names the limit and both numbers."""
    scheduler, allocator = make(num_blocks=8)
    other = added(scheduler, "other", 3)
    with pytest.raises(ValueError, match=r"(40|41).*32|32.*(40|41)"):
        scheduler.add(request("big", 40))
    assert ids(scheduler.waiting) == ["other"]
    run_until_idle(scheduler)
    assert other.finish_reason == "length"
    scheduler.add(request("big", 5))  # the refused id was never taken


@pytest.mark.parametrize(
    "knobs, limit",
    [({"num_blocks": 8}, 32), ({"max_model_len": 30}, 30), ({"max_model_len": 99}, 64)],
)
def test_prompt_plus_one_token_must_fit(knobs, limit):
    scheduler, _ = make(**knobs)
    fits = added(scheduler, "fits", limit - 1, max_tokens=50)
    with pytest.raises(ValueError, match=str(limit)):
        scheduler.add(request("too-long", limit))
    run_until_idle(scheduler)
    assert len(fits.output_token_ids) == 1
    assert fits.finish_reason == "length"


def test_the_error_says_which_limit():
    scheduler, _ = make(num_blocks=64, max_model_len=20)
    with pytest.raises(ValueError, match="max_model_len"):
        scheduler.add(request("a", 21))


@pytest.mark.parametrize("knobs, limit", [({"num_blocks": 3}, 12), ({"max_model_len": 9}, 9)])
def test_max_tokens_is_cut_to_what_fits(knobs, limit):
    """Invariant 8: prompt + max_tokens fits, and the output then says "length"."""
    scheduler, allocator = make(**knobs)
    a = added(scheduler, "a", 5, max_tokens=1000)
    run_until_idle(scheduler)
    assert a.num_tokens == limit
    assert a.finish_reason == "length"
    assert a.params.max_tokens == 1000  # what the user asked for stays as it was
    assert allocator.num_free_blocks == allocator.num_blocks


def test_without_chunked_prefill_a_prompt_over_the_budget_is_refused():
    """Fault 13: it can never be computed in one step, so it must not wait for it."""
    scheduler, _ = make(enable_chunked_prefill=False)
    with pytest.raises(
        ValueError, match=r"its 17 prompt tokens .* max_num_batched_tokens is 16"
    ):
        scheduler.add(request("long", 17))
    fits = added(scheduler, "fits", 16, max_tokens=9)
    assert step(scheduler) == {"fits": 16}
    run_until_idle(scheduler)
    assert len(fits.output_token_ids) == 9, "the budget limits a step, not a request"
    with pytest.raises(ValueError, match="max_model_len"):
        make(enable_chunked_prefill=False, max_model_len=17)


def test_without_chunked_prefill_a_preempted_request_comes_back():
    """Fault 13: with its output it may be longer than the budget, yet it must go on."""
    scheduler, allocator = make(num_blocks=6, enable_chunked_prefill=False)
    a = added(scheduler, "a", 10, max_tokens=12)
    b = added(scheduler, "b", 6, max_tokens=12)
    run_until_idle(scheduler, max_steps=40)
    assert (a.finish_reason, b.finish_reason) == ("length", "length")
    assert allocator.num_free_blocks == 6


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks, budget", [(6, 8), (7, 13), (7, 8), (8, 10), (9, 16)])
def test_without_chunked_prefill_only_the_first_prefill_is_whole(
    preemption, num_blocks, budget
):
    """Fault 13: what a preemption lost is longer than the budget, and comes back in chunks."""
    scheduler, allocator = make(
        num_blocks, max_num_batched_tokens=budget, enable_chunked_prefill=False,
        enable_prefix_caching=False, preemption=preemption, num_host_blocks=4,
    )  # fmt: skip
    lengths = (budget, 3, budget - 1, 5)
    requests = [added(scheduler, str(i), n, max_tokens=12) for i, n in enumerate(lengths)]
    plans = run_until_idle(scheduler, max_steps=300)
    firsts = {}  # {request: (its prompt, what its first turn computed)}
    prefills = [row for plan in plans for row in plan.scheduled if row.num_tokens > 1]
    for row in prefills:
        prompt = len(row.request.prompt_token_ids)
        firsts.setdefault(row.request.request_id, (prompt, row.num_tokens))
    assert len(firsts) == 4 and all(prompt == n for prompt, n in firsts.values()), firsts
    assert all(r.output_token_ids == [TOKEN] * 12 for r in requests)
    assert sum(len(plan.preempted) for plan in plans) > 0
    assert allocator.num_free_blocks == num_blocks


def test_a_long_recompute_goes_on_beside_others():
    """c has 18 tokens when it comes back to a budget of 12, and a and b decode meanwhile."""
    scheduler, allocator = make(
        num_blocks=16, max_num_batched_tokens=12, enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    for name, length in (("a", 2), ("b", 2), ("c", 10)):
        added(scheduler, name, length, max_tokens=30)
    c = scheduler.get("c")
    for _ in range(9):
        step(scheduler)
    assert c.num_tokens == 18
    kept = allocator.allocate(allocator.num_free_blocks)
    while c in scheduler.running:
        step(scheduler)
    num_lost = c.num_tokens
    allocator.free(kept)
    assert step(scheduler) == {"a": 1, "b": 1, "c": 10}
    assert step(scheduler) == {"a": 1, "b": 1, "c": num_lost - 10}
    assert c.num_tokens == num_lost + 1


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_prompt_as_long_as_the_budget_does_not_starve(policy):
    """Invariants 8 and 9: it can start only when nobody runs, and others keep coming."""
    scheduler, _ = make(
        enable_chunked_prefill=False, max_num_seqs=2, policy=policy, max_wait=20.0
    )  # fmt: skip
    added(scheduler, "first", 3, max_tokens=6)
    step(scheduler, now=0.0)
    whole = added(scheduler, "whole", 16, max_tokens=6, arrival_time=1.0)
    for now in range(1, 40):
        added(scheduler, f"short-{now}", 2, max_tokens=5, arrival_time=float(now))
        assert step(scheduler, now=float(now)), "a step that does nothing"
    longest_that_runs = 6
    assert whole.metrics.first_scheduled_time <= 1.0 + 20.0 + longest_that_runs


def test_an_id_may_not_be_added_twice_while_it_lives():
    """Fault 21: waiting or running; once ended it names a new request."""
    scheduler, _ = make()
    first = added(scheduler, "a", 3, max_tokens=2)
    with pytest.raises(ValueError, match="a"):
        scheduler.add(request("a", 3))
    step(scheduler)
    with pytest.raises(ValueError, match="a"):
        scheduler.add(request("a", 3))
    with pytest.raises(ValueError):
        scheduler.add(first)
    run_until_idle(scheduler)
    second = added(scheduler, "a", 5, max_tokens=1)
    assert step(scheduler) == {"a": 5}
    assert second.output_token_ids == [TOKEN]
    assert first.output_token_ids == [TOKEN, TOKEN]


def test_idle_gives_an_empty_plan():
    scheduler, _ = make()
    plan = scheduler.schedule(0.0)
    assert plan.num_tokens == 0
    assert not plan.scheduled and not plan.preempted and not plan.padding
    assert not plan.swap_in and not plan.swap_out
    assert scheduler.update(plan, {}, 0.0) == []


# ---- dealing out the tokens of a step --------------------------------------------------


def test_prefill_then_one_token_a_step():
    scheduler, _ = make()
    a = added(scheduler, "a", 5, max_tokens=3)
    assert [step(scheduler) for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert a.is_finished and a.output_token_ids == [TOKEN] * 3
    assert a.token_ids == a.prompt_token_ids + [TOKEN] * 3


def test_between_schedule_and_update():
    """num_computed_tokens counts earlier steps; block_table has room for this one."""
    scheduler, allocator = make()
    a = added(scheduler, "a", 9)
    plan = scheduler.schedule(0.0)
    assert (a.num_computed_tokens, len(a.block_table)) == (0, 3)
    assert a.status is RequestStatus.RUNNING and scheduler.running == [a]
    assert plan.num_tokens == 9
    assert allocator.num_free_blocks == 13
    assert scheduler.update(plan, {"a": [TOKEN]}, 0.0) == []
    assert (a.num_computed_tokens, a.num_tokens) == (9, 10)


def test_a_long_prompt_is_computed_in_chunks():
    """The budget cuts a chunk; block ends do not. The token comes with the last chunk."""
    scheduler, _ = make(max_num_batched_tokens=7)
    a = added(scheduler, "a", 17)
    assert [step(scheduler) for _ in range(2)] == [{"a": 7}, {"a": 7}]
    assert a.output_token_ids == []
    assert step(scheduler) == {"a": 3}
    assert a.output_token_ids == [TOKEN]


def test_several_prompts_share_the_budget():
    scheduler, _ = make()
    for name, length in (("a", 10), ("b", 10), ("c", 3)):
        added(scheduler, name, length)
    assert step(scheduler) == {"a": 10, "b": 6}
    assert step(scheduler) == {"a": 1, "b": 4, "c": 3}


def test_without_chunked_prefill_a_prompt_waits_for_the_whole_of_its_budget():
    """And who comes after it does not slip past."""
    scheduler, _ = make(enable_chunked_prefill=False)
    for name, length in (("a", 10), ("b", 10), ("c", 3)):
        added(scheduler, name, length)
    assert step(scheduler) == {"a": 10}
    assert step(scheduler) == {"a": 1, "b": 10, "c": 3}


def test_a_long_prompt_does_not_stop_the_running():
    """Fault 17: each running request has its token in every step."""
    scheduler, _ = make(num_blocks=64)
    added(scheduler, "a", 3, max_tokens=20)
    added(scheduler, "b", 3, max_tokens=20)
    step(scheduler)
    added(scheduler, "long", 100, max_tokens=1)
    steps = [step(scheduler) for _ in range(8)]
    assert steps[:7] == [{"a": 1, "b": 1, "long": 14}] * 7
    assert steps[7] == {"a": 1, "b": 1, "long": 2}


def test_who_comes_first_leaves_a_token_for_the_others():
    """Invariant 9 the other way round: the long one is ahead of the short one in `running`."""
    scheduler, _ = make(num_blocks=64, max_num_batched_tokens=8, max_num_seqs=8)
    added(scheduler, "first", 9, max_tokens=9)
    step(scheduler)  # 8 of 9
    for i in range(7):
        added(scheduler, f"short-{i}", 2, max_tokens=9)
    while scheduler.running or scheduler.waiting:
        before = ids(scheduler.running)
        after = step(scheduler)
        assert set(before) <= set(after)


def test_steady_arrivals_do_not_hold_up_the_running():
    """Fault 18."""
    scheduler, _ = make()
    old = added(scheduler, "old", 3, max_tokens=12)
    for i in range(12):
        added(scheduler, f"new-{i}", 9, max_tokens=5, arrival_time=float(i))
        assert "old" in step(scheduler, now=float(i))
    assert old.is_finished


def test_seats_are_limited():
    """Invariant 7. `running` is in admission order, `waiting` in arrival order."""
    scheduler, _ = make()
    for name in "abcdef":
        added(scheduler, name, 2)
    assert list(step(scheduler)) == ["a", "b", "c", "d"]
    assert ids(scheduler.running) == ["a", "b", "c", "d"]
    assert ids(scheduler.waiting) == ["e", "f"]


def test_first_come_first_served():
    """By arrival time, and by the order of add() when that is the same."""
    scheduler, _ = make(max_num_seqs=1)
    arrivals = (("late", 5.0), ("early", 1.0), ("early-too", 1.0), ("first", 0.5))
    for name, arrival_time in arrivals:
        added(scheduler, name, 2, max_tokens=1, arrival_time=arrival_time)
    order = ["first", "early", "early-too", "late"]
    assert ids(scheduler.waiting) == order
    assert [list(step(scheduler, now=9.0)) for _ in range(4)] == [[name] for name in order]


def test_nobody_slips_past_one_that_does_not_fit():
    """Section 6: whoever is next and does not fit stops admission."""
    scheduler, allocator = make(num_blocks=6)
    added(scheduler, "a", 13, max_tokens=2)
    step(scheduler)  # 4 of 6 blocks
    added(scheduler, "large", 12)
    added(scheduler, "small", 1)
    assert step(scheduler) == {"a": 1}
    assert ids(scheduler.waiting) == ["large", "small"]
    assert step(scheduler) == {"large": 12, "small": 1}


@pytest.mark.parametrize("num_blocks, enters", [(4, False), (5, True)])
def test_admission_looks_one_step_ahead(num_blocks, enters):
    """After the step both need one more block. Two must be left, or B is preempted at once."""
    scheduler, _ = make(num_blocks=num_blocks)
    added(scheduler, "a", 7, max_tokens=9)
    step(scheduler)  # a: 7 of 8 tokens computed in 2 blocks
    added(scheduler, "b", 4, max_tokens=9)
    assert step(scheduler) == ({"a": 1, "b": 4} if enters else {"a": 1})
    plan = scheduler.schedule(0.0)
    assert plan.preempted == []
    assert ("b" in planned(plan)) == enters


def test_admission_does_not_wait_for_memory_that_is_there():
    """Looking ahead means one step, not to the end (that would be "reserve")."""
    scheduler, _ = make(num_blocks=6)
    added(scheduler, "a", 5, max_tokens=19)  # to the end each would take 6 blocks
    added(scheduler, "b", 5, max_tokens=19)
    assert step(scheduler) == {"a": 5, "b": 5}


# ---- preemption ------------------------------------------------------------------------


def three_in_a_full_pool():
    """a, b and c with 8 tokens computed each, in 6 blocks of 4, and none is free."""
    scheduler, allocator = make(num_blocks=6, max_num_batched_tokens=32)
    requests = [added(scheduler, name, 7, max_tokens=9) for name in "abc"]
    assert step(scheduler) == {"a": 7, "b": 7, "c": 7}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}
    assert allocator.num_free_blocks == 0
    return scheduler, allocator, requests


def test_the_last_admitted_is_preempted():
    scheduler, allocator, (_, _, c) = three_in_a_full_pool()
    plan = scheduler.schedule(0.0)
    assert plan.preempted == [c]
    assert planned(plan) == {"a": 1, "b": 1}  # nobody else is skipped (fault 16)
    assert plan.num_tokens == 2
    assert allocator.num_free_blocks == 0  # c's two blocks went to a and b
    assert (c.block_table, c.num_computed_tokens) == ([], 0)
    assert c.status is RequestStatus.WAITING and scheduler.waiting == [c]
    assert c.output_token_ids == [TOKEN, TOKEN]  # nothing is lost
    assert c.metrics.num_preemptions == 1
    scheduler.update(plan, sampled(plan), 0.0)
    run_until_idle(scheduler)
    assert c.output_token_ids == [TOKEN] * 9


def test_the_last_one_gives_way_itself():
    """a takes the free block, c is last and needs one that nobody has: c goes."""
    scheduler, _ = make(num_blocks=5)
    a = added(scheduler, "a", 7, max_tokens=9)
    c = added(scheduler, "c", 7, max_tokens=9)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan.preempted == [c]
    assert planned(plan) == {"a": 1} and scheduler.running == [a]


def test_nobody_is_admitted_in_a_step_that_preempted():
    """`first` would fit in the block that is left, and is ahead of c in the queue."""
    scheduler, allocator = make(num_blocks=4)
    added(scheduler, "a", 7, max_tokens=9)
    c = added(scheduler, "c", 7, max_tokens=9)
    step(scheduler)
    step(scheduler)
    added(scheduler, "first", 1, max_tokens=2, arrival_time=-1.0)
    plan = scheduler.schedule(0.0)
    assert plan.preempted == [c] and planned(plan) == {"a": 1}
    assert allocator.num_free_blocks == 1
    scheduler.update(plan, sampled(plan), 0.0)
    assert ids(scheduler.waiting) == ["first", "c"]
    assert step(scheduler) == {"a": 1, "first": 1}


def test_the_preempted_come_back_in_arrival_order():
    """Fault 19: `waiting` is sorted at all times, and served from its head."""
    scheduler, allocator = make(num_blocks=8, max_num_batched_tokens=32)
    requests = [
        added(scheduler, name, 7, max_tokens=14, arrival_time=float(t))
        for t, name in enumerate("abcd")
    ]
    num_preempted, running = 0, []
    while scheduler.waiting or scheduler.running:
        waiting = ids(scheduler.waiting)
        plan = scheduler.schedule(9.0)
        assert ids(scheduler.waiting) == sorted(ids(scheduler.waiting))
        entered = [name for name in planned(plan) if name not in running]
        assert entered == waiting[: len(entered)]
        num_preempted += len(plan.preempted)
        scheduler.update(plan, sampled(plan), 9.0)
        running = ids(scheduler.running)
    assert num_preempted >= 2
    assert all(r.output_token_ids == [TOKEN] * 14 for r in requests)
    assert sum(r.metrics.num_preemptions for r in requests) == num_preempted


def test_a_pool_that_holds_one():
    """Fault 14: four requests, all finish, each step does something."""
    scheduler, allocator = make(num_blocks=4)
    requests = [added(scheduler, name, 8, max_tokens=8) for name in "abcd"]
    plans = run_until_idle(scheduler, max_steps=4 * (8 + 8))
    assert all(r.output_token_ids == [TOKEN] * 8 for r in requests)
    assert max(len(plan.scheduled) for plan in plans) <= 2
    assert allocator.num_free_blocks == 4


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_at_each_length(length, caching):
    """Fault 15, the scheduler's part: no token is lost or doubled."""
    scheduler, allocator = make(num_blocks=5, enable_prefix_caching=caching)
    requests = [added(scheduler, name, length, max_tokens=9) for name in "abc"]
    run_until_idle(scheduler)
    assert [len(r.output_token_ids) for r in requests] == [9, 9, 9]
    assert allocator.num_free_blocks == 5


def test_one_after_another_leaves_nothing_behind():
    """Fault 8: on a pool that fits one."""
    scheduler, allocator = make(num_blocks=3)
    for i in range(10):
        added(scheduler, f"r{i}", 4 + i % 3, max_tokens=5)
        run_until_idle(scheduler)
        assert allocator.num_free_blocks == 3
        allocator.check_invariants()


# ---- abort -----------------------------------------------------------------------------


def waiting(scheduler):
    return added(scheduler, "x", 5)


def in_mid_prefill(scheduler):
    new = added(scheduler, "x", 30)
    step(scheduler)
    assert 0 < new.num_computed_tokens < 30
    return new


def decoding(scheduler):
    new = added(scheduler, "x", 5, max_tokens=9)
    step(scheduler)
    step(scheduler)
    return new


def preempted(scheduler):
    added(scheduler, "a", 17, max_tokens=15)
    new = added(scheduler, "x", 14, max_tokens=15)
    while not new.metrics.num_preemptions:
        step(scheduler)
    assert scheduler.waiting == [new]
    scheduler.abort("a")
    return new


def planned_not_computed(scheduler):
    new = added(scheduler, "x", 5)
    scheduler.schedule(0.0)
    return new


@pytest.mark.parametrize(
    "state", [waiting, in_mid_prefill, decoding, preempted, planned_not_computed]
)
def test_abort_in_each_state(state):
    """Fault 20, invariant 11: every block comes back, the id may be used again."""
    scheduler, allocator = make(num_blocks=10)
    x = state(scheduler)
    outputs = list(x.output_token_ids)
    assert scheduler.abort("x") is True
    assert x.status is RequestStatus.FINISHED and x.finish_reason == "abort"
    assert x.block_table == [] and x.output_token_ids == outputs
    assert not scheduler.waiting and not scheduler.running
    assert allocator.num_free_blocks == 10
    assert scheduler.abort("x") is False
    again = added(scheduler, "x", 5, max_tokens=2)
    run_until_idle(scheduler)
    assert again.finish_reason == "length"
    assert allocator.num_free_blocks == 10


def test_abort_of_the_finished_and_of_the_unknown():
    scheduler, _ = make()
    a = added(scheduler, "a", 3, max_tokens=1)
    step(scheduler)
    assert scheduler.abort("a") is False
    assert scheduler.abort("nobody") is False
    assert a.finish_reason == "length"


@pytest.mark.parametrize("runner_answers_for_the_aborted", [True, False])
def test_abort_between_schedule_and_update(runner_answers_for_the_aborted):
    """Its token is dropped, the others get theirs, and no block is freed twice."""
    scheduler, allocator = make()
    a, x, b = (added(scheduler, name, 4) for name in "axb")
    plan = scheduler.schedule(0.0)
    tokens = sampled(plan)
    assert scheduler.abort("x")
    if not runner_answers_for_the_aborted:
        del tokens["x"]
    assert scheduler.update(plan, tokens, 1.0) == []
    assert (x.output_token_ids, x.finish_reason) == ([], "abort")
    assert a.output_token_ids == b.output_token_ids == [TOKEN]
    assert step(scheduler) == {"a": 1, "b": 1}
    run_until_idle(scheduler)
    assert allocator.num_free_blocks == allocator.num_blocks
    allocator.check_invariants()


def test_a_reused_id_does_not_get_the_token_of_its_predecessor():
    scheduler, allocator = make()
    old = added(scheduler, "x", 4)
    plan = scheduler.schedule(0.0)
    tokens = sampled(plan)
    scheduler.abort("x")
    new = added(scheduler, "x", 6, max_tokens=1)
    assert scheduler.update(plan, tokens, 0.0) == []
    assert old.output_token_ids == new.output_token_ids == []
    assert new.num_computed_tokens == 0 and scheduler.waiting == [new]
    assert step(scheduler) == {"x": 6}
    assert new.finish_reason == "length"
    assert allocator.num_free_blocks == allocator.num_blocks


def test_what_an_aborted_request_never_computed_is_not_found():
    """Fault 3: submit, abort before the first step (or inside it), submit again."""
    prompt = list(range(12))
    for abort_inside_a_step in (False, True):
        scheduler, _ = make()
        added(scheduler, "x", prompt)
        if abort_inside_a_step:
            scheduler.schedule(0.0)  # and the step fails: nothing was written
        scheduler.abort("x")
        again = added(scheduler, "x", prompt)
        assert step(scheduler) == {"x": 12}
        assert again.num_cached_tokens == 0


# ---- a step that failed ----------------------------------------------------------------


def test_schedule_again_plans_the_same_and_leaks_nothing():
    """The runner raised, update() was never called: the next plan is the same step again."""
    scheduler, allocator = make(num_blocks=32)
    shared = list(range(8))
    added(scheduler, "cached", [*shared, 50], max_tokens=1)
    step(scheduler)
    decoding = added(scheduler, "decoding", 4, max_tokens=9)
    step(scheduler)
    added(scheduler, "hit", [*shared, 60, 61])
    added(scheduler, "long", 40)
    first = scheduler.schedule(0.0)
    tables = {
        item.request.request_id: list(item.request.block_table) for item in first.scheduled
    }
    num_free = allocator.num_free_blocks
    assert planned(first) == {"decoding": 1, "hit": 2, "long": 13}
    for _ in range(3):
        again = scheduler.schedule(0.0)
        assert planned(again) == planned(first)
        assert not again.preempted
        assert allocator.num_free_blocks == num_free
        for item in again.scheduled:
            assert item.request.block_table == tables[item.request.request_id]
    scheduler.update(again, sampled(again), 0.0)
    assert decoding.output_token_ids == [TOKEN, TOKEN]
    run_until_idle(scheduler)
    assert allocator.num_free_blocks == 32


def test_a_failed_step_that_preempted_leaks_nothing():
    scheduler, allocator, requests = three_in_a_full_pool()
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert planned(plan) == {"a": 1, "b": 1}
    scheduler.update(plan, sampled(plan), 0.0)
    run_until_idle(scheduler)
    assert [r.metrics.num_preemptions for r in requests][0] == 0
    assert all(r.output_token_ids == [TOKEN] * 9 for r in requests)
    assert allocator.num_free_blocks == 6


# ---- the prefix cache, seen from a request ---------------------------------------------


def test_same_prompt_in_the_same_step():
    """Fault 3: neither may read blocks that the other has not computed yet."""
    scheduler, _ = make(max_num_batched_tokens=32)
    prompt = list(range(12))
    a, b = added(scheduler, "a", prompt), added(scheduler, "b", prompt)
    assert step(scheduler) == {"a": 12, "b": 12}
    assert set(a.block_table).isdisjoint(b.block_table)
    c = added(scheduler, "c", prompt)
    assert step(scheduler) == {"a": 1, "b": 1, "c": 4}
    assert c.num_cached_tokens == 8


def test_the_return_of_a_preempted_request_is_not_a_cached_prompt():
    """It finds a block of its own again; num_cached_tokens is of its first admission."""
    scheduler, _ = make(num_blocks=5)
    added(scheduler, "a", 7, max_tokens=9)
    c = added(scheduler, "c", 7, max_tokens=9)
    while not c.metrics.num_preemptions:
        step(scheduler)
    while c not in scheduler.running:
        plan = scheduler.schedule(0.0)
        if c not in scheduler.running:
            scheduler.update(plan, sampled(plan), 0.0)
    assert planned(plan)["c"] < c.num_tokens == 9 and c.num_computed_tokens > 0
    assert c.num_cached_tokens == 0


def test_a_prompt_still_in_its_chunks_is_found_as_far_as_it_is_computed():
    """Invariant 4, across steps: 6 of 20 tokens computed are one full block."""
    scheduler, _ = make(max_num_batched_tokens=6)
    prompt = list(range(20))
    added(scheduler, "a", prompt)
    step(scheduler)
    a_first_block = scheduler.running[0].block_table[0]
    scheduler.abort("a")
    b = added(scheduler, "b", prompt)
    assert step(scheduler) == {"b": 6}
    assert b.num_cached_tokens == 4 and b.block_table[0] == a_first_block


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_each_length_twice(length):
    """Fault 4, invariant 5: the second run computes at least one token."""
    scheduler, _ = make()
    prompt = list(range(length))
    num_cached = (length - 1) // 4 * 4
    for name, expected in (("first", 0), ("second", num_cached), ("third", num_cached)):
        new = added(scheduler, name, prompt, max_tokens=2)
        assert step(scheduler) == {name: length - expected}
        assert new.num_cached_tokens == new.metrics.num_cached_tokens == expected
        run_until_idle(scheduler)


def test_the_output_is_cached_too():
    """A conversation: the next prompt is the last one, its answer, and something new."""
    scheduler, _ = make()
    first = added(scheduler, "first", 6, max_tokens=6)
    run_until_idle(scheduler)
    # 12 tokens, of which the last was never computed: two full blocks.
    second = added(scheduler, "second", [*first.token_ids, 90, 91], max_tokens=1)
    assert step(scheduler) == {"second": 6}
    assert second.num_cached_tokens == 8


def test_salts_are_kept_apart():
    """Fault 7."""
    scheduler, _ = make()
    prompt = list(range(9))
    salts = [None, "", "a", "b"]
    for i, salt in enumerate(salts):
        new = added(scheduler, f"first-{i}", prompt, salt=salt, max_tokens=1)
        run_until_idle(scheduler)
        assert new.num_cached_tokens == 0
    for i, salt in enumerate(salts):
        new = added(scheduler, f"second-{i}", prompt, salt=salt, max_tokens=1)
        run_until_idle(scheduler)
        assert new.num_cached_tokens == 8


def test_a_hit_takes_blocks_from_the_free_list():
    """Section 6: cached blocks in the free list count as needed when a hit takes them.

    5 blocks, of which "old" left 2 cached. "a" holds 2 more, so 3 are free. "hit" needs its
    2 cached ones and 2 new ones: it must wait, though only 2 of its 4 blocks are new.
    """
    scheduler, allocator = make(num_blocks=5)
    old = added(scheduler, "old", 8, max_tokens=1)
    step(scheduler)
    added(scheduler, "a", 5, max_tokens=3)
    step(scheduler)
    assert allocator.num_free_blocks == 3
    hit = added(scheduler, "hit", [*old.prompt_token_ids, 1, 2, 3, 4, 5], max_tokens=1)
    assert step(scheduler) == {"a": 1}
    assert allocator.num_free_blocks == 3  # and nothing was taken in vain
    assert step(scheduler) == {"a": 1}
    assert step(scheduler) == {"hit": 5}
    assert hit.num_cached_tokens == 8


# ---- when a request ends ---------------------------------------------------------------


def test_max_tokens_one_gives_one_token():
    """Fault 23: the end is decided after the token is recorded."""
    scheduler, _ = make()
    a = added(scheduler, "a", 3, max_tokens=1)
    plan = scheduler.schedule(0.0)
    assert scheduler.update(plan, {"a": [9]}, 0.0) == [a]
    assert (a.output_token_ids, a.finish_reason) == ([9], "length")
    assert not scheduler.running and not scheduler.waiting


def outputs_of(tokens, **kwargs):
    """Feed these tokens one a step; return what was kept, and why it ended."""
    scheduler, allocator = make()
    a = added(scheduler, "a", kwargs.pop("prompt", 3), **kwargs)
    for token in tokens:
        step(scheduler, token=token)
    if a.is_finished:
        assert a.block_table == [] and allocator.num_free_blocks == allocator.num_blocks
    return a.output_token_ids, a.finish_reason


def test_eos_and_stop_ids_end_a_request():
    """The stop token is recorded; "stop" wins over "length"."""
    assert outputs_of([5, EOS, 6], eos=(EOS,)) == ([5, EOS], "stop")
    assert outputs_of([5, 9, 6], eos=(EOS, 9)) == ([5, 9], "stop")
    assert outputs_of([5, 8, 6], stop_token_ids=(8,)) == ([5, 8], "stop")
    assert outputs_of([5, 6, EOS], eos=(EOS,), max_tokens=3) == ([5, 6, EOS], "stop")
    assert outputs_of([5, 6, 8], stop_token_ids=[8], max_tokens=3) == ([5, 6, 8], "stop")
    assert outputs_of([5, 6, 7], eos=(EOS,), max_tokens=3) == ([5, 6, 7], "length")
    assert outputs_of([5, 6], eos=(EOS,)) == ([5, 6], None)


def test_ignore_eos():
    """Stop ids act under ignore_eos too, even one that is also the EOS."""
    assert outputs_of([EOS, 5], eos=(EOS,), ignore_eos=True) == ([EOS, 5], None)
    stopped = outputs_of([EOS, 8], eos=(EOS,), ignore_eos=True, stop_token_ids=(8,))
    assert stopped == ([EOS, 8], "stop")
    stopped = outputs_of([5, EOS], eos=(EOS,), ignore_eos=True, stop_token_ids=(EOS,))
    assert stopped == ([5, EOS], "stop")


def test_min_tokens():
    """Fault 35: the first min_tokens tokens end nothing; prompt tokens do not count."""
    ends = {"eos": (EOS,), "stop_token_ids": (8,), "prompt": [EOS, 8, 5, 5, 5]}
    kept = outputs_of([EOS, 8, EOS, 5], min_tokens=2, max_tokens=9, **ends)
    assert kept == ([EOS, 8, EOS], "stop")
    assert outputs_of([EOS, 8], min_tokens=2, max_tokens=9, **ends) == ([EOS, 8], None)
    assert outputs_of([5, EOS], min_tokens=2, max_tokens=2, **ends) == ([5, EOS], "length")
    assert outputs_of([8, 5], max_tokens=9, **ends) == ([8], "stop")


def test_tokens_go_to_their_own_request():
    """Fault 22, the scheduler's part: by id, whatever the order of the answers."""
    scheduler, _ = make()
    requests = [added(scheduler, name, 2, max_tokens=2) for name in ("a", "b", "c")]
    for turn in range(2):
        plan = scheduler.schedule(0.0)
        tokens = {name: [10 * turn + i] for i, name in enumerate("abc")}
        finished = scheduler.update(plan, dict(reversed(tokens.items())), 0.0)
    assert [r.output_token_ids for r in requests] == [[0, 10], [1, 11], [2, 12]]
    assert sorted(ids(finished)) == ["a", "b", "c"]


# ---- metrics ---------------------------------------------------------------------------


def test_the_times():
    scheduler, _ = make(max_num_batched_tokens=4)
    a = added(scheduler, "a", 6, max_tokens=3, arrival_time=1.0)
    m = a.metrics
    assert (m.queue_time, m.ttft, m.tpot, m.latency) == (None, None, None, None)
    for scheduled_at, updated_at in ((2.0, 3.0), (4.0, 5.0), (5.5, 7.0), (8.0, 11.0)):
        plan = scheduler.schedule(scheduled_at)
        scheduler.update(plan, sampled(plan), updated_at)
    assert a.is_finished
    assert m.first_scheduled_time == 2.0
    assert m.first_token_time == 5.0  # the step of the prompt's second chunk
    assert m.finish_time == 11.0
    assert (m.queue_time, m.ttft, m.tpot, m.latency) == (1.0, 4.0, 3.0, 10.0)
    assert (m.num_prompt_tokens, m.num_output_tokens, m.num_cached_tokens) == (6, 3, 0)
    assert m.num_preemptions == 0


def test_one_token_has_no_time_per_token():
    scheduler, _ = make()
    a = added(scheduler, "a", 2, max_tokens=1)
    step(scheduler, now=3.0)
    assert (a.metrics.tpot, a.metrics.latency) == (None, 3.0)


def test_the_first_times_survive_a_preemption():
    scheduler, _, (_, _, c) = three_in_a_full_pool()
    now = 10.0
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule(now)
        scheduler.update(plan, sampled(plan), now)
        now += 1.0
    assert c.metrics.num_preemptions == 1
    assert (c.metrics.first_scheduled_time, c.metrics.first_token_time) == (0.0, 0.0)
    assert c.metrics.finish_time > 10.0
    assert c.num_cached_tokens == 0  # of its first admission, not of its return


# ---- what may be asked for -------------------------------------------------------------

NAN, INF = math.nan, math.inf
NOT_INTS = [True, 1.0, "1", NAN, INF, [1], b"1"]
NOT_FLOATS = [True, "1", NAN, INF, -INF, [1.0], 1j, 10**400]  # the last fits no float
NOT_BOOLS = [0, 1, "yes", None, 1.0]
NOT_NAMES = [1, True, "", "banana", ["auto"], NAN]

BAD_SAMPLING_PARAMS = {
    "temperature": [*NOT_FLOATS, None, -0.1],
    "top_k": [*NOT_INTS, None, -2],
    "top_p": [*NOT_FLOATS, None, 0, 0.0, -0.1, 1.1, 2],
    "min_p": [*NOT_FLOATS, None, -0.1, 1.1],
    "seed": NOT_INTS,
    "max_tokens": [*NOT_INTS, None, 0, -1],
    "min_tokens": [*NOT_INTS, None, -1],
    "stop": [5, True, b"x", "", [""], ["a", None], [1], ["a", b"b"]],
    "stop_token_ids": [5, True, "12", b"12", [-1], [True], [1.0], ["1"], [None], [NAN]],
    "ignore_eos": NOT_BOOLS,
    "logprobs": [*NOT_INTS, -1],
    "presence_penalty": [*NOT_FLOATS, None],
    "frequency_penalty": [*NOT_FLOATS, None],
    "repetition_penalty": [*NOT_FLOATS, None, 0, -1.0],
    "n": [*NOT_INTS, None, 0, -1],
}
BAD_ENGINE_CONFIG = {
    "block_size": [*NOT_INTS, None, 0, -1],
    "num_blocks": [*NOT_INTS, 0, -1],
    "num_host_blocks": [*NOT_INTS, -1],
    "max_num_seqs": [*NOT_INTS, None, 0, -1],
    "max_num_batched_tokens": [*NOT_INTS, None, 0, -1],
    "max_model_len": [*NOT_INTS, 0, -1],
    "batching": [*NOT_NAMES, None],
    "policy": [*NOT_NAMES, None],
    "max_wait": [True, "1", NAN, -INF, [1.0], -0.1],
    "admission": [*NOT_NAMES, None],
    "enable_chunked_prefill": NOT_BOOLS,
    "enable_prefix_caching": NOT_BOOLS,
    "preemption": [*NOT_NAMES, None],
    "speculative": NOT_NAMES,
    "num_speculative_tokens": [*NOT_INTS, None, 0, -1, 65],
    "draft_model": [5, True, "", "tiny"],  # without speculative="draft" none is allowed
    "prompt_lookup_max": [*NOT_INTS, None, 1],
    "prompt_lookup_min": [*NOT_INTS, None, 0, -1],
    "attention_backend": [*NOT_NAMES, None],
    "cuda_graphs": NOT_BOOLS,
    "async_scheduling": NOT_BOOLS,
    "device": [*NOT_NAMES, None],
    "dtype": [*NOT_NAMES, None],
    "kv_cache_dtype": [*NOT_NAMES, None],
    "gpu_memory_utilization": [*NOT_FLOATS, None, 0, 0.0, -0.1, 1.1],
    "tensor_parallel_size": [*NOT_INTS, None, 0, -1],
    "seed": [*NOT_INTS, None],
}
BAD_REQUEST = {
    "request_id": [None, 5, b"x", ""],
    "prompt_token_ids": [[], None, 5, "12", b"12", [True], [1.0], ["1"], [None], [-1], [NAN]],
    "params": ["greedy", 5, {"max_tokens": 1}],
    "arrival_time": [True, "1", None, NAN, INF, 10**400],
    "priority": [True, "1", None, NAN, INF],
    "cache_salt": [5, True, b"x"],
    "eos_token_ids": [5, None, "12", [-1], [True], [1.0], ["1"], [None]],
}


def cases(bad_values):
    return [(name, value) for name, values in bad_values.items() for value in values]


def assert_refused(name, value, build):
    """ValueError with the field's name (or what it is called in plain words)."""
    with pytest.raises(ValueError) as error:
        build(**{name: value})
    plain_words = {"prompt_token_ids": "prompt"}.get(name, name)
    assert plain_words in str(error.value)


def short_id(value):
    return repr(value)[:12]


@pytest.mark.parametrize("name, value", cases(BAD_SAMPLING_PARAMS), ids=short_id)
def test_bad_sampling_params(name, value):
    """Fault 40."""
    assert_refused(name, value, SamplingParams)


@pytest.mark.parametrize("name, value", cases(BAD_ENGINE_CONFIG), ids=short_id)
def test_bad_engine_config(name, value):
    assert_refused(name, value, EngineConfig)


@pytest.mark.parametrize("name, value", cases(BAD_REQUEST), ids=short_id)
def test_bad_request(name, value):
    good = {"request_id": "a", "prompt_token_ids": [1, 2]}
    assert_refused(name, value, lambda **bad: Request(**(good | bad)))


def test_each_field_is_in_the_tables():
    """A new field must come with what it refuses."""
    fields = {
        cls: {f.name for f in dataclasses.fields(cls)} for cls in (SamplingParams, EngineConfig)
    }
    assert fields[SamplingParams] == set(BAD_SAMPLING_PARAMS)
    assert fields[EngineConfig] == set(BAD_ENGINE_CONFIG)


def test_fields_that_contradict_each_other():
    with pytest.raises(ValueError, match="max_num_batched_tokens.*255.*max_num_seqs.*256"):
        EngineConfig(max_num_batched_tokens=255, max_num_seqs=256)
    with pytest.raises(ValueError, match="max_num_batched_tokens.*512.*max_model_len.*513"):
        EngineConfig(
            max_num_batched_tokens=512, max_model_len=513, enable_chunked_prefill=False
        )
    with pytest.raises(ValueError, match="num_host_blocks is 0; preemption by swap needs >= 1"):
        EngineConfig(preemption="swap", num_host_blocks=0)
    EngineConfig(preemption="swap")
    EngineConfig(max_num_batched_tokens=512, max_model_len=512, enable_chunked_prefill=False)
    EngineConfig(max_num_batched_tokens=512, max_model_len=513)


def test_what_is_allowed():
    """The edges of the ranges, from the inside."""
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=0, seed=0, max_tokens=1, logprobs=0)
    SamplingParams(temperature=1e-4, top_k=10**6, top_p=1e-9, min_p=1, seed=-1, n=3)
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[0]).stop == ("a", "b")
    EngineConfig(block_size=1, num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1)
    EngineConfig(max_wait=0, gpu_memory_utilization=1)
    Request("a", (0,), arrival_time=-1.5, priority=-3, cache_salt="")


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


def test_a_request_keeps_its_own_copy_of_the_prompt():
    prompt = [1, 2, 3]
    a = Request("a", prompt)
    prompt.append(4)
    a.token_ids.append(5)
    assert a.prompt_token_ids == [1, 2, 3]


def test_the_control_plane_imports_no_torch():
    script = (
        "import sys; from nanobatch import Scheduler, BlockAllocator, Request, EngineConfig; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
