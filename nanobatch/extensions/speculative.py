"""Speculative decoding: guess the next tokens, and check all guesses in one step. Here drafts
are made and scheduled; speculative_runner.py checks them.

A decode step reads all weights to compute one token of each request. Computing several tokens
costs little more, if their values are guessed before:

    known            the cat sat on the mat . the cat
    draft                                             sat on the mat
    computed here                                 cat sat on the mat    5 tokens, 5 logits
    the model says                                    sat on a
    kept                                              sat on a          2 drafts, 1 of the model

A draft is more tokens for the scheduler's one line of arithmetic, computed like any others
after the request's last token. The tokens that the model samples after each of them are kept
up to the first that differs from the draft; the rest is discarded. So a request gets at least
one token a step.

Drafts come from the request itself (prompt lookup: what followed the last time?) or from a
small model with the same vocabulary (draft_model.py).

Always holds: a draft decides only how many tokens a step yields. Greedy tokens are the same as
without drafts, and so are all tokens with prompt lookup; with a draft model samples have the
same distribution. Drafts cause no preemption and delay no admission.

Seam: StepHook in plan.py. Source: speculative decoding (Leviathan et al., ICML 2023; Chen
et al., 2023); prompt lookup decoding (Saxena, 2023), vLLM's n-gram proposer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from nanobatch.config import EngineConfig
from nanobatch.plan import ScheduledRequest, SchedulerOutput
from nanobatch.policies.admission import OnDemand
from nanobatch.request import RequestStatus
from nanobatch.scheduler import Scheduler
from nanobatch.utils.arithmetic import cdiv

UNKNOWN = -1  # a draft token that the runner will fill in


def attach(scheduler: Scheduler) -> None:
    """Let a scheduler add drafts to its plans."""
    scheduler.hooks.append(DraftHook(scheduler, make_drafter(scheduler.config)))


class DraftHook:
    """The scheduler's part: add drafts to a finished plan, count them, reclaim their blocks."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter):
        self.scheduler = scheduler
        self.drafter = drafter
        # This step's entries with drafts, and how many tokens their requests had before.
        self._drafted: list[tuple[ScheduledRequest, int]] = []

    def begin_step(self) -> None:
        """Free the blocks that rejected drafts took."""
        allocator = self.scheduler.allocator
        for request in self.scheduler.running:
            num_blocks = cdiv(request.num_computed_tokens, allocator.block_size)
            if len(request.block_table) > num_blocks:
                allocator.free(request.block_table[num_blocks:])
                del request.block_table[num_blocks:]

    def end_step(self, plan: SchedulerOutput, budget: int) -> None:
        """Add drafts to requests that decode, while the budget and spare blocks last.

        A block is spare if no running request needs it in this step or, with all drafts
        accepted, in the next.
        """
        config, allocator = self.scheduler.config, self.scheduler.allocator
        running = [r for r in self.scheduler.running if r.status is RequestStatus.RUNNING]
        look_ahead = OnDemand(allocator)
        look_ahead.begin(running)
        num_spare = allocator.num_free_blocks - look_ahead.num_promised
        self._drafted = []
        for entry in plan.scheduled:
            request = entry.request
            if request.num_uncomputed_tokens > 1:
                continue
            num_next = request.num_tokens + 1
            num_blocks = look_ahead.num_blocks(request)
            most = min(
                config.num_speculative_tokens,
                budget,
                (num_blocks + num_spare) * config.block_size - num_next,
                # The last token of a request is only output: it is never computed.
                request.max_total_tokens - num_next,
            )
            if most <= 0:
                continue
            draft = self.drafter.propose(request.token_ids, most)
            entry.draft_token_ids = draft
            entry.num_tokens += len(draft)
            budget -= len(draft)
            num_spare -= max(0, cdiv(num_next + len(draft), config.block_size) - num_blocks)
            self.scheduler.allocate_blocks(request, entry.num_tokens)
            if draft:
                self._drafted.append((entry, request.num_tokens))

    def update(self) -> None:
        """Count the drafts, and the accepted ones: all new tokens but the last."""
        for entry, num_tokens_before in self._drafted:
            num_new = entry.request.num_tokens - num_tokens_before
            if num_new > 0:  # else it was aborted
                num_drafts = len(entry.draft_token_ids)
                entry.request.metrics.num_draft_tokens += num_drafts
                entry.request.metrics.num_accepted_tokens += min(num_new - 1, num_drafts)
        self._drafted = []


class Drafter(Protocol):
    """Proposes tokens to come."""

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow token_ids."""
        ...


class PromptLookup:
    """Propose what followed the last time that the request had the same few tokens.

    It looks for the request's last tokens, prompt_lookup_max of them down to
    prompt_lookup_min, at the latest earlier place. If what followed there reaches the end of
    the known tokens, it is repeated.

    Args:
        longest, shortest: how many last tokens to look for.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens; none if nothing repeats. 4,000 tokens take 0.1 ms."""
        text = array("q", token_ids)  # as bytes, since bytes.rfind is fast
        width, text = text.itemsize, text.tobytes()
        for n in range(min(self.longest, len(token_ids) - 1), self.shortest - 1, -1):
            end = _find_before(text, n, width)
            if end is not None:
                followed = token_ids[end : end + most]
                return [followed[i % len(followed)] for i in range(most)]
        return []


def _find_before(text: bytes, n: int, width: int) -> int | None:
    """The end, in tokens of `width` bytes, of the latest earlier place of the last n."""
    last, end = text[-n * width :], len(text) - 1
    while (start := text.rfind(last, 0, end)) >= 0:
        if start % width == 0:
            return start // width + n
        end = start + len(last) - 1  # a match that starts inside a token
    return None


class FromRunner:
    """Leave room for drafts that the runner's draft model fills in."""

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """`most` unknown tokens."""
        return [UNKNOWN] * most


def make_drafter(config: EngineConfig) -> Drafter:
    """The drafter that EngineConfig.speculative names (config.py has checked the name)."""
    if config.speculative == "ngram":
        return PromptLookup(config.prompt_lookup_max, config.prompt_lookup_min)
    return FromRunner()
