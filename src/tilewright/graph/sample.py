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
from jaxtyping import Bool, Float, Int

from tilewright.graph.edges import from_edge_index
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

    def slots(self, x: Float[Array, "M *F"]) -> Float[Array, "N K *F"]:
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
        scores = self.slots(source_score) + target_score[:, None]
        values = self.slots(x)
        filled = jnp.broadcast_to(self.filled(1), scores.shape)
        if self.self_loops:
            n = self.num_nodes
            scores = jnp.concatenate([(source_score[:n] + target_score)[:, None], scores], 1)
            values = jnp.concatenate([x[:n][:, None], values], 1)
            filled = jnp.concatenate([jnp.ones_like(filled[:, :1]), filled], 1)
        scores = gnn.leaky_relu(scores.astype(jnp.float32), negative_slope)
        # Rows without neighbours use a softmax over padding, whose gradient is finite and has no effect.
        counts = filled | ~filled.any(1, keepdims=True)
        weights = gnn.dropout(jax.nn.softmax(jnp.where(filled, scores, 0), axis=1, where=counts), dropout, key)
        weighted = jnp.where(filled[..., None], weights[..., None] * values.astype(jnp.float32), 0)
        return weighted.sum(1).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """Sampled neighbourhoods of a mini-batch.

    Attributes:
        nodes: node of each input row, int32 `[M]` in NumPy; the roots come first, padding rows have valid nodes.
        rows: mask of the rows that are not padding, bool `[M]`.
        layers: neighbours in each layer, the input layer first, for `models.gnn.apply`.
    """

    nodes: Any
    rows: Any
    layers: tuple[SampledLayer, ...]


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
        self.sources = edges.sources[np.argsort(edges.destinations, kind="stable")].astype(np.int32)
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
        for fan_out in self.fan_outs:
            counts = np.where(rows, self.neighbours[nodes], 0)
            degrees = np.minimum(counts, fan_out).astype(np.int32)
            filled = np.arange(fan_out) < degrees[:, None]
            picks = np.where(filled, self.offsets[nodes][:, None] + draw(counts, fan_out, rng), 0)
            # A graph without edges has no sources to read for padding.
            sampled = self.sources[picks] if len(self.sources) else np.zeros(picks.shape, np.int32)
            nodes = np.concatenate([nodes, np.where(filled, sampled, 0).ravel()])
            rows = np.concatenate([rows, filled.ravel()])
            neighbours = np.where(rows, self.neighbours[nodes], 0).astype(np.int32)
            layers.append(SampledLayer(jnp.asarray(degrees), jnp.asarray(neighbours), fan_out, self.self_loops))
        return Sample(nodes, jnp.asarray(rows), tuple(reversed(layers)))


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
