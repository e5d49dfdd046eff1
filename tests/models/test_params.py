"""Building parameters from a checkpoint's tensors."""

import numpy as np
import pytest

from tilewright.models import params
from tilewright.models.params import ArraySpec, Bounds


def test_the_largest_arrays_are_read_first_and_returned_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(params, "cores", lambda: 1)
    specs = [ArraySpec(name, (size,), ("hidden",)) for name, size in (("a", 3), ("b", 8), ("c", 5))]
    order = list[str]()

    def read(name: str, bounds: Bounds) -> np.ndarray:
        order.append(name)
        ((start, stop),) = bounds
        return np.arange(start, stop, dtype=np.float32)

    found = params.from_tensors(specs, read, "float32")
    assert order == ["b", "c", "a"]
    assert [np.asarray(array).size for array in found] == [3, 8, 5]
