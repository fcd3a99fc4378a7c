"""A draft model's tokens: proposed with their distribution, accepted or rejected by sampling.

    q   the draft model's distribution of the next token      d   a token drawn from q
    p   the model's

d is accepted with probability min(1, p(d) / q(d)); if it is rejected, the token is drawn from
what is left of p, max(0, p - q), divided by its sum. Such tokens have the distribution p. Each
of the draws (d, accept or not, what is left) has a random number of its own.

Always holds (invariant 13): the numbers depend only on the request's seed and the token's
position.

Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanobatch.request import Request
from nanobatch.sampler import SamplingRow, adjust, pick, probabilities, sample, uniform


class Proposal(NamedTuple):
    """A token, and the distribution q it was drawn from, float64 [V]; None if it is certain."""

    token_id: int
    probs_V: Tensor | None


@dataclass(frozen=True)
class DraftedRow(SamplingRow):
    """A SamplingRow for the token after a draft. proposal: a draft model's for that token."""

    proposal: Proposal | None = None


def drafted_row(
    request: Request, draft: Sequence[int], proposal: Proposal | None = None
) -> DraftedRow:
    """A request's row, for the token after its own tokens and a draft's."""
    output = request.output_token_ids
    return DraftedRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[*output, *draft] if draft else output,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        proposal=proposal,
    )


def propose(logits_SV: Tensor, rows: Sequence[SamplingRow]) -> list[Proposal]:
    """A draft model's proposals, from its logits; arguments as of sampler.sample()."""
    sampled = sample(logits_SV, rows)
    # NaN logits: propose an arbitrary token.
    proposals = [Proposal(max(one.token_id, 0), None) for one in sampled]
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    random = [i for i in random if sampled[i].error is None]
    if random:
        some = [rows[i] for i in random]
        probs_RV = probabilities(adjust(logits_SV[random], some), some)
        for i, probs_V in zip(random, probs_RV, strict=True):
            proposals[i] = proposals[i]._replace(probs_V=probs_V)
    return proposals


def draw_tokens(probs_RV: Tensor, rows: Sequence[DraftedRow]) -> list[int]:
    """sampler.draw_tokens(), with a proposal's token where it is accepted."""
    numbers = [uniform(row) for row in rows]
    accepted = _accept(probs_RV, rows, numbers)
    drawn = pick(probs_RV, numbers)
    return [accepted.get(r, token_id) for r, token_id in enumerate(drawn)]


def _accept(
    probs_RV: Tensor, rows: Sequence[DraftedRow], numbers: list[float]
) -> dict[int, int]:
    """{row: its proposal's token}, where that is accepted. For each row with a proposal,
    probs_RV becomes what is left to draw from, and `numbers` the number to draw with."""
    proposals = {r: row.proposal for r, row in enumerate(rows) if row.proposal is not None}
    proposals = {r: one for r, one in proposals.items() if one.probs_V is not None}
    if not proposals:
        return {}
    which = list(proposals)
    p_XV = probs_RV[which]
    q_XV = torch.stack([one.probs_V for one in proposals.values()])
    token_X1 = torch.tensor([[one.token_id] for one in proposals.values()], device=p_XV.device)
    p_X, q_X = (
        torch.stack((p_XV, q_XV)).gather(2, token_X1.expand(2, -1, 1)).squeeze(2).tolist()
    )
    left_XV = (p_XV - q_XV).clamp(min=0)
    # Nothing is left only if p and q differ by rounding alone: then draw from p.
    probs_RV[which] = torch.where(left_XV.sum(dim=1, keepdim=True) > 0, left_XV, p_XV)
    accepted = {}
    for r, p, q in zip(which, p_X, q_X, strict=True):
        numbers[r] = uniform(rows[r], ":left")
        if uniform(rows[r], ":accept") * q < p:
            accepted[r] = proposals[r].token_id
    return accepted
