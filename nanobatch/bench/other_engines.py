"""Other engines on the same requests: each in a process of its own, driven over a pipe.

    bench.py --- {"prompts": [[ids]], "output_lens": [n]} ---> python other_engines.py vllm DIR
             <-- {"seconds": s, "first_token": s, "tokens": [[ids]]} --

This file is both ends: run as a script it is the other engine's process, under whatever
interpreter has that engine, so it imports nothing of this package. Models are loaded once;
then the engines take turns on the machine, which is nobody else's while one of them works.

Always holds: greedy, the end of text ignored, so that all compute the same number of tokens.

    vllm    vLLM's offline LLM.generate; on a CPU bound to all cores, with tcmalloc and
            libiomp5 preloaded where they are found, as its documentation advises
    hf      transformers' generate on left-padded static batches of 32
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BASELINES = ("vllm", "hf")
HF_BATCH = 32
# Requests, seed, bounds of the lengths of prompts and outputs (both included).
WORKLOADS = {
    "W1": (64, 0, (16, 256), (16, 256)),
    "W2": (16, 1, (512, 1024), (64, 128)),
    "one": (1, 2, (700, 700), (128, 128)),
}


def make_workload(name: str) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths): first all prompts are drawn, then all output lengths.

    Raises:
        ValueError: there is no workload of that name.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload is {name!r}; it must be one of {', '.join(WORKLOADS)}")
    num_requests, seed, input_len, output_len = WORKLOADS[name]
    rng = random.Random(seed)
    prompts = [
        [rng.randint(10, 40000) for _ in range(rng.randint(*input_len))]
        for _ in range(num_requests)
    ]
    return prompts, [rng.randint(*output_len) for _ in range(num_requests)]


class Baseline:
    """An engine in its own process.

    Args:
        name: one of BASELINES.
        python: the interpreter that has it.
        directory: the checkpoint, as Hugging Face has it.
        dtype: "bfloat16", "float32" or "float16".
        threads: cores to use.

    Raises:
        ValueError: it cannot be started there. What it said went to stderr.
    """

    def __init__(self, name: str, python: str, directory: Path, dtype: str, threads: int):
        self.name = name
        extra = _vllm_environment(python, threads) if name == "vllm" else {}
        try:
            self._process = subprocess.Popen(
                [python, __file__, name, str(directory), dtype, str(threads)],
                env=extra | os.environ,  # who set one of them by hand knows better
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"--baseline-python {name}={python}: {error}") from error
        self.version = self._read()["version"]

    def run(self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> dict:
        """{"seconds", "first_token" (seconds; None if not known), "tokens"} of one pass."""
        ask = {"prompts": prompts, "output_lens": output_lens}
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(
                f"--baseline {self.name}: {self._process.args[0]} cannot run it; see above"
            )
        return json.loads(line)


def _vllm_environment(python: str, threads: int) -> dict[str, str]:
    """What vLLM's documentation advises for a CPU. By its own choice it takes one core."""
    where = [Path(python).parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu")]
    names = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    found = [str(d / n) for n in names for d in where if (d / n).exists()]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join(found),
    }


# ------------------------------------------------------------- in the other engine's process


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
        """Tokens of one batch, each row cut to its own length, and when the first came."""
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
    """Load one engine, say its version, then answer asks until the pipe is closed."""
    name, directory, dtype, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is no answer

    def answer(what: dict) -> None:
        print(json.dumps(what), file=answers, flush=True)

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
