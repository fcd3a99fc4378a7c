"""Decode steps as CUDA graphs: recorded once for each batch size, replayed with one launch.

A decode step is hundreds of kernels of a few microseconds each; launching them one by one
from Python takes longer than running them. A CUDA graph is launched as one. It always reads
and writes the same addresses, so a batch is first copied into persistent buffers and padded
to the next size that has a graph:

    sizes                1  2  4  8  16  24 ... max_num_seqs
    a batch of 5 rows    r0 r1 r2 r3 r4  .  .  .               the graph of 8
    slots                 9 40 17  2 33 -1 -1 -1               -1 writes nothing
    seq_lens              6  9  2  3 18  0  0  0               no keys to read

A graph fixes only the batch's shape. The launch configuration of attention depends on nothing
else (choose_launch_config); lengths, slots and block tables are data in the buffers. What is
computed once a batch (Batch.once) is recorded too: replay computes it from the new data. A step
with any prefill in it, or with drafts to check, runs eagerly.

Always holds (invariants 12 and 14): replay gives what the same step gives eagerly; padding
rows neither read nor write the cache; what a graph reads lives as long as it does, as a buffer
here or in the graphs' own pool of memory.

Taught in notebooks/06_the_triton_kernel.ipynb. Source: vLLM's and nano-vllm's model runners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nanobatch.batch import PADDING_SLOT, Batch, Row, fill_in, pack
from nanobatch.model_runner import ModelRunner
from nanobatch.utils.arithmetic import cdiv
from nanobatch.utils.device import measure_step
from nanobatch.utils.transfer import staged, to_device

Step = Callable[[], None]
MIB = 2**20
# What CUDA itself takes for a recorded step of hundreds of kernels: not yet measured.
# vLLM takes 1 MiB at least.
GRAPH_BYTES = 8 * MIB
# What cuBLAS takes for the stream that records: as torch has it on a Hopper, else 8 MiB.
WORKSPACE_BYTES = 32 * MIB


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that get a graph, ascending: 1, 2, 4, multiples of 8, and the largest."""
    sizes = {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def pad_decodes(batch: Batch, num_rows: int) -> Batch:
    """A batch of decodes (one token a row) with rows added that read and write nothing."""
    assert batch.max_query_len == 1, f"a row computes {batch.max_query_len} tokens, not 1"
    num_pads = num_rows - len(batch.seq_lens_S)
    assert num_pads >= 0, f"{len(batch.seq_lens_S)} rows do not fit into {num_rows}"
    device = batch.seq_lens_S.device
    return Batch(
        token_ids_T=F.pad(batch.token_ids_T, (0, num_pads)),
        positions_T=F.pad(batch.positions_T, (0, num_pads)),
        slot_mapping_T=F.pad(batch.slot_mapping_T, (0, num_pads), value=PADDING_SLOT),
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        seq_lens_S=F.pad(batch.seq_lens_S, (0, num_pads)),
        block_tables_SB=F.pad(batch.block_tables_SB, (0, 0, 0, num_pads)),
        logits_indices_S=torch.arange(num_rows, device=device),
        derived={"max_query_len": 1},
    )


@torch.inference_mode()
def bytes_of_graphs(runner: ModelRunner) -> int:
    """The GPU memory that a runner's graphs will take, before they are recorded: their buffers,
    the tensors of the largest step (smaller ones find room in its memory), and CUDA's own.

    Call it when the runner has run other steps: what these leave is not counted twice.
    """

    def run_largest() -> None:
        steps: list[Step] = []
        DecodeGraphs(runner, capture=lambda step: steps.append(step) or step)
        steps[0]()

    taken = measure_step(run_largest, runner.device).taken
    num_graphs = len(graph_sizes(runner.config.max_num_seqs))
    return taken + num_graphs * GRAPH_BYTES + WORKSPACE_BYTES


class CudaCapture:
    """Records steps on a GPU. The graphs share one pool of memory: only one runs at a time."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Record what step() launches; the result launches it all again."""
        step()  # for real first: kernels get compiled and libraries take their workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay


class DecodeGraphs:
    """A runner's `compute` for which decode steps are replayed and all others run eagerly.

    Args:
        runner: on a GPU, with a backend that may be captured. Its `forward` may not wait for
            the device or copy to it, and must do the same work for any batch of a shape.
        capture: takes a step and returns what repeats it. (In tests that is the step itself,
            so that all but the recording is tested without a GPU.)
    """

    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, capture: Callable[[Step], Step] | None = None):
        def zeros(*shape: int, dtype=torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=runner.device)

        self._runner, config = runner, runner.config
        S, max_blocks = config.max_num_seqs, cdiv(config.max_model_len, config.block_size)
        self._buffers = Batch(
            token_ids_T=zeros(S),
            positions_T=zeros(S),
            slot_mapping_T=zeros(S) + PADDING_SLOT,
            query_start_loc=torch.arange(S + 1, dtype=torch.int32, device=runner.device),
            seq_lens_S=zeros(S, dtype=torch.int32),
            block_tables_SB=zeros(S, max_blocks, dtype=torch.int32),
            logits_indices_S=torch.arange(S, device=runner.device),
        )
        self._logits_SV = zeros(S, runner.vocab_size, dtype=torch.float32)
        capture = CudaCapture() if capture is None else capture
        self._replay: dict[int, Step] = {}
        # The largest first: the smaller ones then find room in its memory.
        for size in reversed(graph_sizes(S)):
            self._replay[size] = capture(self._step(size))
        self.sizes = sorted(self._replay)

    @classmethod
    def add_to(cls, runner: ModelRunner) -> None:
        """Let a runner replay its decode steps."""
        runner.compute = cls(runner)

    def __call__(self, rows: Sequence[Row], previous_S: Tensor | None = None) -> Tensor:
        """The logits that the rows ask for, float32 [L, V], as runner.compute_eagerly."""
        if any(len(row.token_ids) > 1 for row in rows):
            return self._runner.compute_eagerly(rows, previous_S)
        logits_SV = self.replay(pack(rows, self._runner.config.block_size), previous_S)
        sampling = [i for i, row in enumerate(rows) if row.num_logits > 0]
        if len(sampling) == len(rows):
            return logits_SV
        return logits_SV[to_device(sampling, torch.int64, logits_SV.device)]

    def _step(self, size: int) -> Step:
        """One step on the first `size` rows of the buffers."""

        def step() -> None:
            self._logits_SV[:size].copy_(self._runner.forward(self._first_rows(size)))

        return step

    def _first_rows(self, size: int) -> Batch:
        """A part of the buffers; a new Batch each time, so that what is derived from it (once)
        is recorded with the step."""
        whole = self._buffers
        return Batch(
            token_ids_T=whole.token_ids_T[:size],
            positions_T=whole.positions_T[:size],
            slot_mapping_T=whole.slot_mapping_T[:size],
            query_start_loc=whole.query_start_loc[: size + 1],
            seq_lens_S=whole.seq_lens_S[:size],
            block_tables_SB=whole.block_tables_SB[:size],
            logits_indices_S=whole.logits_indices_S[:size],
            derived={"max_query_len": 1},
        )

    def replay(self, batch: Batch, previous_S: Tensor | None = None) -> Tensor:
        """Logits of a batch of decodes, float32 [S, V], valid until the next replay.

        Args:
            batch: on the CPU, at most max_num_seqs rows of one token.
            previous_S: on the device, tokens in place of placeholders (batch.fill_in).
        """
        num_rows = len(batch.seq_lens_S)
        size = next(size for size in self.sizes if size >= num_rows)
        padded, buffers = pad_decodes(batch, size), self._buffers
        device = self._runner.device
        for name in ("token_ids_T", "positions_T", "slot_mapping_T", "seq_lens_S"):
            part = staged(getattr(padded, name), device)
            getattr(buffers, name)[:size].copy_(part, non_blocking=True)
        table_SB = staged(padded.block_tables_SB, device)
        # Columns beyond keep old ids: valid ones, which no sequence reaches.
        buffers.block_tables_SB[:size, : table_SB.shape[1]].copy_(table_SB, non_blocking=True)
        if previous_S is not None:
            fill_in(buffers.token_ids_T[:size], previous_S)
        self._replay[size]()
        return self._logits_SV[:num_rows]
