"""A draft model: a small model that proposes tokens for a large one.

It has a paged KV cache of its own, in blocks of the same ids: one block table serves both
models. In each step it first computes what the large model is about to compute (prompts too),
proposes a token for each request that has drafts, computes that token, and so on:

    known      r0 [ p0 p1 p2 ]      r1 [ .. o5 ]           a chunk of a prompt, and a decode
    1st pass       p0 p1 p2                o5  -> d1
    2nd                                    d1  -> d2
    3rd                                    d2  -> d3
    large          p0 p1 p2                o5 d1 d2        then checks all in one pass

The last pass is needed if d2 is accepted: the next step then starts behind it.

A proposal is sampled by the request's own rules; a greedy request gets greedy proposals. The
large model's tokens are then chosen by rejection sampling (rejection_sampling.py), wherever it
samples. So d3, which the large model does not compute, is its proposal for the token after d2,
and there is one after a prompt too. Thus the number of drafts decides nothing (invariant 13): a
seeded request gets the same tokens in any crowd. Without the draft model it gets other tokens
of the same distribution.

Always holds: a block that holds a token's keys in the large model's cache holds them in this
one too. So prefix hits, preemption, swap and rejected drafts need no code here, and nothing of
a request is kept between steps.

Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nanobatch.batch import Row
from nanobatch.config import EngineConfig
from nanobatch.extensions.rejection_sampling import Proposal, drafted_row, propose
from nanobatch.models.decoder import Decoder
from nanobatch.plan import ScheduledRequest

Proposals = dict[str, list[Proposal]]  # by request id
Logits = Callable[[Sequence[Row]], Tensor]  # of the rows' last num_logits tokens


def check_draft_model(model: Decoder, draft: Decoder | None, config: EngineConfig) -> None:
    """Raise ValueError unless draft can propose for model, or config asks for no draft model.

    Args:
        config: with max_model_len set.
    """
    if (config.speculative == "draft") != (draft is not None):
        what = "none is given" if draft is None else "one is given"
        raise ValueError(f"speculative is {config.speculative!r}, and of draft models {what}")
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
        scheduled: of a plan; draft_token_ids says how many tokens each is to get.
        logits: computes rows with the draft model and its caches: float32 [L, V].

    Returns:
        a proposal for each of the logits that the large model will compute; for a greedy
        request none for the last of them, where it would not matter.
    """
    found: Proposals = {s.request.request_id: [] for s in scheduled}
    for n in range(1 + max(len(s.draft_token_ids) for s in scheduled)):
        active = [s for s in scheduled if len(s.draft_token_ids) >= n]
        rows = [_row(s, found[s.request.request_id][:n]) for s in active]
        logits_LV = logits(rows)
        asking = [s for s, row in zip(active, rows, strict=True) if row.num_logits > 0]
        drafts = [[one.token_id for one in found[s.request.request_id]] for s in asking]
        sampling = [drafted_row(s.request, d) for s, d in zip(asking, drafts, strict=True)]
        for s, proposal in zip(asking, propose(logits_LV, sampling), strict=True):
            found[s.request.request_id].append(proposal)
    for s in scheduled:
        proposals = found[s.request.request_id][: len(s.draft_token_ids)]
        s.draft_token_ids = [one.token_id for one in proposals]
    return found


def _row(s: ScheduledRequest, proposals: Sequence[Proposal]) -> Row:
    """What to compute next: at first a request's known tokens, then its last proposal."""
    request, n = s.request, len(proposals)
    num_wanted = s.num_logits if request.params.temperature > 0 else s.num_logits - 1
    num_logits = 1 if n < num_wanted else 0
    if n > 0:
        start = request.num_tokens + n - 1
        return Row([proposals[-1].token_id], start, request.block_table, num_logits)
    start = request.num_computed_tokens
    token_ids = request.token_ids[start : start + s.num_tokens - len(s.draft_token_ids)]
    return Row(token_ids, start, request.block_table, num_logits)
