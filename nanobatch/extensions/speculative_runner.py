"""Where drafts are checked: a runner that samples after each token of a draft.

The model computes a request's last token and its draft in one step. A token is sampled after
each of them, by the request's own rules and with the random number of that position:

    computed    the last token   d1   d2   d3
    sampled                 d1   d2    x    y
    kept                    d1   d2    x         up to the first that differs from the draft

Prompt lookup needs nothing more. The sampled tokens are those that come without drafts; a draft
token is accepted with the probability that the model gives it.

A draft model's token comes with the distribution that it was drawn from. It is first accepted
or rejected by the sampler (rejection_sampling.py: draw_tokens).

Always holds: a step yields at least one token for each request that samples.

Drafts come from extensions/speculative.py (prompt lookup) and extensions/draft_model.py.
Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from nanobatch.attention import PagedAttend
from nanobatch.batch import Row, pack, row_of
from nanobatch.config import EngineConfig
from nanobatch.extensions.rejection_sampling import (
    DraftedRow,
    Proposals,
    drafted_row,
    draw_tokens,
)
from nanobatch.model_runner import ModelRunner
from nanobatch.models.config import settle_max_model_len
from nanobatch.models.decoder import Decoder
from nanobatch.plan import Launched, ScheduledRequest, StepResult
from nanobatch.sampler import Sampled, sample
from nanobatch.utils.extensions import load_extension


class SpeculativeRunner(ModelRunner):
    """A ModelRunner whose plans may have drafts.

    Args:
        draft: the draft model, of the model's dtype and device, if config.speculative is
            "draft". Its KV cache has blocks of the same ids; `caches` has the model's layers
            first, then the draft model's.

    Raises:
        ValueError: as ModelRunner, or the draft model does not fit the model.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        served: Collection[str] = (),
        reserve: Callable[[ModelRunner], int] = lambda runner: 0,
        draft: Decoder | None = None,
    ):
        self.draft = draft
        if draft is not None or config.speculative == "draft":
            setting = f"speculative is {config.speculative!r}"
            self._drafting = load_extension("draft_model", setting)
            settled = settle_max_model_len(config, model.config)
            self._drafting.check_draft_model(model, draft, settled)
        super().__init__(model, config, {*served, "speculative"}, reserve)
        self.can_overlap = False

    def decoders(self) -> list[Decoder]:
        return [self.model] if self.draft is None else [self.model, self.draft]

    def step(
        self, scheduled: Sequence[ScheduledRequest], previous_S: Tensor | None = None
    ) -> Launched:
        """As ModelRunner.step, with one more token for each draft token that is accepted. It
        waits for the tokens, since the next drafts follow them."""
        proposals: Proposals = {}
        if self.draft is not None:
            proposals = self._drafting.fill_in_drafts(scheduled, self._draft_logits)
        logits_LV = self.compute([_row(s) for s in scheduled])
        sampling = [s for s in scheduled if s.num_logits > 0]
        samples = []
        if sampling:
            rows = [row for s in sampling for row in _sampling_rows(s, proposals)]
            sampled = iter(sample(logits_LV, rows, self.backend, draw_tokens))
            for s in sampling:
                after_each = list(itertools.islice(sampled, s.num_logits))
                samples.append(accept(after_each, s.draft_token_ids))
        result = StepResult.of([s.request for s in sampling], samples)
        return Launched(lambda: result)

    def _draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute rows with the draft model and its caches; return logits, float32 [L, V]."""
        batch = pack(rows, self.config.block_size, self.device)
        caches = self.caches[self.model.config.num_layers :]
        attend = PagedAttend(batch, caches, self.backend)
        hidden_TE = self.draft(batch.token_ids_T, batch.positions_T, attend)
        return self.draft.logits(hidden_TE[batch.logits_indices_S])


def accept(sampled: Sequence[Sampled], draft_token_ids: Sequence[int]) -> Sequence[Sampled]:
    """Keep the samples up to the first that differs from the draft, that one included.

    Args:
        sampled: after the request's last token, then after each draft token: one more than
            draft_token_ids.

    Returns:
        at least one. An error after accepted tokens is dropped: the next step finds it again.
    """
    kept = []
    for token, drafted in itertools.zip_longest(sampled, draft_token_ids):
        if token.error is not None:
            break
        kept.append(token)
        if token.token_id != drafted:
            break
    return kept or sampled[:1]


def _row(s: ScheduledRequest) -> Row:
    """A request's next tokens, then its draft; logits after its last token and each draft."""
    row = row_of(s)
    if not s.draft_token_ids:
        return row
    return row._replace(token_ids=[*row.token_ids, *s.draft_token_ids], num_logits=s.num_logits)


def _sampling_rows(s: ScheduledRequest, proposals: Proposals) -> list[DraftedRow]:
    """The sampler's rows for a request: one for each token that is sampled, in order."""
    positions = itertools.zip_longest(
        range(s.num_logits), proposals.get(s.request.request_id, ())
    )
    return [drafted_row(s.request, s.draft_token_ids[:n], p) for n, p in positions]
