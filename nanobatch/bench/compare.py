"""This engine and others on one workload, taking turns: the ratios of `bench.py --baseline`.

    workload W1    64 requests at once, prompts and outputs of 16 to 256 tokens
             W2    16 requests at once, prompts of 512 to 1024, outputs of 64 to 128
             one   a single request, 700 tokens and 128

Always holds: the same weights, prompts and output lengths, greedy, the end of text ignored;
each engine is warmed up and has the machine to itself while it runs. On a machine that others
use too only ratios of neighbouring passes mean anything: their median is what is shown.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanobatch.bench.ladder import run_engine
from nanobatch.bench.other_engines import Baseline, make_workload
from nanobatch.bench.workload import WorkItem
from nanobatch.config import EngineConfig
from nanobatch.model_runner import ModelRunner
from nanobatch.models.loader import load, save

PAUSE = 0.5  # seconds between two engines: threads of the one before may still spin


@dataclass
class Standing:
    """One engine's passes: seconds, and seconds to the first token of the first request."""

    version: str
    seconds: list[float] = field(default_factory=list)
    first_token: list[float | None] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)


def compare(
    model: str,
    dtype: torch.dtype,
    workload: str,
    pythons: Mapping[str, str],
    repeat: int,
    version: str,
) -> dict[str, Standing]:
    """Run the workload `repeat` times on "nanobatch" and on each of the others, in turns.

    Args:
        model: anything LLM() takes.
        pythons: by name of a baseline, the interpreter that has it.
        version: of this engine.

    Raises:
        ValueError: an engine cannot be started, or there is no such workload.
    """
    prompts, output_lens = make_workload(workload)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(model, dtype).model
        vocab_size = loaded.config.vocab_size
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
        directory = Path(model)
        if not (directory / "config.json").exists():
            directory = Path(folder)
            save(loaded, directory)
        threads = torch.get_num_threads()
        name = str(dtype).removeprefix("torch.")
        others = {}
        try:
            for baseline, python in pythons.items():
                others[baseline] = Baseline(baseline, python, directory, name, threads)
            return _take_turns(loaded, others, prompts, output_lens, repeat, version)
        finally:
            for other in others.values():
                other.close()


def _take_turns(model, others, prompts, output_lens, repeat, version) -> dict[str, Standing]:
    # Of a CPU's caches a step of 1024 tokens takes what a step of 2048 does not find room in.
    config = EngineConfig(enable_prefix_caching=False, max_num_batched_tokens=1024)
    runner = ModelRunner(model, config)

    def ours(prompts, output_lens):
        items = [WorkItem(prompt, n) for prompt, n in zip(prompts, output_lens, strict=True)]
        start = time.perf_counter()
        run = run_engine(runner, items, runner.config)
        seconds = time.perf_counter() - start
        first_token = run.metrics[0].first_token_time
        return {"seconds": seconds, "first_token": first_token, "tokens": run.outputs}

    engines = {"nanobatch": ours} | {name: other.run for name, other in others.items()}
    standings = {"nanobatch": Standing(version)}
    standings |= {name: Standing(other.version) for name, other in others.items()}
    for run in engines.values():
        run(prompts[:4], [4] * len(prompts[:4]))
    for _ in range(repeat):
        for name, run in engines.items():
            time.sleep(PAUSE)
            result, standing = run(prompts, output_lens), standings[name]
            standing.seconds.append(result["seconds"])
            standing.first_token.append(result["first_token"])
            standing.outputs = result["tokens"]
    return standings


def table(standings: Mapping[str, Standing], num_output_tokens: int) -> Sequence[dict]:
    """A row for each engine. Ratios are nanobatch's figure over its own, medians over
    neighbouring passes: output tokens/s, time to the first token, tokens/s after that."""
    ours = standings["nanobatch"]

    def decode_rate(standing: Standing, i: int) -> float:
        return (num_output_tokens - 1) / (standing.seconds[i] - standing.first_token[i])

    rows = []
    for name, one in standings.items():
        passes = range(len(one.seconds))
        row = {
            "engine": name,
            "version": one.version,
            "output_throughput": num_output_tokens / statistics.median(one.seconds),
            "ratio": statistics.median(one.seconds[i] / ours.seconds[i] for i in passes),
            "num_same_outputs": sum(map(list.__eq__, one.outputs, ours.outputs)),
        }
        if len(one.outputs) == 1 and None not in one.first_token:
            rates = [decode_rate(one, i) for i in passes]
            row["ttft_ms"] = statistics.median(one.first_token) * 1e3
            row["ttft_ratio"] = statistics.median(
                ours.first_token[i] / one.first_token[i] for i in passes
            )
            row["decode_throughput"] = statistics.median(rates)
            row["decode_ratio"] = statistics.median(
                decode_rate(ours, i) / rates[i] for i in passes
            )
        rows.append(row)
    return rows
