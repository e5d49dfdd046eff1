"""Neighbour reduction compiled by XLA, for any device: slot by slot, fused into one loop that writes only the result.

Gathering first and reducing afterwards, as in the reference, would write the messages to memory.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, F features, H heads.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.kernels.gather_reduce.reference import Reduce, weighted

UNROLLED = 32
"""Slots per loop iteration; compile time grows with them. Wider rows run several iterations."""


def accumulate(
    total: Float[Array, "R F"],
    x: Float[Array, "M F"],
    sources: Int32[Array, "R K"],
    degrees: Int32[Array, " R"],
    weights: Array | None,
    reduce: Reduce,
) -> Float[Array, "R F"]:
    """Reduces further slots into `total`. A row ends where `degrees` (which may be negative) is not above the slot's number."""
    extreme = {"max": jnp.maximum, "min": jnp.minimum}.get(reduce)
    for slot in range(sources.shape[1]):
        message = weighted(x.at[sources[:, slot]].get(mode="promise_in_bounds"), None if weights is None else weights[:, slot])
        counts = (slot < degrees)[:, None]
        combined = total + message if extreme is None else extreme(total, message)
        total = jnp.where(counts, combined, total)
    return total


def gather_reduce(
    x: Float[Array, "M F"],
    sources: Int32[Array, "R K"],
    degrees: Int32[Array, " R"],
    weights: Float[Array, "R K"] | Float[Array, "R K H"] | None = None,
    reduce: Reduce = "sum",
) -> Float[Array, "R F"]:
    """Reduces, for each row, the features of its sources times their weights, in float32; see the reference."""
    rows, slots = sources.shape
    start = {"max": -jnp.inf, "min": jnp.inf}.get(reduce, 0.0)
    total = jnp.full((rows, x.shape[1]), start, jnp.float32)
    blocks = slots // UNROLLED if slots > UNROLLED else 0

    def add_block(block: Array, total: Array) -> Array:
        first = block * UNROLLED
        here = jax.lax.dynamic_slice_in_dim(sources, first, UNROLLED, 1)
        scale = None if weights is None else jax.lax.dynamic_slice_in_dim(weights, first, UNROLLED, 1)
        return accumulate(total, x, here, degrees - first, scale, reduce)

    if blocks:
        total = jax.lax.fori_loop(0, blocks, add_block, total)
    done = blocks * UNROLLED
    last = None if weights is None else weights[:, done:]
    total = accumulate(total, x, sources[:, done:], degrees - done, last, reduce)
    if reduce == "mean":
        total = total / jnp.maximum(degrees, 1).astype(jnp.float32)[:, None]
    elif reduce != "sum":
        total = jnp.where(degrees[:, None] > 0, total, 0)
    return total.astype(x.dtype)
