"""A safetensors file that counts what is read of it."""

from pathlib import Path
from typing import Any

import numpy as np

from tilewright.models.stored import SafetensorsFile

READ: list[tuple[str, int]] = []
"""Name and bytes of each part that was read, in order."""


class CountedPart:
    """Slice that counts the entries that are read; shape and dtype cost nothing."""

    def __init__(self, name: str, part: Any):
        self.name = name
        self.part = part
        self.get_shape = part.get_shape
        self.get_dtype = part.get_dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        value = self.part[index]
        READ.append((self.name, value.nbytes))
        return value


class CountedFile:
    """Stands in for a `SafetensorsFile`. There is no `get_tensor`: nobody may read a whole tensor unasked."""

    def __init__(self, path: Path):
        self.file = SafetensorsFile(path)
        self.keys = self.file.keys

    def __enter__(self) -> "CountedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def get_slice(self, name: str) -> CountedPart:
        return CountedPart(name, self.file.get_slice(name))
