"""The distribution of the next token: what temperature, min_p, top_k and top_p leave of logits.

    logits -> temperature -> min_p -> top_k -> top_p -> probabilities -> one draw

All on the device of the logits, and nothing waits for it.

Always holds: no row depends on another; a row's likeliest token is always left.

Sources: nucleus sampling (Holtzman et al., 2019), min-p (Nguyen et al., 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(
    logits_RV: Tensor,
    temperature_R1: Tensor,
    min_p_R1: Tensor,
    top_k_R1: Tensor,
    top_p_R1: Tensor,
    is_cut: bool,
) -> Tensor:
    """float64 [R, V]: the distribution of each row's next token.

    Args:
        logits_RV: float32, no NaN, and a number above -inf in each row.
        temperature_R1, min_p_R1, top_k_R1, top_p_R1: float64. top_k is V where it is off.
        is_cut: False if top_k and top_p are off in all rows.
    """
    # In float64, and the maximum subtracted before the division: no temperature overflows.
    logits_RV = logits_RV.double() - logits_RV.amax(dim=-1, keepdim=True)
    probs_RV = (logits_RV / temperature_R1).softmax(dim=-1)
    least_R1 = min_p_R1 * probs_RV.amax(dim=-1, keepdim=True)
    probs_RV.masked_fill_(probs_RV < least_R1, 0)
    if is_cut:
        probs_RV = _keep_top(probs_RV, top_k_R1, top_p_R1)
    return probs_RV / probs_RV.sum(dim=-1, keepdim=True)


def _keep_top(probs_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor) -> Tensor:
    """Zero all but a row's top_k likeliest, and of those all past mass top_p."""
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    sorted_RV.masked_fill_(rank_V >= top_k_R1, 0)
    mass_RV = sorted_RV.cumsum(dim=-1)  # of what top_k left
    is_past_RV = (mass_RV - sorted_RV >= top_p_R1 * mass_RV[:, -1:]) & (top_p_R1 < 1)
    is_past_RV[:, 0] = False  # the likeliest token always stays
    sorted_RV.masked_fill_(is_past_RV, 0)
    return torch.zeros_like(probs_RV).scatter_(1, order_RV, sorted_RV)


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
