"""What top_k, top_p and min_p keep, token by token, against a sort in NumPy's float64.

`oracle` sorts the vocabulary by logit, lower token ids first among equals, and walks down. A
top_p that falls between two sums of probabilities leaves no doubt where to stop; so most cases
take theirs in the middle of the last kept token. Both ways to the cut are tried on each case:
the one that a CPU takes, and the one that a GPU does.
"""

from random import Random

import numpy as np
import pytest
import torch

from nanobatch import SamplingParams
from nanobatch.kernels import distribution as module
from nanobatch.kernels.distribution import pick
from nanobatch.sampler import SamplingRow, probabilities

INF = float("inf")


def oracle(logits_V, params):
    """float64 [V]: the distribution, and the tokens in order, likeliest first."""
    x_V = logits_V.astype(np.float64)
    with np.errstate(over="ignore"):
        probs_V = np.exp((x_V - x_V.max()) / params.temperature)
    probs_V /= probs_V.sum()
    probs_V[probs_V < params.min_p * probs_V.max()] = 0
    order = np.argsort(-logits_V, kind="stable")
    if params.top_k > 0:
        probs_V[order[params.top_k :]] = 0
    if params.top_p < 1:
        sums = np.concatenate([[0], probs_V[order].cumsum()])
        is_past = sums[:-1] >= params.top_p * sums[-1]
        is_past[0] = False
        probs_V[order[is_past]] = 0
    return probs_V / probs_V.sum(), order


def mid_token(logits_V, params, num_kept):
    """The same parameters with a top_p that ends in the middle of the num_kept-th token."""
    probs_V, order = oracle(logits_V, params)
    sums = np.concatenate([[0], probs_V[order].cumsum()])
    middle = float((sums[num_kept - 1] + sums[num_kept]) / 2)
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, min_p=params.min_p, top_p=middle
    )


def compare(monkeypatch, logits_RV, all_params):
    rows = [SamplingRow(params, (), (), (), seed=0) for params in all_params]
    expected_RV = np.stack(
        [oracle(x, p)[0] for x, p in zip(logits_RV, all_params, strict=True)]
    )
    numbers = np.random.default_rng(0).random(len(rows))
    shares = numbers * expected_RV.cumsum(axis=1)[:, -1]
    draws = [
        int(np.searchsorted(row.cumsum(), share, side="right"))
        for row, share in zip(expected_RV, shares, strict=True)
    ]
    for num_tried in (module.NUM_TRIED, 1):
        monkeypatch.setattr(module, "NUM_TRIED", num_tried)
        probs_RV = probabilities(torch.from_numpy(logits_RV), rows)
        for r, params in enumerate(all_params):
            kept, wanted = (np.flatnonzero(p[r]) for p in (probs_RV.numpy(), expected_RV))
            assert np.array_equal(kept, wanted), (params, len(kept), len(wanted))
        np.testing.assert_allclose(probs_RV.numpy(), expected_RV, rtol=1e-9)
        assert pick(probs_RV, torch.from_numpy(numbers)).tolist() == draws


def logits_of(kind, vocab_size, seed):
    rng = np.random.default_rng(seed)
    gauss_V = rng.normal(0, 3, vocab_size)
    of_kind = {
        "gauss": gauss_V,
        "ties": gauss_V.round(),  # a few values, each many times
        "halves": (4 * gauss_V).round() / 8,
        "flat": np.full(vocab_size, 1.5),
        "flat below 0": np.full(vocab_size, -7.25),
        "zeros of both signs": np.where(gauss_V > 0, 0.0, -0.0),
        "one hot": np.where(np.arange(vocab_size) == vocab_size // 2, 200.0, -200.0),
        "mostly impossible": np.where(np.arange(vocab_size) % 7 > 0, -INF, gauss_V),
        "one possible": np.where(np.arange(vocab_size) == vocab_size - 1, 0.0, -INF),
        "huge": gauss_V * 1e37,
        "tiny": gauss_V * 1e-40,  # below the smallest normal number
    }
    return np.asarray(of_kind[kind], dtype=np.float32)


KINDS = ("gauss", "ties", "halves", "flat", "flat below 0", "zeros of both signs", "one hot",
         "mostly impossible", "one possible", "huge", "tiny")  # fmt: skip


def params_for(random, logits_V):
    """Any combination of the rules; with top_p one that is not on an edge."""
    vocab_size = len(logits_V)
    params = SamplingParams(
        temperature=random.choice([0.01, 0.7, 1.0, 30.0, 1e300]),
        top_k=random.choice([0, 0, 1, 2, vocab_size // 3, vocab_size - 1, vocab_size + 9]),
        min_p=random.choice([0.0, 0.0, 0.05, 0.999]),
    )
    if random.random() < 0.3:
        return params
    num_possible = np.count_nonzero(oracle(logits_V, params)[0] > 1e-13)
    return mid_token(logits_V, params, random.randint(1, num_possible))


@pytest.mark.parametrize("vocab_size", [6, 97, 1500])
def test_the_kept_tokens_are_those_of_a_sort(monkeypatch, vocab_size):
    """Rows of every kind in one batch, each with rules of its own."""
    random = Random(vocab_size)
    logits_RV = np.stack([logits_of(kind, vocab_size, r) for kind in KINDS for r in range(5)])
    compare(monkeypatch, logits_RV, [params_for(random, logits_V) for logits_V in logits_RV])


@pytest.mark.parametrize("kind, num_kept", [("gauss", 900), ("gauss", 90_000), ("ties", 60_001),
                                            ("flat", 100_001)])  # fmt: skip
def test_so_they_are_in_a_large_vocabulary(monkeypatch, kind, num_kept):
    logits_RV = np.stack([logits_of(kind, 131_072, seed) for seed in range(2)])
    plain, min_p = SamplingParams(), SamplingParams(min_p=1e-4, top_k=50_000)
    num_left = np.count_nonzero(oracle(logits_RV[1], min_p)[0])
    all_params = [mid_token(logits_RV[0], plain, num_kept),
                  mid_token(logits_RV[1], min_p, min(num_kept, num_left))]  # fmt: skip
    compare(monkeypatch, logits_RV, all_params)


@pytest.mark.parametrize("top_p", [5e-324, 1e-300, 1 - 2**-53])
def test_the_ends_of_top_p(monkeypatch, top_p):
    logits_RV = np.stack([logits_of(kind, 2000, 0) for kind in KINDS])
    rows = [SamplingRow(SamplingParams(top_p=top_p), (), (), (), 0) for _ in KINDS]
    for num_tried in (module.NUM_TRIED, 1):
        monkeypatch.setattr(module, "NUM_TRIED", num_tried)
        probs_RV = probabilities(torch.from_numpy(logits_RV), rows)
        for logits_V, probs_V in zip(logits_RV, probs_RV.numpy(), strict=True):
            if top_p < 0.5:  # the likeliest one, of equals the first
                assert np.flatnonzero(probs_V).tolist() == [int(np.argmax(logits_V))]
            else:
                whole_V, _ = oracle(logits_V, SamplingParams())
                np.testing.assert_allclose(probs_V, whole_V, rtol=1e-9, atol=1e-12)


def test_of_ties_the_lowest_token_ids_stay():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 1.0]] * 2)
    rows = [
        SamplingRow(SamplingParams(**p), (), (), (), 0) for p in ({"top_k": 3}, {"top_p": 0.6})
    ]
    # e^2 = 7.39 and e = 2.72: of 19.26 together, 0.6 takes the first two e's
    assert [p.nonzero().flatten().tolist() for p in probabilities(logits, rows)] == [
        [1, 2, 3]
    ] * 2
