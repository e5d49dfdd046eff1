"""Declarations of a model's arrays, and everything that derives from them.

A model's parameters are a tree of frozen dataclasses. `declare(config)` builds the tree with an `ArraySpec` for every array.
Initialisation, abstract shapes and the checkpoint mapping derive from this declaration. Shardings are passed as a tree of
`jax.sharding.Sharding` (see `tilewright.parallel.sharding`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import DTypeLike

from tilewright.compiled.machine import cores
from tilewright.kernels.operations import Joined

Tree = TypeVar("Tree")

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""Dtypes that models run in, by name."""

AUTO = "auto"
"""Value of a dtype option that selects the checkpoint's dtype (see `checkpoint.chosen_dtype`)."""


def check_dtype(dtype: str, allowed: Collection[str] = DTYPES) -> None:
    """Raises a `ValueError` for an unknown dtype."""
    if dtype not in allowed:
        raise ValueError(f"expected dtype to be one of {', '.join(allowed)}, found {dtype!r}")


TRANSPOSE_ROWS = 256
"""Rows of a matrix that are transposed at once; more would write to too many places for the processor's cache."""

Bounds = tuple[tuple[int, int], ...]
"""Part of an array: start and stop in each dim."""


@dataclass(frozen=True)
class ArraySpec:
    """Declaration of one array of a model.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint. A `*` stands for the number of an expert: the checkpoint has a
            tensor for each expert, and the array holds all of them.
        shape: the shape in memory. Matrices are `[in, out]`, so that `x @ w` reads them row by row; those of experts are
            `[experts, in, out]`.
        axes: the logical axis of each dim ("vocab", "hidden", "heads", "mlp", ...), by which shardings are chosen.
        kind: decides how the array is prepared. "matrix" and "head" are weights of linear layers, "experts" the weights of all
            experts, "router" a linear layer that routes to experts or controls a recurrent state.
        init: "normal" (truncated, with `scale` as its standard deviation) or "ones".
        transposed: the checkpoint holds `[out, in]`; for experts `[experts, out, in]`.
        units: for each dim, the number of adjacent entries that stay on one device, such as a head's. Empty for no constraint.
        offset: number added to the stored numbers.
        rows: for arrays that share a stored tensor one below the other: the array's first row, and the number of rows of the
            tensor; for experts, of each expert. None for a tensor that is not shared.
        pieces: for an array whose stored rows are reordered, or interleaved with those of other arrays: first row and number of
            rows of each piece, in the array's order. Empty for a single piece.
        stored_rows: number of rows of the stored tensor, with `pieces`.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Literal["matrix", "head", "experts", "router", "norm", "embedding", "other"] = "other"
    init: Literal["normal", "ones"] = "normal"
    scale: float = 0.02
    transposed: bool = False
    units: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    offset: float = 0.0
    pieces: tuple[tuple[int, int], ...] = ()
    stored_rows: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        shape = swap_last_dims(self.shape) if self.transposed else self.shape
        if self.pieces:
            return (self.stored_rows, *shape[1:])
        return shape if self.rows is None else (*shape[:-2], self.rows[1], *shape[-1:])

    def stored_bounds(self, bounds: Bounds) -> Bounds:
        """Converts bounds of a part of the array to bounds in the checkpoint's tensor."""
        places = swap_last_dims(bounds) if self.transposed else bounds
        if self.rows is None:
            return places
        *before, (start, stop), last = places
        return (*before, (self.rows[0] + start, self.rows[0] + stop), last)


def swap_last_dims(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Swaps the last two dims."""
    return (*dims[:-2], dims[-1], dims[-2])


def declare_interleaved(name: str, parts: Sequence[Sequence[ArraySpec]], groups: int) -> tuple[ArraySpec, ...]:
    """Declares matrices whose outputs one checkpoint tensor interleaves.

    Every group of the tensor has an equal share of the outputs of every part.

    Args:
        name: the tensor.
        parts: for each array its parts, which follow one another in a group. An array takes its settings from its first part.
        groups: number of groups in the tensor.
    """
    sizes = [part.shape[1] // groups for part in chain(*parts)]
    starts = [0, *accumulate(sizes)]
    period = sum(sizes)
    places = iter(
        [tuple((n * period + start, size) for n in range(groups)) for start, size in zip(starts, sizes, strict=False)]
    )
    specs = []
    for array in parts:
        pieces = tuple(chain(*zip(*(next(places) for _ in array), strict=True)))
        shape = (array[0].shape[0], sum(part.shape[1] for part in array))
        specs.append(replace(array[0], name=name, shape=shape, pieces=pieces, stored_rows=groups * period))
    return tuple(specs)


def declare_regrouped(spec: ArraySpec, sizes: Sequence[int], groups: int) -> ArraySpec:
    """Declares an array that interleaves parts which the stored tensor has one below the other.

    Every group of the array has an equal share of the rows of every part.

    Args:
        sizes: rows of each part.
        groups: number of groups in the array.
    """
    starts = [0, *accumulate(sizes)]
    rows = sum(sizes)
    each = [(start, size // groups) for start, size in zip(starts, sizes, strict=False)]
    return replace(spec, pieces=tuple((start + group * n, n) for group in range(groups) for start, n in each), stored_rows=rows)


def matrix(
    name: str,
    d_in: int,
    d_out: int,
    axes: tuple[str, str],
    scale: float = 0.02,
    units: tuple[int, ...] = (),
    kind: Literal["matrix", "head"] = "matrix",
    rows: tuple[int, int] | None = None,
) -> ArraySpec:
    """Declares the weight of a linear layer without bias, `[out, in]` in the checkpoint and `[in, out]` in memory."""
    return ArraySpec(name, (d_in, d_out), axes, kind, scale=scale, transposed=True, units=units, rows=rows)


def norm_weight(name: str, size: int, axis: str = "hidden", offset: float = 0.0) -> ArraySpec:
    """Declares the weight of an RMSNorm."""
    return ArraySpec(name, (size,), (axis,), "norm", init="ones", offset=offset)


def spec_leaves(specs: object) -> list[ArraySpec]:
    """Returns all declared arrays in tree order."""
    return jax.tree.leaves(specs)


def map_specs(specs: Tree, shardings: Tree | None, make: Callable[[ArraySpec, Sharding | None], Any]) -> Tree:
    """Maps `make(spec, sharding)` over a tree of specs; without shardings, `sharding` is None."""
    if shardings is None:
        return jax.tree.map(lambda spec: make(spec, None), specs)
    return jax.tree.map(make, specs, shardings)


def initialise(specs: Tree, key: Array, dtype: DTypeLike = jnp.float32, shardings: Tree | None = None) -> Tree:
    """Draws random parameters, identical under any shardings. Returns the tree with an array for each spec.

    With shardings, every device draws only its own part: in JAX's Threefry an entry depends only on its index.
    """
    if shardings is not None:
        return jax.jit(partial(initialise, specs, dtype=dtype), out_shardings=shardings)(key)
    leaves, structure = jax.tree.flatten(specs)

    def draw(spec: ArraySpec, key: Array) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.truncated_normal(key, -3.0, 3.0, spec.shape, jnp.float32)).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [draw(spec, k) for spec, k in zip(leaves, keys, strict=True)])


def abstract(specs: Tree, dtype: DTypeLike = jnp.float32, shardings: Tree | None = None) -> Tree:
    """Returns the tree with a `jax.ShapeDtypeStruct` for each spec, to compile without allocating memory."""
    return map_specs(specs, shardings, lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding))


def count(specs: object) -> int:
    """Returns the number of parameters."""
    return sum(int(np.prod(spec.shape)) for spec in spec_leaves(specs))


def to_host(value: Any) -> np.ndarray:
    """Returns a whole array on the host.

    If other processes hold parts of the array, all of them must call this function, in the same order.
    """
    if isinstance(value, Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def to_tensors(specs: object, params: object, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """Yields parameters under their checkpoint names, in the checkpoint's layout, gathered one at a time (see `to_host`)."""

    def stored(spec: ArraySpec, value: Any) -> np.ndarray:
        held = to_host(value)
        held = (held.astype(np.float32) - spec.offset if spec.offset else held).astype(jnp.dtype(dtype))
        return np.ascontiguousarray(held.swapaxes(-1, -2) if spec.transposed else held)

    sharing: dict[str, list[tuple[ArraySpec, Any]]] = {}
    for spec, value in zip(spec_leaves(specs), jax.tree.leaves(params), strict=True):
        sharing.setdefault(spec.name, []).append((spec, value))
    for name, pairs in sharing.items():
        parts = [stored(*pair) for pair in pairs]
        if pairs[0][0].pieces:
            whole = interleave([spec for spec, _ in pairs], parts)
        else:
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
        yield from [(name, whole)] if "*" not in name else ((name.replace("*", str(n)), one) for n, one in enumerate(whole))


def interleave(specs: Sequence[ArraySpec], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Interleaves the rows of several arrays in one tensor; the inverse of `read_part`."""
    whole = np.empty(specs[0].stored_shape, parts[0].dtype)
    for spec, part in zip(specs, parts, strict=True):
        ends = accumulate(count for _, count in spec.pieces)
        for (first, count), end in zip(spec.pieces, ends, strict=True):
            whole[first : first + count] = part[end - count : end]
    return whole


def held_parts(shape: tuple[int, ...], sharding: Sharding | None) -> set[Bounds]:
    """Returns the distinct parts of an array that this process's devices hold; without a sharding the whole."""
    if sharding is None:
        return {tuple((0, size) for size in shape)}
    return {_bounds(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    parts = index or (slice(None),) * len(shape)  # None stands for the whole array
    return tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))


def from_parts(
    shape: tuple[int, ...], sharding: Sharding | None, dtype: DTypeLike, read: Callable[[Bounds], np.ndarray]
) -> Array:
    """Builds an array from the parts that this process's devices hold.

    `read` is called once for each part and may return any dtype.
    """
    if sharding is None:
        (whole,) = held_parts(shape, None)
        return jax.device_put(row_major(read(whole), dtype))  # `jnp.asarray` compiles for each shape
    once = cache(lambda bounds: row_major(read(bounds), dtype))  # replicas share the data
    return jax.make_array_from_callback(shape, sharding, lambda index: once(_bounds(index, shape)), dtype=jnp.dtype(dtype))


def bits(array: np.ndarray) -> np.ndarray:
    """Views an array's memory as integers.

    NumPy copies integers much faster than bfloat16, and other threads run during the copy.
    """
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def row_major(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Converts an array to a dtype, in row-major memory order."""
    same = array if array.dtype == jnp.dtype(dtype) else array.astype(jnp.dtype(dtype))
    if same.ndim not in (2, 3) or same.flags.c_contiguous:
        return np.asarray(same, order="C")
    out = np.empty(same.shape, same.dtype)
    if same.ndim == 3:
        for n, matrix in enumerate(same):
            out[n] = row_major(matrix, dtype)
        return out
    for begin in range(0, same.shape[1], TRANSPOSE_ROWS):
        bits(out)[:, begin : begin + TRANSPOSE_ROWS] = bits(same)[:, begin : begin + TRANSPOSE_ROWS]
    return out


def read_part(spec: ArraySpec, read: Callable[[str, Bounds], np.ndarray], bounds: Bounds) -> np.ndarray:
    """Reads a part of an array, whose stored tensor may be transposed, reordered or offset."""
    if spec.pieces:
        dim, *other_dims = swap_last_dims(bounds) if spec.transposed else bounds
        rows = [read(spec.name, ((first, first + count), *other_dims)) for first, count in spec.pieces]
        found = np.concatenate(rows)[slice(*dim)]
    else:
        found = read(spec.name, spec.stored_bounds(bounds))
    if spec.offset:
        found = found.astype(np.float32) + np.float32(spec.offset)
    return found.swapaxes(-1, -2) if spec.transposed else found


def from_tensors(
    specs: Tree,
    read: Callable[[str, Bounds], np.ndarray],
    dtype: DTypeLike,
    shardings: Tree | None = None,
    prepare: Callable[[Any, Any], Any] | None = None,
    native: Callable[[ArraySpec, Sharding | None], Any] = lambda spec, sharding: None,
) -> Tree:
    """Builds the tree from checkpoint tensors, whose names and shapes must have been checked.

    `read` returns a part of the named tensor in the checkpoint's layout, and is called once for each part that this process's
    devices hold. On one device, a thread for each core reads, transposes and prepares an array, the largest first, so the host
    holds that many arrays besides the parameters. Over several devices the arrays follow one another, because preparing may
    communicate between devices.

    Args:
        shardings: a tree like `specs` with a `jax.sharding.Sharding` for each array; None for the default device.
        prepare: `(spec, array) -> result`, applied to each array, or to several that are `Joined`; None for no change.
        native: `(spec, sharding) -> matrix or None`: replaces an array by blocks in the file's format; None reads the array.
    """

    def place(spec: ArraySpec, sharding: Sharding | None) -> Any:
        found = native(spec, sharding)
        return from_parts(spec.shape, sharding, dtype, partial(read_part, spec, read)) if found is None else found

    def build(spec: Any, sharding: Any = None) -> Any:
        value = map_specs(spec, sharding, place)
        return value if prepare is None else prepare(spec, value)

    def joined(part: Any) -> bool:
        return isinstance(part, Joined)

    if shardings is not None:
        return jax.tree.map(build, specs, shardings, is_leaf=joined)
    leaves, structure = jax.tree.flatten(specs, is_leaf=joined)
    # The largest first: an output head at the end would occupy one thread while the others have nothing to do.
    order = sorted(range(len(leaves)), key=lambda n: count(leaves[n]), reverse=True)
    with ThreadPoolExecutor(cores()) as pool:
        waiting = {n: pool.submit(build, leaves[n]) for n in order}
        return jax.tree.unflatten(structure, [waiting[n].result() for n in range(len(leaves))])
