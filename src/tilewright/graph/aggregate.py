"""Aggregation over neighbours, and message passing, in the caller's order of nodes and edges."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.edges import to_float32
from tilewright.graph.messages import Function, node_values
from tilewright.graph.table import NeighborTable


def check_numbers(x: Array | np.ndarray, noun: str) -> Array:
    """Moves an array to the device and checks its numbers.

    Args:
        x: the array; tracers are not checked.
        noun: name of the array for error messages.

    Raises:
        ValueError: the array has a NaN or a number beyond float32; the message names the first place.
    """
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        narrow = to_float32(x)
        if (beyond := np.isinf(narrow) & np.isfinite(x)).any():
            place = np.argwhere(beyond)[0]
            raise ValueError(f"expected {noun} within float32, found {x[tuple(place)]} at {place.tolist()}")
        x = narrow
    x = jnp.asarray(x)
    if isinstance(x, jax.core.Tracer):
        return x
    with jax.ensure_compile_time_eval():  # an array that a program closes over is checked while it is traced
        spoilt = bool(has_nan(x))
    if spoilt:
        place = np.argwhere(np.isnan(np.asarray(x, np.float32)))[0]
        raise ValueError(f"expected {noun} without NaN, found one at {place.tolist()}")
    return x


@jax.jit
def has_nan(x: Array) -> Array:
    return jnp.isnan(x).any()


def aggregate(
    table: NeighborTable,
    x: Float[Array | np.ndarray, "M F"],
    reduce: str = "sum",
    weights: Float[Array | np.ndarray, " E"] | None = None,
    normalisation: str | None = None,
    permuted: bool = False,
) -> Float[Array, "N F"]:
    """Reduces the features of each node's neighbours, the sources of its incoming edges.

    Sums are in float32; the result has the dtype of `x`. A node without neighbours gets zeros.

    Args:
        table: the graph.
        x: float32 or bfloat16 features of all sources, in the caller's order.
        reduce: "sum", "mean", "max" or "min". A mean divides by the number of neighbours, also with weights. Equal maxima or
            minima share the gradient equally.
        weights: factors of the neighbours' features, in the caller's order of edges; None takes the table's weights, if any.
            Weights have gradients.
        normalisation: normalisation of a sum. "symmetric" is GCN's `D^-1/2 (A + I) D^-1/2 x`, where D has the sums of the
            weights (of nodes and of sources separately if they differ). A node with self-loops keeps the last one, as in PyG.
            "row" is `D^-1 A x`.
        permuted: True if `x` and the result are in table order, see `NeighborTable.permute`.

    Raises:
        ValueError: features or weights do not fit the graph or have a NaN (the message names the first place), or the sum of a
            node's weights is negative for the symmetric normalisation (in a compiled program the node's results are NaN).
    """
    if weights is not None:
        weights = check_numbers(weights, "weights")
    if permuted:
        return table.aggregate(jnp.asarray(x), reduce, weights, normalisation)
    return table.unpermute(table.aggregate(table.permute(check_numbers(x, "features")), reduce, weights, normalisation))


def propagate(
    x: Any,
    table: NeighborTable,
    message: Function | None = None,
    reduce: str | Sequence[str] = "sum",
    *,
    weight: Function | Array | np.ndarray | None = None,
    **values: Any,
) -> Float[Array, "N ..."]:
    """Computes messages of edges and reduces them over each node, in the caller's order of nodes and edges.

    Without `message` and `weight`, the features of the sources are reduced. These and weighted sums run on the kernels of
    `aggregate`. XLA computes messages in tiles of edges, see `tiles`; they are stored for a maximum or minimum alone.

    Args:
        x: float32 or bfloat16 features of the sources `[M, ...]`, the first N of which are the nodes; or a pair of features of
            the sources and of the nodes (either may be None if unused).
        table: the graph.
        message: function from values at an edge to its message `[S, ...]`; see `messages` for its parameters. It must
            treat edges independently of each other, except for `softmax`.
        reduce: "sum", "mean", "max", "min", "var" or "std"; several concatenate their results along the last dimension. Equal
            extremes share the gradient equally.
        weight: function from values at an edge to the factor `[S]` or `[S, H]` of its source's features, or an array of them in
            the caller's order of edges; with H heads, each scales its share of the features. A message that is a product of
            this kind is faster this way, since a kernel sums it.
        values: further values by name: of nodes like `x`, or of edges `[E, ...]`; None for none.

    Returns:
        `[N, ...]`, in the dtype of the messages; zeros for a node without edges.

    Raises:
        ValueError: values do not fit the graph or the function's parameters, or have a NaN (the message names the first place).

    Source: Gilmer et al., "Neural Message Passing for Quantum Chemistry" (arXiv 1704.01212), §2; Fey & Lenssen, "Fast Graph
    Representation Learning with PyTorch Geometric" (arXiv 1903.02428), §2.
    """
    given = {name: check_values(value, name) for name, value in {"x": x, **values}.items()}
    if weight is not None and not callable(weight):
        weight = check_numbers(weight, "weight")
    of_nodes = node_values((message, weight))

    def permuted(value: Any) -> Any:
        if isinstance(value, tuple):
            sources, nodes = value
            return None if sources is None else table.permute(sources), None if nodes is None else table.permute_nodes(nodes)
        return table.permute(value)

    moved = {name: permuted(value) if name in of_nodes and value is not None else value for name, value in given.items()}
    return table.unpermute(table.propagate(moved.pop("x"), message, reduce, weight=weight, **moved))


def check_values(value: Any, name: str) -> Any:
    """Moves a value, or a pair of values, to the device, and checks numbers; see `aggregate.check_numbers`."""
    if value is None:
        return None
    if isinstance(value, tuple | list):
        return tuple(check_values(each, name) for each in value)
    value = value if isinstance(value, Array) else np.asarray(value)
    return check_numbers(value, name) if jnp.issubdtype(value.dtype, jnp.inexact) else jnp.asarray(value)
