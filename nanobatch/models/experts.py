"""A mixture of experts in place of an MLP: each token goes through a few of many.

    router     token 0 -> experts 2, 0     token 1 -> 2, 1     token 2 -> 0, 2
    sorted     [0 2 | 1 | 0 1 2]   the tokens of expert 0, of 1, of 2
    products   each run of rows times its own expert's weights (grouped_matmul)
    back       in the order of tokens, weighted and summed over a token's experts

On a GPU a product of all experts is one launch of one kernel, whatever the router says: each
tile of rows finds its expert on the device. So the host never waits for the counts, and a graph
can be captured.

Always holds: a token's sum is in the order of its own experts, whatever shares its batch
(invariant 12).

Sources: Mixtral (Jiang et al., 2024), Qwen3-MoE; MegaBlocks (Gale et al., 2023) and vLLM's
fused_moe for the sorted tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanobatch.kernels.ops import REFERENCE, Ops
from nanobatch.models.config import ModelConfig


class Experts(nn.Module):
    """The router, and the gated MLPs of X experts as two tensors."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.ops: Ops = REFERENCE
        E, X = config.hidden_size, config.num_experts
        size = config.moe_intermediate_size
        self.num_chosen, self.norms = config.num_experts_per_tok, config.norm_topk_prob
        self.router = nn.Linear(E, X, bias=False)
        self.gate_up_XFE = nn.Parameter(torch.empty(X, 2 * size, E), requires_grad=False)
        self.down_XEF = nn.Parameter(torch.empty(X, E, size), requires_grad=False)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]: for each token the sum of its experts' outputs, weighted by their shares."""
        share_TC, expert_TC = self.route(x_TE)
        order_M = expert_TC.flatten().argsort(stable=True)  # M = T * C rows
        counts_X = count_ids(expert_TC.flatten(), len(self.gate_up_XFE))
        rows_ME = x_TE[order_M // self.num_chosen]
        rows_MF = self.ops.silu_mul(
            self.ops.grouped_matmul(rows_ME, self.gate_up_XFE, counts_X)
        )
        rows_ME = self.ops.grouped_matmul(rows_MF, self.down_XEF, counts_X)
        unsorted_ME = torch.empty_like(rows_ME)
        unsorted_ME[order_M] = rows_ME
        shares_TC1 = share_TC.to(x_TE.dtype).unsqueeze(2)
        return (unsorted_ME.unflatten(0, (-1, self.num_chosen)) * shares_TC1).sum(dim=1)

    def route(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's C experts: their shares, float32 [T, C], and their ids, int64 [T, C]."""
        share_TX = self.router(x_TE).float().softmax(dim=-1)
        share_TC, expert_TC = share_TX.topk(self.num_chosen, dim=-1)
        if self.norms:
            share_TC = share_TC / share_TC.sum(dim=-1, keepdim=True)
        return share_TC, expert_TC


def count_ids(ids_M: Tensor, num_ids: int) -> Tensor:
    """int64 [num_ids]: how often each id occurs. (bincount makes the host wait.)"""
    ones_M = torch.ones_like(ids_M)
    return ones_M.new_zeros(num_ids).scatter_add_(0, ids_M, ones_M)
