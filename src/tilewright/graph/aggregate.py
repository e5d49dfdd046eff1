"""Aggregation over neighbours, in the caller's order of nodes."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.edges import to_float32
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
    if not isinstance(x, jax.core.Tracer) and bool(has_nan(x)):
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
