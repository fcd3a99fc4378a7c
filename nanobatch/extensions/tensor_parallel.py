"""One model on several processes: each rank keeps a part of every layer.

    hidden states [T, E], the same on all ranks
      |  q, k, v     rank r keeps heads r * H / N on     no exchange: attention is by heads
      |  attention   over its own KV heads' cache
      |  o           its columns: a part of every sum    --> all-reduce
      |  gate, up    rank r keeps F / N of F rows        no exchange
      |  down        its columns                         --> all-reduce
    lm_head          V / N rows of the vocabulary        --> all-gather
    embedding        the same rows; 0 for other tokens   --> all-reduce

The ranks are processes that torchrun starts, a GPU or some cores for each. All run the whole
engine, and call it alike: nobody is told what to do, the same plan is made everywhere.

Always holds: all ranks make the same plans. A plan follows from calls, tokens and times alone
(the control plane is deterministic). Token ids are those that rank 0 sampled, and times those
of its clock, so that no rounding, no other CPU and no other clock can set ranks apart. (The
logits are the same bits anyway, since one rank computes each and the others copy it; but what
a GPU's cumulative sums make of them may differ in the last bit from one call to the next.)

A rank that dies closes its connections: on a CPU the others' next exchange raises. On GPUs
NCCL waits for it until TIMEOUT, or until torchrun, which notices, ends the others.

Source: Megatron-LM (Shoeybi et al., 2019), section 3; the same plan on every rank as in
vLLM's external launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nanobatch.models.config import ModelConfig
from nanobatch.utils.arithmetic import cdiv

TIMEOUT = timedelta(minutes=5)  # for a rank that hangs, or that takes longer to load


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model: how many, and which this one is. Ranks() is alone.

    What takes a tensor changes nothing for one rank; for several, all must call it alike.
    """

    rank: int = 0
    size: int = 1

    # --------------------------------------------------------------- what this rank has of it

    def part_of(self, config: ModelConfig) -> ModelConfig:
        """The shape of this rank's part. Its vocabulary is padded to one size on all ranks.

        Raises:
            ValueError: heads, KV heads or the MLP cannot be shared evenly, or a norm is over
                all heads together.
        """
        if self.size > 1 and config.qk_norm == "all_heads":
            raise ValueError(
                f"tensor_parallel_size is {self.size}; with norms over all heads, as "
                f"{config.architecture} has them, it must be 1"
            )
        parts = {"vocab_size": cdiv(config.vocab_size, self.size)}
        names = ["num_heads", "num_kv_heads", "intermediate_size"]
        for name in names + ["moe_intermediate_size"] * (config.num_experts > 0):
            parts[name], left_over = divmod(getattr(config, name), self.size)
            if left_over:
                raise ValueError(
                    f"tensor_parallel_size is {self.size}; it must divide the model's {name}, "
                    f"which is {getattr(config, name)}"
                )
        return dataclasses.replace(config, **parts)

    def cut(self, name: str, whole: Tensor, config: ModelConfig) -> Tensor:
        """This rank's part of one of our tensors, in memory of its own: the whole is let go.

        Args:
            name: "layers.0.qkv.weight" for one. whole: as a single process would have it.
            config: the shape of the whole model.

        Raises:
            ValueError: nothing here says how such a tensor is shared.
        """
        layer, kind = name.split(".")[-2:]
        if self.size == 1 or layer.endswith("norm") or layer == "router":
            return whole
        if layer in ("embed", "lm_head"):
            each = cdiv(config.vocab_size, self.size)
            rows = whole[self.rank * each : (self.rank + 1) * each]
            return F.pad(rows, (0, 0, 0, each - len(rows)))
        if layer == "qkv":
            sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
            return self._rows(whole, [size * config.head_dim for size in sizes])
        if layer == "gate_up":
            num_products = len(whole) // config.intermediate_size
            return self._rows(whole, [config.intermediate_size] * num_products)
        if kind == "gate_up_XFE":
            halves = whole.chunk(2, dim=1)
            return torch.cat([x.chunk(self.size, dim=1)[self.rank] for x in halves], dim=1)
        if kind == "down_XEF":
            return whole.chunk(self.size, dim=2)[self.rank].contiguous()
        if layer in ("o", "down") and kind == "weight":
            return whole.chunk(self.size, dim=1)[self.rank].contiguous()
        if layer in ("o", "down"):  # the sum of all ranks has it once
            return whole if self.rank == 0 else torch.zeros_like(whole)
        raise ValueError(
            f"tensor_parallel_size is {self.size}; {name} cannot be shared: it must be 1"
        )

    def _rows(self, whole: Tensor, sizes: list[int]) -> Tensor:
        """The share of each of several matrices, which lie one after another."""
        return torch.cat([x.chunk(self.size)[self.rank] for x in whole.split(sizes)])

    # ----------------------------------------------------------------- exchanges of each step

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def embed(self, token_ids_T: Tensor, weight_XE: Tensor) -> Tensor:
        """Embeddings [T, E], each from the rank that has the row."""
        if self.size == 1:
            return F.embedding(token_ids_T, weight_XE)
        num_rows = len(weight_XE)
        row_T = token_ids_T - self.rank * num_rows
        is_elsewhere_T = (row_T < 0) | (row_T >= num_rows)
        x_TE = F.embedding(row_T.clamp(0, num_rows - 1), weight_XE)
        return self.sum(x_TE.masked_fill_(is_elsewhere_T.unsqueeze(1), 0))

    def join_columns(self, x_SX: Tensor, num_columns: int) -> Tensor:
        """[S, num_columns]: all ranks' columns side by side, without the last one's padding."""
        if self.size == 1:
            return x_SX
        parts = x_SX.new_empty(self.size, *x_SX.shape)
        if x_SX.numel() > 0:
            dist.all_gather(list(parts), x_SX.contiguous())
        return parts.transpose(0, 1).flatten(1)[:, :num_columns]

    # ----------------------------------------------------------------------------- agreements

    def first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on all ranks; each gives as many. Whole ones to 2**53 are exact."""
        if self.size == 1 or not dist.is_initialized():  # after a failure: together()
            return list(values)
        values_X = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(values_X, src=0)
        return values_X.tolist()

    def all_of(self, number: int) -> list[int]:
        """Each rank's number, in the order of ranks."""
        if self.size == 1:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(n) for n in numbers]

    def check_same(self, **values: object) -> None:
        """Raise ValueError, on all ranks, unless all were given equal values."""
        for name, value in values.items():
            digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
            digests = self.all_of(int.from_bytes(digest, "big"))
            if len(set(digests)) > 1:
                raise ValueError(
                    f"{name} is {value!r} on rank {self.rank}; it must be the same on all "
                    f"{self.size} ranks"
                )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done in here can fail on one rank alone. That rank then leaves the others,
        whose next exchange raises: there is no way back, but nobody waits in vain."""
        if self.size > 1 and not dist.is_initialized():
            raise RuntimeError("a rank has failed; the others cannot go on without it")
        try:
            yield
        except BaseException:
            if self.size > 1 and dist.is_initialized():
                # destroy_process_group would wait for what NCCL has begun.
                dist.distributed_c10d._abort_process_group()
            raise


class SharedClock:
    """Rank 0's clock, for all ranks: each look at it is a look of all.

    Args:
        ranks: who they are. clock: each rank's own.
    """

    def __init__(self, ranks: Ranks, clock):
        self._ranks, self._clock = ranks, clock

    def now(self) -> float:
        """Seconds."""
        [now] = self._ranks.first([self._clock.now()])
        return now

    def sleep_until(self, t: float) -> None:
        """Sleep on each rank until rank 0's clock says t."""
        # A relative time: the ranks' own clocks start anywhere.
        self._clock.sleep_until(self._clock.now() + t - self.now())


def join(size: int, device: str) -> Ranks:
    """Meet the other processes that torchrun started; on GPUs each takes one of its own.

    Args:
        size: EngineConfig.tensor_parallel_size. device: EngineConfig.device.

    Raises:
        ValueError: torchrun started none, or another number than size, or more than there
            are GPUs on this machine.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if size != world_size:
        raise ValueError(
            f"tensor_parallel_size is {size}, and there are {world_size} processes; start as "
            f"many: torchrun --nproc-per-node {size} SCRIPT.py"
        )
    if size == 1:
        return Ranks()
    on_cuda = device != "cpu" and torch.cuda.is_available()
    if on_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK is {local_rank}; this machine has {torch.cuda.device_count()} "
                "GPUs, one for each process: lower --nproc-per-node"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        # gloo for what is said on the CPU, and all of it where there is no GPU.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Ranks(dist.get_rank(), size)
