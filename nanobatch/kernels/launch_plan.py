"""What a batch's attention launches: sizes, work lists and memory, once for all layers.

    decodes, drafts       few query tokens: 16 or 32 rows a program       one launch
    prompts, chunks       as many rows as fit a program                   another

Each of these is a Launch, with a work list of its own (work_list.py). A program of 128 rows for
one decoded token would be mostly idle, and one of 16 rows would read a prompt's keys 8 times as
often.

Always holds: what comes from the host is copied without waiting for the device. A captured step
copies nothing: its plan follows from the batch's shape, and the planner keeps its list, which
each replay reads.

Taught in notebooks/06_the_triton_kernel.ipynb.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanobatch.batch import Batch
from nanobatch.kernels.launch_config import Chip, LaunchConfig
from nanobatch.kernels.work_list import Work, balanced_work, equal_work
from nanobatch.utils.transfer import staged

SHORT_ROWS = 32  # sequences whose query tokens fill no more rows are launched by themselves


class Launch(NamedTuple):
    """One launch of the kernel: the work of its programs, and memory for partial results."""

    config: LaunchConfig
    work: Tensor  # int32 [items, 4]
    num_parts: int  # items that are split, the first of the list
    parts: list[Tensor]  # acc, max, sum


class LaunchPlanner:
    """Plans launches.

    Args:
        choose: choose_launch_config, or another that takes and gives the same.
    """

    def __init__(self, choose: Callable[..., LaunchConfig]):
        self._choose = choose
        self._decodes: dict[tuple, Tensor] = {}

    def plan(
        self,
        batch: Batch,
        H: int,
        K: int,
        D: int,
        itemsize: int,
        chip: Chip,
        window: int | None = None,
        launch: LaunchConfig | None = None,
    ) -> list[Launch]:
        """What to launch for a batch: sequences with few query tokens, then the others.

        Args:
            H, K, D, itemsize, chip: see choose_launch_config.
            window: keys that a query sees, its own included; None: all up to it.
            launch: in place of what would be chosen, for all sequences.
        """
        sizes, device = (H, K, D, itemsize, chip), batch.seq_lens_S.device
        is_captured = not batch.has_lens and batch.max_query_len == 1
        if launch is not None:
            work = equal_work(launch, batch.lens[0])
            return [_launch_of(launch, _on(device, work), work.num_parts, K, D)]
        if is_captured:  # its shape is all that the host knows
            S = len(batch.seq_lens_S)
            config = self._choose(S, S, 1, *sizes)
            items = self._equal_decodes(S, config.num_splits, device)
            return [_launch_of(config, items, len(items) * (config.num_splits > 1), K, D)]
        query_lens_S, seq_lens_S = batch.lens
        is_short_S = query_lens_S * (H // K) <= max(SHORT_ROWS, H // K)
        launches = []
        for seqs in (is_short_S.nonzero()[0], (~is_short_S).nonzero()[0]):
            if len(seqs) > 0:
                lens = query_lens_S[seqs], seq_lens_S[seqs]
                shape = int(lens[0].sum()), len(seqs), int(lens[0].max())
                config = self._choose(*shape, *sizes)
                work = balanced_work(config, *lens, K, chip, window).of(seqs)
                launches.append(_launch_of(config, _on(device, work), work.num_parts, K, D))
        return launches

    def _equal_decodes(self, num_seqs: int, num_splits: int, device: torch.device) -> Tensor:
        """The items of equal_work for so many decodes, made on the device."""
        key = (num_seqs, num_splits, device)
        if key not in self._decodes:
            item_W = torch.arange(num_seqs * num_splits, dtype=torch.int32, device=device)
            seq_W, split_W = item_W // num_splits, item_W % num_splits
            columns = [seq_W, torch.zeros_like(seq_W), split_W]
            columns.append(torch.full_like(seq_W, num_splits))
            self._decodes[key] = torch.stack(columns, dim=1)
        return self._decodes[key]


def _on(device: torch.device, work: Work) -> Tensor:
    """The work list on the device, without waiting for it."""
    return staged(torch.from_numpy(work.items_W4), device).to(device, non_blocking=True)


def _launch_of(
    config: LaunchConfig, items_W4: Tensor, num_parts: int, K: int, D: int
) -> Launch:
    """With memory for the partial results of the items that are split."""
    rows = (num_parts, K, config.block_m)
    shapes, device = ((*rows, D), rows, rows), items_W4.device
    parts = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    return Launch(config, items_W4, num_parts, parts)
