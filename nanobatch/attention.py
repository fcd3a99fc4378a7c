"""Attention over a paged cache, in torch: the oracle, and what a CPU runs for prompts.

The keys of a sequence lie in blocks all over the cache; its block table says where. They are
gathered into one contiguous piece and handed to torch's scaled_dot_product_attention:

    block table [7, 2]      cache block 7      gathered keys of one head
                              block 2    ->    [ block 7 | block 2 | ]
                                                 positions 0 ..  seq_len - 1, then the tail

A prompt or a chunk is a piece of its own. Sequences with one query token each are attended
together, sorted so that those of like length share a group: a group is padded only to its
own longest, and small enough that what was gathered is still in the CPU's cache when it is
read (measured for 64 x 1000 tokens: 10-13 ms in groups of 256 blocks, 41-100 ms at once). Where
there is a C compiler these go to cpu_kernels.c instead, which gathers nothing.

Always holds (invariant 14): what lies in slots past a sequence's end never reaches an
output. It may be NaN, so a mask on the scores does not suffice (0 * NaN is NaN): the gathered
tail is set to zero.

The cache is [N, K, P, D]: one head's slots of a block are one contiguous run, so that
gathering (block, head) pairs gives [sequence, head, position, D] with no transpose.

Taught in notebooks/05_paged_kv_blocks.ipynb. Source: PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nanobatch import cpu_kernels
from nanobatch.attention_masks import causal_mask, visible
from nanobatch.batch import Batch
from nanobatch.config import ATTENTION_BACKENDS, cdiv, check_choice
from nanobatch.fused_kernels import HAS_TRITON, rope_and_write
from nanobatch.launch_plan import next_power_of_two

MAX_GROUP_BLOCKS = 256


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


def choose_backend(backend: str, on_cuda: bool, block_size: int) -> str:
    """What `backend` comes to for a cache on a GPU or on a CPU: "torch", "triton" or "c".

    "auto" is Triton on CUDA, where it is installed and the block size is a power of two; C on
    a CPU with a C compiler: for sequences with one query, others are torch's.

    Raises:
        ValueError: "triton" was asked for and cannot be had: not installed, a block size that
            is no power of two, or a CPU without Triton's interpreter; or "c" was, on a GPU or
            without a compiler.
    """
    check_choice("attention_backend", backend, ATTENTION_BACKENDS)
    is_power_of_two = next_power_of_two(block_size) == block_size
    has_c = not on_cuda and cpu_kernels.compiler() is not None
    if backend == "auto":
        has_triton = on_cuda and HAS_TRITON and is_power_of_two
        return "triton" if has_triton else "c" if has_c else "torch"
    if backend == "c" and not has_c:
        raise ValueError("attention_backend is 'c'; it needs a CPU and a C compiler")
    if backend in ("torch", "c"):
        return backend
    if not HAS_TRITON:
        raise ValueError("attention_backend is 'triton', which is not installed; use 'torch'")
    if not is_power_of_two:
        raise ValueError(f"block_size is {block_size}; the Triton kernels need a power of two")
    if not on_cuda:
        import triton

        if not triton.knobs.runtime.interpret:
            raise ValueError(
                "attention_backend is 'triton' and the device is 'cpu'; set TRITON_INTERPRET=1 "
                "before triton is imported, or use 'torch'"
            )
    return backend


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
    _check_shapes(q_THD, k_cache_NKPD, v_cache_NKPD)
    _, K, P, _ = k_cache_NKPD.shape
    backend = choose_backend(backend, q_THD.is_cuda, P)
    if backend == "triton":
        from nanobatch.paged_attention_kernel import triton_paged_attention

        return triton_paged_attention(
            q_THD, k_cache_NKPD, v_cache_NKPD, batch, scale=scale,
            sliding_window=sliding_window, softcap=softcap,
        )  # fmt: skip
    kernels = None
    if backend == "c" and softcap is None:
        kernels = cpu_kernels.paged_attention(q_THD, k_cache_NKPD)
    out_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    if kernels is not None:
        key = ("decodes", sliding_window)
        if key not in batch.derived:  # the same for every layer: made once a step
            batch.derived[key] = _decodes(batch, sliding_window)
        decodes = batch.derived[key]
        kernels.paged_decode(
            q_THD.contiguous(), k_cache_NKPD, v_cache_NKPD, *decodes, scale, out_THD
        )
    key = ("groups", K, P, sliding_window, kernels is None)
    if key not in batch.derived:
        batch.derived[key] = list(
            _make_groups(batch, K, P, sliding_window, with_decodes=kernels is None)
        )
    for group in batch.derived[key]:
        q_SHTD = q_THD[group.tokens].unflatten(0, (group.shape[0], -1)).transpose(1, 2)
        k_SKLD, v_SKLD = (group.gather(cache) for cache in (k_cache_NKPD, v_cache_NKPD))
        out_SHTD = masked_attention(
            q_SHTD,
            k_SKLD,
            v_SKLD,
            group.mask,
            scale=scale,
            softcap=softcap,
            is_causal=group.mask is None,
        )
        out_THD[group.tokens] = out_SHTD.transpose(1, 2).flatten(0, 1)
    return out_THD


def _check_shapes(q_THD: Tensor, k_cache_NKPD: Tensor, v_cache_NKPD: Tensor) -> None:
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


def _decodes(batch: Batch, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the sequences with one query: block tables, token, first and end of what it sees."""
    is_decode_S = batch.query_start_loc.diff() == 1
    end_S = batch.seq_lens_S[is_decode_S]
    start_S = torch.zeros_like(end_S) if window is None else (end_S - window).clamp(min=0)
    token_S = batch.query_start_loc[:-1][is_decode_S].long()
    return batch.block_tables_SB[is_decode_S], token_S, start_S, end_S


@dataclass
class _Group:
    """Sequences that are attended together: S of them, with T queries each.

    tokens: their rows of the packed tokens, a slice or int64 [S * T].
    shape: (S, K, B) of the gathered blocks.
    rows: int64 [S * K * B], which (block, head) pairs of the cache to gather.
    num_keys: L, gathered positions that are used; at most B * P.
    mask: bool [S, 1, T, L]; None: plain causal with T == L.
    tail: int64, rows of [S * K * B * P, D] past their sequence's end, to be zeroed.
    """

    tokens: slice | Tensor
    shape: tuple[int, int, int]
    rows: Tensor
    num_keys: int
    mask: Tensor | None
    tail: Tensor

    def gather(self, cache_NKPD: Tensor) -> Tensor:
        """[S, K, L, D]: the cached keys (or values) in order of position."""
        S, K, B = self.shape
        P, D = cache_NKPD.shape[2:]
        x = cache_NKPD.view(-1, P * D).index_select(0, self.rows)
        x.view(-1, D).index_fill_(0, self.tail, 0)
        return x.view(S, K, B * P, D)[:, :, : self.num_keys]


def _make_groups(
    batch: Batch, num_kv_heads: int, block_size: int, window: int | None, with_decodes: bool
) -> Iterator[_Group]:
    """Single-query sequences in groups of like length, then each longer one alone."""
    how = (num_kv_heads, block_size, window)
    starts = batch.query_start_loc.tolist()
    query_lens_S = batch.query_start_loc.diff()
    first_block_S = _first_visible_block(batch.seq_lens_S, query_lens_S, block_size, window)
    num_blocks = (cdiv(batch.seq_lens_S, block_size) - first_block_S).tolist()
    query_lens = query_lens_S.tolist()
    decodes = [row for row, query_len in enumerate(query_lens) if query_len == 1]
    decodes = decodes if with_decodes else []
    decodes.sort(key=lambda row: num_blocks[row])
    while decodes:
        rows = [decodes.pop()]  # the longest first: it sets the group's width
        while decodes and (len(rows) + 1) * num_blocks[rows[0]] <= MAX_GROUP_BLOCKS:
            rows.append(decodes.pop())
        tokens = batch.query_start_loc[rows].long()
        yield _make_group(batch, rows, tokens, *how)
    for row, query_len in enumerate(query_lens):
        if query_len > 1:
            tokens = slice(starts[row], starts[row + 1])
            yield _make_group(batch, [row], tokens, *how)


def _first_visible_block(
    seq_lens: Tensor, query_lens: Tensor, block_size: int, window: int | None
) -> Tensor:
    """The first block that the window of a sequence's first query reaches."""
    if window is None:
        return torch.zeros_like(seq_lens)
    return (seq_lens - query_lens - window + 1).clamp(min=0) // block_size


def _make_group(
    batch: Batch,
    rows: list[int],
    tokens: slice | Tensor,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
) -> _Group:
    K, P = num_kv_heads, block_size
    seq_len_S1 = batch.seq_lens_S[rows].long().unsqueeze(1)
    query_len_S1 = batch.query_start_loc.diff()[rows].unsqueeze(1)
    query_len = int(query_len_S1[0])
    first_block_S1 = _first_visible_block(seq_len_S1, query_len_S1, P, window)
    len_S1 = seq_len_S1 - first_block_S1 * P  # counted from the first gathered position
    num_keys = int(len_S1.max())
    num_blocks = cdiv(num_keys, P)
    device = len_S1.device
    pos_L = torch.arange(num_blocks * P, device=device)

    # Past a row's own table any block will do: what is gathered there is zeroed.
    index_SB = first_block_S1 + pos_L[:num_blocks]
    index_SB = index_SB.clamp(max=batch.block_tables_SB.shape[1] - 1)
    blocks_SB = batch.block_tables_SB[rows].long().gather(1, index_SB)
    head_K1 = torch.arange(K, device=device).unsqueeze(1)
    cache_rows = (blocks_SB.unsqueeze(1) * K + head_K1).flatten()
    is_tail_SKL = (pos_L >= len_S1).unsqueeze(1).expand(-1, K, -1)
    tail = is_tail_SKL.flatten().nonzero().flatten()

    mask = None
    is_plain_causal = len(rows) == 1 and query_len == num_keys and window is None
    if not is_plain_causal:
        query_pos_ST = len_S1 - query_len + torch.arange(query_len, device=device)
        mask = visible(query_pos_ST.unsqueeze(2), pos_L[:num_keys], window).unsqueeze(1)
    return _Group(tokens, (len(rows), K, num_blocks), cache_rows, num_keys, mask, tail)


@dataclass
class PagedAttend:
    """What the model calls in each layer: rotate, write to the paged cache, attend.

    caches: for each layer (k_cache_NKPD, v_cache_NKPD).
    """

    batch: Batch
    caches: list[tuple[Tensor, Tensor]]
    backend: str = "auto"

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        sliding_window: int | None = None,
    ) -> Tensor:
        k_cache_NKPD, v_cache_NKPD = self.caches[layer]
        q_THD = rope_and_write(
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, k_cache_NKPD, v_cache_NKPD,
            self.batch.slot_mapping_T,
        )  # fmt: skip
        return paged_attention(
            q_THD, k_cache_NKPD, v_cache_NKPD, self.batch,
            scale=q_THD.shape[-1] ** -0.5, sliding_window=sliding_window, backend=self.backend,
        )  # fmt: skip
