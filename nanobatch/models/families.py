"""The families of models: what sets each one apart from Llama, as one table.

A new family that the decoder can compute is an entry of FAMILIES, and its tensors' names in
models/weight_names.py where they differ.

Always holds: a field of config.json that would change the numbers and is not supported is
refused, never ignored.

Source: the configuration classes of Hugging Face transformers, for the defaults too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nanobatch.utils.checks import check_bool, check_choice, check_float, check_int

MAX_COUNT = 2**31 - 1
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # config.json's name: ours


# ------------------------------------------------------------------------ reading one field


def count(raw: Mapping, name: str, default: int | None = None) -> int:
    """A field that counts something: an int >= 1, or the default if it is missing."""
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{name} is missing")
        return default
    check_int(name, value, 1, MAX_COUNT)
    return value


def flag(raw: Mapping, name: str, default: bool = False) -> bool:
    """A field that is true or false, or the default if it is missing."""
    value = raw.get(name, default)
    check_bool(name, value)
    return value


# ------------------------------------------------- fields of ModelConfig that a family reads


def _granite(raw: Mapping) -> dict:
    names = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
    fields = {name: raw.get(name, 1.0) for name in names.split()}
    for name, value in fields.items():
        check_float(name, value, 0.0, open_low=True)
    return {name: float(value) for name, value in fields.items()}


def _gemma2(raw: Mapping) -> dict:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma3(raw) | {name: raw.get(name, cap) for name, cap in caps.items()}


def _gemma3(raw: Mapping) -> dict:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is set; only causal attention works")
    scalar = raw.get("query_pre_attn_scalar", 256)
    check_float("query_pre_attn_scalar", scalar, 0.0, open_low=True)
    return {
        "embedding_multiplier": count(raw, "hidden_size") ** 0.5,
        "attention_multiplier": float(scalar) ** -0.5,
        "attn_logit_softcapping": raw.get("attn_logit_softcapping"),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
    }


def _starcoder2(raw: Mapping) -> dict:
    return dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), flag(raw, "use_bias", True))


def _mixtral(raw: Mapping) -> dict:
    return {
        "num_experts": count(raw, "num_local_experts", 8),
        "num_experts_per_tok": count(raw, "num_experts_per_tok", 2),
        "moe_intermediate_size": count(raw, "intermediate_size"),
    }


def _qwen3_moe(raw: Mapping) -> dict:
    num_layers, step = count(raw, "num_hidden_layers"), count(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers is {dense!r}; it must be a list of layers")
    for layer in dense:
        check_int("mlp_only_layers", layer, 0)
    not_sparse = {i for i in range(num_layers) if (i + 1) % step != 0}
    name = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    return {
        "num_experts": count(raw, name, 128),
        "num_experts_per_tok": count(raw, "num_experts_per_tok", 8),
        "moe_intermediate_size": count(raw, "moe_intermediate_size", 768),
        "norm_topk_prob": flag(raw, "norm_topk_prob"),
        "dense_layers": frozenset(not_sparse | set(dense)),
    }


# ------------------------------------------------------------------------------- the families


@dataclass(frozen=True)
class Family:
    """How config.json is read for one architecture. The defaults are Llama's.

    Attributes:
        summary: what README.md says about it.
        fields: fields of ModelConfig that all its models share.
        read: from config.json, the fields of ModelConfig that Llama does not have.
        head_dim, num_kv_heads, max_position, eps, tied, eos, rope_theta: used where config.json
            says nothing (tied is tie_word_embeddings, eos is eos_token_id); head_dim None is
            hidden_size / num_attention_heads, num_kv_heads None is num_attention_heads.
        local_rope_theta: the same, for layers with a sliding window; None: one RoPE for all.
        original_context: default of original_max_position_embeddings; None: the whole context.
        partial_rotary: RoPE may rotate a part of each head (partial_rotary_factor).
        eps_name, activation_name: what config.json calls the norms' eps and the activation.
        activation: the one that is supported.
        window: whether sliding_window counts: "never", "always", or "if_used", that is, if
            use_sliding_window is set.
        default_window: sliding_window where config.json says nothing.
        full_every: default of sliding_window_pattern: with n, every n-th layer has no window;
            None: not read.
        full_first: default of max_window_layers: the first n layers have no window; None: not
            read.
    """

    summary: str
    fields: Mapping = field(default_factory=dict)
    read: Callable[[Mapping], dict] = lambda raw: {}
    head_dim: int | None = None
    num_kv_heads: int | None = None
    max_position: int = 2048
    eps: float = 1e-6
    tied: bool = False
    eos: int | None = 2
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    original_context: int | None = None
    partial_rotary: bool = False
    eps_name: str = "rms_norm_eps"
    activation_name: str = "hidden_act"
    activation: str = "silu"
    window: str = "never"
    default_window: int | None = None
    full_every: int | None = None
    full_first: int | None = None


LLAMA, MISTRAL, PHI3 = "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM"
QWEN2, QWEN3, QWEN3_MOE = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
MIXTRAL, STARCODER2 = "MixtralForCausalLM", "Starcoder2ForCausalLM"
_QWEN = {
    "window": "if_used", "default_window": 4096, "num_kv_heads": 32, "max_position": 2**15,
    "eos": None,
}  # fmt: skip
_GELU = {"activation": "gelu_pytorch_tanh", "tied": True, "window": "always"}
_GEMMA = _GELU | {
    "activation_name": "hidden_activation", "head_dim": 256, "num_kv_heads": 4,
    "default_window": 4096, "eos": 1,
}  # fmt: skip
_GEMMA_NORMS = {"norm_offset": 1.0, "post_norm": True}

FAMILIES = {
    LLAMA: Family("Llama 2 and 3 (RoPE scaling of 3.1), SmolLM2"),
    MISTRAL: Family(
        "sliding window", window="always", default_window=4096, num_kv_heads=8,
        max_position=2**17,
    ),
    QWEN2: Family(  # its biases are fixed, whatever attention_bias says
        "bias of q, k, v", {"qkv_bias": True, "o_bias": False}, **_QWEN, full_first=28
    ),
    QWEN3: Family(
        "norm of each head of q and k", {"qk_norm": "each_head"}, **_QWEN, full_first=28,
        head_dim=128,
    ),
    PHI3: Family(
        "RoPE of a part of each head (Phi-4-mini); longrope (the 128k variants)",
        window="always", partial_rotary=True, max_position=4096,
        original_context=4096, eps=1e-5, eos=32000,
    ),
    "Olmo2ForCausalLM": Family(
        "norms after attention and MLP, and of all of q and k",
        {"pre_norm": False, "post_norm": True, "qk_norm": "all_heads"}, eps=1e-5, eos=50279,
    ),
    "GraniteForCausalLM": Family(
        "multipliers of embeddings, scores, residuals and logits", read=_granite
    ),
    GEMMA2: Family(
        "norms before and after, soft caps, alternating windows",
        _GEMMA_NORMS, _gemma2, **_GEMMA, full_every=2, max_position=8192,
    ),
    GEMMA3: Family(
        "text models: two RoPE bases, five windows to one full layer",
        _GEMMA_NORMS | {"qk_norm": "each_head"}, _gemma3, **_GEMMA, full_every=6,
        max_position=2**17, rope_theta=1e6, local_rope_theta=10000.0,
    ),
    STARCODER2: Family(
        "LayerNorm, a plain MLP with GELU, biases",
        {"norm": "layer", "gated_mlp": False}, _starcoder2, **_GELU, eps_name="norm_epsilon",
        eps=1e-5, num_kv_heads=2, max_position=4096, eos=50256,
    ),
    MIXTRAL: Family(
        "mixture of experts", read=_mixtral, window="always", rope_theta=1e6, num_kv_heads=8,
        max_position=2**17, eps=1e-5,
    ),
    QWEN3_MOE: Family(
        "mixture of many small experts", {"qk_norm": "each_head"}, _qwen3_moe,
        **_QWEN | {"num_kv_heads": 4},
    ),
}  # fmt: skip
ARCHITECTURES = {name: family.summary for name, family in FAMILIES.items()}


def family_fields(raw: Mapping, family: Family) -> dict:
    """The fields of ModelConfig that this family has and Llama has not.

    Args:
        raw: the parsed config.json.

    Raises:
        ValueError: a field is missing, out of range or not supported.
    """
    name, activation = family.activation_name, family.activation
    check_choice(name, activation if raw.get(name) is None else raw[name], (activation,))
    return {"activation": ACTIVATIONS[activation], **family.fields, **family.read(raw)}
