"""The engine's settings. (The shape of a model is in models/config.py.)

A frozen dataclass that checks itself when it is built; `dataclasses.replace` checks again. No
other module has to.

Always holds: every field is of its type and in its range, and the fields agree with each
other. An error names the field, the value and what is allowed.

Source: the names follow vLLM's EngineArgs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import ModuleType

from nanobatch.utils.checks import check_bool, check_choice, check_float, check_int
from nanobatch.utils.extensions import load_extension

BATCHING = ("continuous", "static")
POLICIES = ("fcfs", "sjf", "priority")
ADMISSIONS = ("on_demand", "reserve", "predict")
PREEMPTIONS = ("recompute", "swap")
SPECULATIONS = (None, "ngram", "draft")
MAX_DRAFT_TOKENS = 64
ATTENTION_BACKENDS = ("auto", "torch", "triton", "c")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")

# Settings that may need a module of extensions/: the value that needs none, and the module that
# any other value needs. `n` is a field of SamplingParams.
EXTENSIONS = {
    "preemption": ("recompute", "swap"),
    "speculative": (None, "speculative"),
    "tensor_parallel_size": (1, "tensor_parallel"),
    "n": (1, "parallel_sampling"),
}


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. Units: blocks, tokens, requests, seconds.

    Attributes:
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks in the pool; None: on a CPU what max_num_seqs requests of
            max_model_len need, at most 2 GiB; on a GPU what its memory has left after the
            weights, the largest steps and captured graphs (ModelRunner.config has the number).
        num_host_blocks: blocks of host memory, for preemption by swap; None: as many as the
            pool has, in at most 4 GiB (for each process that shares the model).
        max_num_seqs: most requests in `running` at once.
        max_num_batched_tokens: the token budget of one step.
        max_model_len: most tokens of a request, prompt and output; None: the model's own.
        batching: "continuous": requests may join at any step; "static": a batch is gathered
            once, and runs until its last request has finished.
        policy: "fcfs": first come, first served; "sjf": shortest job first; "priority": lower
            first, then arrival (policies/ordering.py).
        max_wait: seconds after which a waiting request comes first under any policy.
        admission: when a request may join. "on_demand": if its next tokens fit; preempt when
            memory runs out later. "reserve": if prompt + max_tokens fit. "predict": if the
            expected peak of all requests fits (policies/admission.py).
        enable_chunked_prefill: a prompt may be computed over several steps. Without it a prompt
            waits for a step that has the budget for all of it; what a preemption lost is
            computed again in chunks all the same.
        enable_prefix_caching: requests share the full blocks of a common prefix.
        preemption: "recompute": a preempted request computes its tokens again; "swap": its
            blocks are copied to host memory, while num_host_blocks last
            (policies/preemption.py).
        speculative: where drafts come from, the guessed tokens that one step checks. None: no
            drafts. "ngram": what followed the same tokens earlier in the request
            (extensions/speculative.py). "draft": a small model (extensions/draft_model.py).
            In float32 greedy outputs are the same with and without.
        num_speculative_tokens: most tokens of a draft.
        draft_model: the name of the model for "draft"; it has the same vocabulary.
        prompt_lookup_max, prompt_lookup_min: the most and the fewest last tokens that "ngram"
            searches for.
        attention_backend: "torch", "triton" (on a CPU only in Triton's interpreter) or "c" (on
            a CPU with a C compiler); "auto" is the fastest that the device can run.
        cuda_graphs: replay captured decode steps (on a GPU, with the Triton backend).
        async_scheduling: plan and launch a step while the device computes the one before; the
            outputs are the same. On a GPU with the Triton backend, without drafts and on one
            process; elsewhere it has no effect (extensions/async_scheduling.py).
        device: "cpu" or "cuda"; "auto" is a GPU where there is one.
        dtype: of weights, and of the cache unless that is in 8 bits; "auto" on a GPU is
            bfloat16 from compute capability 8.0 on, float16 below (bfloat16 is refused there);
            on a CPU bfloat16 where it multiplies that in hardware (AVX-512 BF16 or AMX), else
            float32.
        kv_cache_dtype: "int8" or "fp8" (e4m3; on a GPU from compute capability 8.9 on): keys
            and values in 8 bits, with a scale for each token and KV head; "auto": as dtype.
        gpu_memory_utilization: share of a GPU's memory that may be used (CUDA only).
        tensor_parallel_size: processes that share one model, each with a GPU or some cores;
            as many as torchrun has started (extensions/tensor_parallel.py).
        seed: for the random streams of requests that have no seed themselves.

    Raises:
        ValueError: a field is out of its range, or two fields contradict each other.
    """

    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    batching: str = "continuous"
    policy: str = "fcfs"
    max_wait: float | None = None
    admission: str = "on_demand"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    preemption: str = "recompute"
    speculative: str | None = None
    num_speculative_tokens: int = 4
    draft_model: str | None = None
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    async_scheduling: bool = True
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self):
        check_int("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, 1)
        if self.num_host_blocks is not None:
            check_int("num_host_blocks", self.num_host_blocks, 0)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        if self.max_wait is not None:
            check_float("max_wait", self.max_wait, 0.0)
        for name in ("enable_chunked_prefill", "enable_prefix_caching"):
            check_bool(name, getattr(self, name))
        for name in ("cuda_graphs", "async_scheduling"):
            check_bool(name, getattr(self, name))
        check_choice("batching", self.batching, BATCHING)
        check_choice("policy", self.policy, POLICIES)
        check_choice("admission", self.admission, ADMISSIONS)
        check_choice("preemption", self.preemption, PREEMPTIONS)
        check_choice("speculative", self.speculative, SPECULATIONS)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1)
        check_int("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_float(
            "gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True
        )
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_together()

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of host memory that a scheduler may swap to: as many as the pool has where
        nobody who knows a block's bytes has set num_host_blocks; 0 without swap."""
        if self.preemption != "swap":
            return 0
        return self.num_blocks if self.num_host_blocks is None else self.num_host_blocks

    def extensions(self, *settings: str) -> list[ModuleType]:
        """The extensions that the values of these settings need.

        Raises:
            ValueError: the file of one is missing; the message names the setting and the file.
        """
        found = [extension_for(name, getattr(self, name)) for name in settings]
        return [extension for extension in found if extension is not None]

    def check_plain(self, served: Collection[str] = ()) -> None:
        """Raise ValueError if a setting needs an extension, and is not named in `served`."""
        for name in EXTENSIONS.keys() - {"n", *served}:
            value, (plain_value, _) = getattr(self, name), EXTENSIONS[name]
            if value != plain_value:
                raise ValueError(
                    f"{name} is {value!r}; a ModelRunner alone takes only {plain_value!r}: "
                    "make the runner with llm.build_runner"
                )

    def check_fits(self, of_runner: EngineConfig) -> None:
        """Raise ValueError if plans made with this would not fit into the runner's KV cache."""
        if self.block_size != of_runner.block_size:
            raise ValueError(
                f"config.block_size is {self.block_size}; the runner's is "
                f"{of_runner.block_size}: use runner.config"
            )
        for name, asked, there in (
            ("num_blocks", self.num_blocks, of_runner.num_blocks),
            ("num_host_blocks", self.num_swap_blocks, of_runner.num_swap_blocks),
        ):
            if asked > there:
                raise ValueError(f"config.{name} is {asked}; the runner's cache has {there}")

    def _check_together(self):
        if self.max_num_batched_tokens < self.max_num_seqs:
            # Every running request gets at least one token in every step (invariant 9).
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be >= "
                f"max_num_seqs, which is {self.max_num_seqs}"
            )
        if self.preemption == "swap" and self.num_host_blocks == 0:
            raise ValueError("num_host_blocks is 0; preemption by swap needs >= 1")
        is_named = isinstance(self.draft_model, str) and self.draft_model != ""
        if self.speculative == "draft" and not is_named:
            raise ValueError(
                f"draft_model is {self.draft_model!r}; speculative 'draft' needs a model's name"
            )
        if self.speculative == "draft" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; with speculative "
                "'draft' it must be 1: a draft model has no shards"
            )
        if self.speculative != "draft" and self.draft_model is not None:
            raise ValueError(
                f"draft_model is {self.draft_model!r}; with speculative {self.speculative!r} "
                "it must be None"
            )
        longest_whole_prompt = self.max_model_len or 0
        if (
            not self.enable_chunked_prefill
            and longest_whole_prompt > self.max_num_batched_tokens
        ):
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; without chunked "
                f"prefill it must be >= max_model_len, which is {self.max_model_len}"
            )


def extension_for(setting: str, value: object) -> ModuleType | None:
    """The extension that a setting needs at this value, or None.

    Raises:
        ValueError: its file is missing; the message names the setting and the file.
    """
    plain_value, module = EXTENSIONS[setting]
    return None if value == plain_value else load_extension(module, f"{setting} is {value!r}")
