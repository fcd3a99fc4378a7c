"""What a GPU runs before it serves: what does not fit, or does not run, is found then.

    run_all          everything, and a ValueError that names what to change
    try_launches     each variant of the attention kernel that serving can launch, once
    largest_steps    the steps that take the most memory, as plans
    blocks_beside    the blocks of KV cache that there is room for

A variant is what the compiler sees of a launch: rows, keys of a tile, warps. It follows from
the longest query of a step (choose_launch_config), so one sequence of each length is enough:

    query tokens    1  2  3  4  5  6 ...  8  9 ...
    variant         a  a  a  a  b  b      b  c
    tried           x           x            x

Every other kernel has one variant, which the largest steps run. All that has been tried is
compiled, so no request waits for a compiler.

Source: vLLM's profile run and its warm-up of kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from nanobatch.batch import Batch, Row, pack
from nanobatch.config import EngineConfig
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import LaunchConfig
from nanobatch.kernels.ops import HAS_TRITON, Ops
from nanobatch.plan import ScheduledRequest
from nanobatch.request import Request, SamplingParams
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.cache_size import blocks_on_gpu
from nanobatch.utils.device import GpuMemory, cache_bytes, refuse_as


class Shape(NamedTuple):
    """A batch's shape: all that a launch depends on."""

    num_tokens: int
    num_seqs: int
    max_query_len: int

    def pack(self, config: EngineConfig, device: torch.device) -> Batch:
        """Such a batch: the longest query, then the others. All keys are in block 0, as many as
        there can be, so that they are split among programs where any are."""
        num_others, left = self.num_seqs - 1, self.num_tokens - self.max_query_len
        lens = [self.max_query_len]
        lens += [left // num_others + (i < left % num_others) for i in range(num_others)]
        table = [0] * cdiv(config.max_model_len, config.block_size)
        rows = [Row([0] * n, config.max_model_len - 1 - n, table) for n in lens]
        return pack(rows, config.block_size, device)


def run_all(
    ops: Ops,
    layers: Sequence[nn.Module],
    caches: Sequence[KVCache],
    config: EngineConfig,
    dtype: torch.dtype,
    step: Callable[[list[ScheduledRequest]], object],
) -> None:
    """Run what an engine on a GPU will launch.

    Args:
        layers: of all decoders. caches: one for each; block 0 is zeroed, read and written.
        config: with max_model_len set. dtype: of the decoders.
        step: computes a plan's entries.

    Raises:
        ValueError: something does not fit into the GPU's memory, or does not run on it.
    """
    message = (
        f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs "
        f"{config.max_num_seqs}; a step of that size does not fit into the GPU beside the "
        f"weights: lower them{'' if config.num_blocks is None else ', or num_blocks'}"
    )
    try:
        with refuse_as(message):
            for part in (part for cache in caches for part in cache.raw_parts()):
                part[0].zero_()
            ops.warm_up(layers, caches, config, dtype)
            for scheduled in largest_steps(config):
                step(scheduled)
    except Exception as error:
        if not is_of_a_kernel(error):
            raise
        head_dims = ", ".join(str(d) for d in sorted({cache.keys.shape[3] for cache in caches}))
        raise ValueError(
            f"attention_backend is 'triton'; a kernel does not run on this GPU, with dtype "
            f"{str(dtype).removeprefix('torch.')!r}, kv_cache_dtype {config.kv_cache_dtype!r}, "
            f"block_size {config.block_size} and heads of {head_dims}: use 'torch', or change "
            f"one of these ({error})"
        ) from error


def is_of_a_kernel(error: Exception) -> bool:
    """Whether Triton raised it: while it compiled, or for a program that is too large."""
    if not HAS_TRITON:
        return False
    from triton.errors import TritonError

    return isinstance(error, TritonError) or "PassManager::run failed" in str(error)


def try_launches(
    ops: Ops,
    launch_of: Callable[..., LaunchConfig],
    layers: Sequence[nn.Module],
    caches: Sequence[KVCache],
    config: EngineConfig,
    dtype: torch.dtype,
) -> None:
    """Run paged attention once for each variant and each kind of layer, with splits to join.

    Args:
        launch_of: a launch, by (T, S, longest query, H, K, D).
        layers: of the decoders. caches: one for each; block 0 is read.
        config: with max_model_len set. dtype: of the queries.
    """
    kinds = {}
    for layer, cache in zip(layers, caches, strict=True):
        kinds.setdefault((layer.heads[0], cache.keys.shape[1:], layer.attention_args), cache)
    device = caches[0].keys.device
    packed = functools.cache(lambda shape: shape.pack(config, device))
    for (H, (K, _, D), args), cache in kinds.items():
        of_kind = functools.cache(lambda shape, sizes=(H, K, D): launch_of(*shape, *sizes))
        for shape in shapes_to_try(lambda shape, of=of_kind: of(shape).variant, config):
            q_THD = torch.zeros(shape.num_tokens, H, D, dtype=dtype, device=device)
            launch = dataclasses.replace(of_kind(shape), num_splits=2)
            ops.paged_attention(q_THD, cache, packed(shape), args, launch)


def shapes_to_try(variant_of: Callable[[Shape], Hashable], config: EngineConfig) -> list[Shape]:
    """The smallest shape for each variant that a step of this engine can have.

    Args:
        variant_of: follows from the longest query; one that has changed does not come back.
        config: with max_model_len set.
    """

    def of_one(length: int) -> Shape:
        return Shape(num_tokens=length, num_seqs=1, max_query_len=length)

    lengths = starts_of_runs(1, longest_query(config), lambda n: variant_of(of_one(n)))
    return [of_one(length) for length in lengths]


def starts_of_runs(first: int, last: int, key: Callable[[int], Hashable]) -> list[int]:
    """The numbers in first .. last at which key changes, and first; by bisection, for a key
    that has each value on one run of numbers."""

    def inside(low: int, high: int) -> list[int]:
        if key(low) == key(high):
            return []
        if high - low == 1:
            return [high]
        middle = (low + high) // 2
        return inside(low, middle) + inside(middle, high)

    return [first, *inside(first, last)]


def longest_query(config: EngineConfig) -> int:
    """The most tokens that a request computes in a step; its last is never computed."""
    return min(config.max_num_batched_tokens, config.max_model_len - 1)


def largest_steps(config: EngineConfig) -> list[list[ScheduledRequest]]:
    """The entries of two plans that serving can have: prompts that fill the token budget and
    all rows, then a decode of all rows with as many drafts as fit. Each entry samples, in the
    most expensive way.

    Args:
        config: with max_model_len set.
    """
    each, left = divmod(config.max_num_batched_tokens, config.max_num_seqs)
    lens = [each + (i < left) for i in range(config.max_num_seqs)]
    most = 0 if config.speculative is None else config.num_speculative_tokens
    most = min(most, config.max_model_len - 2)
    return [
        [_entry(i, min(n, longest_query(config)), 0, config) for i, n in enumerate(lens)],
        [_entry(i, 1, min(n - 1, most), config) for i, n in enumerate(lens)],
    ]


def _entry(i: int, num_tokens: int, num_drafts: int, config: EngineConfig) -> ScheduledRequest:
    """A prompt of num_tokens, all of it in block 0, with a block table of full length."""
    # One request with a penalty is enough to have the logits of all copied.
    extra = {"repetition_penalty": 1.1, "logprobs": 1} if i == 0 else {}
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=i, **extra)
    request = Request(f"warm-up-{i}", [0] * num_tokens, params)
    request.block_table = [0] * cdiv(config.max_model_len, config.block_size)
    return ScheduledRequest(request, num_tokens + num_drafts, [0] * num_drafts)


def blocks_beside(
    memory: GpuMemory, reserved: int, bytes_per_block: int, config: EngineConfig
) -> int:
    """Blocks of KV cache that a GPU has room for.

    Args:
        memory: around the largest steps. reserved: see cache_bytes.

    Raises:
        ValueError: there is no room for one.
    """
    utilization = config.gpu_memory_utilization
    num_blocks = blocks_on_gpu(cache_bytes(memory, utilization, reserved), bytes_per_block)
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization is {utilization}; the weights and one step leave no room "
            "for a block of the cache: raise it, or lower max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) or max_num_seqs ({config.max_num_seqs})"
        )
    return num_blocks
