"""Attention over a paged cache, in torch: the reference, also used where no kernel exists.

The keys of a sequence lie in blocks all over the cache; its block table says where. They are
gathered into one contiguous piece and handed to torch's scaled_dot_product_attention, several
sequences of like length together (kernels/gather.py).

    "torch"   TorchBackend                               any device
    "c"       CBackend, extensions/cpu                   a CPU with a C compiler
    "triton"  TritonBackend, paged_attention_kernel.py   CUDA

A backend is one object of a few operations: those of kernels/ops.py, and paged_attention.
`choose_backend` is called once, when the runner is built.

Always holds (invariant 14): what lies in slots past a sequence's end never reaches an
output. A masked key has the weight 0, but 0 * NaN is NaN: so the gathered tail is set to zero.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanobatch.batch import Batch
from nanobatch.config import ATTENTION_BACKENDS
from nanobatch.kernels.gather import make_groups
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import HAS_TRITON, AttentionArgs, Ops, check_triton, masked_attention
from nanobatch.utils.arithmetic import next_power_of_two
from nanobatch.utils.checks import check_choice
from nanobatch.utils.extensions import has_extension, load_extension


class TorchBackend(Ops):
    """Everything in plain torch."""

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, batch: Batch, args: AttentionArgs
    ) -> Tensor:
        """As paged_attention below, without its checks."""
        out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
        self.attend_in_groups(q_THD, cache, batch, args, out_THD)
        return out_THD

    def attend_in_groups(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: Batch,
        args: AttentionArgs,
        out_THD: Tensor,
        decodes: bool = True,
        prefills: bool = True,
    ) -> None:
        """Write attention to out_THD.

        decodes, prefills: whether to include sequences with one query, and with several.
        """
        _, K, P, _ = cache.keys.shape
        key = (K, P, args.sliding_window, decodes, prefills)
        for group in batch.once(("groups", *key), lambda: list(make_groups(batch, *key))):
            q_SHTD = q_THD[group.tokens].unflatten(0, (group.shape[0], -1)).transpose(1, 2)
            k_SKLD, v_SKLD = group.gather(cache, q_THD.dtype)
            out_SHTD = masked_attention(
                q_SHTD,
                k_SKLD,
                v_SKLD,
                group.mask,
                scale=args.scale,
                softcap=args.softcap,
                is_causal=group.mask is None,
            )
            out_THD[group.tokens] = out_SHTD.transpose(1, 2).flatten(0, 1)


def choose_backend(
    name: str, device: torch.device | str, block_size: int, dtype: torch.dtype = torch.float32
) -> Ops:
    """The backend that `name` stands for, for a cache on this device and queries of this dtype.

    "auto" is Triton on CUDA, where it is installed and the block size is a power of two, and C
    on a CPU whose C compiler works, else torch. Where C has no kernel it uses torch.

    Raises:
        ValueError: "triton" is not available (not installed, a block size that is no power of
            two, a CPU without Triton's interpreter), or "c" is not (CBackend.choose).
    """
    check_choice("attention_backend", name, ATTENTION_BACKENDS)
    on_cuda = torch.device(device).type != "cpu"
    is_power_of_two = next_power_of_two(block_size) == block_size
    if name == "triton" or (name == "auto" and on_cuda and HAS_TRITON and is_power_of_two):
        check_triton(on_cuda, block_size)
        from nanobatch.paged_attention_kernel import TritonBackend

        return TritonBackend()
    if name == "c" or (name == "auto" and not on_cuda and has_extension("cpu")):
        kind = load_extension("cpu", "attention_backend is 'c'").CBackend
        return kind.choose(torch.device(device), dtype, name == "c") or TorchBackend()
    return TorchBackend()


def paged_attention(
    q_THD: Tensor,
    k_cache_NKPD: Tensor,
    v_cache_NKPD: Tensor,
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of the step's queries over the keys that their block tables name.

    The step's own keys and values must be in the cache already. Each sequence's queries are
    its last positions, so the last query sees all keys.

    Args:
        q_THD: [T, H, D] queries of the packed tokens.
        k_cache_NKPD, v_cache_NKPD: [N, K, P, D].
        batch: where each sequence's queries and keys are.
        scale: what the scores are multiplied by, usually D ** -0.5.
        sliding_window: keys that a query sees, its own included; None: all up to its own.
        softcap: see masked_attention.
        backend: see choose_backend.

    Returns:
        [T, H, D]; tokens that belong to no sequence get zeros.

    Raises:
        ValueError: shapes do not agree, or the backend is not available.
    """
    _check_shapes(q_THD, k_cache_NKPD, v_cache_NKPD, batch)
    chosen = choose_backend(backend, q_THD.device, k_cache_NKPD.shape[2], q_THD.dtype)
    args = AttentionArgs(sliding_window, scale, softcap)
    return chosen.paged_attention(q_THD, KVCache(k_cache_NKPD, v_cache_NKPD), batch, args)


def _check_shapes(
    q_THD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor, batch: Batch
) -> None:
    ok = (
        q_THD.dim() == 3
        and k_cache_NKPD.dim() == 4
        and k_cache_NKPD.shape == v_cache_NKPD.shape
    )
    if ok:
        H, K = q_THD.shape[1], k_cache_NKPD.shape[1]
        heads_left_over = H % K
        ok = heads_left_over == 0 and q_THD.shape[2] == k_cache_NKPD.shape[3]
    if not ok:
        raise ValueError(
            f"q_THD is {tuple(q_THD.shape)}, k_cache_NKPD {tuple(k_cache_NKPD.shape)}, "
            f"v_cache_NKPD {tuple(v_cache_NKPD.shape)}; they must be [T, H, D] and twice "
            "[N, K, P, D], H a multiple of K"
        )
    if len(q_THD) < len(batch.token_ids_T):
        raise ValueError(
            f"q_THD has {len(q_THD)} rows and the batch {len(batch.token_ids_T)} tokens; it "
            "must have one for each"
        )


@dataclass
class PagedAttend:
    """What the model calls in each layer: rotate, write to the paged cache, attend.

    caches: one for each layer. backend: see choose_backend.
    """

    batch: Batch
    caches: list[KVCache]
    backend: Ops = field(default_factory=TorchBackend)

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        args: AttentionArgs,
    ) -> Tensor:
        cache, slots_T = self.caches[layer], self.batch.slot_mapping_T
        q_THD = self.backend.rope_and_write(q_THD, k_TKD, v_TKD, cos_TR, sin_TR, cache, slots_T)
        return self.backend.paged_attention(q_THD, cache, self.batch, args)
