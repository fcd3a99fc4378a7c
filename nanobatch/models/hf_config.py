"""config.json in our words: where the differences between model families end.

Hugging Face's config.json has a hundred fields, and which of them count depends on the model
class. Here they become a ModelConfig, in which nothing has to be looked up twice. A field that
would change the numbers and is not supported is refused, never ignored.

Always holds: a field that is missing, of the wrong type or out of range is a ValueError that
names it and its value.

Source: the configuration classes of Hugging Face transformers, versions 4 and 5.
"""

from __future__ import annotations

from nanobatch.models.config import MAX_LAYERS, ModelConfig
from nanobatch.models.families import (
    ARCHITECTURES,
    GEMMA2,
    GEMMA3,
    HEAD_DIMS,
    MAX_COUNT,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    STARCODER2,
    TIED,
    WINDOWS,
    count,
    family_fields,
    flag,
)
from nanobatch.models.rope_scaling import LEAST, scaling_fields
from nanobatch.utils.checks import check_choice, check_float, check_int, check_token_ids

LAYER_TYPES = ("full_attention", "sliding_attention")


def model_config(raw: dict, generation: dict) -> ModelConfig:
    """Translate config.json.

    Args:
        raw: the parsed config.json.
        generation: the parsed generation_config.json, whose end-of-text tokens count; or {}.

    Raises:
        ValueError: the architecture is not supported, or a field is missing or absurd.
    """
    architecture = _architecture(raw)
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; quantized safetensors are not supported")
    hidden_size, num_heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    if raw.get("head_dim") is None and hidden_size < num_heads:
        raise ValueError(
            f"num_attention_heads is {num_heads}; it must be <= hidden_size, {hidden_size}"
        )
    head_dim = count(raw, "head_dim", HEAD_DIMS.get(architecture, hidden_size // num_heads))
    num_layers = count(raw, "num_hidden_layers")
    check_int("num_hidden_layers", num_layers, 1, MAX_LAYERS)
    attention_bias = flag(raw, "attention_bias")
    rope = _rope(raw, architecture)
    theta = rope["rope_theta"]
    check_float("rope_theta", theta, LEAST)
    partial = _rotary_dim(raw, rope, architecture, head_dim)
    eps_name = "norm_epsilon" if architecture == STARCODER2 else "rms_norm_eps"
    eps = raw.get(eps_name, 1e-6)
    check_float(eps_name, eps, 0.0)
    fields = {
        "architecture": architecture,
        "vocab_size": count(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": count(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": count(raw, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": count(raw, "max_position_embeddings", 2048),
        "rms_norm_eps": float(eps),
        "rope_theta": float(theta),
        "partial_rotary_dim": partial,
        "qkv_bias": attention_bias or architecture == QWEN2,
        "o_bias": attention_bias and architecture != QWEN2,
        "mlp_bias": flag(raw, "mlp_bias"),
        "sliding_window": _sliding_window(raw, architecture),
        "full_attention_layers": _full_attention_layers(raw, architecture, num_layers),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings", architecture in TIED),
        "eos_token_ids": _eos_token_ids(raw, generation),
    }
    rotary_dim = head_dim if partial is None else partial
    fields |= scaling_fields(rope, rotary_dim, fields["max_position_embeddings"])
    return ModelConfig(**fields | family_fields(raw, architecture, rope))


def _architecture(raw: dict) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name} is not supported; these are: " + ", ".join(ARCHITECTURES)
        )
    return name


def _eos_token_ids(raw: dict, generation: dict) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    check_token_ids("eos_token_id", eos)
    return tuple(eos)


def _sliding_window(raw: dict, architecture: str) -> int | None:
    is_used = architecture in WINDOWS or (
        architecture in (QWEN2, QWEN3, QWEN3_MOE) and flag(raw, "use_sliding_window")
    )
    # null is no window, missing is the default
    window = raw.get("sliding_window", WINDOWS.get(architecture, 4096))
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
    if architecture in (GEMMA2, GEMMA3):
        every = count(raw, "sliding_window_pattern", 2 if architecture == GEMMA2 else 6)
        return frozenset(range(every - 1, num_layers, every))
    if architecture in (QWEN2, QWEN3):
        num_full = raw.get("max_window_layers", 28)
        check_int("max_window_layers", num_full, 0, MAX_COUNT)
        return frozenset(range(min(num_layers, num_full)))
    return frozenset()


def _rope(raw: dict, architecture: str) -> dict:
    """All of RoPE in one dict. Version 5 has it in rope_parameters, version 4 in two places
    (and if it is there, it counts). Of Gemma 3 it is that of the layers without a window;
    local_rope_theta is the others'."""
    has_old = raw.get("rope_scaling") not in (None, {})
    name = "rope_scaling" if has_old else "rope_parameters"
    rope = _object(raw, name)
    local = {}
    if architecture == GEMMA3:
        of_windows = {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
        if rope.get("sliding_attention") is not None:
            of_windows = _object(rope, "sliding_attention")
            rope = _object(rope, "full_attention")
        check_choice("rope_type", of_windows.get("rope_type", "default"), ("default",))
        local = {"local_rope_theta": of_windows.get("rope_theta")}
        check_float("local_rope_theta", local["local_rope_theta"], LEAST)
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"{name} differs by layer ({', '.join(nested)}); that is not supported"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    more = {}
    if architecture == PHI3:
        rope_type = "longrope" if rope_type in ("su", "yarn") else rope_type  # its old names
        # transformers takes 4,096 even where RoPE's own dict says something else.
        more = {"original_max_position_embeddings": 4096}
    default = 1000000.0 if architecture in (GEMMA3, MIXTRAL) else 10000.0
    more |= {"rope_theta": raw.get("rope_theta", default)}
    given = raw.get("original_max_position_embeddings")
    old_context = {} if given is None else {"original_max_position_embeddings": given}
    return more | rope | {"rope_type": rope_type} | local | old_context


def _object(raw: dict, name: str) -> dict:
    """A field that is an object; an empty one where it is missing."""
    value = raw.get(name)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}; it must be an object")
    return value


def _rotary_dim(raw: dict, rope: dict, architecture: str, head_dim: int) -> int | None:
    """How many of a head's elements are turned, if not all."""
    factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    lowest = 0.0 if architecture == PHI3 else 1.0
    check_float("partial_rotary_factor", factor, lowest, 1.0, open_low=architecture == PHI3)
    return None if factor == 1 else int(head_dim * factor)


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
