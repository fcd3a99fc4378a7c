"""A small model that guesses for a large one.

It has a paged cache of its own, in blocks of the same ids: one block table serves both models.
In each step it computes what the large one is about to (prompts too), takes its own next token
after each request that has drafts, and computes that, and so on:

    known      r0 [ p0 p1 p2 ]      r1 [ .. o5 ]           a chunk of a prompt, and a decode
    1st pass       p0 p1 p2                o5  -> d1
    2nd                                    d1  -> d2
    3rd                                    d2  -> d3
    large          p0 p1 p2                o5 d1 d2        then checks all in one pass

The last pass is there for the case that d2 is accepted: the next step then begins behind it.

A guess is sampled by the request's own parameters; a greedy request gets greedy guesses. The
large model's tokens are then chosen by rejection sampling (extensions/rejection_sampling.py),
wherever it samples: d3, which it does not compute, is a proposal for the token after d2, and so
is the guess after a prompt. So the number of drafts there was room for decides nothing
(invariant 13): a seeded request says the same in any crowd. Without the draft model its tokens
are others of the same distribution.

Always holds: whatever block holds a token's keys in the large model's cache holds them in this
one too. So nothing need be said here of prefix hits, preemption, swap and rejected drafts, and
nothing of a request is kept between steps.

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
    """Raise ValueError unless draft can guess for model.

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
    """Compute a plan's known tokens with the draft model, and set its rows' draft tokens.

    Args:
        scheduled: a plan's rows; draft_token_ids says how many each is to get.
        logits: computes rows with the draft model, through its cache: float32 [L, V].

    Returns:
        what it proposes for each of the logits that the large model will compute; nothing for
        the last of a greedy request, where it would not matter.
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
    """What comes behind n proposals: at first a row's known tokens, then the last proposal."""
    request, n = s.request, len(proposals)
    num_wanted = s.num_logits if request.params.temperature > 0 else s.num_logits - 1
    num_logits = 1 if n < num_wanted else 0
    if n > 0:
        start = request.num_tokens + n - 1
        return Row([proposals[-1].token_id], start, request.block_table, num_logits)
    start = request.num_computed_tokens
    token_ids = request.token_ids[start : start + s.num_tokens - len(s.draft_token_ids)]
    return Row(token_ids, start, request.block_table, num_logits)
