"""What a layer's KV cache is made of: keys and values as they are, or in 8 bits with scales.

    kv_cache_dtype   a token's keys (or values) of one KV head, D = 64          bytes
    "auto"           64 numbers of the model's bfloat16                         128
    "int8"           64 integers in -127 .. 127, and their scale in bfloat16     66
    "fp8"            64 of float8 e4m3, up to 448, and their scale               66

Each row of D numbers has a scale of its own: its largest magnitude over the largest that the
format holds. Dividing by the scale as it was rounded to bfloat16 makes the scale's own rounding
harmless: what is read is off by at most half a step of int8 (0.4% of the row's largest) or a
relative 2**-4 (e4m3). bfloat16 and not float16, since a scale may be anything a float32 is.

    cache of a layer    (k_cache_NKPD, v_cache_NKPD)
    in 8 bits           (k_cache_NKPD, v_cache_NKPD, k_scale_NKP, v_scale_NKP)

Always holds: what is stored for a token depends on that token alone, so that batch mates,
chunks and preemption change nothing (invariant 12), but where a number lies so close to the
middle between two of the format that the order of a sum decides: a logit may then move by some
hundredths, and a token that was a close call. A row with a NaN or an infinity is read as
numbers that are not finite (invariant 15); so is a slot whose scale is NaN.

Triton's kernels and C's multiply what their products give by the scales; torch multiplies what
it gathers, and C what it packs for prompts. SmolLM2's perplexity moves by 0.4% with int8 and by
about 1% with fp8. On a CPU the speed stays what it is; a GPU's is not yet measured.

Sources: scales for each token and head: KIVI (Liu et al., ICML 2024) for values, LMDeploy
for both; e4m3: Micikevicius et al., 2022; vLLM has the option's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # of each format of 8 bits
SCALE_DTYPE = torch.bfloat16
SMALLEST_SCALE = 1e-30  # of a row of zeros, so that none is divided by zero
FP8_CAPABILITY = (8, 9)  # of a GPU that converts e4m3: Triton refuses it for those below

Cache = tuple[Tensor, ...]  # of a layer: (k_cache_NKPD, v_cache_NKPD), maybe their scales


def resolve_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """EngineConfig.kv_cache_dtype as torch knows it; "auto" is the model's.

    Raises:
        ValueError: "fp8" on a GPU that cannot convert it.
    """
    if name == "auto":
        return dtype
    if name == "int8":
        return torch.int8
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ValueError(
                f"kv_cache_dtype is 'fp8'; it needs a GPU of compute capability >= 8.9, and "
                f"this one's is {capability[0]}.{capability[1]}: use 'int8' or 'auto'"
            )
    return torch.float8_e4m3fn


def new_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Cache:
    """A layer's cache of shape [N, K, P, D]. Not zeroed: memory that no block uses is never
    touched (invariant 14)."""
    kinds = [(shape, dtype)] * 2
    if dtype in LARGEST:
        kinds += [(shape[:3], SCALE_DTYPE)] * 2
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds)


def as_bytes(x: Tensor) -> Tensor:
    """A part of a cache for copying: torch has no copies of some rows in float8."""
    return x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x


def quantize(x_TKD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of D numbers in 8 bits: (numbers [T, K, D] of dtype, their scales [T, K])."""
    wide_TKD = x_TKD.float()
    largest_TK = wide_TKD.abs().amax(dim=-1)
    scale_TK = (largest_TK / LARGEST[dtype]).clamp(min=SMALLEST_SCALE).to(SCALE_DTYPE)
    scaled_TKD = wide_TKD / scale_TK.float().unsqueeze(-1)
    if dtype == torch.int8:
        scaled_TKD = (scaled_TKD + 0.5).floor()
    # A scale that was rounded down leads a little beyond what the format holds.
    scaled_TKD = scaled_TKD.clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled_TKD.to(dtype), scale_TK


def dequantize(x_TKD: Tensor, scale_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that quantize stored, in dtype; any shapes [..., D] and [...]."""
    return (x_TKD.float() * scale_TK.float().unsqueeze(-1)).to(dtype)
