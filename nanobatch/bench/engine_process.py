"""Another engine's own process: loads it, then answers requests until the pipe is closed.

    other_engines.py --- {"prompts": [[ids]], "output_lens": [n]} ---> engine_process.py
                    <--- {"seconds": s, "first_token": s, "tokens": [[ids]]} ---

Run as a script by whatever interpreter has that engine, so it imports nothing of nanobatch.

    vllm    vLLM's offline LLM.generate
    hf      transformers' generate on left-padded static batches of 32

Always holds: greedy, the end of text ignored, so that all engines compute as many tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time

HF_BATCH = 32


def _vllm(directory: str, dtype: str, threads: int):
    import vllm

    engine = vllm.LLM(
        directory, dtype=dtype, skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=2048, disable_log_stats=True,
    )  # fmt: skip

    def run(prompts, output_lens):
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in output_lens
        ]
        asks = [{"prompt_token_ids": prompt} for prompt in prompts]
        outs = engine.generate(asks, params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs], None

    return vllm.__version__, run


def _hf(directory: str, dtype: str, threads: int):
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    ).eval()

    def run_batch(prompts, output_lens):
        """Tokens of one batch, each row up to its own length, and when the first came."""
        longest, first_token = max(map(len, prompts)), []

        def note_the_time(ids, scores, **kwargs):
            if not first_token:
                first_token.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(output_lens), do_sample=False,
            eos_token_id=None, pad_token_id=0, stopping_criteria=[note_the_time],
        )[:, longest:].tolist()  # fmt: skip
        return [row[:n] for row, n in zip(out, output_lens)], first_token[0]  # noqa: B905

    def run(prompts, output_lens):
        tokens, times = [], []
        for i in range(0, len(prompts), HF_BATCH):
            part = slice(i, i + HF_BATCH)
            done, first_token = run_batch(prompts[part], output_lens[part])
            tokens += done
            times.append(first_token)
        return tokens, times[0]

    return transformers.__version__, run


def main() -> None:
    """Load one engine, send its version, then answer requests until the pipe is closed."""
    name, directory, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to stderr

    def answer(what: dict) -> None:
        print(json.dumps(what, allow_nan=False), file=answers, flush=True)

    version, run = {"vllm": _vllm, "hf": _hf}[name](directory, dtype, int(threads))
    answer({"version": version})
    for line in sys.stdin:
        start = time.perf_counter()
        tokens, first_token = run(**json.loads(line))
        seconds = time.perf_counter() - start
        ttft = None if first_token is None else first_token - start
        answer({"seconds": seconds, "first_token": ttft, "tokens": tokens})


if __name__ == "__main__":
    main()
