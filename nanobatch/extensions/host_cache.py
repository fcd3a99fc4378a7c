"""Blocks in host memory: the copies that preemption by swap asks for.

The plan names blocks, as pairs of ids (extensions/swap.py decides which); here they are copied,
all layers of each, before the step computes:

    swap_out    [(device block, host block), ...]    first
    swap_in     [(host block, device block), ...]    second, maybe into blocks just freed

Taught in notebooks/07_the_engine.ipynb. Source: vLLM (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nanobatch.kernels.kv_cache import KVCache
from nanobatch.model_runner import ModelRunner
from nanobatch.plan import SchedulerOutput
from nanobatch.utils.cache_size import blocks_to_swap_to


class HostCache:
    """A runner's second KV cache, of num_blocks blocks in host memory.

    Raises:
        ValueError: it does not fit into memory.
    """

    def __init__(self, runner: ModelRunner, num_blocks: int):
        self.caches = runner.caches
        self.host_caches = runner.layout.allocate(
            "num_host_blocks", num_blocks, torch.device("cpu")
        )

    @classmethod
    def add_to(cls, runner: ModelRunner) -> None:
        """Let a runner copy blocks before each step; its config gets num_host_blocks."""
        config, num_blocks = runner.config, runner.config.num_host_blocks
        if num_blocks is None:
            num_blocks = blocks_to_swap_to(config.num_blocks, runner.layout.bytes_per_block)
        runner.before_step.append(cls(runner, num_blocks).copy_blocks)
        runner.config = dataclasses.replace(config, num_host_blocks=num_blocks)

    def copy_blocks(self, plan: SchedulerOutput) -> None:
        """Make the copies that a plan asks for."""
        _copy(plan.swap_out, self.caches, self.host_caches)
        _copy(plan.swap_in, self.host_caches, self.caches)


def _copy(
    pairs: Sequence[tuple[int, int]], source: Sequence[KVCache], target: Sequence[KVCache]
) -> None:
    if pairs:
        from_ids, to_ids = torch.tensor(pairs).unbind(dim=1)
        for source_layer, target_layer in zip(source, target, strict=True):
            source_layer.copy_blocks(from_ids, target_layer, to_ids)
