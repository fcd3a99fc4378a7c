"""Control plane meets data plane: a plan becomes a Batch, logits become tokens.

    plan --pack--> Batch --Decoder--> hidden states --tokens that sample--> logits --> tokens

The runner owns the KV cache and settles what the configuration left open: the length limit and
the number of blocks. Everything else that runs a model is an extension, put around the runner
by llm.build_runner:

    drafts             extensions/speculative_runner.py   a subclass: another `step`
    the host ahead     extensions/async_scheduling.py     calls `launch`, and waits later
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
from nanobatch.batch import Batch, Row, fill_in, pack, row_of
from nanobatch.config import EngineConfig
from nanobatch.kernels.kv_cache import choose_layout
from nanobatch.kernels.warm_up import blocks_beside, run_all
from nanobatch.models.config import settle_max_model_len
from nanobatch.models.decoder import Decoder
from nanobatch.plan import Launched, ScheduledRequest, SchedulerOutput, StepResult
from nanobatch.sampler import begin_sample
from nanobatch.sampling_row import SamplingRow
from nanobatch.utils.cache_size import blocks_on_cpu
from nanobatch.utils.clock import WallClock
from nanobatch.utils.device import check_dtype, measure_step
from nanobatch.utils.transfer import HostCopy


class ModelRunner:
    """Runs plans on a decoder, with a paged KV cache, on the device of its weights.

    Args:
        model: with its weights. On a CPU those in bfloat16 may be rearranged, permanently.
        config: fields that are None get a value here; see `.config`.
        served: settings that an extension handles, so that they are not refused.
        reserve: tells the bytes of GPU memory that extensions will take.

    Attributes:
        compute: rows to logits, as compute_eagerly; an extension may put a faster one here.
        can_overlap: whether launch() returns before the device is done.
        before_step: called with each plan before it is computed.

    Raises:
        ValueError: a setting's extension is missing, max_model_len exceeds the model's, or the
            attention backend, a number format or enough memory is not available.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        served: Collection[str] = (),
        reserve: Callable[[ModelRunner], int] = lambda runner: 0,
    ):
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
        # torch's paged attention reads lengths on the CPU: it waits, and cannot be captured.
        is_async = self.on_cuda and self.backend.name == "triton"
        self.can_capture = config.cuda_graphs and is_async
        self.can_overlap = config.async_scheduling and is_async
        self.config = settle_max_model_len(config, model.config)
        self.compute: Callable[[Sequence[Row], Tensor | None], Tensor] = self.compute_eagerly
        self.before_step: list[Callable[[SchedulerOutput], None]] = []
        self._reserve = reserve
        self.caches = self.layout.allocate("num_blocks", config.num_blocks or 1, self.device)
        if config.num_blocks is None:
            num_blocks = self.count_blocks()
            self.config = dataclasses.replace(self.config, num_blocks=num_blocks)
            self.caches = self.layout.allocate("num_blocks", num_blocks, self.device)
        elif self.on_cuda:
            self.warm_up()

    def decoders(self) -> list[Decoder]:
        """The models that have a KV cache here."""
        return [self.model]

    # ------------------------------------------------------------------------------ each step

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute a plan: cache keys and values, sample where a last token was computed."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput, previous: Launched | None = None) -> Launched:
        """Give the device a plan. On a GPU this waits for nothing but blocks swapped out.
        previous: the step before, whose tokens the placeholders in the plan stand for."""
        for prepare in self.before_step:
            prepare(plan)
        return self.step(plan.scheduled, None if previous is None else previous.tokens_S)

    def step(
        self, entries: Sequence[ScheduledRequest], previous_S: Tensor | None = None
    ) -> Launched:
        """launch(), after the calls in before_step."""
        logits_SV = self.compute([row_of(s) for s in entries], previous_S)
        sampling = [s.request for s in entries if s.samples]
        if not sampling:
            end = HostCopy(logits_SV.new_empty(0))
            return Launched(lambda: StepResult.of([], end.tolist()))
        draws = begin_sample(logits_SV, [SamplingRow.of(r) for r in sampling], self.backend)
        return Launched(lambda: StepResult.of(sampling, zip(draws.read())), draws.tokens_S)

    def compute_eagerly(self, rows: Sequence[Row], previous_S: Tensor | None = None) -> Tensor:
        """The logits that the rows ask for, float32 [S, V]. Keys and values are cached.
        previous_S: on the device, tokens in place of placeholders (batch.fill_in)."""
        batch = pack(rows, self.config.block_size, self.device)
        if previous_S is not None:
            fill_in(batch.token_ids_T, previous_S)
        return self.forward(batch)

    def forward(self, batch: Batch) -> Tensor:
        """The logits of a batch that is packed already, on the device."""
        attend = PagedAttend(batch, self.caches, self.backend)
        hidden_TE = self.model(batch.token_ids_T, batch.positions_T, attend)
        return self.model.logits(hidden_TE[batch.logits_indices_S])

    # ------------------------------------------------------------------------------- its memory

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run on a GPU all that this engine will launch (kernels/warm_up.py). This writes to
        block 0: call it while the cache is empty."""
        layers = [layer for decoder in self.decoders() for layer in decoder.layers]
        run_all(self.backend, layers, self.caches, self.config, self.dtype, self.step)

    def count_blocks(self) -> int:
        """Blocks that memory has room for; a GPU's is measured in a warm_up()."""
        config, size = self.config, self.layout.bytes_per_block
        if not self.on_cuda:
            longest, block_size = config.max_model_len, config.block_size
            return blocks_on_cpu(config.max_num_seqs, longest, block_size, size)
        memory = measure_step(self.warm_up, self.device)
        return blocks_beside(memory, self._reserve(self), size, config)
