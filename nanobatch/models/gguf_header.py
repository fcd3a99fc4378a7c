"""The header of a .gguf file: its metadata, and where each of its tensors lies.

    "GGUF" version | number of tensors, of keys | key, type, value ... |
    name, dimensions, type, offset ... | padding | data of tensors, each at a multiple of
                                                   general.alignment from here

Why not gguf's own GGUFReader: it believes every count, so that one of 2**60 keeps it busy for
ever; it reads past the end of the file without a word, checks no alignment; and it makes an
array of each of the vocabulary's strings, which takes 2 s.

Always holds: every count and length is compared with the bytes that are left before anything is
read by it, and every tensor lies whole inside the file.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanobatch.utils.files import check_file

VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
           12: "d"}  # fmt: skip
UINT32, STRING, ARRAY = 4, 8, 9
MAX_DIMS = 4
FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


@dataclass
class GgufTensor:
    """A tensor's place in the file.

    Attributes:
        shape: its sizes, rows first as in torch (a file has the shortest stride first).
        kind: a gguf.GGMLQuantizationType.
        data: its bytes, uint8, not copied.
    """

    shape: tuple[int, ...]
    kind: object
    data: np.ndarray

    def dequantized(self) -> np.ndarray:
        """Its numbers, float32 in `shape`.

        Raises:
            NotImplementedError: gguf cannot read its type.
        """
        from gguf.quants import dequantize

        stored = self.data.view(FLOATS.get(self.kind.name, np.uint8))
        return dequantize(stored.reshape(*self.shape[:-1], -1), self.kind).reshape(self.shape)


@dataclass
class GgufHeader:
    """What a file says of itself: fields by their keys, tensors by their names."""

    fields: dict[str, object]
    tensors: dict[str, GgufTensor]


def read_gguf(file: Path) -> GgufHeader:
    """Read a file's header; the tensors' numbers stay in the file.

    Raises:
        FileNotFoundError, ValueError: there is no such file; it is not a whole GGUF file.
    """
    check_file(file)
    try:
        with open(file, "rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(data).header()
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not a whole GGUF file: {error}") from None


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at = data, 0

    def header(self) -> GgufHeader:
        """All of it; ValueError if it is not true of this file."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self._scalar(UINT32)
        if version not in VERSIONS:
            raise ValueError(f"version is {version}; it must be one of {VERSIONS}")
        num_tensors, num_fields = self._scalar(10), self._scalar(10)
        fields: dict[str, object] = {}
        for _ in range(self._fits("the number of keys", num_fields, 13)):
            name = self._string("a key")
            if name in fields:
                raise ValueError(f"{name} is there twice")
            fields[name] = self._value(name, self._scalar(UINT32))
        infos = [
            self._tensor_info()
            for _ in range(self._fits("the number of tensors", num_tensors, 24))
        ]
        return GgufHeader(fields, self._tensors(infos, _alignment(fields)))

    def _fits(self, what: str, count: int, num_bytes: int) -> int:
        """count, if that many things of num_bytes each can be left in the file."""
        left = max(0, len(self._data) - self._at)
        if count * num_bytes > left:
            raise ValueError(f"{what} is {count}, and the file has {left} more bytes")
        return count

    def _bytes(self, count: int, what: str = "a length") -> bytes:
        end = self._at + self._fits(what, count, 1)
        piece, self._at = self._data[self._at : end], end
        return piece

    def _scalar(self, kind: int) -> int | float | bool:
        code = "<" + SCALARS[kind]
        return struct.unpack(code, self._bytes(struct.calcsize(code)))[0]

    def _string(self, what: str) -> str:
        return self._bytes(self._scalar(10), f"the length of {what}").decode()

    def _value(self, name: str, kind: int) -> object:
        if kind == STRING:
            return self._string(name)
        if kind in SCALARS:
            return self._scalar(kind)
        if kind != ARRAY:
            raise ValueError(f"{name} has type {kind}, which is unknown")
        kind, count = self._scalar(UINT32), self._scalar(10)
        what = f"the length of {name}"
        if kind == STRING:
            return [self._string(name) for _ in range(self._fits(what, count, 8))]
        if kind not in SCALARS:
            raise ValueError(f"{name} is an array of type {kind}, which is not supported")
        dtype = np.dtype("<" + SCALARS[kind])
        piece = self._bytes(self._fits(what, count, dtype.itemsize) * dtype.itemsize)
        return np.frombuffer(piece, dtype).tolist()

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and offset."""
        name, num_dims = self._string("a tensor's name"), self._scalar(UINT32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions; 1 to {MAX_DIMS} can be")
        shape = tuple(self._scalar(10) for _ in range(num_dims))
        return name, shape[::-1], self._scalar(UINT32), self._scalar(10)

    def _tensors(self, infos: list, alignment: int) -> dict[str, GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        start = self._at + -self._at % alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise ValueError(f"{name} is there twice")
            if kind not in GGML_QUANT_SIZES:
                raise ValueError(f"{name} has type {kind}, which is unknown")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                raise ValueError(f"{name} has shape {list(shape)}; rows are blocks of {block}")
            if offset % alignment:
                raise ValueError(
                    f"{name} has offset {offset}, not a multiple of {alignment}, the alignment"
                )
            self._at = start + offset
            num_bytes = math.prod(shape) // block * block_bytes
            self._fits(f"the size of {name}", num_bytes, 1)
            data = np.frombuffer(self._data, np.uint8, num_bytes, self._at)
            tensors[name] = GgufTensor(shape, GGMLQuantizationType(kind), data)
        return tensors


def _alignment(fields: dict) -> int:
    alignment = fields.get("general.alignment", 32)
    is_power_of_2 = type(alignment) is int and alignment > 0 and alignment.bit_count() == 1
    if not is_power_of_2:
        raise ValueError(f"general.alignment is {alignment!r}; it must be a power of two")
    return alignment
