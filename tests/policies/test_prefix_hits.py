"""What sjf reads of the prefix cache: always what a lookup of everybody would find, and cheap.

The oracle is BlockAllocator.match_prefix for each waiting request, when the policy is asked for
its key. The cost is counted in blocks that are hashed, not in seconds.
"""

from random import Random

import pytest

from nanobatch import BlockAllocator, EngineConfig, Request, SamplingParams, Scheduler
from nanobatch.policies.ordering import SJF

SALTS = (None, "", "a")


class Checked(SJF):
    """SJF that compares each request's hit with a lookup of its own."""

    def __init__(self, allocator):
        super().__init__()
        self.allocator = allocator
        self.num_hits = self.num_checked = 0

    def key(self, request, now):
        found = self.allocator.match_prefix(request.token_ids, request.cache_salt)
        expected = 0 if request.num_computed_tokens else len(found)
        assert request.num_hit_tokens == expected * self.allocator.block_size, request
        self.num_hits += expected > 0
        self.num_checked += 1
        return super().key(request, now)


def make_scheduler(block_size, num_blocks, policy, **knobs):
    allocator = BlockAllocator(num_blocks, block_size)
    config = EngineConfig(block_size=block_size, num_blocks=num_blocks, policy="sjf", **knobs)
    scheduler = Scheduler(config, allocator, policy and policy(allocator))
    return scheduler, allocator


def random_trace(seed):
    """Arrivals, aborts, failed steps and preemptions; the prompts are of two tokens, so that
    prefixes meet. Returns how many keys were checked, and how many of them had a hit."""
    random = Random(seed)
    block_size, seats = random.choice((1, 2, 3)), random.choice((2, 3, 4))
    swap = {"preemption": "swap", "num_host_blocks": 6} if random.random() < 0.4 else {}
    scheduler, allocator = make_scheduler(
        block_size,
        random.randrange(12, 20) // block_size + 1,
        Checked,
        max_num_seqs=seats,
        max_num_batched_tokens=random.choice((4, 8, 40)),
        **swap,
    )
    added = 0
    for step in range(60):
        for _ in range(random.choice((0, 0, 1, 2))):
            prompt = random.choices((0, 1), k=random.randrange(1, 9))
            params = SamplingParams(max_tokens=random.randrange(1, 9))
            salt = random.choice(SALTS)
            scheduler.add(
                Request(str(added), prompt, params, arrival_time=step, cache_salt=salt)
            )
            added += 1
        if random.random() < 0.1 and scheduler.waiting:
            scheduler.abort(random.choice(scheduler.waiting).request_id)
        plan = scheduler.schedule(step)
        if random.random() < 0.1:
            continue  # the step failed
        tokens = {e.request.request_id: [random.randrange(2)] for e in plan.scheduled}
        scheduler.update(plan, tokens, step)
        allocator.check_invariants()
    return scheduler.policy.num_checked, scheduler.policy.num_hits


def test_hits_are_those_of_a_lookup_of_everybody():
    counts = [random_trace(seed) for seed in range(60)]
    num_checked, num_hits = (sum(column) for column in zip(*counts, strict=True))
    assert num_checked > 5000 and num_hits > 1000


@pytest.mark.slow
def test_hits_on_many_traces():
    for seed in range(60, 5000):
        random_trace(seed)


class Counted(list):
    """Tokens that count how many blocks are read of them."""

    num_read = 0

    def __getitem__(self, index):
        if isinstance(index, slice) and index.stop is not None and index.start is not None:
            Counted.num_read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("num_waiting", [20, 200])
def test_a_step_hashes_only_what_has_changed(num_waiting):
    """Two requests decode while others wait whose prompts begin alike: each step fills a block,
    takes a block, and looks up nobody. An arrival, and a prefix that comes, are looked up."""
    scheduler, _ = make_scheduler(2, 40, None, max_num_seqs=3, max_num_batched_tokens=500)
    long = SamplingParams(max_tokens=18)
    for i in range(2):
        scheduler.add(Request(f"running-{i}", [i, 1, 2, 3, 4], long))
    blocker = Request("too long for now", [9] * 74, SamplingParams(max_tokens=1))
    scheduler.add(blocker)

    def step():
        Counted.num_read = 0
        plan = scheduler.schedule(0.0)
        tokens = {e.request.request_id: [7] for e in plan.scheduled}
        scheduler.update(plan, tokens, 0.0)
        return Counted.num_read

    step()
    # Longer by their max_tokens than the blocker, which does not fit yet and holds them up.
    for i in range(num_waiting):
        request = Request(str(i), [9] * 30 + [i], SamplingParams(max_tokens=60))
        request.token_ids = Counted(request.token_ids)
        scheduler.add(request)
    arrived, *later = [step() for _ in range(10)]
    assert blocker in scheduler.waiting and len(scheduler.running) == 2
    assert num_waiting <= arrived <= 2 * num_waiting
    assert later == [0] * 9
