"""Tensors of a GGUF file in Hugging Face's layout, of which only what is asked for is read."""

from collections.abc import Sequence

import numpy as np

from tilewright.kernels.linear.blocks import QuantisedMatrix
from tilewright.models.gguf_blocks import KEPT, read_blocks
from tilewright.models.gguf_head import GGUFTensor

PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantised."""


class GGUFSlice:
    """One tensor in Hugging Face's layout, of which only what is asked for is read; the interface is that of safetensors."""

    def __init__(self, tensor: GGUFTensor, rows: np.ndarray | None, offset: float = 0.0):
        """Args:
        rows: those of the file, in Hugging Face's order; None where it is the file's.
        offset: what the file's numbers are more than Hugging Face's.
        """
        self.tensor = tensor
        self.rows = rows
        self.offset = np.float32(offset)

    def get_shape(self) -> list[int]:
        return [int(size) for size in reversed(self.tensor.shape)]

    def get_dtype(self) -> str:
        """The dtype that is read, whatever the file holds."""
        return "F32"

    @property
    def quantised(self) -> str:
        """The format that its weights are quantised in, by llama.cpp's name; empty for plain numbers."""
        kind = self.tensor.tensor_type.name
        return "" if kind in PLAIN else kind

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        """These parts of each dim, as float32. Rows are dequantised one by one, so that others cost nothing."""
        from gguf.quants import dequantize

        rows, *columns = bounds
        data = self.tensor.data[rows] if self.rows is None else self.tensor.data[self.rows[rows]]
        found = np.asarray(dequantize(data, self.tensor.tensor_type), np.float32)[(slice(None), *columns)]
        return found - self.offset if self.offset else found

    @property
    def kept(self) -> str:
        """The format in which products read weights of this type as they are; empty if they do not."""
        return KEPT.get(self.tensor.tensor_type.name, "")

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        """Some rows of weights as the file has them, of formats that products read as they are; None of others."""
        data = self.tensor.data[rows] if self.rows is None else self.tensor.data[self.rows[rows]]
        return read_blocks(data.reshape(-1, data.shape[-1]), self.tensor.tensor_type.name)


class TurnedSlice(GGUFSlice):
    """Experts' matrices `[E, in, out]` of tensors `[E, out, in]`, or biases `[E, out]`: of several tensors, outputs in turn."""

    def __init__(self, *tensors: GGUFTensor):
        super().__init__(tensors[0], None)
        self.tensors = tensors

    def get_shape(self) -> list[int]:
        experts, outputs, *inputs = super().get_shape()
        return [experts, *inputs, len(self.tensors) * outputs]

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        experts, *others = bounds
        every = [slice(None)] * len(others)
        parts = np.stack([GGUFSlice(tensor, None)[(experts, *every)] for tensor in self.tensors], axis=2)
        return parts.reshape(len(parts), -1, *parts.shape[3:]).swapaxes(1, -1)[(slice(None), *others)]

    @property
    def alike(self) -> bool:
        """True if all tensors are of one type."""
        return len({tensor.tensor_type for tensor in self.tensors}) == 1

    @property
    def kept(self) -> str:
        return super().kept if self.alike else ""

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        """Weights of some experts as the file has them; an expert's outputs behind another's."""
        if not self.alike:
            return None
        data = np.stack([tensor.data[rows] for tensor in self.tensors], axis=2)
        return read_blocks(data.reshape(-1, data.shape[-1]), self.tensor.tensor_type.name)


class ArrangedSlice(GGUFSlice):
    """A tensor whose rows or columns come in another order than in the file, of one of its tensors or of several."""

    def __init__(
        self,
        tensors: Sequence[GGUFTensor],
        rows: np.ndarray | None = None,
        columns: np.ndarray | None = None,
        shape: Sequence[int] | None = None,
        log_rates: bool = False,
    ):
        """Args:
        tensors: whose rows come one behind another.
        columns: those of the file, in Hugging Face's order.
        shape: Hugging Face's, of a small tensor that the file has in other dims.
        log_rates: the file has the numbers' exponentials, with a minus sign.
        """
        super().__init__(tensors[0], rows)
        self.tensors = tensors
        self.columns = columns
        self.shape = shape
        self.log_rates = log_rates

    def get_shape(self) -> list[int]:
        _, *others = super().get_shape()
        return [self.count, *others] if self.shape is None else list(self.shape)

    @property
    def count(self) -> int:
        """Rows of all its tensors."""
        return sum(int(tensor.shape[-1]) for tensor in self.tensors)

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        if self.shape is not None:
            return self.arranged(slice(None)).reshape(self.shape)[bounds]
        rows, *others = bounds
        return self.arranged(rows)[(slice(None), *others)]

    def arranged(self, rows: slice) -> np.ndarray:
        """Some rows, as float32."""
        wanted = self.order(rows)
        _, *others = super().get_shape()
        found = np.empty((len(wanted), *others), np.float32)
        begin = 0
        for tensor in self.tensors:
            end = begin + int(tensor.shape[-1])
            inside = (begin <= wanted) & (wanted < end)
            found[inside] = GGUFSlice(tensor, wanted[inside] - begin)[(slice(None),) * found.ndim]
            begin = end
        found = found if self.columns is None else found[:, self.columns]
        return np.log(-found) if self.log_rates else found

    def order(self, rows: slice) -> np.ndarray:
        """Number among the rows of all its tensors of some rows."""
        return np.arange(self.count)[rows] if self.rows is None else self.rows[rows]

    @property
    def kept(self) -> str:
        alike = len({tensor.tensor_type for tensor in self.tensors}) == 1
        return super().kept if alike and self.columns is None and self.shape is None else ""

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        if not self.kept:
            return None
        data = np.concatenate([tensor.data.reshape(-1, tensor.data.shape[-1]) for tensor in self.tensors])
        return read_blocks(data[self.order(rows)], self.tensor.tensor_type.name)
