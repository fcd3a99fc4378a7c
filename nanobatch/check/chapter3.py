"""Checks of notebooks/03_iteration_level_scheduling.ipynb.

    ex3_1   tokens that a running request gets in a step
    ex3_2   a policy with aging
    ex3_3   blocks that a request needs until its end

The right values come from the scheduling formula (3.1), from the package's scheduler with a
plain reference policy (3.2), and from the admission rule Reserve (3.3).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nanobatch.block_allocator import BlockAllocator
from nanobatch.check.compare import call, expect, right, show
from nanobatch.config import EngineConfig
from nanobatch.policies.admission import Reserve
from nanobatch.policies.ordering import Policy
from nanobatch.request import Request, SamplingParams
from nanobatch.scheduler import Scheduler

Job = tuple[str, int, int, int]  # name, arrival in seconds, prompt tokens, max_tokens


def ex3_1(answer: Callable[[int, int, int, int], int]) -> None:
    """num_scheduled(num_tokens, num_computed_tokens, budget_left, num_behind) -> tokens that a
    running request gets in this step, when one token is kept for each of those behind it."""
    cases = [
        (13, 12, 100, 0),  # a decode, no request behind it
        (13, 12, 5, 4),  # a decode that just fits
        (400, 0, 512, 0),  # a whole prompt
        (400, 0, 400, 0),
        (400, 0, 400, 1),  # one token too many: one request is behind
        (400, 399, 8, 7),
        (900, 256, 512, 3),  # a chunk in the middle
        (900, 256, 512, 100),
        (900, 640, 512, 100),  # fewer tokens left than budget
        (17, 12, 6, 5),  # drafts to verify, budget for one token of this request
        (17, 12, 8, 5),
        (17, 12, 50, 5),
    ]
    for case in cases:
        num_tokens, num_computed, budget_left, num_behind = case
        found = call(answer, *case)
        expect(found, min(num_tokens - num_computed, budget_left - num_behind), *case)
    right("ex3_1")


class _Aging:
    """Tokens left, less rate times the seconds waited."""

    def __init__(self, rate: float):
        self.rate = rate

    def key(self, request: Request, now: float) -> float:
        num_output_left = request.max_tokens - len(request.output_token_ids)
        num_left = request.num_uncomputed_tokens + num_output_left
        return num_left - self.rate * (now - request.arrival_time)


def admission_order(policy: Policy, jobs: Sequence[Job]) -> list[str]:
    """The order in which jobs enter a batch of one slot; see admission_times."""
    return list(admission_times(policy, jobs))


def admission_times(policy: Policy, jobs: Sequence[Job]) -> dict[str, int]:
    """When each job enters a batch of one slot, in that order; a step takes one second.

    Args:
        policy: decides which request is next.
        jobs: (name, arrival in seconds, prompt tokens, max_tokens), in order of arrival.
    """
    config = EngineConfig(
        num_blocks=1000, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False
    )
    scheduler = Scheduler(config, BlockAllocator(1000, 16, False), policy)
    coming = list(jobs)
    times: dict[str, int] = {}
    now = 0
    while coming or scheduler.has_unfinished():
        while coming and coming[0][1] <= now:
            name, arrival, num_prompt, max_tokens = coming.pop(0)
            params = SamplingParams(max_tokens=max_tokens)
            scheduler.add(Request(name, [1] * num_prompt, params, arrival_time=float(arrival)))
        plan = scheduler.schedule(float(now))
        for row in plan.scheduled:
            times.setdefault(row.request.request_id, now)
        sampled = {row.request.request_id: [1] for row in plan.scheduled if row.samples}
        now += 1
        scheduler.update(plan, sampled, float(now))
    return times


def _jobs_by_hand() -> list[tuple[float, list[Job]]]:
    shorts = [(f"short at {t}", t, 4, 6) for t in range(0, 120, 6)]
    long_first: list[Job] = sorted([("long", 0, 100, 40), *shorts], key=lambda job: job[1])
    at_once: list[Job] = [("middle", 0, 20, 10), ("long", 0, 50, 10), ("short", 0, 5, 5)]
    by_prompt: list[Job] = [("first", 0, 5, 5), ("prompt", 0, 90, 2), ("output", 0, 2, 20)]
    return [
        (0.0, at_once),  # no aging: the shortest first
        (1.0, by_prompt),  # a long prompt is work too
        (0.0, long_first),  # the long one is last
        (2.0, long_first),  # it goes before short ones that came more than 65 s later
        (50.0, long_first),  # it goes early
    ]


def ex3_2(answer: type) -> None:
    """A policy class, made by AgingSJF(rate), with key(request, now): the tokens left to do
    (uncomputed ones, and output still to come up to request.max_tokens) less rate (tokens per
    second) times the seconds since the request arrived. The smallest key enters next."""
    cases = _jobs_by_hand()
    rng = random.Random(3)
    for rate in (0.5, 4.0, 16.0):
        arrivals = sorted(rng.randint(0, 20) for _ in range(12))
        cases.append(
            (rate, [(f"j{i}", t, rng.randint(1, 99), 9) for i, t in enumerate(arrivals)])
        )
    for rate, jobs in cases:
        policy = call(answer, rate)
        has_key = callable(getattr(policy, "key", None))
        assert has_key, f"for {show(rate)} it gives {policy!r}, which has no method key"
        found = call(lambda rate, jobs, p=policy: admission_times(p, jobs), rate, jobs)
        wanted = admission_times(_Aging(rate), jobs)
        if list(found) != list(wanted):
            _say_difference(rate, jobs, found, wanted)
    right("ex3_2")


def _say_difference(
    rate: float, jobs: Sequence[Job], found: dict[str, int], wanted: dict[str, int]
) -> None:
    """AssertionError that names the first place where the two orders differ."""
    pairs = zip(found, wanted, strict=True)
    place, pair = next((i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    now = wanted[pair[1]]  # equal in both: the orders agree up to here
    by_name = {job[0]: job for job in jobs}
    waits = "; ".join(
        f"{name!r} (prompt {num_prompt}, max_tokens {max_tokens}) has waited {now - arrival} s"
        for name, arrival, num_prompt, max_tokens in map(by_name.__getitem__, pair)
    )
    raise AssertionError(
        f"for rate={rate} and one slot it gives {pair[0]!r} place {place}; right is "
        f"{pair[1]!r}. By then {waits}"
    )


def ex3_3(answer: Callable[[int, int, int], int]) -> None:
    """reserve_blocks(num_prompt, max_tokens, block_size) -> blocks for all tokens of a
    request that are ever computed. Its last token never is."""
    cases = [
        (10, 6, 16),
        (10, 7, 16),  # 17 tokens, 16 computed: one block
        (10, 8, 16),  # 17 computed: two
        (1, 1, 16),
        (16, 1, 16),
        (17, 1, 16),
        (1, 1, 1),
        (5, 3, 1),  # blocks of one token: as many as are computed
        (600, 1024, 16),
        (33, 64, 32),
        (33, 65, 32),
        (7, 100, 24),
    ]
    for case in cases:
        num_prompt, max_tokens, block_size = case
        request = Request("r0", [1] * num_prompt, SamplingParams(max_tokens=max_tokens))
        wanted = Reserve(BlockAllocator(1, block_size)).num_blocks(request)
        expect(call(answer, *case), wanted, *case)
    right("ex3_3")
