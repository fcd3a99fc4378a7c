"""The processes that share one model, and what they tell each other.

torchrun starts them, with a GPU or some cores for each. Every rank runs the whole engine: the
program calls all of them alike, and all make the same plans. No rank directs the others.

A rank that dies closes its connections: on a CPU the others' next exchange raises. On GPUs
NCCL waits for it until TIMEOUT, or until torchrun notices and ends the others.

Source: the same plan on every rank, as in vLLM's external launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=5)  # for a rank that hangs, or that takes longer to load
CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model: how many, and which one this is.

    The methods are exchanges: all ranks must call them, in the same order.
    """

    rank: int = 0
    size: int = 1

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of all ranks' tensors, in place."""
        dist.all_reduce(x)
        return x

    def gather_columns(self, x_SX: Tensor) -> Tensor:
        """All-gather: [S, size * X], all ranks' columns side by side."""
        parts = x_SX.new_empty(self.size, *x_SX.shape)
        if x_SX.numel() > 0:
            dist.all_gather(list(parts), x_SX.contiguous())
        return parts.transpose(0, 1).flatten(1)

    def first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on all ranks; each gives as many."""
        if not dist.is_initialized():  # after a failure: together()
            return list(values)
        values_X = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(values_X, src=0)
        return values_X.tolist()

    def first_object(self, value: T) -> T:
        """Rank 0's object, on all ranks, by pickle."""
        values = [value]
        dist.broadcast_object_list(values, src=0, device=CPU)
        return values[0]

    def all_of(self, number: int) -> list[int]:
        """Each rank's number, in the order of ranks."""
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
        """For work that can fail on one rank alone. That rank then leaves the group, and the
        others' next exchange raises. The group cannot go on, but no rank waits for ever."""
        if not dist.is_initialized():
            raise RuntimeError("a rank has failed; the others cannot go on without it")
        try:
            yield
        except BaseException:
            if dist.is_initialized():
                # destroy_process_group would wait for what NCCL has begun.
                dist.distributed_c10d._abort_process_group()
            raise


class SharedClock:
    """Rank 0's clock, for all ranks. Reading it is an exchange.

    Args:
        ranks: the processes. clock: each rank's own.
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
    """Join the other processes that torchrun started; on GPUs each takes one GPU.

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
        # gloo for what is exchanged on the CPU, and for everything where there is no GPU.
        backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Ranks(dist.get_rank(), size)
