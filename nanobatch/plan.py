"""What the scheduler hands to the runner: one step's plan, in plain Python.

    SchedulerOutput   the step: rows, who lost its blocks, blocks to copy
    ScheduledRequest  one row: a request, and how many of its tokens are computed

Between schedule() and update() a request's num_computed_tokens still counts what earlier steps
computed, and its block_table already has room for this step.

Source: the names are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanobatch.request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a plan: the next num_tokens uncomputed tokens of a request.

    draft_token_ids: the last of them, if they are guesses (speculative.py); a draft model's are
        UNKNOWN until the runner fills them in.
    """

    request: Request
    num_tokens: int
    draft_token_ids: Sequence[int] = ()

    @property
    def samples(self) -> bool:
        """Whether the request's last known token is computed here: then one is sampled."""
        num_known = self.num_tokens - len(self.draft_token_ids)
        return self.request.num_uncomputed_tokens == num_known

    @property
    def num_logits(self) -> int:
        """Positions whose next token the model must say: the last known one and each draft."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass
class SchedulerOutput:
    """The plan of one step. Block copies, if any, come before the step computes.

    scheduled: who computes how many tokens.
    preempted: who lost its blocks to make room.
    padding: finished rows of a static batch that still cost their share.
    swap_out, swap_in: pairs of block ids, (device, host) and (host, device).
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    padding: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.scheduled)

    def give_back(self, request: Request) -> int:
        """Take a request's row, if it has one, out of the plan; return its tokens."""
        for i, row in enumerate(self.scheduled):
            if row.request is request:
                return self.scheduled.pop(i).num_tokens
        return 0
