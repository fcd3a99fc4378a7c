"""Where the two wings meet: a plan becomes a Batch, logits become tokens.

    plan --pack--> Batch --Decoder--> hidden states --rows that sample--> logits --> tokens

It owns the KV cache, the tensors of quantized_cache.py for each layer, and settles what the
configuration left open: the length limit and the number of blocks. On a GPU a step in which
everybody decodes is the replay of a captured graph (extensions/cuda_graphs.py); a step with any
prefill in it runs eagerly, and so does one with drafts to check.

Checking a draft is sampling: a token is chosen behind each of its tokens, by the request's own
rules and with the random number of that place, and they are kept up to the first that is not
the draft's next one. For a token of prompt lookup this is rejection sampling already (accept it
with the probability that the model gives it, else draw from the others), and the tokens are the
very ones that come without drafts. A draft model's come with a distribution: see sampler.py.

Always holds: nothing of a request is kept here between steps. What a step needs is in the
plan, so a preempted request is the same as one never seen (invariants 10, 12, 13).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's GPUModelRunner.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from nanobatch.attention import PagedAttend, choose_backend
from nanobatch.batch import PADDING_SLOT, Batch, Row, pack
from nanobatch.config import EngineConfig
from nanobatch.engine import StepResult, WallClock
from nanobatch.extensions.cuda_graphs import DecodeGraphs
from nanobatch.extensions.draft_model import Proposals, check_draft_model, fill_in_drafts
from nanobatch.extensions.tensor_parallel import SharedClock
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.models.config import ModelConfig, settle_max_model_len
from nanobatch.models.decoder import Decoder
from nanobatch.plan import ScheduledRequest, SchedulerOutput
from nanobatch.request import SamplingParams
from nanobatch.sampler import Sampled, SamplingRow, sample, sampling_row
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.cache_size import row_bytes
from nanobatch.utils.device import GIB, cache_bytes, measure_step
from nanobatch.utils.extensions import load_extension

CPU_CACHE_BYTES = 2 * GIB  # of the cache, unless num_blocks says how much
MAX_CACHE_BYTES = 2**40
MAX_AUTO_BLOCKS = 2**20  # for a small model on a large GPU, where memory sets no limit

Caches = list[KVCache]  # one for each layer


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values, over all layers, in one block; dtype is the cache's."""
    rows_per_token = 2 * model.num_layers * model.num_kv_heads
    return block_size * rows_per_token * row_bytes(model.head_dim, dtype.itemsize)


class ModelRunner:
    """Runs plans on a decoder, with a paged KV cache, where the decoder's weights are.

    Args:
        model: with its weights; on a CPU those in bfloat16 are laid out anew, for good.
        config: its None fields are settled here; see `.config`.
        draft: the model that guesses, of the same dtype and device, if config.speculative is
            "draft".

    Its clock is what an engine around it goes by: one for all ranks, if there are several.

    Raises:
        ValueError: max_model_len exceeds what the model was made for, the attention backend
            or the cache's number format cannot be had, the memory does not suffice, the draft
            model does not fit, or the model was loaded for another tensor_parallel_size.
    """

    def __init__(self, model: Decoder, config: EngineConfig, draft: Decoder | None = None):
        self.model, self.draft, self.ranks = model, draft, model.ranks
        if config.tensor_parallel_size != self.ranks.size:
            raise ValueError(
                f"tensor_parallel_size is {config.tensor_parallel_size}; the model was loaded "
                f"for {self.ranks.size}"
            )
        own_clock = WallClock()
        self.clock = own_clock if self.ranks.size == 1 else SharedClock(self.ranks, own_clock)
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.config.eos_token_ids
        weight = model.embed.weight
        self.device, self.dtype, self.on_cuda = weight.device, weight.dtype, weight.is_cuda
        self.backend = choose_backend(config.attention_backend, self.device, config.block_size)
        self.cache_kind, self.cache_dtype = KVCache, self.dtype
        if config.kv_cache_dtype != "auto":
            setting = f"kv_cache_dtype is {config.kv_cache_dtype!r}"
            extension = load_extension("quantized_cache", setting)
            self.cache_kind, self.backend = (
                extension.QuantizedCache,
                extension.over_8_bits(self.backend),
            )
            self.cache_dtype = extension.resolve_cache_dtype(config.kv_cache_dtype, self.device)
        for decoder in self._decoders():
            decoder.set_ops(self.backend)
        # torch's paged attention looks at lengths, which a captured step may not.
        self.has_graphs = config.cuda_graphs and self.on_cuda and self.backend.name == "triton"
        self.config = self._settle(config)
        self.caches = self._new_caches("num_blocks", self.config.num_blocks, self.device)
        swaps = config.preemption == "swap"
        host_blocks = ("num_host_blocks", config.num_host_blocks if swaps else 0)
        self.host_caches = self._new_caches(*host_blocks, torch.device("cpu"))
        self.graphs = self._capture() if self.has_graphs else None

    # ------------------------------------------------------------------ what is settled once

    def _settle(self, config: EngineConfig) -> EngineConfig:
        config = settle_max_model_len(config, self.model.config)
        check_draft_model(self.model, self.draft, config)
        if config.num_blocks is not None:
            return config
        size = self._bytes_per_block(config)
        if self.on_cuda:
            num_blocks = min(self._free_bytes(config) // size, MAX_AUTO_BLOCKS)
            num_blocks = min(self.ranks.all_of(num_blocks))
            if num_blocks < 1:
                raise ValueError(
                    f"gpu_memory_utilization is {config.gpu_memory_utilization}; the weights "
                    "and one step leave no room for a block of the cache: raise it, or lower "
                    f"max_num_batched_tokens ({config.max_num_batched_tokens}) or "
                    f"max_num_seqs ({config.max_num_seqs})"
                )
        else:
            wanted = config.max_num_seqs * cdiv(config.max_model_len, config.block_size)
            num_blocks = max(1, min(wanted, CPU_CACHE_BYTES // size))
        return dataclasses.replace(config, num_blocks=num_blocks)

    def _decoders(self) -> list[Decoder]:
        return [self.model] if self.draft is None else [self.model, self.draft]

    def _bytes_per_block(self, config: EngineConfig) -> int:
        shapes = [decoder.config for decoder in self._decoders()]
        size, dtype = config.block_size, self.cache_dtype
        return sum(bytes_per_block(shape, size, dtype) for shape in shapes)

    def _free_bytes(self, config: EngineConfig) -> int:
        """What a GPU has left for the cache beside a step of the largest size."""
        try:
            with self.ranks.together():
                memory = measure_step(lambda: self._largest_step(config), self.device)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens} and max_num_seqs "
                f"{config.max_num_seqs}; a step of that size does not fit into the GPU beside "
                "the weights: lower them"
            ) from None
        return cache_bytes(memory, config.gpu_memory_utilization, self.has_graphs)

    @torch.inference_mode()
    def _largest_step(self, config: EngineConfig) -> None:
        """Fill the token budget and all rows, sample each, and write nothing to the cache.

        One block of zeros stands for every block of every table and layer.
        """
        num_rows, P = config.max_num_seqs, config.block_size
        each, left_over = divmod(config.max_num_batched_tokens, num_rows)
        lens = [min(each + (i < left_over), config.max_model_len) for i in range(num_rows)]
        batch = pack([Row([0] * n, 0, [0] * cdiv(n, P)) for n in lens], P, self.device)
        batch.slot_mapping_T.fill_(PADDING_SLOT)
        shape = (1, self.model.config.num_kv_heads, P, self.model.config.head_dim)
        cache = self.cache_kind.allocate(shape, self.cache_dtype, self.device)
        for part in cache.raw_parts():
            part.zero_()
        caches = [cache] * self.model.config.num_layers
        hidden_SE = self._hidden(batch, caches)[batch.logits_indices_S]
        params = SamplingParams(temperature=1.0, top_p=0.9)  # the costliest kind
        rows = [SamplingRow(params, (), (), (), seed=i) for i in range(num_rows)]
        sample(self.model.logits(hidden_SE), rows, self.backend)

    def _new_caches(self, name: str, num_blocks: int, device: torch.device) -> Caches:
        """The model's layers, then the draft model's."""
        size = self._bytes_per_block(self.config)
        if num_blocks * size > MAX_CACHE_BYTES:
            raise ValueError(
                f"{name} is {num_blocks}; with {size} bytes a block it must be "
                f"<= {MAX_CACHE_BYTES // size}"
            )
        shapes = [
            (num_blocks, model.num_kv_heads, self.config.block_size, model.head_dim)
            for model in (decoder.config for decoder in self._decoders())
            for _ in range(model.num_layers)
        ]
        try:
            with self.ranks.together():
                allocate = self.cache_kind.allocate
                return [allocate(shape, self.cache_dtype, device) for shape in shapes]
        except RuntimeError as error:  # a CPU's says so only in its text
            is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
            if not is_memory:
                raise
            raise ValueError(
                f"{name} is {num_blocks}; {num_blocks * size / GIB:.1f} GiB of cache do not "
                "fit into memory beside the weights: lower it, or leave it None"
            ) from None

    @torch.inference_mode()
    def _capture(self) -> DecodeGraphs:
        with self.ranks.together():
            return DecodeGraphs(
                lambda batch: self.model.logits(self._hidden(batch, self.caches)),
                max_num_seqs=self.config.max_num_seqs,
                max_blocks=cdiv(self.config.max_model_len, self.config.block_size),
                vocab_size=self.vocab_size,
                device=self.device,
            )

    # ------------------------------------------------------------------------------ each step

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute a plan: write its keys and values, sample where a row's last token is in, and
        after each draft token for as long as the samples agree with the draft."""
        with self.ranks.together():
            return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> StepResult:
        _copy_blocks(plan.swap_out, self.caches, self.host_caches)
        _copy_blocks(plan.swap_in, self.host_caches, self.caches)
        proposals: Proposals = {}
        if self.draft is not None:
            proposals = fill_in_drafts(plan.scheduled, self._draft_logits)
        rows = [_row(s) for s in plan.scheduled]
        logits_LV = self._logits(rows)
        sampling = [s for s in plan.scheduled if s.num_logits > 0]
        if not sampling:
            return StepResult({})
        result = StepResult({}, {}, {})
        behind = [row for s in sampling for row in _sampling_rows(s, proposals)]
        sampled = iter(sample(logits_LV, behind, self.backend, agree=self.ranks.first))
        for s in sampling:
            _take(result, s, list(itertools.islice(sampled, s.num_logits)))
        return result

    def _logits(self, rows: Sequence[Row]) -> Tensor:
        """Compute all rows; float32 [L, V], the logits that they ask for."""
        if self.graphs is not None and all(len(row.token_ids) == 1 for row in rows):
            logits_SV = self.graphs.replay(pack(rows, self.config.block_size))
            sampling = [i for i, row in enumerate(rows) if row.num_logits > 0]
            return logits_SV if len(sampling) == len(rows) else logits_SV[sampling]
        batch = pack(rows, self.config.block_size, self.device)
        hidden_TE = self._hidden(batch, self.caches)
        return self.model.logits(hidden_TE[batch.logits_indices_S])

    def _draft_logits(self, rows: Sequence[Row]) -> Tensor:
        """The same by the draft model, always eagerly."""
        batch = pack(rows, self.config.block_size, self.device)
        caches = self.caches[self.model.config.num_layers :]
        attend = PagedAttend(batch, caches, self.backend)
        hidden_TE = self.draft(batch.token_ids_T, batch.positions_T, attend)
        return self.draft.logits(hidden_TE[batch.logits_indices_S])

    def _hidden(self, batch: Batch, caches: Caches) -> Tensor:
        attend = PagedAttend(batch, caches, self.backend)
        return self.model(batch.token_ids_T, batch.positions_T, attend)


def _copy_blocks(pairs: Sequence[tuple[int, int]], source: Caches, target: Caches) -> None:
    """Copy blocks (from, to) of all layers between the device and the host."""
    if not pairs:
        return
    from_ids, to_ids = torch.tensor(pairs).unbind(dim=1)
    for one, other in zip(source, target, strict=True):
        one.copy_blocks(from_ids, other, to_ids)


def _row(s: ScheduledRequest) -> Row:
    request, start = s.request, s.request.num_computed_tokens
    token_ids = request.token_ids[start : start + s.num_tokens]
    if s.draft_token_ids:
        token_ids = [*token_ids, *s.draft_token_ids]
    return Row(token_ids, start, request.block_table, s.num_logits)


def _sampling_rows(s: ScheduledRequest, proposals: Proposals) -> list[SamplingRow]:
    """One for each of a row's logits: after its last known token, and after each draft."""
    places = itertools.zip_longest(range(s.num_logits), proposals.get(s.request.request_id, ()))
    return [sampling_row(s.request, s.draft_token_ids[:n], one) for n, one in places]


def _take(result: StepResult, s: ScheduledRequest, sampled: Sequence[Sampled]) -> None:
    """Keep a row's samples up to the first that is not the draft's next token."""
    request_id = s.request.request_id
    kept = []
    for one, drafted in itertools.zip_longest(sampled, s.draft_token_ids):
        if one.error is not None:
            break  # behind accepted drafts it will come again in the next step
        kept.append(one)
        if one.token_id != drafted:
            break
    if not kept:
        result.errors[request_id] = sampled[0].error
        return
    result.token_ids[request_id] = [one.token_id for one in kept]
    if kept[0].logprobs is not None:
        result.logprobs[request_id] = [one.logprobs for one in kept]
