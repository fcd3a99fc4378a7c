"""RoPE scaling: positions beyond the context that a model was first trained on.

RoPE rotates each of a head's R pairs by position * frequency[i]. Scaling divides frequency i by
divisors[i], so that the long context covers the angles that the model has seen:

    pair i       0 ........................... R - 1
    rotations in the original context
                 many                      less than one
    linear       / f   / f   / f   / f   / f   / f       Gemma 3
    llama3       / 1   / 1   / ..  / ..  / f   / f       Llama 3.1: by wavelength
    yarn         / 1   / 1   / ..  / ..  / f   / f       Qwen: by number of rotations
    longrope     a list from the checkpoint, and one for short contexts      Phi-3

yarn and longrope also multiply cos and sin by attention_factor, thus scores by its square.

Keys are cached after rotation, so one list must hold for all that an engine serves: longrope's
short list if max_model_len is within the original context, else the long one. (vLLM does the
same; transformers goes by the length of each sequence, and recomputes its keys when it grows.)

Why not transformers' ROPE_INIT_FUNCTIONS: they check nothing, and the checks are most of this
file; and they are what the tests compare these numbers with.

Sources: Chen et al., 2023 (linear); Llama 3.1; YaRN (Peng et al., 2023); LongRoPE (Ding et
al., 2024); transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nanobatch.utils.checks import check_bool, check_choice, check_float, check_int

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
MAX_CONTEXT = 2**31 - 1
MIN_POSITIVE = 1e-6  # for thetas and factors: smaller ones make frequencies overflow


def scaling_fields(rope: Mapping, dim: int, max_position: int) -> dict:
    """The fields of ModelConfig that RoPE scaling sets.

    Args:
        rope: all settings of RoPE in one dict, with rope_type and rope_theta.
            original_max_position_embeddings is max_position if it is missing (not in llama3).
        dim: elements of a head that RoPE rotates, 2 R.
        max_position: max_position_embeddings, in tokens.

    Raises:
        ValueError: a field is missing or out of range, or the type is not supported.
    """
    rope_type = rope["rope_type"]
    check_choice("rope_type", rope_type, ROPE_TYPES)
    if rope_type == "default":
        return {}
    if rope_type == "longrope":
        return _longrope(rope, dim, max_position)
    factor = _positive(rope, "factor")
    check_float("factor", factor, MIN_POSITIVE, MAX_CONTEXT)
    if rope_type == "linear":
        return {"rope_divisors": (factor,) * (dim // 2)}
    if rope_type == "llama3":
        return {"rope_divisors": _blended(_kept_by_wavelength(rope, dim), factor)}
    original = _original_context(rope, max_position)
    check_float("factor", factor, 0.0, MAX_CONTEXT / original)
    return {
        "rope_divisors": _blended(_kept_by_rotations(rope, dim, original), factor),
        "rope_attention_factor": _yarn_attention(rope, factor),
        "max_position_embeddings": max(max_position, round(factor * original)),
    }


def _blended(kept: list[float], factor: float) -> tuple[float, ...]:
    """Divisors of frequencies of which a share is kept and the rest divided by factor."""
    return tuple(1 / (share + (1 - share) / factor) for share in kept)


def _kept_by_wavelength(rope: Mapping, dim: int) -> list[float]:
    """llama3: the share of each frequency that is kept. All of it for wavelengths below
    original context / high_freq_factor, none above original context / low_freq_factor."""
    original = rope.get("original_max_position_embeddings")
    check_int("original_max_position_embeddings", original, 1, MAX_CONTEXT)
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}; it must be < high_freq_factor, {high}")
    wavelengths = [2 * math.pi * rope["rope_theta"] ** (i / dim) for i in range(0, dim, 2)]
    return [_between_0_and_1((original / w - low) / (high - low)) for w in wavelengths]


def _kept_by_rotations(rope: Mapping, dim: int, original: int) -> list[float]:
    """yarn: the share of each frequency that is kept. All of it for pairs with more than
    beta_fast rotations in the original context, none below beta_slow; linear in between."""
    check_float("rope_theta", rope["rope_theta"], 1.0, open_low=True)
    ends = []
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        num_rotations = _positive(rope, name, default)
        check_float(name, num_rotations, MIN_POSITIVE, 1e6)
        wavelength = original / (num_rotations * 2 * math.pi)
        ends.append(dim * math.log(wavelength) / (2 * math.log(rope["rope_theta"])))
    truncate = rope.get("truncate", True)
    check_bool("truncate", truncate)
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    width = last - first if last != first else 0.001
    return [1 - _between_0_and_1((i - first) / width) for i in range(dim // 2)]


def _yarn_attention(rope: Mapping, factor: float) -> float:
    unsupported = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if unsupported:
        raise ValueError(f"{unsupported[0]} is {rope[unsupported[0]]!r}; it must be missing")
    default = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return _positive(rope, "attention_factor", default)


def _longrope(rope: Mapping, dim: int, max_position: int) -> dict:
    original = _original_context(rope, max_position)
    factor = _positive(rope, "factor", max_position / original)
    default = 1.0
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "rope_divisors": _listed_divisors(rope, "long_factor", dim),
        "short_rope_divisors": _listed_divisors(rope, "short_factor", dim),
        "short_context": original,
        "rope_attention_factor": _positive(rope, "attention_factor", default),
    }


def _listed_divisors(rope: Mapping, name: str, dim: int) -> tuple[float, ...]:
    given = rope.get(name)
    if not isinstance(given, (list, tuple)) or len(given) != dim // 2:
        raise ValueError(f"{name} is {given!r}; it must be a list of {dim // 2} numbers")
    for divisor in given:
        check_float(name, divisor, MIN_POSITIVE)
    return tuple(float(divisor) for divisor in given)


def _original_context(rope: Mapping, max_position: int) -> int:
    """Tokens of the context that the model was first trained on."""
    original = rope.get("original_max_position_embeddings")
    original = max_position if original is None else original
    check_int("original_max_position_embeddings", original, 2, MAX_CONTEXT)
    return original


def _positive(rope: Mapping, name: str, default: float | None = None) -> float:
    value = rope.get(name)
    value = default if value is None else value
    check_float(name, value, MIN_POSITIVE)
    return float(value)


def _between_0_and_1(x: float) -> float:
    return min(1.0, max(0.0, x))
