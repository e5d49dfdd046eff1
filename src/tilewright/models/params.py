"""How a model declares its arrays.

A model's parameters are a tree of frozen dataclasses. `declare(config)` builds that tree with an `ArraySpec` in the place of
every array; initialisation, abstract shapes and the checkpoint mapping all derive from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

Tree = TypeVar("Tree")

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""The dtypes that models run in, by their names."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of a model.

    Attributes:
        name: the tensor's name in a Hugging Face checkpoint.
        shape: the shape in memory. A matrix is kept `[in, out]`, so that `x @ w` reads it row by row.
        axes: the logical axis of each dim ("vocab", "hidden", "heads", "mlp", ...), for a schedule to shard by.
        init: "normal" (truncated, with `scale` as its standard deviation) or "ones".
        transposed: the checkpoint holds `[out, in]`.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "ones"] = "normal"
    scale: float = 0.02
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape


def matrix(name: str, d_in: int, d_out: int, axes: tuple[str, str], scale: float = 0.02) -> ArraySpec:
    """The weight of a linear layer without bias, `[out, in]` in the checkpoint and `[in, out]` in memory."""
    return ArraySpec(name, (d_in, d_out), axes, scale=scale, transposed=True)


def norm_weight(name: str, size: int, axis: str = "hidden") -> ArraySpec:
    """The weight of an RMSNorm."""
    return ArraySpec(name, (size,), (axis,), init="ones")


def spec_leaves(specs: object) -> list[ArraySpec]:
    """All the arrays that a declaration names, in tree order."""
    return jax.tree.leaves(specs)


def initialise(specs: Tree, key: Array, dtype: DTypeLike = jnp.float32) -> Tree:
    """Draws random parameters. Returns the tree with an array for each spec."""
    leaves, structure = jax.tree.flatten(specs)

    def draw(spec: ArraySpec, key: Array) -> Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.truncated_normal(key, -3.0, 3.0, spec.shape, jnp.float32)).astype(dtype)

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [draw(spec, k) for spec, k in zip(leaves, keys, strict=True)])


def abstract(specs: Tree, dtype: DTypeLike = jnp.float32) -> Tree:
    """The tree with a `jax.ShapeDtypeStruct` for each spec: enough to compile, without any memory."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)


def count(specs: object) -> int:
    """The number of parameters."""
    return sum(int(np.prod(spec.shape)) for spec in spec_leaves(specs))


def to_tensors(specs: object, params: object, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters under their checkpoint names, in the checkpoint's layout."""
    for spec, value in zip(spec_leaves(specs), jax.tree.leaves(params), strict=True):
        stored = np.asarray(value).astype(jnp.dtype(dtype))
        yield spec.name, np.ascontiguousarray(stored.T if spec.transposed else stored)


def from_tensors(specs: Tree, read: Callable[[str], np.ndarray], dtype: DTypeLike) -> Tree:
    """Builds the tree from checkpoint tensors, whose names and shapes are already known to fit.

    `read` gives the tensor of one name and is called once for each array, so that the host holds one tensor at a time besides
    the parameters themselves.
    """

    def place(spec: ArraySpec) -> Array:
        stored = read(spec.name)
        return jnp.asarray(np.ascontiguousarray(stored.T if spec.transposed else stored, jnp.dtype(dtype)))

    return jax.tree.map(place, specs)
