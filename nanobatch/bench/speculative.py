"""`bench.py speculative`: what drafts gain, one request at a time, with and without, in turns.

    repetitive    a text twice, and how it starts a third time: like answers that quote or edit
    ordinary      the beginning of a story

    bench.py speculative --model smollm2                             prompt lookup
    bench.py speculative draft --draft-model smollm2 --model DIR     a small model

A step that checks drafts computes more and reads the same weights. That pays where reading
takes the time, and where drafts are right. Both depend on the machine and on the text.

Always holds: both ways have given the same greedy tokens (in 16 bits the share is shown).
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from nanobatch.bench import flags, report
from nanobatch.config import SPECULATIONS, EngineConfig
from nanobatch.llm import build_engine, build_runner
from nanobatch.metrics import EngineStats
from nanobatch.model_runner import ModelRunner
from nanobatch.models.decoder import Decoder
from nanobatch.models.loader import load
from nanobatch.request import RequestOutput, SamplingParams
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.device import resolve_device, resolve_dtype

STORY = "Once upon a time, in a small town by the sea, there lived a"
NOTES = (
    "The ferry leaves the north pier at seven in the morning and comes back at noon. Children "
    "under six travel free, bicycles cost two coins, and dogs must be on a lead. In winter "
    "there is only one boat, at nine, unless the wind is too strong.\n\n"
)
PROMPTS = {"repetitive": NOTES + NOTES + "The ferry leaves the north pier", "ordinary": STORY}
MODEL = {"model": "tiny", "dtype": "float32", "device": "auto", "threads": None}
ENGINE = {
    "block_size": 16, "attention_backend": "auto", "kv_cache_dtype": "auto",
    "enforce_eager": False,
}  # fmt: skip
REPORT = {"repeat": 3, "save_json": None}
COLUMNS = ("tok/s without", "with", "ratio", "tokens a step", "drafted", "accepted", "same")


class Gain(NamedTuple):
    """One prompt's figures; tokens/s are those after the first token, medians.

    speed, plain_speed: with drafts and without. tokens_per_step: output tokens for each step.
    same: the share of output tokens before the first difference.
    """

    prompt: str
    plain_speed: float
    speed: float
    tokens_per_step: float
    num_draft_tokens: int
    acceptance_rate: float
    same: float


def measure(
    model: Decoder,
    draft: Decoder | None,
    config: EngineConfig,
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    repeat: int,
) -> list[Gain]:
    """Serve each prompt `repeat` times in both ways, num_tokens of output each.

    draft: the draft model, if config.speculative is "draft".
    """
    longest = max(map(len, prompts.values())) + num_tokens
    num_blocks = cdiv(longest, config.block_size)
    config = replace(config, max_model_len=longest, num_blocks=num_blocks, max_num_seqs=1)
    plain = build_runner(model, replace(config, speculative=None, draft_model=None))
    drafting = build_runner(model, config, draft)
    gains = []
    for name, prompt in prompts.items():
        times: dict[ModelRunner, list[float]] = {plain: [], drafting: []}
        for runner in times:
            _serve(runner, prompt, min(8, num_tokens))  # warms up
        for _ in range(repeat):
            outputs = []
            for runner, seconds in times.items():
                output, stats = _serve(runner, prompt, num_tokens)
                seconds.append(output.metrics.tpot)
                outputs.append(output.token_ids)
        pairs = zip(*outputs, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), num_tokens)
        speeds = (1 / statistics.median(seconds) for seconds in times.values())
        gains.append(
            Gain(
                name,
                *speeds,
                stats.tokens_per_turn,
                stats.num_draft_tokens,
                stats.acceptance_rate,
                first / num_tokens,
            )
        )
    return gains


def _serve(
    runner: ModelRunner, prompt: Sequence[int], num_tokens: int
) -> tuple[RequestOutput, EngineStats]:
    """One greedy request through a fresh engine."""
    engine = build_engine(runner)
    engine.add_request(
        prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    )
    while True:
        for output in engine.step():
            if output.finished:
                return output, engine.stats


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py speculative`."""
    text = "what guesses: prompt lookup, or a draft model (default: ngram)"
    parser.add_argument(
        "speculative", nargs="?", default="ngram", choices=SPECULATIONS[1:], help=text
    )
    text = "the model of `speculative draft`"
    parser.add_argument("--draft-model", metavar="MODEL", help=text)
    text = "of a draft (default: 4)"
    parser.add_argument("--num-speculative-tokens", type=int, metavar="N", default=4, help=text)
    text = "tokens of output (default: 128)"
    parser.add_argument("--max-tokens", type=int, metavar="N", default=128, help=text)
    flags.add_flags(parser, MODEL)
    flags.add_flags(parser, ENGINE, "engine (names as in EngineConfig)")
    flags.add_flags(parser, REPORT, "measurement and report")


def check_arguments(args: Namespace) -> None:
    """Raise ValueError for what cannot be or would be ignored."""
    if args.max_tokens < 2:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}; it must be >= 2, for a time between"
        )
    flags.engine_config(args)


def run_command(args: Namespace) -> dict:
    """Measure and print; the report. In float32 drafts that change a token are a "failure",
    which makes the exit status 1."""
    if args.threads:
        torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    loaded = load(args.model, dtype, device)
    draft = load(args.draft_model, dtype, device).model if args.draft_model else None
    if loaded.tokenizer is None:
        raise ValueError(f"--model is {args.model}; the prompts need one with a tokenizer")
    prompts = {name: loaded.tokenizer.encode(text) for name, text in PROMPTS.items()}
    room = loaded.model.config.max_position_embeddings - max(map(len, prompts.values()))
    if args.max_tokens > room:
        raise ValueError(
            f"--max-tokens is {args.max_tokens}; it must be <= {room}: the model's context "
            "after the longer prompt"
        )
    info = report.describe_hardware(device)
    who = args.draft_model or args.speculative
    report.print_heading(
        f"{args.model}, {args.dtype}: drafts of up to {args.num_speculative_tokens} tokens by "
        f"{who}, one request of {args.max_tokens} tokens at a time",
        info,
    )
    config = flags.engine_config(args)
    gains = measure(loaded.model, draft, config, prompts, args.max_tokens, args.repeat)
    table = report.Table("prompt", COLUMNS)
    for g in gains:
        cells = (f"{g.plain_speed:.1f}", f"{g.speed:.1f}", f"{g.speed / g.plain_speed:.2f}")
        cells += (f"{g.tokens_per_step:.2f}", f"{g.num_draft_tokens}")
        table.line(g.prompt, (*cells, f"{g.acceptance_rate:.0%}", f"{g.same:.0%}"))
    is_exact = dtype == torch.float32 and args.kv_cache_dtype == "auto"
    failure = None
    if is_exact and any(g.same < 1 for g in gains):
        failure = "With drafts the greedy tokens are others: that is wrong, in float32."
    found = [g._asdict() for g in gains]
    return {"machine": info, "gains": found, "failure": failure}
