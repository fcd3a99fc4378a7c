"""A KV cache in 8 bits: int8 or float8 e4m3, with a scale for each row.

    kv_cache_dtype   a token's keys (or values) of one KV head, D = 64          bytes
    "auto"           64 numbers of the model's bfloat16                         128
    "int8"           64 integers in -127 .. 127, and their scale in bfloat16     66
    "fp8"            64 of float8 e4m3, up to 448, and their scale               66

Each row of D numbers has its own scale: its largest magnitude divided by the largest number of
the format. Rows are divided by the rounded scale (bfloat16), so the scale's rounding adds no
error: a number is read with an error of at most half a step of int8 (0.4% of the row's largest)
or a relative 2**-4 (e4m3). bfloat16 and not float16, since a scale has float32's range.

Always holds: what is stored for a token depends on that token alone, so that batch mates,
chunks and preemption change nothing (invariant 12), with one exception: the order of a sum may
decide to which of two numbers of the format a number is rounded. Then a logit may move by some
hundredths, and where two tokens are that close the other one is sampled. A row with a NaN or an
infinity is read as numbers that are not finite (invariant 15); so is a slot whose scale is NaN.

torch multiplies what it gathers by the scales; Triton's kernels (extensions/
quantized_kernels.py) and C's multiply the products instead; C's for prompts, the packed keys.
SmolLM2's perplexity moves by 0.4% with int8 and by about 1% with fp8. On a CPU the speed is
the same; on a GPU it is not yet measured.

Sources: scales for each token and head: KIVI (Liu et al., ICML 2024) for values, LMDeploy
for both; e4m3: Micikevicius et al., 2022; vLLM has the option's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanobatch.kernels.kv_cache import KVCache, put_rows
from nanobatch.kernels.ops import Ops

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}  # of each format of 8 bits
SCALE_DTYPE = torch.bfloat16
SMALLEST_SCALE = 1e-30  # of a row of zeros, so that none is divided by zero
FP8_CAPABILITY = (8, 9)  # of a GPU that converts e4m3: Triton refuses it for those below


@dataclass
class QuantizedCache(KVCache):
    """One layer's keys and values in 8 bits.

    keys, values: int8 or float8 [N, K, P, D]. k_scales, v_scales: bfloat16 [N, K, P].
    """

    k_scales: Tensor
    v_scales: Tensor

    def __post_init__(self) -> None:
        for numbers, scales in ((self.keys, self.k_scales), (self.values, self.v_scales)):
            if numbers.dtype not in LARGEST:
                kinds = ", ".join(map(str, LARGEST))
                raise ValueError(f"a cache is {numbers.dtype}; it must be one of {kinds}")
            wanted = (numbers.shape[:3], SCALE_DTYPE)
            given = (None, None) if scales is None else (scales.shape, scales.dtype)
            if given != wanted:
                raise ValueError(
                    f"a cache of {numbers.dtype} has scales of {given[1]}, shape {given[0]}; "
                    f"they must be {wanted[1]}, shape {wanted[0]}"
                )

    @classmethod
    def allocate(
        cls, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> QuantizedCache:
        """An empty cache of shape [N, K, P, D]; dtype: int8 or float8."""
        kinds = [(shape, dtype)] * 2 + [(shape[:3], SCALE_DTYPE)] * 2
        return cls(*(torch.empty(size, dtype=kind, device=device) for size, kind in kinds))

    @staticmethod
    def backend_for(backend: Ops) -> Ops:
        """See KVCache.backend_for. Torch uses the methods here; C has kernels for both."""
        if backend.name != "triton":
            return backend
        from nanobatch.extensions.quantized_kernels import QuantizedTritonBackend

        return QuantizedTritonBackend()

    @property
    def largest(self) -> int:
        """The largest number that the format holds."""
        return LARGEST[self.keys.dtype]

    @property
    def smallest_scale(self) -> float:
        """The scale of a row of zeros."""
        return SMALLEST_SCALE

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All of its tensors; the first dimension of each is N."""
        return self.keys, self.values, self.k_scales, self.v_scales

    def raw_parts(self) -> tuple[Tensor, ...]:
        """See KVCache.raw_parts."""
        return tuple(as_bytes(part) for part in self.parts)

    def write_rows(self, rows: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """See KVCache.write_rows."""
        halves = (self.keys, self.k_scales, k_TKD), (self.values, self.v_scales, v_TKD)
        for numbers, scales, x_TKD in halves:
            quantized_TKD, scale_TK = quantize(x_TKD, numbers.dtype)
            put_rows(as_bytes(numbers), rows, as_bytes(quantized_TKD))
            scales.view(-1).index_copy_(0, rows, scale_TK.flatten())

    def gather(self, runs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See KVCache.gather; the numbers times their scales, in dtype."""
        P, D = self.keys.shape[2:]
        halves = (self.keys, self.k_scales), (self.values, self.v_scales)
        found = []
        for numbers, scales in halves:
            x = as_bytes(numbers).view(-1, P * D).index_select(0, runs)
            scale = scales.view(-1, P).index_select(0, runs)
            found.append(dequantize(x.view(numbers.dtype).view(-1, P, D), scale, dtype))
        return tuple(found)


def resolve_cache_dtype(name: str, device: torch.device) -> torch.dtype:
    """EngineConfig.kv_cache_dtype, "int8" or "fp8", as torch knows it.

    Raises:
        ValueError: "fp8" on a GPU that cannot convert it.
    """
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


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as int8 if x is float8: torch cannot copy single rows of float8."""
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
