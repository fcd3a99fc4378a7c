"""Numbers on their way between Python and a device, while the device goes on computing.

    to_device   Python's numbers become a tensor
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
    tensor = torch.tensor(numbers, dtype=dtype)
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
    # torch keeps pinned memory until the copy from it is done.
    return pinned.copy_(tensor).to(device, non_blocking=True)


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
