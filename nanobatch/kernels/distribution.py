"""The distribution of the next token: what temperature, min_p, top_k and top_p leave of logits.

    logits -> temperature -> min_p -> top_k -> top_p -> probabilities -> one draw

Sorted by logit, and equal logits by token id, what is kept comes first:

    logits     9.1  8.0  8.0  8.0  7.5  ...
    token ids   17    2    5   40    8
    kept         x    x    x                   threshold 8.0, and 2 of those that equal it

So top_k and top_p need no sort of the vocabulary, but a threshold and a number of its ties.
With top_k they are found among the row's k largest logits. With top_p alone any number of
tokens may be kept, and to ask whether some number suffices is to wait for a GPU. So there the
threshold is found bit by bit, each bit by a sum over the row: always the same 32 passes, whose
sums do not depend on any order of arrival (those of a histogram by atomic additions would). On
a CPU, where a look is free, the largest logits are tried first.

Always holds: no row depends on another; a row's likeliest token is kept; nothing here waits for
a GPU. Masses are float64.

Sources: nucleus sampling (Holtzman et al., 2019), min-p (Nguyen et al., 2024). The search is
radix selection with one bit a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanobatch.kernels.ops import largest
from nanobatch.utils.transfer import to_device

NUM_TRIED = 1024  # logits that a CPU tries before it searches the whole row


class Rules(NamedTuple):
    """The parameters of some rows.

    temperature, min_p, top_k, top_p: float64 [R, 1]; top_k is the size of the vocabulary where
        it is off.
    longest: the largest top_k of the rows that have one, or 0.
    by_mass: whether a row has top_p and no top_k.
    """

    temperature_R1: Tensor
    min_p_R1: Tensor
    top_k_R1: Tensor
    top_p_R1: Tensor
    longest: int
    by_mass: bool

    @classmethod
    def of(
        cls, settings: Sequence[tuple[float, ...]], vocab_size: int, device: torch.device
    ) -> Rules:
        """Of rows with these (temperature, min_p, top_k, top_p)."""
        columns = to_device(settings, torch.float64, device).unsqueeze(2).unbind(1)
        longest = max((int(k) for _, _, k, _ in settings if k < vocab_size), default=0)
        by_mass = any(p < 1 and k == vocab_size for _, _, k, p in settings)
        return cls(*columns, longest, by_mass)


Cut = tuple[Tensor, Tensor]  # the threshold, float32 [R, 1], and how many ties stay [R, 1]


def distribution(logits_RV: Tensor, rules: Rules) -> Tensor:
    """float64 [R, V]: the distribution of each row's next token.

    logits_RV: float32, no NaN, and a number above -inf in each row.
    """
    # In float64, and the maximum subtracted before the division: no temperature overflows.
    x_RV = logits_RV.double().sub_(logits_RV.amax(dim=-1, keepdim=True))
    probs_RV = x_RV.div_(rules.temperature_R1).softmax(dim=-1)
    del x_RV  # its memory is needed again
    least_R1 = rules.min_p_R1 * probs_RV.amax(dim=-1, keepdim=True)
    probs_RV.masked_fill_(probs_RV < least_R1, 0)
    if rules.longest > 0 or rules.by_mass:
        _drop(probs_RV, logits_RV, _cut(logits_RV, probs_RV, rules))
    return probs_RV.div_(probs_RV.sum(dim=-1, keepdim=True))


def _drop(probs_RV: Tensor, logits_RV: Tensor, cut: Cut) -> None:
    """Zero what is below the threshold, and of its ties those of the highest token ids."""
    threshold_R1, num_ties_R1 = cut
    is_dropped_RV = logits_RV == threshold_R1
    is_dropped_RV &= is_dropped_RV.cumsum(dim=-1, dtype=torch.int32) > num_ties_R1
    is_dropped_RV |= logits_RV < threshold_R1
    probs_RV.masked_fill_(is_dropped_RV, 0)


def _cut(logits_RV: Tensor, probs_RV: Tensor, rules: Rules) -> Cut:
    """What top_k and top_p keep of each row."""
    vocab_size, total_R1 = logits_RV.shape[1], probs_RV.sum(dim=-1, keepdim=True)
    has_top_k_R1, has_top_p_R1 = rules.top_k_R1 < vocab_size, rules.top_p_R1 < 1
    all_R1 = torch.full_like(total_R1, -math.inf).float(), torch.full_like(total_R1, math.inf)
    cut, is_open_R1 = all_R1, has_top_p_R1 & ~has_top_k_R1
    if rules.longest > 0:
        by_rank, _ = _cut_by_rank(logits_RV, probs_RV, rules, total_R1, rules.longest)
        cut = _choose(has_top_k_R1, by_rank, cut)
    if rules.by_mass and logits_RV.device.type == "cpu":
        num_tried = min(NUM_TRIED, vocab_size)
        by_rank, is_enough_R1 = _cut_by_rank(logits_RV, probs_RV, rules, total_R1, num_tried)
        cut = _choose(is_open_R1 & is_enough_R1, by_rank, cut)
        is_open_R1 = is_open_R1 & ~is_enough_R1
        if not is_open_R1.any():
            return cut
    if rules.by_mass:
        by_mass = _cut_by_mass(logits_RV, probs_RV, rules.top_p_R1 * total_R1)
        cut = _choose(is_open_R1, by_mass, cut)
    return cut


def _choose(is_first_R1: Tensor, first: Cut, second: Cut) -> Cut:
    """Row by row the first or the second."""
    (threshold_R1, num_ties_R1), (other_R1, num_others_R1) = first, second
    return (
        torch.where(is_first_R1, threshold_R1, other_R1),
        torch.where(is_first_R1, num_ties_R1, num_others_R1),
    )


def _cut_by_rank(
    logits_RV: Tensor, probs_RV: Tensor, rules: Rules, total_R1: Tensor, num_largest: int
) -> tuple[Cut, Tensor]:
    """The cut of each row among its largest logits; and whether these have the mass, [R, 1]."""
    sorted_RX, ids_RX = largest(logits_RV, num_largest)
    rank_X = torch.arange(num_largest, device=logits_RV.device)
    is_kept_RX = rank_X < rules.top_k_R1
    mass_RX = probs_RV.gather(1, ids_RX).masked_fill_(~is_kept_RX, 0).cumsum_(dim=-1)
    has_top_k_R1 = rules.top_k_R1 < logits_RV.shape[1]
    # top_p is a share of what top_k has left.
    mass_R1 = rules.top_p_R1 * torch.where(has_top_k_R1, mass_RX[:, -1:], total_R1)
    # The first is kept in any case: a mass may be 0, or round to it.
    is_kept_RX[:, 1:] &= (mass_RX[:, :-1] < mass_R1) | (rules.top_p_R1 >= 1)
    num_kept_R1 = is_kept_RX.sum(dim=-1, keepdim=True)
    threshold_R1 = sorted_RX.gather(1, num_kept_R1 - 1)
    num_ties_R1 = (is_kept_RX & (sorted_RX == threshold_R1)).sum(dim=-1, keepdim=True)
    return (threshold_R1, num_ties_R1), mass_RX[:, -1:] >= mass_R1


def _cut_by_mass(logits_RV: Tensor, probs_RV: Tensor, mass_R1: Tensor) -> Cut:
    """The largest threshold from which on the logits have a mass, and the fewest ties."""
    # A mass that is 0, or rounds to it, takes the likeliest token: as half of its own does.
    mass_R1 = mass_R1.maximum(probs_RV.amax(dim=-1, keepdim=True) / 2)
    keys_RV = _flip((logits_RV + 0.0).view(torch.int32))  # + 0.0: -0.0 becomes 0.0
    key_R1 = torch.full_like(mass_R1, -(2**31), dtype=torch.int64)
    for bit in reversed(range(32)):
        higher_R1 = key_R1 + 2**bit
        is_from_RV = keys_RV >= higher_R1.int()
        found_R1 = torch.where(is_from_RV, probs_RV, 0.0).sum(dim=-1, keepdim=True)
        key_R1 = torch.where(found_R1 >= mass_R1, higher_R1, key_R1)
    threshold_R1 = _flip(key_R1.int()).view(torch.float32)
    # If all logits fall short of the mass, which rounding can do, this is a NaN: keep all.
    threshold_R1 = torch.where(threshold_R1.isnan(), -math.inf, threshold_R1)
    above_R1 = torch.where(logits_RV > threshold_R1, probs_RV, 0.0).sum(dim=-1, keepdim=True)
    each_R1 = torch.where(logits_RV == threshold_R1, probs_RV, 0.0).amax(dim=-1, keepdim=True)
    num_ties_R1 = ((mass_R1 - above_R1) / each_R1).ceil()
    return threshold_R1, torch.where(each_R1 > 0, num_ties_R1, math.inf)


def _flip(bits: Tensor) -> Tensor:
    """int32: the bits of float32 numbers become integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def pick(probs_RV: Tensor, numbers_R: Tensor) -> Tensor:
    """int64 [R]: the token of each row at which the cumulative probability passes the row's
    number in [0, 1), float64 [R]. A row of probs_RV may have any sum: the number is a share
    of it."""
    cumulative_RV = probs_RV.cumsum(dim=-1)
    # A number has 53 bits, so it is at most 1 - 2**-53, and its share rounds to below the sum.
    draw_R1 = numbers_R.unsqueeze(1) * cumulative_RV[:, -1:]
    # right=True: the first token whose cumulative probability is above the draw; a token of
    # probability 0 adds nothing and is never the first.
    return torch.searchsorted(cumulative_RV, draw_R1, right=True).squeeze(1)
