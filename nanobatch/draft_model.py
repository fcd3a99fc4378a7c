"""A small model that guesses for a large one.

It has a paged cache of its own, in blocks of the same ids: one block table serves both models.
In each step it computes what the large one is about to (prompts too), takes its own next token
after each request that has drafts, and computes that, and so on:

    known      r0 [ p0 p1 p2 ]      r1 [ .. o5 ]           a chunk of a prompt, and a decode
    1st pass       p0 p1 p2                o5  -> d1
    2nd                                    d1  -> d2
    3rd                                    d2              nothing to guess: only written
    large          p0 p1 p2                o5 d1 d2        then checks all in one pass

The last pass is there for the case that d2 is accepted: the next step then begins behind it.

A guess is sampled by the request's own rules, with the very random number that will sample the
large model's token in that place. Greedy requests so get greedy drafts; others the token that
two like distributions most often agree on.

Always holds: whatever block holds a token's keys in the large model's cache holds them in this
one too. So nothing need be said here of prefix hits, preemption, swap and rejected drafts, and
nothing of a request is kept between steps.

Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023); drafts and
samples from a common random number (Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nanobatch.batch import Row
from nanobatch.config import EngineConfig
from nanobatch.model import Decoder
from nanobatch.plan import ScheduledRequest
from nanobatch.sampler import sample, sampling_row

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


def fill_in_drafts(scheduled: Sequence[ScheduledRequest], logits: Logits) -> None:
    """Compute a plan's known tokens with the draft model, and set its rows' draft tokens.

    Args:
        scheduled: a plan's rows; draft_token_ids says how many each is to get.
        logits: computes rows with the draft model, through its cache: float32 [L, V].
    """
    drafting = [s for s in scheduled if s.draft_token_ids]
    drafts: list[list[int]] = [[] for _ in drafting]
    rows = [_known(s) for s in scheduled]
    while rows:
        logits_LV = logits(rows)
        asking = [i for i, s in enumerate(drafting) if len(drafts[i]) < len(s.draft_token_ids)]
        sampled = sample(
            logits_LV, [sampling_row(drafting[i].request, drafts[i]) for i in asking]
        )
        for i, one in zip(asking, sampled, strict=True):
            # Logits that are no numbers guess nothing: any token will do.
            drafts[i].append(max(one.token_id, 0))
        rows = [_next(drafting[i], drafts[i]) for i in asking]
    for s, draft in zip(drafting, drafts, strict=True):
        s.draft_token_ids = draft


def _known(s: ScheduledRequest) -> Row:
    """What of a row is no guess."""
    start = s.request.num_computed_tokens
    token_ids = s.request.token_ids[start : start + s.num_tokens - len(s.draft_token_ids)]
    return Row(token_ids, start, s.request.block_table, 1 if s.draft_token_ids else 0)


def _next(s: ScheduledRequest, draft: Sequence[int]) -> Row:
    """The last guess so far, to be computed; the very last is only written."""
    is_last = len(draft) == len(s.draft_token_ids)
    start = s.request.num_tokens + len(draft) - 1
    return Row(draft[-1:], start, s.request.block_table, 0 if is_last else 1)
