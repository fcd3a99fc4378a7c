"""Requests that were recorded: a trace, a file of JSON lines.

    {"arrival": 0.0, "prompt": "Once upon a time", "output_tokens": 20}
    {"arrival": 0.3, "prompt": [5, 7, 11], "output_tokens": 9}            ids
    {"arrival": 0.3, "prompt": 200, "output_tokens": 64}                  random tokens

Arrivals are seconds from any start, also since 1970, in any order.

Always holds: the first request arrives at 0, and the times between are the file's. Each line is
a request that the model can serve, or it is refused by its number.

Source: JSON lines with a time of arrival, as in Mooncake's traces (Qin et al., 2024).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanobatch.bench.workload import (
    MAX_LENGTH,
    MAX_PROMPT_TOKENS,
    MAX_REQUESTS,
    NUM_DRAWN_IDS,
    WorkItem,
    random_tokens,
)
from nanobatch.utils.checks import check_float, check_int, check_token_ids

MAX_LINE = 2**24  # bytes
MAX_TIME = 1e11  # seconds; times since 1970 are below it, and those in milliseconds above
MAX_SPAN = 1e9  # seconds from the first request to the last
MAX_MESSAGE = 300  # characters of what is wrong with a line; a value in it may be long


def read_trace(
    file: Path,
    *,
    encode: Callable[[str], list[int]] | None = None,
    vocab_size: int = NUM_DRAWN_IDS,
    max_model_len: int = MAX_LENGTH,
    max_span: float = MAX_SPAN,
    seed: int = 0,
) -> list[WorkItem]:
    """Requests from a file of JSON lines, in order of arrival; the first arrives at 0.

    Args:
        file: each line {"arrival": seconds from any start, "prompt": a text, a list of ids, or
            a count of random tokens, "output_tokens": count}; other keys are not read. Lines
            end in LF or CR LF; empty ones are left out.
        encode: turns text to tokens; without it, text is refused.
        vocab_size: ids are below it.
        max_model_len: most tokens of a request, prompt and output.
        max_span: most seconds from the first request to the last.
        seed: of random tokens.

    Raises:
        ValueError: a line is not such an object; the message has its number.
    """
    rng = random.Random(seed)
    found, num_tokens = [], 0  # (number of the line, request); tokens of the prompts
    with Path(file).open("rb") as lines:  # bytes, since text has other ends of lines too
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), 1):
            try:
                if len(line) > MAX_LINE:
                    raise ValueError(f"it has more than {MAX_LINE} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
                if not text:
                    continue
                item = _read_item(text, encode, vocab_size, max_model_len, rng)
                num_tokens += len(item.prompt_token_ids)
                if len(found) == MAX_REQUESTS or num_tokens > MAX_PROMPT_TOKENS:
                    raise ValueError(
                        f"there may be {MAX_REQUESTS} requests at most, and "
                        f"{MAX_PROMPT_TOKENS} tokens of prompts"
                    )
            except (ValueError, RecursionError) as error:  # json and repr are recursive
                what = error if isinstance(error, ValueError) else "it is nested too deeply"
                raise ValueError(f"{file}, line {number}: {str(what)[:MAX_MESSAGE]}") from None
            found.append((number, item))
    found.sort(key=lambda one: one[1].arrival_time)
    first = found[0][1].arrival_time if found else 0.0
    for number, item in found[-1:]:
        if item.arrival_time - first > max_span:
            raise ValueError(
                f"{file}, line {number}: arrival is {item.arrival_time}, which is "
                f"{item.arrival_time - first} seconds after the first; at most {max_span}"
            )
    return [replace(item, arrival_time=item.arrival_time - first) for _, item in found]


def _read_item(
    text: str,
    encode: Callable[[str], list[int]] | None,
    vocab_size: int,
    max_model_len: int,
    rng: random.Random,
) -> WorkItem:
    """The request of one line; the arguments are read_trace's."""
    raw = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_number)
    if not isinstance(raw, dict):
        raise ValueError('it must be an object, {"arrival": ..., ...}')
    missing = [name for name in ("arrival", "prompt", "output_tokens") if name not in raw]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing")
    prompt, arrival, num_output = raw["prompt"], raw["arrival"], raw["output_tokens"]
    check_float("arrival", arrival, 0.0, MAX_TIME)
    check_int("output_tokens", num_output, 1, max_model_len - 1)
    if isinstance(prompt, str):
        if encode is None:
            raise ValueError("prompt is text, and the model has no tokenizer")
        prompt.encode()  # half a surrogate pair is no text: a UnicodeError
        prompt = encode(prompt)
    elif not isinstance(prompt, list):
        check_int("prompt", prompt, 1, max_model_len - num_output)
        prompt = random_tokens(rng, min(vocab_size, NUM_DRAWN_IDS), prompt)
    check_token_ids("prompt", prompt)
    if not prompt:
        raise ValueError("prompt is empty; it must have at least one token")
    if max(prompt) >= vocab_size:
        raise ValueError(f"prompt has {max(prompt)}; the vocabulary ends at {vocab_size - 1}")
    if len(prompt) + num_output > max_model_len:
        raise ValueError(
            f"prompt and output have {len(prompt)} + {num_output} tokens; a request may have "
            f"at most {max_model_len}"
        )
    return WorkItem(prompt, num_output, float(arrival))


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, refused if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return found


def _no_number(name: str) -> None:
    """NaN and Infinity, which Python's json takes, are not JSON."""
    raise ValueError(f"{name} is not JSON")
