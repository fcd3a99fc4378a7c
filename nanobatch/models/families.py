"""The families of models: their names, and what each changes in a ModelConfig.

Always holds: a field that would change the numbers and is not supported is refused, never
ignored.

Source: the configuration classes of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanobatch.utils.checks import check_bool, check_choice, check_float, check_int

LLAMA, MISTRAL, QWEN2, QWEN3 = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
PHI3, OLMO2, GRANITE, STARCODER2 = (
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "Starcoder2ForCausalLM",
)
GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
MIXTRAL, QWEN3_MOE = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
# What README.md says of each, in its order.
ARCHITECTURES = {
    LLAMA: "Llama 2 and 3 (RoPE scaling of 3.1), SmolLM2",
    MISTRAL: "sliding window",
    QWEN2: "bias of q, k, v",
    QWEN3: "norm of each head of q and k",
    PHI3: "RoPE of a part of each head (Phi-4-mini); longrope (the 128k variants)",
    OLMO2: "norms after attention and MLP, and of all of q and k",
    GRANITE: "multipliers of embeddings, scores, residuals and logits",
    GEMMA2: "norms before and after, soft caps, alternating windows",
    GEMMA3: "text models: two RoPE bases, five windows to one full layer",
    STARCODER2: "LayerNorm, a plain MLP with GELU, biases",
    MIXTRAL: "mixture of experts",
    QWEN3_MOE: "mixture of many small experts",
}
TIED = (GEMMA2, GEMMA3, STARCODER2)  # unless config.json says otherwise
HEAD_DIMS = {QWEN3: 128, GEMMA2: 256, GEMMA3: 256}  # where config.json says nothing
WINDOWS = {
    MISTRAL: 4096, PHI3: None, STARCODER2: None, MIXTRAL: None, GEMMA2: 4096, GEMMA3: 4096
}  # fmt: skip
MAX_COUNT = 2**31 - 1
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def family_fields(raw: Mapping, architecture: str, rope: Mapping) -> dict:
    """The fields of ModelConfig that this family has and Llama has not.

    Args:
        raw: the parsed config.json. rope: all of its RoPE, as hf_config reads it.

    Raises:
        ValueError: a field is missing or absurd.
    """
    gelu = architecture in (GEMMA2, GEMMA3, STARCODER2)
    key = "hidden_activation" if architecture in (GEMMA2, GEMMA3) else "hidden_act"
    wanted = "gelu_pytorch_tanh" if gelu else "silu"
    check_choice(key, wanted if raw.get(key) is None else raw[key], (wanted,))
    fields = {"activation": ACTIVATIONS[wanted]}
    if architecture in _FIELDS_OF:
        fields |= _FIELDS_OF[architecture](raw, rope)
    return fields


def _qwen3(raw: Mapping, rope: Mapping) -> dict:
    return {"qk_norm": "each_head"}


def _olmo2(raw: Mapping, rope: Mapping) -> dict:
    return {"pre_norm": False, "post_norm": True, "qk_norm": "all_heads"}


def _granite(raw: Mapping, rope: Mapping) -> dict:
    names = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
    fields = {name: raw.get(name, 1.0) for name in names.split()}
    for name, value in fields.items():
        check_float(name, value, 0.0, open_low=True)
    return {name: float(value) for name, value in fields.items()}


def _gemma(raw: Mapping, rope: Mapping) -> dict:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is set; this is a decoder")
    scalar = raw.get("query_pre_attn_scalar", 256)
    check_float("query_pre_attn_scalar", scalar, 0.0, open_low=True)
    return {
        "norm_offset": 1.0,
        "post_norm": True,
        "embedding_multiplier": count(raw, "hidden_size") ** 0.5,
        "attention_multiplier": float(scalar) ** -0.5,
    }


def _gemma2(raw: Mapping, rope: Mapping) -> dict:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(raw, rope) | {name: raw.get(name, cap) for name, cap in caps.items()}


def _gemma3(raw: Mapping, rope: Mapping) -> dict:
    caps = {
        name: raw.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    local = {"local_rope_theta": float(rope["local_rope_theta"])}
    return _gemma(raw, rope) | caps | local | {"qk_norm": "each_head"}


def _starcoder2(raw: Mapping, rope: Mapping) -> dict:
    bias = flag(raw, "use_bias", True)
    return {
        "norm": "layer", "gated_mlp": False, "qkv_bias": bias, "o_bias": bias, "mlp_bias": bias,
    }  # fmt: skip


def _mixtral(raw: Mapping, rope: Mapping) -> dict:
    return {
        "num_experts": count(raw, "num_local_experts", 8),
        "num_experts_per_tok": count(raw, "num_experts_per_tok", 2),
        "moe_intermediate_size": count(raw, "intermediate_size"),
    }


def _qwen3_moe(raw: Mapping, rope: Mapping) -> dict:
    num_layers, step = count(raw, "num_hidden_layers"), count(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers is {dense!r}; it must be a list of layers")
    for layer in dense:
        check_int("mlp_only_layers", layer, 0)
    not_sparse = {i for i in range(num_layers) if (i + 1) % step != 0}
    name = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    return _qwen3(raw, rope) | {
        "num_experts": count(raw, name, 128),
        "num_experts_per_tok": count(raw, "num_experts_per_tok", 8),
        "moe_intermediate_size": count(raw, "moe_intermediate_size", 768),
        "norm_topk_prob": flag(raw, "norm_topk_prob"),
        "dense_layers": frozenset(not_sparse | set(dense)),
    }


_FIELDS_OF = {
    QWEN3: _qwen3,
    OLMO2: _olmo2,
    GRANITE: _granite,
    GEMMA2: _gemma2,
    GEMMA3: _gemma3,
    STARCODER2: _starcoder2,
    MIXTRAL: _mixtral,
    QWEN3_MOE: _qwen3_moe,
}


# ------------------------------------------------------------------------ reading one field


def count(raw: Mapping, name: str, default: int | None = None) -> int:
    """A field that counts something: an int >= 1, or the default where it is missing."""
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{name} is missing")
        return default
    check_int(name, value, 1, MAX_COUNT)
    return value


def flag(raw: Mapping, name: str, default: bool = False) -> bool:
    """A field that is true or false, or the default where it is missing."""
    value = raw.get(name, default)
    check_bool(name, value)
    return value
