"""What other families have in place of a part of the Llama decoder.

    LayerNorm           StarCoder2
    no norm             OLMo-2: before attention and MLP
    norms after         Gemma, OLMo-2: of what attention and MLP give, before it is added
    norm of all heads   OLMo-2: of a token's queries together, of its keys together
    GELU                Gemma: in place of SiLU; StarCoder2: of one product, without a gate
    experts             Mixtral, Qwen3-MoE (models/experts.py)
    multipliers         Granite, Gemma: of embeddings; Granite: of logits
    soft cap            Gemma 2: c * tanh(logit / c)
    two RoPEs           Gemma 3: layers with a window have other frequencies

make_decoder() looks at the config and exchanges those parts. Which family has which is data in
ModelConfig (models/families.py).

Always holds: a config without any of them gets a plain Decoder, which runs none of this code.

Source: Hugging Face's modeling files, which are the reference in the tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nanobatch.kernels.ops import gelu_mul, layer_norm
from nanobatch.models.config import ModelConfig
from nanobatch.models.decoder import (
    MLP,
    Attend,
    CosSin,
    Decoder,
    DecoderLayer,
    Linear,
    RMSNorm,
)
from nanobatch.models.experts import Experts
from nanobatch.models.rope import Rope


def make_decoder(config: ModelConfig) -> Decoder:
    """The decoder of a family: a plain one if the config asks for nothing else."""
    is_plain = (
        (config.norm, config.pre_norm, config.post_norm) == ("rms", True, False)
        and config.qk_norm != "all_heads"
        and (config.activation, config.gated_mlp) == ("silu", True)
        and config.num_experts == 0
        and config.embedding_multiplier == config.logits_scaling == 1
        and config.final_logit_softcapping is None
        and config.local_rope_theta is None
    )
    return Decoder(config) if is_plain else VariantDecoder(config)


class VariantDecoder(Decoder):
    """A decoder with the parts that its config asks for."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm = make_norm(config)
        self.local_rope = None
        if config.local_rope_theta is not None:
            self.local_rope = Rope(config.local_rope_theta, config.head_dim)
        if config.embedding_multiplier != 1:
            self.embed = ScaledEmbedding(self.embed.weight, config.embedding_multiplier)

    def make_layer(self, layer: int) -> DecoderLayer:
        """A layer by its number, from 0."""
        config = self.config
        made = (PostNormLayer if config.post_norm else DecoderLayer)(config, layer)
        made.input_norm, made.mlp_norm = NoNorm(), NoNorm()
        if config.pre_norm:
            made.input_norm, made.mlp_norm = make_norm(config), make_norm(config)
        if config.qk_norm == "all_heads":
            H, K, D, eps = *made.heads[:2], config.head_dim, config.rms_norm_eps
            made.q_norm, made.k_norm = AllHeadsNorm(H * D, eps), AllHeadsNorm(K * D, eps)
        if config.has_experts(layer):
            made.mlp = Experts(config)
        elif (config.activation, config.gated_mlp) != ("silu", True):
            made.mlp = VariantMLP(config)
        return made

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E]; layers with a window may have another RoPE."""
        x_TE, residual_TE = self.embed(token_ids_T), None
        rope = local_rope = self.rope(positions_T)
        if self.local_rope is not None:
            local_rope = self.local_rope(positions_T)
        for layer in self.layers:
            is_local = layer.attention_args.sliding_window is not None
            layer_rope = local_rope if is_local else rope
            x_TE, residual_TE = layer(x_TE, residual_TE, layer_rope, attend)
        return self.norm(x_TE, residual_TE)[0]

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """float32 [S, V], scaled and capped."""
        logits_SV = super().logits(hidden_SE)
        if self.config.logits_scaling != 1:
            logits_SV = logits_SV / self.config.logits_scaling
        cap = self.config.final_logit_softcapping
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


class PostNormLayer(DecoderLayer):
    """A layer that norms what attention and MLP give, before it is added."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.attention_post_norm = make_norm(config)
        self.mlp_post_norm = make_norm(config)

    def forward(
        self, x_TE: Tensor, residual_TE: Tensor | None, rope: CosSin, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        x_TE, residual_TE = super().forward(x_TE, residual_TE, rope, attend)
        return self.mlp_post_norm(x_TE)[0], residual_TE

    def attention(self, x_TE: Tensor, rope: CosSin, attend: Attend) -> Tensor:
        return self.attention_post_norm(super().attention(x_TE, rope, attend))[0]


class LayerNorm(nn.Module):
    """As RMSNorm, but rows are first shifted to mean 0, and a bias is added last."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return layer_norm(x, self.weight, self.bias, self.eps, residual)


class NoNorm(nn.Module):
    """In place of a norm: only adds the residual."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else x + residual
        return total.to(x.dtype), total


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all heads of a token together."""

    def forward(self, x_THD: Tensor) -> tuple[Tensor, Tensor]:
        normed_TX, total_TX = super().forward(x_THD.flatten(1))
        return normed_TX.view(x_THD.shape), total_TX


class VariantMLP(MLP):
    """An MLP with GELU (by tanh), or without a gate: then its first product is up alone."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.is_gated, self.activation = config.gated_mlp, config.activation
        E, F = config.hidden_size, config.intermediate_size
        self.gate_up = Linear(E, 2 * F if self.is_gated else F, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        x_TF = self.gate_up(x_TE)
        if self.is_gated:
            x_TF = gelu_mul(x_TF)
        else:
            is_silu = self.activation == "silu"
            x_TF = F.silu(x_TF) if is_silu else F.gelu(x_TF, approximate="tanh")
        return self.down(x_TF)


class ScaledEmbedding(nn.Embedding):
    """An embedding times a multiplier, in the model's own format, as Hugging Face has it."""

    def __init__(self, weight: nn.Parameter, multiplier: float):
        super().__init__(*weight.shape, _weight=weight, _freeze=True)
        self.multiplier = multiplier

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TE = super().forward(token_ids_T)
        return x_TE * x_TE.new_full((), self.multiplier)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """Over a token's hidden state."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps)
