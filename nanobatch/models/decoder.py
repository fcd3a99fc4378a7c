"""One decoder for the Llama family and its kin; what sets them apart is data in ModelConfig.

    token ids -> embedding -> [ norm -> qkv -> attend -> o -> + -> norm -> MLP -> + ] x layers
              -> norm -> hidden states -> lm_head (only the rows that sample) -> logits

Some families norm what attention and MLP give, before it is added, instead of what they are
given, or both. Some have experts for an MLP (models/experts.py).

The decoder knows no cache and no batch layout. Each layer hands its queries, keys and values
to `attend(layer, q_THD, k_TKD, v_TKD, cos_TR, sin_TR, args)`, which rotates, remembers and
attends: over a paged cache (attention.PagedAttend) or over a padded one
(static_batching.PaddedAttend).

Taught in notebooks/01_why_decoding_is_slow.ipynb. Source: Llama (Touvron et al., 2023), and
Hugging Face's modeling files, which are the oracle in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nanobatch.kernels.ops import REFERENCE, Ops, gelu_mul, layer_norm
from nanobatch.models.config import ModelConfig
from nanobatch.models.experts import Experts

Attend = Callable[..., Tensor]
NUM_EXACT_LOGITS = 32


class AttentionArgs(NamedTuple):
    """What sets one layer's attention apart: see attention.paged_attention."""

    sliding_window: int | None
    scale: float
    softcap: float | None = None


class RMSNorm(nn.Module):
    """Its weight, and rms_norm with the model's eps."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.ops: Ops = REFERENCE
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.ops.rms_norm(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """As RMSNorm, but rows are moved to mean 0 first, and to a bias last."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return layer_norm(x, self.weight, self.bias, self.eps, residual)


class NoNorm(nn.Module):
    """Where a family has no norm: the sum alone."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else x + residual
        return total.to(x.dtype), total


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Over a token's hidden state."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)


class Linear(nn.Linear):
    """A matrix product. A backend may swap it for a product of its own (Ops.prepack)."""

    def reset_parameters(self) -> None:
        """Nothing: the numbers come from a checkpoint."""


class GateUp(Linear):
    """The MLP's first product, and SiLU of its first half times the second: [T, F / 2]."""

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
    """Up, activation, down; gated: times another product of the same input."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.is_gated, self.activation = config.gated_mlp, config.activation
        kind = GateUp if self.is_gated and self.activation == "silu" else Linear
        self.gate_up = kind(E, (2 if self.is_gated else 1) * F, bias=config.mlp_bias)
        self.down = Linear(F, E, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        x_TF = self.gate_up(x_TE)
        if self.activation == "gelu_tanh":
            x_TF = gelu_mul(x_TF) if self.is_gated else F.gelu(x_TF, approximate="tanh")
        return self.down(x_TF)


class DecoderLayer(nn.Module):
    """Attention and MLP. The three (two) input projections are one matrix product."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_heads, config.num_kv_heads
        self.layer, self.head_dim = layer, D
        self.is_local = config.window(layer) is not None
        self.heads = [H, K, K]
        self.attention_args = AttentionArgs(
            config.window(layer), config.attention_scale, config.attn_logit_softcapping
        )
        self.input_norm = make_norm(config) if config.pre_norm else NoNorm()
        self.qkv = Linear(E, (H + K + K) * D, bias=config.qkv_bias)
        self.norms_all_heads = config.qk_norm == "all_heads"
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            q_size, k_size = (H * D, K * D) if self.norms_all_heads else (D, D)
            self.q_norm = RMSNorm(q_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(k_size, config.rms_norm_eps)
        self.o = Linear(H * D, E, bias=config.o_bias)
        self.attention_post_norm = make_norm(config) if config.post_norm else None
        self.mlp_norm = make_norm(config) if config.pre_norm else NoNorm()
        kind = Experts if config.has_experts(layer) else MLP
        self.mlp = kind(config)
        self.mlp_post_norm = make_norm(config) if config.post_norm else None

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
            q_THD, k_TKD = self._normed(self.q_norm, q_THD), self._normed(self.k_norm, k_TKD)
        qkv = (q_THD, k_TKD, v_TKD)
        out_THD = attend(self.layer, *qkv, cos_TR, sin_TR, self.attention_args)
        x_TE = self.o(out_THD.flatten(1))
        if self.attention_post_norm is not None:
            x_TE, _ = self.attention_post_norm(x_TE)
        x_TE, residual_TE = self.mlp_norm(x_TE, residual_TE)
        x_TE = self.mlp(x_TE)
        if self.mlp_post_norm is not None:
            x_TE, _ = self.mlp_post_norm(x_TE)
        return x_TE, residual_TE

    def _normed(self, norm: RMSNorm, x_THD: Tensor) -> Tensor:
        if not self.norms_all_heads:
            return norm(x_THD)[0]
        return norm(x_THD.flatten(1))[0].view(x_THD.shape)


class Decoder(nn.Module):
    """The whole model. Built on the meta device; the loader brings the weights."""

    num_ranks = 1  # of several this is one's shard (extensions/tensor_parallel.py)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.layout: str | None = None  # the backend that laid the weights out
        embed_VE = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding.from_pretrained(embed_VE)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = make_norm(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        self.register_buffer("inv_freq_R", rope_frequencies(config), persistent=False)
        local = None if config.local_rope_theta is None else local_rope_frequencies(config)
        self.register_buffer("local_inv_freq_R", local, persistent=False)

    def set_ops(self, ops: Ops) -> None:
        """Compute by a backend's operations from now on; at first they are torch's.

        Raises:
            ValueError: another backend has laid the weights out, for good.
        """
        if self.layout not in (None, ops.name):
            raise ValueError(
                f"attention_backend is {ops.name!r}, and the model's weights were laid out for "
                f"{self.layout!r}; load it anew"
            )
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = ops
        ops.prepack(self)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of packed tokens, after the final norm."""
        x_TE, residual_TE = self.embedded(token_ids_T), None
        rope = local_rope = self.rope(positions_T)
        if self.local_inv_freq_R is not None:
            local_rope = self.rope(positions_T, self.local_inv_freq_R)
        for layer in self.layers:
            cos_TR, sin_TR = local_rope if layer.is_local else rope
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_TR, sin_TR, attend)
        return self.norm(x_TE, residual_TE)[0]

    def embedded(self, token_ids_T: Tensor) -> Tensor:
        """[T, E], times the multiplier in the model's own format, as Hugging Face has it."""
        x_TE = self.embed(token_ids_T)
        multiplier = self.config.embedding_multiplier
        return x_TE if multiplier == 1 else x_TE * torch.tensor(multiplier, dtype=x_TE.dtype)

    def rope(
        self, positions_T: Tensor, inv_freq_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles: float32 [T, R], R = D / 2.

        inv_freq_R: of the layers with a window; None: the stretched ones of all others.
        """
        is_stretched = inv_freq_R is None
        inv_freq_R = self.inv_freq_R if is_stretched else inv_freq_R
        angles_TR = positions_T.float().unsqueeze(1) * inv_freq_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        factor = self.config.rope_attention_factor
        if is_stretched and factor != 1:
            cos_TR[:, : self.config.rotary_dim // 2] *= factor  # the others keep their 1
            sin_TR *= factor
        return cos_TR, sin_TR

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V] for the rows that need them."""
        logits_SV = self.lm_head(hidden_SE)
        if self.config.logits_scaling != 1:
            logits_SV = logits_SV / self.config.logits_scaling
        cap = self.config.final_logit_softcapping
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """float32 [R]: the angle between neighbouring positions, 0 for pairs that are not turned.
    On the CPU, while the rest of a decoder is still on the meta device: these are not in the
    checkpoint."""
    dim = config.rotary_dim
    inv_freq_R = _frequencies(config.rope_theta, dim)
    if config.rope_divisors is not None:
        inv_freq_R = inv_freq_R / torch.tensor(config.rope_divisors, device="cpu")
    return F.pad(inv_freq_R, (0, (config.head_dim - dim) // 2))


def local_rope_frequencies(config: ModelConfig) -> Tensor:
    """float32 [R], of the layers with a window."""
    return _frequencies(config.local_rope_theta, config.head_dim)


def _frequencies(theta: float, dim: int) -> Tensor:
    exponent_R = torch.arange(0, dim, 2, device="cpu").float()
    return 1.0 / theta ** (exponent_R / dim)
