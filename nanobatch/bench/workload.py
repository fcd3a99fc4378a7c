"""Requests to measure with: when they arrive, how long they are, and what they share.

    arrivals    all at once; at a constant rate; Poisson; gamma, burstier or calmer than that
    lengths     "128"                      always
                "uniform:16:512"           between
                "lognormal:200:1.0"        mean and sigma; at most 4 times the mean
                "bimodal:32:1000:0.9"      the first of the two with this probability
    prompts     random tokens behind shared prefixes; conversations that grow turn by turn

Real lengths are skewed: most answers are short and a few are very long. A lognormal
distribution is close to what chat logs show (ShareGPT, LMSYS), and this spread is what static
batching wastes time on.

Requests that were recorded are read from a file (trace.py).

Always holds: the same seed gives the same requests on every machine.

Taught in notebooks/08_measuring_honestly.ipynb. Source: the random dataset, the request rate
and the burstiness of `vllm bench serve`; bursts as in BurstGPT (Wang et al., 2024).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nanobatch.utils.checks import check_float, check_int

MOST_OF_THE_MEAN = 4  # a lognormal length is at most this many times its mean
MAX_SIGMA = 10.0
REQUEST_RATES = (1e-6, 1e6)  # a second; or inf
BURSTINESS = (1e-3, 1e6)  # or inf; below, a gamma distribution is all 0 and a rare giant
MAX_LENGTH = 10**7  # tokens; the longest contexts there are
MAX_REQUESTS = 10**6
MAX_PROMPT_TOKENS = 10**8  # of all prompts together: about 1 GB, and a minute to draw
NUM_DRAWN_IDS = 256  # random ids are below it, as bytes are


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt, how many tokens it will emit, and when it arrives (seconds)."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    arrival_time: float = 0.0


# ------------------------------------------------------------------------------ arrivals


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float, rng: random.Random
) -> Iterator[float]:
    """When requests arrive, in seconds, ascending.

    Args:
        num_requests: how many.
        request_rate: requests a second on average; inf: all at once.
        burstiness: shape of the gamma distribution of the times between: 1 is Poisson, less
            is burstier, more is calmer, inf is a constant rate.

    Raises:
        ValueError: a rate or a shape is out of its range.
    """
    check_rate("request_rate", request_rate, REQUEST_RATES)
    check_rate("burstiness", burstiness, BURSTINESS)
    now = 0.0
    for _ in range(num_requests):
        yield now
        if request_rate == math.inf:
            continue
        if burstiness == math.inf:
            now += 1 / request_rate
        else:
            now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))


def check_rate(name: str, value: float, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless value is inf or within the bounds."""
    if value != math.inf and not bounds[0] <= value <= bounds[1]:
        raise ValueError(f"{name} is {value}; it must be in [{bounds[0]}, {bounds[1]}], or inf")


# ------------------------------------------------------------------------------- lengths


class Lengths(NamedTuple):
    """Draws lengths when it is called. most: the longest that it may draw."""

    draw: Callable[[random.Random], int]
    most: int

    def __call__(self, rng: random.Random) -> int:
        return self.draw(rng)


def parse_lengths(spec: str | int) -> Lengths:
    """Turn a description (see the list above) into what draws lengths, 1 to MAX_LENGTH.

    Raises:
        ValueError: an unknown kind, or numbers out of range.
    """
    kind, *numbers = str(spec).split(":")
    try:
        if not numbers:
            length = _length("length", kind)
            return Lengths(lambda rng: length, length)
        num_wanted = {"uniform": 2, "lognormal": 2, "bimodal": 3}.get(kind, len(numbers))
        if len(numbers) != num_wanted:
            raise ValueError(f"{kind} takes {num_wanted} numbers, not {len(numbers)}")
        if kind == "uniform":
            low = _length("low", numbers[0])
            high = _length("high", numbers[1], low)
            return Lengths(lambda rng: rng.randint(low, high), high)
        if kind == "lognormal":
            mean, sigma = (float(x) for x in numbers)
            check_float("mean", mean, 1.0, MAX_LENGTH / MOST_OF_THE_MEAN)
            check_float("sigma", sigma, 0.0, MAX_SIGMA)
            most = math.ceil(MOST_OF_THE_MEAN * mean)
            return Lengths(lambda rng: lognormal_length(rng, mean, sigma, 1, most), most)
        if kind == "bimodal":
            short, long = _length("short", numbers[0]), _length("long", numbers[1])
            probability = float(numbers[2])
            check_float("probability", probability, 0.0, 1.0)
            most = max(short, long)
            return Lengths(lambda rng: short if rng.random() < probability else long, most)
    except ValueError as error:
        raise ValueError(f"length {spec!r} cannot be read: {error}") from None
    raise ValueError(
        f"length is {spec!r}; it must be a number, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or "
        "bimodal:SHORT:LONG:PROBABILITY"
    )


def _length(name: str, text: str, low: int = 1) -> int:
    length = int(text)
    check_int(name, length, low, MAX_LENGTH)
    return length


def lognormal_length(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A length with the given mean before it is cut to [low, high].

    sigma is the standard deviation of the logarithm: 0 is constant; with 1 the median is 0.6
    of the mean, and one length in 20 is more than three times the mean.
    """
    length = round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return min(high, max(low, length))


# ------------------------------------------------------------------------------- prompts


def random_tokens(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Ids below vocab_size, drawn evenly."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def random_requests(
    num_prompts: int,
    input_len: str | int,
    output_len: str | int,
    *,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    vocab_size: int = NUM_DRAWN_IDS,
    seed: int = 0,
) -> Iterator[WorkItem]:
    """Prompts of random tokens behind shared prefixes, in order of arrival.

    Args:
        num_prompts: how many.
        input_len, output_len: lengths of a prompt's own part and of the output, in tokens;
            see parse_lengths.
        prefix_len: tokens that prompts share at their beginning (a system prompt).
        num_prefixes: how many of them there are; each request has one, drawn evenly.
        request_rate, burstiness: see arrival_times.
        vocab_size: token ids are drawn from [0, vocab_size).
        seed: of everything.
    """
    check_int("num_prefixes", num_prefixes, 1)
    rng = random.Random(seed)
    own_len, out_len = parse_lengths(input_len), parse_lengths(output_len)
    prefixes = [random_tokens(rng, vocab_size, prefix_len) for _ in range(num_prefixes)]
    # The times have their own random stream: at another rate the requests are the same.
    which = random.Random(seed + 2)
    times = arrival_times(num_prompts, request_rate, burstiness, random.Random(seed + 1))
    for now in times:
        num_own, num_output = own_len(rng), out_len(rng)
        prefix = which.choice(prefixes)
        yield WorkItem(prefix + random_tokens(rng, vocab_size, num_own), num_output, now)


def chat_requests(
    num_conversations: int,
    num_turns: int,
    input_len: str | int,
    output_len: str | int,
    *,
    think_time: float = 10.0,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    vocab_size: int = NUM_DRAWN_IDS,
    seed: int = 0,
) -> list[WorkItem]:
    """Conversations: each turn's prompt is the conversation so far and new tokens.

    The answers in it are made up here, so that a turn need not wait for the answer before it:
    the next turn comes think_time seconds (on average) after the last.

    Args:
        num_conversations, num_turns: how many, and how many requests each.
        input_len, output_len: tokens that a turn adds, and tokens of its answer.
        think_time: seconds between turns.
        request_rate, burstiness: of new conversations; see arrival_times.
        vocab_size, seed: as in random_requests.

    Returns:
        all turns in order of arrival.
    """
    rng = random.Random(seed)
    own_len, out_len = parse_lengths(input_len), parse_lengths(output_len)
    starts = arrival_times(num_conversations, request_rate, burstiness, random.Random(seed + 1))
    items = []
    for now in starts:
        said: list[int] = []
        for _ in range(num_turns):
            said = said + random_tokens(rng, vocab_size, own_len(rng))
            num_output = out_len(rng)
            items.append(WorkItem(said, num_output, now))
            said = said + random_tokens(rng, vocab_size, num_output)
            now += rng.expovariate(1 / think_time)
    return sorted(items, key=lambda item: item.arrival_time)
