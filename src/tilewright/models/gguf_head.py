"""Head of a GGUF file: its metadata, and the places of its tensors.

llama.cpp's own library reads heads too, but makes NumPy arrays for each string, which takes seconds for a vocabulary.

Source: the format's description in ggml (docs/gguf.md), versions 2 and 3.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata types of a fixed size, as formats of `struct` and NumPy."""
TEXT = 8
ARRAY = 9
"""Metadata types of variable size."""
TYPED = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
"""Tensor types with a NumPy dtype; other tensors are bytes."""
LENGTH = struct.Struct("<Q")
"""Length of a string in bytes."""
ALIGNMENT = 32
"""Default alignment of tensors, in bytes."""


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """Tensor of a file.

    Attributes:
        shape: its dims, the innermost first.
        tensor_type: its type in llama.cpp's library.
        data_offset: its first byte in the file.
        n_bytes: its size in the file.
        file: the whole file as bytes.
    """

    name: str
    shape: tuple[int, ...]
    tensor_type: Any
    data_offset: int
    n_bytes: int
    file: np.ndarray

    @property
    def data(self) -> np.ndarray:
        """Numbers of a type that NumPy knows, else uint8, with the outermost dim first.

        The innermost dim then counts bytes.
        """
        part = self.file[self.data_offset : self.data_offset + self.n_bytes].view(TYPED.get(self.tensor_type.name, np.uint8))
        return part.reshape(*reversed(self.shape[1:]), -1)


class Cursor:
    """Reads values one after another. Missing bytes raise a `ValueError`."""

    def __init__(self, data: np.ndarray):
        self.data = data.data
        self.at = 0

    def bytes(self, size: int) -> bytes:
        found = self.data[self.at : self.at + size]
        if len(found) < size:
            raise ValueError(f"{size:,} bytes are missing at byte {self.at:,}")
        self.at += size
        return bytes(found)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Reads a value of metadata of a type."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"metadata of type {kind} are unknown")
        inner = self.number("I")
        count = self.number("Q")
        if inner in NUMBERS:
            dtype = np.dtype(NUMBERS[inner]).newbyteorder("<")
            return np.frombuffer(self.bytes(count * dtype.itemsize), dtype).tolist()
        if inner != TEXT:
            raise ValueError(f"arrays of type {inner} are unknown")
        return self.texts(count)

    def texts(self, count: int) -> list[str]:
        """Reads strings in one tight loop, because a vocabulary has hundreds of thousands of them."""
        data = self.data
        size = len(data)
        begin = self.at
        found = list[str]()
        for _ in range(count):
            first = begin + 8
            end = first + LENGTH.unpack_from(data, begin)[0] if first <= size else first
            if end > size:
                raise ValueError(f"{end - size:,} bytes are missing at byte {size:,}")
            found.append(str(data[first:end], "utf-8"))
            begin = end
        self.at = begin
        return found


def read_head(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Reads the metadata and the tensors of a file, by name.

    Raises:
        ValueError: the file is not GGUF, is damaged, or is cut off within its head.
    """
    import gguf

    file = np.asarray(np.memmap(path, np.uint8, "r"))
    cursor = Cursor(file)
    magic = cursor.bytes(4)
    version = cursor.number("I")
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"expected GGUF of version {' or '.join(map(str, VERSIONS))}, found {magic!r} of {version}")
    tensors = cursor.number("Q")
    values = cursor.number("Q")
    fields = {}
    for _ in range(values):
        name = cursor.text()
        fields[name] = cursor.value(cursor.number("I"))
    described = []
    for _ in range(tensors):
        name = cursor.text()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
        described.append((name, shape, gguf.GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    alignment = fields.get("general.alignment", ALIGNMENT)
    begin = -(-cursor.at // alignment) * alignment
    found = {}
    for name, shape, kind, offset in described:
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        if name in found or not shape or shape[0] % weights:
            raise ValueError(f"{name}: expected one tensor of whole blocks of {weights} weights, found two or {list(shape)}")
        found[name] = GGUFTensor(name, shape, kind, begin + offset, prod(shape) // weights * size, file)
    return fields, found
