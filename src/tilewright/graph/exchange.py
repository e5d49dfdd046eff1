"""Reductions over neighbours that lie on other devices, as one device computes them within `jax.shard_map`.

A device holds a block of the nodes with their features, and their in-neighbours in parts: one part for each device that holds
some of them (`exchange="ring"`), or one for all (`"all_gather"`). Sums and extremes over parts accumulate; attention merges
softmaxes of parts by their maxima and sums (Liu et al., "Ring Attention with Blockwise Transformers", 2023, §3). In a backward
pass the same parts are read transposed, and what is due to a shard's features travels home with it.

Legend: N nodes of a device, M nodes that visit it, F features, H heads, D features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.graph.gradients import attention_backward, kept_edges, neighbour_reduce, plain_attention, plain_reduce
from tilewright.graph.rows import Rows, take
from tilewright.graph.table import check_features, check_scores, inverse_root, known_reduction
from tilewright.kernels.select import Reduce
from tilewright.parallel import rings

Arrays = tuple[tuple[Array, ...], ...]
"""The arrays of each part."""
Kept = tuple[Array | None, ...]
"""Of each part the factors of its edges' weights `[E, H]`, see `gradients.neighbour_attention`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GraphPart:
    """The in-neighbours of a device's nodes that visit it together.

    Attributes:
        forward: for each of N nodes its sources among M.
        backward: for each of M sources the nodes that it is a source of.
        weights: of the part's edges; None if all are 1.
    """

    forward: Rows
    backward: Rows
    weights: Any


@dataclass(frozen=True)
class ExchangePlan:
    """Static description of an exchange: how features travel, and the structure of the parts.

    Attributes:
        axis: the mesh axis that the nodes are divided over.
        hops: at which a part is met: of a ring those of its parts, of a gathering 0.
        trees: structure of each part.
    """

    axis: str
    exchange: str
    hops: tuple[int, ...]
    trees: tuple[Any, ...]

    def part(self, arrays: Arrays, hop: int) -> GraphPart:
        place = self.hops.index(hop)
        return jax.tree.unflatten(self.trees[place], arrays[place])

    def kept(self, arrays: Arrays, heads: int, rate: float, key: Array | None) -> "Kept":
        """The factors of a dropout, of each part."""
        edges = [self.part(arrays, hop).forward.num_edges for hop in self.hops]
        keys = [None] * len(edges) if key is None else list(jax.random.split(key, len(edges)))
        return tuple(kept_edges(count, heads, rate, each) for count, each in zip(edges, keys, strict=True))

    def meet(self, visit: Callable[..., Any], shard: Any, total: Any) -> Any:
        """See `rings.ring`."""
        if self.exchange == "ring":
            return rings.ring(visit, shard, total, self.axis, self.hops)
        return rings.gathered(visit, shard, total, self.axis)

    def collect(self, visit: Callable[..., Any], shard: Any, total: Any) -> tuple[Any, Any]:
        """See `rings.ring_collect`."""
        if self.exchange == "ring":
            return rings.ring_collect(visit, shard, total, self.axis, self.hops)
        return rings.gathered_collect(visit, shard, total, self.axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """One device's block of a partitioned table; `own` of it offers `models.gnn.Neighbours` within `jax.shard_map`.

    All rows are those of the block, rows of padding included: these have no neighbours and are nobody's neighbour. Outside of
    `jax.shard_map` every array has a leading dim of devices.

    Attributes:
        arrays: of the parts, see `Arrays`.
        degrees: number of each node's neighbours, on all devices.
        sums: of the weights of its edges.
        loops: what each node's self-loops lack to be one, see `edges.missing_loops`; 0 for padding.
    """

    arrays: Any
    degrees: Any
    sums: Any
    loops: Any
    plan: ExchangePlan = field(metadata={"static": True})

    def local(self) -> "Shard":
        """This device's block, of what `jax.shard_map` hands over."""
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
        how = known_reduction(reduce)
        if normalisation is not None and (normalisation not in ("symmetric", "row") or reduce != "sum"):
            raise ValueError(
                f"expected the normalisation symmetric or row, of a sum, found {normalisation!r} with reduce={reduce!r}"
            )
        if x.ndim != 2 or x.shape[0] != self.num_nodes:
            raise ValueError(f"expected features of shape [{self.num_nodes}, F] on each device, found {list(x.shape)}")
        check_features(x)
        if how in ("max", "min"):
            return extreme(self.arrays, x, self.degrees, self.plan, how)
        if normalisation == "symmetric":
            near = inverse_root(self.sums + self.loops)[:, None]
            scaled = (x.astype(jnp.float32) * near).astype(x.dtype)
            summed = total(self.arrays, scaled, self.plan) + scaled.astype(jnp.float32) * self.loops[:, None]
            return (summed * near).astype(x.dtype)
        summed = total(self.arrays, x, self.plan)
        if normalisation == "row":
            summed = jnp.where(self.sums != 0, 1 / jnp.where(self.sums != 0, self.sums, 1), 0)[:, None] * summed
        elif how == "mean":
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
        """Attention over each node's neighbours on all devices; see `tilewright.graph.attention.attend`.

        Each device's key must be another.
        """
        check_features(x)
        check_scores(source_score, target_score)
        wanted = (self.num_nodes, x.shape[1] if x.ndim == 3 else -1)
        if x.shape[:2] != wanted or source_score.shape != wanted or target_score.shape != wanted:
            raise ValueError(
                f"expected features [N, H, D] and scores [N, H] of N = {self.num_nodes} nodes on each device, "
                f"found {list(x.shape)}, {list(source_score.shape)} and {list(target_score.shape)}"
            )
        kept = self.plan.kept(self.arrays, x.shape[1], dropout, key)
        return attend(self.arrays, x, source_score, target_score, kept, self.plan, negative_slope)


def total(arrays: Arrays, x: Float[Array, "N F"], plan: ExchangePlan) -> Float[Array, "N F"]:
    """The sum over neighbours, in float32. Its gradient is the exchange's own, with each part's gradient inside."""

    def visit(hop: int, visiting: Array, summed: Array) -> Array:
        part = plan.part(arrays, hop)
        return summed + neighbour_reduce(part.forward, part.backward, visiting, part.weights, "sum").astype(jnp.float32)

    return plan.meet(visit, x, jnp.zeros(x.shape, jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def extreme(arrays: Arrays, x: Array, degrees: Array, plan: ExchangePlan, reduce: Reduce) -> Array:
    """The maximum or minimum. Its gradient is shared equally by all that reach it, on whatever device they are."""
    return extreme_forward(arrays, x, degrees, plan, reduce)[0]


def extreme_forward(arrays: Arrays, x: Array, degrees: Array, plan: ExchangePlan, reduce: Reduce) -> tuple[Array, tuple]:
    combine, least = (jnp.maximum, -jnp.inf) if reduce == "max" else (jnp.minimum, jnp.inf)

    def visit(hop: int, visiting: Array, best: Array) -> Array:
        part = plan.part(arrays, hop)
        found = plain_reduce(part.forward, visiting, part.weights, reduce).astype(jnp.float32)
        return jnp.where(part.forward.degrees[:, None] > 0, combine(best, found), best)

    best = plan.meet(visit, x, jnp.full(x.shape, least, jnp.float32))
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

    share = gradient.astype(jnp.float32) / jnp.maximum(plan.meet(count, x, jnp.zeros(x.shape, jnp.float32)), 1)

    def give(hop: int, visiting: Array, nothing: tuple[()]) -> tuple[tuple[()], Array]:
        part = plan.part(arrays, hop)

        def passed_back(source: Array, row: Array, *weight: Array) -> Array:
            passed = jnp.where(reaches(visiting, best, source, row, weight), take(share, row), 0)
            return passed * weight[0][:, None] if weight else passed

        scales = () if part.weights is None else (part.backward.from_edges(part.weights),)
        return nothing, part.backward.sum_slots(passed_back, *scales).astype(x.dtype)

    return None, plan.collect(give, x, ())[1], None


extreme.defvjp(extreme_forward, extreme_backward)


def reaches(x: Array, best: Array, source: Array, row: Array, weight: tuple[Array, ...]) -> Array:
    """True if a source's message is the extreme of a row."""
    message = take(x, source).astype(jnp.float32)
    return (message * weight[0][:, None] if weight else message) == take(best, row)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(arrays: Arrays, x: Array, source: Array, target: Array, kept: Kept, plan: ExchangePlan, slope: float) -> Array:
    """Attention over neighbours; no weight leaves the device of its target."""
    return attend_forward(arrays, x, source, target, kept, plan, slope)[0]


def attend_forward(
    arrays: Arrays, x: Array, source: Array, target: Array, kept: Kept, plan: ExchangePlan, slope: float
) -> tuple[Array, tuple]:
    def visit(hop: int, visiting: tuple[Array, Array], before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rows = plan.part(arrays, hop).forward
        out, largest, summed = plain_attention(rows, *visiting, target, kept[plan.hops.index(hop)], slope)
        some = rows.degrees[:, None] > 0
        return merged(before, (out.astype(jnp.float32), jnp.where(some, largest, -jnp.inf), jnp.where(some, summed, 0)))

    scores = target.shape
    nothing = (jnp.zeros(x.shape, jnp.float32), jnp.full(scores, -jnp.inf), jnp.zeros(scores, jnp.float32))
    out, largest, summed = plan.meet(visit, (x, source), nothing)
    out = out.astype(x.dtype)
    largest = jnp.where(summed > 0, largest, 0)
    summed = jnp.maximum(summed, jnp.finfo(jnp.float32).tiny)
    return out, (arrays, x, source, target, kept, out, largest, summed)


def merged(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The attention over two sets of neighbours from that over each: output, largest score, sum of powers relative to it.

    Of an empty set, the largest score is minus infinity and the sum 0.
    """
    largest = jnp.maximum(a[1], b[1])
    level = jnp.where(jnp.isneginf(largest), 0, largest)
    powers = [summed * jnp.exp(each - level) for _, each, summed in (a, b)]
    summed = powers[0] + powers[1]
    shares = [(power / jnp.where(summed > 0, summed, 1))[..., None] for power in powers]
    return a[0] * shares[0] + b[0] * shares[1], largest, summed


def attend_backward(plan: ExchangePlan, slope: float, saved: tuple, gradient: Array) -> tuple:
    arrays, x, source, target, kept, out, largest, summed = saved

    def give(hop: int, visiting: tuple[Array, Array], by_target: Array) -> tuple[Array, tuple[Array, Array]]:
        part = plan.part(arrays, hop)
        rows, shape = jax.tree.flatten((part.forward, part.backward))
        known = (rows, *visiting, target, kept[plan.hops.index(hop)], out, largest, summed)
        _, by_features, by_source, more, _ = attention_backward(shape, slope, known, gradient)
        return by_target + more.astype(jnp.float32), (by_features, by_source)

    by_target, (by_features, by_source) = plan.collect(give, (x, source), jnp.zeros(target.shape, jnp.float32))
    return None, by_features, by_source, by_target.astype(target.dtype), None


attend.defvjp(attend_forward, attend_backward)
