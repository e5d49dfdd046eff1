"""Tensors of a GGUF file in Hugging Face's layout, read part by part."""

from collections.abc import Sequence

import numpy as np

from tilewright.kernels.linear.blocks import QuantisedMatrix
from tilewright.models.gguf_blocks import BLOCK_FORMATS, read_blocks
from tilewright.models.gguf_head import GGUFTensor

PLAIN = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are not quantised."""


class GGUFSlice:
    """Tensor in Hugging Face's layout, read part by part; the interface is that of safetensors."""

    def __init__(self, tensor: GGUFTensor, rows: np.ndarray | None, offset: float = 0.0):
        """Args:
        rows: rows of the file in Hugging Face's order; None if the orders are the same.
        offset: subtracted from the file's numbers.
        """
        self.tensor = tensor
        self.rows = rows
        self.offset = np.float32(offset)

    def get_shape(self) -> list[int]:
        return [int(size) for size in reversed(self.tensor.shape)]

    def get_dtype(self) -> str:
        """Returns the dtype of what is read, for any type in the file."""
        return "F32"

    @property
    def quantised(self) -> str:
        """Format of quantised weights, by llama.cpp's name; empty for plain numbers."""
        kind = self.tensor.tensor_type.name
        return "" if kind in PLAIN else kind

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        """Reads these parts of each dim as float32, dequantising only the rows that are read."""
        from gguf.quants import dequantize

        rows, *columns = bounds
        data = self.tensor.data[rows] if self.rows is None else self.tensor.data[self.rows[rows]]
        found = np.asarray(dequantize(data, self.tensor.tensor_type), np.float32)[(slice(None), *columns)]
        return found - self.offset if self.offset else found

    @property
    def native_format(self) -> str:
        """Format in which matmuls read weights of this type without dequantising; empty if they cannot."""
        return BLOCK_FORMATS.get(self.tensor.tensor_type.name, "")

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        """Reads rows of weights as blocks of the file; None for types that matmuls cannot read."""
        data = self.tensor.data[rows] if self.rows is None else self.tensor.data[self.rows[rows]]
        return read_blocks(data.reshape(-1, data.shape[-1]), self.tensor.tensor_type.name)


class TransposedSlice(GGUFSlice):
    """Experts' matrices `[E, in, out]` of tensors `[E, out, in]`, or biases `[E, out]`.

    Outputs of several tensors alternate.
    """

    def __init__(self, *tensors: GGUFTensor):
        super().__init__(tensors[0], None)
        self.tensors = tensors

    def get_shape(self) -> list[int]:
        experts, outputs, *inputs = super().get_shape()
        return [experts, *inputs, len(self.tensors) * outputs]

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        experts, *other_dims = bounds
        every = [slice(None)] * len(other_dims)
        parts = np.stack([GGUFSlice(tensor, None)[(experts, *every)] for tensor in self.tensors], axis=2)
        return parts.reshape(len(parts), -1, *parts.shape[3:]).swapaxes(1, -1)[(slice(None), *other_dims)]

    @property
    def alike(self) -> bool:
        """True if all tensors are of one type."""
        return len({tensor.tensor_type for tensor in self.tensors}) == 1

    @property
    def native_format(self) -> str:
        return super().native_format if self.alike else ""

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        """Reads weights of some experts as blocks of the file; an expert's outputs follow another's."""
        if not self.alike:
            return None
        data = np.stack([tensor.data[rows] for tensor in self.tensors], axis=2)
        return read_blocks(data.reshape(-1, data.shape[-1]), self.tensor.tensor_type.name)


class ArrangedSlice(GGUFSlice):
    """Tensor whose rows or columns have another order than in the file, from one or several of its tensors."""

    def __init__(
        self,
        tensors: Sequence[GGUFTensor],
        rows: np.ndarray | None = None,
        columns: np.ndarray | None = None,
        shape: Sequence[int] | None = None,
        log_rates: bool = False,
    ):
        """Args:
        tensors: tensors whose rows follow one another.
        columns: columns of the file in Hugging Face's order.
        shape: Hugging Face's shape of a small tensor with other dims in the file.
        log_rates: the file has the negated exponentials of the numbers.
        """
        super().__init__(tensors[0], rows)
        self.tensors = tensors
        self.columns = columns
        self.shape = shape
        self.log_rates = log_rates

    def get_shape(self) -> list[int]:
        _, *other_dims = super().get_shape()
        return [self.count, *other_dims] if self.shape is None else list(self.shape)

    @property
    def count(self) -> int:
        """Number of rows of all its tensors."""
        return sum(int(tensor.shape[-1]) for tensor in self.tensors)

    def __getitem__(self, bounds: tuple[slice, ...]) -> np.ndarray:
        if self.shape is not None:
            return self.arranged(slice(None)).reshape(self.shape)[bounds]
        rows, *other_dims = bounds
        return self.arranged(rows)[(slice(None), *other_dims)]

    def arranged(self, rows: slice) -> np.ndarray:
        """Reads some rows, as float32."""
        wanted = self.order(rows)
        _, *other_dims = super().get_shape()
        found = np.empty((len(wanted), *other_dims), np.float32)
        begin = 0
        for tensor in self.tensors:
            end = begin + int(tensor.shape[-1])
            inside = (begin <= wanted) & (wanted < end)
            found[inside] = GGUFSlice(tensor, wanted[inside] - begin)[(slice(None),) * found.ndim]
            begin = end
        found = found if self.columns is None else found[:, self.columns]
        return np.log(-found) if self.log_rates else found

    def order(self, rows: slice) -> np.ndarray:
        """Returns the numbers of some rows among the rows of all its tensors."""
        return np.arange(self.count)[rows] if self.rows is None else self.rows[rows]

    @property
    def native_format(self) -> str:
        alike = len({tensor.tensor_type for tensor in self.tensors}) == 1
        return super().native_format if alike and self.columns is None and self.shape is None else ""

    def blocks(self, rows: slice = slice(None)) -> QuantisedMatrix | None:
        if not self.native_format:
            return None
        data = np.concatenate([tensor.data.reshape(-1, tensor.data.shape[-1]) for tensor in self.tensors])
        return read_blocks(data[self.order(rows)], self.tensor.tensor_type.name)
