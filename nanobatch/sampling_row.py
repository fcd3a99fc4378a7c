"""What one request brings to the sampler: its rules, its tokens and its random stream.

    settings        temperature, min_p, top_k, top_p as numbers
    logit_changes   what penalties and min_tokens do to the logits of single tokens
    uniform         the next random number

A random number is a hash of (seed, number of output tokens), so a request's stream needs no
state: it is the same alone, in a crowd, and after a preemption.

Always holds (invariant 13): no random number depends on anything else.

Source: counter-based random numbers (Salmon et al., SC 2011).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nanobatch.request import Request, SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler needs to know about the request of one row of logits.

    params: its SamplingParams. prompt_token_ids, output_token_ids: its tokens so far.
    stop_token_ids: not sampled before min_tokens. seed: of its random stream.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Sequence[int]
    seed: int

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """A request's row, for its next token."""
        tokens = (request.prompt_token_ids, request.output_token_ids, request.stop_token_ids)
        return cls(request.params, *tokens, request.seed)


def settings(params: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, min_p, top_k (vocab_size if it is off) and top_p."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    return float(params.temperature), float(params.min_p), float(top_k), float(params.top_p)


def logit_changes(row: SamplingRow, vocab_size: int) -> dict[int, tuple[float, float]]:
    """By token: (factor, minus). A logit above 0 is divided by factor, any other multiplied by
    it; then minus is subtracted: infinity, where min_tokens holds a token back.

    Repetition counts prompt and output, frequency and presence the output only.
    """
    params, num_output = row.params, len(row.output_token_ids)
    changes: dict[int, tuple[float, float]] = {}
    factor = float(params.repetition_penalty)
    if factor != 1:
        seen = {*row.prompt_token_ids, *row.output_token_ids}
        changes = dict.fromkeys(seen, (factor, 0.0))
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        counts = Counter(row.output_token_ids)
        for token_id, count in counts.items():
            minus = params.frequency_penalty * count + params.presence_penalty
            changes[token_id] = (factor, minus)
    if num_output < params.min_tokens:
        in_vocab = [t for t in row.stop_token_ids if t < vocab_size]
        changes |= dict.fromkeys(in_vocab, (1.0, math.inf))
    return changes


def uniform(row: SamplingRow, use: str = "") -> float:
    """The row's next random number in [0, 1): 53 bits of a hash of its seed and position.

    use: names the draw, where one token needs several.
    """
    text = f"{row.seed}:{len(row.output_token_ids)}{use}".encode()
    bits = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11
    return bits / 2**53
