"""What instructions compute of numbers: the same for each thread, on arrays of them.

A register is an array of unsigned integers, one a thread. `numbers` reads it as a type of PTX:

    f32       float32              f16, bf16     float32, of the upper or lower bits
    s32 u32   int32, uint32        e4m3          float32
    pred      bool                 f16x2 ...     two numbers a thread: [n, 2], low half first

and `bits` is the way back, which rounds to the nearest. Sums and products are computed in
float32, fused ones in float64, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

SIZES = {"e4m3": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "pred": 1}
SIZES |= {f"{letter}{8 * size}": size for letter in "bus" for size in (1, 2, 4, 8)}
SIZES |= {f"{kind}x2": 2 * SIZES[kind] for kind in ("e4m3", "f16", "bf16", "f32")}
E4M3 = np.array(  # of the codes 0 .. 126; 127 is NaN
    [
        code * 2.0**-9 if code < 8 else (8 + code % 8) * 2.0 ** (code // 8 - 10)
        for code in range(127)
    ],
    np.float32,
)


def size_of(kind: str) -> int:
    """Bytes of a type."""
    return SIZES[kind]


def numbers(x: np.ndarray, kind: str) -> np.ndarray:
    """What the bits of x, of the type's size, mean."""
    if kind == "pred":
        return x
    if kind.endswith("x2"):
        half = kind.removesuffix("x2")
        return numbers(np.ascontiguousarray(x)[:, None].view(f"u{SIZES[half]}"), half)
    if kind == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    if kind == "e4m3":
        values = np.append(E4M3, np.float32(np.nan))[x & 0x7F]
        return np.where(x & 0x80, -values, values)
    return x.view({"f": "f", "s": "i"}.get(kind[0], "u") + str(SIZES[kind]))


def bits(x: np.ndarray, kind: str) -> np.ndarray:
    """The way back from numbers: unsigned integers of the type's size (bool for pred)."""
    if kind == "pred":
        return x.astype(bool)
    if kind.endswith("x2"):
        half = bits(x, kind.removesuffix("x2"))
        return np.ascontiguousarray(half).view(f"u{SIZES[kind]}")[:, 0]
    if kind == "bf16":
        raw = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    if kind == "e4m3":
        return _to_e4m3(x)
    number = np.dtype({"f": "f", "s": "i"}.get(kind[0], "u") + str(SIZES[kind]))
    return x.astype(number, copy=False).view(f"u{SIZES[kind]}")


def _to_e4m3(x: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even, at most 448 (satfinite)."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    code = np.searchsorted(middles, np.abs(x))
    is_tie = middles[np.minimum(code, 125)] == np.abs(x)
    code += is_tie & (code % 2 == 1)
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | (np.signbit(x) << 7)).astype(np.uint8)


Meaning = tuple[list[str], Callable[..., np.ndarray], str]  # types of sources, of the result


def meaning(name: str, modifiers: tuple[str, ...], num_sources: int) -> Meaning:
    """What an instruction computes: types of its sources, a function, type of its result.

    Raises:
        NotImplementedError: it is none of those that are known.
    """
    kinds = [m for m in modifiers if m in SIZES]
    kind = kinds[-1]
    if name == "cvt":
        return _conversion(modifiers, kinds)
    if name == "setp":
        return [kind] * 2, _comparison(modifiers[0], kind), "pred"
    if name == "selp":
        return [kind, kind, "pred"], lambda a, b, which: np.where(which, a, b), kind
    if name in ("shl", "shr"):
        return [kind, "u32"], functools.partial(_shift, name, 8 * SIZES[kind]), kind
    if name == "bfe":
        return [kind, "u32", "u32"], functools.partial(_bit_field, kind[0] == "s"), kind
    if name == "prmt":
        return ["u32"] * 3, _permute_bytes, "u32"
    if name in ("mul", "mad") and "wide" in modifiers:
        wide = f"{kind[0]}{16 * SIZES[kind]}"
        return [kind, kind, wide][:num_sources], functools.partial(_multiply_wide, wide), wide
    if name in ("mul", "mad") and "hi" in modifiers:
        return [kind] * num_sources, functools.partial(_multiply_high, SIZES[kind]), kind
    if name in ("add", "sub", "fma") and len(kinds) == 2:  # fma.f32.bf16: the last is float32
        function = _fused if name == "fma" else FUNCTIONS[name]
        return [kind] * (num_sources - 1) + kinds[:1], function, kinds[0]
    is_float = kind.lstrip("b").startswith("f")
    function = FLOAT_FUNCTIONS.get(name) if is_float else None
    if name in ("min", "max") and is_float and "NaN" in modifiers:
        function = functools.partial(_reduce, getattr(np, name + "imum"))
    elif name == "min" and "xorsign" in modifiers:
        function = _smaller_with_both_signs
    function = function or FUNCTIONS.get(name)
    if function is None:
        raise NotImplementedError(f"{name}.{'.'.join(modifiers)}")
    return [kind] * num_sources, function, kind


def _reduce(function: np.ufunc, *sources: np.ndarray) -> np.ndarray:
    return functools.reduce(function, sources)


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once: the product of two float32 is a float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of integers, towards zero."""
    quotient = np.abs(a.astype(np.int64)) // np.abs(np.where(b == 0, 1, b).astype(np.int64))
    return np.where((a < 0) == (b < 0), quotient, -quotient).astype(a.dtype)


def _smaller_with_both_signs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.xorsign.abs: the smaller magnitude, with the product of the signs."""
    sign = np.where(np.signbit(a) ^ np.signbit(b), np.float32(-1), np.float32(1))
    return np.copysign(np.fmin(np.abs(a), np.abs(b)), sign)


FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "min": functools.partial(_reduce, np.minimum),
    "max": functools.partial(_reduce, np.maximum),
}
FLOAT_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "fma": _fused,
    "mad": _fused,
    "div": np.divide,
    "min": functools.partial(_reduce, np.fmin),  # passes over NaN
    "max": functools.partial(_reduce, np.fmax),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32),
    "tanh": np.tanh,
}


def _comparison(relation: str, kind: str) -> Callable[..., np.ndarray]:
    compare = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal,
        "hi": np.greater, "hs": np.greater_equal,
    }  # fmt: skip

    def has_nan(a, b):
        return (a != a) | (b != b)

    if relation in ("num", "nan"):
        return has_nan if relation == "nan" else lambda a, b: ~has_nan(a, b)
    is_unordered = len(relation) == 3  # "ltu": true too if one of them is NaN
    function = compare[relation[:2]]
    if is_unordered:
        return lambda a, b: function(a, b) | has_nan(a, b)
    if relation == "ne" and kind[0] != "s":
        return lambda a, b: function(a, b) & ~has_nan(a, b)
    return function


def _shift(name: str, num_bits: int, a: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Past the end: zeros, or the sign."""
    amount = np.minimum(by, num_bits - 1).astype(a.dtype)
    shifted = a << amount if name == "shl" else a >> amount
    is_arithmetic = name == "shr" and a.dtype.kind == "i"
    return shifted if is_arithmetic else np.where(by >= num_bits, a.dtype.type(0), shifted)


def _bit_field(is_signed: bool, a: np.ndarray, start: np.ndarray, length: np.ndarray):
    """Some bits of a number of 32."""
    start, length = start.astype(np.int64), length.astype(np.int64)
    field = (a.astype(np.int64) >> start) & ((1 << length) - 1)
    sign = 1 << np.maximum(length - 1, 0)
    return ((field ^ sign) - sign if is_signed else field).astype(a.dtype)


def _permute_bytes(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of a and b; bit 3 of a selector spreads the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.uint32(0)
    for i in range(4):
        which = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = ((both >> (which & 7).astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(
            "u4"
        )
        sign = np.where(byte & 128, np.uint32(255), np.uint32(0))
        result = result | np.where(which & 8, sign, byte) << np.uint32(8 * i)
    return result


def _multiply_wide(wide: str, a: np.ndarray, b: np.ndarray, c=0) -> np.ndarray:
    number = np.dtype({"s": "i"}.get(wide[0], "u") + str(SIZES[wide]))
    return a.astype(number) * b.astype(number) + np.asarray(c, number)


def _multiply_high(size: int, a: np.ndarray, b: np.ndarray, c=0) -> np.ndarray:
    if size == 8:
        raise NotImplementedError("the upper half of a product of 128 bits")
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(8 * size)).astype(a.dtype) + c


ROUND_TO_INTEGER = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _conversion(modifiers: tuple[str, ...], kinds: list[str]) -> Meaning:
    """cvt.<to>.<from>; cvt.<to>x2.<from> takes the high half first."""
    to, source = kinds
    if to.endswith("x2") and not source.endswith("x2"):
        return [source] * 2, lambda high, low: np.stack([low, high], -1), to
    round_to_integer = next((f for m, f in ROUND_TO_INTEGER.items() if m in modifiers), None)
    is_float = source.lstrip("b").startswith("f")
    if is_float and to[0] in "su":
        return [source], lambda x: _saturate(round_to_integer(x), to), to
    if round_to_integer is not None:
        return [source], round_to_integer, to
    if "rz" in modifiers and to == "f16":
        return [source], _towards_zero_f16, to
    if to[0] == "f" and not is_float and source[0] in "su":
        return [source], lambda x: x.astype(f"f{SIZES[to]}"), to
    # Integers are cut or extended by their own sign.
    return [source], lambda x: x, to


def _saturate(x: np.ndarray, to: str) -> np.ndarray:
    """A whole number as an integer: the nearest that there is, and 0 for NaN."""
    number = np.dtype({"s": "i"}.get(to[0], "u") + str(SIZES[to]))
    limits = np.iinfo(number)
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0)
    return np.clip(wide, limits.min, limits.max).astype(number)


def _towards_zero_f16(x: np.ndarray) -> np.ndarray:
    nearest = x.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float32)) > np.abs(x)
    return np.where(is_beyond, np.nextafter(nearest, np.float16(0)), nearest)
