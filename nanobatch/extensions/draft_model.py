"""A draft model: a small model that proposes tokens for a large one.

The draft model has its own paged KV cache, with the same block ids: one block table serves both
models. In each step it first computes the tokens that the large model will compute (prompts
too). Then it proposes a token for each request with drafts, computes that token, and so on.
Here r1 has two drafts, d1 and d2:

    known      r0 [ p0 p1 p2 ]      r1 [ .. o5 ]           a chunk of a prompt, and a decode
    1st pass       p0 p1 p2                o5  -> d1
    2nd                                    d1  -> d2
    3rd                                    d2  -> d3
    large          p0 p1 p2                o5 d1 d2        then checks all in one pass

The 3rd pass writes the keys and values of d2, which the next step needs if d2 is accepted.

A request with temperature 0 gets greedy proposals; otherwise proposals are sampled by the
request's own parameters, and the large model accepts or rejects them (rejection_sampling.py).

The large model samples three tokens here: after o5, d1 and d2. Each needs a proposal to accept
or reject, so the last pass also proposes d3, although d3 is no draft: the large model does not
compute it in this step. The token after a prompt has a proposal too, though there are no drafts
yet. So every token of a sampled request is drawn in the same way, and the number of drafts
changes no token (invariant 13). Without a draft model the tokens are others, of the same
distribution.

Always holds: a block with a token's keys in the large model's cache has them in the draft
model's cache too. So prefix hits, preemption, swap and rejected drafts need no code here, and
no state of a request is kept between steps.

Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nanobatch.batch import Row
from nanobatch.config import EngineConfig
from nanobatch.extensions.rejection_sampling import Proposal, Proposals, drafted_row, propose
from nanobatch.models.decoder import Decoder
from nanobatch.plan import ScheduledRequest

Logits = Callable[[Sequence[Row]], Tensor]  # logits of each row's last num_logits tokens


def check_draft_model(model: Decoder, draft: Decoder | None, config: EngineConfig) -> None:
    """Raise ValueError if the draft model is missing, not wanted, or does not fit the model.

    Args:
        config: with max_model_len set.
    """
    if (config.speculative == "draft") != (draft is not None):
        what = "none is given" if draft is None else "one is given"
        raise ValueError(f"speculative is {config.speculative!r}; of draft models {what}")
    if draft is None:
        return
    ours, theirs = model.config.vocab_size, draft.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"draft_model has a vocabulary of {theirs} tokens; the model has one of {ours}"
        )
    longest = draft.config.max_position_embeddings
    if config.max_model_len > longest:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; the draft_model was made for at most "
            f"{longest}"
        )


def fill_in_drafts(scheduled: Sequence[ScheduledRequest], logits: Logits) -> Proposals:
    """Compute a plan's known tokens with the draft model, and set its draft tokens.

    Args:
        scheduled: a plan's entries; draft_token_ids has the length that each draft is to get.
        logits: computes rows with the draft model and its caches; returns float32 [L, V].

    Returns:
        by request id, a proposal for each token that the large model will sample. A greedy
        request has none for the last one: it accepts its best token whatever is proposed.
    """
    found: Proposals = {s.request.request_id: [] for s in scheduled}
    for n in range(1 + max(len(s.draft_token_ids) for s in scheduled)):
        active = [s for s in scheduled if len(s.draft_token_ids) >= n]
        rows = [_row(s, found[s.request.request_id][:n]) for s in active]
        logits_LV = logits(rows)
        asking = [s for s, row in zip(active, rows, strict=True) if row.num_logits > 0]
        drafts = [[p.token_id for p in found[s.request.request_id]] for s in asking]
        sampling = [drafted_row(s.request, d) for s, d in zip(asking, drafts, strict=True)]
        for s, proposal in zip(asking, propose(logits_LV, sampling), strict=True):
            found[s.request.request_id].append(proposal)
    for s in scheduled:
        proposals = found[s.request.request_id][: len(s.draft_token_ids)]
        s.draft_token_ids = [p.token_id for p in proposals]
    return found


def _row(s: ScheduledRequest, proposals: Sequence[Proposal]) -> Row:
    """What to compute next: in the first pass the known tokens, later the last proposal."""
    request, n = s.request, len(proposals)
    num_wanted = s.num_logits if request.params.temperature > 0 else s.num_logits - 1
    num_logits = 1 if n < num_wanted else 0
    if n > 0:
        start = request.num_tokens + n - 1
        return Row([proposals[-1].token_id], start, request.block_table, num_logits)
    start = request.num_computed_tokens
    token_ids = request.token_ids[start : start + s.num_tokens - len(s.draft_token_ids)]
    return Row(token_ids, start, request.block_table, num_logits)
