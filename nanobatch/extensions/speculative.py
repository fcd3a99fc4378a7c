"""Guesses at the tokens to come, which one step then checks all at once.

A decode step reads all weights to make one token of each request. Reading them once for
several tokens costs little more, if somebody guesses them:

    known            the cat sat on the mat . the cat
    draft                                             sat on the mat
    computed here                                 cat sat on the mat    5 tokens, 5 logits
    the model says                                    sat on a
    kept                                              sat on a          2 drafts, 1 of its own

A draft is more tokens for the scheduler's one line of arithmetic: they are computed as any
others, behind the request's last token. What the model itself samples after each of them is
kept for as long as the draft said the same; the first token that differs is kept too, and what
lies behind it was computed for nothing. A request so gets at least its one token a step.

Drafts come from the request itself (prompt lookup: what followed the last time?) or from a
small model with the same vocabulary (extensions/draft_model.py).

Always holds: a draft decides how many tokens a step yields. Greedy ones are the same without
it, and so are all with prompt lookup; with a draft model samples have the same distribution.

Source: speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023); prompt lookup
decoding (Saxena, 2023), vLLM's n-gram proposer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from nanobatch.config import EngineConfig

UNKNOWN = -1  # a draft token that the runner has yet to fill in


class Drafter(Protocol):
    """Proposes tokens to come."""

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow token_ids."""
        ...


class PromptLookup:
    """What followed the last time that the request had the same few tokens.

    The longest end of its tokens that is there before, of prompt_lookup_max tokens down to
    prompt_lookup_min, is looked for; the latest place counts. Where what followed reaches the
    end of what is known, it is taken to repeat itself.

    Args:
        longest, shortest: tokens to look for.
    """

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens; none if nothing repeats. 4,000 tokens take 0.1 ms."""
        text = array("q", token_ids)  # as bytes, where C looks for us
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
        end = start + len(last) - 1  # between two tokens: only looks the same
    return None


class FromRunner:
    """Leaves room for drafts that the runner's draft model fills in."""

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """`most` tokens that are not known yet."""
        return [UNKNOWN] * most


def make_drafter(config: EngineConfig) -> Drafter | None:
    """What EngineConfig.speculative names (config.py has checked the name)."""
    if config.speculative == "ngram":
        return PromptLookup(config.prompt_lookup_max, config.prompt_lookup_min)
    return None if config.speculative is None else FromRunner()
