"""Expert parallelism: placement of experts, and the all-to-all of tokens to experts and back.

Legend: M rows of a device, H hidden size, E experts, K experts of a row, C rows that a pair of devices exchanges in a round,
R rows of all devices.
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


def with_local_experts(ops: Operations) -> Operations:
    """Returns operations of a program that each device of `GROUPED_AXES` runs with its experts."""
    return replace(ops, first_expert=first_expert)


def first_expert(count: int) -> Array:
    """Index of this device's first expert, with `count` experts per device."""
    return jax.lax.axis_index(GROUPED_AXES) * count


def with_router_callback(ops: Operations, note: Callable[[Array], None]) -> Operations:
    """Returns operations that call `note` with the router scores `[R, E]` of each routed product, during tracing."""

    def scores(product: RoutedProduct, *arguments: Any) -> Array:
        found = product.scores(*arguments)
        note(found)
        return found

    def routed(inner: Operations, product: RoutedProduct, *arguments: Any, **options: Any) -> Array:
        return ops.routed(inner, replace(product, scores=partial(scores, product)), *arguments, **options)

    return replace(ops, routed=routed)


def all_to_all(
    ops: Operations, product: RoutedProduct, x: Float[Array, "M H"], w: RoutedWeights, axis: Axis, capacity: int
) -> Float[Array, "M H"]:
    """Computes a routed product of this device's rows by all-to-all: rows travel to their experts, and sums travel back.

    A row is sent once to each device that has at least one of its experts. No row is dropped: each pair of devices exchanges C
    rows per round, and all devices run as many rounds as the pair with most rows needs, between 1 and M / C. A row's result
    depends neither on the rounds nor on other rows: returned sums are added in device order. Not differentiable.

    Args:
        product: routed product; each device of the axis has an equal number of its experts, in device order.
        capacity: C.

    Raises:
        ValueError: a capacity below 1, or a number of experts that the devices do not divide.
    """
    size, (rows, hidden) = jax.lax.axis_size(axis), x.shape
    if capacity < 1 or product.experts % size:
        found = f"{capacity} for {product.experts} experts on {size}"
        raise ValueError(f"expected a capacity of at least 1 row, and devices that divide the experts, found {found}")
    capacity = min(capacity, rows)
    experts, weights = product.choose(product.scores(ops, x, w), w)
    goes = jnp.any((experts // (product.experts // size))[:, None] == jnp.arange(size)[:, None], axis=-1)
    count = jnp.sum(goes, axis=0, dtype=jnp.int32)
    place = jnp.cumsum(goes, axis=0, dtype=jnp.int32) - 1
    queue = jnp.argsort(~goes, axis=0, stable=True).T.astype(jnp.int32)  # per device: rows that go there first
    queue = jnp.pad(queue, ((0, 0), (0, -rows % capacity)))
    rounds = jax.lax.pmax((jnp.max(count) + capacity - 1) // capacity, axis)
    exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)

    def run_round(n: Array, back: Array) -> Array:
        at = n * capacity
        some = jax.lax.dynamic_slice_in_dim(queue, at, capacity, 1)
        used = at + jnp.arange(capacity, dtype=jnp.int32) < count[:, None]
        chosen = jnp.where(used[..., None], experts[some], -1)
        routing = exchange(jnp.concatenate([chosen, jax.lax.bitcast_convert_type(weights[some], jnp.int32)], axis=-1))
        chosen, shares = jnp.split(routing.reshape(size * capacity, -1), 2, axis=-1)
        received = exchange(ops.gather_rows(x, some)).reshape(-1, hidden)
        y = product.apply(ops, received, w, chosen, jax.lax.bitcast_convert_type(shares, jnp.float32)).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(back, exchange(y.reshape(size, capacity, hidden)), at, 1)

    back = jax.lax.fori_loop(0, rounds, run_round, jnp.zeros((size, queue.shape[1], hidden), x.dtype))
    total: Any = jnp.zeros(x.shape, jnp.float32)
    for device in range(size):
        returned = ops.gather_rows(back[device], jnp.maximum(place[:, device], 0))
        total += jnp.where(goes[:, device, None], returned.astype(jnp.float32), 0)
    return total.astype(x.dtype)
