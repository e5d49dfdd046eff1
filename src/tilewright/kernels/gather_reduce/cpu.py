"""Neighbour reduction and attention over neighbours on a CPU's vector unit; the kernels are `cpu.cc`.

All functions take a graph in compressed form (CSR): row r has the edges `offsets[r]` to `offsets[r + 1]`, and an edge's source
is a row of `x`. Sources beyond the last offset are ignored, and per-edge results are zero there. Results are bitwise
independent of the number of threads. The kernels check offsets and sources, which takes about a hundredth of their time; an
invalid value raises a `jax.errors.JaxRuntimeError` with its position and value.

Legend: M nodes to gather from, R rows (nodes to reduce for; R1 is R + 1), E edges, F features, H heads, which divide F.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.gather_reduce.reference import refuses_message_reduce as refuses_message_reduce

REDUCES: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3}
"""Codes of the reductions in `cpu.cc`."""


def gather_reduce_csr(
    x: Float[Array, "M F"],
    offsets: Int32[Array, " R1"],
    sources: Int32[Array, " E"],
    weights: Float[Array, " E"] | Float[Array, "E H"] | None = None,
    reduce: Reduce = "sum",
) -> Float[Array, "R F"]:
    """Reduces, for each row, the features of its sources times their weights, in float32; see `reference.gather_reduce_csr`.

    Args:
        x: float32 or bfloat16.
        weights: one per edge, or one per edge and head for the head's share of the features.

    Returns:
        The result in the dtype of `x`; zeros for a row without edges. A NaN among a row's messages makes its maximum and
        minimum NaN.
    """
    shape = jax.ShapeDtypeStruct((offsets.shape[0] - 1, x.shape[1]), x.dtype)
    edge_weights = jnp.zeros(0, jnp.float32) if weights is None else weights.astype(jnp.float32)
    if weights is not None and weights.ndim == 1:
        edge_weights = edge_weights[:, None]
    call = jax.ffi.ffi_call("tilewright_gather_reduce", shape)
    return call(x, offsets, sources, edge_weights, reduce=np.int32(REDUCES[reduce]))


def edge_dot_csr(
    rows: Float[Array, "R F"], x: Float[Array, "M F"], offsets: Int32[Array, " R1"], sources: Int32[Array, " E"], heads: int = 1
) -> Float32[Array, "E H"]:
    """Computes the dot product of each edge's row and source, per head, in float32.

    This is the gradient of a weighted sum with respect to its weights, if `rows` is the gradient of the sum.
    """
    call = jax.ffi.ffi_call("tilewright_edge_dot", jax.ShapeDtypeStruct((sources.shape[0], heads), jnp.float32))
    return call(x, rows, offsets, sources)


def attend_csr(
    x: Float[Array, "M F"],
    source_score: Float32[Array, "M H"],
    target_score: Float32[Array, "R H"],
    offsets: Int32[Array, " R1"],
    sources: Int32[Array, " E"],
    negative_slope: float,
) -> tuple[Float[Array, "R F"], Float32[Array, "R H"], Float32[Array, "R H"]]:
    """Sums the sources' features with the softmax of `leaky_relu(target_score + source_score)` over a row's edges as weights.

    At most some thousand edges' weights exist at a time. After Velickovic et al., Graph Attention Networks, section 2.1.

    Returns:
        The sums, and the maximum and the sum of `exp(score - maximum)` of each row's scores, for `attend_csr_grad`. Rows
        without edges have zeros in all three.
    """
    scores = jax.ShapeDtypeStruct(target_score.shape, jnp.float32)
    results = (jax.ShapeDtypeStruct((target_score.shape[0], x.shape[1]), x.dtype), scores, scores)
    call = jax.ffi.ffi_call("tilewright_attend", results)
    out, row_max, row_sum = call(x, source_score, target_score, offsets, sources, slope=np.float32(negative_slope))
    return out, row_max, row_sum


def attend_csr_grad(
    dy: Float[Array, "R F"],
    out: Float[Array, "R F"],
    row_max: Float32[Array, "R H"],
    row_sum: Float32[Array, "R H"],
    x: Float[Array, "M F"],
    source_score: Float32[Array, "M H"],
    target_score: Float32[Array, "R H"],
    transposed: tuple[Int32[Array, " M1"], Int32[Array, " E"]],
    forward: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    negative_slope: float,
) -> tuple[Float[Array, "M F"], Float32[Array, "M H"], Float32[Array, "R H"]]:
    """Returns the gradients of features and both scores, from `dy`, the gradient of `attend_csr`'s result. Gathers only.

    The weights are recomputed from each row's maximum and sum, as in Dao et al., FlashAttention, section 3.1.

    Args:
        transposed: the same edges by source: offsets for each of the M nodes, and each edge's row of `dy`.
        forward: the offsets of `attend_csr`, and, for each edge in its order, the edge's position in the transposed graph.

    Returns:
        The gradients of `x`, `source_score` and `target_score`.
    """
    rows, heads = target_score.shape
    centre = (dy.astype(jnp.float32) * out.astype(jnp.float32)).reshape(rows, heads, x.shape[1] // heads).sum(axis=2)
    facts = jnp.concatenate([target_score, row_max + jnp.log(row_sum), centre], axis=1)
    edges = jax.ShapeDtypeStruct((transposed[1].shape[0], heads), jnp.float32)
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(source_score.shape, jnp.float32), edges)
    call = jax.ffi.ffi_call("tilewright_attend_grad", results)
    dx, dsource, dedges = call(dy, x, source_score, facts, *transposed, slope=np.float32(negative_slope))
    return dx, dsource, gather_reduce_csr(dedges, forward[0], forward[1])
