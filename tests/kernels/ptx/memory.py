"""Global memory: the tensors of a launch, and a check of each access."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BASE = 1 << 44  # past 32 bits, so that an address that lost its upper half is found
GAP = 256  # bytes between two tensors' memories


class Fault(AssertionError):  # noqa: N818 - the field's word
    """What a program must never do."""


def words(width: int) -> np.dtype:
    """The unsigned integers in which an access of so many bytes moves."""
    return np.dtype(f"u{min(width, 8)}")


def each_byte(word: np.dtype) -> np.unsignedinteger:
    """1 in each byte of a word."""
    return np.full(1, 0x0101010101010101, np.uint64).view(word)[0]


class GlobalMemory:
    """The memory of some tensors, and which of its bytes belong to their elements.

    A view owns its elements and not what lies between them. Loads and stores are of one
    access a thread: addresses [n] in bytes, each `width` bytes wide.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.offsets: dict[int, int] = {}  # of each storage, by its address
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        end = GAP
        for address, storage in storages.items():
            self.offsets[address] = end
            end += -(-storage.nbytes() // GAP) * GAP + GAP
        self.bytes = np.zeros(end, np.uint8)
        self.is_owned = np.zeros(end, np.uint8)
        self.writer = np.zeros(end, np.int32)  # the program that wrote a byte, from 1 on
        self.storages = storages
        for address, storage in storages.items():
            self.bytes[self._span(address)] = _as_numpy(storage)
        for t in tensors:
            owned = torch.from_numpy(self.is_owned[self._span(t.untyped_storage().data_ptr())])
            size = t.element_size()
            strides = [stride * size for stride in t.stride()]
            start = t.storage_offset() * size
            owned.as_strided((*t.shape, size), (*strides, 1), start).fill_(1)

    def _span(self, address: int) -> slice:
        start = self.offsets[address]
        return slice(start, start + self.storages[address].nbytes())

    def address_of(self, t: Tensor) -> int:
        """Where a tensor's first element is."""
        start = self.offsets[t.untyped_storage().data_ptr()]
        return BASE + start + t.storage_offset() * t.element_size()

    def copy_back(self) -> None:
        """Give the tensors what was written."""
        for address, storage in self.storages.items():
            _as_numpy(storage)[:] = self.bytes[self._span(address)]

    def check(self, address: np.ndarray, width: int) -> np.ndarray:
        """Positions in `bytes`, in words.

        Raises:
            Fault: an address is not a multiple of width, or a byte belongs to no tensor.
        """
        position = address.astype(np.int64) - BASE
        if (position % width).any():
            raise Fault(f"misaligned: {width} bytes at {address[position % width != 0][:4]}")
        word = words(width)
        is_outside = (position < 0) | (position + width > len(self.bytes))
        at = np.where(is_outside, 0, position)[:, None] // word.itemsize
        at = at + np.arange(width // word.itemsize)
        is_outside |= (self.is_owned.view(word)[at] != each_byte(word)).any(1)
        if is_outside.any():
            raise Fault(f"out of all tensors: {width} bytes at {address[is_outside][:4]}")
        return at

    def load(self, address: np.ndarray, width: int, program: np.ndarray) -> np.ndarray:
        """[n, width] bytes, as words. program: of each thread."""
        at = self.check(address, width)
        writer = self.writer[address.astype(np.int64) - BASE]
        if ((writer != 0) & (writer != program + 1)).any():
            raise Fault("a program reads what another one writes in the same launch")
        return self.bytes.view(words(width))[at]

    def store(self, address: np.ndarray, values: np.ndarray, program: np.ndarray) -> None:
        """Write [n, width // itemsize] words."""
        width = values.shape[1] * values.itemsize
        at = self.check(address, width)
        where = (address.astype(np.int64) - BASE)[:, None] + np.arange(width)
        writer = program[:, None] + 1
        before = self.writer[where]
        self.writer[where] = writer
        is_others = (before != 0) & (before != writer) | (self.writer[where] != writer)
        if is_others.any():
            raise Fault("two programs write the same bytes")
        self.bytes.view(values.dtype)[at] = values


def _as_numpy(storage: torch.UntypedStorage) -> np.ndarray:
    """The same memory as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
