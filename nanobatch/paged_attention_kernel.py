"""Paged attention in Triton: any mix of prefill and decode in one launch.

How the work is cut into programs. Group size G = H / K query heads share one KV head, so
a program takes some query tokens of one sequence, all G heads of one KV head, and packs
them into the M rows of a matrix product. Here G = 2, 4 tokens in 8 rows:

    rows of the program            keys of the sequence, in tiles of 4
    m  token  head            | tile 0      | tile 1      | tile 2
    0  t4     h0              | x  x  x  x  | x  .  .  .  |            x  seen
    1  t4     h1              | x  x  x  x  | x  .  .  .  |            .  masked
    2  t5     h0              | x  x  x  x  | x  x  .  .  |
    3  t5     h1              | x  x  x  x  | x  x  .  .  | never loaded: past the last
    ...                       |             |             | query of this program
    7  t7     h1              | x  x  x  x  | x  x  x  x  |

    grid = (items of the work list, KV heads)

The same keys serve all G heads: K and V are read once, which is all that matters when one
token is decoded. A key tile spans any number of cache blocks (or part of one): each of its
positions looks up its own block id.

*Online softmax* keeps, for each row, the largest score so far (m), the sum of exp2(score - m)
(l) and the sum of exp2(score - m) * V (acc). A tile with a larger score rescales what came
before by exp2(m_old - m_new). Scores are scaled by log2(e) beforehand, since exp2 is what the
hardware has.

*Two tiles on their way*: Triton fetches the keys and values of later tiles while it multiplies
those of this one, if it knows their addresses early. An address takes a block id, which is
loaded too; so the loop carries the block ids of the next tile:

    tile               0              1              2
    block ids          of tile 1      of tile 2      of tile 3        loaded for the next turn
    keys and values    of 1 and 2     of 2 and 3     of 3 and 4       on their way meanwhile

*Split-KV*: where the work would not fill the GPU, a sequence's tiles are cut into several runs.
Each is a program, which writes its (acc, m, l), and `reduce_splits_kernel` joins them. Which
program takes what is listed once a batch, on the host (work_list.py), in one list for sequences
with few query tokens (decodes, drafts) and one for the others (launch_plan.py).

Always holds (invariants 14 and 16): what lies in slots past a sequence's end is not loaded;
block ids are widened to 64 bits before they are multiplied.

Taught in notebooks/06_the_triton_kernel.ipynb. Sources: FlashAttention-2 (Dao, 2023),
Flash-Decoding (Dao et al., 2023), and the unified Triton attention of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nanobatch.batch import Batch
from nanobatch.config import EngineConfig
from nanobatch.kernels.kv_cache import KVCache
from nanobatch.kernels.launch_config import (
    CHIPS,
    MAX_SPLITS,
    Chip,
    LaunchConfig,
    choose_launch_config,
)
from nanobatch.kernels.launch_plan import LaunchPlanner
from nanobatch.kernels.ops import AttentionArgs
from nanobatch.kernels.triton_ops import TritonOps, dense_heads
from nanobatch.kernels.warm_up import try_launches
from nanobatch.utils.arithmetic import next_power_of_two

LOG2_E = math.log2(math.e)
REDUCE_WARPS = 8  # 64 splits of heads of 256 are too many numbers for 4


@triton.jit
def load_item(work_ptr, item):
    """(sequence, first query, split, number of splits) of an item of the work list."""
    item_ptr = work_ptr + 4 * item
    seq, first_query = tl.load(item_ptr), tl.load(item_ptr + 1)
    return seq, first_query, tl.load(item_ptr + 2), tl.load(item_ptr + 3)


@triton.jit
def tiles_of_split(
    context_len, first_query, end_query, split, num_splits,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(first, end) of the tiles that a split reads for the queries first to end - 1."""
    end_tile = tl.cdiv(context_len + end_query, TILE)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(context_len + first_query - WINDOW + 1, 0) // TILE
    tiles_per_split = tl.cdiv(end_tile - first_tile, num_splits)
    first_tile += split * tiles_per_split
    return first_tile, tl.minimum(end_tile, first_tile + tiles_per_split)


@triton.jit
def online_softmax(score_ML, max_M, sum_M):
    """Take one tile of scores into each row's running maximum and sum.

    Returns (weights of the tile's values, factor for what came before, maximum, sum).
    """
    new_max_M = tl.maximum(max_M, tl.max(score_ML, 1))
    # A row that has seen nothing yet: -inf - -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    rescale_M = tl.exp2(max_M - base_M)  # what came before was relative to the old maximum
    p_ML = tl.exp2(score_ML - base_M[:, None])
    sum_M = sum_M * rescale_M + tl.sum(p_ML, 1)
    return p_ML, rescale_M, new_max_M, sum_M


@triton.jit
def add_values(p_ML, v_LX, rescale_M, acc_MX):
    """The weighted values of one more tile."""
    acc_MX *= rescale_M[:, None]
    return tl.dot(p_ML.to(v_LX.dtype), v_LX, acc_MX, input_precision="ieee")


@triton.jit
def soft_capped(score_ML, softcap):
    """softcap * tanh(score / softcap), of scores that are multiplied by log2(e) already."""
    # tanh(x) = 1 - 2 / (exp2(2 x log2(e)) + 1), and log2(e) is in the score already.
    tanh_ML = 1 - 2 / (tl.exp2(2 * score_ML / softcap) + 1)
    return softcap * 1.4426950408889634 * tanh_ML


@triton.jit
def store_result(
    out_ptr, acc_ptr, max_ptr, sum_ptr, item, num_splits, row_of_out_M, row_M, d_D, is_row_M,
    is_d_D, acc_MD, max_M, sum_M, K: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The rows' results, or what this split has found for each, to be joined later."""
    is_out_MD = is_row_M[:, None] & is_d_D[None, :]
    if num_splits == 1:
        # A row of a captured graph that stands for no sequence has no keys: it gets zeros.
        out_MD = acc_MD / tl.where(sum_M != 0, sum_M, 1.0)[:, None]
        tl.store(
            out_ptr + row_of_out_M[:, None] * D + d_D[None, :],
            out_MD.to(out_ptr.dtype.element_ty),
            mask=is_out_MD,
        )
    else:
        part_M = (item.to(tl.int64) * K + tl.program_id(1)) * BLOCK_M + row_M
        tl.store(max_ptr + part_M, max_M, mask=is_row_M)
        tl.store(sum_ptr + part_M, sum_M, mask=is_row_M)
        tl.store(acc_ptr + part_M[:, None] * D + d_D[None, :], acc_MD, mask=is_out_MD)


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention_kernel(
    out_ptr,  # [T, H, D] the result of items that are not split
    acc_ptr,  # float32 [items, K, BLOCK_M, D] partial sums of those that are
    max_ptr,  # float32 [items, K, BLOCK_M] largest score of each split, in log2 units
    sum_ptr,  # float32 [items, K, BLOCK_M] sum of exp2(score - max)
    q_ptr,  # [T, H, D] queries; heads and elements contiguous
    k_cache_ptr,  # [N, K, P, D]
    v_cache_ptr,  # [N, K, P, D]
    block_tables_ptr,  # int32 [S, B]
    seq_lens_ptr,  # int32 [S] keys of each sequence
    query_start_ptr,  # int32 [S + 1] first token of each sequence
    work_ptr,  # int32 [items, 4] what each program does (work_list.py)
    q_stride,  # elements from one token's queries to the next one's
    table_stride,  # elements from one row of block_tables to the next
    scale_log2,  # scale * log2(e)
    softcap,  # scores become softcap * tanh(score / softcap), if HAS_SOFTCAP
    K: tl.constexpr,  # KV heads
    G: tl.constexpr,  # query heads for each KV head
    D: tl.constexpr,  # head dimension
    D_PAD: tl.constexpr,  # the next power of two
    P: tl.constexpr,  # slots in a cache block, a power of two
    BLOCK_M: tl.constexpr,  # rows of the products: tokens x heads, at least 16 for tl.dot
    BLOCK_Q: tl.constexpr,  # query tokens of a program: BLOCK_M // G
    TILE: tl.constexpr,  # keys of one iteration
    WINDOW: tl.constexpr,  # keys a query sees, itself included; 0: all before it
    HAS_SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: Triton's interpreter knows no bfloat16 product
):
    """One program: BLOCK_Q query tokens of one sequence, G heads, one split of the keys."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    seq, first_query, split, num_splits = load_item(work_ptr, item)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + seq)

    row_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, D_PAD)
    query_M = first_query + row_M // G
    head_M = kv_head * G + row_M % G
    is_row_M = (row_M < BLOCK_Q * G) & (query_M < query_len)
    is_d_D = d_D < D
    token_M = (query_start + query_M).to(tl.int64)
    q_MD = tl.load(
        q_ptr + token_M[:, None] * q_stride + head_M[:, None] * D + d_D[None, :],
        mask=is_row_M[:, None] & is_d_D[None, :],
        other=0.0,
    )
    if WIDEN:
        q_MD = q_MD.to(tl.float32)

    # The queries are the sequence's last positions: the mask's corner is at the bottom right.
    context_len = seq_len - query_len
    pos_M = context_len + query_M
    end_query = tl.minimum(first_query + BLOCK_Q, query_len)
    first_tile, end_tile = tiles_of_split(
        context_len, first_query, end_query, split, num_splits, TILE, WINDOW
    )

    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    table_ptr = block_tables_ptr + seq * table_stride
    pos_L = first_tile * TILE + tl.arange(0, TILE)
    block_L = tl.load(table_ptr + pos_L // P, mask=pos_L < seq_len, other=0)
    for _ in range(first_tile, end_tile):
        is_key_L = pos_L < seq_len
        # 64 bits before multiplying: a cache of more than 2**31 elements is ordinary.
        slot_L = (block_L.to(tl.int64) * K + kv_head) * P + pos_L % P
        where_LD = slot_L[:, None] * D + d_D[None, :]
        is_here_LD = is_key_L[:, None] & is_d_D[None, :]
        k_LD = tl.load(k_cache_ptr + where_LD, mask=is_here_LD, other=0.0).to(q_MD.dtype)
        # Zeroed and not only masked: an unused slot may hold NaN, and 0 * NaN is NaN.
        v_LD = tl.load(v_cache_ptr + where_LD, mask=is_here_LD, other=0.0).to(q_MD.dtype)

        score_ML = tl.dot(q_MD, tl.trans(k_LD), input_precision="ieee") * scale_log2
        if HAS_SOFTCAP:
            score_ML = soft_capped(score_ML, softcap)
        sees_ML = pos_L[None, :] <= pos_M[:, None]
        if WINDOW > 0:
            sees_ML &= pos_L[None, :] > pos_M[:, None] - WINDOW
        score_ML = tl.where(sees_ML, score_ML, float("-inf"))

        p_ML, rescale_M, max_M, sum_M = online_softmax(score_ML, max_M, sum_M)
        acc_MD = add_values(p_ML, v_LD, rescale_M, acc_MD)
        pos_L += TILE  # the next tile's block ids, a turn before their keys are wanted
        block_L = tl.load(table_ptr + pos_L // P, mask=pos_L < seq_len, other=0)

    row_of_out_M = token_M * (K * G) + head_M
    store_result(
        out_ptr, acc_ptr, max_ptr, sum_ptr, item, num_splits, row_of_out_M, row_M, d_D,
        is_row_M, is_d_D, acc_MD, max_M, sum_M, K, D, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["BLOCK_M", "BLOCK_Q"])
def reduce_splits_kernel(
    out_ptr,  # [T, H, D] the result
    acc_ptr,  # float32 [items, K, BLOCK_M, D] partial sums
    max_ptr,  # float32 [items, K, BLOCK_M] largest score of each split
    sum_ptr,  # float32 [items, K, BLOCK_M] sum of exp2(score - max)
    query_start_ptr,  # int32 [S + 1] first token of each sequence
    work_ptr,  # int32 [items, 4] the items that are split
    BLOCK_M,  # rows of a program of the kernel above
    BLOCK_Q,  # its query tokens
    K: tl.constexpr,  # KV heads
    G: tl.constexpr,  # query heads for each KV head
    D: tl.constexpr,  # head dimension
    D_PAD: tl.constexpr,  # the next power of two
    MAX_SPLITS: tl.constexpr,  # a power of two
):
    """Join the splits of a query block, each of whose items takes some of its rows."""
    item, kv_head = tl.program_id(0), tl.program_id(1)
    seq, first_query, split, num_splits = load_item(work_ptr, item)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    num_rows = tl.minimum(query_len - first_query, BLOCK_Q) * G
    split_X, d_D = tl.arange(0, MAX_SPLITS), tl.arange(0, D_PAD)
    is_split_X, is_d_D = split_X < num_splits, d_D < D
    program_X = (item - split + split_X).to(tl.int64) * K + kv_head
    for row in range(split, num_rows, num_splits):
        part_X = program_X * BLOCK_M + row
        max_X = tl.load(max_ptr + part_X, mask=is_split_X, other=float("-inf"))
        sum_X = tl.load(sum_ptr + part_X, mask=is_split_X, other=0.0)
        largest = tl.max(max_X, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        # Each weighs exp2(its max - the largest). An empty split has seen no key: its max is
        # -inf, its sum and acc 0, and it weighs nothing. Its acc is loaded all the same: to ask
        # for sum > 0 would leave out those that are NaN.
        weight_X = tl.exp2(max_X - base)
        acc_XD = tl.load(
            acc_ptr + part_X[:, None] * D + d_D[None, :],
            mask=is_split_X[:, None] & is_d_D[None, :],
            other=0.0,
        )
        total = tl.sum(sum_X * weight_X, 0)
        out_D = tl.sum(acc_XD * weight_X[:, None], 0) / tl.where(total != 0, total, 1.0)
        token = (query_start + first_query + row // G).to(tl.int64)
        row_of_out = token * (K * G) + kv_head * G + row % G
        tl.store(
            out_ptr + row_of_out * D + d_D, out_D.to(out_ptr.dtype.element_ty), mask=is_d_D
        )


class TritonBackend(TritonOps):
    """Triton's operations, and paged attention by the kernels above."""

    def __init__(self):
        self.planner = LaunchPlanner(self.launch_config)

    def warm_up(
        self,
        layers: Sequence[nn.Module],
        caches: Sequence[KVCache],
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> None:
        """See Ops.warm_up."""
        chip = chip_of(caches[0].keys.device)

        def launch_of(*sizes: int) -> LaunchConfig:
            return self.launch_config(*sizes, dtype.itemsize, chip)

        try_launches(self, launch_of, layers, caches, config, dtype)

    def paged_attention(
        self,
        q_THD: Tensor,
        cache: KVCache,
        batch: Batch,
        args: AttentionArgs,
        launch: LaunchConfig | None = None,
    ) -> Tensor:
        """See TorchBackend.paged_attention.

        Args:
            launch: how the work is divided; None: choose_launch_config's choice.
        """
        (T, H, D), (_, K, P, _) = q_THD.shape, cache.keys.shape
        window, device = args.sliding_window, q_THD.device
        sizes = (H, K, D, q_THD.element_size())
        launches = batch.once(
            (type(self), *sizes, window, launch),
            lambda: self.planner.plan(batch, *sizes, chip_of(device), window, launch),
        )
        q_THD = dense_heads(q_THD)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if len(batch.token_ids_T) < T:
            out_THD[len(batch.token_ids_T) :] = 0  # those that belong to no sequence
        heads = {"K": K, "G": H // K, "D": D, "D_PAD": next_power_of_two(D)}
        for config, work, num_parts, parts in launches:
            self.kernel()[len(work), K](
                out_THD, *parts, q_THD, *cache.parts,
                batch.block_tables_SB, batch.seq_lens_S, batch.query_start_loc, work,
                q_THD.stride(0), batch.block_tables_SB.stride(0),
                args.scale * LOG2_E, args.softcap or 0.0, **heads, P=P,
                BLOCK_M=config.block_m, BLOCK_Q=config.block_q, TILE=config.tile,
                WINDOW=window or 0, HAS_SOFTCAP=args.softcap is not None,
                WIDEN=triton.knobs.runtime.interpret,
                num_warps=config.num_warps, num_stages=config.num_stages,
                maxnreg=config.max_registers,
            )  # fmt: skip
            if num_parts:
                reduce_splits_kernel[num_parts, K](
                    out_THD, *parts, batch.query_start_loc, work, config.block_m,
                    config.block_q, **heads, MAX_SPLITS=MAX_SPLITS, num_warps=REDUCE_WARPS,
                )  # fmt: skip
        return out_THD

    def kernel(self):
        """The kernel that takes the cache's parts."""
        return paged_attention_kernel

    def launch_config(self, *sizes: int | Chip) -> LaunchConfig:
        """Its launch; sizes: see choose_launch_config."""
        return choose_launch_config(*sizes)


def chip_of(device: torch.device) -> Chip:
    """The GPU that device is; in Triton's interpreter a made-up one with one multiprocessor."""
    if device.type == "cpu":
        return CHIPS[80]._replace(num_sms=1)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    known = CHIPS.get(10 * properties.major + properties.minor)
    # Without opting in, which Triton does, each program of any GPU may have 48 KiB.
    usual = 49_152 if known is None else known.shared_memory
    shared_memory = getattr(properties, "shared_memory_per_block_optin", usual)
    return Chip(capability, properties.multi_processor_count, shared_memory)
