"""One decoder for the Llama family: Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM2.

The differences between them are data in ModelConfig: a bias, a norm on q and k, a window.

    token ids -> embedding -> [ norm -> qkv -> attend -> o -> + -> norm -> MLP -> + ] x layers
              -> norm -> hidden states -> lm_head (only the rows that sample) -> logits

The decoder knows no cache and no batch layout. Each layer hands its queries, keys and values
to `attend(layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, sliding_window)`, which rotates,
remembers and attends: over a paged cache (attention.PagedAttend) or over a padded one
(static_batching.PaddedAttend).

Taught in notebooks/01_why_decoding_is_slow.ipynb. Source: Llama (Touvron et al., 2023), and
Hugging Face's modeling files, which are the oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanobatch import cpu_kernels
from nanobatch.config import ModelConfig
from nanobatch.fused_kernels import rms_norm, silu_mul, top_ids
from nanobatch.tensor_parallel import Ranks

Attend = Callable[..., Tensor]
NUM_EXACT_LOGITS = 32


class RMSNorm(nn.Module):
    """Its weight, and rms_norm with the model's eps."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self.weight, self.eps, residual)


class Linear(nn.Linear):
    """A matrix product; its weights may be laid out for a CPU's tiles (cpu_matmul.c)."""

    packed: Tensor | None = None
    packed_bias: Tensor | None = None

    def reset_parameters(self) -> None:
        """Nothing: the numbers come from a checkpoint."""

    def pack(self, keep: bool = False) -> None:
        """Lay the weights out, if this CPU has tiles. `weight` keeps its shape, and its numbers
        if it is to keep them."""
        kernels = cpu_kernels.products(self.weight)
        if self.packed is None and kernels is not None:
            self.packed, self._kernels = kernels.pack(self._ordered(self.weight)), kernels
            self.packed_bias = None if self.bias is None else self._ordered(self.bias.data)
            if not keep:
                self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def _ordered(self, rows: Tensor) -> Tensor:
        """The weight's rows, or the bias, in the order of the packed columns."""
        return rows

    def forward(self, x_TE: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[T, F] in dtype; by default that of x."""
        dtype = x_TE.dtype if dtype is None else dtype
        if self.packed is None:
            return super().forward(x_TE).to(dtype)
        return self._kernels.product(x_TE, self.packed, self.packed_bias, dtype)


class GateUp(Linear):
    """The MLP's first product, and SiLU of its first half times the second: [T, F / 2]."""

    def _ordered(self, rows: Tensor) -> Tensor:
        """16 of the gate's, then 16 of the others, in turns: they meet in one block."""
        return rows.unflatten(0, (2, -1, 16)).transpose(0, 1).reshape(rows.shape)

    def forward(self, x_TE: Tensor) -> Tensor:
        if self.packed is None:
            return silu_mul(super().forward(x_TE))
        return self._kernels.gated_product(x_TE, self.packed, self.packed_bias)


class SummedLinear(Linear):
    """A product whose inputs are split over ranks: each computes a part of every sum."""

    def __init__(self, in_size: int, out_size: int, bias: bool, ranks: Ranks):
        super().__init__(in_size, out_size, bias)
        self.ranks = ranks

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.ranks.sum(super().forward(x_TE))


class DecoderLayer(nn.Module):
    """Attention and MLP. The three (two) input projections are one matrix product."""

    def __init__(self, config: ModelConfig, layer: int, ranks: Ranks):
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_heads, config.num_kv_heads
        self.layer, self.head_dim = layer, D
        self.window = config.window(layer)
        self.heads = [H, K, K]
        self.input_norm = RMSNorm(E, config.rms_norm_eps)
        self.qkv = Linear(E, (H + K + K) * D, bias=config.qkv_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.o = SummedLinear(H * D, E, config.o_bias, ranks)
        self.mlp_norm = RMSNorm(E, config.rms_norm_eps)
        self.gate_up = GateUp(E, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = SummedLinear(config.intermediate_size, E, config.mlp_bias, ranks)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        cos_TR: Tensor,
        sin_TR: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [T, E], not yet added, and the residual to add it to."""
        x_TE, residual_TE = self.input_norm(x_TE, residual_TE)
        heads_TXD = self.qkv(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = heads_TXD.split(self.heads, dim=1)
        if self.q_norm is not None:
            q_THD, _ = self.q_norm(q_THD)
            k_TKD, _ = self.k_norm(k_TKD)
        out_THD = attend(self.layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, self.window)
        x_TE, residual_TE = self.mlp_norm(self.o(out_THD.flatten(1)), residual_TE)
        return self.down(self.gate_up(x_TE)), residual_TE


class Decoder(nn.Module):
    """The whole model, or this rank's part of it: `config` is the shape of the part.

    Built on the meta device; the loader brings the weights.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks | None = None):
        super().__init__()
        self.ranks = ranks = Ranks() if ranks is None else ranks
        self.vocab_size = config.vocab_size
        self.config = config = ranks.part_of(config)
        embed_VE = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding.from_pretrained(embed_VE)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, ranks) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("inv_freq_R", _rope_frequencies(config), persistent=False)

    def pack(self) -> None:
        """Lay the weights out for this CPU, if it has tiles. Those of lm_head stay as they are
        too, if the embedding is tied to them."""
        for module in self.modules():
            if isinstance(module, Linear):
                is_tied = self.config.tie_word_embeddings and module is self.lm_head
                module.pack(keep=is_tied)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of packed tokens, after the final norm."""
        x_TE, residual_TE = self.ranks.embed(token_ids_T, self.embed.weight), None
        cos_TR, sin_TR = self.rope(positions_T)
        for layer in self.layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_TR, sin_TR, attend)
        return self.norm(x_TE, residual_TE)[0]

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V] for the rows that need them, the same on all ranks."""
        return self.ranks.join_columns(self._own_logits(hidden_SE), self.vocab_size)

    def _own_logits(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V] for this rank's part of the vocabulary.

        A logit near 20 moves in steps of 1/8 in bfloat16, which ties the best tokens with
        each other. Where sums come rounded, those that matter most are computed anew.
        """
        if self.lm_head.packed is not None:  # sums as they are
            return self.lm_head(hidden_SE, torch.float32)
        rounded_SV = self.lm_head(hidden_SE)
        logits_SV = rounded_SV.float()
        if hidden_SE.dtype != torch.float32:
            best_SX = top_ids(rounded_SV, min(NUM_EXACT_LOGITS, logits_SV.shape[1]))
            weight_SXE = self.lm_head.weight[best_SX].float()
            exact_SX = (weight_SXE @ hidden_SE.float().unsqueeze(2)).squeeze(2)
            logits_SV.scatter_(1, best_SX, exact_SX)
        return logits_SV

    def rope(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles: float32 [T, R], R = D / 2."""
        angles_TR = positions_T.float().unsqueeze(1) * self.inv_freq_R
        return angles_TR.cos(), angles_TR.sin()


def _rope_frequencies(config: ModelConfig) -> Tensor:
    """float32 [R]: the angle between neighbouring positions. On the CPU, while the rest of a
    decoder is still on the meta device: these are not in the checkpoint."""
    exponent_R = torch.arange(0, config.head_dim, 2, device="cpu").float()
    inv_freq_R = 1.0 / config.rope_theta ** (exponent_R / config.head_dim)
    if config.rope_divisors is not None:
        inv_freq_R = inv_freq_R / torch.tensor(config.rope_divisors, device="cpu")
    return inv_freq_R
