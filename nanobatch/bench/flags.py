"""Flags that several subcommands share: names, limits, and what they describe.

    add_flags         puts flags on a parser; each subcommand lists its own, with their defaults
    check_...         a ValueError that names the flag: it cannot be, or would be ignored
    make_items        the workload that the flags describe
    engine_config     the engine that they describe

`args.given` holds the names of the flags that were typed, so that one which would have no
effect can be refused.

Always holds: all flags are checked before anything is measured. Names follow `vllm bench` and
EngineConfig.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from nanobatch.bench.workload import (
    WorkItem,
    chat_requests,
    parse_lengths,
    random_requests,
    read_trace,
)
from nanobatch.config import (
    ADMISSIONS,
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    PREEMPTIONS,
    EngineConfig,
)
from nanobatch.metrics import GOODPUT_METRICS

LENGTHS = "a length: 128, uniform:16:512, lognormal:200:1, bimodal:32:1000:0.9"
PLOT_FORMATS = (".png", ".pdf", ".svg")
MAX_COUNT = 10**9

FLAGS = {
    "model": {"help": "anything LLM() takes"},
    "dtype": {"choices": DTYPES},
    "device": {"choices": DEVICES},
    "threads": {"type": int, "help": "torch's threads"},
    "repeat": {"type": int, "help": "passes of each, in turns"},
    # Workload
    "num_prompts": {"type": int, "help": "requests, or conversations with --num-turns"},
    "input_len": {"metavar": "LENGTH", "help": "tokens of a prompt's own part"},
    "output_len": {"metavar": "LENGTH", "help": "tokens of an output"},
    "prefix_len": {"type": int, "help": "tokens that prompts share at their beginning"},
    "num_prefixes": {"type": int, "help": "different shared prefixes"},
    "num_turns": {"type": int, "help": "requests of each conversation"},
    "request_rate": {"metavar": "R", "help": "requests a second; inf: all at once"},
    "burstiness": {"type": float, "help": "1 is Poisson, less is burstier"},
    "trace": {"metavar": "FILE", "help": "JSON lines: arrival, prompt, output_tokens"},
    "seed": {"type": int, "help": "of all random numbers"},
    # Engine
    "max_num_seqs": {"type": int, "help": "slots of the batch"},
    "max_num_batched_tokens": {"type": int, "help": "token budget of a step"},
    "block_size": {"type": int, "help": "tokens of a cache block"},
    "num_blocks": {"type": int, "help": "of the pool (default: what the GPU holds)"},
    "num_host_blocks": {"type": int, "help": "in host memory, for --preemption swap"},
    # All requests have the same priority here, so that policy is left out.
    "policy": {"choices": ("fcfs", "sjf"), "help": "which request is next"},
    "max_wait": {"type": float, "metavar": "SECONDS", "help": "after which a request is next"},
    "admission": {"choices": ADMISSIONS, "help": "which may enter when memory is short"},
    "preemption": {"choices": PREEMPTIONS, "help": "how blocks are reclaimed"},
    "attention_backend": {"choices": ATTENTION_BACKENDS},
    "kv_cache_dtype": {"choices": KV_CACHE_DTYPES, "help": "int8, fp8: in 8 bits"},
    "enforce_eager": {"action": "store_true", "help": "no CUDA graphs"},
    "no_enable_prefix_caching": {
        "action": "store_true",
        "help": "no prefix cache in any system",
    },
    "tensor_parallel_size": {"type": int, "help": "GPUs that share the model"},
    # Report
    "goodput": {"nargs": "+", "metavar": "NAME:MS", "help": "such as ttft:200 tpot:50"},
    "save_json": {"metavar": "FILE", "help": "write the figures as JSON"},
    "plot": {"metavar": "FILE", "help": "draw the table as a figure"},
}
# Defaults that subcommands share.
WORKLOAD = {
    "num_prompts": 48, "input_len": "lognormal:32:1", "output_len": "lognormal:48:1",
    "prefix_len": 32, "num_prefixes": 1, "num_turns": 1, "request_rate": "inf",
    "burstiness": 1.0, "trace": None, "seed": 0,
}  # fmt: skip
ENGINE = {
    "max_num_seqs": 16, "max_num_batched_tokens": 128, "block_size": 16, "policy": "fcfs",
    "max_wait": None, "admission": "on_demand", "preemption": "recompute",
    "num_host_blocks": 0, "kv_cache_dtype": "auto", "no_enable_prefix_caching": False,
    "tensor_parallel_size": 1,
}  # fmt: skip
AT_LEAST = dict.fromkeys(("prefix_len", "num_host_blocks"), 0) | dict.fromkeys(
    ("num_prompts", "num_prefixes", "num_turns", "block_size", "num_blocks", "max_num_seqs",
     "max_num_batched_tokens", "tensor_parallel_size", "max_tokens", "num_replicas",
     "num_speculative_tokens", "repeat", "threads"), 1,
)  # fmt: skip
# What a trace file says itself, so that these flags would be ignored beside it.
DRAWN = ("num_prompts", "input_len", "output_len", "prefix_len", "num_prefixes", "num_turns",
         "request_rate", "burstiness")  # fmt: skip


def flag(name: str) -> str:
    """As it is typed: "--num-prompts"."""
    return "--" + name.replace("_", "-")


def add_flags(parser: ArgumentParser, defaults: Mapping[str, object], title: str = "") -> None:
    """Add a flag of FLAGS for each name, with its default."""
    group = parser.add_argument_group(title) if title else parser
    for name, default in defaults.items():
        options = dict(FLAGS[name])
        if options.get("type") is int:
            options["metavar"] = "N"
        if default is not None and default is not False:
            options["help"] = f"{options.get('help', '')} (default: {default})".strip()
        group.add_argument(flag(name), default=default, **options)


def given_names(argv: Sequence[str]) -> set[str]:
    """Names of the flags that a command line has."""
    flags = (text.partition("=")[0] for text in argv if text.startswith("--"))
    return {text.removeprefix("--").replace("-", "_") for text in flags}


def refuse(args: Namespace, names: Iterable[str], where: str) -> None:
    """Raise ValueError if one of the flags was given, where it would have no effect."""
    for name in names:
        if name in args.given:
            raise ValueError(f"{flag(name)} is {getattr(args, name)}; it has no effect {where}")


def check_common(args: Namespace) -> None:
    """Check what every subcommand may have: counts, the device, the report's files."""
    check_counts(args)
    if "device" in args:
        check_device(args)
    check_report(args)


def check_counts(args: Namespace) -> None:
    """Raise ValueError if a count is too small, or absurdly large."""
    for name, low in AT_LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < low:
            raise ValueError(f"{flag(name)} is {value}; it must be >= {low}")
        if value is not None and value > MAX_COUNT:
            raise ValueError(f"{flag(name)} is {value}; it must be <= {MAX_COUNT}")


def check_device(args: Namespace) -> None:
    """Raise ValueError if there is no such device, or no CUDA graphs to do without on it."""
    from nanobatch.utils.device import resolve_device

    if resolve_device(args.device).type == "cpu":
        refuse(args, ("enforce_eager",), "on a CPU, which has no CUDA graphs")


# ------------------------------------------------------------------------------- workload


def check_workload(args: Namespace) -> None:
    """Check the flags of the workload; args.request_rate becomes a list of rates.

    With a trace it becomes [None], and whatever would have been drawn None.
    """
    if args.trace is not None:
        refuse(args, DRAWN, "beside --trace: the file says it")
        if not Path(args.trace).is_file():
            raise ValueError(f"--trace is {args.trace}; there is no such file")
        vars(args).update(dict.fromkeys(DRAWN), request_rate=[None])
        return
    if args.num_turns > 1:
        where = "with --num-turns: what a conversation's prompts share is what was said before"
        refuse(args, ("prefix_len", "num_prefixes"), where)
        args.prefix_len, args.num_prefixes = 0, 1
    elif args.prefix_len == 0:
        refuse(args, ("num_prefixes",), "with --prefix-len 0")
    for name in ("input_len", "output_len"):
        try:
            parse_lengths(getattr(args, name))
        except ValueError as error:
            raise ValueError(f"{flag(name)}: {error}") from None
    args.request_rate = [_rate(text) for text in args.request_rate.split(",")]
    if all(map(math.isinf, args.request_rate)):
        refuse(args, ("burstiness",), "without --request-rate: all requests come at once")
    if not args.burstiness > 0:
        raise ValueError(f"--burstiness is {args.burstiness}; it must be > 0, or inf")


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ValueError(f"--request-rate is {text}; it must be > 0, or inf")
    return rate


def make_items(
    args: Namespace,
    request_rate: float | None,
    vocab_size: int,
    encode: Callable[[str], list[int]] | None = None,
) -> list[WorkItem]:
    """The workload that the flags describe, in order of arrival; at least one request."""
    if args.trace is not None:
        random_tokens = {"vocab_size": vocab_size, "seed": args.seed}
        items = read_trace(args.trace, encode=encode, **random_tokens)
        if not items:
            raise ValueError(f"--trace is {args.trace}; it has no requests")
        return items
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
        when = "of a trace"
    else:
        when = "at once" if request_rate == math.inf else f"at {request_rate:g} a second"
    return f"{len(items)} requests {when}, outputs of {min(outputs)} to {max(outputs)} tokens"


def longest_of(items: Sequence[WorkItem]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)


# --------------------------------------------------------------------------------- engine


def check_engine(args: Namespace) -> None:
    """Check the flags of the engine, alone and together."""
    if "max_num_batched_tokens" not in args.given:  # the default has room for all slots
        args.max_num_batched_tokens = max(args.max_num_seqs, args.max_num_batched_tokens)
    compared = getattr(args, "compare", None)  # a flag that takes all of its values in turn
    if args.preemption != "swap" and compared != "preemption":
        refuse(args, ("num_host_blocks",), "without --preemption swap")
    if args.policy == "fcfs" and compared != "policy":
        refuse(args, ("max_wait",), "with --policy fcfs, which is in order of arrival")
    engine_config(args)


def engine_config(args: Namespace) -> EngineConfig:
    """The configuration that the flags describe."""
    names = EngineConfig.__dataclass_fields__.keys() - {"device", "dtype", "seed"}
    fields = {name: getattr(args, name) for name in names & vars(args).keys()}
    fields["enable_prefix_caching"] = not getattr(args, "no_enable_prefix_caching", False)
    fields["cuda_graphs"] = not getattr(args, "enforce_eager", False)
    return EngineConfig(**fields)


# --------------------------------------------------------------------------------- report


def check_report(args: Namespace) -> None:
    """Raise ValueError if a report could not be written, or a limit makes no sense."""
    if getattr(args, "goodput", None) is not None:
        limits = [_limit(text) for text in args.goodput]
        names = [name for name, _ in limits]
        if len(set(names)) < len(names):
            raise ValueError(f"--goodput is {' '.join(args.goodput)}; it has a name twice")
        args.goodput = dict(limits)
    if args.save_json is not None:
        check_writable("--save-json", Path(args.save_json))
    plot = getattr(args, "plot", None)
    if plot is not None:
        if Path(plot).suffix not in PLOT_FORMATS:
            raise ValueError(f"--plot is {plot}; it must end in {' or '.join(PLOT_FORMATS)}")
        check_writable("--plot", Path(plot))


def _limit(text: str) -> tuple[str, float]:
    name, _, ms = text.partition(":")
    try:
        limit = float(ms)
    except ValueError:
        limit = 0.0
    if name not in GOODPUT_METRICS or not 0 < limit < math.inf:
        names = ", ".join(GOODPUT_METRICS)
        raise ValueError(f"--goodput is {text}; it must be NAME:MS with NAME of {names}")
    return name, limit


def check_writable(name: str, file: Path) -> None:
    """Raise ValueError if the file cannot be written; one that is there stays as it is."""
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{name} is {file}; there is no such directory")
    is_new = not file.exists()
    try:
        file.open(
            "a"
        ).close()  # permissions alone do not say it: a file system may be read-only
        if is_new:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{name} is {file}; it cannot be written: {error.strerror}") from None
