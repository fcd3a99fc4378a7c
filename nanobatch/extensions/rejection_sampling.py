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

from nanobatch import sampler
from nanobatch.kernels.distribution import pick
from nanobatch.request import Request
from nanobatch.sampler import adjust, probabilities, sample
from nanobatch.sampling_row import SamplingRow, uniform
from nanobatch.utils.transfer import to_device


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


def draw_tokens(probs_RV: Tensor, rows: Sequence[DraftedRow]) -> Tensor:
    """As sampler.draw_tokens, but a row's token is its proposal's if that is accepted."""
    proposals = {r: row.proposal for r, row in enumerate(rows) if row.proposal is not None}
    proposals = {r: p for r, p in proposals.items() if p.probs_V is not None}
    if not proposals:
        return sampler.draw_tokens(probs_RV, rows)

    def upload(numbers: list, dtype: torch.dtype = torch.float64) -> Tensor:
        return to_device(numbers, dtype, probs_RV.device)

    proposed = [(r, proposal.token_id) for r, proposal in proposals.items()]
    which_X, token_X = upload(proposed, torch.int64).unbind(1)
    p_XV = probs_RV[which_X]
    q_XV = torch.stack([proposal.probs_V for proposal in proposals.values()])
    left_XV = (p_XV - q_XV).clamp(min=0)
    # Nothing is left only if p and q differ by rounding alone: then draw from p.
    left_XV = torch.where(left_XV.sum(dim=1, keepdim=True) > 0, left_XV, p_XV)
    numbers = [uniform(row, ":left" if r in proposals else "") for r, row in enumerate(rows)]
    drawn_R = pick(probs_RV.index_copy(0, which_X, left_XV), upload(numbers))
    p_X, q_X = (x_XV.gather(1, token_X.unsqueeze(1)).squeeze(1) for x_XV in (p_XV, q_XV))
    is_accepted_X = upload([uniform(rows[r], ":accept") for r in proposals]) * q_X < p_X
    return drawn_R.index_copy(0, which_X, torch.where(is_accepted_X, token_X, drawn_R[which_X]))
