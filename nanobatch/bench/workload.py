"""Requests to measure with: when they arrive, how long they are, and what they share.

    arrivals    all at once; at a constant rate; Poisson; gamma, burstier or calmer than that
    lengths     "128"                      always
                "uniform:16:512"           between
                "lognormal:200:1.0"        mean and sigma; at most 4 times the mean
                "bimodal:32:1000:0.9"      the first of the two with this probability
    prompts     random tokens behind shared prefixes; conversations that grow turn by turn
    a trace     JSON lines: {"arrival": s, "prompt": text | ids | count, "output_tokens": n}

Real lengths are skewed: most answers are short and a few are very long. A lognormal
distribution is close to what chat logs show (ShareGPT, LMSYS), and this spread is what static
batching wastes time on.

Always holds: the same seed gives the same requests on every machine.

Taught in notebooks/08_measuring_honestly.ipynb. Source: the random dataset, the request rate
and the burstiness of `vllm bench serve`; bursts as in BurstGPT (Wang et al., 2024).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nanobatch.utils.checks import check_float, check_int

MOST_OF_THE_MEAN = 4  # a lognormal length is at most this many times its mean


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
        ValueError: a rate or a shape is not above 0.
    """
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if value != math.inf:
            check_float(name, value, 0.0, open_low=True)
    now = 0.0
    for _ in range(num_requests):
        yield now
        if request_rate == math.inf:
            continue
        if burstiness == math.inf:
            now += 1 / request_rate
        else:
            now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))


# ------------------------------------------------------------------------------- lengths


def parse_lengths(spec: str | int) -> Callable[[random.Random], int]:
    """Turn a description (see the list above) into a function that draws lengths, at least 1.

    Raises:
        ValueError: an unknown kind, or numbers out of range.
    """
    kind, *numbers = str(spec).split(":")
    try:
        if not numbers:
            length = int(kind)
            check_int("length", length, 1)
            return lambda rng: length
        values = [float(x) for x in numbers]
        num_wanted = {"uniform": 2, "lognormal": 2, "bimodal": 3}.get(kind, len(values))
        if len(values) != num_wanted:
            raise ValueError(f"{kind} takes {num_wanted} numbers, not {len(values)}")
        if kind == "uniform":
            low, high = (int(x) for x in values)
            check_int("low", low, 1)
            check_int("high", high, low)
            return lambda rng: rng.randint(low, high)
        if kind == "lognormal":
            mean, sigma = values
            check_float("mean", mean, 1.0)
            check_float("sigma", sigma, 0.0)
            most = math.ceil(MOST_OF_THE_MEAN * mean)
            return lambda rng: lognormal_length(rng, mean, sigma, 1, most)
        if kind == "bimodal":
            short, long, probability = int(values[0]), int(values[1]), values[2]
            check_int("short", short, 1)
            check_int("long", long, 1)
            check_float("probability", probability, 0.0, 1.0)
            return lambda rng: short if rng.random() < probability else long
    except (ValueError, OverflowError, IndexError) as error:
        raise ValueError(f"length {spec!r} cannot be read: {error}") from None
    raise ValueError(
        f"length is {spec!r}; it must be a number, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or "
        "bimodal:SHORT:LONG:PROBABILITY"
    )


def lognormal_length(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A length with the given mean before it is cut to [low, high].

    sigma is the standard deviation of the logarithm: 0 is constant; with 1 the median is 0.6
    of the mean, and one length in 20 is more than three times the mean.
    """
    length = round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return min(high, max(low, length))


# ------------------------------------------------------------------------------- prompts


def _random_tokens(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
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
    vocab_size: int = 256,
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
    prefixes = [_random_tokens(rng, vocab_size, prefix_len) for _ in range(num_prefixes)]
    # The times have their own random stream: at another rate the requests are the same.
    which = random.Random(seed + 2)
    times = arrival_times(num_prompts, request_rate, burstiness, random.Random(seed + 1))
    for now in times:
        num_own, num_output = own_len(rng), out_len(rng)
        prefix = which.choice(prefixes)
        yield WorkItem(prefix + _random_tokens(rng, vocab_size, num_own), num_output, now)


def chat_requests(
    num_conversations: int,
    num_turns: int,
    input_len: str | int,
    output_len: str | int,
    *,
    think_time: float = 10.0,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    vocab_size: int = 256,
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
            said = said + _random_tokens(rng, vocab_size, own_len(rng))
            num_output = out_len(rng)
            items.append(WorkItem(said, num_output, now))
            said = said + _random_tokens(rng, vocab_size, num_output)
            now += rng.expovariate(1 / think_time)
    return sorted(items, key=lambda item: item.arrival_time)


def read_trace(
    file: Path,
    *,
    encode: Callable[[str], list[int]] | None = None,
    vocab_size: int = 256,
    seed: int = 0,
) -> list[WorkItem]:
    """Requests from a file of JSON lines, in order of arrival.

    Args:
        file: each line {"arrival": seconds, "prompt": a text, a list of ids, or a count of
            random tokens, "output_tokens": count}.
        encode: turns text to tokens; without it, text is refused.
        vocab_size, seed: of random tokens.

    Raises:
        ValueError: a line is not such an object; the message has its number.
    """
    rng = random.Random(seed)
    items = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            prompt, arrival = raw["prompt"], raw["arrival"]
            check_float("arrival", arrival, 0.0)
            check_int("output_tokens", raw["output_tokens"], 1)
            if isinstance(prompt, str):
                if encode is None:
                    raise ValueError("prompt is text, and the model has no tokenizer")
                prompt = encode(prompt)
            elif not isinstance(prompt, list):
                check_int("prompt", prompt, 1)
                prompt = _random_tokens(rng, vocab_size, prompt)
            items.append(WorkItem(prompt, raw["output_tokens"], float(arrival)))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, line {number}: {what}") from None
    return sorted(items, key=lambda item: item.arrival_time)
