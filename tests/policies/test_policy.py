"""Ordering, admission and preemption: the Scheduler alone, with made-up tokens.

Each policy and each admission rule by hand; what they do together, in thousands of random
traces, is in test_shadow_cache.py. Invariants 7 to 11.
"""

import random

import pytest

from nanobatch import (
    FCFS,
    SJF,
    BlockAllocator,
    EngineConfig,
    LearnedLengths,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
)
from nanobatch.policies.admission import expected_peak
from nanobatch.policies.ordering import in_order


def make(policy=None, **knobs):
    """A scheduler with two seats and blocks of 4, unless it is said otherwise; the policy by
    name, or an object."""
    if isinstance(policy, str):
        knobs["policy"], policy = policy, None
    knobs = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 2} | knobs
    knobs.setdefault("max_num_batched_tokens", 64)
    config = EngineConfig(**knobs)
    allocator = BlockAllocator(
        config.num_blocks, config.block_size, config.enable_prefix_caching
    )
    return Scheduler(config, allocator, policy)


def request(name, prompt=4, output=4, arrival=0.0, priority=0, token=None):
    """Prompts of different names share no prefix."""
    token = sum(name.encode()) if token is None else token
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    return Request(name, [token] * prompt, params, arrival_time=arrival, priority=priority)


def step(scheduler, now):
    """One step; the plan, and who finished."""
    plan = scheduler.schedule(now)
    tokens = {row.request.request_id: [1] for row in plan.scheduled if row.samples}
    return plan, [r.request_id for r in scheduler.update(plan, tokens, now)]


def serve(scheduler, requests, seconds=1.0):
    """Everybody, step by step; {id: (first scheduled, finished)}, and the plans."""
    coming = sorted(requests, key=lambda r: r.arrival_time)
    now, plans = 0.0, []
    while coming or scheduler.has_unfinished():
        while coming and coming[0].arrival_time <= now:
            scheduler.add(coming.pop(0))
        plans.append(step(scheduler, now)[0])
        now += seconds
        assert len(plans) < 100_000
    times = {
        r.request_id: (r.metrics.first_scheduled_time, r.metrics.finish_time) for r in requests
    }
    return times, plans


def order_of(scheduler, *requests):
    """In which order they are admitted, one seat at a time."""
    times, _ = serve(scheduler, requests)
    return sorted(times, key=lambda name: times[name][0])


# ---- policies --------------------------------------------------------------------------


def test_fcfs_serves_the_long_one_first():
    long, short = request("long", output=50), request("short", output=2, arrival=0.5)
    other = request("other", output=3, arrival=0.6)
    assert order_of(make(max_num_seqs=1), long, other, short) == ["long", "short", "other"]


def test_sjf_serves_the_fewest_tokens_left():
    requests = [
        request("a", prompt=30, output=20),
        request("b", prompt=3, output=40),
        request("c", prompt=3, output=10),
        request("d", prompt=40, output=1),
    ]
    scheduler = make(max_num_seqs=1, policy="sjf")
    assert order_of(scheduler, *requests) == ["c", "d", "b", "a"]  # 13, 41, 43, 50


def test_sjf_counts_what_the_cache_has_not():
    """A prompt of 40 tokens of which 36 are cached is shorter than one of 10."""
    scheduler = make(max_num_seqs=1, policy="sjf")
    order_of(scheduler, request("first", prompt=40, output=1, token=7))
    cached = request("cached", prompt=40, output=5, token=7)
    assert order_of(scheduler, request("new", prompt=10, output=5), cached) == ["cached", "new"]
    assert cached.num_cached_tokens == 36


def test_sjf_by_a_prediction_of_the_user_s():
    lengths = {"a": 30, "b": 5, "c": 10}
    policy = SJF(predict=lambda r: lengths[r.request_id])
    scheduler = make(policy, max_num_seqs=1)
    requests = [request(name, output=50) for name in lengths]
    assert order_of(scheduler, *requests) == ["b", "c", "a"]


def test_priority_then_arrival():
    requests = [
        request("a", priority=1),
        request("b", priority=0, arrival=0.1),
        request("c", priority=-1, arrival=0.2),
        request("d", priority=0, arrival=0.05),
    ]
    scheduler = make(max_num_seqs=1, policy="priority")
    first, *rest = order_of(scheduler, *requests)
    assert first == "a", "nobody else had come"
    assert rest == ["c", "d", "b"]


def test_a_policy_of_the_user_s_own():
    class LongestPrompt:
        def key(self, request, now):
            return -len(request.prompt_token_ids)

    requests = [request("a", prompt=3), request("b", prompt=9), request("c", prompt=5)]
    assert order_of(make(LongestPrompt(), max_num_seqs=1), *requests) == ["b", "c", "a"]


def test_ties_go_by_arrival():
    for policy in ("fcfs", "sjf", "priority"):
        requests = [request(name, arrival=0.1 * i) for i, name in enumerate("abcde")]
        assert order_of(make(max_num_seqs=1, policy=policy), *requests) == list("abcde")


def test_nobody_slips_past_one_that_does_not_fit():
    scheduler = make(num_blocks=10, policy="sjf", max_num_seqs=3)
    scheduler.add(request("runs", prompt=20, output=8))
    step(scheduler, 0.0)
    scheduler.add(request("next", prompt=24, output=1))
    scheduler.add(request("small", prompt=4, output=40))
    plan, _ = step(scheduler, 1.0)
    assert [row.request.request_id for row in plan.scheduled] == ["runs"]


def test_keys_are_asked_for_only_when_somebody_may_enter():
    class Counts(FCFS):
        asked = 0

        def key(self, request, now):
            self.asked += 1
            return 0

    class NotFCFS:
        def __init__(self):
            self.inner = Counts()

        def key(self, request, now):
            return self.inner.key(request, now)

    policy = NotFCFS()
    scheduler = make(policy, max_num_seqs=1)
    for name in "abc":
        scheduler.add(request(name, output=5))
    for now in range(4):
        step(scheduler, float(now))
    assert policy.inner.asked == 3


@pytest.mark.parametrize("policy", [FCFS.key, 3, LearnedLengths()])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ValueError, match=r"policy is .*; it must be an object with a"):
        make(policy)


def test_a_policy_made_from_fcfs_is_asked_for_its_keys():
    class LastComeFirstServed(FCFS):
        def key(self, request, now):
            return tuple(-x for x in super().key(request, now))

    requests = [request(name, output=1) for name in "abc"]
    assert order_of(make(LastComeFirstServed(), max_num_seqs=1), *requests) == ["c", "b", "a"]


# ---- max_wait --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sjf", "priority"])
def test_without_max_wait_the_long_one_starves(policy):
    times = hostile_stream(policy, None)
    assert times["long"][0] > 300


@pytest.mark.parametrize("max_wait", [5.0, 20.0])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_max_wait_bounds_the_wait(policy, max_wait):
    """Invariant 9: max_wait, and the steps until somebody who runs has finished."""
    times = hostile_stream(policy, max_wait)
    longest_that_runs = 4
    for name, (start, _) in times.items():
        if name == "long":
            assert start - 3.0 <= max_wait + longest_that_runs


def hostile_stream(policy, max_wait):
    """Short and important ones keep coming, faster than they can be served, for 300 s."""
    scheduler = make(max_num_seqs=2, policy=policy, max_wait=max_wait)
    long = request("long", prompt=40, output=30, arrival=3.0, priority=9)
    short = [
        request(f"s{i}", prompt=2, output=3, arrival=i / 2, priority=0) for i in range(600)
    ]
    times, _ = serve(scheduler, [long, *short])
    return times


def test_the_overdue_come_in_order_of_arrival_and_stop_the_rest():
    scheduler = make(policy="sjf", max_wait=10.0, max_num_seqs=4, num_blocks=12)
    first = request("first", prompt=40, output=2, arrival=0.0)
    second = request("second", prompt=8, output=2, arrival=1.0)
    young = request("young", prompt=4, output=1, arrival=9.0)
    for r in (young, second, first):
        scheduler.add(r)
    waiting = list(scheduler.waiting)
    assert waiting == [first, second, young]
    in_line = list(in_order(waiting, scheduler.policy, 11.5, 10.0, most=3))
    assert in_line == [first, second, young]
    in_line = list(in_order(waiting, scheduler.policy, 10.5, 10.0, most=3))
    assert in_line == [first, young, second]
    plan, _ = step(scheduler, 11.5)
    # `first` takes all but one block; `second` does not fit, and `young` may not pass it.
    assert [row.request for row in plan.scheduled] == [first]


# ---- learned lengths -------------------------------------------------------------------


def finished(length):
    r = request("x", output=10**6)
    r.output_token_ids = [1] * length
    return r


def test_learned_lengths_by_hand():
    predict = LearnedLengths(history=4)
    r = request("r", output=100)
    assert predict(r) == 100, "knows nothing yet"
    for length in (10, 20, 60):
        predict.observe(finished(length))
    assert predict(r) == 30
    r.output_token_ids = [1] * 10
    assert predict(r) == 40, "of those that were longer than 10"
    r.output_token_ids = [1] * 60
    assert predict(r) == 100, "none was longer"
    predict.observe(finished(300))
    predict.observe(finished(300))  # the 10 is forgotten
    assert predict(request("s", output=1000)) == (20 + 60 + 300 + 300) / 4
    assert predict(request("s", output=50)) == 50, "at most max_tokens"


def test_learned_lengths_by_brute_force():
    rng = random.Random(0)
    predict, history = LearnedLengths(history=20), []
    for _ in range(300):
        length = rng.randint(1, 40)
        predict.observe(finished(length))
        history = [*history, length][-20:]
        r = request("r", output=1000)
        r.output_token_ids = [1] * rng.randint(0, 45)
        longer = [n for n in history if n > len(r.output_token_ids)]
        assert predict(r) == pytest.approx(sum(longer) / len(longer) if longer else 1000)


def test_the_scheduler_lets_it_learn():
    policy = SJF(LearnedLengths())
    scheduler = make(policy, max_num_seqs=1)
    serve(scheduler, [request("a", output=3), request("b", output=5)])
    assert policy.predict(request("c", output=50)) == 4
    scheduler.add(request("aborted", output=50))
    scheduler.abort("aborted")
    assert policy.predict(request("c", output=50)) == 4, "it did not end by itself"


# ---- admission -------------------------------------------------------------------------


def crowd(n=30, seed=0):
    rng = random.Random(seed)
    return [
        request(f"r{i}", prompt=rng.randint(1, 12), output=rng.randint(1, 40), arrival=i / 3)
        for i in range(n)
    ]


def test_reserve_never_preempts_and_holds_to_the_end():
    for num_blocks in (14, 20, 40):
        scheduler = make(num_blocks=num_blocks, max_num_seqs=8, admission="reserve")
        _, plans = serve(scheduler, crowd())
        assert not any(plan.preempted for plan in plans)


def test_reserve_admits_exactly_what_fits_to_the_end():
    # prompt 8 + output 9: the last token is never computed, so 16 tokens, 4 blocks each
    scheduler = make(num_blocks=11, max_num_seqs=8, admission="reserve")
    for i in range(4):
        scheduler.add(request(f"r{i}", prompt=8, output=9))
    plan, _ = step(scheduler, 0.0)
    assert len(plan.scheduled) == 2
    scheduler = make(num_blocks=12, max_num_seqs=8, admission="reserve")
    for i in range(4):
        scheduler.add(request(f"r{i}", prompt=8, output=9))
    plan, _ = step(scheduler, 0.0)
    assert len(plan.scheduled) == 3


def test_a_shared_prefix_counts_once_it_is_held():
    """Blocks of a hit that others hold are not taken from the free list again."""
    scheduler = make(num_blocks=10, max_num_seqs=8, admission="reserve")
    scheduler.add(request("a", prompt=17, output=4, token=5))  # 20 tokens, 5 blocks
    step(scheduler, 0.0)
    scheduler.add(request("b", prompt=17, output=4, token=5))  # 4 shared, 1 of its own
    plan, _ = step(scheduler, 1.0)
    assert len(plan.scheduled) == 2
    scheduler.add(request("c", prompt=17, output=4, token=6))  # 5 blocks; 4 are free
    plan, _ = step(scheduler, 2.0)
    assert len(plan.scheduled) == 2


def test_on_demand_holds_more_and_preempts_and_predict_lies_between():
    held, preempted = {}, {}
    for admission in ("on_demand", "reserve", "predict"):
        scheduler = make(num_blocks=24, max_num_seqs=16, admission=admission)
        if admission == "predict":  # a history, else it reserves
            for length in (5, 10, 15, 20, 25, 30):
                scheduler.admission.observe(finished(length))
        requests = [
            request(f"r{i}", prompt=4 + i % 5, output=36 if i % 4 == 0 else 8)
            for i in range(40)
        ]
        for r in requests:
            r.params = SamplingParams(max_tokens=60, stop_token_ids=(9,))
        ends = {r.request_id: 36 if i % 4 == 0 else 8 for i, r in enumerate(requests)}
        _, plans = serve_with_ends(scheduler, requests, ends)
        held[admission] = sum(len(p.scheduled) for p in plans) / len(plans)
        preempted[admission] = sum(len(p.preempted) for p in plans)
    assert held["on_demand"] > held["predict"] > held["reserve"], held
    assert preempted["on_demand"] > preempted["predict"] >= preempted["reserve"] == 0, preempted


def serve_with_ends(scheduler, requests, ends):
    """Texts end by themselves, long before max_tokens."""
    fresh = [
        Request(r.request_id, r.prompt_token_ids, r.params, arrival_time=r.arrival_time)
        for r in requests
    ]
    for r in fresh:
        scheduler.add(r)
    plans, now = [], 0.0
    while scheduler.has_unfinished():
        plan = scheduler.schedule(now)
        tokens = {
            row.request.request_id: [
                9
                if len(row.request.output_token_ids) + 1 == ends[row.request.request_id]
                else 1
            ]
            for row in plan.scheduled
            if row.samples
        }
        scheduler.update(plan, tokens, now)
        plans.append(plan)
        now += 1.0
    return fresh, plans


def test_expected_peak_by_hand():
    assert expected_peak([]) == 0
    assert expected_peak([(5, 10)]) == 15
    # both go on for 2: 10 + 2 + 20 + 2 = 34; then the second alone: 20 + 8 = 28
    assert expected_peak([(2, 10), (8, 20)]) == 34
    # the short one is small: the peak is at the end of the long one
    assert expected_peak([(1, 2), (30, 20)]) == 50


def test_expected_peak_by_simulation():
    rng = random.Random(1)
    for _ in range(200):
        requests = [(rng.randint(1, 20), rng.randint(1, 30)) for _ in range(rng.randint(1, 8))]
        most = 0
        for t in range(21):  # at time t, those that end at t are still there
            most = max(most, sum(now + t for left, now in requests if left >= t))
        assert expected_peak(requests) == most


@pytest.mark.parametrize(
    "rows, num_blocks",  # (prompt, output) of each; blocks of 4 from which on all may join
    [
        ([(4, 4), (4, 4)], 6),  # 8 and 8 tokens at the end: 16, and 6 slots; 22
        ([(5, 3), (3, 6)], 5),  # 8 and 6 when the first ends: 14, and 6 slots; 20
        ([(8, 3), (6, 3), (2, 3)], 9),  # 11, 9 and 5: 25, and 9 slots; 34
        ([(1, 9), (1, 9), (1, 9), (1, 9)], 13),  # 4 times 10: 40, and 12 slots; 52
    ],
)
def test_predict_admits_exactly_what_its_peak_fits(rows, num_blocks):
    """Each may fill its last block with a single token, so 3 slots for each are beside the
    peak; and one block less is too few."""
    for blocks, is_admitted in ((num_blocks, True), (num_blocks - 1, False)):
        scheduler = make(num_blocks=blocks, max_num_seqs=4, admission="predict")
        for i, (prompt, output) in enumerate(rows):
            scheduler.add(request(f"r{i}", prompt=prompt, output=output))
        plan, _ = step(scheduler, 0.0)
        assert (len(plan.scheduled) == len(rows)) is is_admitted, blocks


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
def test_predict_that_knows_the_lengths_never_preempts(block_size):
    """What is admitted fits to its end, whatever the blocks' ends."""
    for seed in range(6):
        rng = random.Random(seed)
        scheduler = make(
            num_blocks=rng.randint(60, 90) // block_size + 1, block_size=block_size,
            max_num_seqs=8, admission="predict",
        )  # fmt: skip
        scheduler.admission.predict = lambda r: r.max_tokens
        _, plans = serve(scheduler, crowd(seed=seed))
        assert not any(plan.preempted for plan in plans), seed


def test_predict_admits_one_that_runs_alone():
    """Whatever it is expected to come to: nothing would ever be better."""
    scheduler = make(num_blocks=5, admission="predict")
    times, _ = serve(scheduler, [request("a", prompt=16, output=4)])
    assert times["a"][0] == 0.0


# ---- who gives way ---------------------------------------------------------------------


def test_priority_preempts_the_worst_and_gives_back_what_it_had():
    """Fault 16: the worst was served before the one that needs room."""
    scheduler = make(num_blocks=5, max_num_seqs=4, policy="priority", admission="on_demand")
    worst = request("worst", prompt=4, output=20, priority=9)
    scheduler.add(worst)
    step(scheduler, 0.0)
    good = request("good", prompt=7, output=20, priority=1)
    scheduler.add(good)
    victims = []
    for now in range(1, 12):
        plan, _ = step(scheduler, float(now))
        served = [row.request for row in plan.scheduled]
        assert all(r not in served for r in plan.preempted), "its row is still in the plan"
        victims += plan.preempted
        assert good in served
    assert victims and set(victims) == {worst}
    assert worst.status is RequestStatus.WAITING and worst.block_table == []


def test_swapped_blocks_go_out_and_come_back():
    scheduler = make(
        num_blocks=5, max_num_seqs=4, preemption="swap", num_host_blocks=3,
        enable_prefix_caching=False,
    )  # fmt: skip
    first, second = request("first", prompt=7, output=9), request("second", prompt=5, output=9)
    scheduler.add(first)
    scheduler.add(second)
    seen = []
    for now in range(40):
        before = {r.request_id: list(r.block_table) for r in scheduler.running}
        plan, _ = step(scheduler, float(now))
        if plan.swap_out:
            assert plan.preempted == [second] and second.status is RequestStatus.SWAPPED
            num_blocks = -(-second.num_computed_tokens // 4)
            assert [device for device, _ in plan.swap_out] == before["second"][:num_blocks]
            assert [host for _, host in plan.swap_out] == second.host_block_table
            assert second in scheduler.waiting and second.num_computed_tokens > 0
            computed = second.num_computed_tokens
            seen.append("out")
        if plan.swap_in:
            assert second.status is RequestStatus.RUNNING or second.is_finished
            assert plan.scheduled[-1].num_tokens == 1, "nothing is computed anew"
            assert second.metrics.num_recomputed_tokens == 0
            assert second.num_computed_tokens == computed + 1 or second.is_finished
            seen.append("in")
    assert seen == ["out", "in"]
    assert scheduler.preemption.host.num_free_blocks == 3
    assert first.finish_reason == second.finish_reason == "length"


def test_what_does_not_fit_on_the_host_is_recomputed():
    scheduler = make(num_blocks=5, max_num_seqs=4, preemption="swap", num_host_blocks=1)
    requests = [request("first", prompt=7, output=9), request("second", prompt=5, output=9)]
    _, plans = serve(scheduler, requests)
    assert any(plan.preempted for plan in plans) and not any(p.swap_out for p in plans)
    assert requests[1].metrics.num_recomputed_tokens > 0


def test_swap_alone_has_as_many_host_blocks_as_the_pool():
    """A scheduler that nobody told otherwise; then each victim that has computed can swap."""
    scheduler = make(num_blocks=6, max_num_seqs=4, preemption="swap")
    assert scheduler.preemption.host.num_blocks == 6
    requests = [request("first", prompt=7, output=12), request("second", prompt=5, output=12)]
    _, plans = serve(scheduler, requests)
    assert any(plan.swap_out for plan in plans) and any(plan.swap_in for plan in plans)
    assert all(r.metrics.num_recomputed_tokens == 0 for r in requests)
    assert make(num_blocks=6).config.num_swap_blocks == 0, "nothing is kept without swap"


def test_abort_while_swapped_out_returns_the_host_s_blocks():
    """Invariant 11."""
    scheduler = make(num_blocks=5, max_num_seqs=4, preemption="swap", num_host_blocks=4)
    scheduler.add(request("first", prompt=7, output=9))
    scheduler.add(request("second", prompt=5, output=9))
    now = 0.0
    while scheduler.get("second").status is not RequestStatus.SWAPPED:
        step(scheduler, now)
        now += 1
    assert scheduler.preemption.host.num_free_blocks < 4
    assert scheduler.abort("second")
    assert scheduler.preemption.host.num_free_blocks == 4


def test_copies_of_a_step_that_failed_are_not_trusted():
    scheduler = make(num_blocks=5, max_num_seqs=4, preemption="swap", num_host_blocks=4)
    first, second = request("first", prompt=7, output=9), request("second", prompt=5, output=9)
    scheduler.add(first)
    scheduler.add(second)
    now = 0.0
    while True:
        plan = scheduler.schedule(now)
        if plan.swap_out:
            break  # and the runner raises: no update
        tokens = {row.request.request_id: [1] for row in plan.scheduled if row.samples}
        scheduler.update(plan, tokens, now)
        now += 1
    assert second.status is RequestStatus.SWAPPED
    scheduler.schedule(now)
    assert second.status is RequestStatus.WAITING and second.num_computed_tokens == 0
    assert scheduler.preemption.host.num_free_blocks == 4


def test_whoever_was_aborted_after_a_failed_step_stays_so():
    scheduler = make(num_blocks=5, max_num_seqs=4, preemption="swap", num_host_blocks=4)
    scheduler.add(request("first", prompt=7, output=9))
    scheduler.add(request("second", prompt=5, output=9))
    now, plan = 0.0, scheduler.schedule(0.0)
    while not plan.swap_out:
        tokens = {row.request.request_id: [1] for row in plan.scheduled if row.samples}
        scheduler.update(plan, tokens, now)
        now += 1
        plan = scheduler.schedule(now)
    scheduler.abort("second")  # the step of this plan failed
    plan = scheduler.schedule(now)
    assert [row.request.request_id for row in plan.scheduled] == ["first"]
    assert scheduler.waiting == [] and scheduler.preemption.host.num_free_blocks == 4


def test_recomputed_tokens_are_counted_without_those_found_again():
    """A victim whose blocks are still in the prefix cache loses less."""
    losses = {}
    for caching in (True, False):
        scheduler = make(num_blocks=6, max_num_seqs=4, enable_prefix_caching=caching)
        requests = [request("first", prompt=7, output=9), request("second", prompt=9, output=7)]
        _, plans = serve(scheduler, requests)
        assert sum(len(p.preempted) for p in plans) == 1
        losses[caching] = requests[1].metrics.num_recomputed_tokens
    assert 0 < losses[True] < losses[False]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_recomputed_tokens_are_those_computed_twice(caching, preemption):
    """A request computes each of its tokens but the last once, less the cached beginning of
    its prompt; whatever its turns come to beyond that was lost and computed again."""
    num_recomputed = 0
    for seed in range(8):
        scheduler = make(
            num_blocks=14, max_num_seqs=6, max_num_batched_tokens=12, preemption=preemption,
            num_host_blocks=3, enable_prefix_caching=caching,
        )  # fmt: skip
        requests = crowd(n=12, seed=seed)
        _, plans = serve(scheduler, requests)
        turns = [row for plan in plans for row in plan.scheduled]
        for r in requests:
            num_computed = sum(row.num_tokens for row in turns if row.request is r)
            once = r.num_tokens - 1 - r.num_cached_tokens
            assert r.metrics.num_recomputed_tokens == num_computed - once, (seed, r)
            num_recomputed += num_computed - once
    assert num_recomputed > 50


# ---- static batching -------------------------------------------------------------------


def test_a_static_batch_is_gathered_once_and_drains():
    scheduler = make(batching="static", max_num_seqs=3, max_num_batched_tokens=64)
    requests = [request(f"r{i}", prompt=4, output=n) for i, n in enumerate((2, 5, 3, 4))]
    for r in requests:
        scheduler.add(r)
    rows, padding = [], []
    for now in range(9):
        plan, _ = step(scheduler, float(now))
        rows.append([row.request.request_id for row in plan.scheduled])
        padding.append([r.request_id for r in plan.padding])
        for r in plan.padding:
            assert r.block_table == [], "a finished row gives back its blocks"
    three = ["r0", "r1", "r2"]
    assert rows == [three, three, ["r1", "r2"], ["r1"], ["r1"]] + [["r3"]] * 4
    assert padding[:5] == [[], [], ["r0"], ["r0", "r2"], ["r0", "r2"]] and not any(padding[5:])
    assert scheduler.running == [] and not scheduler.has_unfinished()


def test_a_static_batch_takes_several_steps_to_prefill_and_nobody_joins_later():
    scheduler = make(batching="static", max_num_seqs=3, max_num_batched_tokens=8)
    for i in range(3):
        scheduler.add(request(f"r{i}", prompt=6, output=9))
    plan, _ = step(scheduler, 0.0)
    assert [row.request.request_id for row in plan.scheduled] == ["r0", "r1"]
    scheduler.add(request("late", prompt=2, output=1, arrival=-1.0))
    joined = set()
    for now in range(1, 6):
        plan, _ = step(scheduler, float(now))
        joined |= {row.request.request_id for row in plan.scheduled}
    assert joined == {"r0", "r1", "r2"}, "it was gathered before `late` came"


def test_an_abort_keeps_the_slot_of_a_static_batch_until_it_drains():
    scheduler = make(batching="static", max_num_seqs=2)
    scheduler.add(request("a", output=6))
    scheduler.add(request("b", output=3))
    step(scheduler, 0.0)
    free = scheduler.allocator.num_free_blocks
    assert scheduler.abort("a")
    assert scheduler.allocator.num_free_blocks > free
    plan, _ = step(scheduler, 1.0)
    assert [r.request_id for r in plan.padding] == ["a"]
    scheduler.add(request("a", output=1))  # the id may be used again
    _, done = step(scheduler, 2.0)
    assert done == ["b"] and scheduler.running == []
    _, done = step(scheduler, 3.0)
    assert done == ["a"]


# ---- the budget ------------------------------------------------------------------------


def test_everybody_behind_gets_a_token_when_all_have_several():
    """Invariant 9, where a step samples several tokens of a request (drafts, say)."""
    scheduler = make(max_num_seqs=3, max_num_batched_tokens=12)
    for name in "abc":
        scheduler.add(request(name, prompt=4, output=30))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, {name: [1, 1, 1, 1, 1, 1, 1, 1] for name in "abc"}, 0.0)
    plan = scheduler.schedule(1.0)
    assert [row.num_tokens for row in plan.scheduled] == [8, 3, 1]


@pytest.mark.parametrize("num_free, shares", [(3, [10, 1, 1]), (2, [11, 1]), (1, [12])])
def test_no_token_is_left_for_a_victim(num_free, shares):
    """Invariant 8: a has 12 tokens to compute, and what those behind it do not need is a's."""
    scheduler = make(
        max_num_seqs=3, max_num_batched_tokens=12, num_blocks=8, enable_prefix_caching=False
    )
    for name, prompt in (("a", 4), ("b", 5), ("c", 3)):
        scheduler.add(request(name, prompt=prompt, output=20))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, {"a": [1] * 12, "b": [1], "c": [1]}, 0.0)
    # a needs 3 blocks more, for 10 tokens as for 12. b has 2, c has 1; they need none.
    scheduler.allocator.allocate(scheduler.allocator.num_free_blocks - num_free)
    plan, _ = step(scheduler, 1.0)
    assert [row.num_tokens for row in plan.scheduled] == shares
    assert len(plan.preempted) == 3 - len(shares)


def test_what_a_victim_was_to_compute_goes_to_those_after_it():
    """Fault 16, invariant 8: a chunk is cut by nothing but the budget."""
    scheduler = make(
        policy="priority", max_num_seqs=3, max_num_batched_tokens=10, num_blocks=30,
        enable_prefix_caching=False,
    )  # fmt: skip
    scheduler.add(request("worst", prompt=9, output=20, priority=9))
    step(scheduler, 0.0)
    scheduler.add(request("good", prompt=7, output=20, priority=1))
    scheduler.add(request("long", prompt=40, output=2, priority=2))
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    good, long = scheduler.get("good"), scheduler.get("long")
    assert good.num_computed_tokens == 8, "its next token needs a block"
    kept = scheduler.allocator.allocate(scheduler.allocator.num_free_blocks)
    scheduler.allocator.free(kept[:1]) if long.num_computed_tokens % 4 else None
    plan, _ = step(scheduler, 3.0)
    assert [r.request_id for r in plan.preempted] == ["worst"]
    tokens = {row.request.request_id: row.num_tokens for row in plan.scheduled}
    assert tokens == {"good": 1, "long": 9}, "the whole budget of 10"


# ---- what is refused -------------------------------------------------------------------


def test_a_pool_that_is_not_the_config_s_is_refused():
    config = EngineConfig(num_blocks=10, block_size=4, max_num_seqs=2)
    with pytest.raises(ValueError, match="the allocator has 9 blocks of 4; config.num_blocks"):
        Scheduler(config, BlockAllocator(9, 4))


def test_a_request_that_was_served_is_no_new_one():
    scheduler = make()
    r = request("a", output=1)
    serve(scheduler, [r])
    with pytest.raises(ValueError, match="was added before; make a new Request"):
        scheduler.add(r)


def test_a_row_that_samples_needs_a_token():
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="token_ids has no token for request 'a'"):
        scheduler.update(plan, {}, 0.0)
    assert scheduler.get("a").num_computed_tokens == 0


def test_fcfs_is_a_policy_like_any_other():
    early, late = request("early", arrival=1.0), request("late", arrival=2.0)
    assert FCFS().key(early, 9.0) < FCFS().key(late, 9.0)


def test_a_rule_says_how_many_blocks_it_counts():
    from nanobatch.policies.admission import _CountsBlocks

    with pytest.raises(NotImplementedError):
        _CountsBlocks(BlockAllocator(1, 1)).num_blocks(request("a"))
