"""A decoder's matrix products on a CPU with AMX: modules swapped for ones in C.

    Linear    ->  PackedLinear      the weight laid out in panels of 32 columns
    GateUp    ->  PackedGateUp      SiLU and product computed where the two meet
    LMHead    ->  PackedLMHead      float32 sums, not rounded to bfloat16

Always holds: a weight is kept once. Those that were laid out are gone from their modules, so
that the decoder can neither be saved nor run on another backend afterwards.

Source: gpt-fast's quantize.py, which swaps modules of a finished model too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanobatch.extensions.cpu.kernels import CpuMatmul, products
from nanobatch.models.decoder import Decoder, GateUp, Linear, LMHead


class PackedLinear(nn.Module):
    """A matrix product in C, with the weights of a Linear as matmul.c wants them."""

    def __init__(self, linear: Linear, kernels: CpuMatmul):
        super().__init__()
        self.kernels = kernels
        self.packed = kernels.pack(self.ordered(linear.weight.data))
        self.bias = None if linear.bias is None else self.ordered(linear.bias.data)

    def ordered(self, rows: Tensor) -> Tensor:
        """The weight's rows, or the bias, in the order of the packed columns."""
        return rows

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, F] in the number format of x."""
        return self.kernels.product(x_TE, self.packed, self.bias, x_TE.dtype)


class PackedGateUp(PackedLinear):
    """Gate, up and SiLU in one: [T, F / 2]."""

    def ordered(self, rows: Tensor) -> Tensor:
        """16 of the gate's, then 16 of the up's, in turns: they meet in one block."""
        return rows.unflatten(0, (2, -1, 16)).transpose(0, 1).reshape(rows.shape)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, F / 2]: SiLU of the gate's product times the up's."""
        args = (x_TE, self.packed, self.bias, x_TE.dtype)
        return self.kernels.product(*args, is_gated=True)


class PackedLMHead(PackedLinear):
    """Logits as the sums they are."""

    def forward(self, x_TE: Tensor) -> Tensor:
        """float32 [T, V]."""
        return self.kernels.product(x_TE, self.packed, self.bias, torch.float32)


def prepack(decoder: Decoder) -> None:
    """Swap a decoder's products, in place, for those that this CPU has a kernel for."""
    for parent in list(decoder.modules()):
        for name, module in parent.named_children():
            kernels = products(module.weight) if isinstance(module, Linear) else None
            if kernels is not None:
                setattr(parent, name, packed(module, kernels))
                decoder.layout = "c"


def packed(module: Linear, kernels: CpuMatmul) -> PackedLinear:
    """The packed form of one product; its forward hooks stay."""
    kind = {GateUp: PackedGateUp, LMHead: PackedLMHead}.get(type(module), PackedLinear)
    new = kind(module, kernels)
    new._forward_hooks.update(module._forward_hooks)
    return new
