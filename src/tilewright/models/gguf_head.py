"""The head of a GGUF file: its metadata, and where its tensors lie.

llama.cpp's own library reads heads, too, but makes arrays of NumPy's for each string, which takes seconds for a vocabulary.

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
"""Types of metadata that have one size, in the words of `struct`, which are NumPy's."""
TEXT = 8
ARRAY = 9
"""The other types."""
TYPED = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
"""Tensors whose numbers NumPy knows; those of others are bytes."""
ALIGNMENT = 32
"""Of tensors, unless the file says another."""


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """One tensor of a file.

    Attributes:
        shape: its dims, the innermost first.
        tensor_type: llama.cpp's type of it.
        data_offset: where in the file it begins, in bytes.
        n_bytes: its size there.
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
        """The outermost dim first: numbers of a type that NumPy knows, else uint8, of which the innermost dim has its bytes."""
        part = self.file[self.data_offset : self.data_offset + self.n_bytes].view(TYPED.get(self.tensor_type.name, np.uint8))
        return part.reshape(*reversed(self.shape[1:]), -1)


class Cursor:
    """Reads values one after another. What is missing is a `ValueError`."""

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
        """A value of metadata of this type."""
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
        return [self.text() for _ in range(count)]


def read_head(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The metadata and the tensors of a file, by name.

    Raises:
        ValueError: it is no such file, or damaged, or cut off within its head.
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
            raise ValueError(f"{name} is there twice, or has no whole number of blocks of {weights} weights: {list(shape)}")
        found[name] = GGUFTensor(name, shape, kind, begin + offset, prod(shape) // weights * size, file)
    return fields, found
