"""A draft model's tokens: proposed with their distribution, accepted or rejected by sampling.

    q   the draft model's distribution of the next token      d   a token drawn from q
    p   the model's

d is accepted with probability min(1, p(d) / q(d)); if it is rejected, the token is drawn from
what is left of p, max(0, p - q), divided by its sum. Such tokens have the distribution p. Three
random numbers are used: to draw d, to accept or reject it, and to draw from what is left.

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
    """A token, and the distribution q it was drawn from, float64 [V]; None if it is greedy."""

    token_id: int
    probs_V: Tensor | None


Proposals = dict[str, list[Proposal]]  # by request id


@dataclass(frozen=True)
class DraftedRow(SamplingRow):
    """A SamplingRow for the token after a draft. proposal: the draft model's for that token."""

    proposal: Proposal | None = None


def drafted_row(
    request: Request, draft: Sequence[int], proposal: Proposal | None = None
) -> DraftedRow:
    """A request's row, for the token after its known tokens and a draft."""
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
    proposals = [Proposal(max(s.token_id, 0), None) for s in sampled]
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    drawn = [i for i in drawn if sampled[i].error is None]
    if drawn:
        drawn_rows = [rows[i] for i in drawn]
        probs_RV = probabilities(adjust(logits_SV[drawn], drawn_rows), drawn_rows)
        for i, probs_V in zip(drawn, probs_RV, strict=True):
            proposals[i] = proposals[i]._replace(probs_V=probs_V)
    return proposals


def draw_tokens(probs_RV: Tensor, rows: Sequence[DraftedRow]) -> list[int]:
    """As sampler.draw_tokens, but a row's token is its proposal's if that is accepted."""
    numbers = [uniform(row) for row in rows]
    accepted = _accept(probs_RV, rows, numbers)
    drawn = pick(probs_RV, numbers)
    return [accepted.get(r, token_id) for r, token_id in enumerate(drawn)]


def _accept(
    probs_RV: Tensor, rows: Sequence[DraftedRow], numbers: list[float]
) -> dict[int, int]:
    """Accept or reject the proposals; return {row: token} for the accepted ones.

    In place, for each row with a proposal: probs_RV becomes what is left to draw from if it is
    rejected, and its entry of `numbers` the random number for that draw.
    """
    proposals = {r: row.proposal for r, row in enumerate(rows) if row.proposal is not None}
    proposals = {r: p for r, p in proposals.items() if p.probs_V is not None}
    if not proposals:
        return {}
    which = list(proposals)
    p_XV = probs_RV[which]
    q_XV = torch.stack([proposal.probs_V for proposal in proposals.values()])
    token_ids = [[proposal.token_id] for proposal in proposals.values()]
    token_X1 = torch.tensor(token_ids, device=p_XV.device)
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
