"""The workload that flags describe: checked, and then drawn or read from a trace.

    check_workload    before anything is loaded
    make_items        when the model is known, since it limits lengths and ids

Always holds: a workload that no memory or model has room for is refused before it is drawn or
run, by its flags or by the line of its trace.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence

from nanobatch.bench.flags import flag, refuse
from nanobatch.bench.trace import MAX_SPAN, read_trace
from nanobatch.bench.workload import (
    BURSTINESS,
    MAX_PROMPT_TOKENS,
    NUM_DRAWN_IDS,
    REQUEST_RATES,
    WorkItem,
    chat_requests,
    check_rate,
    parse_lengths,
    random_requests,
)

# What a trace file says itself, so that these flags would be ignored beside it.
DRAWN = ("num_prompts", "input_len", "output_len", "prefix_len", "num_prefixes", "num_turns",
         "request_rate", "burstiness")  # fmt: skip


def check_workload(args: Namespace) -> None:
    """Check the flags of the workload; args.request_rate becomes a list of rates.

    With a trace it becomes [None], and whatever would have been drawn None.
    """
    if args.trace is not None:
        refuse(args, DRAWN, "beside --trace: the file says it")
        if not os.path.exists(args.trace):  # Path.exists raises for a name that is too long
            raise ValueError(f"--trace is {args.trace}; there is no such file")
        if not os.path.isfile(args.trace):
            raise ValueError(f"--trace is {args.trace}; it must be a regular file")
        vars(args).update(dict.fromkeys(DRAWN), request_rate=[None])
        return
    if args.num_turns > 1:
        where = "with --num-turns: what a conversation's prompts share is what was said before"
        refuse(args, ("prefix_len", "num_prefixes"), where)
        args.prefix_len, args.num_prefixes = 0, 1
    elif args.prefix_len == 0:
        refuse(args, ("num_prefixes",), "with --prefix-len 0")
    _check_lengths(args)
    args.request_rate = [_rate(text) for text in args.request_rate.split(",")]
    if all(map(math.isinf, args.request_rate)):
        refuse(args, ("burstiness",), "without --request-rate: all requests come at once")
    check_rate("--burstiness", args.burstiness, BURSTINESS)


def _check_lengths(args: Namespace) -> None:
    """Raise ValueError if a length cannot be read, or the prompts would fill the memory."""
    most = {}
    for name in ("input_len", "output_len"):
        try:
            most[name] = parse_lengths(getattr(args, name)).most
        except ValueError as error:
            raise ValueError(f"{flag(name)}: {error}") from None
    # Turn t's prompt has t inputs and the t - 1 outputs between them.
    n = args.num_turns
    prompts = (
        args.prefix_len
        + (n * (n + 1) * most["input_len"] + n * (n - 1) * most["output_len"]) // 2
    )
    prefixes = args.num_prefixes * args.prefix_len
    num_tokens = args.num_prompts * prompts + prefixes
    if num_tokens > MAX_PROMPT_TOKENS:
        names = ("num_prompts", "input_len", "prefix_len", "num_prefixes", "num_turns")
        given = ", ".join(f"{flag(name)} is {getattr(args, name)}" for name in names)
        raise ValueError(
            f"{given}: the prompts may have {num_tokens} tokens; they must have at most "
            f"{MAX_PROMPT_TOKENS} together"
        )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise ValueError(f"--request-rate is {text!r}; it must be a number, or inf") from None
    check_rate("--request-rate", rate, REQUEST_RATES)
    return rate


def make_items(
    args: Namespace,
    request_rate: float | None,
    *,
    vocab_size: int,
    max_model_len: int,
    max_span: float = MAX_SPAN,
    encode: Callable[[str], list[int]] | None = None,
) -> list[WorkItem]:
    """The workload that the flags describe, in order of arrival; at least one request.

    Args:
        vocab_size, max_model_len: the model's.
        max_span: most seconds from the first request to the last.
        encode: turns a trace's texts to tokens.

    Raises:
        ValueError: the model or the time has no room for a request; names its line in a trace.
    """
    if args.trace is not None:
        limits = {"vocab_size": vocab_size, "max_model_len": max_model_len}
        limits |= {"max_span": max_span, "seed": args.seed}
        items = read_trace(args.trace, encode=encode, **limits)
        if not items:
            raise ValueError(f"--trace is {args.trace}; it has no requests")
        return items
    items = _draw_items(args, request_rate, min(vocab_size, NUM_DRAWN_IDS))
    longest, span = longest_of(items), items[-1].arrival_time
    if longest > max_model_len:
        names = ("prefix_len", "input_len", "output_len", "num_turns")
        given = ", ".join(f"{flag(name)} {getattr(args, name)}" for name in names)
        raise ValueError(
            f"{given}: the longest request has {longest} tokens, prompt and output; the model "
            f"was made for at most {max_model_len}"
        )
    if span > max_span:
        raise ValueError(
            f"--request-rate is {request_rate}; the last request comes after {span:.0f} s, and "
            f"it must come within {max_span:.0f}"
        )
    return items


def _draw_items(args: Namespace, request_rate: float | None, vocab_size: int) -> list[WorkItem]:
    drawn = {
        "request_rate": request_rate,
        "burstiness": args.burstiness,
        "vocab_size": vocab_size,
        "seed": args.seed,
    }
    lengths = (args.input_len, args.output_len)
    if args.num_turns > 1:
        return chat_requests(args.num_prompts, args.num_turns, *lengths, **drawn)
    drawn |= {"prefix_len": args.prefix_len, "num_prefixes": args.num_prefixes}
    return list(random_requests(args.num_prompts, *lengths, **drawn))


def describe_items(items: Sequence[WorkItem], request_rate: float | None) -> str:
    """How many requests come when, in words."""
    outputs = [item.num_output_tokens for item in items]
    if request_rate is None:
        when = f"of a trace within {items[-1].arrival_time:g} s"
    else:
        when = "at once" if request_rate == math.inf else f"at {request_rate:g} a second"
    return f"{len(items)} requests {when}, outputs of {min(outputs)} to {max(outputs)} tokens"


def longest_of(items: Sequence[WorkItem]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
