"""Aggregation over a graph's neighbours, in the caller's order of nodes."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tilewright.graph.edges import to_float32
from tilewright.graph.table import NeighborTable


def check_numbers(x: Array | np.ndarray, what: str) -> Array:
    """The array on the device.

    Raises:
        ValueError: it holds a NaN or a number beyond float32, and the first place is named; within a program that is being
            compiled nothing can be seen.
    """
    if isinstance(x, np.ndarray) and x.dtype == np.float64:
        narrow = to_float32(x)
        if (beyond := np.isinf(narrow) & np.isfinite(x)).any():
            place = np.argwhere(beyond)[0]
            raise ValueError(f"expected {what} within float32, found {x[tuple(place)]} at {place.tolist()}")
        x = narrow
    x = jnp.asarray(x)
    if not isinstance(x, jax.core.Tracer) and bool(has_nan(x)):
        place = np.argwhere(np.isnan(np.asarray(x, np.float32)))[0]
        raise ValueError(f"expected {what} without NaN, found one at {place.tolist()}")
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
    """Reduces for each node the features of its neighbours, the sources of the edges that end at it.

    Sums are made in float32, and the result has the dtype of `x`. A node without neighbours gets zeros.

    Args:
        table: the graph.
        x: float32 or bfloat16 features of all sources, in the caller's order.
        reduce: a mean divides by the number of neighbours, also with weights. The gradient of a maximum or minimum is shared
            equally by all that reach it. "sum", "mean", "max" or "min".
        weights: of the edges, in the caller's order of edges; a neighbour's features are multiplied by them. None takes the
            table's own, if it has any. They have a gradient, too.
        normalisation: of a sum. "symmetric": GCN's, `D^-1/2 (A + I) D^-1/2 x`, where D holds the sums of the weights (in a
            graph with other sources than nodes, each side its own), and a node that has a self-loop keeps it: the last of
            several, as in PyG. "row": `D^-1 A x`.
        permuted: `x` and the result are in table order, see `NeighborTable.permute`.

    Raises:
        ValueError: features or weights that are another graph's, or hold a NaN; the first place is named. Under the symmetric
            normalisation, weights whose sum over a node's edges is negative (within a compiled program its results are NaN).
    """
    if weights is not None:
        weights = check_numbers(weights, "weights")
    if permuted:
        return table.aggregate(jnp.asarray(x), reduce, weights, normalisation)
    return table.unpermute(table.aggregate(table.permute(check_numbers(x, "features")), reduce, weights, normalisation))
