"""RoPE: which angle each pair of a head's elements is rotated by, at each position.

    position p, pair r     angle = p * theta ** (-2r / dim) / divisor[r]

The rotation itself is done where keys are written to the cache (Ops.rope_and_write). Contexts
longer than a model was trained for divide the frequencies and may scale cos and sin
(models/rope_scaling.py has the numbers). Of Phi-4-mini's heads only a part is rotated: the
other pairs have frequency 0.

Sources: RoPE (Su et al., 2021); YaRN (Peng et al., 2024) for the factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Rope(nn.Module):
    """cos and sin of the angles.

    Args:
        theta: the base of the frequencies.
        head_dim: elements of a head, D.
        rotary_dim: how many of them are rotated; None: all.
        divisors: what each frequency is divided by; None: nothing.
        factor: what cos and sin are multiplied by.
    """

    def __init__(
        self,
        theta: float,
        head_dim: int,
        rotary_dim: int | None = None,
        divisors: Sequence[float] | None = None,
        factor: float = 1.0,
    ):
        super().__init__()
        self.rotary_dim, self.factor = rotary_dim or head_dim, factor
        # On the CPU even while a decoder is built on the meta device: no checkpoint has these.
        exponent_R = torch.arange(0, self.rotary_dim, 2, device="cpu").float()
        inv_freq_R = 1.0 / theta ** (exponent_R / self.rotary_dim)
        if divisors is not None:
            inv_freq_R = inv_freq_R / torch.tensor(divisors, device="cpu")
        inv_freq_R = F.pad(inv_freq_R, (0, (head_dim - self.rotary_dim) // 2))
        self.register_buffer("inv_freq_R", inv_freq_R, persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [T, R] each, R = D / 2."""
        angles_TR = positions_T.float().unsqueeze(1) * self.inv_freq_R
        cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
        if self.factor != 1:
            cos_TR[:, : self.rotary_dim // 2] *= self.factor  # the others keep their 1
            sin_TR *= self.factor
        return cos_TR, sin_TR
