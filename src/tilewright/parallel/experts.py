"""Experts over the devices of a mesh: whose they are, and rows on their way to them and back.

Legend: M rows of a device, H hidden size, E experts, K of them chosen for a row, C rows that a pair of devices exchanges at
once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Operations, RoutedProduct, RoutedWeights
from tilewright.parallel.rings import Axis
from tilewright.parallel.sharding import GROUPED_AXES


def own_experts(ops: Operations) -> Operations:
    """Operations of a program that each device of `GROUPED_AXES` runs with its own experts."""
    return replace(ops, first_expert=first_expert)


def first_expert(count: int) -> Array:
    """The first expert of the device that asks, where each has so many."""
    return jax.lax.axis_index(GROUPED_AXES) * count


def watched(ops: Operations, note: Callable[[Array], None]) -> Operations:
    """Operations that show the scores of each routed product, `[R, E]`, to a function while a program is traced."""

    def scores(product: RoutedProduct, *of: Any) -> Array:
        found = product.scores(*of)
        note(found)
        return found

    def routed(own: Operations, product: RoutedProduct, *of: Any, **more: Any) -> Array:
        return ops.routed(own, replace(product, scores=partial(scores, product)), *of, **more)

    return replace(ops, routed=routed)


def all_to_all(
    ops: Operations, product: RoutedProduct, x: Float[Array, "M H"], w: RoutedWeights, axis: Axis, capacity: int
) -> Float[Array, "M H"]:
    """A routed product of a device's own rows: each goes once to every device that has an expert of it, and sums come back.

    Nothing overflows: rows travel in rounds of C for each pair of devices, as many rounds as the pair needs that has most.
    There is one where the capacity is large enough, and M / C at most. All devices run as many. A row's result depends neither
    on the rounds nor on other rows: what comes back is added in the order of the devices. It has no gradient.

    Args:
        product: whose experts the devices of the axis have in order, as many each.
        capacity: C.

    Raises:
        ValueError: a capacity below 1, or experts that the devices do not divide.
    """
    size, (rows, hidden) = jax.lax.axis_size(axis), x.shape
    if capacity < 1 or product.experts % size:
        found = f"{capacity} for {product.experts} experts on {size}"
        raise ValueError(f"expected a capacity of at least 1 row, and devices that divide the experts, found {found}")
    capacity = min(capacity, rows)
    experts, weights = product.choose(product.scores(ops, x, w))
    goes = jnp.any((experts // (product.experts // size))[:, None] == jnp.arange(size)[:, None], axis=-1)
    count = jnp.sum(goes, axis=0, dtype=jnp.int32)
    place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    queue = jnp.argsort(~goes, axis=0, stable=True).T.astype(jnp.int32)  # of each device the rows that go there come first
    queue = jnp.pad(queue, ((0, 0), (0, -rows % capacity)))
    rounds = jax.lax.pmax((jnp.max(count) + capacity - 1) // capacity, axis)
    exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)

    def turn(n: Array, back: Array) -> Array:
        at = n * capacity
        some = jax.lax.dynamic_slice_in_dim(queue, at, capacity, 1)
        there = at + jnp.arange(capacity, dtype=jnp.int32) < count[:, None]
        chosen = jnp.where(there[..., None], experts[some], -1)
        told = exchange(jnp.concatenate([chosen, jax.lax.bitcast_convert_type(weights[some], jnp.int32)], axis=-1))
        chosen, shares = jnp.split(told.reshape(size * capacity, -1), 2, axis=-1)
        came = exchange(ops.gather_rows(x, some)).reshape(-1, hidden)
        y = product.apply(ops, came, w, chosen, jax.lax.bitcast_convert_type(shares, jnp.float32)).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(back, exchange(y.reshape(size, capacity, hidden)), at, 1)

    back = jax.lax.fori_loop(0, rounds, turn, jnp.zeros((size, queue.shape[1], hidden), x.dtype))
    total: Any = jnp.zeros(x.shape, jnp.float32)
    for device in range(size):
        theirs = ops.gather_rows(back[device], jnp.maximum(place[:, device], 0))
        total += jnp.where(goes[:, device, None], theirs.astype(jnp.float32), 0)
    return total.astype(x.dtype)
