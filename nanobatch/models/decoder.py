"""The Llama decoder: token ids in, hidden states and logits out.

    token ids -> embedding -> [ norm -> qkv -> attend -> o -> + -> norm -> MLP -> + ] x layers
              -> norm -> hidden states -> lm_head (only the tokens that sample) -> logits

Other families are this decoder with some modules exchanged (models/variants.py).

The decoder knows no cache and no batch layout. Each layer hands its queries, keys and values
to `attend(layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, args)`, which rotates them, stores keys
and values, and attends: over a paged cache (attention.PagedAttend) or over a padded one
(static_batching.PaddedAttend). Between the matrix products stand the backend's operations
(kernels/ops.py).

Always holds: a token's hidden state depends on its own sequence alone (invariant 12).

Taught in notebooks/01_why_decoding_is_slow.ipynb. Source: Llama (Touvron et al., 2023), and
Hugging Face's modeling files, which are the reference in the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanobatch.kernels.ops import REFERENCE, AttentionArgs, Ops
from nanobatch.models.config import ModelConfig
from nanobatch.models.rope import Rope

Attend = Callable[..., Tensor]
CosSin = tuple[Tensor, Tensor]  # float32 [T, R] each (models/rope.py)
NUM_EXACT_LOGITS = 32


class RMSNorm(nn.Module):
    """Adds the residual, if any, and scales each row: see Ops.rms_norm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.ops: Ops = REFERENCE
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed rows, and the sum before the norm in float32: the next residual."""
        return self.ops.rms_norm(x, self.weight, self.eps, residual)


class Linear(nn.Linear):
    """A matrix product. A backend may replace it by its own (Ops.prepack)."""

    def reset_parameters(self) -> None:
        """Nothing: the numbers come from a checkpoint."""


class GateUp(Linear):
    """The MLP's first product, then SiLU of its first half times the second: [T, F / 2]."""

    def __init__(self, in_size: int, out_size: int, bias: bool):
        super().__init__(in_size, out_size, bias)
        self.ops: Ops = REFERENCE

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.ops.silu_mul(super().forward(x_TE))


class LMHead(Linear):
    """The last product, from hidden states to logits.

    A logit near 20 moves in steps of 1/8 in bfloat16, which ties the best tokens with each
    other. So the largest logits are computed again in float32.
    """

    def __init__(self, in_size: int, out_size: int):
        super().__init__(in_size, out_size, bias=False)
        self.ops: Ops = REFERENCE

    def forward(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V]."""
        rounded_SV = super().forward(hidden_SE)
        logits_SV = rounded_SV.float()
        if hidden_SE.dtype != torch.float32:
            best_SX = self.ops.top_ids(rounded_SV, min(NUM_EXACT_LOGITS, logits_SV.shape[1]))
            weight_SXE = self.weight[best_SX].float()
            exact_SX = (weight_SXE @ hidden_SE.float().unsqueeze(2)).squeeze(2)
            logits_SV.scatter_(1, best_SX, exact_SX)
        return logits_SV


class MLP(nn.Module):
    """Gate and up are one product; down brings their SwiGLU back to size E."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.gate_up = GateUp(E, 2 * F, bias=config.mlp_bias)
        self.down = Linear(F, E, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.down(self.gate_up(x_TE))


class DecoderLayer(nn.Module):
    """Attention and MLP. The projections to queries, keys and values are one product."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_heads, config.num_kv_heads
        self.layer, self.head_dim, self.heads = layer, D, [H, K, K]
        self.attention_args = AttentionArgs(
            config.window(layer), config.attention_scale, config.attn_logit_softcapping
        )
        self.input_norm = RMSNorm(E, config.rms_norm_eps)
        self.qkv = Linear(E, (H + K + K) * D, bias=config.qkv_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:  # Qwen3
            self.q_norm = RMSNorm(D, config.rms_norm_eps)
            self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.o = Linear(H * D, E, bias=config.o_bias)
        self.mlp_norm = RMSNorm(E, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_TE: Tensor, residual_TE: Tensor | None, rope: CosSin, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [T, E], not yet added, and the residual to add it to."""
        x_TE, residual_TE = self.input_norm(x_TE, residual_TE)
        x_TE = self.attention(x_TE, rope, attend)
        x_TE, residual_TE = self.mlp_norm(x_TE, residual_TE)
        return self.mlp(x_TE), residual_TE

    def attention(self, x_TE: Tensor, rope: CosSin, attend: Attend) -> Tensor:
        """From normed hidden states to what the layer adds to them, both [T, E]."""
        heads_TXD = self.qkv(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = heads_TXD.split(self.heads, dim=1)
        if self.q_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD)[0], self.k_norm(k_TKD)[0]
        out_THD = attend(self.layer, q_THD, k_TKD, v_TKD, *rope, self.attention_args)
        return self.o(out_THD.flatten(1))


class Decoder(nn.Module):
    """The whole model. Built on the meta device; the loader brings the weights.

    Always holds: its modules may be exchanged for others with the same inputs and outputs, as
    families (variants.py), backends (Ops.prepack) and ranks (extensions/tensor_parallel.py) do.
    """

    num_ranks = 1  # if more: this is the shard of one (extensions/tensor_parallel.py)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.layout: str | None = None  # the backend that laid the weights out
        embed_VE = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding.from_pretrained(embed_VE)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        self.rope = Rope(
            config.rope_theta, config.head_dim, config.partial_rotary_dim,
            config.rope_divisors, config.rope_attention_factor,
        )  # fmt: skip

    def make_layer(self, layer: int) -> DecoderLayer:
        """A layer by its number, from 0."""
        return DecoderLayer(self.config, layer)

    def set_ops(self, ops: Ops) -> None:
        """Compute by a backend's operations from now on; at first they are torch's.

        Raises:
            ValueError: another backend has laid the weights out, for good.
        """
        if self.layout not in (None, ops.name):
            raise ValueError(
                f"attention_backend is {ops.name!r}, and the model's weights were laid out for "
                f"{self.layout!r}; load it again"
            )
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = ops
        ops.prepack(self)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of packed tokens, after the final norm."""
        x_TE, residual_TE = self.embed(token_ids_T), None
        rope = self.rope(positions_T)
        for layer in self.layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, rope, attend)
        return self.norm(x_TE, residual_TE)[0]

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V] for the tokens that need them."""
        return self.lm_head(hidden_SE)
