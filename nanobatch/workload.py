"""Requests to measure with: how long prompts and outputs are, and what they share.

Real lengths are skewed: most answers are short and a few are very long. A lognormal
distribution is close to what chat logs show (ShareGPT, LMSYS), and it is this spread that
static batching pays for.

Always holds: the same seed gives the same requests on every machine.

Taught in notebooks/08_measuring_honestly.ipynb. Source: the random dataset of `vllm bench`
(prefix_len, input_len, output_len), with lognormal in place of uniform lengths.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkItem:
    """One request to come: its prompt, and how many tokens it will emit."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def lognormal_length(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A length with the given mean before it is cut to [low, high].

    sigma is the standard deviation of the logarithm: 0 is constant; with 1 the median is 0.6
    of the mean, and one length in 20 is more than three times the mean.
    """
    length = round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return min(high, max(low, length))


def random_requests(
    num_prompts: int,
    input_len: int,
    output_len: int,
    *,
    prefix_len: int = 0,
    sigma: float = 1.0,
    vocab_size: int = 256,
    seed: int = 0,
) -> list[WorkItem]:
    """Prompts of random tokens behind one shared prefix, all with lognormal lengths.

    Args:
        num_prompts: how many.
        input_len: mean length of a prompt's own part, in tokens; at most 4 times that.
        output_len: mean length of the output, in tokens; at most 4 times that.
        prefix_len: tokens that all prompts begin with (a system prompt).
        sigma: spread of both lengths, see lognormal_length.
        vocab_size: token ids are drawn from [0, vocab_size).
        seed: of everything.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(prefix_len)]
    items = []
    for _ in range(num_prompts):
        num_own = lognormal_length(rng, input_len, sigma, 1, 4 * input_len)
        num_output = lognormal_length(rng, output_len, sigma, 1, 4 * output_len)
        own = [rng.randrange(vocab_size) for _ in range(num_own)]
        items.append(WorkItem(prefix + own, num_output))
    return items
