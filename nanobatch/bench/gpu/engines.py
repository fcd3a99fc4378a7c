"""What a visit to a GPU measures of the engine.

    ladder     the rungs of bench.py, at 7B
    decode     one step of an 8B model, with graphs and without, overlapped or not
    startup    what passes before the first token, and the graphs' memory

Each is a generator of rows; a row is there as soon as it is measured. Where a card has no room
for the model that is meant, a smaller one takes its place, and its name is in the rows.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nanobatch.bench import ladder as rungs
from nanobatch.bench.gpu.rows import attempt
from nanobatch.bench.hardware import measure_hardware
from nanobatch.bench.workload import random_requests, random_tokens
from nanobatch.config import EngineConfig
from nanobatch.engine import LLMEngine
from nanobatch.llm import build_engine, build_runner, load_model
from nanobatch.models.decoder import Decoder
from nanobatch.models.presets import MODEL_PRESETS
from nanobatch.request import SamplingParams
from nanobatch.simulation.roofline import num_weights, step_work
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.cache_size import GIB, row_bytes
from nanobatch.utils.device import free_bytes, resolve_device, resolve_dtype
from nanobatch.utils.extensions import load_extension

MARGIN = 3 * GIB  # for a step's tensors and for graphs


def model_that_fits(
    names: Sequence[str], num_tokens: int, device: torch.device, dtype: torch.dtype
) -> str:
    """The first of these presets that has room on the device beside a cache of so many tokens;
    else the last."""
    for name in names:
        shape = MODEL_PRESETS[name]
        row = 2 * shape.num_kv_heads * row_bytes(shape.head_dim, dtype.itemsize)
        cache = num_tokens * shape.num_layers * row
        needed = 1.1 * (num_weights(shape) * dtype.itemsize + cache) + MARGIN
        if needed <= (free_bytes(device) or math.inf):
            return name
    return names[-1]


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Those that "auto" means here."""
    device = resolve_device("auto")
    return device, resolve_dtype("auto", device)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ----------------------------------------------------------------------------- the ladder


def ladder(
    models: Sequence[str],
    num_prompts: int,
    num_sequential: int,
    max_num_seqs: int,
    input_len: str,
    output_len: str,
    max_num_batched_tokens: int,
) -> Iterator[dict]:
    """A row for each rung. The sequential one, which is slow, has the first few requests only.

    Raises:
        SystemExit: the rungs are not comparable (ladder.compare_tokens).
    """
    device, dtype = device_and_dtype()
    items = list(
        random_requests(num_prompts, input_len, output_len, prefix_len=64, num_prefixes=1)
    )
    longest = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    # Twice: static batches have a dense cache of their own.
    model = model_that_fits(models, 2 * max_num_seqs * longest, device, dtype)
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    hardware = measure_hardware(device, dtype)
    loaded = load_model(f"dummy:{model}", config)
    all_rungs = rungs.make_ladder(loaded.model, longest, config)
    few = [replace(item, num_output_tokens=2) for item in items[:max_num_seqs]]
    for rung in all_rungs.values():  # warm up
        rung(few)
    all_rungs["sequential"] = all_rungs.pop("sequential")  # the last
    rounding, reference = None if dtype == torch.float32 else "16-bit numbers", None
    for name, rung in all_rungs.items():
        some = items[:num_sequential] if name == "sequential" else items
        row = {"model": model, "rung": name, "requests": len(some), "slots": max_num_seqs}

        def run_rung(name=name, rung=rung, some=some) -> dict:
            nonlocal reference
            runs, _ = rungs.measure({name: rung}, some, 1, device, rounding)
            reference = reference or runs[name][0]
            same_requests = replace(reference, outputs=reference.outputs[: len(some)])
            pair = {"the first rung": same_requests, name: runs[name][0]}
            said = rungs.compare_tokens(pair, rounding)
            return _rung_figures(rungs.median_summary(runs[name], hardware, None), said)

        yield attempt(row, run_rung)


def _rung_figures(found: Mapping[str, float], said: str) -> dict:
    return {
        "requests/s": found["request_throughput"],
        "output tokens/s": found["output_throughput"],
        "P50 s": found["median_e2el_ms"] / 1e3,
        "P99 s": found["p99_e2el_ms"] / 1e3,
        "TTFT P50 ms": found["median_ttft_ms"],
        "TPOT P50 ms": found["median_tpot_ms"],
        "slots in use": found["slot_utilization"],
        "of roofline": found["roofline_utilization"],
        "greedy tokens": said,
    }


# --------------------------------------------------------------------------- a decode step


def decode(
    models: Sequence[str], num_seqs: int, context_len: int, num_steps: int
) -> Iterator[dict]:
    """A row for each of: with CUDA graphs and without, host work overlapped and not.

    The floor is the time to read all weights and the cache once, at the bandwidth measured now.
    """
    device, dtype = device_and_dtype()
    longest = context_len + num_steps
    model = model_that_fits(models, num_seqs * longest, device, dtype)
    bandwidth = measure_hardware(device, dtype).bandwidth
    base = EngineConfig(
        num_blocks=num_seqs * cdiv(longest, 16), max_num_seqs=num_seqs, max_model_len=longest,
        max_num_batched_tokens=max(num_seqs, 8192), enable_prefix_caching=False,
    )  # fmt: skip
    loaded = load_model(f"dummy:{model}", base)
    on_cuda = device.type == "cuda"  # else there are no graphs, and nothing to overlap
    choices = (True, False) if on_cuda else (False,)
    for graphs in choices:
        for overlap in choices:
            config = replace(base, cuda_graphs=graphs, async_scheduling=overlap)
            row = {"model": model, "sequences": num_seqs, "context": context_len}
            row |= {"graphs": graphs, "overlap": overlap}
            about = (loaded.model, config, bandwidth, context_len, num_steps)
            yield attempt(row, functools.partial(_decode_step, *about))
            gc.collect()  # the runner, and its cache
            if on_cuda:
                torch.cuda.empty_cache()


def _decode_step(
    model: Decoder, config: EngineConfig, bandwidth: float, context_len: int, num_steps: int
) -> dict:
    engine = build_engine(build_runner(model, config))
    seconds, lens = time_steps(engine, context_len, num_steps)
    rows = [(round(n), 1) for n in lens]
    work = step_work(model.config, rows, len(rows), engine.runner.dtype.itemsize)
    floor = work.bytes / bandwidth
    return {
        "step ms": seconds * 1e3,
        "floor ms": floor * 1e3,
        "step / floor": seconds / floor,
        "output tokens/s": len(rows) / seconds,
    }


def time_steps(
    engine: LLMEngine, context_len: int, num_steps: int
) -> tuple[float, list[float]]:
    """Fill all slots of an engine with decodes around context_len tokens.

    Returns:
        seconds of a step, and for each request how many tokens it had on average.

    Raises:
        RuntimeError: a step did not give each request a token.
    """
    num_seqs, device = engine.config.max_num_seqs, engine.runner.device
    num_warm = max(2, num_steps // 4)
    prompt_len = context_len - num_warm - num_steps // 2
    rng, vocab_size = random.Random(0), engine.runner.vocab_size
    max_tokens = engine.config.max_model_len - prompt_len
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    for _ in range(num_seqs):
        engine.add_request(random_tokens(rng, vocab_size, prompt_len), params)
    lens: dict[str, int] = {}
    while len(lens) < num_seqs or min(lens.values()) < num_warm:
        lens |= {out.request_id: len(out.token_ids) for out in engine.step()}
    before = dict(lens)
    wait_for(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        lens |= {out.request_id: len(out.token_ids) for out in engine.step()}
    wait_for(device)
    seconds = (time.perf_counter() - start) / num_steps
    gained = sum(lens.values()) - sum(before.values())
    if gained != num_seqs * num_steps:
        raise RuntimeError(
            f"{num_steps} steps of {num_seqs} requests gave {gained} tokens, not "
            f"{num_seqs * num_steps}"
        )
    return seconds, [prompt_len + (before[name] + lens[name] - 1) / 2 for name in lens]


# --------------------------------------------------------------------------------- start-up


def startup(models: Sequence[str], max_num_seqs: int, max_model_len: int) -> Iterator[dict]:
    """One row: seconds to load the weights, to build the runner (it runs what serving launches,
    for which kernels are compiled), of the first request and of later ones, and of the graphs;
    and the graphs' memory, beside what is set aside for them.

    Run it twice in new processes, first with an empty TRITON_CACHE_DIR: the difference is what
    compiling takes.
    """
    device, dtype = device_and_dtype()
    model = model_that_fits(models, max_num_seqs * max_model_len, device, dtype)
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "."))
    is_warm = "TRITON_CACHE_DIR" in os.environ and folder.is_dir() and any(folder.iterdir())
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, cuda_graphs=False,
        gpu_memory_utilization=0.7,
    )  # fmt: skip
    marks = [time.perf_counter()]

    def lap() -> float:
        wait_for(device)
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    loaded = load_model(f"dummy:{model}", config)
    row = {"model": model, "compiled kernels": "kept" if is_warm else "none"}
    row["load s"] = lap()
    runner = build_runner(loaded.model, config)  # runs the largest step
    row["runner s"] = lap()
    requests = []
    for _ in range(4):
        engine = build_engine(runner)
        engine.add_request(
            [7] * (max_model_len // 2), SamplingParams(temperature=0, max_tokens=3)
        )
        while engine.has_unfinished():
            engine.step()
        requests.append(lap())
    row["first request s"], row["later requests s"] = requests[0], min(requests[1:])
    if runner.on_cuda:
        extension = load_extension("cuda_graphs", "bench.py gpu")
        row["expected MiB"] = extension.bytes_of_graphs(runner) / 2**20
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        lap()
        graphs = extension.DecodeGraphs(runner)
        row["graphs"], row["graphs s"] = len(graphs.sizes), lap()
        torch.cuda.empty_cache()
        row["graphs MiB"] = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
    row["start-up s"] = row["load s"] + row["runner s"] + row.get("graphs s", 0.0)
    yield row
