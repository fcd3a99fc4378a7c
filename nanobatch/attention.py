"""Attention over a paged cache, in torch: the reference, and what runs where no kernel does.

The keys of a sequence lie in blocks all over the cache; its block table says where. They are
gathered into one contiguous piece and handed to torch's scaled_dot_product_attention, several
sequences of like length together (kernels/gather.py).

    "torch"   TorchBackend                               any device
    "c"       CBackend, extensions/cpu                   a CPU with a C compiler
    "triton"  TritonBackend, paged_attention_kernel.py   CUDA

A backend is one object of a few operations: those of kernels/ops.py, and paged_attention.
`choose_backend` is called once, when the runner is built.

Always holds (invariant 14): what lies in slots past a sequence's end never reaches an
output. It may be NaN, so a mask on the scores does not suffice (0 * NaN is NaN): the gathered
tail is set to zero.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nanobatch.attention_masks import causal_mask
from nanobatch.batch import Batch
from nanobatch.config import ATTENTION_BACKENDS
from nanobatch.kernels.gather import make_groups
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.ops import HAS_TRITON, Ops
from nanobatch.models.decoder import AttentionArgs
from nanobatch.utils.arithmetic import next_power_of_two
from nanobatch.utils.checks import check_choice
from nanobatch.utils.extensions import has_extension, load_extension


def masked_attention(
    q_SHTD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Grouped-query attention over dense keys; query head h reads key head h // (H / K).

    Args:
        q_SHTD: [S, H, T, D] queries. k_SKLD, v_SKLD: [S, K, L, D] keys and values.
        mask: bool, broadcastable to [S, H, T, L], True where a query sees a key; or None.
        scale: what the scores are multiplied by.
        softcap: if set, scores become softcap * tanh(score / softcap) (Gemma 2).
        is_causal: in place of a mask, for T == L.

    Returns:
        [S, H, T, D].
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q_SHTD, k_SKLD, v_SKLD, mask, scale=scale, is_causal=is_causal, enable_gqa=True
        )
    if is_causal:
        mask = causal_mask(q_SHTD.shape[2], k_SKLD.shape[2])
    group_size = q_SHTD.shape[1] // k_SKLD.shape[1]
    k_SHLD, v_SHLD = (x.repeat_interleave(group_size, dim=1) for x in (k_SKLD, v_SKLD))
    scores_SHTL = (q_SHTD @ k_SHLD.transpose(2, 3)).float() * scale
    scores_SHTL = softcap * torch.tanh(scores_SHTL / softcap)
    if mask is not None:
        scores_SHTL = scores_SHTL.masked_fill(~mask, float("-inf"))
    return scores_SHTL.softmax(dim=-1).to(v_SHLD.dtype) @ v_SHLD


class TorchBackend(Ops):
    """Everything in plain torch."""

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, batch: Batch, args: AttentionArgs
    ) -> Tensor:
        """See paged_attention, which checks what it is given; this does not."""
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
        """Attention into out_THD, of the sequences with one query, with several, or of all."""
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


def choose_backend(name: str, device: torch.device | str, block_size: int) -> Ops:
    """The backend that `name` stands for, with a cache on this device.

    "auto" is Triton on CUDA, where it is installed and the block size is a power of two, and C
    on a CPU with a C compiler. What C has no kernel for is torch's.

    Raises:
        ValueError: "triton" cannot be had: not installed, a block size that is no power of two,
            or a CPU without Triton's interpreter; or "c" cannot: on a GPU, without a compiler,
            or without nanobatch/extensions/cpu.
    """
    check_choice("attention_backend", name, ATTENTION_BACKENDS)
    on_cuda = torch.device(device).type != "cpu"
    is_power_of_two = next_power_of_two(block_size) == block_size
    if name == "triton" or (name == "auto" and on_cuda and HAS_TRITON and is_power_of_two):
        return _triton_backend(on_cuda, block_size)
    if name == "c" or (name == "auto" and not on_cuda and has_extension("cpu")):
        kind = load_extension("cpu", "attention_backend is 'c'").CBackend
        if not on_cuda and kind.has_compiler():
            return kind()
        if name == "c":
            raise ValueError("attention_backend is 'c'; it needs a CPU and a C compiler")
    return TorchBackend()


def _triton_backend(on_cuda: bool, block_size: int) -> Ops:
    if not HAS_TRITON:
        raise ValueError("attention_backend is 'triton', which is not installed; use 'torch'")
    is_power_of_two = next_power_of_two(block_size) == block_size
    if not is_power_of_two:
        raise ValueError(f"block_size is {block_size}; the Triton kernels need a power of two")
    import triton

    if not on_cuda and not triton.knobs.runtime.interpret:
        raise ValueError(
            "attention_backend is 'triton' and the device is 'cpu'; set TRITON_INTERPRET=1 "
            "before triton is imported, or use 'torch'"
        )
    from nanobatch.paged_attention_kernel import TritonBackend

    return TritonBackend()


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
    its last positions: the mask is aligned at the bottom right.

    Args:
        q_THD: [T, H, D] queries of the packed tokens.
        k_cache_NKPD, v_cache_NKPD: [N, K, P, D].
        batch: where each sequence's queries and keys are.
        scale: what the scores are multiplied by, usually D ** -0.5.
        sliding_window: keys that a query sees, itself included; None: all before it.
        softcap: see masked_attention.
        backend: see choose_backend.

    Returns:
        [T, H, D]; tokens that belong to no sequence get zeros.

    Raises:
        ValueError: shapes do not agree, or the backend cannot be had.
    """
    _check_shapes(q_THD, k_cache_NKPD, v_cache_NKPD, batch)
    chosen = choose_backend(backend, q_THD.device, k_cache_NKPD.shape[2])
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
