"""RoPE stretched over longer contexts than a model was first trained on.

Each of the R pairs of a head turns by its own frequency; a stretched model turns them slower:
frequency i is divided by divisors[i].

    pair i       0 ........................... R - 1
    turns        many in the old context       less than one
    linear       / f   / f   / f   / f   / f   / f       Gemma 3
    llama3       / 1   / 1   / ..  / ..  / f   / f       Llama 3.1: by wavelength
    yarn         / 1   / 1   / ..  / ..  / f   / f       Qwen: by turns; scores grow a little
    longrope     a list found by search                  Phi-3; and one for the old context

yarn and longrope multiply cos and sin by attention_factor, thus scores by its square.

A cached key is turned once, so that one list holds for all that an engine serves: longrope's
for the old context if no sequence may be longer (max_model_len), else the other. (vLLM's rule;
transformers looks at each sequence's length, and computes its keys anew when it grows.)

Sources: Chen et al., 2023 (linear); Llama 3.1; YaRN (Peng et al., 2023); LongRoPE (Ding et
al., 2024); transformers' modeling_rope_utils.py, the oracle in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nanobatch.utils.checks import check_bool, check_choice, check_float, check_int

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
MAX_CONTEXT = 2**31 - 1
LEAST = 1e-6  # of what frequencies are made of: less is a mistake, and gives infinite ones


def scaling_fields(rope: Mapping, dim: int, max_position: int) -> dict:
    """The fields of ModelConfig that RoPE's type sets.

    Args:
        rope: all of config.json's RoPE in one dict, with rope_type and rope_theta;
            original_max_position_embeddings may be missing where max_position is meant.
        dim: elements of a head that are turned, 2 R.
        max_position: max_position_embeddings.

    Raises:
        ValueError: a field is missing or absurd.
    """
    rope_type = rope["rope_type"]
    check_choice("rope_type", rope_type, ROPE_TYPES)
    if rope_type == "default":
        return {}
    if rope_type == "longrope":
        return _longrope(rope, dim, max_position)
    factor = _positive(rope, "factor")
    if rope_type == "linear":
        return {"rope_divisors": (factor,) * (dim // 2)}
    if rope_type == "llama3":
        return {"rope_divisors": _blended(_kept_by_wavelength(rope, dim), factor)}
    old_context = _old_context(rope, max_position)
    check_float("factor", factor, 0.0, MAX_CONTEXT / old_context)
    return {
        "rope_divisors": _blended(_kept_by_turns(rope, dim, old_context), factor),
        "rope_attention_factor": _yarn_attention(rope, factor),
        "max_position_embeddings": max(max_position, round(factor * old_context)),
    }


def _blended(kept: list[float], factor: float) -> tuple[float, ...]:
    """Frequencies of which a share is kept, and the rest divided by factor."""
    return tuple(1 / (share + (1 - share) / factor) for share in kept)


def _kept_by_wavelength(rope: Mapping, dim: int) -> list[float]:
    """Waves shorter than the old context / high_freq_factor are kept, those longer than the
    old context / low_freq_factor are not, and in between it is blended."""
    old_context = rope.get("original_max_position_embeddings")
    check_int("original_max_position_embeddings", old_context, 1, MAX_CONTEXT)
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}; it must be < high_freq_factor, {high}")
    wavelengths = [2 * math.pi * rope["rope_theta"] ** (i / dim) for i in range(0, dim, 2)]
    return [_between_0_and_1((old_context / w - low) / (high - low)) for w in wavelengths]


def _kept_by_turns(rope: Mapping, dim: int, old_context: int) -> list[float]:
    """Pairs that turn more than beta_fast times in the old context are kept, those that turn
    less than beta_slow times are not; in between it falls with the pair's number."""
    check_float("rope_theta", rope["rope_theta"], 1.0, open_low=True)
    ends = []
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        num_turns = _positive(rope, name, default)
        check_float(name, num_turns, LEAST, 1e6)
        shortest = old_context / (num_turns * 2 * math.pi)
        ends.append(dim * math.log(shortest) / (2 * math.log(rope["rope_theta"])))
    is_whole = rope.get("truncate", True)
    check_bool("truncate", is_whole)
    if is_whole:
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
    old_context = _old_context(rope, max_position)
    factor = _positive(rope, "factor", max_position / old_context)
    default = 1.0
    if factor > 1:
        default = math.sqrt(1 + math.log(factor) / math.log(old_context))
    return {
        "rope_divisors": _divisors(rope, "long_factor", dim),
        "short_rope_divisors": _divisors(rope, "short_factor", dim),
        "short_context": old_context,
        "rope_attention_factor": _positive(rope, "attention_factor", default),
    }


def _divisors(rope: Mapping, name: str, dim: int) -> tuple[float, ...]:
    given = rope.get(name)
    if not isinstance(given, (list, tuple)) or len(given) != dim // 2:
        raise ValueError(f"{name} is {given!r}; it must be a list of {dim // 2} numbers")
    for divisor in given:
        check_float(name, divisor, LEAST)
    return tuple(float(divisor) for divisor in given)


def _old_context(rope: Mapping, max_position: int) -> int:
    """Tokens of the context that the model was first trained on."""
    old_context = rope.get("original_max_position_embeddings")
    old_context = max_position if old_context is None else old_context
    check_int("original_max_position_embeddings", old_context, 2, MAX_CONTEXT)
    return old_context


def _positive(rope: Mapping, name: str, default: float | None = None) -> float:
    value = rope.get(name)
    value = default if value is None else value
    check_float(name, value, LEAST)
    return float(value)


def _between_0_and_1(x: float) -> float:
    return min(1.0, max(0.0, x))
