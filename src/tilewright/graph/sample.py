"""Samples neighbourhoods with fixed fan-outs (GraphSAGE §3.1), so that all mini-batches have the same shapes.

A sample is a forest: the sampled neighbours of each row get rows of their own, without deduplication. The place of a row
determines its destination, so that no layer gathers or scatters, forward or backward. A sample has
`batch * (1 + k1) * (1 + k2) * ...` rows of features, independent of the graph's size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from tilewright.graph.edges import from_edge_index
from tilewright.graph.gradients import End
from tilewright.graph.messages import Function, pass_messages
from tilewright.kernels.select import Reduce
from tilewright.models import gnn

ALL = -1
"""Fan-out for all neighbours."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledLayer:
    """Neighbours of one layer in a sample; implements `models.gnn.Neighbours`.

    The source rows are the N destinations, then the slots of destination 0, of destination 1, etc. Slots beyond a destination's
    degree are padding without effect.

    Attributes:
        degrees: number of sampled neighbours of each destination, int32 `[N]`; their slots come first.
        neighbours: number of neighbours of each source in the whole graph, int32 `[M]`.
        fan_out: slots per destination.
        self_loops: in `attend`, each node is its own neighbour as well.
    """

    degrees: Any
    neighbours: Any
    fan_out: int = field(metadata={"static": True})
    self_loops: bool = field(default=False, metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        return self.degrees.shape[0]

    @property
    def num_sources(self) -> int:
        return self.num_nodes * (1 + self.fan_out)

    def slots(self, x: Shaped[Array, "M *F"]) -> Shaped[Array, "N K *F"]:
        """Returns the rows of `x` by slot."""
        return x[self.num_nodes :].reshape(self.num_nodes, self.fan_out, *x.shape[1:])

    def filled(self, dims: int) -> Bool[Array, "N K *ones"]:
        """Returns the mask of filled slots, with `dims` trailing dimensions of one."""
        return (jnp.arange(self.fan_out) < self.degrees[:, None]).reshape(self.num_nodes, self.fan_out, *[1] * dims)

    def aggregate(
        self, x: Float[Array, "M F"], *, reduce: Reduce = "sum", normalisation: Literal["symmetric"] | None = None
    ) -> Float[Array, "N F"]:
        """Reduces over the sampled neighbours; scales sums to estimate the sums over all neighbours."""
        slots = self.slots(x).astype(jnp.float32)
        if normalisation == "symmetric":
            inverse = jax.lax.rsqrt(1.0 + self.neighbours.astype(jnp.float32))[:, None]
            itself = x[: self.num_nodes].astype(jnp.float32) * inverse[: self.num_nodes]
            near = jnp.where(self.filled(1), slots * self.slots(inverse), 0).sum(1) * self.neighbours_per_sample()
            return ((itself + near) * inverse[: self.num_nodes]).astype(x.dtype)
        if reduce in ("max", "min"):
            worst = -jnp.inf if reduce == "max" else jnp.inf
            best = jnp.where(self.filled(1), slots, worst)
            best = best.max(1) if reduce == "max" else best.min(1)
            return jnp.where(self.degrees[:, None] > 0, best, 0).astype(x.dtype)
        total = jnp.where(self.filled(1), slots, 0).sum(1)
        scale = (
            self.neighbours_per_sample() if reduce == "sum" else 1 / jnp.maximum(self.degrees, 1)[:, None].astype(jnp.float32)
        )
        return (total * scale).astype(x.dtype)

    def neighbours_per_sample(self) -> Float[Array, "N 1"]:
        """Returns the number of neighbours per sampled neighbour."""
        counts = self.neighbours[: self.num_nodes].astype(jnp.float32)
        return (counts / jnp.maximum(self.degrees, 1).astype(jnp.float32))[:, None]

    def attend(
        self,
        x: Float[Array, "M H D"],
        source_score: Float[Array, "M H"],
        target_score: Float[Array, "N H"],
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "N H D"]:
        """Attends over the sampled neighbours; a row without neighbours gets zeros."""
        slots = SampledSlots(self)
        scores = slots.gather(source_score, "sources") + slots.gather(target_score, "rows")
        weights = slots.softmax(gnn.leaky_relu(scores.astype(jnp.float32), negative_slope))
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        return slots.weighted_sum(flat, gnn.dropout(weights, dropout, key)).reshape(-1, *x.shape[1:])

    def propagate(
        self,
        x: Any,
        message: Function | None = None,
        reduce: str | Sequence[str] = "sum",
        *,
        weight: Function | Array | None = None,
        **values: Any,
    ) -> Float[Array, "N ..."]:
        """Computes and reduces messages of the sampled edges; see `tilewright.graph.aggregate.propagate`.

        Values of edges have a row for each slot, `[N * fan_out, ...]` (see `Sample.edges`). With `self_loops`, a self-loop has
        the mean of its node's sampled edges, as PyG's `fill_value="mean"`. Sums are those of the sampled edges, not scaled.
        """
        sizes = self.num_sources, self.num_nodes
        return pass_messages(SampledSlots(self), x, message, reduce, weight, values, sizes)


@dataclass(frozen=True)
class SampledSlots:
    """Edges of a sampled layer, grouped by destination; implements `messages.Slots`.

    The slots of a destination are consecutive. With self-loops, a destination's first slot is its self-loop. Slots in padding
    repeat a sampled edge.
    """

    layer: SampledLayer

    @property
    def num_edges(self) -> int:
        return self.layer.num_nodes * self.layer.fan_out

    @property
    def num_slots(self) -> int:
        return self.layer.num_nodes * (self.layer.fan_out + self.layer.self_loops)

    @property
    def filled(self) -> Bool[Array, "N K"]:
        """Mask of the slots with an edge."""
        filled = self.layer.filled(0)
        return jnp.pad(filled, ((0, 0), (1, 0)), constant_values=True) if self.layer.self_loops else filled

    def by_row(self, values: Array) -> Array:
        """Returns the values by destination, `[N, K, ...]`."""
        nodes = self.layer.num_nodes
        return values.reshape(nodes, self.num_slots // max(nodes, 1), *values.shape[1:])

    def gather(self, values: Array, end: End) -> Array:
        """Returns the values of each slot's source, destination ("rows") or edge."""
        n = self.layer.num_nodes
        filled = self.filled
        if end == "rows":
            slots = jnp.broadcast_to(values[:, None], (*filled.shape, *values.shape[1:]))
        else:
            slots = self.layer.slots(values) if end == "sources" else values.reshape(n, self.layer.fan_out, *values.shape[1:])
            if self.layer.self_loops:
                itself = values[:n] if end == "sources" else self.mean_of_edges(slots)
                slots = jnp.concatenate([itself[:, None], slots], 1)
        flat = slots.reshape(-1, *values.shape[1:])
        if not flat.shape[0]:
            return flat
        first = jax.lax.dynamic_index_in_dim(flat, jnp.argmax(filled.ravel()), 0)
        return jnp.where(filled.reshape(-1, *[1] * (values.ndim - 1)), flat, jax.lax.stop_gradient(first))

    def mean_of_edges(self, slots: Array) -> Array:
        """Computes the mean of the sampled edges' values at each destination; zeros without edges."""
        if not jnp.issubdtype(slots.dtype, jnp.floating):
            raise ValueError(f"expected floating-point values of edges, whose means self-loops have, found {slots.dtype}")
        mask = self.layer.filled(slots.ndim - 2)
        count = jnp.maximum(self.layer.degrees, 1).reshape(-1, *[1] * (slots.ndim - 2))
        return (jnp.where(mask, slots, 0).sum(1) / count.astype(jnp.float32)).astype(slots.dtype)

    def reduce(self, values: Array, reduce: Reduce) -> Array:
        """Reduces the values over each destination's slots, in float32; zeros without edges."""
        by_row = self.by_row(values.astype(jnp.float32))
        ones = [1] * (values.ndim - 1)
        mask = self.filled.reshape(*self.filled.shape, *ones)
        count = self.filled.sum(1).reshape(-1, *ones)
        if reduce in ("max", "min"):
            worst = -jnp.inf if reduce == "max" else jnp.inf
            masked = jnp.where(mask, by_row, worst)
            best = masked.max(1, initial=worst) if reduce == "max" else masked.min(1, initial=worst)
            return jnp.where(count > 0, best, 0).astype(values.dtype)
        total = jnp.where(mask, by_row, 0).sum(1)
        return (total if reduce == "sum" else total / jnp.maximum(count, 1).astype(jnp.float32)).astype(values.dtype)

    def softmax(self, scores: Array) -> Array:
        """Computes the softmax of scores over each destination's slots; zeros in padding."""
        by_row = self.by_row(scores)
        filled = jnp.broadcast_to(self.filled.reshape(*self.filled.shape, *[1] * (scores.ndim - 1)), by_row.shape)
        # Rows without neighbours use a softmax over padding, whose gradient is finite and has no effect.
        counts = filled | ~filled.any(1, keepdims=True)
        weights = jax.nn.softmax(jnp.where(filled, by_row, 0), axis=1, where=counts)
        return jnp.where(filled, weights, 0).reshape(scores.shape)

    def dropout(self, weights: Array, rate: float, key: Array | None) -> Array:
        """Drops weights with probability `rate`, and scales the others."""
        return gnn.dropout(weights, rate, key)

    def weighted_sum(self, x: Float[Array, "M F"], weights: Float[Array, "S H"]) -> Float[Array, "N F"]:
        """Sums the features of each destination's sources, multiplied by the weights of H equal parts of F."""
        sources = self.gather(x, "sources").astype(jnp.float32).reshape(weights.shape[0], weights.shape[1], -1)
        weighted = (sources * weights[:, :, None]).reshape(-1, x.shape[1])
        return self.reduce(weighted, "sum").astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """Sampled neighbourhoods of a mini-batch.

    Attributes:
        nodes: node of each input row, int32 `[M]` in NumPy; the roots come first, padding rows have valid nodes.
        edges: edge of each slot of each layer, int64 `[N * fan_out]` in NumPy, the input layer first; 0 in padding.
        rows: mask of the rows that are not padding, bool `[M]`.
        layers: neighbours in each layer, the input layer first, for `models.gnn.apply`.
    """

    nodes: Any
    rows: Any
    layers: tuple[SampledLayer, ...]
    edges: tuple[Any, ...] = ()


class NeighbourSampler:
    """Samples neighbourhoods with fixed fan-outs, without replacement.

    Args:
        edge_index: sources and destinations, `[2, E]`; a node's neighbours are the sources of its edges. Self-loops count as
            neighbours; leave them out with `self_loops` and for symmetric sums, which add each node itself.
        num_nodes: number of nodes.
        fan_outs: number of sampled neighbours of a root, of each of these, etc. `ALL` (-1) takes all neighbours, with as many
            slots as the largest degree of the graph.
        batch_size: roots per sample.
        self_loops: see `SampledLayer`.

    Raises:
        ValueError: the graph has no nodes, a fan-out is neither `ALL` nor at least 1, the edges are invalid (see
            `edges.from_edge_index`), or a sample would have 2^31 rows or more.
    """

    def __init__(
        self,
        edge_index: Any,
        num_nodes: int,
        fan_outs: Sequence[int],
        batch_size: int,
        self_loops: bool = False,
    ):
        if not fan_outs or any(fan_out < 1 and fan_out != ALL for fan_out in fan_outs) or batch_size < 1:
            found = f"fan-outs {list(fan_outs)}, a batch size of {batch_size}"
            raise ValueError(f"expected fan-outs and a batch size of at least 1, or {ALL} for all neighbours, found {found}")
        edges = from_edge_index(edge_index, num_nodes)
        if not edges.num_nodes:
            raise ValueError("expected a graph with nodes to sample from, found one without nodes")
        self.batch_size = batch_size
        self.self_loops = self_loops
        self.num_nodes = edges.num_nodes
        self.edges = np.argsort(edges.destinations, kind="stable")
        self.sources = edges.sources[self.edges].astype(np.int32)
        self.neighbours = np.bincount(edges.destinations, minlength=self.num_nodes).astype(np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(self.neighbours, dtype=np.int64)])
        most = max(1, int(self.neighbours.max()))
        self.fan_outs = tuple(most if fan_out == ALL else fan_out for fan_out in fan_outs)
        self.rows = batch_size * math.prod(1 + fan_out for fan_out in self.fan_outs)
        if self.rows >= 2**31:
            sizes = f"fan-outs {list(self.fan_outs)} and a batch size of {batch_size}"
            raise ValueError(f"expected samples of less than 2^31 rows, found {self.rows:,} for {sizes}")

    def sample(self, roots: Any, seed: int | Sequence[int]) -> Sample:
        """Samples the neighbourhoods of at most `batch_size` roots, deterministically for a seed.

        Args:
            roots: node ids.
            seed: seed of the sample.

        Raises:
            ValueError: there are more roots than the batch size, or a root is not a node.
        """
        roots = np.asarray(roots)
        if roots.ndim != 1 or (roots.size and roots.dtype.kind not in "iu"):
            raise ValueError(f"expected roots to be a list of node ids, found {roots.dtype} of shape {list(roots.shape)}")
        if len(roots) > self.batch_size:
            raise ValueError(f"expected at most {self.batch_size} roots, found {len(roots)}")
        if len(roots) and not (roots.min() >= 0 and roots.max() < self.num_nodes):
            wrong = roots[(roots < 0) | (roots >= self.num_nodes)][0]
            raise ValueError(f"expected roots from 0 to {self.num_nodes - 1}, found {wrong}")
        rng = np.random.default_rng(seed)
        nodes = np.zeros(self.batch_size, np.int32)
        nodes[: len(roots)] = roots
        rows = np.arange(self.batch_size) < len(roots)
        layers = []
        drawn_edges = []
        for fan_out in self.fan_outs:
            counts = np.where(rows, self.neighbours[nodes], 0)
            degrees = np.minimum(counts, fan_out).astype(np.int32)
            filled = np.arange(fan_out) < degrees[:, None]
            picks = np.where(filled, self.offsets[nodes][:, None] + draw(counts, fan_out, rng), 0)
            # A graph without edges has no sources to read for padding.
            sampled = self.sources[picks] if len(self.sources) else np.zeros(picks.shape, np.int32)
            edges = self.edges[picks] if len(self.edges) else np.zeros(picks.shape, np.int64)
            drawn_edges.append(np.where(filled, edges, 0).ravel())
            nodes = np.concatenate([nodes, np.where(filled, sampled, 0).ravel()])
            rows = np.concatenate([rows, filled.ravel()])
            neighbours = np.where(rows, self.neighbours[nodes], 0).astype(np.int32)
            layers.append(SampledLayer(jnp.asarray(degrees), jnp.asarray(neighbours), fan_out, self.self_loops))
        return Sample(nodes, jnp.asarray(rows), tuple(reversed(layers)), tuple(reversed(drawn_edges)))


def draw(counts: Int[np.ndarray, " N"], k: int, rng: np.random.Generator) -> Int[np.ndarray, "N K"]:
    """Draws for each count c a uniform random set of min(c, k) distinct numbers below c; further entries are arbitrary.

    For c > k this is Floyd's algorithm (Bentley & Floyd 1987), one step for all rows at a time.
    """
    picks = np.tile(np.arange(k), (len(counts), 1))
    many = np.flatnonzero(counts > k)
    chosen = picks[many]
    for step in range(k):
        top = counts[many] - k + step
        new = rng.integers(0, top + 1)
        duplicate = (chosen[:, :step] == new[:, None]).any(1)
        chosen[:, step] = np.where(duplicate, top, new)
    picks[many] = chosen
    return picks
