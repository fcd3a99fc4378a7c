"""One model on several processes: each rank keeps a shard of every layer.

    hidden states [T, E], the same on all ranks
      |  q, k, v     rank r keeps heads r * H / N on     no exchange: attention is by heads
      |  attention   over its own KV heads' cache
      |  o           its columns: a part of every sum    --> all-reduce
      |  gate, up    rank r keeps F / N of F rows        no exchange
      |  down        its columns                         --> all-reduce
    lm_head          V / N rows of the vocabulary        --> all-gather
    embedding        the same rows; 0 for other tokens   --> all-reduce

A shard is a smaller Decoder. Shard cuts each tensor as the loader reads it, and then puts the
exchanges into the finished model; the decoder knows nothing of them.

Always holds: all ranks make the same plans. A plan follows from calls, tokens and times alone
(the control plane is deterministic), and tokens and times are rank 0's. So no rounding, no
other CPU and no other clock can set ranks apart. (The logits are the same bits anyway, since
one rank computes each and the others copy it; but a GPU's cumulative sums of them may differ in
the last bit from one call to the next.)

Source: Megatron-LM (Shoeybi et al., 2019), section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nanobatch.config import EngineConfig
from nanobatch.extensions.ranks import Ranks, SharedClock
from nanobatch.model_runner import ModelRunner
from nanobatch.models.config import ModelConfig
from nanobatch.models.decoder import Decoder
from nanobatch.plan import SchedulerOutput, StepResult
from nanobatch.utils.arithmetic import cdiv


class Shard:
    """One rank's part of a model, for models.loader.load.

    Args:
        ranks: the processes that share the model, and which one this is.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The shape of the shard. Its vocabulary is padded to one size on all ranks.

        Raises:
            ValueError: heads, KV heads or the MLP cannot be shared evenly, or a norm is over
                all heads together.
        """
        size = self.ranks.size
        if size > 1 and whole.qk_norm == "all_heads":
            raise ValueError(
                f"tensor_parallel_size is {size}; with norms over all heads, as "
                f"{whole.architecture} has them, it must be 1"
            )
        shape = {"vocab_size": cdiv(whole.vocab_size, size)}
        names = ["num_heads", "num_kv_heads", "intermediate_size"]
        for name in names + ["moe_intermediate_size"] * (whole.num_experts > 0):
            shape[name], left_over = divmod(getattr(whole, name), size)
            if left_over:
                raise ValueError(
                    f"tensor_parallel_size is {size}; it must divide the model's {name}, "
                    f"which is {getattr(whole, name)}"
                )
        return dataclasses.replace(whole, **shape)

    def tensor(self, name: str, whole: Tensor, config: ModelConfig) -> Tensor:
        """The shard of one of the decoder's tensors, as a copy.

        Args:
            name: in the decoder, "layers.0.qkv.weight" for one. whole: of one process.
            config: the shape of the whole model.

        Raises:
            ValueError: nothing here says how such a tensor is shared.
        """
        rank, size = self.ranks.rank, self.ranks.size
        layer, kind = name.split(".")[-2:]
        if size == 1 or layer.endswith("norm") or layer == "router":
            return whole
        if layer in ("embed", "lm_head"):
            each = cdiv(config.vocab_size, size)
            rows = whole[rank * each : (rank + 1) * each]
            return F.pad(rows, (0, 0, 0, each - len(rows)))
        if layer == "qkv":
            sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
            return self._rows(whole, [heads * config.head_dim for heads in sizes])
        if layer == "gate_up":
            num_products = len(whole) // config.intermediate_size
            return self._rows(whole, [config.intermediate_size] * num_products)
        if kind == "gate_up_XFE":
            halves = whole.chunk(2, dim=1)
            return torch.cat([x.chunk(size, dim=1)[rank] for x in halves], dim=1)
        if kind == "down_XEF":
            return whole.chunk(size, dim=2)[rank].contiguous()
        if layer in ("o", "down") and kind == "weight":
            return whole.chunk(size, dim=1)[rank].contiguous()
        if layer in ("o", "down"):  # the sum over ranks has the bias once
            return whole if rank == 0 else torch.zeros_like(whole)
        raise ValueError(
            f"tensor_parallel_size is {size}; {name} cannot be shared: it must be 1"
        )

    def _rows(self, whole: Tensor, sizes: list[int]) -> Tensor:
        """The shard of each of several matrices that lie one after another."""
        ranks = self.ranks
        return torch.cat([x.chunk(ranks.size)[ranks.rank] for x in whole.split(sizes)])

    def connect(self, model: Decoder, whole: ModelConfig) -> None:
        """Put the exchanges into a decoder that has its shard's tensors."""
        model.vocab_size, model.num_ranks = whole.vocab_size, self.ranks.size
        model.embed = VocabParallelEmbedding(model.embed, self.ranks)
        model.lm_head = GatheredLogits(model.lm_head, self.ranks, whole.vocab_size)
        for layer in model.layers:
            layer.o = RowParallel(layer.o, self.ranks)
            layer.mlp = RowParallel(layer.mlp, self.ranks)


class RowParallel(nn.Module):
    """Megatron's RowParallelLinear, around any module: each rank has the weight's columns for
    its share of the inputs, so a part of every sum, and the outputs are all-reduced."""

    def __init__(self, inner: nn.Module, ranks: Ranks):
        super().__init__()
        self.inner, self.ranks = inner, ranks

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.ranks.sum(self.inner(x_TE))


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are spread over ranks: each gives 0 for the others' tokens."""

    def __init__(self, inner: nn.Embedding, ranks: Ranks):
        super().__init__()
        self.inner, self.ranks = inner, ranks

    @property
    def weight(self) -> Tensor:
        """This rank's rows, [V / N, E]."""
        return self.inner.weight

    def forward(self, token_ids_T: Tensor) -> Tensor:
        num_rows = len(self.weight)
        row_T = token_ids_T - self.ranks.rank * num_rows
        is_elsewhere_T = (row_T < 0) | (row_T >= num_rows)
        x_TE = self.inner(row_T.clamp(0, num_rows - 1))
        return self.ranks.sum(x_TE.masked_fill_(is_elsewhere_T.unsqueeze(1), 0))


class GatheredLogits(nn.Module):
    """An lm_head whose rows are spread over ranks; each rank gets all logits."""

    def __init__(self, inner: nn.Module, ranks: Ranks, vocab_size: int):
        super().__init__()
        self.inner, self.ranks, self.vocab_size = inner, ranks, vocab_size

    def forward(self, hidden_SE: Tensor) -> Tensor:
        """[S, V], without the padding of the last rank's rows."""
        return self.ranks.gather_columns(self.inner(hidden_SE))[:, : self.vocab_size]


class ParallelRunner:
    """A runner on each rank; all of them return rank 0's tokens.

    Whatever else the inner runner has, this one has too.

    Args:
        runner: of this rank's shard. ranks: the processes.
    """

    can_overlap = False  # each step begins with rank 0's tokens of the one before

    def __init__(self, runner: ModelRunner, ranks: Ranks):
        self.runner, self.ranks = runner, ranks
        self.clock = SharedClock(ranks, runner.clock)

    def run(self, plan: SchedulerOutput) -> StepResult:
        """Compute a plan on all ranks. What the others sampled is discarded."""
        with self.ranks.together():
            return self.ranks.first_object(self.runner.run(plan))

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)


def agree_on_blocks(
    make: Callable[[EngineConfig], ModelRunner], config: EngineConfig, ranks: Ranks
) -> EngineConfig:
    """The config with num_blocks set to what fits on every rank.

    Args:
        make: a rank's runner from a config.
    """
    with ranks.together():
        probe = make(dataclasses.replace(config, num_blocks=1))
        num_blocks = config.num_blocks or probe.count_blocks()
        agreed = min(ranks.all_of(num_blocks))  # waits for ranks that take longer to load
    return dataclasses.replace(config, num_blocks=agreed)
