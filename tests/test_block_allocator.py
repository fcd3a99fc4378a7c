"""The pool of blocks and its prefix cache, against a model that is too simple to be wrong.

What is proved: after any sequence of calls the allocator agrees with plain lists on who holds
what (invariant 1), refuses what it must and then has changed nothing (2), finds a block only
for the very tokens, prefix and salt it was registered with, and no longer once it was handed
out again (3, 4), leaves the last token to compute (5), and reuses blocks in the promised
order (6). After the model come small tests, one for each fault that real engines have had
(faults 1 to 11 of tests/README.md), and one for the promise of O(1) a block.

What a block really holds is the business of test_shadow_cache.py. Here a block is said to
hold what cache_blocks() was told.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanobatch import BlockAllocator, OutOfBlocks

REPOSITORY = Path(__file__).resolve().parent.parent


# ---- the model -------------------------------------------------------------------------


class AllocatorMachine(RuleBasedStateMachine):
    """BlockAllocator beside a model made of lists, both given the same calls.

    The model knows nothing of hashes. For each block it keeps the whole text, from the start
    of the request, that cache_blocks() vouched for:

        holds[block] = (salt, tokens of the request up to the end of this block)

    Two blocks may hold the same text; the design says nothing about which one is found, so
    answers are compared by text. While anybody holds a text it must be found. After each call
    every text that was ever registered is looked for.
    """

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5)  # two tokens: many repeats
    salts = st.sampled_from([None, None, None, "", "a"])

    @initialize(num_blocks=st.integers(2, 7), block_size=st.integers(1, 2))
    def build(self, num_blocks, block_size):
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.never_used = set(range(num_blocks))
        self.freed = []  # least recently freed first
        self.holds = {}
        self.ever_held = {}  # the keys are texts, in order
        self.requests = []  # [tokens, salt, table] of the living

    # -- what the model does by itself

    def take_free(self, block):
        """The block leaves the free list with what it holds."""
        if block in self.never_used:
            self.never_used.remove(block)
        else:
            self.freed.remove(block)

    def forget(self, block):
        """The block was handed out: whatever it held will be overwritten."""
        self.holds.pop(block, None)

    def ref_counts(self):
        return Counter(block for _, _, table in self.requests for block in table)

    def texts(self, tokens, salt):
        """The text of each full block of these tokens that a match may cover."""
        ends = range(self.block_size, len(tokens), self.block_size)  # stops before the last
        return [(salt, tuple(tokens[:end])) for end in ends]

    def check_match(self, tokens, salt):
        """Compare match_prefix with a search through everything that is held."""
        found = self.allocator.match_prefix(tokens, salt)
        texts = self.texts(tokens, salt)
        assert len(found) <= len(texts), "the match covers the last token"
        assert [self.holds.get(block) for block in found] == texts[: len(found)]
        nobody_holds_next = len(found) == len(texts) or (
            texts[len(found)] not in self.holds.values()
        )
        assert nobody_holds_next, "a text that a block holds was not found"
        return found

    def allocate_and_check(self, n):
        """Allocate n blocks, of which n are free; check that they are the right ones."""
        got = self.allocator.allocate(n)
        assert len(got) == len(set(got)) == n
        fresh = min(n, len(self.never_used))
        from_freed = self.freed[: n - fresh]
        assert set(got) - self.never_used == set(from_freed)
        for block in got:
            self.take_free(block)
            self.forget(block)
        return got

    # -- what the outside may do

    @rule(tokens=tokens, salt=salts)
    def look_up(self, tokens, salt):
        self.check_match(tokens, salt)

    @rule(tokens=tokens, salt=salts)
    def start(self, tokens, salt):
        """A request comes: take what is cached, allocate the rest."""
        self.admit(tokens, salt)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), suffix=tokens)
    def start_alike(self, data, suffix):
        """A request like a living one comes: if that is not computed yet, texts double."""
        tokens, salt, _ = data.draw(st.sampled_from(self.requests))
        self.admit(tokens + suffix[1:], salt)

    def admit(self, tokens, salt):
        found = self.check_match(tokens, salt)
        num_needed = -(-len(tokens) // self.block_size) - len(found)
        num_taken = len([block for block in found if block in self.freed])
        if num_needed > len(self.never_used) + len(self.freed) - num_taken:
            return
        self.allocator.acquire(found)
        for block in set(found) & set(self.freed):
            self.take_free(block)
        table = found + self.allocate_and_check(num_needed)
        self.requests.append((list(tokens), salt, table))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data):
        """Some of a request's tokens have been computed: register its full blocks."""
        tokens, salt, table = data.draw(st.sampled_from(self.requests))
        num_computed = data.draw(st.just(len(tokens)) | st.integers(0, len(tokens)))
        self.allocator.cache_blocks(tokens, table, num_computed, salt)
        for i in range(num_computed // self.block_size):
            text = (salt, tuple(tokens[: (i + 1) * self.block_size]))
            assert self.holds.setdefault(table[i], text) == text
            self.ever_held[text] = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        """A token is sampled; a new block is taken when the last one is full."""
        request = data.draw(st.sampled_from(self.requests))
        tokens, _, table = request
        is_full = len(tokens) == len(table) * self.block_size
        if is_full and not self.never_used and not self.freed:
            return
        tokens.append(token)
        if is_full:
            table.extend(self.allocate_and_check(1))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(self.requests))
        self.requests = [r for r in self.requests if r is not request]
        _, _, table = request
        self.allocator.free(table)
        still_held = self.ref_counts()
        self.freed += [block for block in reversed(table) if not still_held[block]]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free_wrongly(self, data):
        """A table that holds one block twice, or a block that is free, or one from nowhere."""
        _, _, table = data.draw(st.sampled_from(self.requests))
        wrong = [*self.never_used, *self.freed, *table, -1, self.num_blocks]
        extra = data.draw(st.sampled_from(wrong))
        where = data.draw(st.integers(0, len(table)))
        with pytest.raises(ValueError):
            self.allocator.free(table[:where] + [extra] + table[where:])

    @invariant()
    def agrees(self):
        if not hasattr(self, "allocator"):
            return
        expected = self.ref_counts()
        counts = {block: self.allocator.ref_count(block) for block in range(self.num_blocks)}
        assert counts == {block: expected[block] for block in range(self.num_blocks)}
        assert self.allocator.num_free_blocks == len(self.never_used) + len(self.freed)
        assert self.allocator.num_blocks == self.num_blocks
        with pytest.raises(OutOfBlocks):
            self.allocator.allocate(self.allocator.num_free_blocks + 1)
        for salt, tokens in self.ever_held:
            self.check_match([*tokens, 0], salt)
        self.allocator.check_invariants()


AllocatorMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same examples on every machine; the shadow test has its own dice
    suppress_health_check=list(HealthCheck),
)
TestAllocatorAgainstModel = AllocatorMachine.TestCase


# ---- small tests -----------------------------------------------------------------------


def snapshot(allocator):
    """All that the outside can see of who holds what."""
    counts = [allocator.ref_count(block) for block in range(allocator.num_blocks)]
    return allocator.num_free_blocks, counts


def cached(allocator, tokens, salt=None, block_size=2):
    """Compute tokens from nothing, register their full blocks; return the table, in use."""
    table = allocator.allocate(-(-len(tokens) // block_size))
    allocator.cache_blocks(tokens, table, len(tokens), salt)
    return table


def found(allocator, tokens, salt=None):
    """The cached blocks of these tokens, the last one included if it is full."""
    return allocator.match_prefix([*tokens, 0], salt)


def test_blocks_are_handed_out_once():
    allocator = BlockAllocator(5, 4)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.num_free_blocks == 0
    assert [allocator.ref_count(block) for block in first] == [1, 1]
    assert allocator.allocate(0) == []


def test_failed_allocation_changes_nothing():
    allocator = BlockAllocator(4, 2)
    table = cached(allocator, [1, 2, 3, 4])
    allocator.free(table)
    before = snapshot(allocator)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(5)
    assert snapshot(allocator) == before
    assert found(allocator, [1, 2, 3, 4]) == table  # not even the cache
    assert set(allocator.allocate(4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("salt", [None, "s"])
def test_double_free_in_two_calls(salt):
    """Fault 1."""
    allocator = BlockAllocator(4, 2)
    table = cached(allocator, [1, 2, 3, 4], salt)
    allocator.free(table)
    before = snapshot(allocator)
    for again in (table, table[:1], table[::-1]):
        with pytest.raises(ValueError):
            allocator.free(again)
        assert snapshot(allocator) == before
    assert found(allocator, [1, 2, 3, 4], salt) == table


def test_double_free_in_one_call():
    """Fault 1: also when a second reference would make the count come out right."""
    allocator = BlockAllocator(4, 2)
    a, b = allocator.allocate(2)
    allocator.acquire([a])
    before = snapshot(allocator)
    for twice in ([a, b, a], [b, b], [a, a]):
        with pytest.raises(ValueError):
            allocator.free(twice)
        assert snapshot(allocator) == before


def test_a_wrong_id_late_in_the_list_frees_nothing():
    allocator = BlockAllocator(4, 2)
    a, b = allocator.allocate(2)
    never_used = next(block for block in range(4) if block not in (a, b))
    before = snapshot(allocator)
    for wrong in (never_used, -1, 4, 10**9):
        for table in ([a, b, wrong], [wrong, a, b]):
            with pytest.raises(ValueError):
                allocator.free(table)
            assert snapshot(allocator) == before


def test_evicted_block_is_not_found_again():
    """Fault 2: run A, let B take its blocks, look for A."""
    allocator = BlockAllocator(2, 2)
    allocator.free(cached(allocator, [1, 2, 3, 4]))
    b_table = allocator.allocate(2)
    assert found(allocator, [1, 2, 3, 4]) == []
    allocator.free(b_table)  # free once more, still nobody computed A in it
    assert found(allocator, [1, 2, 3, 4]) == []


def test_a_chain_ends_at_the_first_evicted_block():
    """The tail goes first, so what is left of a chain is its head."""
    allocator = BlockAllocator(3, 2)
    table = cached(allocator, [1, 2, 3, 4, 5, 6])
    allocator.free(table)
    assert allocator.allocate(1) == table[2:]
    assert found(allocator, [1, 2, 3, 4, 5, 6]) == table[:2]


def test_a_new_parent_does_not_adopt_the_children_of_the_old_one():
    """A reused block must not become the start of chains that hung on its old contents."""
    allocator = BlockAllocator(2, 2)
    head, tail = cached(allocator, [1, 2, 3, 4])
    allocator.free([head])
    assert allocator.allocate(1) == [head]
    allocator.cache_blocks([7, 8], [head], 2)
    assert found(allocator, [7, 8, 3, 4]) == [head]
    assert found(allocator, [1, 2, 3, 4]) == []
    assert allocator.ref_count(tail) == 1


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_match_never_covers_the_last_token(block_size, k):
    """Faults 4 and 9: prompts of k*P-1, k*P and k*P+1 tokens, looked for twice."""
    allocator = BlockAllocator(8, block_size)
    tokens = list(range(100, 100 + k * block_size + 1))
    table = cached(allocator, tokens, block_size=block_size)
    for num_tokens in (k * block_size - 1, k * block_size, k * block_size + 1):
        all_but_the_last = max(num_tokens - 1, 0)
        expected = table[: all_but_the_last // block_size]
        assert allocator.match_prefix(tokens[:num_tokens]) == expected


@pytest.mark.parametrize("num_computed", range(9))
def test_only_full_blocks_of_computed_tokens_are_found(num_computed):
    """Fault 9, invariant 4: at k*P tokens the k-th block is full, at k*P-1 it is not."""
    allocator = BlockAllocator(4, 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = allocator.allocate(2)
    allocator.cache_blocks(tokens, table, num_computed)
    assert found(allocator, tokens) == table[: num_computed // 4]


def test_registering_in_pieces_is_registering_at_once():
    allocator = BlockAllocator(4, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    table = allocator.allocate(3)
    for num_computed in (0, 1, 2, 2, 5, 6, 3):
        allocator.cache_blocks(tokens, table, num_computed)
    assert found(allocator, tokens) == table


def test_equal_contents_after_different_prefixes():
    """Fault 5: [a b | c d] and [x y | c d]."""
    allocator = BlockAllocator(8, 2)
    first = cached(allocator, [1, 2, 3, 4])
    assert found(allocator, [8, 9, 3, 4]) == []
    assert found(allocator, [3, 4]) == []  # no prefix at all is a third prefix
    second = cached(allocator, [8, 9, 3, 4])
    assert found(allocator, [1, 2, 3, 4]) == first
    assert found(allocator, [8, 9, 3, 4]) == second


def test_tokens_are_not_run_together():
    """A key made of digits or bytes joined without care would take these for one another."""
    allocator = BlockAllocator(16, 2)
    texts = [[1, 23], [12, 3], [1, 2], [0, 1], [1, 0], [256, 0], [0, 256], [2**40, 1]]
    tables = [cached(allocator, text) for text in texts]
    assert [found(allocator, text) for text in texts] == tables


def test_salts_never_share():
    """Fault 7: no salt and the empty string are two salts."""
    allocator = BlockAllocator(16, 2)
    salts = [None, "", "a", "b", "None"]
    tables = {}
    for salt in salts:
        assert found(allocator, [1, 2, 3, 4], salt) == []
        tables[salt] = cached(allocator, [1, 2, 3, 4], salt)
    for salt in salts:
        assert found(allocator, [1, 2, 3, 4], salt) == tables[salt]


def test_a_salt_is_not_a_token():
    """Text must not move between the salt and the prompt."""
    allocator = BlockAllocator(16, 1)
    cached(allocator, [49, 2], "", block_size=1)
    assert found(allocator, [2], "1") == []
    assert found(allocator, [2], "49") == []


def test_two_blocks_with_the_same_text():
    """Both requests computed it at the same time; one block is found, whoever ends first."""
    for ends_first in (0, 1):
        allocator = BlockAllocator(4, 2)
        tables = [allocator.allocate(1), allocator.allocate(1)]
        for table in tables:
            allocator.cache_blocks([1, 2], table, 2)
        assert found(allocator, [1, 2]) == tables[0], "the one that was entered first"
        allocator.free(tables[ends_first])
        assert found(allocator, [1, 2]) == tables[0], "whether held or free"
        allocator.free(tables[1 - ends_first])
        assert found(allocator, [1, 2]) in tables
        allocator.allocate(4)
        assert found(allocator, [1, 2]) == []


def test_never_used_blocks_go_first():
    allocator = BlockAllocator(6, 2)
    table = cached(allocator, [1, 2, 3, 4])
    allocator.free(table)
    assert set(allocator.allocate(4)).isdisjoint(table)
    assert found(allocator, [1, 2, 3, 4]) == table
    assert set(allocator.allocate(2)) == set(table)


def test_least_recently_freed_goes_first_tail_before_head():
    """Fault 10, invariant 6."""
    allocator = BlockAllocator(4, 2)
    old = cached(allocator, [1, 2, 3, 4])
    new = cached(allocator, [5, 6, 7, 8])
    allocator.free(new)  # freed first, though taken last
    allocator.free(old)
    order = [allocator.allocate(1)[0] for _ in range(4)]
    assert order == [new[1], new[0], old[1], old[0]]


def test_acquire_saves_a_block():
    """Fault 10: a touched block is no longer up for reuse, and comes last afterwards."""
    allocator = BlockAllocator(3, 2)
    a, b, c = (cached(allocator, [n, n])[0] for n in (1, 2, 3))
    for block in (a, b, c):
        allocator.free([block])
    hit = found(allocator, [1, 1])
    assert hit == [a]
    allocator.acquire(hit)
    assert allocator.num_free_blocks == 2 and allocator.ref_count(a) == 1
    assert allocator.allocate(1) == [b]
    assert found(allocator, [1, 1]) == [a]
    allocator.free([a])
    assert [allocator.allocate(1)[0] for _ in range(2)] == [c, a]


def test_looking_up_holds_and_saves_nothing():
    allocator = BlockAllocator(2, 2)
    a, b = (cached(allocator, [n, n])[0] for n in (1, 2))
    allocator.free([a])
    allocator.free([b])
    before = snapshot(allocator)
    assert found(allocator, [1, 1]) == [a]
    assert snapshot(allocator) == before
    assert allocator.allocate(1) == [a]  # looked at, yet still the oldest


def test_shared_blocks_are_free_when_the_last_holder_ends():
    allocator = BlockAllocator(4, 2)
    table = cached(allocator, [1, 2, 3, 4])
    allocator.acquire(table[:1])
    assert [allocator.ref_count(block) for block in table] == [2, 1]
    assert allocator.num_free_blocks == 2
    allocator.free(table)
    assert [allocator.ref_count(block) for block in table] == [1, 0]
    allocator.free(table[:1])
    assert allocator.num_free_blocks == 4


def test_without_prefix_caching_nothing_is_found():
    allocator = BlockAllocator(4, 2, enable_prefix_caching=False)
    table = cached(allocator, [1, 2, 3, 4])
    assert found(allocator, [1, 2, 3, 4]) == []
    allocator.free(table)
    assert found(allocator, [1, 2, 3, 4]) == []
    allocator.check_invariants()


def test_tokens_may_grow_after_they_were_cached():
    """The caller's list goes on growing; the cache must have kept its own idea of it."""
    allocator = BlockAllocator(4, 2)
    tokens = [1, 2]
    table = allocator.allocate(1)
    allocator.cache_blocks(tokens, table, 2)
    tokens[0] = 9
    tokens.append(3)
    assert found(allocator, [1, 2]) == table
    assert found(allocator, [9, 2]) == []


def leak(allocator, table):
    allocator._freed.pop(table[0])


def free_what_is_held(allocator, table):
    allocator._freed[table[2]] = None


def count_below_zero(allocator, table):
    allocator._ref_counts[table[0]] = -1


def hold_what_is_free(allocator, table):
    allocator._ref_counts[table[0]] = 1


def free_what_was_never_used(allocator, table):
    allocator._freed[allocator.num_blocks - 1] = None


def name_another_block(allocator, table):
    key = next(iter(allocator._holders))
    allocator._holders[key] = {table[2]: None}


def forget_a_key(allocator, table):
    allocator._holders.popitem()


def give_two_keys_one_chain(allocator, table):
    first, second = list(allocator._chains)[:2]
    allocator._chains[second] = allocator._chains[first]


@pytest.mark.parametrize(
    "damage",
    [
        leak,
        free_what_is_held,
        count_below_zero,
        hold_what_is_free,
        free_what_was_never_used,
        name_another_block,
        forget_a_key,
        give_two_keys_one_chain,
    ],
)
def test_check_invariants_notices(damage):
    """The only test that reaches inside: without damage there is nothing to notice."""
    allocator = BlockAllocator(6, 2)
    table = cached(allocator, [1, 2, 3, 4, 5])  # blocks 0 and 1 are full
    allocator.free(table[:2])
    allocator.check_invariants()
    damage(allocator, table)
    with pytest.raises(AssertionError):
        allocator.check_invariants()


SCRIPT = """
import json
from nanobatch import BlockAllocator
allocator = BlockAllocator(7, 2)
log = []
for turn in range(40):
    tokens = [(turn * turn + i) % 3 for i in range(2 + turn % 7)]
    salt = (None, "", "tenant")[turn % 3]
    hit = allocator.match_prefix(tokens, salt)
    allocator.acquire(hit)
    table = hit + allocator.allocate((len(tokens) + 1) // 2 - len(hit))
    allocator.cache_blocks(tokens, table, len(tokens), salt)
    allocator.free(table)
    log.append((len(hit), table))
print(json.dumps(log))
"""


def test_the_same_calls_give_the_same_blocks_in_another_process():
    """Fault 11: nothing hangs on Python's hash seed."""
    logs = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT]
        logs.append(subprocess.check_output(command, cwd=REPOSITORY, env=environment))
    assert logs[0] == logs[1]
    hits = [num_hits for num_hits, _ in json.loads(logs[0])]
    assert sum(hits) > 10  # the script does use the cache


def test_a_million_blocks():
    """O(1) a block: anything that walks the free list would need minutes here."""
    num_blocks = 1_000_000
    allocator = BlockAllocator(num_blocks, 1)
    everything = allocator.allocate(num_blocks)
    for i in range(0, 2000, 2):  # these end up in the middle of the free list
        allocator.cache_blocks([i, i], everything[500_000 + i :][:2], 2)
    allocator.free(everything)

    start = time.perf_counter()
    for i in range(0, 2000, 2):
        hit = found(allocator, [i, i])
        assert len(hit) == 2
        allocator.acquire(hit)
        table = hit + allocator.allocate(3)
        assert allocator.num_free_blocks == num_blocks - 5
        allocator.free(table)
    assert time.perf_counter() - start < 1.0  # tens of milliseconds when nothing walks


def test_whether_a_block_is_cached():
    allocator = BlockAllocator(4, 2)
    first, second = allocator.allocate(2)
    allocator.cache_blocks([1, 2, 3], [first, second], 3)
    assert allocator.is_cached(first) and not allocator.is_cached(second)
    allocator.free([first, second])
    assert allocator.is_cached(first), "free, and still to be found"
    allocator.allocate(4)
    assert not allocator.is_cached(first), "somebody else has it"
    with pytest.raises(ValueError, match="block_id is 4"):
        allocator.is_cached(4)


def test_what_is_refused_changes_nothing():
    """Invariant 2, for acquire and cache_blocks."""
    allocator = BlockAllocator(4, 2)
    first, second = allocator.allocate(2)
    allocator.free([second])
    with pytest.raises(ValueError, match=f"block {second} is free and holds nothing cached"):
        allocator.acquire([first, second])
    with pytest.raises(ValueError, match="block_ids to acquire name a block twice"):
        allocator.acquire([first, first])
    assert allocator.ref_count(first) == 1 and allocator.num_free_blocks == 3
    with pytest.raises(ValueError, match="num_computed is 4; the table holds 1 blocks"):
        allocator.cache_blocks([1, 2, 3, 4], [first], 4)
    assert not allocator.is_cached(first)
    allocator.check_invariants()
