"""Numbers on their way between Python and a device, while the device goes on computing.

    to_device   Python's numbers become a tensor
    staged      a tensor on the CPU becomes one that a device may copy
    HostCopy    a tensor becomes Python's numbers: the copy starts at once and is read later

On CUDA both go through pinned memory. A copy from or to any other memory waits until the
device has done all work that was queued before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of numbers, or of such lists, as a tensor on a device. Does not wait for it."""
    return staged(torch.tensor(numbers, dtype=dtype), device).to(device, non_blocking=True)


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's tensor, or a copy from which the device copies while the host goes on."""
    if device.type == "cpu":
        return tensor
    # torch keeps pinned memory until the copies from it are done.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


class HostCopy:
    """A tensor's numbers on the host, once the device has computed them.

    Args:
        tensor: not changed by anyone afterwards.
    """

    def __init__(self, tensor: Tensor):
        self._tensor, self._is_done = tensor, None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = pinned.copy_(tensor, non_blocking=True)
            self._is_done = torch.cuda.Event()
            self._is_done.record()

    def tolist(self) -> list:
        """The numbers. Waits for this copy, and not for what was queued after it."""
        if self._is_done is not None:
            self._is_done.synchronize()
        return self._tensor.tolist()
