"""Reference of neighbour reductions: gather, mask, reduce in float32.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, E edges, F features, H heads.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

Reduce = Literal["sum", "mean", "max", "min"]


def refuses_message_reduce(function: bool, weighted: bool, reduce: str) -> str:
    """Returns the reason why the kernels do not reduce messages of a form; empty if they do.

    Args:
        function: True if a function computes the messages, other than the features of the sources times a weight.
        weighted: True if these have weights.
        reduce: the reduction.
    """
    if function:
        return "a function computes the messages"
    if reduce in ("var", "std") and not weighted:  # from the means of the features and of their squares
        return ""
    if reduce not in get_args(Reduce):
        return f"none computes {reduce}"
    return "weights with a gradient per head are summed only" if weighted and reduce != "sum" else ""


def weighted(messages: Float[Array, "... F"], weights: Float[Array, "..."] | None) -> Float[Array, "... F"]:
    """Multiplies float32 messages by their weights: one per message, or one per head for its share of the features."""
    messages = messages.astype(jnp.float32)
    if weights is None:
        return messages
    heads = 1 if weights.ndim == messages.ndim - 1 else weights.shape[-1]
    *edges, features = messages.shape
    shares = messages.reshape(*edges, heads, features // heads)
    return (shares * weights.reshape(*edges, heads, 1)).reshape(messages.shape)


def gather_reduce(
    x: Float[Array, "M F"],
    sources: Int32[Array, "R K"],
    degrees: Int32[Array, " R"],
    weights: Float[Array, "R K"] | Float[Array, "R K H"] | None = None,
    reduce: Reduce = "sum",
) -> Float[Array, "R F"]:
    """Reduces, for each row, the features of its sources times their weights, in float32.

    Args:
        sources: rows of `x`. The first `degrees` slots of a row are valid; the others hold any index in range and have no
            effect.
        weights: float32. With H heads, which divide F, each weight scales its head's share of the features.
        reduce: a mean divides by the degree, also with weights.

    Returns:
        The result in the dtype of `x`; zeros for a row of degree 0.
    """
    counts = (jnp.arange(sources.shape[1]) < degrees[:, None])[:, :, None]
    messages = weighted(x[sources], weights)
    if reduce in ("max", "min"):
        lowest = jnp.inf if reduce == "min" else -jnp.inf
        masked = jnp.where(counts, messages, lowest)
        best = masked.min(axis=1, initial=jnp.inf) if reduce == "min" else masked.max(axis=1, initial=-jnp.inf)
        return jnp.where(degrees[:, None] > 0, best, 0).astype(x.dtype)
    total = jnp.where(counts, messages, 0).sum(axis=1)
    if reduce == "mean":
        total = total / jnp.maximum(degrees, 1).astype(jnp.float32)[:, None]
    return total.astype(x.dtype)


def gather_reduce_csr(
    x: Float[Array, "M F"],
    offsets: Int32[Array, " R1"],
    sources: Int32[Array, " E"],
    weights: Float[Array, " E"] | Float[Array, "E H"] | None = None,
    reduce: Reduce = "sum",
) -> Float[Array, "R F"]:
    """Reduces, for each row r, the features of its sources `offsets[r]` to `offsets[r + 1]`, without padding (R1 is R + 1).

    Sources beyond the last offset belong to no row.
    """
    rows = offsets.shape[0] - 1
    edges = sources.shape[0]
    degrees = offsets[1:] - offsets[:-1]
    ids = jnp.searchsorted(offsets[1:], jnp.arange(edges, dtype=jnp.int32), side="right")  # beyond the last: no row
    messages = weighted(x[sources], weights)
    if reduce in ("max", "min"):
        segment = jax.ops.segment_min if reduce == "min" else jax.ops.segment_max
        best = segment(messages, ids, rows, indices_are_sorted=True)
        return jnp.where(degrees[:, None] > 0, best, 0).astype(x.dtype)
    total = jax.ops.segment_sum(messages, ids, rows, indices_are_sorted=True)
    if reduce == "mean":
        total = total / jnp.maximum(degrees, 1).astype(jnp.float32)[:, None]
    return total.astype(x.dtype)
