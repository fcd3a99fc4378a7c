"""The products of many experts in one launch, in Triton.

    rows      0 1 2 3 4 | 5 | 6 7 8 ...      sorted by expert
    tiles     [0 1 2 3]  [5]  [6 7 8 .]      of BLOCK_M rows, each within one expert
              [4 . . .]

The host does not know how many tiles there are, only how many there can be: one for every
BLOCK_M rows and one more for each expert. Programs without a tile have expert -1 and return.

Always holds: rows are computed alike wherever they lie in a tile; nothing is written past M.

Source: MegaBlocks (Gale et al., 2023); vLLM's moe_align_block_size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanobatch.utils.arithmetic import cdiv

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64
NUM_STAGES = 3


@triton.jit
def grouped_matmul_kernel(
    x_ptr,  # [M, K] rows sorted by expert
    weight_ptr,  # [X, N, K]
    expert_ptr,  # int32 [tiles] the expert of each, or -1
    start_ptr,  # int32 [tiles] its first row
    end_ptr,  # int32 [tiles] the end of its expert's rows
    out_ptr,  # [M, N]
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: Triton's interpreter knows no bfloat16 product
):
    """BLOCK_N columns of one tile of rows, times its expert's weights."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    row_M = tl.load(start_ptr + tile) + tl.arange(0, BLOCK_M)
    is_row_M = row_M < tl.load(end_ptr + tile)
    col_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_col_N = col_N < N
    x_row_M = x_ptr + row_M.to(tl.int64) * K
    weight_row_N = weight_ptr + (expert.to(tl.int64) * N + col_N) * K
    sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        is_k_K = k_K < K
        is_x_MK, is_weight_NK = is_row_M[:, None] & is_k_K, is_col_N[:, None] & is_k_K
        x_MK = tl.load(x_row_M[:, None] + k_K, mask=is_x_MK, other=0.0)
        weight_NK = tl.load(weight_row_N[:, None] + k_K, mask=is_weight_NK, other=0.0)
        if WIDEN:
            x_MK, weight_NK = x_MK.to(tl.float32), weight_NK.to(tl.float32)
        sum_MN = tl.dot(x_MK, weight_NK.T, sum_MN, input_precision="ieee")
    out_MN = out_ptr + row_M.to(tl.int64)[:, None] * N + col_N
    tl.store(out_MN, sum_MN.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_col_N)


def triton_grouped_matmul(x_MK: Tensor, weight_XNK: Tensor, counts_X: Tensor) -> Tensor:
    """See Ops.grouped_matmul."""
    (M, K), (X, N, _) = x_MK.shape, weight_XNK.shape
    tiles = lay_tiles(counts_X, M)
    out_MN = x_MK.new_empty(M, N)
    grid = (cdiv(M, BLOCK_M) + X, cdiv(N, BLOCK_N))
    capability = torch.cuda.get_device_capability(x_MK.device) if x_MK.is_cuda else (8, 0)
    grouped_matmul_kernel[grid](
        x_MK.contiguous(), weight_XNK, *tiles, out_MN, N, K,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=num_warps_on(capability), num_stages=NUM_STAGES,
    )  # fmt: skip
    return out_MN


def num_warps_on(capability: tuple[int, int]) -> int:
    """Of a program. Triton has no matrix units before compute capability 8.0: the products then
    need the registers of more threads."""
    return 4 if capability >= (8, 0) else 8


def lay_tiles(counts_X: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32 [tiles] each: expert (-1: none), first row, end of the expert's rows. Computed
    where counts_X is, without a look at it."""
    num_tiles = cdiv(num_rows, BLOCK_M) + len(counts_X)
    tile_T = torch.arange(num_tiles, device=counts_X.device)
    tiles_X = (counts_X + BLOCK_M - 1) // BLOCK_M
    end_X, tile_end_X = counts_X.cumsum(0), tiles_X.cumsum(0)
    expert_T = torch.searchsorted(tile_end_X, tile_T, right=True)
    is_real_T = expert_T < len(counts_X)
    expert_T = expert_T.clamp(max=len(counts_X) - 1)
    nth_T = tile_T - (tile_end_X - tiles_X)[expert_T]  # which of its expert's tiles
    start_T = (end_X - counts_X)[expert_T] + nth_T * BLOCK_M
    expert_or_none_T = torch.where(is_real_T, expert_T, -1)
    return expert_or_none_T.int(), start_T.int(), end_X[expert_T].int()
