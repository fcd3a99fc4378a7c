"""Flags that several subcommands share: names, limits, and what they describe.

    add_flags         puts flags on a parser; each subcommand lists its own, with their defaults
    check_...         a ValueError that names the flag: it cannot be, or would be ignored
    engine_config     the engine that the flags describe

What those of the workload describe is in workload_flags.py.

`args.given` holds the names of the flags that were typed, so that one which would have no
effect can be refused.

Always holds: all flags are checked before anything is measured. Names follow `vllm bench` and
EngineConfig.
"""

from __future__ import annotations

import contextlib
import math
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nanobatch.bench import report
from nanobatch.bench.workload import MAX_LENGTH, MAX_REQUESTS
from nanobatch.config import (
    ADMISSIONS,
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    MAX_DRAFT_TOKENS,
    PREEMPTIONS,
    EngineConfig,
)
from nanobatch.metrics import GOODPUT_METRICS

LENGTHS = "a length: 128, uniform:16:512, lognormal:200:1, bimodal:32:1000:0.9"
PLOT_FORMATS = (".png", ".pdf", ".svg")

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
    "num_host_blocks": {"type": int, "help": "to swap to (default: as the pool, <= 4 GiB)"},
    # All requests have the same priority here, so that policy is left out.
    "policy": {"choices": ("fcfs", "sjf"), "help": "which request is next"},
    "max_wait": {"type": float, "metavar": "SECONDS", "help": "after which a request is next"},
    "admission": {"choices": ADMISSIONS, "help": "which may enter when memory is short"},
    "preemption": {"choices": PREEMPTIONS, "help": "how blocks are reclaimed"},
    "attention_backend": {"choices": ATTENTION_BACKENDS},
    "kv_cache_dtype": {"choices": KV_CACHE_DTYPES, "help": "int8, fp8: in 8 bits"},
    "enforce_eager": {"action": "store_true", "help": "no CUDA graphs"},
    "no_async_scheduling": {"action": "store_true", "help": "plan a step after the one before"},
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
    "num_host_blocks": None, "kv_cache_dtype": "auto", "no_enable_prefix_caching": False,
    "tensor_parallel_size": 1,
}  # fmt: skip
# The least and the most of each number. What memory, a model or a pool can hold may be less.
RANGES = {
    "threads": (1, os.cpu_count() or 1), "repeat": (1, 1000),
    "num_prompts": (1, MAX_REQUESTS), "prefix_len": (0, MAX_LENGTH), "num_prefixes": (1, 10**6),
    "num_turns": (1, 1000), "max_tokens": (1, MAX_LENGTH), "num_replicas": (1, 1000),
    "seed": (-(2**63), 2**63 - 1),
    "max_num_seqs": (1, 10**5), "max_num_batched_tokens": (1, MAX_LENGTH),
    "block_size": (1, 2**16), "num_blocks": (1, 10**7), "num_host_blocks": (1, 10**7),
    "max_wait": (0.0, 1e8), "tensor_parallel_size": (1, 1000),
    "num_speculative_tokens": (1, MAX_DRAFT_TOKENS),
}  # fmt: skip


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
    """Check what every subcommand may have: numbers, the device, the report's files."""
    check_ranges(args)
    if "device" in args:
        check_device(args)
    check_report(args)


def check_ranges(args: Namespace) -> None:
    """Raise ValueError if a number is too small, or absurdly large."""
    for name, (low, high) in RANGES.items():
        value = getattr(args, name, None)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{flag(name)} is {value}; it must be in [{low}, {high}]")


@contextlib.contextmanager
def named_as_flags(args: Namespace) -> Iterator[None]:
    """A ValueError in the block that begins with a setting's name has that of its flag."""
    try:
        yield
    except ValueError as error:
        name, _, what = str(error).partition(" ")
        raise ValueError(f"{flag(name) if name in args else name} {what}") from None


def check_device(args: Namespace) -> None:
    """Raise ValueError if there is no such device, or no CUDA graphs to do without on it."""
    from nanobatch.utils.device import resolve_device

    if resolve_device(args.device).type == "cpu":
        refuse(args, ("enforce_eager",), "on a CPU, which has no CUDA graphs")
        refuse(args, ("no_async_scheduling",), "on a CPU, where a step is never planned ahead")


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
    """The configuration that the flags describe; a ValueError names the flag."""
    names = EngineConfig.__dataclass_fields__.keys() - {"device", "dtype", "seed"}
    fields = {name: getattr(args, name) for name in names & vars(args).keys()}
    fields["enable_prefix_caching"] = not getattr(args, "no_enable_prefix_caching", False)
    fields["cuda_graphs"] = not getattr(args, "enforce_eager", False)
    fields["async_scheduling"] = not getattr(args, "no_async_scheduling", False)
    with named_as_flags(args):
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
    plot = getattr(args, "plot", None)
    if plot is not None and Path(plot).suffix not in PLOT_FORMATS:
        raise ValueError(f"--plot is {plot}; it must end in {' or '.join(PLOT_FORMATS)}")
    check_files(args)


def check_files(args: Namespace, more: Mapping[str, Path] | None = None) -> None:
    """Raise ValueError if a report cannot be written, or would replace another or the trace.

    Args:
        more: other files that will be written, by what they are.
    """
    names = ("trace", "save_json", "plot")
    files = {flag(name): getattr(args, name, None) for name in names} | (more or {})
    taken: dict[str, str] = {}
    for name, file in files.items():
        if file is None:
            continue
        if name != "--trace":
            report.check_writable(name, Path(file))
        other = taken.setdefault(os.path.realpath(file), name)
        if other != name:
            raise ValueError(f"{name} is {file}; {other} is the same file")


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
