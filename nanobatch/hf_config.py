"""config.json in our words: where the differences between model families end.

Hugging Face's config.json has a hundred fields, and which of them count depends on the model
class. Here they become a ModelConfig, in which nothing has to be looked up twice. A field that
would change the numbers and is not supported is refused, never ignored.

Always holds: a field that is missing, of the wrong type or out of range is a ValueError that
names it and its value.

Source: the configuration classes of Hugging Face transformers, versions 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nanobatch.config import (
    MAX_LAYERS,
    ModelConfig,
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_token_ids,
)

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
MAX_COUNT = 2**31 - 1
ROPE_TYPES = ("default", "llama3")
LAYER_TYPES = ("full_attention", "sliding_attention")


def model_config(raw: dict, generation: dict) -> ModelConfig:
    """Translate config.json.

    Args:
        raw: the parsed config.json.
        generation: the parsed generation_config.json, whose end-of-text tokens count; or {}.

    Raises:
        ValueError: the architecture is not supported, or a field is missing or absurd.
    """
    architectures = raw.get("architectures")
    architecture = (
        architectures[0] if isinstance(architectures, list) and architectures else None
    )
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture} is not supported; these are: "
            + ", ".join(ARCHITECTURES)
        )
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; quantized safetensors are not supported")
    check_choice("hidden_act", raw.get("hidden_act", "silu"), ("silu",))
    hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size < num_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}; it must be <= hidden_size, {hidden_size}"
        )
    head_dim = count(
        raw, "head_dim", 128 if architecture == QWEN3 else hidden_size // num_heads
    )
    num_layers = count(raw, "num_hidden_layers")
    check_int("num_hidden_layers", num_layers, 1, MAX_LAYERS)
    attention_bias = _flag(raw, "attention_bias")
    rope = _rope(raw)
    theta = rope["rope_theta"]
    check_float("rope_theta", theta, 0.0, open_low=True)
    rms_norm_eps = raw.get("rms_norm_eps", 1e-6)
    check_float("rms_norm_eps", rms_norm_eps, 0.0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=count(raw, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=count(raw, "max_position_embeddings", 2048),
        rms_norm_eps=float(rms_norm_eps),
        rope_theta=float(theta),
        rope_divisors=_rope_divisors(rope, theta, head_dim),
        qkv_bias=attention_bias or architecture == QWEN2,
        o_bias=attention_bias and architecture != QWEN2,
        mlp_bias=_flag(raw, "mlp_bias"),
        qk_norm=architecture == QWEN3,
        sliding_window=_sliding_window(raw, architecture),
        full_attention_layers=_full_attention_layers(raw, architecture, num_layers),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(raw, generation),
    )


def count(raw: Mapping, name: str, default: int | None = None) -> int:
    """A field that counts something: an int >= 1, or the default where it is missing."""
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{name} is missing")
        return default
    check_int(name, value, 1, MAX_COUNT)
    return value


def _flag(raw: dict, name: str) -> bool:
    value = raw.get(name, False)
    check_bool(name, value)
    return value


def _eos_token_ids(raw: dict, generation: dict) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    check_token_ids("eos_token_id", eos)
    return tuple(eos)


def _sliding_window(raw: dict, architecture: str) -> int | None:
    is_used = architecture == MISTRAL or (
        architecture in (QWEN2, QWEN3) and _flag(raw, "use_sliding_window")
    )
    window = raw.get("sliding_window", 4096)  # null is no window, missing is the default
    if not is_used or window is None:
        return None
    check_int("sliding_window", window, 1, MAX_COUNT)
    return window


def _full_attention_layers(raw: dict, architecture: str, num_layers: int) -> frozenset[int]:
    """The layers that ignore the window: by name since version 4.52, before by number."""
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
        if not is_list or any(kind not in LAYER_TYPES for kind in layer_types):
            raise ValueError(
                f"layer_types is {layer_types!r}; it must be {num_layers} of {LAYER_TYPES}"
            )
        return frozenset(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    if architecture in (QWEN2, QWEN3):
        num_full = raw.get("max_window_layers", 28)
        check_int("max_window_layers", num_full, 0, MAX_COUNT)
        return frozenset(range(min(num_layers, num_full)))
    return frozenset()


def _rope(raw: dict) -> dict:
    """All of RoPE in one dict. Version 5 has it in rope_parameters, version 4 in two places."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = raw.get(name)
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise ValueError(f"{name} is {rope!r}; it must be an object")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{name} differs by layer ({', '.join(nested)}); that is not supported"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {rope['partial_rotary_factor']!r}; must be 1"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    check_choice("rope_type", rope_type, ROPE_TYPES)
    return {"rope_theta": raw.get("rope_theta", 10000.0)} | rope | {"rope_type": rope_type}


def _rope_divisors(rope: dict, theta: float, head_dim: int) -> tuple[float, ...] | None:
    """What Llama 3.1 divides each RoPE frequency by to reach 128k tokens.

    Waves shorter than the old context / high_freq_factor are kept, those longer than the old
    context / low_freq_factor are divided by factor, and in between it is blended.
    """
    if rope["rope_type"] == "default":
        return None
    old_context = count(rope, "original_max_position_embeddings")
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        check_float(name, rope.get(name), 0.0, open_low=True)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}; it must be < high_freq_factor, {high}")
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        kept = (old_context / wavelength - low) / (high - low)
        kept = min(1.0, max(0.0, kept))
        divisors.append(1 / (kept + (1 - kept) / factor))
    return tuple(divisors)


def to_hf_config(config: ModelConfig) -> dict:
    """What config.json says of a model without scaled RoPE: model_config's inverse."""
    family = config.architecture.removesuffix("ForCausalLM").lower()
    windows = {}
    if config.sliding_window is not None:
        windows = {"sliding_window": config.sliding_window, "use_sliding_window": True}
        windows["layer_types"] = [
            "full_attention" if config.window(i) is None else "sliding_attention"
            for i in range(config.num_layers)
        ]
    return windows | {
        "architectures": [config.architecture],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
    }
