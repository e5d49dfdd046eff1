"""Weights in few bits times scales, in a form that XLA and Pallas multiply: on a TPU, on a GPU, on each device of a mesh.

One form holds them all: 8-bit integers with a scale for each output, FP8 with one for each output or block, 4 bits in blocks
with or without minima, and the tables that embeddings are. Its arrays keep the dims of the matrix: what divides a matrix
divides them, too.

Legend: I inputs, O outputs, N blocks of inputs, K inputs of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels.linear import blocks
from tilewright.kernels.linear.blocks import BLOCK, FORMS, PackedTable, QuantisedMatrix, units_of

ScaledFormat = Literal["int8", "fp8", "int4"]
"""Formats that a matrix can be brought into."""
FP8 = jnp.float8_e4m3fn
LARGEST_FP8 = 448.0
LANES = 128
LEAST_HALF = 2.0**-14
"""The least number that half precision holds with all of its digits. Chips take what is below for zero."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales", "minima"], meta_fields=["dtype", "width"])
@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix `[I, O]` whose entries are `value * scale + minimum`, scale and minimum being those of the entry's block.

    Attributes:
        values: `[I, O]`: int8, int4, uint4 or float8_e4m3fn.
        scales: `[N, M]`, N dividing I and M dividing O, in float32, or as the bits of half precision in uint16 (see `widened`).
            `[1, O]` for one scale to an output.
        minima: likewise; None where the format has none.
        dtype: that rows of a table are given in (`rows`).
        width: columns of a table that count, where zeros follow them; 0 for all.
    """

    values: Any
    scales: Any
    minima: Any = None
    dtype: str = "float32"
    width: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def T(self) -> "ScaledMatrix":
        """The transpose."""
        return jax.tree.map(lambda array: array.T, self)

    @property
    def in_blocks(self) -> bool:
        """True if an output has other than one scale of its own."""
        return self.scales.shape != (1, self.shape[1])

    def dequantised(self, dtype: DTypeLike) -> Array:
        """The matrix as an array. Inside a program XLA makes it part of whatever reads it, if it can."""

        def apart(array: Any) -> Array:
            """`[N, K, M, L]` of the matrix, `[N, 1, M, 1]` of its scales."""
            n, m = self.scales.shape
            rows, columns = array.shape
            return array.reshape(n, rows // n, m, columns // m)

        wide = apart(jnp.asarray(self.values).astype(jnp.float32)) * apart(widened(self.scales))
        wide = wide if self.minima is None else wide + apart(widened(self.minima))
        return wide.reshape(self.shape).astype(dtype)

    def rows(self, index: Int[Array, "*rows"]) -> Float[Array, "*rows O"]:
        """Some rows, dequantised: of a table, each of whose rows has scales of its own."""
        assert self.scales.shape[0] == len(self), "the rows of this matrix share scales"
        picked = jax.tree.map(lambda array: array[index.reshape(-1)], self)
        return picked.dequantised(self.dtype)[:, : self.width or None].reshape(*index.shape, -1)

    def cut(self, n: Array | int, count: int, dim: int) -> "ScaledMatrix":
        """Part n of so many along a dim. Raises a `ValueError` where that falls between the borders of parts and blocks."""

        def of(array: Any) -> Array:
            size = array.shape[dim]
            if size % count == 0:
                return jax.lax.dynamic_slice_in_dim(array, n * (size // count), size // count, dim)
            if count % size == 0:  # several parts of one block
                return jax.lax.dynamic_slice_in_dim(array, n // (count // size), 1, dim)
            raise ValueError(f"expected {count} parts to end where blocks do, found a matrix {self.shape} with {size} blocks")

        if self.shape[dim] % count:
            raise ValueError(f"expected a matrix that {count} parts divide along its dim {dim}, found one {self.shape}")
        return jax.tree.map(of, self)

    def part(self, bounds: tuple[slice, slice]) -> "ScaledMatrix | None":
        """Some inputs and outputs; None where these end within a block that others share."""
        cuts = [block_cut(size, count, at) for size, count, at in zip(self.shape, self.scales.shape, bounds, strict=True)]
        if None in cuts:
            return None
        chosen = cast(tuple[slice, slice], tuple(cuts))
        of_blocks = {name: getattr(self, name)[chosen] for name in ("scales", "minima") if getattr(self, name) is not None}
        return replace(self, values=self.values[bounds], **of_blocks)


@dataclass(frozen=True)
class DividedMatrix:
    """A matrix of a file in its bits, as devices divide it.

    Attributes:
        parts: that of each of this process's devices.
        sharding: of the array that it stands for.
    """

    parts: dict[Any, QuantisedMatrix | ScaledMatrix]
    sharding: Sharding


def divided(held: QuantisedMatrix | ScaledMatrix, shape: tuple[int, ...], sharding: Sharding) -> DividedMatrix | None:
    """A matrix of a file over devices; None where some device's part ends within a block that others share.

    Args:
        shape: of the array `[I, O]` that it stands for.
    """
    places = cast(dict[Any, Any], sharding.addressable_devices_indices_map(shape))
    found = {device: held.part(index) for device, index in places.items()}
    return None if None in found.values() else DividedMatrix(cast(Any, found), sharding)


def block_cut(size: int, count: int, at: slice) -> slice | None:
    """The blocks that entries of a dim lie in; None where these neither fill their blocks nor share one."""
    start, stop, _ = at.indices(size)
    each = size // count
    if start // each == (stop - 1) // each:
        return slice(start // each, start // each + 1)
    return None if start % each or stop % each else slice(start // each, stop // each)


def quantise_outputs(w: np.ndarray, largest: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A matrix `[I, O]` as int8 from -127 to 127, and a float32 scale for each output: its largest weight becomes 127.

    Args:
        largest: of each output, where there are more inputs than these.
    """
    units, scales = in_units(w, 127.0, largest)
    return np.rint(np.clip(units, -127, 127)).astype(np.int8), scales  # (a subnormal scale is too coarse)


def in_units(w: np.ndarray, most: float, largest: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in float32 over its outputs' scales, and these: each output's largest weight becomes `most`."""
    wide = np.asarray(w, np.float32)
    top = np.max(np.abs(wide), axis=0, initial=0.0) if largest is None else np.asarray(largest, np.float32)
    scales = top / np.float32(most)
    return np.divide(wide, scales, out=np.zeros_like(wide), where=scales > 0), scales


def in_eight_bits(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    values, scales = quantise_outputs(w, largest)
    return ScaledMatrix(values, scales[None])


def in_fp8(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    """Floats of 8 bits (e4m3), with a scale for each output: its largest weight becomes the largest of them."""
    units, scales = in_units(w, LARGEST_FP8, largest)
    return ScaledMatrix(np.clip(units, -LARGEST_FP8, LARGEST_FP8).astype(FP8), scales[None])


def in_four_bits(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    """Blocks of 32 inputs as the CPU kernels make them (Q4_1); 8 bits where the last block is not whole."""
    return in_eight_bits(w, largest) if len(w) % BLOCK else of_blocks(blocks.quantise(w, "q4_1"))


WAYS: dict[ScaledFormat, Callable[..., ScaledMatrix]] = {"int8": in_eight_bits, "fp8": in_fp8, "int4": in_four_bits}


def of_blocks(held: QuantisedMatrix) -> ScaledMatrix:
    """A file's matrix in blocks, with the very same weights: 4 bits as 4, others as 8; blocks are as wide as scales allow."""
    form = held.form
    units = units_of(held.integers, form.bits).astype(np.int16) - form.offset
    packed = {True: jnp.int4, False: jnp.uint4}[form.offset > 0] if form.bits == 4 else jnp.int8
    values = units.reshape(len(units), -1).T.astype(packed)
    scales = held.weight_scales().T
    minima = held.weight_minima()
    minima = None if minima is None else minima.T
    found = [each for each in (scales, minima) if each is not None]
    while len(found[0]) % 2 == 0 and all(np.array_equal(each[0::2], each[1::2]) for each in found):
        found = [each[0::2] for each in found]
    return ScaledMatrix(np.ascontiguousarray(values), *[cast(Any, narrowed(each)) for each in found])


Table = Float[Array, "V H"] | PackedTable | ScaledMatrix
"""An embedding as operations prepare it, whose rows are looked up."""


def bytes_of_table(rows: int, width: int) -> int:
    """Bytes of a table as `prepared_table` makes it."""
    return rows * (padded(width) + 4)


def bytes_of(inputs: int, outputs: int, kind: str) -> int:
    """Bytes of a matrix in a format that it is brought into, or that a file has; of a file's at most."""
    if kind == "int4":
        kind = "int8" if inputs % BLOCK else "q4_1"
    if kind not in FORMS:
        return (inputs + 4) * outputs
    form = FORMS[kind]
    each = 4 if form.steps + form.lows else 2
    parts = max(1, form.steps // form.group)
    numbers = (parts + (form.minima + form.lows > 0)) * inputs // BLOCK
    return (inputs * (4 if form.bits == 4 else 8) // 8 + each * numbers) * outputs


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """Numbers as the bits of half precision where that holds all of them, and none as a subnormal one; else in float32."""
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16)
    small = (np.abs(numbers) < LEAST_HALF) & (numbers != 0)
    same = np.array_equal(half.astype(np.float32), numbers)
    return np.ascontiguousarray(numbers.astype(np.float32) if small.any() or not same else half.view(np.uint16))


def widened(numbers: Any) -> Array:
    """The inverse of `narrowed`, by operations that a TPU has: it knows no numbers in half precision."""
    if numbers.dtype != jnp.uint16:
        return jnp.asarray(numbers)
    bits = jnp.asarray(numbers).astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((bits & 0x7FFF) << 13, jnp.float32) * jnp.float32(2.0**112)
    return jnp.where(bits >= 0x8000, -size, size)


def prepared(w: Any, kind: ScaledFormat, name: str, largest: Any = None) -> ScaledMatrix:
    """A matrix in few bits, on the device.

    Args:
        w: an array `[I, O]`; or what a file holds, in blocks or scaled already, whose bits stay.
        name: what a complaint calls it.
        largest: see `quantise_outputs`.

    Raises:
        ValueError: it is no matrix, or holds infinity or NaN.
    """
    if isinstance(w, QuantisedMatrix | ScaledMatrix):
        if not all(np.isfinite(each).all() for each in (w.scales, w.minima) if each is not None):
            raise ValueError(f"{name}: expected finite scales and minima, found infinity or NaN")
        return jax.device_put(of_blocks(w) if isinstance(w, QuantisedMatrix) else w)
    if getattr(w, "ndim", None) != 2 or 0 in w.shape:
        raise ValueError(f"{name}: expected a matrix [inputs, outputs], found shape {getattr(w, 'shape', None)}")
    wide = np.asarray(w)
    if not np.isfinite(wide.astype(np.float32)).all():
        raise ValueError(f"{name}: expected finite weights, which few bits can hold, found infinity or NaN")
    return jax.device_put(WAYS[kind](wide, None if largest is None else np.asarray(largest, np.float32)))


def prepared_table(table: Any, name: str) -> ScaledMatrix:
    """A table `[V, H]` in 8 bits, with a scale for each row, as wide as `padded` says."""
    width = table.shape[-1]
    rows = jnp.pad(table, ((0, 0), (0, padded(width) - width)))
    return replace(prepared(rows.T, "int8", name).T, dtype=table.dtype.name, width=width)


def padded(width: int) -> int:
    """Columns of a table: of no whole number of a TPU's lanes it would lie transposed there, and be copied for each lookup."""
    return -(-width // LANES) * LANES
