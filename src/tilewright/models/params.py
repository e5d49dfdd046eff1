"""How a model declares its arrays.

A model's parameters are a tree of frozen dataclasses. `declare(config)` builds that tree with an `ArraySpec` in the place of
every array; initialisation, abstract shapes and the checkpoint mapping all derive from it, and so do shardings, which come in
as a tree of `jax.sharding.Sharding` (see `tilewright.parallel.sharding`).
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
"""The dtypes that models run in, by their names."""

AUTO = "auto"
"""As a dtype: that of the checkpoint (see `checkpoint.chosen_dtype`)."""


def check_dtype(dtype: str, known: Collection[str] = DTYPES) -> None:
    """Raises a `ValueError` for a dtype that is not among those that are known."""
    if dtype not in known:
        raise ValueError(f"expected dtype to be one of {', '.join(known)}, found {dtype!r}")


TURNED_ROWS = 256
"""Rows of a matrix that are transposed at once: of more, what is written lies in too many places for the processor's cache."""

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: start and stop in each dim."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of a model.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint. A `*` stands for the number of an expert: the checkpoint has a
            tensor for each, and the array all of them.
        shape: the shape in memory. A matrix is kept `[in, out]`, so that `x @ w` reads it row by row; those of experts are
            `[experts, in, out]`.
        axes: the logical axis of each dim ("vocab", "hidden", "heads", "mlp", ...), which shardings go by.
        kind: what it is, for its preparation: the weight of a linear layer, an output head (one too), the weights of a linear
            layer of experts, a layer that routes to these or says what a state keeps, a norm, an embedding.
        init: "normal" (truncated, with `scale` as its standard deviation) or "ones".
        transposed: the checkpoint holds `[out, in]`, of experts `[experts, out, in]`.
        units: for each dim, how many entries belong together and stay on one device: a head's. Empty where none do.
        offset: what is added to the stored numbers.
        rows: first row, and number of rows, of a stored tensor that several arrays share one below the other; None for a
            tensor of its own. Of experts, those of each.
        pieces: of a stored tensor whose rows come in another order, or are shared by several arrays in turns: first row, and
            number of rows, of each piece, in the array's order. Empty where it is one piece.
        turns_rows: rows of such a tensor.
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
    turns_rows: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of its tensor in the checkpoint."""
        shape = turned(self.shape) if self.transposed else self.shape
        if self.pieces:
            return (self.turns_rows, *shape[1:])
        return shape if self.rows is None else (*shape[:-2], self.rows[1], *shape[-1:])

    def stored_bounds(self, bounds: Bounds) -> Bounds:
        """Bounds of a part of the array in the checkpoint's tensor."""
        places = turned(bounds) if self.transposed else bounds
        if self.rows is None:
            return places
        *before, (start, stop), last = places
        return (*before, (self.rows[0] + start, self.rows[0] + stop), last)


def turned(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dims with the last two in each other's place."""
    return (*dims[:-2], dims[-1], dims[-2])


def in_turns(name: str, parts: Sequence[Sequence[ArraySpec]], turns: int) -> tuple[ArraySpec, ...]:
    """Matrices of which a checkpoint has one tensor: in each turn an equal share of the outputs of every part.

    Args:
        parts: those that one array has, turn by turn as the tensor does, for each array; they lie in this order in a turn. The
            first one's name, shape apart, is the array's.
    """
    shares = [part.shape[1] // turns for part in chain(*parts)]
    starts = [0, *accumulate(shares)]
    period = sum(shares)
    places = iter(
        [tuple((turn * period + start, share) for turn in range(turns)) for start, share in zip(starts, shares, strict=False)]
    )
    made = []
    for own in parts:
        pieces = tuple(chain(*zip(*(next(places) for _ in own), strict=True)))
        shape = (own[0].shape[0], sum(part.shape[1] for part in own))
        made.append(replace(own[0], name=name, shape=shape, pieces=pieces, turns_rows=turns * period))
    return tuple(made)


def turn_by_turn(spec: ArraySpec, sizes: Sequence[int], turns: int) -> ArraySpec:
    """An array of a tensor that has parts one below the other: in each turn an equal share of the rows of every part.

    Args:
        sizes: rows of each part.
    """
    starts = [0, *accumulate(sizes)]
    rows = sum(sizes)
    each = [(start, size // turns) for start, size in zip(starts, sizes, strict=False)]
    return replace(spec, pieces=tuple((start + turn * n, n) for turn in range(turns) for start, n in each), turns_rows=rows)


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
    """The weight of a linear layer without bias, `[out, in]` in the checkpoint and `[in, out]` in memory."""
    return ArraySpec(name, (d_in, d_out), axes, kind, scale=scale, transposed=True, units=units, rows=rows)


def norm_weight(name: str, size: int, axis: str = "hidden", offset: float = 0.0) -> ArraySpec:
    """The weight of an RMSNorm."""
    return ArraySpec(name, (size,), (axis,), "norm", init="ones", offset=offset)


def spec_leaves(specs: object) -> list[ArraySpec]:
    """All the arrays that a declaration names, in tree order."""
    return jax.tree.leaves(specs)


def each(specs: Tree, shardings: Tree | None, make: Callable[[ArraySpec, Sharding | None], Any]) -> Tree:
    """The tree with `make(spec, sharding)` for each spec; its sharding is None where there are none."""
    if shardings is None:
        return jax.tree.map(lambda spec: make(spec, None), specs)
    return jax.tree.map(make, specs, shardings)


def initialise(specs: Tree, key: Array, dtype: DTypeLike = jnp.float32, shardings: Tree | None = None) -> Tree:
    """Draws random parameters, the same ones under any shardings. Returns the tree with an array for each spec.

    With shardings, every device draws only what it holds (JAX's Threefry is a function of an entry's place).
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
    """The tree with a `jax.ShapeDtypeStruct` for each spec: enough to compile, without any memory."""
    return each(specs, shardings, lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding))


def count(specs: object) -> int:
    """The number of parameters."""
    return sum(int(np.prod(spec.shape)) for spec in spec_leaves(specs))


def to_host(value: Any) -> np.ndarray:
    """The whole of an array. Where other processes hold parts of it, all of them must call this, in the same order."""
    if isinstance(value, Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def to_tensors(specs: object, params: object, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters under their checkpoint names, in the checkpoint's layout, gathered one at a time (see `to_host`)."""

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
            whole = taking_turns([spec for spec, _ in pairs], parts)
        else:
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)
        yield from [(name, whole)] if "*" not in name else ((name.replace("*", str(n)), one) for n, one in enumerate(whole))


def taking_turns(specs: Sequence[ArraySpec], parts: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor whose rows several arrays share in turns; the inverse of `read_part`."""
    whole = np.empty(specs[0].stored_shape, parts[0].dtype)
    for spec, part in zip(specs, parts, strict=True):
        ends = accumulate(count for _, count in spec.pieces)
        for (first, count), end in zip(spec.pieces, ends, strict=True):
            whole[first : first + count] = part[end - count : end]
    return whole


def held_parts(shape: tuple[int, ...], sharding: Sharding | None) -> set[Bounds]:
    """The parts of an array that this process's devices hold, each once; without a sharding the whole."""
    if sharding is None:
        return {tuple((0, size) for size in shape)}
    return {_bounds(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    parts = index or (slice(None),) * len(shape)  # None is the whole
    return tuple(part.indices(size)[:2] for part, size in zip(parts, shape, strict=True))


def from_parts(
    shape: tuple[int, ...], sharding: Sharding | None, dtype: DTypeLike, read: Callable[[Bounds], np.ndarray]
) -> Array:
    """An array from the parts that this process's devices hold: `read` gives one, in any dtype, and is called once for each."""
    if sharding is None:
        (whole,) = held_parts(shape, None)
        return jax.device_put(in_rows(read(whole), dtype))  # `jnp.asarray` compiles for each shape
    once = cache(lambda bounds: in_rows(read(bounds), dtype))  # replicas share what was read
    return jax.make_array_from_callback(shape, sharding, lambda index: once(_bounds(index, shape)), dtype=jnp.dtype(dtype))


def bits(array: np.ndarray) -> np.ndarray:
    """The array's memory as integers: NumPy copies those much faster than bfloat16, and other threads run meanwhile."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def in_rows(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """An array in another dtype, row after row in memory."""
    same = array if array.dtype == jnp.dtype(dtype) else array.astype(jnp.dtype(dtype))
    if same.ndim not in (2, 3) or same.flags.c_contiguous:
        return np.asarray(same, order="C")
    out = np.empty(same.shape, same.dtype)
    if same.ndim == 3:
        for n, matrix in enumerate(same):
            out[n] = in_rows(matrix, dtype)
        return out
    for begin in range(0, same.shape[1], TURNED_ROWS):
        bits(out)[:, begin : begin + TURNED_ROWS] = bits(same)[:, begin : begin + TURNED_ROWS]
    return out


def read_part(spec: ArraySpec, read: Callable[[str, Bounds], np.ndarray], bounds: Bounds) -> np.ndarray:
    """Part of an array, of which a checkpoint may hold the transpose."""
    if spec.pieces:
        own, *others = turned(bounds) if spec.transposed else bounds
        rows = [read(spec.name, ((first, first + count), *others)) for first, count in spec.pieces]
        found = np.concatenate(rows)[slice(*own)]
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
    kept: Callable[[ArraySpec, Sharding | None], Any] = lambda spec, sharding: None,
) -> Tree:
    """Builds the tree from checkpoint tensors, whose names and shapes are already known to fit.

    `read` gives a part of the tensor of one name, in the checkpoint's layout. It is called once for each part that this
    process's devices hold. On one device a thread for each core reads an array, turns and prepares it, so that the host holds
    those of so many at a time besides the parameters; over several devices one array follows the other, for what prepares
    them may talk from device to device.

    Args:
        shardings: a tree like `specs` with a `jax.sharding.Sharding` for each array; None for the default device.
        prepare: what becomes of each array, or of several that are `Joined`: `(spec, array)`; by default it stays as it is.
        kept: what `prepare` is given in an array's place, which then is not read: blocks that keep their bits, say; None for
            the array.
    """

    def place(spec: ArraySpec, sharding: Sharding | None) -> Any:
        found = kept(spec, sharding)
        return from_parts(spec.shape, sharding, dtype, partial(read_part, spec, read)) if found is None else found

    def made(spec: Any, sharding: Any = None) -> Any:
        value = each(spec, sharding, place)
        return value if prepare is None else prepare(spec, value)

    def joined(part: Any) -> bool:
        return isinstance(part, Joined)

    if shardings is not None:
        return jax.tree.map(made, specs, shardings, is_leaf=joined)
    with ThreadPoolExecutor(cores()) as pool:
        waiting = jax.tree.map(lambda spec: pool.submit(made, spec), specs, is_leaf=joined)
        return jax.tree.map(lambda one: one.result(), waiting)
