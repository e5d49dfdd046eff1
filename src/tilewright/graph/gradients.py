"""Reductions over neighbours with gradients that gather: what a reduction reads forwards, its gradient reads on the transposed
graph, so that no program scatters.

`forward` holds for each of N nodes its M sources, `backward` for each source the nodes that it is a source of.

Legend: N nodes, M sources, E edges, H heads, D features of a head, F features.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.graph.rows import CsrRows, Rows, Slots, dot_slots, take
from tilewright.kernels import select
from tilewright.kernels.select import Reduce
from tilewright.models.gnn import dropout, leaky_relu


@jax.custom_vjp
def permute(x: Float[Array, "M ..."], order: Int32[Array, " M"], places: Int32[Array, " M"]) -> Float[Array, "M ..."]:
    """`x[order]`, where `places` is the inverse of `order`."""
    return take(x, order)


permute.defvjp(
    lambda x, order, places: (take(x, order), places),
    lambda places, gradient: (take(gradient, places), None, None),
)


def plain_reduce(forward: Rows, x: Float[Array, "M F"], weights: Float[Array, " E"] | None, reduce: Reduce) -> Array:
    """The reduction without a gradient. A weighted extreme stays in float32: its gradient looks for what is equal to it."""
    if weights is None:
        return forward.reduce(x, None, reduce)
    values = x.astype(jnp.float32) if reduce in ("max", "min") else x
    return forward.reduce(values, forward.from_edges(weights), reduce)


def neighbour_reduce(
    forward: Rows, backward: Rows, x: Float[Array, "M F"], weights: Float[Array, " E"] | None, reduce: Reduce
) -> Float[Array, "N F"]:
    """Reduces over each node's sources their features, times the edges' weights.

    The gradient of a maximum or minimum is shared equally by all that reach it.
    """
    arrays, shape = jax.tree.flatten((forward, backward))
    return reduce_arrays(arrays, x, weights, shape, reduce)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def reduce_arrays(arrays: list[Array], x: Array, weights: Array | None, shape: Any, reduce: Reduce) -> Array:
    """`neighbour_reduce` of rows taken apart: of those without a gradient JAX would make some that hold no arrays."""
    forward, _ = shape.unflatten(arrays)
    return plain_reduce(forward, x, weights, reduce).astype(x.dtype)


def reduce_forward(arrays: list[Array], x: Array, weights: Array | None, shape: Any, reduce: Reduce) -> tuple[Array, tuple]:
    out = plain_reduce(shape.unflatten(arrays)[0], x, weights, reduce)
    kept = None if weights is None and reduce in ("sum", "mean") else x
    best = out if reduce in ("max", "min") else None
    return out.astype(x.dtype), (arrays, kept, weights, best)


def reduce_backward(shape: Any, reduce: Reduce, saved: tuple, gradient: Array) -> tuple:
    arrays, x, weights, best = saved
    forward, backward = shape.unflatten(arrays)
    if best is not None:
        return None, *extreme_backward(forward, backward, x, weights, best, gradient)
    if reduce == "mean":
        degrees = jnp.maximum(forward.degrees, 1).astype(jnp.float32)[:, None]
        gradient = (gradient.astype(jnp.float32) / degrees).astype(gradient.dtype)
    if weights is None:
        return None, backward.reduce(gradient, None, "sum"), None
    products = dot_slots(forward, gradient[:, None], x[:, None])
    per_edge = forward.to_edges(products)[:, 0].astype(weights.dtype)
    return None, backward.reduce(gradient, backward.from_edges(weights), "sum"), per_edge


reduce_arrays.defvjp(reduce_forward, reduce_backward)


def extreme_backward(
    forward: Rows, backward: Rows, x: Array, weights: Array | None, best: Array, gradient: Array
) -> tuple[Array, Array | None]:
    """Gradients of a maximum or minimum by its features and its weights."""

    def message(source: Array, weight: tuple[Array, ...]) -> Array:
        value = take(x, source).astype(jnp.float32)
        return value * weight[0][:, None] if weight else value

    def reaches(row: Array, source: Array, weight: tuple[Array, ...]) -> Array:
        return message(source, weight) == take(best, row).astype(jnp.float32)

    scales = () if weights is None else (forward.from_edges(weights),)
    count = forward.sum_slots(lambda row, source, *w: reaches(row, source, w).astype(jnp.float32), *scales)
    share = gradient.astype(jnp.float32) / jnp.maximum(count, 1)

    def passed_back(source: Array, row: Array, *weight: Array) -> Array:
        passed = jnp.where(reaches(row, source, weight), take(share, row), 0)
        return passed * weight[0][:, None] if weight else passed

    back_scales = () if weights is None else (backward.from_edges(weights),)
    by_features = backward.sum_slots(passed_back, *back_scales).astype(x.dtype)
    if weights is None:
        return by_features, None

    def by_weight(row: Array, source: Array, *weight: Array) -> Array:
        passed = jnp.where(reaches(row, source, weight), take(share, row), 0)
        return jnp.sum(passed * take(x, source).astype(jnp.float32), axis=-1)

    per_slot = forward.map_slots(by_weight, 3 * x.shape[1], *scales)
    return by_features, forward.to_edges(per_slot).astype(weights.dtype)


def softmax_slots(rows: Rows, scores: Slots) -> tuple[Slots, Float[Array, "N H"], Float[Array, "N H"]]:
    """The softmax of float32 scores over each row's slots, and the row's maximum and sum that give it again."""
    largest = rows.reduce_slots(scores, "max")
    powers = rows.map_slots(lambda row, _, score: jnp.exp(score - take(largest, row)), 1, scores)
    total = jnp.maximum(rows.reduce_slots(powers, "sum"), jnp.finfo(jnp.float32).tiny)
    return rows.map_slots(lambda row, _, power: power / take(total, row), 1, powers), largest, total


def per_head(weights: Slots) -> Slots:
    """Weights as the kernels take them: without the dim of a single head."""
    return tuple(value[..., 0] for value in weights) if weights[0].shape[-1] == 1 else weights


def kept_edges(edges: int, heads: int, rate: float, key: Array | None) -> Float[Array, "E H"] | None:
    """The factors of a dropout for each edge, in the caller's order, and each head; None without a key."""
    return None if key is None or rate == 0 else dropout(jnp.ones((edges, heads), jnp.float32), rate, key)


def dropped(rows: Rows, values: Slots, kept: Float[Array, "E H"] | None) -> Slots:
    """The slots' values times the factors of their edges."""
    if kept is None:
        return values
    return rows.map_slots(lambda row, source, value, factor: value * factor, 1, values, rows.from_edges(kept))


def plain_attention(
    forward: Rows, x: Array, source: Array, target: Array, kept: Array | None, slope: float
) -> tuple[Array, Array, Array]:
    """The output, and each node's maximum and sum; see `neighbour_attention`."""
    flat = jax.lax.collapse(x, 1)

    def score(row: Array, origin: Array) -> Array:
        raw = take(target, row).astype(jnp.float32) + take(source, origin).astype(jnp.float32)
        return leaky_relu(raw, slope)

    def by_slots() -> tuple[Array, Array, Array]:
        weights, largest, total = softmax_slots(forward, forward.map_slots(score, 1))
        return forward.reduce(flat, per_head(dropped(forward, weights, kept)), "sum"), largest, total

    if isinstance(forward, CsrRows) and kept is None:
        lists = forward.offsets, forward.sources
        out, largest, total = select.attend_csr(flat, source, target, lists, slope, by_slots)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    else:
        out, largest, total = by_slots()
    return out.reshape(len(out), *x.shape[1:]), largest, total


def neighbour_attention(
    forward: Rows,
    backward: Rows,
    x: Float[Array, "M H D"],
    source: Float[Array, "M H"],
    target: Float[Array, "N H"],
    kept: Float[Array, "E H"] | None,
    slope: float,
) -> Float[Array, "N H D"]:
    """Sources' features, weighted by the softmax over a node's sources of `leaky_relu(target + source)`.

    Only scores exist for each edge, never features. The gradient makes the weights again from each node's maximum and sum
    (as Dao et al. 2022, FlashAttention, §3.1).

    Args:
        kept: factors of the weights, after the softmax, which have no gradient: those of a dropout. None stands for ones, and
            for these alone there are kernels.
    """
    arrays, shape = jax.tree.flatten((forward, backward))
    return attend_arrays(arrays, x, source, target, kept, shape, slope)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_arrays(
    arrays: list[Array], x: Array, source: Array, target: Array, kept: Array | None, shape: Any, slope: float
) -> Array:
    return plain_attention(shape.unflatten(arrays)[0], x, source, target, kept, slope)[0]


def attention_forward(
    arrays: list[Array], x: Array, source: Array, target: Array, kept: Array | None, shape: Any, slope: float
) -> tuple[Array, tuple]:
    out, largest, total = plain_attention(shape.unflatten(arrays)[0], x, source, target, kept, slope)
    return out, (arrays, x, source, target, kept, out, largest, total)


def attention_backward(shape: Any, slope: float, saved: tuple, gradient: Array) -> tuple:
    arrays, x, source, target, kept, out, largest, total = saved
    forward, backward = shape.unflatten(arrays)
    by_slots = partial(slot_gradients, forward, backward, slope, saved[1:], gradient)
    if isinstance(forward, CsrRows) and kept is None:
        flat = [jax.lax.collapse(one, 1) for one in (gradient, out, x)]
        scores = source.astype(jnp.float32), target.astype(jnp.float32)
        positions = backward.slots.at[forward.edges].get(mode="fill", fill_value=0)
        lists = (backward.offsets, backward.sources), (forward.offsets, positions)
        operands = (*flat[:2], largest, total, flat[2], *scores, *lists)
        grads = select.attend_csr_grad(operands, slope, by_slots)
    else:
        grads = by_slots()
    by_features, by_source, by_target = grads
    return None, by_features.reshape(x.shape), by_source.astype(source.dtype), by_target.astype(target.dtype), None


def slot_gradients(
    forward: Rows, backward: Rows, slope: float, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, Array, Array]:
    """Gradients of the features `[M, F]` and of the scores of sources and targets, float32."""
    x, source, target, kept, out, largest, total = saved
    mean = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def raw_score(origin: Array, node: Array) -> Array:
        return take(target, node).astype(jnp.float32) + take(source, origin).astype(jnp.float32)

    def weight(origin: Array, node: Array) -> Array:
        score = leaky_relu(raw_score(origin, node), slope)
        return jnp.exp(score - take(largest, node)) / take(total, node)

    def by_score(origin: Array, node: Array, weight: Array, product: Array) -> Array:
        steepness = jnp.where(raw_score(origin, node) > 0, 1.0, slope)
        return weight * (product - take(mean, node)) * steepness

    weights = backward.map_slots(weight, 1)
    products = dropped(backward, dot_slots(backward, x, gradient), kept)
    scores = backward.map_slots(by_score, 1, weights, products)
    by_source = backward.reduce_slots(scores, "sum")
    by_target = forward.reduce_slots(forward.from_edges(backward.to_edges(scores)), "sum")
    flat = jax.lax.collapse(gradient, 1)
    return backward.reduce(flat, per_head(dropped(backward, weights, kept)), "sum"), by_source, by_target


attend_arrays.defvjp(attention_forward, attention_backward)


def edge_softmax(forward: Rows, scores: Float[Array, "E H"]) -> Float[Array, "E H"]:
    """The softmax of the edges' scores over the edges that end at the same node."""
    arrays, shape = jax.tree.flatten(forward)
    return softmax_arrays(arrays, scores, shape)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_arrays(arrays: list[Array], scores: Array, shape: Any) -> Array:
    return softmax_forward(arrays, scores, shape)[0]


def softmax_forward(arrays: list[Array], scores: Array, shape: Any) -> tuple[Array, tuple]:
    forward = shape.unflatten(arrays)
    weights, _, _ = softmax_slots(forward, forward.from_edges(scores.astype(jnp.float32)))
    out = forward.to_edges(weights).astype(scores.dtype)
    return out, (arrays, out)


def softmax_backward(shape: Any, saved: tuple, gradient: Array) -> tuple:
    arrays, out = saved
    forward = shape.unflatten(arrays)
    weights = out.astype(jnp.float32)
    weighted = gradient.astype(jnp.float32) * weights
    mean = forward.reduce_slots(forward.from_edges(weighted), "sum")
    means = forward.to_edges(forward.map_slots(lambda row, _: take(mean, row), 1))
    return None, (weighted - weights * means).astype(out.dtype)


softmax_arrays.defvjp(softmax_forward, softmax_backward)
