"""What each rank does for test_tensor_parallel.py, which starts it: with torchrun, or by hand.

    serve DIR DEVICE     requests of all kinds, then (on CPUs) a step that fails on rank 1 alone
    forever DIR DEVICE   requests without end, until somebody dies

What was found goes to DIR, as JSON under the number of the rank.
"""

import contextlib
import dataclasses
import io
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import bench
from nanobatch import LLM, SamplingParams, sampler
from nanobatch.models.loader import save

PROMPTS = [[7, 3, 9, 1] * 5, [2] * 17, list(range(30)), [5, 4, 3, 2, 1]]
# A pool in which not all four can grow to their end, and chunks of at most 16 tokens.
SMALL_POOL = {
    "block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 16
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = [SamplingParams(max_tokens=12, top_p=0.95, seed=i, logprobs=1) for i in range(4)]
BENCH = (
    "--tensor-parallel-size=2 --num-prompts=3 --input-len=8 --output-len=4 "
    "--max-num-seqs=2 --max-num-batched-tokens=32 --request-rate=100 --repeat=1"
)


def all_logprobs(llm):
    """Of the token after each prompt, the log-probability of the whole vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=llm.engine.runner.vocab_size)
    outs = llm.generate(PROMPTS, params, progress=False)
    return [[logprob for _, logprob in sorted(out.logprobs[0].items())] for out in outs]


def answers(llm):
    """What all numbers of ranks must agree on."""
    greedy = llm.generate(PROMPTS, GREEDY, progress=False)
    seeded = llm.generate(PROMPTS, SEEDED, progress=False)
    return {
        "greedy": [out.token_ids for out in greedy],
        "seeded": [out.token_ids for out in seeded],
        "preempted": llm.engine.stats.num_preemptions,
        "logprobs": all_logprobs(llm),
    }


def message_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def start(model, **config):
    return LLM(str(model), tensor_parallel_size=2, device=sys.argv[3], **config)


def fail_on_rank_1(llm, folder, rank):
    """Rank 1 has no memory left in its third step, and lives on: what does rank 0 see?"""
    if rank == 1:
        logits, steps = llm.engine.runner.model.logits, iter(range(2))

        def run_out(hidden_SE):
            if next(steps, None) is None:
                raise MemoryError("rank 1 alone")
            return logits(hidden_SE)

        llm.engine.runner.model.logits = run_out
    begin = time.monotonic()
    messages = [message_of(llm.generate, PROMPTS, GREEDY, progress=False) for _ in range(2)]
    seconds = time.monotonic() - begin
    for _ in range(300):  # rank 1 does not help by ending
        if rank == 0 or (folder / "0.json").exists():
            break
        time.sleep(0.1)
    return {"failed": messages, "seconds": seconds}


def serve(folder):
    found = {}
    for name, dtype in (("tiny", "float32"), ("tiny", "bfloat16"), ("biased", "float32")):
        llm = start(name if name == "tiny" else folder / name, dtype=dtype, **SMALL_POOL)
        found[f"{name} {dtype}"] = answers(llm)
    rank = dist.get_rank()
    [out] = llm.generate([1, 2, 3], GREEDY, progress=False)
    found["metrics"] = dataclasses.asdict(out.metrics)
    if rank == 1:  # what a rank would sample by itself counts for nothing
        draw = sampler.draw_tokens
        sampler.draw_tokens = lambda probs_RV, rows: torch.zeros(len(rows), dtype=torch.int64)
    found["other draws"] = [out.token_ids for out in llm.generate(PROMPTS, SEEDED)]
    if rank == 1:
        sampler.draw_tokens = draw
    found["refused"] = [
        message_of(start, "tiny", seed=rank),
        message_of(start, "dummy:smollm2-135m"),
        message_of(save, llm.engine.runner.model, folder),
        message_of(LLM, "tiny"),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report = str(folder / f"bench-{rank}.json")
        bench.main([*BENCH.split(), "--device", sys.argv[3], "--save-json", report])
    found["printed"] = printed.getvalue()
    if sys.argv[3] == "cpu":
        found |= fail_on_rank_1(llm, folder, rank)
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"{rank}.json")  # whole or not at all


def forever(folder):
    llm = start("tiny", dtype="float32")
    while True:
        llm.generate(PROMPTS, GREEDY, progress=False)
        (folder / f"ready-{dist.get_rank()}").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"serve": serve, "forever": forever}[sys.argv[1]](Path(sys.argv[2]))
