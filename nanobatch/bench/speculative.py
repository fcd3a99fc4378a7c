"""What drafts gain: one request at a time, with and without, in turns.

    repetitive    a text twice, and the start of the third time: answers that quote or edit
    ordinary      the beginning of a story

A step that checks drafts computes more and reads the same weights; it is worth that where
reading is what takes the time, and where drafts are right. Both depend on the machine and on
the text: measure your own.

Always holds: both have put out the same greedy tokens (in 16-bit formats the share is given).

Run by `python bench.py --speculative ngram`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from nanobatch.config import EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.metrics import EngineStats
from nanobatch.model_runner import ModelRunner
from nanobatch.models.decoder import Decoder
from nanobatch.request import RequestOutput, SamplingParams
from nanobatch.utils.arithmetic import cdiv

STORY = "Once upon a time, in a small town by the sea, there lived a"
NOTES = (
    "The ferry leaves the north pier at seven in the morning and comes back at noon. Children "
    "under six travel free, bicycles cost two coins, and dogs must be on a lead. In winter "
    "there is only one boat, at nine, unless the wind is too strong.\n\n"
)
PROMPTS = {"repetitive": NOTES + NOTES + "The ferry leaves the north pier", "ordinary": STORY}


class Gain(NamedTuple):
    """One prompt's figures; tokens/s are those after the first token, medians.

    speed, plain_speed: with drafts and without. tokens_per_step: of the output, a decode step
    of the request. same: the share of output tokens before the first difference.
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
    """Serve each prompt `repeat` times in both ways, num_tokens of output each."""
    longest = max(map(len, prompts.values())) + num_tokens
    num_blocks = cdiv(longest, config.block_size)
    config = replace(config, max_model_len=longest, num_blocks=num_blocks)
    plain = ModelRunner(model, replace(config, speculative=None, draft_model=None))
    drafting = ModelRunner(model, config, draft)
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
    engine = LLMEngine(runner.config, runner)
    engine.add_request(
        prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    )
    while True:
        for output in engine.step():
            if output.finished:
                return output, engine.stats
