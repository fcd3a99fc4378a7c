"""`bench.py check SECONDS`: is the engine right on this machine? Random requests under random
configurations, each compared with the request alone.

    reference   each request alone, over a dense cache: no blocks, no scheduler, no engine
    trial       several requests through the engine, with a random block size, budget, slots,
                pool, chunking, prefix cache, policy, admission, preemption, batching, drafts
                and backend

Both use the cache's number format of the trial. Compared are greedy tokens, seeded samples,
log-probabilities and finish reasons; and all blocks must be free at the end. Where a little
noise on the logits changes the token (two best tokens nearly equal, a draw at the edge between
two), the token depends on rounding: from there on an output proves nothing and is not compared.

Always holds (invariants 10, 12, 13): in float32 there is no difference.
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from nanobatch.bench import flags, report
from nanobatch.bench.static_batching import PaddedAttend
from nanobatch.config import ADMISSIONS, BATCHING, POLICIES, PREEMPTIONS, EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.kernels.ops import HAS_TRITON
from nanobatch.llm import build_engine, build_runner
from nanobatch.models.decoder import Decoder
from nanobatch.models.loader import load
from nanobatch.request import RequestOutput, SamplingParams
from nanobatch.sampler import Sampled, SamplingRow, sample
from nanobatch.simulation.replica import VirtualClock
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.checks import check_float
from nanobatch.utils.device import resolve_device
from nanobatch.utils.extensions import load_extension

NOISE = 1e-3  # on the logits; many times what two orders of float32 sums differ by
# The same, where the last bit of a sum decides how a key is rounded to 8 bits.
NOISE_8 = {torch.int8: 5e-2, torch.float8_e4m3fn: 2e-1}
NUM_NOISY = 8
TOLERANCE = 10  # times the noise, of log-probabilities
MAX_SECONDS = 7 * 86400.0
LONGEST = 96  # tokens of a request, prompt and output
FLAGS = {"model": "tiny", "device": "auto", "threads": 1, "seed": 0, "save_json": None}
Ask = tuple[tuple[int, ...], SamplingParams]


@dataclass
class Report:
    """What was tried, and what was wrong.

    trials, requests, tokens: how many. seen: how often each choice was drawn, and how often a
    preemption or the like happened. faults: a text for each difference, with the configuration
    that shows it.
    """

    trials: int = 0
    requests: int = 0
    tokens: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Alone(NamedTuple):
    """What a request gives alone: its tokens, the log-probabilities of each, and whether the
    token depends on rounding."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    is_tie: list[bool]


def make_noise(vocab_size: int, seed: int = 0) -> Tensor:
    """float32 [X, V] to add to a row of logits: about 1e-3, but none in the first two rows."""
    generator = torch.Generator().manual_seed(seed)
    noise_XV = NOISE * torch.randn(NUM_NOISY, vocab_size, generator=generator)
    noise_XV[:2] = 0
    return noise_XV


def noise_of(cache_dtype: torch.dtype) -> float:
    """How much the logits of the same token may differ."""
    return NOISE_8.get(cache_dtype, NOISE)


def choose(logits_1V: Tensor, row: SamplingRow, noise_XV: Tensor) -> tuple[Sampled, bool]:
    """What is sampled, and whether it is a tie: noise changes it. (A sampler that gives another
    token without noise is wrong; that is no tie.)"""
    sampled, again, *noisy = sample(logits_1V + noise_XV, [row] * len(noise_XV))
    repeats = again.token_id == sampled.token_id
    return sampled, repeats and any(one.token_id != sampled.token_id for one in noisy)


class Fuzz:
    """Draws trials for one model.

    Args:
        model: with its weights, in float32.
        seed: of everything that is drawn.
    """

    def __init__(self, model: Decoder, seed: int = 0):
        self.model = model
        self.rng = random.Random(seed)
        self.report = Report()
        self._alone: dict[tuple[Ask, torch.dtype], Alone] = {}
        self._noise_XV = make_noise(model.config.vocab_size, seed).to(model.embed.weight.device)

    def run(self, seconds: float, say: Callable[[str], None] = print) -> Report:
        """Run trials for so many seconds, at least one; `say` each fault when it is found."""
        end = time.monotonic() + seconds
        while self.report.trials == 0 or time.monotonic() < end:
            for fault in self.trial():
                say(fault)
        return self.report

    def trial(self) -> list[str]:
        """Serve several requests under one configuration; the faults found."""
        config, asks = self._draw_config(), self._draw_asks()
        outputs, engine = self._serve(config, asks)
        faults = [
            f"{fault}\n    prompt {list(ask[0])}\n    {ask[1]}\n    {config}"
            for ask, output in zip(asks, outputs, strict=True)
            if (fault := self._difference(ask, output, engine.runner.layout.dtype)) is not None
        ]
        allocator = engine.scheduler.allocator
        if allocator.num_free_blocks != allocator.num_blocks:
            faults.append(f"some blocks were not freed\n    {config}")
        counts = self.report
        counts.trials += 1
        counts.requests += len(asks)
        counts.tokens += sum(len(output.token_ids) for output in outputs)
        counts.seen["preemptions"] += engine.stats.num_preemptions
        counts.seen["swapped blocks"] += engine.stats.num_swapped_blocks
        counts.seen["accepted drafts"] += engine.stats.num_accepted_tokens
        counts.seen["prefix hits"] += sum(o.metrics.num_cached_tokens > 0 for o in outputs)
        counts.faults += faults
        return faults

    # -------------------------------------------------------------------------------- draws

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        block_size = rng.choice([1, 2, 4, 8, 16, 32])
        slots = rng.randint(1, 8)
        one = cdiv(LONGEST, block_size)
        chosen = {
            "batching": rng.choice([*BATCHING, "continuous"]),
            "policy": rng.choice(POLICIES),
            "admission": rng.choice(ADMISSIONS),
            "preemption": rng.choice(PREEMPTIONS),
            "speculative": rng.choice([None, "ngram"]),
            "enable_prefix_caching": rng.random() < 0.7,
            "enable_chunked_prefill": rng.random() < 0.7,
            "cuda_graphs": rng.random() < 0.7,
            "async_scheduling": rng.random() < 0.7,
            "attention_backend": rng.choice(self._backends()),
            "kv_cache_dtype": rng.choice(self._cache_dtypes()),
        }
        self.report.seen.update(f"{name} {value}" for name, value in chosen.items())
        budget = rng.randint(slots, 64) if chosen["enable_chunked_prefill"] else LONGEST
        return EngineConfig(
            **chosen,
            block_size=block_size,
            num_blocks=rng.choice([one, one, one + one // 2, 3 * one]),
            num_host_blocks=rng.randint(1, 2 * one),
            max_num_seqs=slots,
            max_num_batched_tokens=max(slots, budget),
            max_model_len=LONGEST,
            max_wait=rng.choice([None, 0.01]),
            num_speculative_tokens=rng.randint(1, 6),
            prompt_lookup_min=1,
        )

    def _backends(self) -> list[str]:
        weight = self.model.embed.weight
        if weight.is_cuda:
            return ["torch", "triton"] if HAS_TRITON else ["torch"]
        choose = load_extension("cpu", "bench.py check").CBackend.choose
        has_c = choose(weight.device, weight.dtype, is_asked=False) is not None
        return ["torch", "c"] if has_c else ["torch"]

    def _cache_dtypes(self) -> list[str]:
        weight = self.model.embed.weight
        least = load_extension("quantized_cache", "bench.py check").FP8_CAPABILITY
        is_old = weight.is_cuda and torch.cuda.get_device_capability(weight.device) < least
        return ["auto", "auto", "int8"] + ([] if is_old else ["fp8"])

    def _draw_asks(self) -> list[Ask]:
        rng, vocab_size = self.rng, self.model.config.vocab_size
        shared = [rng.randrange(vocab_size) for _ in range(40)]
        asks = []
        for _ in range(rng.randint(1, 10)):
            prompt = shared[: rng.choice([0, 0, 17, 33])]
            prompt += [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
            length = rng.choice([1, 2, rng.randint(3, 20), rng.randint(20, 32)])
            sampling = rng.choice([{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}])
            params = SamplingParams(
                **sampling,
                seed=rng.randrange(10**6),
                max_tokens=length,
                ignore_eos=True,
                logprobs=2,
            )
            asks.append((tuple(prompt), params))
        return asks

    # ------------------------------------------------------------------------------ serving

    def _serve(
        self, config: EngineConfig, asks: list[Ask]
    ) -> tuple[list[RequestOutput], LLMEngine]:
        runner = build_runner(self.model, config)
        clock = VirtualClock()  # a step takes 1 ms: the same trial is the same everywhere
        runner.clock = clock
        engine = build_engine(runner)
        done: dict[str, RequestOutput] = {}

        def step() -> None:
            clock.sleep_until(clock.now() + 1e-3)
            done.update((out.request_id, out) for out in engine.step())

        for i, (prompt, params) in enumerate(asks):
            engine.add_request(list(prompt), params, request_id=str(i), priority=i % 3)
            if self.rng.random() < 0.4:
                step()
        while engine.has_unfinished():
            step()
        return [done[str(i)] for i in range(len(asks))], engine

    @torch.inference_mode()
    def _reference(self, ask: Ask, cache_dtype: torch.dtype) -> Alone:
        """The request alone, over a dense cache (static_batching.PaddedAttend, one row)."""
        if (ask, cache_dtype) in self._alone:
            return self._alone[ask, cache_dtype]
        noise_XV = self._noise_XV * (noise_of(cache_dtype) / NOISE)
        (prompt, params), alone = ask, Alone([], [], [])
        num_output = min(params.max_tokens, LONGEST - len(prompt))
        longest = len(prompt) + num_output
        attend = PaddedAttend(self.model, [len(prompt)], longest, cache_dtype)
        ids = list(prompt)
        while len(alone.token_ids) < num_output:
            positions_T = attend.advance(len(ids))
            ids_T = torch.tensor(ids, device=positions_T.device)
            hidden_TE = self.model(ids_T, positions_T, attend)
            row = SamplingRow(params, prompt, alone.token_ids, (), params.seed)
            logits_1V = self.model.logits(hidden_TE[-1:])
            sampled, is_tie = choose(logits_1V, row, noise_XV)
            alone.token_ids.append(sampled.token_id)
            alone.logprobs.append(sampled.logprobs)
            alone.is_tie.append(is_tie)
            ids = [sampled.token_id]
        self._alone[ask, cache_dtype] = alone
        return alone

    def _difference(
        self, ask: Ask, found: RequestOutput, cache_dtype: torch.dtype
    ) -> str | None:
        """What is wrong with an output, as text; None if nothing is."""
        wanted = self._reference(ask, cache_dtype)
        if found.finish_reason != "length" or len(found.token_ids) != len(wanted.token_ids):
            return f"it ends with {found.finish_reason!r} after {len(found.token_ids)} tokens"
        for i, (a, b) in enumerate(zip(found.token_ids, wanted.token_ids, strict=True)):
            if wanted.is_tie[i]:
                return None
            if a != b:
                return f"token {i} is {a}, alone {b}; of {found.token_ids}, {wanted.token_ids}"
            alone = wanted.logprobs[i]
            gap = max(abs(found.logprobs[i][t] - alone[t]) for t in alone.keys() & {a})
            if gap > TOLERANCE * noise_of(cache_dtype):
                return f"log-probability of token {i} differs by {gap:.3g}"
        return None


# ----------------------------------------------------------------------------- subcommand


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench.py check`."""
    parser.add_argument("check", type=float, metavar="SECONDS", help="how long to try")
    flags.add_flags(parser, FLAGS)


def check_arguments(args: Namespace) -> None:
    """Raise ValueError unless the time is positive, and at most a week."""
    check_float("SECONDS", args.check, 0.0, MAX_SECONDS, open_low=True)


def run_command(args: Namespace) -> dict:
    """Try and print; the report. A "failure" in it makes the exit status 1."""
    torch.set_num_threads(args.threads)
    device = resolve_device(args.device)
    model = load(args.model, torch.float32, device).model
    info = report.describe_hardware(device)
    what = f"{args.model}, float32: {args.check:g} s of random trials"
    report.print_heading(what, info)
    found = Fuzz(model, args.seed).run(args.check)
    print(
        f"{found.trials} configurations, {found.requests} requests, {found.tokens} tokens: "
        f"{len(found.faults) or 'no'} differences from each request alone"
    )
    print(", ".join(f"{name}: {count}" for name, count in sorted(found.seen.items())))
    failure = f"{len(found.faults)} differences; see above" if found.faults else None
    return {"machine": info, "check": vars(found), "failure": failure}
