"""The shadow cache: random traces in which every slot remembers what was written to it.

No model runs here. A trace drives Scheduler and BlockAllocator with made-up tokens: arrivals
with shared prefixes, aborts at any moment, failed steps, tiny pools. Beside them stands a
shadow of the KV cache. In the real cache a slot holds keys and values that depend on every
token before it; in the shadow it holds just that, the name of the whole prefix it was
computed from (salt included):

    request     salt None, tokens  5  5  6           names   1  2  3
    table [7]   shadow[7]  =  [ 1, 2, 3, None ]      name 3 stands for (None, (5, 5, 6))

In each step, before any of its writes, everything the step reads must hold the request's own
prefix; then all of its writes are applied at once, as a GPU may do them in any order. So a
block that is found too early, too late or under the wrong name shows at once, and so do two
requests that write to one slot.

Invariants 1 to 11 are checked in every step, each by the function that carries its number.
Invariant 10 is checked by making the next token a function of all tokens before it: the
output of a request must be what it is when the request runs alone. Swapped blocks go to a
shadow of the host's memory and come back from it.

Half of the traces run the engine's defaults. The others take any policy, admission rule,
preemption, batching and max_wait, all mixed.

The checks are checked too: with invariant 3, 4, 5 or 6 broken on purpose, the traces must
say so (at the end of this file).
"""

import zlib
from dataclasses import replace
from random import Random

import pytest

from nanobatch import (
    BlockAllocator,
    EngineConfig,
    OutOfBlocks,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
)
from nanobatch.config import ADMISSIONS, BATCHING, POLICIES, PREEMPTIONS

NUM_TRACES = 2000
TRACES_IN_A_TEST = 500
EOS, STOP = 2, 3  # text is made of the tokens 0 and 1: prefixes meet all the time


# ---- the shadow ------------------------------------------------------------------------


class PrefixNames:
    """Gives every (salt, tokens) a number of its own: equal names are equal prefixes."""

    def __init__(self):
        self.numbers = {}

    def extend(self, names, salt, tokens):
        """names of the first tokens -> names of all of them, in place."""
        for i in range(len(names), len(tokens)):
            parent = names[i - 1] if i else ("salt", salt)
            names.append(self.numbers.setdefault((parent, tokens[i]), len(self.numbers)))


class WatchedAllocator:
    """An allocator under watch: hands every call on, and checks the answers.

    It keeps its own list of free blocks, in the order in which they must be reused, and its
    own counts. The allocator inside may be a broken one: that is for the watch to find out.
    """

    def __init__(self, inner):
        self.inner = inner
        self.never_used = set(range(inner.num_blocks))
        self.freed = []  # least recently freed first
        self.counts = [0] * inner.num_blocks
        self.tables = []  # of the running requests, as they were last seen

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def allocate(self, n):
        try:
            blocks = self.inner.allocate(n)
        except OutOfBlocks:
            assert n > len(self.never_used) + len(self.freed), "2: refused though there is room"
            check_invariant_2(self)
            raise
        check_invariant_6(self, blocks)
        for block in blocks:
            self.leave_free_list(block)
            self.counts[block] += 1
        return blocks

    def acquire(self, blocks):
        self.inner.acquire(blocks)
        for block in blocks:
            if self.counts[block] == 0:
                self.leave_free_list(block)
            self.counts[block] += 1

    def free(self, blocks):
        head_first = not blocks or any(blocks[: len(table)] == table for table in self.tables)
        is_tail = any(table[-len(blocks) :] == blocks for table in self.tables)  # of drafts
        assert head_first or is_tail, (
            f"6: freed {blocks}, not a table head first: {self.tables}"
        )
        self.inner.free(blocks)
        for block in reversed(blocks):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.freed.append(block)

    def leave_free_list(self, block):
        if block in self.never_used:
            self.never_used.remove(block)
        else:
            self.freed.remove(block)


# ---- the invariants --------------------------------------------------------------------


def check_invariant_1(scheduler, allocator):
    """Each block is free or in use; its count is the number of tables that hold it."""
    expected = [0] * allocator.num_blocks
    for request in scheduler.running:
        for block in request.block_table:
            expected[block] += 1
    on_host = []
    for request in scheduler.waiting:
        is_swapped = request.status is RequestStatus.SWAPPED
        holds_nothing = not request.block_table and request.num_computed_tokens == 0
        assert holds_nothing or is_swapped, f"1: {request} waits with {request.block_table}"
        num_blocks = -(-request.num_computed_tokens // allocator.block_size)
        assert len(request.host_block_table) == num_blocks * is_swapped, f"1: {request} on host"
        on_host += request.host_block_table
    assert len(set(on_host)) == len(on_host), f"1: a host block twice: {on_host}"
    host = getattr(scheduler.preemption, "host", None)
    if host is not None:
        num_used = host.num_blocks - host.num_free_blocks
        assert num_used == len(on_host), f"1: {num_used} host blocks used, {on_host} held"
    counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
    assert counts == expected, f"1: ref counts {counts}, but tables hold {expected}"
    free = allocator.num_free_blocks
    assert free == expected.count(0), f"1: {free} blocks free, but {expected.count(0)} unused"


def check_invariant_2(allocator):
    """After a refused call everything is as it was."""
    free = len(allocator.never_used) + len(allocator.freed)
    assert allocator.num_free_blocks == free, "2: a refused call changed the free count"
    counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
    assert counts == allocator.counts, "2: a refused call changed a ref count"


def try_what_is_refused(allocator, rng):
    """Ask for too much, and free what must not be freed."""
    with pytest.raises(OutOfBlocks):
        allocator.allocate(allocator.num_free_blocks + 1)
    tables = [table for table in allocator.tables if table]
    table = rng.choice(tables) if tables else []
    extra = rng.choice([*allocator.never_used, *allocator.freed, *table])
    with pytest.raises(ValueError):
        allocator.inner.free([*table, extra])
    check_invariant_2(allocator)


def check_invariant_3(shadow, allocator, live):
    """What is found holds exactly these tokens after exactly this prefix, with this salt."""
    for block, own in found_blocks(allocator, live):
        held = shadow[block]
        assert held == own, f"3: block {block} is found for {own}, but holds {held}"


def check_invariant_4(plan, lives, allocator, block_size):
    """No block is findable in the step that writes it."""
    for item in plan.scheduled:
        live = lives[item.request.request_id]
        written = item.request.block_table[item.request.num_computed_tokens // block_size :]
        findable = {block for block, _ in found_blocks(allocator, live)}
        early = findable & set(written)
        assert not early, f"4: blocks {early} are found before {item.request} is computed"


def check_invariant_5(allocator, request):
    """A match leaves at least one token to compute."""
    found = allocator.match_prefix(request.token_ids, request.cache_salt)
    covered = len(found) * allocator.block_size
    assert covered < request.num_tokens, f"5: {covered} of {request.num_tokens} matched"


def check_invariant_6(allocator, blocks):
    """Handed out: never-used blocks, then the least recently freed (tails before heads)."""
    num_fresh = min(len(blocks), len(allocator.never_used))
    expected = set(allocator.freed[: len(blocks) - num_fresh])
    assert set(blocks) - allocator.never_used == expected, (
        f"6: handed out {blocks}; never used {allocator.never_used}, freed {allocator.freed}"
    )


def check_invariant_7(plan, scheduler, config):
    """The budget and the seats."""
    total = sum(item.num_tokens for item in plan.scheduled)
    assert plan.num_tokens == total <= config.max_num_batched_tokens, f"7: {total} tokens"
    assert len(scheduler.running) <= config.max_num_seqs, f"7: {len(scheduler.running)} run"


def check_invariant_8(plan, config):
    """A step does something; a chunk is cut by nothing but the budget."""
    assert plan.scheduled, "8: an empty plan, and the scheduler is not idle"
    for item in plan.scheduled:
        left = item.request.num_tokens - item.request.num_computed_tokens
        num_known = item.num_tokens - len(item.draft_token_ids)
        assert 1 <= num_known <= left, f"8: {num_known} of {left} for {item.request}"
        is_cut = num_known < left
        assert not (is_cut and item.draft_token_ids), "8: drafts for a chunk"
        most = item.request.max_total_tokens - item.request.num_tokens - 1
        assert len(item.draft_token_ids) <= max(0, most), "8: a token nobody will ask for"
        assert not is_cut or plan.num_tokens == config.max_num_batched_tokens, (
            f"8: {item.request} got {item.num_tokens} of {left}, {plan.num_tokens} in all"
        )
        may_cut = config.enable_chunked_prefill or item.request.output_token_ids
        assert may_cut or not is_cut, "8: a chunk, though chunked prefill is off"


def check_invariant_9(plan, scheduler, config, before, order):
    """The running first, each with a token; then the next in line, nobody past another.

    before: `running` and its rows that had not finished, before the step. order: who waited
    then and may enter, next one first.
    """
    running, alive = before
    gone = plan.preempted
    stays = [request for request in alive if request not in gone]
    assert len(stays) + len(gone) == len(alive), f"9: {gone} preempted, {alive} ran"
    if config.policy == "priority":
        worst_kept = max((rank(request) for request in stays), default=None)
        is_right = not gone or not stays or min(map(rank, gone)) > worst_kept
    else:
        is_right = sorted(map(id, gone)) == sorted(map(id, alive[len(stays) :]))
    assert is_right, f"9: {gone} preempted of {alive}"
    served = [item.request for item in plan.scheduled]
    assert served[: len(stays)] == stays, f"9: {stays} run, served are {served}"
    admitted = served[len(stays) :]
    assert admitted == order[: len(admitted)], f"9: {admitted} admitted, of {order}"
    assert not (admitted and gone), "9: admitted in a step that preempted"
    padding = [request for request in running if request not in alive and stays]
    assert plan.padding == padding, f"9: {plan.padding} keep their slots, not {padding}"
    kept = [request for request in running if request in stays or request in padding]
    assert scheduler.running == kept + admitted, "9: `running` is in order of admission"
    assert scheduler.waiting == sorted(scheduler.waiting, key=lambda r: r.arrival_time)
    never_preempts = config.admission == "reserve"
    assert not (never_preempts and gone), f"9: {gone} preempted under reserve"


def rank(request):
    """Under "priority": whose blocks go first is the largest."""
    return request.priority, request.arrival_time, request.arrival_order


def line_up(scheduler, config, now):
    """Who waits, next one first, as ordering.py promises (for sjf without its hits)."""

    def place(request):
        is_overdue = (
            config.max_wait is not None and now - request.arrival_time >= config.max_wait
        )
        key = {
            "fcfs": 0,
            "priority": request.priority,
            "sjf": request.num_tokens
            - request.num_computed_tokens
            + request.max_tokens
            - len(request.output_token_ids),
        }[config.policy]
        return not is_overdue, 0 if is_overdue else key, request.arrival_time

    return sorted(scheduler.waiting, key=lambda r: (*place(r), r.arrival_order))


def check_invariant_10(live):
    """The output is that of a request that runs alone, never preempted."""
    request = live.request
    got = request.output_token_ids, request.finish_reason
    assert got == live.expected, f"10: {request} gave {got}, alone it gives {live.expected}"
    assert request.token_ids == request.prompt_token_ids + request.output_token_ids


def check_invariant_11(live):
    """An aborted request holds nothing, and what it had put out is a part of the whole."""
    request = live.request
    assert request.status is RequestStatus.FINISHED and request.finish_reason == "abort"
    assert request.block_table == [], f"11: aborted with {request.block_table}"
    output = request.output_token_ids
    assert output == live.expected[0][: len(output)], "11: a token came after the abort"


# What the numbered invariants rest on, and what the design says beside them.


def check_reads(plan, lives, shadow, block_size):
    """What a step reads from earlier steps is the request's own prefix (3, 4, 12, 14)."""
    for item in plan.scheduled:
        request, own = item.request, lives[item.request.request_id].names
        for start in range(0, request.num_computed_tokens, block_size):
            block = request.block_table[start // block_size]
            end = min(start + block_size, request.num_computed_tokens)
            held = shadow[block][: end - start]
            assert held == own[start:end], f"3/4: {request} reads {held} for {own[start:end]}"


def apply_writes(plan, names, shadow, allocator, block_size):
    """All of a step's writes; nobody writes where another does, or to what is shared (1, 4).

    names: by request id, of all tokens known, and of its drafts.
    """
    written = set()
    for item in plan.scheduled:
        request, own = item.request, names[item.request.request_id]
        start = request.num_computed_tokens
        needed = -(-(start + item.num_tokens) // block_size)
        assert len(request.block_table) == needed, (
            f"1: room for {needed}: {request.block_table}"
        )
        for position in range(start, start + item.num_tokens):
            block, offset = request.block_table[position // block_size], position % block_size
            assert (block, offset) not in written, f"1: two requests write to block {block}"
            written.add((block, offset))
            count = allocator.ref_count(block)
            assert count == 1, f"4: {request} writes to block {block}, held by {count}"
            shadow[block][offset] = own[position]


def num_known_tokens(plan):
    """Tokens of a plan that are no drafts: those take what is left."""
    return plan.num_tokens - sum(len(item.draft_token_ids) for item in plan.scheduled)


def check_lookahead(plan, just_admitted):
    """Nobody is admitted only to be preempted in the very next step."""
    at_once = [request for request in plan.preempted if request in just_admitted]
    assert not at_once, f"9: {at_once} preempted right after admission"


def waits_for_budget(request, budget_left, allocator, config):
    """Whether the budget that is left is too small for a waiting request to start."""
    if config.enable_chunked_prefill or request.output_token_ids:
        return budget_left == 0
    found = allocator.match_prefix(request.token_ids, request.cache_salt)
    return budget_left < request.num_tokens - len(found) * config.block_size


def check_not_timid(plan, scheduler, allocator, config, order):
    """The head of the queue enters if all that run could go on in the next step, it too.

    order: who waited and may enter; nobody, once a static batch is closed.
    """
    left = [request for request in order if request not in scheduler.running]
    if plan.preempted or not left or len(scheduler.running) == config.max_num_seqs:
        return
    head = left[0]
    budget_left = config.max_num_batched_tokens - num_known_tokens(plan)
    if waits_for_budget(head, budget_left, allocator, config):
        return
    everyone = [*(r for r in scheduler.running if not r.is_finished), head]
    in_next_step = sum(-(-(r.num_tokens + 1) // config.block_size) for r in everyone)
    assert in_next_step > allocator.num_blocks, f"9: {head} does not enter, though it may"


# ---- a trace ---------------------------------------------------------------------------


def sample(tokens):
    """The made-up model: the next token hangs on all tokens before it."""
    dice = zlib.crc32(bytes(tokens)) % 32
    return dice if dice in (EOS, STOP) else dice % 2


def alone(request, limit):
    """Output and finish reason of a request that has the machine to itself."""
    params, tokens = request.params, list(request.prompt_token_ids)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    max_tokens = min(params.max_tokens, limit - len(tokens))
    output = []
    while True:
        output.append(sample(tokens))
        tokens.append(output[-1])
        if len(output) > params.min_tokens and output[-1] in stops:
            return output, "stop"
        if len(output) == max_tokens:
            return output, "length"


class Live:
    """A request in the trace, the names of its prefixes, and how it must end."""

    def __init__(self, request, limit):
        self.request = request
        self.names = []
        self.expected = alone(request, limit)


def found_blocks(allocator, live):
    """(block, names it must hold) for all that is found of a request's tokens."""
    size = allocator.block_size
    # One token more, so that the last full block may be found as well.
    found = allocator.match_prefix([*live.request.token_ids, 0], live.request.cache_salt)
    num_full = len(live.names) // size
    own = [live.names[i * size : (i + 1) * size] for i in range(num_full)]
    return list(zip(found, own, strict=False))


class Trace:
    """One random trace. `run` raises AssertionError, led by an invariant's number."""

    def __init__(
        self,
        seed,
        allocator_class=BlockAllocator,
        scheduler_class=Scheduler,
        is_wide=False,
        has_drafts=False,
    ):
        self.rng = rng = Random(seed)
        self.block_size = rng.randint(1, 5)
        num_blocks = max(2, rng.randint(6, 40) // self.block_size)
        seats = rng.randint(1, 6)
        budget = rng.randint(max(seats, 2), 12)
        chunked = rng.random() < 0.7
        longest = rng.choice([None, 10, 25] if chunked else [None, rng.randint(2, budget)])
        enable_prefix_caching = rng.random() < 0.8
        wide = {}
        if is_wide:
            wide = {
                "policy": rng.choice(POLICIES),
                "admission": rng.choice(ADMISSIONS),
                "preemption": rng.choice(PREEMPTIONS),
                "batching": rng.choice([*BATCHING, "continuous"]),
                "max_wait": rng.choice([None, 2.0, 9.0]),
                "num_host_blocks": rng.randint(1, num_blocks),
            }
            if wide["policy"] == "sjf":  # its order by hits has tests of its own
                enable_prefix_caching = False
        if has_drafts:
            wide |= {
                "speculative": "ngram",
                "num_speculative_tokens": rng.randint(1, 6),
                "prompt_lookup_max": rng.randint(1, 4),
                "prompt_lookup_min": 1,
            }
        self.config = EngineConfig(
            **wide,
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_model_len=longest,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=enable_prefix_caching,
        )
        slots = num_blocks * self.block_size
        self.limit = min(slots, longest or slots)
        # A prompt that needs one step is often as long as the budget, and at times too long.
        self.longest_prompt = self.limit if chunked else min(self.limit, budget + 1)
        inner = allocator_class(num_blocks, self.block_size, self.config.enable_prefix_caching)
        self.allocator = WatchedAllocator(inner)
        self.scheduler = scheduler_class(self.config, self.allocator)
        self.shadow = [[None] * self.block_size for _ in range(num_blocks)]
        self.host_shadow = [[None] * self.block_size for _ in range(num_blocks)]
        self.names = PrefixNames()
        self.lives = {}  # id -> Live, of those not ended
        self.now = 0.0
        self.just_admitted = []
        self.has_failed = False
        self.batch = []  # who may still join a static batch
        self.steps_left = 0  # raised by what each arrival may cost
        self.num_added = 0
        self.prompts = [self.random_tokens(rng.randint(1, self.limit)) for _ in range(2)]
        self.seen = {"preempted": 0, "hits": 0, "finished": 0, "aborted": 0, "failed": 0}
        if is_wide:
            self.seen |= {"swapped out": 0, "swapped in": 0, "padding": 0}
        if has_drafts:
            self.seen |= {"accepted": 0, "rejected": 0}

    # -- what comes from outside

    def random_tokens(self, n):
        return [self.rng.randint(0, 1) for _ in range(n)]

    def random_request(self):
        """A prompt that often starts like another one, so that prefixes meet."""
        rng = self.rng
        start = rng.choice(self.prompts)
        prompt = start[: rng.randint(0, len(start))] + self.random_tokens(rng.randint(0, 3))
        self.prompts.append(prompt)
        max_tokens = rng.choice([1, 3, 8, 20])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([(), (), (STOP,), (EOS, STOP)]),
        )
        return Request(
            f"r{rng.randint(0, 9)}",  # ids are used again and again
            prompt[: self.longest_prompt] or [0],
            params,
            arrival_time=self.now - rng.choice([0, 0, 0, 3]),
            priority=rng.randint(0, 2),
            cache_salt=rng.choice([None, None, None, "", "a"]),
            eos_token_ids=(EOS,),
        )

    def arrive(self):
        """Add a request; it is refused exactly when it can never fit or its id lives."""
        request = self.random_request()
        num_prompt = len(request.prompt_token_ids)
        is_too_long = num_prompt + 1 > self.limit
        if not self.config.enable_chunked_prefill:
            is_too_long |= num_prompt > self.config.max_num_batched_tokens
        if is_too_long or request.request_id in self.lives:
            with pytest.raises(ValueError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        live = Live(request, self.limit)
        self.lives[request.request_id] = live
        self.names.extend(live.names, request.cache_salt, request.token_ids)
        self.num_added += 1
        # The first in `running` is never preempted and has a token in every step, so each
        # request costs at most as many steps as it can have tokens.
        # (Under "priority" that one may have to give way to a better one, and start anew.)
        may_start_anew = 10 if self.config.policy == "priority" else 1
        self.steps_left += may_start_anew * (num_prompt + len(live.expected[0]))

    def abort(self):
        request_id = self.rng.choice([*self.lives, "nobody"])
        is_alive = request_id in self.lives
        self.watch_tables()
        assert self.scheduler.abort(request_id) is is_alive
        if is_alive:
            self.seen["aborted"] += 1
            check_invariant_11(self.lives.pop(request_id))
        check_invariant_1(self.scheduler, self.allocator)

    def disturb(self, probability):
        while self.rng.random() < probability:
            if self.rng.random() < 0.15:
                self.abort()
            else:
                self.arrive()

    # -- one step

    def watch_tables(self):
        self.allocator.tables = [list(r.block_table) for r in self.scheduler.running]

    def schedule(self):
        """Plan a step and check the plan; nothing is written yet."""
        scheduler, allocator = self.scheduler, self.allocator
        if self.has_failed:  # whose copies were lost comes back to be computed anew
            for request in scheduler.preemption.begin_step():
                scheduler._requeue(request)
        before = (
            list(scheduler.running),
            [request for request in scheduler.running if not request.is_finished],
        )
        order = line_up(scheduler, self.config, self.now)
        if self.config.batching == "static":
            if not scheduler.running:
                self.batch = list(order)
            order = [request for request in order if request in self.batch]
        for request in scheduler.waiting:
            check_invariant_5(allocator, request)
        self.watch_tables()
        plan = scheduler.schedule(self.now)
        self.watch_tables()
        check_invariant_1(scheduler, allocator)
        check_invariant_7(plan, scheduler, self.config)
        check_invariant_8(plan, self.config)
        check_invariant_9(plan, scheduler, self.config, before, order)
        self.close_batch(plan, order)
        check_invariant_4(plan, self.lives, allocator, self.block_size)
        if self.config.admission == "on_demand":
            check_lookahead(plan, self.just_admitted)
            check_not_timid(plan, scheduler, allocator, self.config, order)
        admitted = [r for r in scheduler.running if r not in before[0]]
        self.seen["preempted"] += len(plan.preempted)
        for name, things in (
            ("swapped out", plan.swap_out),
            ("swapped in", plan.swap_in),
            ("padding", plan.padding),
        ):
            assert name in self.seen or not things, f"{name}: {things}"
            if things:
                self.seen[name] += len(things)
        self.seen["hits"] += sum(r.num_computed_tokens > 0 for r in admitted)
        return plan, admitted

    def close_batch(self, plan, order):
        """A static batch waits for nothing but the budget."""
        budget_left = self.config.max_num_batched_tokens - num_known_tokens(plan)
        left = [request for request in order if request not in self.scheduler.running]
        is_open = left and waits_for_budget(left[0], budget_left, self.allocator, self.config)
        if plan.preempted or not is_open:
            self.batch = []

    def compute(self, plan):
        """The model's part: copies, then reads, then writes, then a token for whoever is
        complete."""
        for block, host_block in plan.swap_out:
            self.host_shadow[host_block] = list(self.shadow[block])
        for host_block, block in plan.swap_in:
            self.shadow[block] = list(self.host_shadow[host_block])
        check_reads(plan, self.lives, self.shadow, self.block_size)
        names = {request_id: list(live.names) for request_id, live in self.lives.items()}
        for item in plan.scheduled:
            request = item.request
            tokens = [*request.token_ids, *item.draft_token_ids]
            self.names.extend(names[request.request_id], request.cache_salt, tokens)
        apply_writes(plan, names, self.shadow, self.allocator, self.block_size)
        return {
            item.request.request_id: self.check_draft(item)
            for item in plan.scheduled
            if item.request.num_computed_tokens + item.num_tokens
            == item.request.num_tokens + len(item.draft_token_ids)
        }

    def check_draft(self, item):
        """What is sampled behind a row's tokens, while it is what the draft said, and one."""
        tokens, sampled = list(item.request.token_ids), []
        for draft in (*item.draft_token_ids, None):
            sampled.append(sample(tokens))
            tokens.append(sampled[-1])
            if sampled[-1] != draft:
                break
        if item.draft_token_ids:
            self.seen["accepted"] += len(sampled) - 1
            self.seen["rejected"] += len(item.draft_token_ids) - (len(sampled) - 1)
        return sampled

    def update(self, plan, token_ids):
        scheduled = [item.request for item in plan.scheduled]
        self.watch_tables()
        finished = self.scheduler.update(plan, token_ids, self.now)
        assert all(request in scheduled for request in finished)
        for request in finished:
            live = self.lives.pop(request.request_id)
            assert live.request is request, "11: a new request ended in place of the old one"
            check_invariant_10(live)
            self.prompts.append(request.token_ids)  # somebody may go on from here
            self.seen["finished"] += 1
        for live in self.lives.values():
            request = live.request
            assert request.status is not RequestStatus.FINISHED, f"10: {request} is not told"
            output = request.output_token_ids
            assert output == live.expected[0][: len(output)], f"10: {request} gave {output}"
            self.names.extend(live.names, request.cache_salt, request.token_ids)
            check_invariant_3(self.shadow, self.allocator, live)
        check_invariant_1(self.scheduler, self.allocator)

    def step(self, quiet):
        """One iteration, with whatever may come between its parts unless it is quiet."""
        rng = self.rng
        self.now += 1.0
        plan, admitted = self.schedule()
        computed_before = {id(i.request): i.request.num_computed_tokens for i in plan.scheduled}
        self.has_failed = fails = not quiet and rng.random() < 0.06
        if fails:  # the runner raised, before or after it had written
            self.seen["failed"] += 1
            self.just_admitted = []
            if rng.random() < 0.5:
                self.compute(plan)
            return
        token_ids = self.compute(plan)
        if not quiet:
            self.disturb(0.2)
            if rng.random() < 0.1:
                try_what_is_refused(self.allocator, rng)
            for request_id in list(token_ids):  # an answer for the aborted may come or not
                if request_id not in self.lives and rng.random() < 0.5:
                    del token_ids[request_id]
        for item in plan.scheduled:
            request = item.request
            if not request.is_finished:
                assert request.num_computed_tokens == computed_before[id(request)]
        self.update(plan, token_ids)
        for item in plan.scheduled:
            request = item.request
            if request.status is RequestStatus.RUNNING:
                num_known = item.num_tokens - len(item.draft_token_ids)
                num_accepted = max(0, len(token_ids.get(request.request_id, ())) - 1)
                expected = computed_before[id(request)] + num_known + num_accepted
                assert request.num_computed_tokens == expected
        self.just_admitted = admitted
        self.steps_left -= 1
        assert self.steps_left >= 0, "8: requests take more steps than they have tokens"

    def run(self):
        """A busy time, then a quiet one in which everything must come to its end."""
        busy_steps = self.rng.randint(1, 40)
        self.arrive()
        while busy_steps or self.lives:
            if busy_steps:
                busy_steps -= 1
                self.disturb(0.4)
            if self.lives:
                self.step(quiet=not busy_steps)
            else:
                assert not self.scheduler.schedule(self.now).scheduled, "8: idle, but a plan"
        assert not self.scheduler.running and not self.scheduler.waiting
        check_invariant_1(self.scheduler, self.allocator)
        self.allocator.check_invariants()
        return self.seen


# ---- the traces ------------------------------------------------------------------------


def run_traces(seeds, **classes):
    """Run one trace for each seed; a failure names its seed."""
    total = {}
    for seed in seeds:
        try:
            seen = Trace(seed, **classes).run()
        except AssertionError as error:
            raise AssertionError(f"{error} [Trace({seed})]") from error
        for name, count in seen.items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.parametrize("is_wide", [False, True], ids=["defaults", "everything"])
@pytest.mark.parametrize("start", range(0, NUM_TRACES, TRACES_IN_A_TEST))
def test_random_traces(start, is_wide):
    """Invariants 1 to 11 in every step. The traces must also be worth the name."""
    seen = run_traces(range(start, start + TRACES_IN_A_TEST), is_wide=is_wide)
    least = TRACES_IN_A_TEST / (20 if is_wide else 5)
    assert all(count > least for count in seen.values()), seen


@pytest.mark.parametrize("is_wide", [False, True], ids=["defaults", "everything"])
def test_random_traces_with_drafts(is_wide):
    """Speculative decoding: only tokens that were verified count, and are found."""
    seen = run_traces(range(200), is_wide=is_wide, has_drafts=True)
    assert all(count > 10 for count in seen.values()), seen


# ---- broken on purpose -----------------------------------------------------------------


class RemembersForever(BlockAllocator):
    """Breaks 3: a block handed to someone else is still found under its old contents."""

    def __init__(self, num_blocks, block_size, enable_prefix_caching=True):
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.remembered = {}

    def cache_blocks(self, token_ids, block_table, num_computed, salt=None):
        super().cache_blocks(token_ids, block_table, num_computed, salt)
        for end in range(self.block_size, num_computed + 1, self.block_size):
            text = salt, tuple(token_ids[:end])
            self.remembered[text] = block_table[end // self.block_size - 1]

    def match_prefix(self, token_ids, salt=None):
        found = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block = self.remembered.get((salt, tuple(token_ids[:end])))
            if block is None or block in found:
                break
            found.append(block)
        return found


class ForgetsTheSalt(BlockAllocator):
    """Breaks 3: one salt finds what another has computed."""

    def cache_blocks(self, token_ids, block_table, num_computed, salt=None):
        super().cache_blocks(token_ids, block_table, num_computed)

    def match_prefix(self, token_ids, salt=None):
        return super().match_prefix(token_ids)


class ForgetsThePrefix(BlockAllocator):
    """Breaks 3: a block is known by its own tokens, whatever came before them."""

    def cache_blocks(self, token_ids, block_table, num_computed, salt=None):
        size = self.block_size
        for end in range(size, num_computed + 1, size):
            block = block_table[end // size - 1]
            super().cache_blocks(token_ids[end - size : end], [block], size, salt)

    def match_prefix(self, token_ids, salt=None):
        found = []
        for end in range(self.block_size, len(token_ids), self.block_size):
            block = super().match_prefix([*token_ids[end - self.block_size : end], 0], salt)
            if not block or block[0] in found:
                break
            found += block
        return found


class CachesWhatIsHalfFull(BlockAllocator):
    """Breaks 4: the count of computed tokens is rounded up to a block."""

    def cache_blocks(self, token_ids, block_table, num_computed, salt=None):
        num_known = min(len(token_ids), len(block_table) * self.block_size)
        rounded_up = -(-num_computed // self.block_size) * self.block_size
        super().cache_blocks(token_ids, block_table, min(rounded_up, num_known), salt)


class CachesBeforeComputing(Scheduler):
    """Breaks 4: blocks are registered when they are planned."""

    def __init__(self, config, allocator):
        super().__init__(config, allocator)
        self.watched = allocator

    def schedule(self, now):
        plan = super().schedule(now)
        for item in plan.scheduled:
            request = item.request
            num_planned = request.num_computed_tokens + item.num_tokens
            self.watched.cache_blocks(
                request.token_ids, request.block_table, num_planned, request.cache_salt
            )
        return plan


class MatchesTheLastToken(BlockAllocator):
    """Breaks 5: a prompt of whole blocks is found whole."""

    def match_prefix(self, token_ids, salt=None):
        return super().match_prefix([*token_ids, 0], salt)


class FreesHeadFirst(BlockAllocator):
    """Breaks 6: the head of a table is reused before its tail."""

    def free(self, block_ids):
        super().free(block_ids[::-1])


class ReusesTheMostRecent(BlockAllocator):
    """Breaks 6: the block freed last is handed out first."""

    def allocate(self, n):
        if n > self.num_free_blocks:
            return super().allocate(n)  # and raises
        everything = super().allocate(self.num_free_blocks)
        kept = len(everything) - n
        self.free(everything[:kept][::-1])
        return everything[kept:]


class CopiesNothingBack(Scheduler):
    """Breaks 10: what was swapped out is not what comes back in."""

    def schedule(self, now):
        plan = super().schedule(now)
        plan.swap_in.clear()
        return plan


class TrustsCopiesOfFailedSteps(Scheduler):
    """Breaks 10: a step failed, and its copies may never have been made."""

    def restart(self, requests):
        super().restart(requests)
        self.preemption.begin_step = lambda: self.preemption.end_step() or ()


class ForgetsWhoIsOverdue(Scheduler):
    """Breaks 9: under sjf and priority the unlucky wait for ever."""

    def __init__(self, config, allocator):
        super().__init__(config, allocator)
        self.config = replace(config, max_wait=None)


class LetsThemJoin(Scheduler):
    """Breaks 9: a static batch is joined as long as it has slots."""

    def __init__(self, config, allocator):
        super().__init__(config, allocator)
        self.batching.candidates = lambda waiting, running: waiting


class TakesFromTheLast(Scheduler):
    """Breaks 9: the last admitted gives way, whatever its priority."""

    def __init__(self, config, allocator):
        super().__init__(config, allocator)
        if config.policy == "priority":
            self.policy.preempts_worst = False


class ReservesTooLittle(Scheduler):
    """Breaks 9: "reserve" that looks a step ahead and not to the end."""

    def __init__(self, config, allocator):
        super().__init__(replace(config, admission="on_demand"), allocator)
        self.config = config


@pytest.mark.parametrize(
    "fault, numbers",
    [
        (RemembersForever, "34"),  # a name kept too long is also there too early
        (ForgetsTheSalt, "3"),
        (ForgetsThePrefix, "3"),
        (CachesWhatIsHalfFull, "34"),
        (CachesBeforeComputing, "4"),
        (MatchesTheLastToken, "5"),
        (FreesHeadFirst, "6"),
        (ReusesTheMostRecent, "6"),
    ],
)
def test_a_broken_invariant_is_noticed(fault, numbers):
    """Each fault alone, in at most 50 traces, and under the number that it breaks."""
    role = "scheduler_class" if issubclass(fault, Scheduler) else "allocator_class"
    with pytest.raises(AssertionError, match=rf"^[{numbers}]\b"):
        run_traces(range(50), **{role: fault})


@pytest.mark.parametrize(
    "fault, message",
    [
        (CopiesNothingBack, "^3/4: .* reads"),
        (TrustsCopiesOfFailedSteps, "^3/4: .* reads"),
        (ForgetsWhoIsOverdue, "^9: .* admitted, of"),
        (LetsThemJoin, "^9: .* admitted, of"),
        (TakesFromTheLast, "^9: .* preempted of"),
        (ReservesTooLittle, "^9: .* preempted under reserve"),
    ],
)
def test_a_broken_rule_is_noticed(fault, message):
    """The same for what only some configurations have."""
    with pytest.raises(AssertionError, match=message):
        run_traces(range(1000), scheduler_class=fault, is_wide=True)
