"""The operation on a CPU's vector unit, and attention over neighbours beside it; the kernels themselves are `cpu.cc`.

All take a graph in compressed form: row r has the edges `offsets[r]` to `offsets[r + 1]`, and an edge's source is a row of `x`.
There may be more sources than edges: what is beyond the last offset is not read, and a result for each edge is zero there.
Results are the same bit for bit whatever the number of threads. The kernels check offsets and sources, which costs about a
hundredth of their time; what does not fit ends in a `jax.errors.JaxRuntimeError` that names the first position and its value.

Legend: M nodes to gather from, R rows (nodes to reduce for; R1 is R + 1), E edges, F features, H heads, which divide F.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.gather_reduce.reference import Reduce

REDUCES: dict[Reduce, int] = {"sum": 0, "mean": 1, "max": 2, "min": 3}
"""The numbers by which `cpu.cc` knows reductions."""


def gather_reduce_csr(
    x: Float[Array, "M F"],
    offsets: Int32[Array, " R1"],
    sources: Int32[Array, " E"],
    weights: Float[Array, " E"] | Float[Array, "E H"] | None = None,
    reduce: Reduce = "sum",
) -> Float[Array, "R F"]:
    """Reduces for each row the features of its sources, times their weights, in float32; as `reference.gather_reduce_csr`.

    Args:
        x: float32 or bfloat16.
        weights: one for each edge, or for each head's share of its features.

    Returns:
        In the dtype of `x`; a row without edges is zero. A NaN among a row's messages makes its maximum and minimum NaN too.
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
    """The product of each edge's row and source, head by head, in float32.

    That is what is due to the weights of a sum, where `rows` is due to the sum.
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
    """Sums the sources' features with the softmax over a row's edges of `leaky_relu(target_score + source_score)` as weights.

    The weights exist for some thousand edges at a time only. After Velickovic et al., Graph Attention
    Networks, section 2.1.

    Returns:
        The sums, and of each row's scores the largest and the sum of `exp(score - largest)`: what `attend_csr_grad` takes.
        Rows without edges have zeros in all three.
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
    """Gradients of the features and of both scores, from that of the result of `attend_csr`, `dy`. Gathers only.

    The weights are computed again from each row's largest score and sum, as in Dao et al., FlashAttention, section 3.1.

    Args:
        transposed: the same edges by source: offsets for each of the M nodes, and each edge's row of `dy`.
        forward: the offsets of `attend_csr`, and for each edge in its order the position of that edge in the transposed graph.

    Returns:
        The gradients of `x`, `source_score` and `target_score`.
    """
    rows, heads = target_score.shape
    centre = (dy.astype(jnp.float32) * out.astype(jnp.float32)).reshape(rows, heads, x.shape[1] // heads).sum(axis=2)
    facts = jnp.concatenate([target_score, row_max + jnp.log(row_sum), centre], axis=1)
    edges = jax.ShapeDtypeStruct((transposed[1].shape[0], heads), jnp.float32)
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(source_score.shape, jnp.float32), edges)
    call = jax.ffi.ffi_call("tilewright_attend_grad", results)
    dx, due_source, due_edges = call(dy, x, source_score, facts, *transposed, slope=np.float32(negative_slope))
    return dx, due_source, gather_reduce_csr(due_edges, forward[0], forward[1])
