"""Reductions over neighbours on other devices, computed by each device within `jax.shard_map`.

A device has a block of nodes with features, and their in-neighbours in parts: one part for each device with some of them
(`exchange="ring"`), or one part for all (`"all_gather"`). Sums and extremes accumulate over parts; attention merges the
softmaxes of parts by their maxima and sums (Liu et al., "Ring Attention with Blockwise Transformers", 2023, §3). The backward
pass reads the transposed parts, and the gradient of a shard's features travels back with the shard.

Legend: N nodes of a device, M nodes of a visiting shard, F features, H heads, D features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.graph.gradients import attention_backward, dropout_factors, neighbour_reduce, plain_attention, plain_reduce
from tilewright.graph.rows import Rows, take
from tilewright.graph.table import check_features, check_reduction, check_scores, inverse_root
from tilewright.kernels.select import Reduce
from tilewright.parallel import rings

Arrays = tuple[tuple[Array, ...], ...]
"""Arrays of each part."""
DropoutFactors = tuple[Array | None, ...]
"""Dropout factors `[E, H]` of the edges of each part, see `gradients.neighbour_attention`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GraphPart:
    """Part of the in-neighbours of a device's nodes, which visit the device together.

    Attributes:
        forward: sources of each of the N nodes, among the M visiting nodes.
        backward: destinations of each of the M visiting nodes.
        weights: weights of the part's edges; None if all are 1.
    """

    forward: Rows
    backward: Rows
    weights: Any


@dataclass(frozen=True)
class ExchangePlan:
    """Static plan of an exchange.

    Attributes:
        axis: mesh axis that the nodes are sharded over.
        exchange: "ring" or "all_gather".
        hops: hop of each part in the ring; 0 for an all-gather.
        trees: tree structure of each part.
    """

    axis: str
    exchange: str
    hops: tuple[int, ...]
    trees: tuple[Any, ...]

    def part(self, arrays: Arrays, hop: int) -> GraphPart:
        place = self.hops.index(hop)
        return jax.tree.unflatten(self.trees[place], arrays[place])

    def dropout_factors(self, arrays: Arrays, heads: int, rate: float, key: Array | None) -> DropoutFactors:
        """Draws the dropout factors of each part."""
        edges = [self.part(arrays, hop).forward.num_edges for hop in self.hops]
        keys = [None] * len(edges) if key is None else list(jax.random.split(key, len(edges)))
        return tuple(dropout_factors(count, heads, rate, each) for count, each in zip(edges, keys, strict=True))

    def accumulate(self, visit: Callable[..., Any], shard: Any, total: Any) -> Any:
        """Accumulates over visiting shards; see `rings.ring`."""
        if self.exchange == "ring":
            return rings.ring(visit, shard, total, self.axis, self.hops)
        return rings.gathered(visit, shard, total, self.axis)

    def collect(self, visit: Callable[..., Any], shard: Any, total: Any) -> tuple[Any, Any]:
        """Accumulates over visiting shards, and returns results to their devices; see `rings.ring_collect`."""
        if self.exchange == "ring":
            return rings.ring_collect(visit, shard, total, self.axis, self.hops)
        return rings.gathered_collect(visit, shard, total, self.axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """Block of a partitioned table on one device; `local()` implements `models.gnn.Neighbours` within `jax.shard_map`.

    The rows are the nodes of the block and padding, which has no edges. Outside `jax.shard_map` all arrays have a leading
    dimension of devices.

    Attributes:
        arrays: arrays of the parts, see `Arrays`.
        degrees: number of each node's neighbours on all devices.
        sums: sum of the weights of each node's edges.
        loops: correction to one self-loop per node, see `edges.missing_loops`; 0 for padding.
        plan: plan of the exchange.
    """

    arrays: Any
    degrees: Any
    sums: Any
    loops: Any
    plan: ExchangePlan = field(metadata={"static": True})

    def local(self) -> "Shard":
        """Returns this device's block, without the leading dimension, within `jax.shard_map`."""
        return jax.tree.map(lambda leaf: leaf[0], self)

    @property
    def num_nodes(self) -> int:
        return self.degrees.shape[0]

    @property
    def num_sources(self) -> int:
        return self.num_nodes

    def aggregate(
        self, x: Float[Array, "N F"], *, reduce: str = "sum", normalisation: str | None = None
    ) -> Float[Array, "N F"]:
        """Reduces over each node's neighbours on all devices; see `tilewright.graph.aggregate.aggregate`."""
        reduction = check_reduction(reduce)
        if normalisation is not None and (normalisation not in ("symmetric", "row") or reduce != "sum"):
            raise ValueError(
                f"expected the normalisation symmetric or row with reduce='sum', found {normalisation!r} with reduce={reduce!r}"
            )
        if x.ndim != 2 or x.shape[0] != self.num_nodes:
            raise ValueError(f"expected features of shape [{self.num_nodes}, F] on each device, found {list(x.shape)}")
        check_features(x)
        if reduction in ("max", "min"):
            return extreme(self.arrays, x, self.degrees, self.plan, reduction)
        if normalisation == "symmetric":
            near = inverse_root(self.sums + self.loops)[:, None]
            scaled = (x.astype(jnp.float32) * near).astype(x.dtype)
            summed = total(self.arrays, scaled, self.plan) + scaled.astype(jnp.float32) * self.loops[:, None]
            return (summed * near).astype(x.dtype)
        summed = total(self.arrays, x, self.plan)
        if normalisation == "row":
            summed = jnp.where(self.sums != 0, 1 / jnp.where(self.sums != 0, self.sums, 1), 0)[:, None] * summed
        elif reduction == "mean":
            summed = summed / jnp.maximum(self.degrees, 1).astype(jnp.float32)[:, None]
        return summed.astype(x.dtype)

    def attend(
        self,
        x: Float[Array, "N H D"],
        source_score: Float[Array, "N H"],
        target_score: Float[Array, "N H"],
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "N H D"]:
        """Attends over each node's neighbours on all devices; see `tilewright.graph.attention.attend`.

        Each device needs a different key.
        """
        check_features(x)
        check_scores(source_score, target_score)
        shape = (self.num_nodes, x.shape[1] if x.ndim == 3 else -1)
        if x.shape[:2] != shape or source_score.shape != shape or target_score.shape != shape:
            raise ValueError(
                f"expected features [N, H, D] and scores [N, H] of N = {self.num_nodes} nodes on each device, "
                f"found {list(x.shape)}, {list(source_score.shape)} and {list(target_score.shape)}"
            )
        factors = self.plan.dropout_factors(self.arrays, x.shape[1], dropout, key)
        return attend(self.arrays, x, source_score, target_score, factors, self.plan, negative_slope)


def total(arrays: Arrays, x: Float[Array, "N F"], plan: ExchangePlan) -> Float[Array, "N F"]:
    """Sums over neighbours in float32. The gradient combines the gradients of the exchange and the parts."""

    def visit(hop: int, visiting: Array, summed: Array) -> Array:
        part = plan.part(arrays, hop)
        return summed + neighbour_reduce(part.forward, part.backward, visiting, part.weights, "sum").astype(jnp.float32)

    return plan.accumulate(visit, x, jnp.zeros(x.shape, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def extreme(arrays: Arrays, x: Array, degrees: Array, plan: ExchangePlan, reduce: Reduce) -> Array:
    """Computes the maximum or minimum over neighbours. Equal extremes share the gradient equally, also across devices."""
    return extreme_forward(arrays, x, degrees, plan, reduce)[0]


def extreme_forward(arrays: Arrays, x: Array, degrees: Array, plan: ExchangePlan, reduce: Reduce) -> tuple[Array, tuple]:
    combine, least = (jnp.maximum, -jnp.inf) if reduce == "max" else (jnp.minimum, jnp.inf)

    def visit(hop: int, visiting: Array, best: Array) -> Array:
        part = plan.part(arrays, hop)
        part_best = plain_reduce(part.forward, visiting, part.weights, reduce).astype(jnp.float32)
        return jnp.where(part.forward.degrees[:, None] > 0, combine(best, part_best), best)

    best = plan.accumulate(visit, x, jnp.full(x.shape, least, jnp.float32))
    best = jnp.where(degrees[:, None] > 0, best, 0)
    return best.astype(x.dtype), (arrays, x, best)


def extreme_backward(plan: ExchangePlan, reduce: Reduce, saved: tuple, gradient: Array) -> tuple:
    arrays, x, best = saved

    def count(hop: int, visiting: Array, counted: Array) -> Array:
        part = plan.part(arrays, hop)
        return counted + part.forward.sum_slots(
            lambda row, source, *w: reaches(visiting, best, source, row, w).astype(jnp.float32),
            *(() if part.weights is None else (part.forward.from_edges(part.weights),)),
        )

    share = gradient.astype(jnp.float32) / jnp.maximum(plan.accumulate(count, x, jnp.zeros(x.shape, jnp.float32)), 1)

    def return_gradient(hop: int, visiting: Array, nothing: tuple[()]) -> tuple[tuple[()], Array]:
        part = plan.part(arrays, hop)

        def passed_back(source: Array, row: Array, *weight: Array) -> Array:
            passed = jnp.where(reaches(visiting, best, source, row, weight), take(share, row), 0)
            return passed * weight[0][:, None] if weight else passed

        scales = () if part.weights is None else (part.backward.from_edges(part.weights),)
        return nothing, part.backward.sum_slots(passed_back, *scales).astype(x.dtype)

    return None, plan.collect(return_gradient, x, ())[1], None


extreme.defvjp(extreme_forward, extreme_backward)


def reaches(x: Array, best: Array, source: Array, row: Array, weight: tuple[Array, ...]) -> Array:
    """Returns True for slots whose message is the extreme of the row."""
    message = take(x, source).astype(jnp.float32)
    return (message * weight[0][:, None] if weight else message) == take(best, row)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(
    arrays: Arrays, x: Array, source: Array, target: Array, factors: DropoutFactors, plan: ExchangePlan, slope: float
) -> Array:
    """Attends over neighbours; attention weights stay on the device of the target."""
    return attend_forward(arrays, x, source, target, factors, plan, slope)[0]


def attend_forward(
    arrays: Arrays, x: Array, source: Array, target: Array, factors: DropoutFactors, plan: ExchangePlan, slope: float
) -> tuple[Array, tuple]:
    def visit(hop: int, visiting: tuple[Array, Array], before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rows = plan.part(arrays, hop).forward
        out, largest, summed = plain_attention(rows, *visiting, target, factors[plan.hops.index(hop)], slope)
        filled = rows.degrees[:, None] > 0
        return merged(before, (out.astype(jnp.float32), jnp.where(filled, largest, -jnp.inf), jnp.where(filled, summed, 0)))

    scores = target.shape
    nothing = (jnp.zeros(x.shape, jnp.float32), jnp.full(scores, -jnp.inf), jnp.zeros(scores, jnp.float32))
    out, largest, summed = plan.accumulate(visit, (x, source), nothing)
    out = out.astype(x.dtype)
    largest = jnp.where(summed > 0, largest, 0)
    summed = jnp.maximum(summed, jnp.finfo(jnp.float32).tiny)
    return out, (arrays, x, source, target, factors, out, largest, summed)


def merged(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Merges the attention over two sets of neighbours, given as output, largest score, and sum of exponentials.

    An empty set has the largest score minus infinity and the sum 0.
    """
    largest = jnp.maximum(a[1], b[1])
    level = jnp.where(jnp.isneginf(largest), 0, largest)
    powers = [summed * jnp.exp(each - level) for _, each, summed in (a, b)]
    summed = powers[0] + powers[1]
    shares = [(power / jnp.where(summed > 0, summed, 1))[..., None] for power in powers]
    return a[0] * shares[0] + b[0] * shares[1], largest, summed


def attend_backward(plan: ExchangePlan, slope: float, saved: tuple, gradient: Array) -> tuple:
    arrays, x, source, target, factors, out, largest, summed = saved

    def return_gradients(hop: int, visiting: tuple[Array, Array], target_grad: Array) -> tuple[Array, tuple[Array, Array]]:
        part = plan.part(arrays, hop)
        rows, shape = jax.tree.flatten((part.forward, part.backward))
        residuals = (rows, *visiting, target, factors[plan.hops.index(hop)], out, largest, summed)
        _, x_grad, source_grad, part_grad, _ = attention_backward(shape, slope, residuals, gradient)
        return target_grad + part_grad.astype(jnp.float32), (x_grad, source_grad)

    target_grad, (x_grad, source_grad) = plan.collect(return_gradients, (x, source), jnp.zeros(target.shape, jnp.float32))
    return None, x_grad, source_grad, target_grad.astype(target.dtype), None


attend.defvjp(attend_forward, attend_backward)
