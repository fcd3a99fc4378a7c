"""The sampler against a plain reference: what may be sampled, how often, and by which draw.

`reference` below is one row in plain numpy, a paragraph for each rule, in the order of
vLLM: penalties, min_tokens, temperature, min_p, top_k, top_p. The sampler's
output is compared with it twice: no token outside the support ever comes and each likely one
does, and the frequencies pass a chi-squared test, over many seeds and over many steps. The
test is tested too: rules in another order must fail it.

What is proved besides: a row depends on no other row (invariant 13, faults 32 and 33);
one draw a token, from the seed and the number of tokens (invariant 13); the edges of each
rule (faults 34 to 36); log-probabilities are those of the raw logits (fault 37); a
row that is no numbers ends alone (invariant 15).
"""

import dataclasses
import itertools
import math
from random import Random

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanobatch import SamplingParams, sampler
from nanobatch.kernels.ops import Ops
from nanobatch.sampler import SamplingRow, begin_sample, probabilities, sample

NUM_DRAWS = 2000
NAN, INF = math.nan, math.inf


def row(seed=0, prompt=(0,), output=(), stop=(), **params):
    params = SamplingParams(**({"max_tokens": 10**6} | params))
    return SamplingRow(params, list(prompt), list(output), tuple(stop), seed)


def one(logits, *args, **kwargs):
    """What is sampled for one row alone."""
    return sample(torch.tensor([logits]), [row(*args, **kwargs)])[0]


def greedy(logits, **kwargs):
    return one(logits, temperature=0, **kwargs).token_id


def log_probs(probabilities):
    return [math.log(p) if p else -INF for p in probabilities]


# ---- the reference ---------------------------------------------------------------------

ORDER = ["penalties", "min_tokens", "temperature", "min_p", "top_k", "top_p"]


def reference(logits, r, order=ORDER):
    """The probabilities of one row's next token: float64 [V]."""
    x = np.array(logits, dtype=np.float64)
    params, output = r.params, r.output_token_ids

    def penalties(x):
        for token in {*r.prompt_token_ids, *output}:
            x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
        for token in output:
            x[token] -= params.frequency_penalty
        for token in set(output):
            x[token] -= params.presence_penalty
        return x

    def min_tokens(x):
        if len(output) < params.min_tokens:
            x[list(r.stop_token_ids)] = -INF
        return x

    def temperature(x):
        return x / params.temperature

    def min_p(x):
        p = softmax(x)
        x[p < params.min_p * p.max()] = -INF
        return x

    def top_k(x):
        if params.top_k > 0:
            x[best_first(x)[params.top_k :]] = -INF
        return x

    def top_p(x):
        mass, p = 0.0, softmax(x)
        for token in best_first(x):
            if mass >= params.top_p:
                x[token] = -INF
            mass += p[token]
        return x

    rules = (penalties, min_tokens, temperature, min_p, top_k, top_p)
    rules = {rule.__name__: rule for rule in rules}
    for name in order:
        x = rules[name](x)
    return softmax(x)


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def best_first(x):
    return np.argsort(-x, kind="stable")


def draw_over_seeds(logits, r):
    """How often each token comes, over NUM_DRAWS requests that differ in the seed."""
    rows = [dataclasses.replace(r, seed=seed) for seed in range(NUM_DRAWS)]
    return count(logits, rows)


def draw_over_steps(logits, r):
    """The same over the steps of one request (whose rules do not look at its output)."""
    tokens = [0] * NUM_DRAWS
    rows = [dataclasses.replace(r, output_token_ids=tokens[:n]) for n in range(NUM_DRAWS)]
    return count(logits, rows)


def count(logits, rows):
    sampled = sample(torch.tensor(logits).expand(len(rows), -1), rows)
    assert all(s.error is None for s in sampled)
    return np.bincount([s.token_id for s in sampled], minlength=len(logits))


def chi_squared_excess(counts, probs):
    """How far the counts are from n * probs, in standard deviations of chi-squared.

    Infinite if a token came that cannot come. Tokens expected fewer than 8 times are pooled.
    """
    if (counts[probs == 0] > 0).any():
        return INF
    expected = counts.sum() * probs
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(1, len(observed) - 1)
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    return (chi_squared - degrees) / math.sqrt(2 * degrees)


TOO_FAR = 6.0  # the draws are the same in every run: a pass today is a pass tomorrow


def assert_same_distribution(counts, probs):
    assert chi_squared_excess(counts, probs) < TOO_FAR, (counts, counts.sum() * probs)
    likely = counts.sum() * probs > 30  # missed with probability e-30
    assert (counts[likely] > 0).all(), (counts, counts.sum() * probs)


def random_row(random, vocab_size=12, **fixed):
    """A row with a random share of the rules switched on."""

    def tokens(most):
        return [random.randrange(vocab_size) for _ in range(random.randrange(most))]

    choices = {
        "temperature": lambda: random.choice([0.3, 0.7, 1.0, 2.5]),
        "top_k": lambda: random.randint(1, vocab_size),
        "top_p": lambda: random.uniform(0.2, 0.99),
        "min_p": lambda: random.uniform(0.01, 0.4),
        "min_tokens": lambda: random.randint(1, 8),
        "presence_penalty": lambda: random.uniform(-1.5, 1.5),
        "frequency_penalty": lambda: random.uniform(-0.8, 0.8),
        "repetition_penalty": lambda: random.uniform(0.5, 2.0),
    }
    params = {name: value() for name, value in choices.items() if random.random() < 0.5}
    return row(
        random.randrange(10**9),
        prompt=tokens(6) or [0],
        output=tokens(9),
        stop=tokens(4),
        **(params | fixed),
    )


def random_logits(random, vocab_size=12):
    return [random.gauss(0, 1.5) for _ in range(vocab_size)]


# ---- the distribution ------------------------------------------------------------------


@pytest.mark.parametrize("case", range(16))
def test_the_distribution_is_the_reference(case):
    random = Random(case)
    logits, r = random_logits(random), random_row(random)
    assert_same_distribution(draw_over_seeds(logits, r), reference(logits, r))


@pytest.mark.parametrize("case", range(4))
def test_the_distribution_over_the_steps_of_one_request(case):
    random = Random(case)
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
    logits, r = random_logits(random), random_row(random, repetition_penalty=1.0, **neutral)
    assert_same_distribution(draw_over_steps(logits, r), reference(logits, r))


def test_two_steps_are_independent_of_one_another():
    """Pairs of successive tokens come as often as their product says."""
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    tokens = [
        s.token_id
        for s in sample(
            torch.tensor([log_probs(probs)] * NUM_DRAWS),
            [row(seed=7, output=[0] * n) for n in range(NUM_DRAWS)],
        )
    ]
    pairs = np.bincount(4 * np.array(tokens[:-1]) + tokens[1:], minlength=16)
    assert_same_distribution(pairs, np.outer(probs, probs).flatten())


# For each pair of neighbouring rules whose order matters: a row on which it does.
ORDER_MATTERS = {
    ("penalties", "temperature"): ([1.0, 0.0, 0.5], {"temperature": 3.0, "output": [0, 0]}),
    ("temperature", "min_p"): ([1.0, 0.0, -1.0], {"temperature": 4.0, "min_p": 0.3}),
    ("temperature", "top_p"): ([2.0, 1.0, 0.0], {"temperature": 5.0, "top_p": 0.6}),
    ("min_p", "top_p"): (log_probs([0.5, 0.2, 0.15, 0.15]), {"min_p": 0.35, "top_p": 0.71}),
    ("top_k", "top_p"): (log_probs([0.4, 0.3, 0.2, 0.1]), {"top_k": 2, "top_p": 0.55}),
}


@pytest.mark.parametrize("first, then", ORDER_MATTERS)
def test_the_rules_come_in_this_order(first, then):
    """And the comparison with the reference can fail: it does if two rules are swapped."""
    logits, params = ORDER_MATTERS[first, then]
    r = row(frequency_penalty=1.0, **params)
    counts = draw_over_seeds(logits, r)
    assert_same_distribution(counts, reference(logits, r))
    swapped = [{first: then, then: first}.get(name, name) for name in ORDER]
    assert chi_squared_excess(counts, reference(logits, r, swapped)) > TOO_FAR


def test_repetition_comes_before_frequency_and_presence():
    """1.2 / 2 - 0.5 = 0.1, below the other's 0.2; the other way it would be 0.35."""
    penalties = {"repetition_penalty": 2.0, "frequency_penalty": 0.25, "presence_penalty": 0.25}
    assert greedy([1.2, 0.2], prompt=[0], output=[0], **penalties) == 1


# ---- the edges of the rules ------------------------------------------------------------


def support(logits, **kwargs):
    """The tokens that come at all in many draws."""
    return set(np.flatnonzero(draw_over_seeds(logits, row(**kwargs))).tolist())


FOUR = log_probs([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    "params, kept",
    [
        ({}, 4),
        ({"top_k": 0}, 4),
        ({"top_k": -1}, 4),
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 4}, 4),
        ({"top_k": 5}, 4),
        ({"top_k": 10**9}, 4),
        ({"top_p": 1.0}, 4),
        ({"top_p": 0.95}, 4),
        ({"top_p": 0.65}, 2),
        ({"top_p": 0.35}, 1),
        ({"top_p": 1e-9}, 1),
        ({"top_p": 5e-324}, 1),
        ({"min_p": 1.0}, 1),
        ({"min_p": 0.6}, 2),
        ({"min_p": 0.2}, 4),
    ],
    ids=str,
)
def test_how_many_are_kept(params, kept):
    """Fault 34: off is off, and at least one always stays."""
    assert support(FOUR, **params) == set(range(kept))


def test_of_equal_logits_top_k_keeps_exactly_k():
    assert len(support([1.0] * 8, top_k=3)) == 3


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-46, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    """Fault 34: whatever SamplingParams lets in, in a batch with greedy and hot rows."""
    logits = torch.tensor([[0.0, 3.0, 2.9, -INF, -80.0]] * 4)
    temperatures = [temperature, 0, 50.0, temperature]
    rows = [row(seed, temperature=t) for seed, t in enumerate(temperatures)]
    tokens = [s.token_id for s in sample(logits, rows)]
    assert [tokens[0], tokens[1], tokens[3]] == [1, 1, 1]
    assert tokens[2] in {0, 1, 2, 4}


@pytest.mark.parametrize("temperature", [1e5, 1e30, 1e39, 1e300, 2**70], ids=str)
def test_a_huge_temperature_is_uniform(temperature):
    counts = draw_over_seeds([0.0, 3.0, -INF, -9.0], row(temperature=temperature))
    assert_same_distribution(counts, np.array([1, 1, 0, 1]) / 3)


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.999}, {"temperature": 100.0}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_minus_infinity_is_never_sampled(place, params):
    """Fault 34, with the impossible tokens in front, in the middle and at the end."""
    logits = [-INF] * 9
    logits[3 * place : 3 * place + 3] = [0.0, 1.0, 2.0]
    logits[3 * place + 1] = -INF
    assert support(logits, **params) == {3 * place, 3 * place + 2}
    assert greedy(logits) == 3 * place + 2


@pytest.mark.parametrize("number, token", [(0.0, 1), (0.5, 2), (1 - 2**-53, 2)])
def test_the_first_and_the_last_number_that_can_be_drawn(monkeypatch, number, token):
    """At the very ends of [0, 1) the draw stays among the possible tokens too."""
    monkeypatch.setattr("nanobatch.sampler.uniform", lambda row: number)
    assert one([-INF, 0.0, 0.0, -INF]).token_id == token
    assert one([-INF, *[-0.1] * 3000, -INF]).token_id in range(1, 3001)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_min_tokens_masks_each_stop_id_until_then(temperature):
    """Fault 35: the first three tokens cannot be a stop, prompt tokens do not count."""
    logits = [0.0, 40.0, 50.0, 0.5]
    for num_output in range(5):
        got = one(
            logits,
            prompt=[0] * 10,
            output=[0] * num_output,
            stop=[1, 2],
            min_tokens=3,
            temperature=temperature,
        )
        assert (got.token_id == 2) == (num_output >= 3)
        assert (got.token_id in {1, 2}) == (num_output >= 3)


def test_min_tokens_ignores_stop_ids_beyond_the_vocabulary():
    assert greedy([0.0, 2.0, 1.0], stop=[1, 3, 10**9], min_tokens=1) == 2


def test_presence_and_frequency_count_the_output_only():
    """Fault 36: presence once, frequency for each time, neither for prompt tokens."""
    logits = [2.0, 1.5]
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert greedy(logits, prompt=[0] * 9, **{penalty: 2.0}) == 0
        assert greedy(logits, prompt=[1], output=[0], **{penalty: 1.0}) == 1
    assert greedy(logits, output=[0, 0, 0], presence_penalty=0.4) == 0
    assert greedy(logits, output=[0], frequency_penalty=0.4) == 0
    assert greedy(logits, output=[0, 0], frequency_penalty=0.4) == 1
    assert greedy(logits, output=[1, 1], frequency_penalty=-0.3) == 1  # negative ones reward


def test_repetition_counts_the_prompt_too():
    """Fault 36: it divides what is positive and multiplies what is negative, once."""
    assert greedy([2.0, 1.5], prompt=[0], repetition_penalty=1.5) == 1
    assert greedy([2.0, 1.5], prompt=[1], output=[0], repetition_penalty=1.5) == 0
    assert greedy([2.0, 1.5], prompt=[1], output=[0] * 9, repetition_penalty=1.1) == 0
    assert greedy([-1.0, -1.5], prompt=[0], repetition_penalty=2.0) == 1
    assert greedy([2.0, 2.5], prompt=[0], repetition_penalty=0.5) == 0


# ---- rows among themselves -------------------------------------------------------------


def test_a_row_does_not_depend_on_the_others():
    """Faults 32, 33: 48 rows together, in another order, and each alone: all the same."""
    random = Random(0)
    vocab_size = 300
    rows = [
        random_row(random, vocab_size, logprobs=random.choice([None, 0, 5])) for _ in "x" * 44
    ]
    rows += [row(seed, temperature=t) for seed, t in enumerate([0, 1e-4, 0, 1000.0])]
    logits = torch.tensor([random_logits(random, vocab_size) for _ in rows])

    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    order = random.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert [s.token_id for s in together] == [s.token_id for s in alone]
    assert [s.token_id for s in shuffled] == [alone[i].token_id for i in order]
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == (
            None if b.logprobs is None else pytest.approx(b.logprobs, abs=1e-5)
        )


@pytest.mark.parametrize("at_once", [1, 3])
def test_slices_change_no_token(monkeypatch, at_once):
    """Nor a log-probability, nor an error."""
    random = Random(6)
    rows = [random_row(random, logprobs=random.choice([None, 0, 3])) for _ in range(8)]
    rows += [row(temperature=0), row(top_p=0.5), row(logprobs=2)]
    logits = torch.tensor([random_logits(random) for _ in rows])
    logits[4, 0] = NAN
    whole, most = sample(logits, rows), []
    monkeypatch.setattr(sampler, "MAX_BYTES", at_once * sampler.BYTES_PER_LOGIT * 12)
    choose = sampler._choose
    monkeypatch.setattr(sampler, "_choose", lambda x, *a: most.append(len(x)) or choose(x, *a))
    assert sample(logits, rows) == whole
    assert max(most) == at_once and sum(most) == len(rows)


def peak_bytes(run):
    """The most memory that torch's tensors take at once while run() runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(
        itertools.accumulate(nbytes for _, nbytes in sorted(changes, key=lambda c: c[0]))
    )


MEMORY_KINDS = {
    "plain": {},
    "nucleus": {"top_p": 0.9},
    "nearly all": {"top_k": 9_999, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 5},
}


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_the_memory_for_a_moment(monkeypatch, kind):
    """As much as is promised, whatever the number of rows."""
    rows = [row(seed, **MEMORY_KINDS[kind]) for seed in range(9)]
    logits = torch.randn(len(rows), 10_000, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(sampler, "MAX_BYTES", 4 * sampler.BYTES_PER_LOGIT * 10_000 + 1)
    for num_rows in (2, 9):
        most = sampler.sampling_bytes(num_rows, 10_000)
        assert most == min(num_rows, 4) * 10_000 * sampler.BYTES_PER_LOGIT
        taken = peak_bytes(lambda n=num_rows: begin_sample(logits[:n], rows[:n]))
        assert most / 4 < taken <= most, taken / (min(num_rows, 4) * 10_000)
    assert sampler.sampling_bytes(256, 128_256) <= 256 * 2**20


def test_no_rows():
    assert sample(torch.empty(0, 4), []) == []


BAD_LOGITS = {
    "nan": [0.0, NAN, 1.0, 2.0],
    "all nan": [NAN] * 4,
    "inf": [0.0, 1.0, INF, 2.0],
    "inf and nan": [INF, NAN, -INF, 2.0],
    "all -inf": [-INF] * 4,
}


def test_what_was_begun_may_be_read_later():
    """The tokens are on the device at once, valid ids in rows that end with an error too."""
    random = Random(11)
    rows = [random_row(random, 4, logprobs=k) for k in (None, 0, 2, 3, 4, 2, 1)]
    object.__setattr__(rows[1].params, "min_p", [0.1])  # no number
    rows.append(row(temperature=0, stop=[0, 1, 2, 3], min_tokens=1))
    logits = [random_logits(random, 4) for _ in rows]
    logits = torch.tensor([*logits, *BAD_LOGITS.values()])
    rows += [row(seed, logprobs=2) for seed, _ in enumerate(BAD_LOGITS)]
    expected = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(rows)]
    draws = begin_sample(logits, rows)
    tokens = draws.tokens_S.tolist()
    logits.fill_(NAN)  # as the next step may
    assert draws.read() == expected
    assert [s.error is not None for s in expected].count(True) == 1 + 1 + len(BAD_LOGITS)
    for token, s in zip(tokens, expected, strict=True):
        assert token == s.token_id if s.error is None else token in range(4)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", BAD_LOGITS)
def test_a_row_that_is_no_numbers_ends_alone(bad, temperature):
    """Invariant 15."""
    good = [[0.5, 1.0, -INF, 2.0], [3.0, 1.0, 0.0, -2.0]]
    rows = [row(s, temperature=temperature, logprobs=2, repetition_penalty=1.1) for s in (1, 2)]
    # min_tokens masks token 1: what is wrong there must be seen before.
    bad_row = row(temperature=temperature, logprobs=2, min_tokens=1, stop=[1])
    alone = sample(torch.tensor(good), rows)
    first, second, third = sample(
        torch.tensor([good[0], BAD_LOGITS[bad], good[1]]), [rows[0], bad_row, rows[1]]
    )
    assert [first, third] == alone
    assert first.error is None and third.error is None
    assert second.error and second.logprobs is None


def test_a_row_with_everything_held_back_ends_alone():
    """min_tokens left nothing to sample."""
    stuck = row(stop=[0, 1], min_tokens=1)
    first, second = sample(torch.tensor([[1.0, 2.0]] * 2), [stuck, row(temperature=0)])
    assert first.error
    assert second.token_id == 1


def test_probabilities_sum_to_one():
    """Also where something was cut: drafts are accepted by the quotient of two of them."""
    random = Random(4)
    rows = [random_row(random) for _ in range(40)]
    rows = [r for r in rows if r.params.temperature > 0]
    logits = torch.tensor([random_logits(random) for _ in rows])
    total = probabilities(logits, rows).sum(dim=-1)
    assert torch.allclose(total, torch.ones_like(total), rtol=1e-12)


def test_the_raw_logits_are_not_changed():
    random = Random(3)
    rows = [random_row(random) for _ in range(40)]
    logits = torch.tensor([random_logits(random) for _ in rows])
    before = logits.clone()
    sample(logits, rows)
    assert torch.equal(logits, before)


# ---- the stream of a request -----------------------------------------------------------


def test_the_draw_depends_on_seed_and_number_of_tokens_only():
    """Invariant 13: not on which tokens they are, nor on the prompt, nor on other settings."""
    logits = [0.0] * 64
    others = {"logprobs": 3, "n": 4, "ignore_eos": True, "min_tokens": 2, "max_tokens": 99}
    for num_output in range(20):
        a = one(logits, seed=5, prompt=[1], output=[2] * num_output)
        b = one(logits, seed=5, prompt=[9] * 30, output=list(range(num_output)), **others)
        assert a.token_id == b.token_id


@pytest.mark.parametrize("seeds", [range(100), [-1, 1], [2**63 - 1, -(2**63)]], ids=str)
def test_each_seed_and_each_step_draws_its_own(seeds):
    """64 equal tokens, eight steps: that two seeds agree has probability 4e-15."""
    streams = {
        tuple(one([0.0] * 64, seed=s, output=[0] * n).token_id for n in range(8)) for s in seeds
    }
    assert len(streams) == len(seeds)
    assert all(len(set(stream)) > 2 for stream in streams)


# ---- log-probabilities -----------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, 12, 50])
@pytest.mark.parametrize("case", range(8))
def test_logprobs_are_those_of_the_raw_logits(case, k):
    """Fault 37: the k best and the sampled one, whatever the rules do to the logits."""
    random = Random(case)
    logits = random_logits(random)
    got = sample(torch.tensor([logits]), [random_row(random, logprobs=k)])[0]
    expected = np.log(softmax(np.array(logits)))
    best = best_first(np.array(logits))[:k].tolist()
    assert set(got.logprobs) == {*best, got.token_id}
    assert got.logprobs == pytest.approx({t: expected[t] for t in got.logprobs}, abs=1e-5)


def test_logprobs_only_for_those_who_ask():
    rows = [row(logprobs=k, temperature=0) for k in (None, 0, 2)]
    sampled = sample(torch.tensor([[0.0, 2.0, 1.0]] * 3), rows)
    assert [s.logprobs and sorted(s.logprobs) for s in sampled] == [None, [1], [1, 2]]


def test_the_sampled_token_is_among_them_when_it_is_not_among_the_best():
    got = one([9.0, 0.0], prompt=[0], repetition_penalty=1e6, temperature=0, logprobs=1)
    assert got.token_id == 0  # 9e-6 is still above 0
    got = one([9.0, 0.0], stop=[0], min_tokens=1, logprobs=1)
    assert got.token_id == 1
    assert got.logprobs == pytest.approx({0: -1.234e-4, 1: -9.0001234}, rel=1e-3)


def test_the_smallest_top_p_there_is_keeps_one_token():
    """Fault 34: 5e-324 of less than half is 0, and the likeliest stays all the same."""
    logits = torch.tensor([[0.1, 0.3, 0.2], [0.2, 0.0, 0.1]])
    params = SamplingParams(temperature=1.0, top_k=1, top_p=5e-324)
    rows = [SamplingRow(params, [0], [], (), seed) for seed in (1, 2)]
    assert [one.token_id for one in sample(logits, rows)] == [1, 0]


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_row_that_raises_ends_alone(which):
    """Whatever it is that cannot be sampled: the others get what they get without it."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [row(seed, temperature=0.8, top_p=0.9, logprobs=2) for seed in range(4)]
    expected = sample(logits, rows)
    broken = dataclasses.replace(rows[which].params)
    object.__setattr__(broken, "top_p", "0.9")
    object.__setattr__(broken, "min_p", [0.1])
    rows[which] = dataclasses.replace(rows[which], params=broken)
    sampled = sample(logits, rows)
    assert "cannot be sampled: TypeError" in sampled[which].error
    for i in {0, 1, 2, 3} - {which}:
        assert sampled[i] == expected[i]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_backend_that_finds_a_number_beside_nan_hides_nothing(temperature):
    """Invariant 15, whatever a backend's maximum makes of NaN."""

    class SkipsNaN(Ops):
        def top_ids(self, x_SV, k):
            return super().top_ids(x_SV.nan_to_num(nan=-math.inf), k)

    logits_SV = torch.tensor([[1.0, math.nan, 2.0], [1.0, 0.0, 2.0]])
    params = SamplingParams(temperature=temperature, top_p=1e-9, seed=1)
    rows = [SamplingRow(params, [0], [], (), seed=1)] * 2
    nan, good = sample(logits_SV, rows, SkipsNaN())
    assert nan.error == sampler.NOT_NUMBERS and good.token_id == 2
