"""A layer's KV cache: the keys and values of all requests, in blocks.

    keys, values    [N, K, P, D]    N blocks, K heads, P slots in a block, D numbers in a slot

    block 0   head 0 [ slot 0 | slot 1 | ... ]   head 1 [ slot 0 | ... ]
    block 1   head 0 [ ...

One head's slots of a block lie next to each other, so (block, head) pairs can be gathered as
whole runs, with no transpose. Memory that no block uses is never touched: it is not zeroed.

Always holds (invariant 14): a token with slot -1 is written nowhere.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nanobatch.config import EngineConfig
from nanobatch.utils.cache_size import GIB, check_cache_size, row_bytes
from nanobatch.utils.device import refuse_as
from nanobatch.utils.extensions import load_extension

Backend = TypeVar("Backend")


@dataclass
class KVCache:
    """One layer's keys and values, in the number format of the model.

    keys, values: [N, K, P, D].
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """An empty cache of shape [N, K, P, D]."""
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))

    @staticmethod
    def backend_for(backend: Backend) -> Backend:
        """The backend that reads and writes such a cache, from the one that was chosen."""
        return backend

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of its tensors; the first dimension of each is N."""
        return self.keys, self.values

    def raw_parts(self) -> tuple[Tensor, ...]:
        """The same memory in number formats that torch can copy block by block."""
        return self.parts

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slot_mapping_T: Tensor) -> None:
        """Put each token's keys and values into its slot. Slot -1 writes nothing."""
        _, K, P, _ = self.keys.shape
        is_real_T = slot_mapping_T >= 0
        if not is_real_T.all():  # -1 // P would be the last block: an easy slip
            slot_mapping_T = slot_mapping_T[is_real_T]
            k_TKD, v_TKD = k_TKD[is_real_T], v_TKD[is_real_T]
        block_T, offset_T = slot_mapping_T // P, slot_mapping_T % P
        # Rows of D numbers: head k of block n has its P slots in a run, at (n * K + k) * P.
        row_TK = (block_T.unsqueeze(1) * K + torch.arange(K, device=block_T.device)) * P
        self.write_rows((row_TK + offset_T.unsqueeze(1)).flatten(), k_TKD, v_TKD)

    def write_rows(self, rows: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write T * K rows of D numbers; rows: int64 [T * K], where each goes."""
        put_rows(self.keys, rows, k_TKD)
        put_rows(self.values, rows, v_TKD)

    def gather(self, runs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies of some (block, head) pairs' keys and values, each [len(runs), P, D].

        Args:
            runs: int64, block * K + head of each pair.
            dtype: of the copies; here that of the cache.
        """
        P, D = self.keys.shape[2:]
        k, v = (x.view(-1, P * D).index_select(0, runs) for x in (self.keys, self.values))
        return k.view(-1, P, D), v.view(-1, P, D)

    def copy_blocks(self, block_ids: Tensor, target: KVCache, target_ids: Tensor) -> None:
        """Copy blocks to those of another cache, which may be on another device."""
        for source, to in zip(self.raw_parts(), target.raw_parts(), strict=True):
            blocks = source.index_select(0, block_ids.to(source.device)).to(to.device)
            to.index_copy_(0, target_ids.to(to.device), blocks)


def put_rows(cache_NKPD: Tensor, rows: Tensor, x_TKD: Tensor) -> None:
    """Copy T * K rows of D numbers into a cache; rows: int64 [T * K], block head slots."""
    D = cache_NKPD.shape[3]
    cache_NKPD.view(-1, D).index_copy_(0, rows, x_TKD.reshape(-1, D))


class CacheLayout(NamedTuple):
    """What the caches of all layers have in common, and their shapes.

    kind, dtype: of each layer's cache. block_size: P. layers: (K, D) of each.
    """

    kind: type[KVCache]
    dtype: torch.dtype
    block_size: int
    layers: Sequence[tuple[int, int]]

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, over all layers."""
        itemsize = self.dtype.itemsize
        return 2 * self.block_size * sum(K * row_bytes(D, itemsize) for K, D in self.layers)

    def allocate(self, name: str, num_blocks: int, device: torch.device) -> list[KVCache]:
        """An empty cache for each layer.

        Args:
            name: the setting that num_blocks comes from, for messages.

        Raises:
            ValueError: they do not fit into memory.
        """
        check_cache_size(name, num_blocks, self.block_size, self.bytes_per_block)
        size = num_blocks * self.bytes_per_block / GIB
        what = (
            f"{name} is {num_blocks}" if num_blocks > 1 else f"block_size is {self.block_size}"
        )
        with refuse_as(
            f"{what}; {size:.1f} GiB of cache do not fit into memory beside the weights: "
            "lower it"
        ):
            shapes = [(num_blocks, K, self.block_size, D) for K, D in self.layers]
            return [self.kind.allocate(shape, self.dtype, device) for shape in shapes]


def choose_layout(
    config: EngineConfig, dtype: torch.dtype, device: torch.device, models: Sequence
) -> CacheLayout:
    """The cache that EngineConfig.kv_cache_dtype names, for some models' layers.

    Args:
        dtype: of the models. models: their ModelConfigs.
    """
    kind, dtype = choose_kind(config.kv_cache_dtype, dtype, device)
    layers = [(m.num_kv_heads, m.head_dim) for m in models for _ in range(m.num_layers)]
    return CacheLayout(kind, dtype, config.block_size, layers)


def choose_kind(
    name: str, dtype: torch.dtype, device: torch.device
) -> tuple[type[KVCache], torch.dtype]:
    """The kind of cache that EngineConfig.kv_cache_dtype names, and its number format.

    Args:
        dtype: of the models, which "auto" stands for.

    Raises:
        ValueError: the device has no such format, or its extension is missing.
    """
    if name == "auto":
        return KVCache, dtype
    quantized = load_extension("quantized_cache", f"kv_cache_dtype is {name!r}")
    return quantized.QuantizedCache, quantized.resolve_cache_dtype(name, device)
