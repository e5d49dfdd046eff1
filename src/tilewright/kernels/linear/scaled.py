"""Quantised weights with scales, in a form that XLA and Pallas can multiply on TPUs, GPUs and the devices of a mesh.

One form covers 8-bit integers with a scale per output, FP8 with a scale per output or block, 4-bit blocks with or without
minima, and embedding tables. Its arrays keep the dims of the matrix, so that they are sharded like the matrix.

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
"""Formats into which a matrix can be quantised."""
FP8 = jnp.float8_e4m3fn
LARGEST_FP8 = 448.0
LANES = 128
LEAST_HALF = 2.0**-14
"""Smallest normal number of half precision. Chips flush smaller numbers to zero."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales", "minima"], meta_fields=["dtype", "width"])
@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix `[I, O]` with entries `value * scale + minimum`, where scale and minimum belong to the entry's block.

    Attributes:
        values: `[I, O]`: int8, int4, uint4 or float8_e4m3fn.
        scales: `[N, M]`, N dividing I and M dividing O, in float32, or half-precision bits as uint16 (see `widened`).
            `[1, O]` for one scale per output.
        minima: like `scales`; None if the format has none.
        dtype: dtype of a table's dequantised rows (`rows`).
        width: columns of a table without zero padding; 0 for all.
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
        """Transposed matrix."""
        return jax.tree.map(lambda array: array.T, self)

    @property
    def in_blocks(self) -> bool:
        """True unless each output has exactly one scale of its own."""
        return self.scales.shape != (1, self.shape[1])

    def dequantised(self, dtype: DTypeLike) -> Array:
        """Returns the matrix as an array. Inside a program XLA fuses the conversion into its consumer if it can."""

        def apart(array: Any) -> Array:
            """Reshapes the matrix to `[N, K, M, L]`, or its scales to `[N, 1, M, 1]`."""
            n, m = self.scales.shape
            rows, columns = array.shape
            return array.reshape(n, rows // n, m, columns // m)

        wide = apart(jnp.asarray(self.values).astype(jnp.float32)) * apart(widened(self.scales))
        wide = wide if self.minima is None else wide + apart(widened(self.minima))
        return wide.reshape(self.shape).astype(dtype)

    def rows(self, index: Int[Array, "*rows"]) -> Float[Array, "*rows O"]:
        """Returns dequantised rows of a table whose rows have their own scales."""
        assert self.scales.shape[0] == len(self), "the rows of this matrix share scales"
        picked = jax.tree.map(lambda array: array[index.reshape(-1)], self)
        return picked.dequantised(self.dtype)[:, : self.width or None].reshape(*index.shape, -1)

    def cut(self, n: Array | int, count: int, dim: int) -> "ScaledMatrix":
        """Returns part n of `count` along a dim; raises a `ValueError` if parts end within blocks."""

        def cut_array(array: Any) -> Array:
            size = array.shape[dim]
            if size % count == 0:
                return jax.lax.dynamic_slice_in_dim(array, n * (size // count), size // count, dim)
            if count % size == 0:  # several parts of one block
                return jax.lax.dynamic_slice_in_dim(array, n // (count // size), 1, dim)
            raise ValueError(f"expected {count} parts to end at block ends, found a matrix {self.shape} with {size} blocks")

        if self.shape[dim] % count:
            raise ValueError(f"expected a matrix whose dim {dim} is a multiple of {count}, found {self.shape}")
        return jax.tree.map(cut_array, self)

    def part(self, bounds: tuple[slice, slice]) -> "ScaledMatrix | None":
        """Returns some inputs and outputs; None if they end within a block."""
        cuts = [block_cut(size, count, at) for size, count, at in zip(self.shape, self.scales.shape, bounds, strict=True)]
        if None in cuts:
            return None
        chosen = cast(tuple[slice, slice], tuple(cuts))
        block_arrays = {name: getattr(self, name)[chosen] for name in ("scales", "minima") if getattr(self, name) is not None}
        return replace(self, values=self.values[bounds], **block_arrays)


@dataclass(frozen=True)
class ShardedMatrix:
    """A quantised matrix of a file, sharded over devices with its bits unchanged.

    Attributes:
        parts: shard of each of this process's devices.
        sharding: sharding of the dequantised array.
    """

    parts: dict[Any, QuantisedMatrix | ScaledMatrix]
    sharding: Sharding


def shard_matrix(held: QuantisedMatrix | ScaledMatrix, shape: tuple[int, ...], sharding: Sharding) -> ShardedMatrix | None:
    """Shards a quantised matrix of a file over devices; returns None if a device's shard ends within a block.

    Args:
        shape: shape `[I, O]` of the dequantised array.
    """
    places = cast(dict[Any, Any], sharding.addressable_devices_indices_map(shape))
    found = {device: held.part(index) for device, index in places.items()}
    return None if None in found.values() else ShardedMatrix(cast(Any, found), sharding)


def block_cut(size: int, count: int, at: slice) -> slice | None:
    """Returns the blocks of a range of entries; None if the range neither fills whole blocks nor lies within one."""
    start, stop, _ = at.indices(size)
    each = size // count
    if start // each == (stop - 1) // each:
        return slice(start // each, start // each + 1)
    return None if start % each or stop % each else slice(start // each, stop // each)


def quantise_outputs(w: np.ndarray, largest: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantises a matrix `[I, O]` to int8 from -127 to 127, with a float32 scale per output, whose largest weight becomes 127.

    Args:
        largest: largest absolute weight of each output, if `w` has only some of the inputs.
    """
    units, scales = in_units(w, 127.0, largest)
    return np.rint(np.clip(units, -127, 127)).astype(np.int8), scales  # clipped because subnormal scales are inexact


def in_units(w: np.ndarray, most: float, largest: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Divides a matrix by a scale per output, so that each output's largest weight becomes `most`; returns both in float32."""
    wide = np.asarray(w, np.float32)
    top = np.max(np.abs(wide), axis=0, initial=0.0) if largest is None else np.asarray(largest, np.float32)
    scales = top / np.float32(most)
    return np.divide(wide, scales, out=np.zeros_like(wide), where=scales > 0), scales


def in_eight_bits(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    values, scales = quantise_outputs(w, largest)
    return ScaledMatrix(values, scales[None])


def in_fp8(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    """Quantises to 8-bit floats (e4m3) with a scale per output, whose largest weight becomes the largest float."""
    units, scales = in_units(w, LARGEST_FP8, largest)
    return ScaledMatrix(np.clip(units, -LARGEST_FP8, LARGEST_FP8).astype(FP8), scales[None])


def in_four_bits(w: np.ndarray, largest: np.ndarray | None = None) -> ScaledMatrix:
    """Quantises to blocks of 32 inputs in the CPU kernels' format (Q4_1); to 8 bits if the inputs do not fill whole blocks."""
    return in_eight_bits(w, largest) if len(w) % BLOCK else of_blocks(blocks.quantise(w, "q4_1"))


QUANTISERS: dict[ScaledFormat, Callable[..., ScaledMatrix]] = {"int8": in_eight_bits, "fp8": in_fp8, "int4": in_four_bits}


def of_blocks(held: QuantisedMatrix) -> ScaledMatrix:
    """Converts a block-quantised matrix of a file exactly: 4 bits stay 4, others become 8; blocks with equal scales are
    merged."""
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
"""An embedding prepared for row lookup."""


def bytes_of_table(rows: int, width: int) -> int:
    """Returns the bytes of a table prepared by `prepared_table`."""
    return rows * (padded(width) + 4)


def bytes_of(inputs: int, outputs: int, kind: str) -> int:
    """Returns the bytes of a matrix in a target format, or an upper bound for a file's format."""
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
    """Converts numbers to half-precision bits if exact and without subnormals, else to float32."""
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16)
    small = (np.abs(numbers) < LEAST_HALF) & (numbers != 0)
    same = np.array_equal(half.astype(np.float32), numbers)
    return np.ascontiguousarray(numbers.astype(np.float32) if small.any() or not same else half.view(np.uint16))


def widened(numbers: Any) -> Array:
    """Inverts `narrowed` with operations that a TPU has; TPUs lack half precision."""
    if numbers.dtype != jnp.uint16:
        return jnp.asarray(numbers)
    bits = jnp.asarray(numbers).astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((bits & 0x7FFF) << 13, jnp.float32) * jnp.float32(2.0**112)
    return jnp.where(bits >= 0x8000, -size, size)


def prepared(w: Any, kind: ScaledFormat, name: str, largest: Any = None) -> ScaledMatrix:
    """Quantises a matrix and places it on the device.

    Args:
        w: an array `[I, O]`, or a file's quantised matrix, whose bits are kept.
        name: name of the weight in error messages.
        largest: see `quantise_outputs`.

    Raises:
        ValueError: no matrix, or infinity or NaN in it.
    """
    if isinstance(w, QuantisedMatrix | ScaledMatrix):
        if not all(np.isfinite(each).all() for each in (w.scales, w.minima) if each is not None):
            raise ValueError(f"{name}: expected finite scales and minima, found infinity or NaN")
        return jax.device_put(of_blocks(w) if isinstance(w, QuantisedMatrix) else w)
    if getattr(w, "ndim", None) != 2 or 0 in w.shape:
        raise ValueError(f"{name}: expected a matrix [inputs, outputs], found shape {getattr(w, 'shape', None)}")
    wide = np.asarray(w)
    if not np.isfinite(wide.astype(np.float32)).all():
        raise ValueError(f"{name}: expected finite weights for quantisation, found infinity or NaN")
    return jax.device_put(QUANTISERS[kind](wide, None if largest is None else np.asarray(largest, np.float32)))


def prepared_table(table: Any, name: str) -> ScaledMatrix:
    """Quantises a table `[V, H]` to 8 bits, with a scale per row and zero columns up to `padded` width."""
    width = table.shape[-1]
    rows = jnp.pad(table, ((0, 0), (0, padded(width) - width)))
    return replace(prepared(rows.T, "int8", name).T, dtype=table.dtype.name, width=width)


def padded(width: int) -> int:
    """Rounds a table's width up to whole lanes; a TPU would transpose other tables and copy them for each lookup."""
    return -(-width // LANES) * LANES
