"""Control plane meets data plane: a plan becomes a Batch, logits become tokens.

    plan --pack--> Batch --Decoder--> hidden states --tokens that sample--> logits --> tokens

The runner owns the KV cache and settles what the configuration left open: the length limit and
the number of blocks. Everything else that runs a model is an extension, put around the runner
by llm.build_runner:

    drafts             extensions/speculative_runner.py   a subclass: another `step`
    CUDA graphs        extensions/cuda_graphs.py          a faster `compute`
    swapped blocks     extensions/host_cache.py           copies `before_step`
    several processes  extensions/tensor_parallel.py      a runner around this one

Always holds: the runner keeps nothing of a request between steps. All that a step needs is in
the plan, so a preempted request is treated exactly like a new one (invariants 10, 12, 13).

Taught in notebooks/07_the_engine.ipynb. Source: vLLM's GPUModelRunner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from nanobatch.attention import PagedAttend, choose_backend
from nanobatch.batch import PADDING_SLOT, Batch, Row, pack, row_of
from nanobatch.config import EngineConfig
from nanobatch.kernels.kv_cache import choose_layout
from nanobatch.models.config import settle_max_model_len
from nanobatch.models.decoder import Decoder
from nanobatch.plan import ScheduledRequest, SchedulerOutput, StepResult
from nanobatch.request import SamplingParams
from nanobatch.sampler import Sampled, SamplingRow, sample
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.cache_size import blocks_on_cpu
from nanobatch.utils.clock import WallClock
from nanobatch.utils.device import blocks_beside, check_dtype


class ModelRunner:
    """Runs plans on a decoder, with a paged KV cache, on the device of its weights.

    Args:
        model: with its weights. On a CPU those in bfloat16 may be rearranged, permanently.
        config: fields that are None get a value here; see `.config`.
        served: settings that an extension handles, so that they are not refused.

    Attributes:
        compute: rows to logits; an extension may put a faster function here.
        before_step: called with each plan before it is computed.

    Raises:
        ValueError: a setting's extension is missing, max_model_len exceeds the model's, or the
            attention backend, the cache's number format or enough memory is not available.
    """

    def __init__(self, model: Decoder, config: EngineConfig, served: Collection[str] = ()):
        config.check_plain(served)
        if config.tensor_parallel_size != model.num_ranks:
            raise ValueError(
                f"tensor_parallel_size is {config.tensor_parallel_size}; the model was loaded "
                f"for {model.num_ranks}"
            )
        self.model, self.clock = model, WallClock()
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.config.eos_token_ids
        weight = model.embed.weight
        self.device, self.dtype, self.on_cuda = weight.device, weight.dtype, weight.is_cuda
        check_dtype(self.dtype, self.device)
        shapes = [decoder.config for decoder in self.decoders()]
        self.layout = choose_layout(config, self.dtype, self.device, shapes)
        name, block_size = config.attention_backend, config.block_size
        ops = choose_backend(name, self.device, block_size, self.dtype)
        self.backend = self.layout.kind.backend_for(ops)
        for decoder in self.decoders():
            decoder.set_ops(self.backend)
        # torch's paged attention reads lengths on the CPU, which a captured step cannot.
        self.can_capture = config.cuda_graphs and self.on_cuda and self.backend.name == "triton"
        self.config = settle_max_model_len(config, model.config)
        self.caches = self.layout.allocate("num_blocks", config.num_blocks or 1, self.device)
        if config.num_blocks is None:
            num_blocks = self.count_blocks()
            self.config = dataclasses.replace(self.config, num_blocks=num_blocks)
            self.caches = self.layout.allocate("num_blocks", num_blocks, self.device)
        self.compute: Callable[[Sequence[Row]], Tensor] = self.compute_eagerly
        self.before_step: list[Callable[[SchedulerOutput], None]] = []

    def decoders(self) -> list[Decoder]:
        """The models that have a KV cache here."""
        return [self.model]

    # ------------------------------------------------------------------------------ each step

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute a plan: cache keys and values, sample where a last token was computed."""
        for prepare in self.before_step:
            prepare(plan)
        return self.step(plan.scheduled)

    def step(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        """run(), after the calls in before_step."""
        logits_SV = self.compute([row_of(s) for s in scheduled])
        sampling = [s.request for s in scheduled if s.samples]
        result = StepResult({}, {}, {})
        if sampling:
            sampled = sample(logits_SV, [SamplingRow.of(r) for r in sampling], self.backend)
            for request, token in zip(sampling, sampled, strict=True):
                add_tokens(result, request.request_id, [token])
        return result

    def compute_eagerly(self, rows: Sequence[Row]) -> Tensor:
        """The logits that the rows ask for, float32 [S, V]. Keys and values are cached."""
        return self.forward(pack(rows, self.config.block_size, self.device))

    def forward(self, batch: Batch) -> Tensor:
        """The logits of a batch that is packed already, on the device."""
        attend = PagedAttend(batch, self.caches, self.backend)
        hidden_TE = self.model(batch.token_ids_T, batch.positions_T, attend)
        return self.model.logits(hidden_TE[batch.logits_indices_S])

    # ------------------------------------------------------------------------------- its memory

    def count_blocks(self) -> int:
        """Blocks that memory has room for. A GPU's is measured with a step of the largest size,
        which zeroes block 0: call this while the cache is empty."""
        config, size = self.config, self.layout.bytes_per_block
        if not self.on_cuda:
            longest, block_size = config.max_model_len, config.block_size
            return blocks_on_cpu(config.max_num_seqs, longest, block_size, size)
        return blocks_beside(
            self._largest_step, self.device, size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            has_graphs=self.can_capture,
        )  # fmt: skip

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """Fill the token budget and all rows, and sample each; write no keys or values. All
        block tables name block 0, which is zeroed."""
        config, num_rows = self.config, self.config.max_num_seqs
        each, left_over = divmod(config.max_num_batched_tokens, num_rows)
        lens = [min(each + (i < left_over), config.max_model_len) for i in range(num_rows)]
        rows = [Row([0] * n, 0, [0] * cdiv(n, config.block_size)) for n in lens]
        batch = pack(rows, config.block_size, self.device)
        batch.slot_mapping_T.fill_(PADDING_SLOT)
        for part in (part for cache in self.caches for part in cache.raw_parts()):
            part[0].zero_()
        params = SamplingParams(temperature=1.0, top_p=0.9)  # the most expensive kind
        rows = [SamplingRow(params, (), (), (), seed=i) for i in range(num_rows)]
        sample(self.forward(batch), rows, self.backend)


def add_tokens(result: StepResult, request_id: str, sampled: Sequence[Sampled]) -> None:
    """Put a request's samples into the result: its tokens, or its error."""
    if sampled[0].error is not None:
        result.errors[request_id] = sampled[0].error
        return
    result.token_ids[request_id] = [token.token_id for token in sampled]
    if sampled[0].logprobs is not None:
        result.logprobs[request_id] = [token.logprobs for token in sampled]
