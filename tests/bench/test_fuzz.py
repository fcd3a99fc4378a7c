"""bench.py check: the engine against each request alone, and faults that it must find."""

import json

import pytest
import torch

import bench
from nanobatch import BlockAllocator, engine
from nanobatch.attention import PagedAttend
from nanobatch.bench.fuzz import Fuzz
from nanobatch.models.loader import load

NUM_TRIALS = 30


@pytest.fixture(scope="module")
def model():
    return load("tiny", torch.float32).model


def test_random_trials_show_no_difference(model):
    """Invariants 10, 12, 13, in any mixture of configurations."""
    fuzz = Fuzz(model, seed=0)
    for _ in range(NUM_TRIALS):
        fuzz.trial()
    report = fuzz.report
    assert report.faults == []
    assert report.trials == NUM_TRIALS and report.requests > 100 and report.tokens > 500
    happened = ("preemptions", "swapped blocks", "prefix hits", "accepted drafts")
    for what in (*happened, "batching static", "kv_cache_dtype int8", "kv_cache_dtype fp8"):
        assert report.seen[what] > 0, what


def test_the_same_seed_draws_the_same_trials(model):
    reports = []
    for _ in range(2):
        fuzz = Fuzz(model, seed=5)
        for _ in range(5):
            fuzz.trial()
        reports.append(fuzz.report)
    assert reports[0] == reports[1]


class ForgetsThePrefix(BlockAllocator):
    """Finds blocks by their own tokens, whatever came before."""

    def match_prefix(self, token_ids, salt=None):
        found = super().match_prefix(token_ids, salt)
        if not found and self._keys:
            return [next(iter(self._keys))][: (len(token_ids) - 1) // self.block_size]
        return found


@pytest.mark.parametrize("fault", ["allocator", "poison", "stream"])
def test_faults_are_found_and_named(model, monkeypatch, fault):
    fuzz = Fuzz(model, seed=0)
    if fault == "allocator":
        monkeypatch.setattr(engine, "BlockAllocator", ForgetsThePrefix)
    if fault == "poison":  # the first key of each step's batch is lost
        attend = PagedAttend.__call__

        def forgets_one(self, *args):
            if len(self.batch.slot_mapping_T) > 6:
                self.batch.slot_mapping_T[3] = -1
            return attend(self, *args)

        monkeypatch.setattr(PagedAttend, "__call__", forgets_one)
    if fault == "stream":
        counter = iter(range(10**9))
        monkeypatch.setattr("nanobatch.sampler.uniform", lambda row: (next(counter) * 0.61) % 1)
    faults = []
    for _ in range(40):
        faults += fuzz.trial()
        if faults:
            break
    assert faults, "nothing was noticed"
    assert "prompt [" in faults[0] and "EngineConfig(" in faults[0]


def test_a_check_without_time_still_tries_something(model):
    """Nothing tried would also be "no differences"."""
    assert Fuzz(model, seed=0).run(1e-300).trials == 1


def test_bench_check_says_what_it_tried(tmp_path, capsys, monkeypatch):
    file = tmp_path / "c.json"
    report = bench.main(["check", "1", "--save-json", str(file)])
    assert json.loads(file.read_text())["check"]["trials"] == report["check"]["trials"] > 0
    printed = capsys.readouterr().out
    assert "no differences from each request alone" in printed
    assert "preemption swap: " in printed and "prefix hits: " in printed
    monkeypatch.setattr(Fuzz, "_difference", lambda self, *of_it: "it is wrong")
    with pytest.raises(SystemExit) as end:
        bench.main(["check", "0.2", "--save-json", str(file)])
    faults = json.loads(file.read_text())["check"]["faults"]
    assert faults and faults[0].startswith("it is wrong")
    assert end.value.code == f"{len(faults)} differences; see above"  # exit status 1
    assert "it is wrong" in capsys.readouterr().out


class SameHash(int):
    """A token that no hash can tell from another."""

    def __hash__(self):
        return 0


class Colliding(BlockAllocator):
    """Sees tokens whose hashes are all the same."""

    def match_prefix(self, token_ids, salt=None):
        return super().match_prefix(list(map(SameHash, token_ids)), salt)

    def cache_blocks(self, token_ids, block_table, num_computed, salt=None):
        super().cache_blocks(list(map(SameHash, token_ids)), block_table, num_computed, salt)


def test_prefixes_whose_hashes_collide_are_told_apart(model, monkeypatch):
    """Fault 6: with the hash replaced by a constant, and no answer changes."""
    monkeypatch.setattr(engine, "BlockAllocator", Colliding)
    fuzz = Fuzz(model, seed=1)
    for _ in range(20):
        assert fuzz.trial() == []
    assert fuzz.report.seen["prefix hits"] > 5
