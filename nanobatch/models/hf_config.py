"""config.json to ModelConfig, for all families of models.

Hugging Face's config.json has a hundred fields, and which of them count depends on the model's
architecture. All of that is decided here, once. A field that would change the numbers and is
not supported is refused, never ignored.

Why not transformers' AutoConfig: version 4 ignores rope_parameters, which version 5 writes;
neither version refuses a NaN, a missing hidden_size or an unknown rope_type; and importing it
doubles the time to load the bundled model.

Always holds: a field that is missing, of the wrong type or out of range is a ValueError that
names it and its value.

Source: the configuration classes of Hugging Face transformers, versions 4 and 5.
"""

from __future__ import annotations

from nanobatch.models.config import MAX_EPS, MAX_LAYERS, MAX_THETA, MIN_THETA, ModelConfig
from nanobatch.models.families import (
    ARCHITECTURES,
    FAMILIES,
    MAX_COUNT,
    PHI3,
    Family,
    count,
    family_fields,
    flag,
)
from nanobatch.models.rope_scaling import scaling_fields
from nanobatch.utils.checks import check_choice, check_float, check_int, check_token_ids

LAYER_TYPES = ("full_attention", "sliding_attention")


def model_config(raw: dict, generation: dict) -> ModelConfig:
    """Translate config.json.

    Args:
        raw: the parsed config.json.
        generation: the parsed generation_config.json, whose eos_token_id wins; or {}.

    Raises:
        ValueError: the architecture is not supported, or a field is missing or out of range.
    """
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; quantized safetensors are not supported")
    fields = {"architecture": architecture} | _sizes(raw, family)
    attention_bias = flag(raw, "attention_bias")
    eps = raw.get(family.eps_name, family.eps)
    check_float(family.eps_name, eps, 0.0, MAX_EPS, open_low=True)
    fields |= {
        "rms_norm_eps": float(eps),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": flag(raw, "mlp_bias"),
        "sliding_window": _sliding_window(raw, family),
        "full_attention_layers": _full_attention_layers(raw, family, fields["num_layers"]),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings", family.tied),
        "eos_token_ids": _eos_token_ids(raw, generation, family),
    }
    rope = _rope(raw, architecture)
    fields |= _rope_fields(rope, family, fields["head_dim"], fields["max_position_embeddings"])
    return ModelConfig(**fields | family_fields(raw, family))


def _architecture(raw: dict) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"architecture {name} is not supported; these are: " + ", ".join(ARCHITECTURES)
        )
    return name


def _sizes(raw: dict, family: Family) -> dict:
    hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size < num_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}; it must be <= hidden_size, {hidden_size}"
        )
    num_layers = count(raw, "num_hidden_layers")
    check_int("num_hidden_layers", num_layers, 1, MAX_LAYERS)
    num_kv_heads = {"num_key_value_heads": family.num_kv_heads} | raw  # null: num_heads
    return {
        "vocab_size": count(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": count(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": count(num_kv_heads, "num_key_value_heads", num_heads),
        "head_dim": count(raw, "head_dim", family.head_dim or hidden_size // num_heads),
        "max_position_embeddings": count(raw, "max_position_embeddings", family.max_position),
    }


def _eos_token_ids(raw: dict, generation: dict, family: Family) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", raw.get("eos_token_id", family.eos))
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    check_token_ids("eos_token_id", eos)
    return tuple(eos)


# ------------------------------------------------------------------------------------ windows


def _sliding_window(raw: dict, family: Family) -> int | None:
    is_used = family.window == "always" or (
        family.window == "if_used" and flag(raw, "use_sliding_window")
    )
    # null means no window; missing means the family's default
    window = raw.get("sliding_window", family.default_window)
    if not is_used or window is None:
        return None
    check_int("sliding_window", window, 1, MAX_COUNT)
    return window


def _full_attention_layers(raw: dict, family: Family, num_layers: int) -> frozenset[int]:
    """The layers without a window: in layer_types from transformers 4.52 on, before that by
    number."""
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
        if not is_list or any(kind not in LAYER_TYPES for kind in layer_types):
            raise ValueError(
                f"layer_types is {layer_types!r}; it must be {num_layers} of {LAYER_TYPES}"
            )
        return frozenset(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    if family.full_every is not None:
        every = count(raw, "sliding_window_pattern", family.full_every)
        return frozenset(range(every - 1, num_layers, every))
    if family.full_first is not None:
        num_full = raw.get("max_window_layers", family.full_first)
        check_int("max_window_layers", num_full, 0, MAX_COUNT)
        return frozenset(range(min(num_layers, num_full)))
    return frozenset()


# --------------------------------------------------------------------------------------- RoPE


def _rope(raw: dict, architecture: str) -> dict:
    """All settings of RoPE in one flat dict, with rope_type and rope_theta.

        version 5   rope_parameters: {rope_type, rope_theta, factor, ...}
        version 4   rope_theta, and rope_scaling: {type, factor, ...}, which wins if it is set

    Gemma 3 has two RoPEs: this is that of the layers without a window, plus local_rope_theta.
    """
    family = FAMILIES[architecture]
    name = "rope_parameters" if raw.get("rope_scaling") in (None, {}) else "rope_scaling"
    rope, local = _object(raw, name), {"local_rope_theta": None}
    if family.local_rope_theta is not None:
        rope, local = _split_local(raw, rope, family.local_rope_theta)
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{name} differs by layer ({', '.join(nested)}); that is not supported"
        )
    if name == "rope_scaling" and not {"rope_type", "type"} & rope.keys():
        raise ValueError(f"rope_scaling is {rope!r}; its rope_type is missing")
    defaults = {
        "rope_type": rope.get("type", "default"),
        "rope_theta": raw.get("rope_theta", family.rope_theta),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0),
    }
    rope = defaults | rope | local
    original = raw.get("original_max_position_embeddings", family.original_context)
    if original is not None:  # wins over the one among the settings of RoPE
        rope["original_max_position_embeddings"] = original
    if architecture == PHI3 and rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"  # its old names
    return rope


def _split_local(raw: dict, rope: dict, default_theta: float) -> tuple[dict, dict]:
    """RoPE of the layers without a window; and local_rope_theta, of those with one."""
    of_windows = {"rope_theta": raw.get("rope_local_base_freq", default_theta)}
    if "sliding_attention" in rope or "full_attention" in rope:
        of_windows |= _object(rope, "sliding_attention")
        rope = _object(rope, "full_attention")
    check_choice("rope_type", of_windows.get("rope_type", "default"), ("default",))
    theta = of_windows.get("rope_theta")
    check_float("local_rope_theta", theta, MIN_THETA, MAX_THETA)
    return rope, {"local_rope_theta": float(theta)}


def _object(raw: dict, name: str) -> dict:
    """A field that is an object; an empty one if it is missing."""
    value = raw.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}; it must be an object")
    return value


def _rope_fields(rope: dict, family: Family, head_dim: int, max_position: int) -> dict:
    """The fields of ModelConfig that RoPE sets."""
    theta, factor = rope["rope_theta"], rope["partial_rotary_factor"]
    check_float("rope_theta", theta, MIN_THETA, MAX_THETA)
    lowest = 0.0 if family.partial_rotary else 1.0
    check_float("partial_rotary_factor", factor, lowest, 1.0, open_low=family.partial_rotary)
    partial = None if factor == 1 else int(head_dim * factor)
    return {
        "rope_theta": float(theta),
        "local_rope_theta": rope["local_rope_theta"],
        "partial_rotary_dim": partial,
    } | scaling_fields(rope, head_dim if partial is None else partial, max_position)


# ------------------------------------------------------------------------------------ writing


def to_hf_config(config: ModelConfig) -> dict:
    """config.json of a model without scaled RoPE: the inverse of model_config."""
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
