"""Where the two wings meet: a plan becomes a Batch, logits become tokens.

    plan --pack--> Batch --Decoder--> hidden states --rows that sample--> logits --> tokens

It owns the KV cache, a pair of [N, K, P, D] tensors for each layer, and settles what the
configuration left open: the length limit, the number of blocks, the number format.

Always holds: nothing of a request is kept here between steps. What a step needs is in the
plan, so a preempted request is the same as one never seen (invariants 10, 12, 13).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's GPUModelRunner.
"""

from __future__ import annotations

import dataclasses

import torch

from nanobatch.attention import PagedAttend
from nanobatch.batch import Row, pack
from nanobatch.config import EngineConfig, ModelConfig, cdiv
from nanobatch.engine import StepResult
from nanobatch.model import Decoder
from nanobatch.request import Request
from nanobatch.sampler import SamplingRow, sample
from nanobatch.scheduler import ScheduledRequest, SchedulerOutput

CPU_CACHE_BYTES = 2 * 2**30  # of the cache, unless num_blocks says how much
MAX_CACHE_BYTES = 2**40


def resolve_dtype(name: str) -> torch.dtype:
    """EngineConfig.dtype as torch knows it; "auto" asks the CPU what it multiplies fast."""
    if name != "auto":
        return getattr(torch, name)
    capabilities = (
        torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    )
    has_bfloat16 = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values, over all layers, in one block."""
    numbers_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return block_size * numbers_per_token * dtype.itemsize


class ModelRunner:
    """Runs plans on a decoder, with a paged KV cache.

    Args:
        model: with its weights.
        config: its None fields are settled here; see `.config`.

    Raises:
        ValueError: max_model_len exceeds what the model was made for.
    """

    def __init__(self, model: Decoder, config: EngineConfig):
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = model.config.eos_token_ids
        weight = model.embed.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.config = self._settle(config)
        shape = (
            self.config.num_blocks,
            model.config.num_kv_heads,
            self.config.block_size,
            model.config.head_dim,
        )
        size = bytes_per_block(model.config, self.config.block_size, self.dtype)
        if self.config.num_blocks * size > MAX_CACHE_BYTES:
            raise ValueError(
                f"num_blocks is {self.config.num_blocks}; with {size} bytes a block it must be "
                f"<= {MAX_CACHE_BYTES // size}"
            )
        # Not zeroed: pages of memory that no block uses are never touched (invariant 14).
        self.caches = [
            (
                torch.empty(shape, dtype=self.dtype, device=self.device),
                torch.empty(shape, dtype=self.dtype, device=self.device),
            )
            for _ in range(model.config.num_layers)
        ]

    def _settle(self, config: EngineConfig) -> EngineConfig:
        longest = self.model.config.max_position_embeddings
        max_model_len = config.max_model_len or longest
        if max_model_len > longest:
            raise ValueError(
                f"max_model_len is {max_model_len}; the model was made for at most {longest}"
            )
        num_blocks = config.num_blocks
        if num_blocks is None:
            wanted = config.max_num_seqs * cdiv(max_model_len, config.block_size)
            size = bytes_per_block(self.model.config, config.block_size, self.dtype)
            num_blocks = max(1, min(wanted, CPU_CACHE_BYTES // size))
        return dataclasses.replace(config, max_model_len=max_model_len, num_blocks=num_blocks)

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute a plan: write its keys and values, sample where a row's last token is in."""
        batch = pack([_row(s) for s in plan.scheduled], self.config.block_size, self.device)
        attend = PagedAttend(batch, self.caches, self.config.attention_backend)
        hidden_TE = self.model(batch.token_ids_T, batch.positions_T, attend)
        sampling = [i for i, s in enumerate(plan.scheduled) if s.samples]
        if not sampling:
            return StepResult({})
        logits_SV = self.model.logits(hidden_TE[batch.logits_indices_S[sampling]])
        requests = [plan.scheduled[i].request for i in sampling]
        result = StepResult({}, {}, {})
        sampled = sample(logits_SV, [_sampling_row(r) for r in requests])
        for request, one in zip(requests, sampled, strict=True):
            if one.error is not None:
                result.errors[request.request_id] = one.error
                continue
            result.token_ids[request.request_id] = [one.token_id]
            if one.logprobs is not None:
                result.logprobs[request.request_id] = [one.logprobs]
        return result


def _row(scheduled: ScheduledRequest) -> Row:
    request, start = scheduled.request, scheduled.request.num_computed_tokens
    token_ids = request.token_ids[start : start + scheduled.num_tokens]
    return Row(token_ids, start, request.block_table)


def _sampling_row(request: Request) -> SamplingRow:
    return SamplingRow(
        params=request.params,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
    )
