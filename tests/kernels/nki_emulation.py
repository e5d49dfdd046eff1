"""NumPy emulation of the NKI 0.7 operations that the kernels use, for machines without AWS's packages.

A kernel that is right here agrees with the documentation as this file reads it (docstrings of `nki.isa` and `nki.language` in
aws-neuron/aws-neuron-sdk, August 2026, and what NKI 0.7's documents of October 2026 say about loops). It does NOT prove that

- AWS's compiler takes the kernel: it traces it with Python, places buffers and schedules engines, and may refuse any of it;
- the device gives the same numbers: rounding, order of sums and races between engines are not modelled, all runs in order;
- SBUF suffices: only what Python still refers to is counted, alignment and fragments are not;
- anything about time. Descriptors are counted as contiguous runs; the hardware may split or merge them.

Rules that are checked: at most 128 partitions and 192 KiB in each; compute on tiles in SBUF only; a view that keeps the
partitions; access patterns and indices within their tensor; indirect sources in HBM with one uint32 index for each partition;
equal sizes; reduction over the last dims only; scalars of float32 and one for each partition; DMAs that convert nothing; loops
on the device whose variable is only an offset, and whose body returns nothing. New memory holds NaN, or 4 where it holds
integers, as in AWS's simulator.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

PARTITIONS = 128
PARTITION_BYTES = 192 * 1024
SBUF = "sbuf"
HBM = "shared_hbm"
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "uint32": np.uint32,
    "int32": np.int32,
    "uint8": np.uint8,
}


class NkiError(Exception):
    """Error for a violated rule of NKI's documentation."""


def demand(holds: bool, message: str) -> None:
    if not holds:
        raise NkiError(message)


@dataclass
class Counts:
    """What the DMAs moved: instructions, contiguous runs, bytes of HBM read and written; and bytes of a partition in use."""

    calls: int = 0
    descriptors: int = 0
    read: int = 0
    written: int = 0
    used: int = 0


class Register:
    """The variable of a loop on the device: Python knows no number, so that the class has no arithmetic."""

    def __init__(self, value: int):
        self.value = value


class Tensor:
    """A view of memory: `view` is what instructions see, `flat` the whole of the memory."""

    def __init__(self, flat: np.ndarray, view: np.ndarray, buffer: str, indices: np.ndarray | None = None):
        self.flat = flat
        self.array = view
        self.buffer = buffer
        self.indices = indices

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    def __getitem__(self, key: Any) -> "Tensor":
        for size, part in zip(self.shape, key if isinstance(key, tuple) else (key,), strict=False):
            inside = part.stop is None or part.stop <= size if isinstance(part, slice) else -size <= part < size
            demand(inside, f"{part} is outside of {size}")
        return Tensor(self.flat, self.array[key], self.buffer)

    def permute(self, dims: tuple[int, ...]) -> "Tensor":
        demand(self.buffer == HBM or dims[0] == 0, "the partition dim stays first")
        return Tensor(self.flat, self.array.transpose(dims), self.buffer)

    def ap(
        self,
        pattern: list[list[int]],
        offset: int = 0,
        scalar_offset: Register | None = None,
        vector_offset: "Tensor | None" = None,
        indirect_dim: int = 0,
    ) -> "Tensor":
        """Elements at `offset + sum(step * i)` of the memory; with indices, one of these takes the place of the first i.

        A register moves them along a dim of the tensor by as many places.
        """
        shape = tuple(count for _, count in pattern)
        size = self.array.itemsize
        if scalar_offset is not None:
            demand(vector_offset is None and self.array.flags.c_contiguous, "a register moves in a whole tensor")
            offset = offset + scalar_offset.value * int(np.prod(self.shape[indirect_dim + 1 :], dtype=int))
        if vector_offset is None:
            last = offset + sum(step * (count - 1) for step, count in pattern)
            demand(0 <= offset <= last < self.flat.size, f"pattern {pattern} at {offset} leaves {self.flat.size} elements")
            strides = tuple(step * size for step, _ in pattern)
            return Tensor(self.flat, np.lib.stride_tricks.as_strided(self.flat[offset:], shape, strides), self.buffer)
        demand(self.buffer == HBM and indirect_dim == 0, "what is indexed is in HBM, here by its first dim")
        demand(vector_offset.buffer == SBUF and vector_offset.dtype == "uint32", "indices are uint32 in SBUF")
        demand(vector_offset.shape == (shape[0], 1), f"one index for each of {shape[0]} partitions, not {vector_offset.shape}")
        indices = vector_offset.array[:, 0].astype(np.int64)
        demand(bool(np.all(indices < self.shape[0])), f"index {indices.max()} of {self.shape[0]} rows")
        row = np.prod(self.shape[1:], dtype=int)
        inner = sum(np.arange(count).reshape(-1, *[1] * depth) * step for depth, (step, count) in enumerate(pattern[:0:-1]))
        demand(pattern[0][0] == row and int(np.max(inner)) < row, f"pattern {pattern} is not of rows of {row}")
        return Tensor(self.flat, self.flat[indices.reshape(-1, *[1] * (len(shape) - 1)) * row + inner], HBM, indices)


class Language(SimpleNamespace):
    """`nki.language`, with the memory that it hands out."""

    def __init__(self, counts: Counts):
        super().__init__(sbuf=SBUF, shared_hbm=HBM, add=np.add, multiply=np.multiply, **{name: name for name in DTYPES})
        self.counts = counts

    def ndarray(self, shape: tuple[int, ...], dtype: str, buffer: str = SBUF) -> Tensor:
        array = np.full(shape, np.nan if "float" in dtype else 4, DTYPES[dtype])
        if buffer == SBUF:
            demand(shape[0] <= PARTITIONS, f"{shape[0]} partitions")
            size = array.nbytes // shape[0]
            demand(self.counts.used + size <= PARTITION_BYTES, f"{self.counts.used + size} bytes of a partition")
            self.counts.used += size
            weakref.finalize(array, self.free, size)
        return Tensor(array.reshape(-1), array, buffer)

    def free(self, size: int) -> None:
        self.counts.used -= size

    def fori_loop(self, lower: int, upper: int, body_fun: Callable[[Register], Any], step: int = 1) -> None:
        demand(isinstance(step, int) and step > 0, f"step {step}")
        for value in range(lower, upper, step):
            demand(body_fun(Register(value)) is None, "a loop's body returns nothing")


class Instructions:
    """`nki.isa`."""

    def __init__(self, counts: Counts):
        self.counts = counts

    def dma_copy(self, dst: Tensor, src: Tensor) -> None:
        demand({dst.buffer, src.buffer} == {SBUF, HBM}, "between HBM and SBUF")
        demand(dst.shape == src.shape, f"{src.shape} into {dst.shape}")
        self.counts.calls += 1
        self.counts.descriptors += max(runs(dst.array), runs(src.array), src.shape[0])
        self.counts.read += src.array.nbytes if src.buffer == HBM else 0
        self.counts.written += dst.array.nbytes if dst.buffer == HBM else 0
        demand(dst.dtype == src.dtype, f"{src.dtype} into {dst.dtype}")
        dst.array[...] = src.array

    def memset(self, dst: Tensor, value: float) -> None:
        self.on_chip(dst)
        dst.array[...] = value

    def tensor_copy(self, dst: Tensor, src: Tensor) -> None:
        self.on_chip(dst, src)
        demand(dst.shape == src.shape, f"{src.shape} into {dst.shape}")
        dst.array[...] = src.array.astype(np.float32).astype(dst.array.dtype)

    def tensor_tensor(self, dst: Tensor, data1: Tensor, data2: Tensor, op: Callable) -> None:
        self.on_chip(dst, data1, data2)
        demand(dst.shape == data1.shape == data2.shape, f"{data1.shape}, {data2.shape} into {dst.shape}")
        dst.array[...] = op(data1.array.astype(np.float32), data2.array.astype(np.float32)).astype(dst.array.dtype)

    def tensor_scalar(self, dst: Tensor, data: Tensor, op0: Callable, operand0: Tensor) -> None:
        self.on_chip(dst, data, operand0)
        demand(operand0.shape == (data.shape[0], 1) and operand0.dtype == "float32", f"operand {operand0.shape}")
        demand(dst.shape == data.shape, f"{data.shape} into {dst.shape}")
        factor = operand0.array.reshape(-1, *[1] * (len(data.shape) - 1))
        dst.array[...] = op0(data.array.astype(np.float32), factor).astype(dst.array.dtype)

    def tensor_reduce(self, dst: Tensor, op: Any, data: Tensor, axis: tuple[int, ...]) -> None:
        self.on_chip(dst, data)
        rank = len(data.shape)
        demand(0 not in axis and tuple(axis) == tuple(range(rank - len(axis), rank)), f"axes {axis} are not the last of {rank}")
        demand(dst.shape == data.shape[: -len(axis)], f"{data.shape} into {dst.shape}")
        reduced = data.array.astype(np.float32)
        for _ in axis:
            reduced = op.reduce(reduced, axis=-1)
        dst.array[...] = reduced.astype(dst.array.dtype)

    def tensor_copy_predicated(self, dst: Tensor, src: Tensor, predicate: Tensor) -> None:
        self.on_chip(dst, src, predicate)
        demand(dst.shape == src.shape == predicate.shape and dst.dtype == src.dtype, f"{src.shape} into {dst.shape}")
        demand(predicate.dtype in ("uint8", "uint16", "uint32"), f"predicate of {predicate.dtype}")
        np.copyto(dst.array, src.array, where=predicate.array != 0)

    def on_chip(self, *tiles: Tensor) -> None:
        for tile in tiles:
            demand(tile.buffer == SBUF and tile.shape[0] <= PARTITIONS, f"{tile.shape} in {tile.buffer}")


def runs(array: np.ndarray) -> int:
    """Contiguous runs of a view's memory, in SBUF and in HBM alike, where no run spans what two partitions hold."""
    length = array.itemsize
    dim = array.ndim - 1
    while dim > 0 and (array.strides[dim] == length or array.shape[dim] == 1):
        length *= array.shape[dim]
        dim -= 1
    return array.nbytes // length


def run(module: Any, kernel: Callable, *operands: Any) -> tuple[np.ndarray, Counts]:
    """Runs a kernel of a module whose `nl` and `nisa` this file stands in for; arrays go in as tensors in HBM."""
    counts = Counts()
    before = module.nl, module.nisa
    module.nl = Language(counts)
    module.nisa = Instructions(counts)
    try:
        placed = [Tensor(each.reshape(-1), each, HBM) if isinstance(each, np.ndarray) else each for each in operands]
        return kernel(*placed).array, counts
    finally:
        module.nl, module.nisa = before
