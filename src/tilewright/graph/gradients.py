"""Reductions over neighbours whose gradients gather on the transposed graph, so that no program scatters.

`forward` has the sources of each of the N nodes, `backward` the destinations of each of the M sources.

Legend: N nodes, M sources, E edges, S slots of a slot list, H heads, D features of a head, F features.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, Shaped

from tilewright.graph import tiles
from tilewright.graph.rows import CsrRows, Rows, Slots, dot_slots, take
from tilewright.kernels import select
from tilewright.kernels.select import Reduce
from tilewright.models.gnn import dropout, leaky_relu

End = Literal["sources", "rows", "edges"]
"""Ends of a slot: its source, its node (a row of the reduction), or the edge itself."""


@jax.custom_vjp
def permute(x: Float[Array, "M ..."], order: Int32[Array, " M"], places: Int32[Array, " M"]) -> Float[Array, "M ..."]:
    """Returns `x[order]` with a gradient that gathers; `places` is the inverse of `order`."""
    return take(x, order)


permute.defvjp(
    lambda x, order, places: (take(x, order), places),
    lambda places, gradient: (take(gradient, places), None, None),
)


def plain_reduce(forward: Rows, x: Float[Array, "M F"], weights: Float[Array, " E"] | None, reduce: Reduce) -> Array:
    """Reduces without gradient. A weighted extreme stays float32, since its gradient compares messages with the extreme."""
    if weights is None:
        return forward.reduce(x, None, reduce)
    values = x.astype(jnp.float32) if reduce in ("max", "min") else x
    return forward.reduce(values, forward.from_edges(weights), reduce)


def neighbour_reduce(
    forward: Rows, backward: Rows, x: Float[Array, "M F"], weights: Float[Array, " E"] | None, reduce: Reduce
) -> Float[Array, "N F"]:
    """Reduces the features of each node's sources, multiplied by the edge weights.

    Equal maxima or minima share the gradient equally.
    """
    arrays, shape = jax.tree.flatten((forward, backward))
    return reduce_arrays(arrays, x, weights, shape, reduce)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def reduce_arrays(arrays: list[Array], x: Array, weights: Array | None, shape: Any, reduce: Reduce) -> Array:
    """Computes `neighbour_reduce` on flattened rows, since JAX's cotangents of integer arrays cannot form `Rows`."""
    forward, _ = shape.unflatten(arrays)
    return plain_reduce(forward, x, weights, reduce).astype(x.dtype)


def reduce_forward(arrays: list[Array], x: Array, weights: Array | None, shape: Any, reduce: Reduce) -> tuple[Array, tuple]:
    out = plain_reduce(shape.unflatten(arrays)[0], x, weights, reduce)
    residual = None if weights is None and reduce in ("sum", "mean") else x
    best = out if reduce in ("max", "min") else None
    return out.astype(x.dtype), (arrays, residual, weights, best)


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
    """Computes the gradients of a maximum or minimum with respect to features and weights."""

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
    x_grad = backward.sum_slots(passed_back, *back_scales).astype(x.dtype)
    if weights is None:
        return x_grad, None

    def weight_grad(row: Array, source: Array, *weight: Array) -> Array:
        passed = jnp.where(reaches(row, source, weight), take(share, row), 0)
        return jnp.sum(passed * take(x, source).astype(jnp.float32), axis=-1)

    per_slot = forward.map_slots(weight_grad, 3 * x.shape[1], *scales)
    return x_grad, forward.to_edges(per_slot).astype(weights.dtype)


def softmax_slots(rows: Rows, scores: Slots) -> tuple[Slots, Float[Array, "N H"], Float[Array, "N H"]]:
    """Computes the softmax of float32 scores over each row's slots, and the maximum and sum of each row to recompute it."""
    largest = rows.reduce_slots(scores, "max")
    powers = rows.map_slots(lambda row, _, score: jnp.exp(score - take(largest, row)), 1, scores)
    total = jnp.maximum(rows.reduce_slots(powers, "sum"), jnp.finfo(jnp.float32).tiny)
    return rows.map_slots(lambda row, _, power: power / take(total, row), 1, powers), largest, total


def per_head(weights: Slots) -> Slots:
    """Squeezes the dimension of a single head, as the kernels expect."""
    return tuple(value[..., 0] for value in weights) if weights[0].shape[-1] == 1 else weights


def dropout_factors(edges: int, heads: int, rate: float, key: Array | None) -> Float[Array, "E H"] | None:
    """Draws the dropout factor of each edge, in the caller's order, and head; None without a key."""
    return None if key is None or rate == 0 else dropout(jnp.ones((edges, heads), jnp.float32), rate, key)


def dropped(rows: Rows, values: Slots, factors: Float[Array, "E H"] | None) -> Slots:
    """Multiplies the values of slots by the dropout factors of their edges."""
    if factors is None:
        return values
    return rows.map_slots(lambda row, source, value, factor: value * factor, 1, values, rows.from_edges(factors))


def plain_attention(
    forward: Rows, x: Array, source: Array, target: Array, factors: Array | None, slope: float
) -> tuple[Array, Array, Array]:
    """Computes `neighbour_attention` without gradient; returns the output, and the maximum and sum of each node."""
    flat = jax.lax.collapse(x, 1)

    def score(row: Array, origin: Array) -> Array:
        raw = take(target, row).astype(jnp.float32) + take(source, origin).astype(jnp.float32)
        return leaky_relu(raw, slope)

    def slot_path() -> tuple[Array, Array, Array]:
        weights, largest, total = softmax_slots(forward, forward.map_slots(score, 1))
        return forward.reduce(flat, per_head(dropped(forward, weights, factors)), "sum"), largest, total

    if isinstance(forward, CsrRows) and factors is None:
        lists = forward.offsets, forward.sources
        out, largest, total = select.attend_csr(flat, source, target, lists, slope, slot_path)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    else:
        out, largest, total = slot_path()
    return out.reshape(len(out), *x.shape[1:]), largest, total


def neighbour_attention(
    forward: Rows,
    backward: Rows,
    x: Float[Array, "M H D"],
    source: Float[Array, "M H"],
    target: Float[Array, "N H"],
    factors: Float[Array, "E H"] | None,
    slope: float,
) -> Float[Array, "N H D"]:
    """Sums the sources' features, weighted by the softmax of `leaky_relu(target + source)` over a node's sources.

    Only scores are stored per edge, not features. The gradient recomputes the weights from the maximum and sum of each node
    (as in Dao et al. 2022, FlashAttention, §3.1).

    Args:
        forward: sources of each node.
        backward: destinations of each source.
        x: features of the sources.
        source: scores of the sources.
        target: scores of the nodes.
        factors: dropout factors of the weights, without gradient; None for no dropout. Kernels exist only for None.
        slope: slope of the leaky ReLU for negative values.
    """
    arrays, shape = jax.tree.flatten((forward, backward))
    return attend_arrays(arrays, x, source, target, factors, shape, slope)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend_arrays(
    arrays: list[Array], x: Array, source: Array, target: Array, factors: Array | None, shape: Any, slope: float
) -> Array:
    return plain_attention(shape.unflatten(arrays)[0], x, source, target, factors, slope)[0]


def attention_forward(
    arrays: list[Array], x: Array, source: Array, target: Array, factors: Array | None, shape: Any, slope: float
) -> tuple[Array, tuple]:
    out, largest, total = plain_attention(shape.unflatten(arrays)[0], x, source, target, factors, slope)
    return out, (arrays, x, source, target, factors, out, largest, total)


def attention_backward(shape: Any, slope: float, saved: tuple, gradient: Array) -> tuple:
    arrays, x, source, target, factors, out, largest, total = saved
    forward, backward = shape.unflatten(arrays)
    slot_path = partial(slot_gradients, forward, backward, slope, saved[1:], gradient)
    if isinstance(forward, CsrRows) and factors is None:
        flat = [jax.lax.collapse(array, 1) for array in (gradient, out, x)]
        scores = source.astype(jnp.float32), target.astype(jnp.float32)
        positions = backward.slots.at[forward.edges].get(mode="fill", fill_value=0)
        lists = (backward.offsets, backward.sources), (forward.offsets, positions)
        operands = (*flat[:2], largest, total, flat[2], *scores, *lists)
        grads = select.attend_csr_grad(operands, slope, slot_path)
    else:
        grads = slot_path()
    x_grad, source_grad, target_grad = grads
    return None, x_grad.reshape(x.shape), source_grad.astype(source.dtype), target_grad.astype(target.dtype), None


def slot_gradients(
    forward: Rows, backward: Rows, slope: float, saved: tuple[Any, ...], gradient: Array
) -> tuple[Array, Array, Array]:
    """Computes the gradients of the features `[M, F]` and of the scores of sources and targets, in float32."""
    x, source, target, factors, out, largest, total = saved
    mean = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def raw_score(origin: Array, node: Array) -> Array:
        return take(target, node).astype(jnp.float32) + take(source, origin).astype(jnp.float32)

    def weight(origin: Array, node: Array) -> Array:
        score = leaky_relu(raw_score(origin, node), slope)
        return jnp.exp(score - take(largest, node)) / take(total, node)

    def score_grad(origin: Array, node: Array, weight: Array, product: Array) -> Array:
        steepness = jnp.where(raw_score(origin, node) > 0, 1.0, slope)
        return weight * (product - take(mean, node)) * steepness

    weights = backward.map_slots(weight, 1)
    products = dropped(backward, dot_slots(backward, x, gradient), factors)
    scores = backward.map_slots(score_grad, 1, weights, products)
    source_grad = backward.reduce_slots(scores, "sum")
    target_grad = forward.reduce_slots(forward.from_edges(backward.to_edges(scores)), "sum")
    flat = jax.lax.collapse(gradient, 1)
    return backward.reduce(flat, per_head(dropped(backward, weights, factors)), "sum"), source_grad, target_grad


attend_arrays.defvjp(attention_forward, attention_backward)


@dataclass(frozen=True)
class SlotGraph:
    """Edges of a graph as a slot list: gathers values of nodes and edges for it, and reduces its values over the nodes.

    All methods have gradients that gather. Values of padding slots have no effect and no gradient.

    Attributes:
        forward: sources of each node.
        backward: destinations of each source.
    """

    forward: Rows
    backward: Rows

    @property
    def num_edges(self) -> int:
        """Number of the caller's edges, including padding."""
        return self.forward.num_edges

    @property
    def num_slots(self) -> int:
        return self.forward.num_slots

    def gather(self, values: Shaped[Array, "values ..."], end: End) -> Shaped[Array, "S ..."]:
        """Gathers the values of each slot's source, node ("rows") or edge (in the caller's order)."""
        if not jnp.issubdtype(values.dtype, jnp.inexact):
            return take(values, getattr(self.forward.slot_list, end))
        arrays, shape = jax.tree.flatten((self.forward, self.backward))
        return gather_list(arrays, values, shape, end)

    def reduce(self, values: Float[Array, "S ..."], reduce: Reduce) -> Float[Array, "N ..."]:
        """Reduces the values over each node's slots, in float32; a node without edges gets zeros."""
        arrays, shape = jax.tree.flatten(self.forward)
        flat = values.reshape(values.shape[0], math.prod(values.shape[1:]))
        out: Any = reduce_list(arrays, flat.astype(jnp.float32), shape, reduce)
        return out.astype(values.dtype).reshape(out.shape[0], *values.shape[1:])

    def softmax(self, scores: Float[Array, "S ..."]) -> Float[Array, "S ..."]:
        """Computes the softmax of scores over each node's slots; zeros in padding."""
        arrays, shape = jax.tree.flatten(self.forward)
        out: Any = softmax_list(arrays, scores.reshape(scores.shape[0], math.prod(scores.shape[1:])), shape)
        return out.reshape(scores.shape)

    def dropout(self, weights: Float[Array, "S H"], rate: float, key: Array | None) -> Float[Array, "S H"]:
        """Drops weights with probability `rate`, and scales the others; the dropped ones depend on the caller's order alone."""
        factors = dropout_factors(self.num_edges, weights.shape[1], rate, key)
        return weights if factors is None else weights * self.gather(factors.astype(weights.dtype), "edges")

    def plan(self, function: Callable[..., Array], operands: Mapping[str, Any]) -> tiles.Plan | None:
        """Divides a message function into stages for tiles; see `tiles.plan`."""
        return tiles.plan(function, operands, self.num_slots) if isinstance(self.forward, tiles.LAYOUTS) else None

    def last_stage(self, plan: tiles.Plan) -> tuple[tiles.Stage, list[tiles.Operand]]:
        """Evaluates all stages of a plan but the last. Returns the last one and its values."""
        operands = list(plan.operands)
        for stage in plan.stages[:-1]:
            values, end = self.stored_stage(plan, stage, operands), stage.end
            assert end is not None, "only the last stage ends the function"
            known = self.softmax(values) if end.rate is None else self.dropout(values, end.rate, stage.key)
            operands.append(tiles.Operand(known, "slots"))
        return plan.stages[-1], operands

    def stored_stage(self, plan: tiles.Plan, stage: tiles.Stage, operands: list[tiles.Operand]) -> Float[Array, "S ..."]:
        """Evaluates a stage for all slots."""
        if (same := stage.same_as) is not None:
            value, place = operands[same]
            return value if place == "slots" else self.gather(value, place)
        known = operands[: len(stage.used)]
        return tiles.stage_results(self.forward, self.backward, stage, known, plan.size, ())

    def planned(self, plan: tiles.Plan) -> Float[Array, "S ..."]:
        """Evaluates a planned function for all slots."""
        stage, operands = self.last_stage(plan)
        return self.stored_stage(plan, stage, operands)

    def planned_sums(self, plan: tiles.Plan, sums: tuple[tiles.Sums, ...]) -> dict[str, Float[Array, "N ..."]]:
        """Sums the results of a planned function, or their squares, over each node's slots, without storing them."""
        stage, operands = self.last_stage(plan)
        found = tiles.stage_results(self.forward, self.backward, stage, operands, plan.size, sums)
        return dict(zip(sums, found, strict=True))

    def divided(self, summed: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """Divides sums over the slots by the number of each node's edges; in float32."""
        return divided(self.forward, summed.reshape(summed.shape[0], -1)).reshape(summed.shape)

    def to_edges(self, values: Shaped[Array, "S ..."]) -> Shaped[Array, "E ..."]:
        """Returns the values in the caller's order of edges; zeros for edges in padding."""
        arrays, shape = jax.tree.flatten(self.forward)
        return edge_list(arrays, values, shape)

    def weighted_sum(self, x: Float[Array, "M F"], weights: Float[Array, "S H"]) -> Float[Array, "N F"]:
        """Sums the features of each node's sources, multiplied by the weights of H equal parts of F, with kernels."""
        arrays, shape = jax.tree.flatten((self.forward, self.backward))
        return weigh_list(arrays, x, weights.astype(jnp.float32), shape)


def backward_places(forward: Rows, backward: Rows) -> Slots:
    """Returns the place in the forward slot list of each backward slot."""
    assert forward.slots is not None, "only the first stage has edges"
    return backward.from_edges(jnp.minimum(forward.slots, max(0, forward.num_slots - 1)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_list(arrays: list[Array], values: Array, shape: Any, end: End) -> Array:
    """Computes `SlotGraph.gather` on flattened rows, see `reduce_arrays`."""
    return take(values, getattr(shape.unflatten(arrays)[0].slot_list, end))


def gather_list_backward(shape: Any, end: End, saved: tuple, gradient: Array) -> tuple:
    arrays, like = saved
    forward, backward = shape.unflatten(arrays)
    flat = gradient.reshape(gradient.shape[0], math.prod(gradient.shape[1:]))
    if end == "sources":
        summed = backward.reduce(flat, None, "sum", backward_places(forward, backward))
    elif end == "rows":
        summed = forward.reduce_slots(forward.split(flat.astype(jnp.float32)), "sum")
    else:
        summed = forward.to_edges(forward.split(flat))
    return None, summed.astype(like.dtype).reshape(-1, *gradient.shape[1:])


gather_list.defvjp(
    lambda arrays, values, shape, end: (gather_list(arrays, values, shape, end), (arrays, values[:0])), gather_list_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def reduce_list(arrays: list[Array], values: Array, shape: Any, reduce: Reduce) -> Array:
    forward = shape.unflatten(arrays)
    if reduce == "mean":
        return divided(forward, forward.reduce_slots(forward.split(values), "sum"))
    return forward.reduce_slots(forward.split(values), reduce)


def divided(forward: Rows, summed: Float[Array, "N F"]) -> Float[Array, "N F"]:
    """Divides sums over the slots by the number of each node's edges."""
    return summed / jnp.maximum(forward.degrees, 1).astype(jnp.float32)[:, None]


def reduce_list_forward(arrays: list[Array], values: Array, shape: Any, reduce: Reduce) -> tuple[Array, tuple]:
    out: Any = reduce_list(arrays, values, shape, reduce)
    return out, (arrays, (values, out) if reduce in ("max", "min") else None)


def reduce_list_backward(shape: Any, reduce: Reduce, saved: tuple, gradient: Array) -> tuple:
    arrays, extreme = saved
    forward = shape.unflatten(arrays)
    rows, _, _, counts = forward.slot_list
    if extreme is not None:
        values, best = extreme
        counts = counts[:, None] & (values == take(best, rows))
        ties = forward.reduce_slots(forward.split(counts.astype(jnp.float32)), "sum")
        return None, jnp.where(counts, take(gradient / jnp.maximum(ties, 1), rows), 0)
    each = divided(forward, gradient) if reduce == "mean" else gradient
    return None, jnp.where(counts[:, None], take(each, rows), 0)


reduce_list.defvjp(reduce_list_forward, reduce_list_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def softmax_list(arrays: list[Array], scores: Array, shape: Any) -> Array:
    return softmax_list_forward(arrays, scores, shape)[0]


def softmax_list_forward(arrays: list[Array], scores: Array, shape: Any) -> tuple[Array, tuple]:
    forward = shape.unflatten(arrays)
    weights = forward.flatten(softmax_slots(forward, forward.split(scores.astype(jnp.float32)))[0])
    out = jnp.where(forward.slot_list.filled[:, None], weights, 0).astype(scores.dtype)
    return out, (arrays, out)


def softmax_list_backward(shape: Any, saved: tuple, gradient: Array) -> tuple:
    arrays, out = saved
    forward = shape.unflatten(arrays)
    weights = out.astype(jnp.float32)
    weighted = gradient.astype(jnp.float32) * weights
    mean = forward.reduce_slots(forward.split(weighted), "sum")
    return None, (weighted - weights * take(mean, forward.slot_list.rows)).astype(out.dtype)


softmax_list.defvjp(softmax_list_forward, softmax_list_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def weigh_list(arrays: list[Array], x: Array, weights: Array, shape: Any) -> Array:
    forward, _ = shape.unflatten(arrays)
    return forward.reduce(x, per_head(forward.split(weights)), "sum")


def weigh_list_backward(shape: Any, saved: tuple, gradient: Array) -> tuple:
    arrays, x, weights = saved
    forward, backward = shape.unflatten(arrays)
    back = tuple(take(weights, places) for places in backward_places(forward, backward))
    by_head = [each.reshape(each.shape[0], weights.shape[1], each.shape[1] // weights.shape[1]) for each in (gradient, x)]
    products = forward.flatten(dot_slots(forward, *by_head))
    counts = forward.slot_list.filled[:, None]
    return None, backward.reduce(gradient, per_head(back), "sum").astype(x.dtype), jnp.where(counts, products, 0)


weigh_list.defvjp(
    lambda arrays, x, weights, shape: (weigh_list(arrays, x, weights, shape), (arrays, x, weights)), weigh_list_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def edge_list(arrays: list[Array], values: Array, shape: Any) -> Array:
    forward = shape.unflatten(arrays)
    return forward.to_edges(forward.split(values))


def edge_list_backward(shape: Any, arrays: list[Array], gradient: Array) -> tuple:
    _, _, edges, filled = shape.unflatten(arrays).slot_list
    per_slot = take(gradient, edges)
    return None, jnp.where(filled.reshape(-1, *[1] * (per_slot.ndim - 1)), per_slot, 0)


edge_list.defvjp(lambda arrays, values, shape: (edge_list(arrays, values, shape), arrays), edge_list_backward)


def edge_softmax(forward: Rows, scores: Float[Array, "E H"]) -> Float[Array, "E H"]:
    """Computes the softmax of edge scores over the incoming edges of each node, in the caller's order of edges."""
    slots = SlotGraph(forward, forward)
    return slots.to_edges(slots.softmax(slots.gather(scores, "edges")))
