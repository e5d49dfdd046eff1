"""Samples neighbourhoods with fixed fan-outs (GraphSAGE §3.1), so that mini-batches have declared shapes.

There are two forms. A *forest* gives the sampled neighbours of each row rows of their own: the place of a row determines its
destination, so that no layer gathers or scatters, forward or backward. It has `batch * (1 + k1) * (1 + k2) * ...` rows.
A *deduplicated* sample has one row for each node, draws its neighbours once, and has a neighbour table for each layer. It needs
lists of neighbours (layout "csr"), and has one of two declared capacities.

The random numbers of a row depend on the seed, the layer and the row alone. The C++ sampler and its NumPy reference
(`kernels.neighbours`) draw the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Int32, Int64, Shaped

from tilewright.graph.batch import round_up
from tilewright.graph.edges import check_ids, from_edge_index
from tilewright.graph.gradients import End
from tilewright.graph.messages import Function, pass_messages
from tilewright.graph.rows import CsrRows
from tilewright.graph.table import NeighborTable, default_layout
from tilewright.kernels import select
from tilewright.kernels.select import Reduce
from tilewright.models import gnn

ALL = -1
"""Fan-out for all neighbours."""
TRIALS = 8
"""Samples from which the usual capacity of deduplicated samples is estimated."""


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

    def filled_slots(self) -> tuple[int, int]:
        """Returns the number of slots for edges, and of those with an edge."""
        return self.num_nodes * self.fan_out, int(np.sum(self.degrees))

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

    def plan(self, function: Function, operands: Mapping[str, Any]) -> None:
        """Returns None: samples are small, and their messages are stored."""

    def planned(self, plan: Any) -> Array:
        raise AssertionError("samples have no plans")

    def planned_sums(self, plan: Any, sums: Any) -> dict[str, Array]:
        raise AssertionError("samples have no plans")

    def divided(self, summed: Array) -> Array:
        raise AssertionError("samples have no plans")

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
class SampledTable:
    """Neighbours of one layer in a deduplicated sample; implements `models.gnn.Neighbours`.

    Attributes:
        table: sampled neighbours of each row; with self-loops in it, the first neighbour is the row itself.
        neighbours: number of neighbours of each source in the whole graph, int32 `[M]`.
        self_loops: each node is its own neighbour as well.
    """

    table: NeighborTable
    neighbours: Any
    self_loops: bool = field(default=False, metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        return self.table.num_nodes

    @property
    def num_sources(self) -> int:
        return self.table.num_sources

    def filled_slots(self) -> tuple[int, int]:
        """Returns the number of slots for edges, and of those with an edge or a self-loop."""
        return self.table.num_edges, int(self.table.forward.degrees.sum())

    @property
    def offsets(self) -> Int32[Array, " N_and_one"]:
        """First slot of each row, and the end of the last row."""
        assert isinstance(self.table.forward, CsrRows)
        return self.table.forward.offsets

    @property
    def degrees(self) -> Int32[Array, " N"]:
        """Number of sampled neighbours of each destination, without self-loops."""
        degrees = self.table.forward.degrees
        return jnp.maximum(degrees - 1, 0) if self.self_loops else degrees

    def aggregate(
        self, x: Float[Array, "M F"], *, reduce: Reduce = "sum", normalisation: Literal["symmetric"] | None = None
    ) -> Float[Array, "N F"]:
        """Reduces over the sampled neighbours; scales sums to estimate the sums over all neighbours."""
        if normalisation is None and reduce != "sum":
            return self.table.aggregate(x, reduce)
        scale = (self.neighbours[: self.num_nodes].astype(jnp.float32) / jnp.maximum(self.degrees, 1).astype(jnp.float32))[
            :, None
        ]
        if normalisation is None:
            return (self.table.aggregate(x).astype(jnp.float32) * scale).astype(x.dtype)
        inverse = jax.lax.rsqrt(1.0 + self.neighbours.astype(jnp.float32))[:, None]
        scaled = (x.astype(jnp.float32) * inverse).astype(x.dtype)
        near = self.table.aggregate(scaled).astype(jnp.float32) * scale
        itself = scaled[: self.num_nodes].astype(jnp.float32)
        return ((itself + near) * inverse[: self.num_nodes]).astype(x.dtype)

    def attend(self, *arguments: Any, **options: Any) -> Float[Array, "N H D"]:
        """Attends over the sampled neighbours; see `NeighborTable.attend`."""
        return self.table.attend(*arguments, **options)

    def propagate(self, *arguments: Any, **values: Any) -> Float[Array, "N ..."]:
        """Computes and reduces messages of the sampled edges; see `NeighborTable.propagate`. Sums are not scaled.

        Values of edges have a row for each slot (see `Sample.edges`), also for self-loops.
        """
        return self.table.propagate(*arguments, **values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """Sampled neighbourhoods of a mini-batch.

    Attributes:
        nodes: node of each input row, int32 `[M]` in NumPy; the roots come first, padding rows have valid nodes.
        edges: edge of each slot of each layer, int64 in NumPy, the input layer first; `NO_EDGE` in padding and for self-loops.
        rows: mask of the rows that are not padding, bool `[M]`.
        layers: neighbours in each layer, the input layer first, for `models.gnn.apply`: `SampledLayer` or `SampledTable`.
    """

    nodes: Any
    rows: Any
    layers: tuple[Any, ...]
    edges: tuple[Any, ...] = ()


NO_EDGE = -1
"""Edge of a slot without one."""


@dataclass(frozen=True)
class SampleCapacity:
    """Shapes of a sample.

    Attributes:
        added: number of roots, and of the rows that each hop adds, with padding.
        slots: number of slots for edges of each hop, with padding.
    """

    added: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows before each hop, and after the last."""
        return tuple(accumulate(self.added))

    def holds(self, other: "SampleCapacity") -> bool:
        """Returns True if another sample fits."""
        mine, others = self.added + self.slots, other.added + other.slots
        return all(size <= room for size, room in zip(others, mine, strict=True))


@dataclass(frozen=True)
class Hop:
    """Edges drawn for the rows of a deduplicated sample.

    Attributes:
        starts: first slot of each row, and the end of the last row's.
        sources: row of each slot's source.
        picks: place of each slot's edge in the sampler's list; `NO_EDGE` for self-loops.
        added: number of rows that the hop adds.
    """

    starts: Int64[np.ndarray, " N_and_one"]
    sources: Int32[np.ndarray, " S"]
    picks: Int64[np.ndarray, " S"]
    added: int


@dataclass(frozen=True)
class DrawnSample:
    """Deduplicated sample before padding: the node of each row (-1 for roots in padding), and the hops."""

    nodes: Int32[np.ndarray, " M"]
    hops: tuple[Hop, ...]

    @property
    def size(self) -> SampleCapacity:
        """The smallest capacity that holds the sample."""
        added = (len(self.hops[0].starts) - 1, *(hop.added for hop in self.hops))
        return SampleCapacity(added, tuple(len(hop.picks) for hop in self.hops))


class NeighbourSampler:
    """Samples neighbourhoods with fixed fan-outs, without replacement.

    Args:
        edge_index: sources and destinations, `[2, E]`; a node's neighbours are the sources of its edges. Self-loops count as
            neighbours; leave them out with `self_loops` and for symmetric sums, which add each node itself.
        num_nodes: number of nodes.
        fan_outs: number of sampled neighbours of a root, of each of these, etc. `ALL` (-1) takes all neighbours; in a forest,
            with as many slots as the largest degree of the graph.
        batch_size: roots per sample.
        self_loops: each node is its own neighbour in `attend` and `propagate`.
        deduplicate: one row for each node; None does so if CPU kernels reduce lists of neighbours.
        roots: nodes from which roots will come, to estimate the usual capacity; None for all.

    Attributes:
        capacities: declared shapes of the samples, in ascending order: one for any sample, and for deduplicated ones before it
            the usual one, estimated from trials, if it is at most half as large.
        kernels: module that samples, in C++ or NumPy (`select.neighbour_sampler`).
        reason: why NumPy samples; empty if C++ does.

    Raises:
        ValueError: the graph has no nodes, a fan-out is neither `ALL` nor at least 1, the edges are invalid (see
            `edges.from_edge_index`), or a sample could have 2^31 rows or more.
    """

    def __init__(
        self,
        edge_index: Any,
        num_nodes: int,
        fan_outs: Sequence[int],
        batch_size: int,
        self_loops: bool = False,
        deduplicate: bool | None = None,
        roots: Int[np.ndarray, " R"] | None = None,
    ):
        if not fan_outs or any(fan_out < 1 and fan_out != ALL for fan_out in fan_outs) or batch_size < 1:
            found = f"fan-outs {list(fan_outs)}, a batch size of {batch_size}"
            raise ValueError(f"expected fan-outs and a batch size of at least 1, or {ALL} for all neighbours, found {found}")
        sources, destinations = self.checked_edges(edge_index, num_nodes)
        if not num_nodes:
            raise ValueError("expected a graph with nodes to sample from, found one without nodes")
        self.kernels, self.reason = select.neighbour_sampler()
        self.deduplicate = default_layout() == "csr" if deduplicate is None else deduplicate
        self.batch_size = batch_size
        self.self_loops = self_loops
        self.num_nodes = num_nodes
        self.offsets, order = self.kernels.group(destinations, num_nodes)
        self.sources = sources[order]
        self.edges = order if len(order) >= 2**31 else order.astype(np.int32)
        most = max(1, int(np.diff(self.offsets).max()))
        self.fan_outs = tuple(most if fan_out == ALL else fan_out for fan_out in fan_outs)
        self.capacities = [self.largest()]
        if self.rows >= 2**31:
            sizes = f"fan-outs {list(self.fan_outs)} and a batch size of {batch_size}"
            raise ValueError(f"expected samples of less than 2^31 rows, found {self.rows:,} for {sizes}")
        if self.deduplicate:
            usual = self.usual(np.arange(num_nodes) if roots is None or not len(roots) else roots)
            most = self.capacities[0]
            if 2 * usual.rows[-1] <= most.rows[-1] or 2 * sum(usual.slots) <= sum(most.slots):  # else not worth a program
                self.capacities = [usual, most]

    @staticmethod
    def checked_edges(edge_index: Any, num_nodes: int) -> tuple[Int32[np.ndarray, " E"], Int32[np.ndarray, " E"]]:
        """Returns sources and destinations. Checks arrays of int32 in place, since edges of large graphs fill the memory."""
        if isinstance(edge_index, np.ndarray) and edge_index.dtype == np.int32 and edge_index.shape[:1] == (2,):
            for noun, ids in zip(("source", "destination"), edge_index, strict=True):
                if ids.size and not (ids.min() >= 0 and ids.max() < num_nodes):
                    check_ids(ids, noun, num_nodes)
            return np.ascontiguousarray(edge_index[0]), np.ascontiguousarray(edge_index[1])
        edges = from_edge_index(edge_index, num_nodes)
        return edges.sources.astype(np.int32), edges.destinations.astype(np.int32)

    @property
    def rows(self) -> int:
        """Rows of a sample with the largest capacity."""
        return self.capacities[-1].rows[-1]

    def largest(self) -> SampleCapacity:
        """Returns the capacity for any sample."""
        added = [self.batch_size]
        slots = []
        for fan_out in self.fan_outs:
            rows = sum(added)
            if self.deduplicate:  # apart from roots, which may repeat, a node has one row
                slots.append(min(rows * fan_out, self.batch_size * fan_out + len(self.sources)) + self.self_loops * rows)
                added.append(min(rows * fan_out, self.num_nodes))
            else:
                slots.append(rows * fan_out)
                added.append(rows * fan_out)
        return SampleCapacity(tuple(added), tuple(slots))

    def usual(self, roots: Int[np.ndarray, " R"]) -> SampleCapacity:
        """Returns the mean of the sizes of random samples plus four standard deviations, rounded up to a coarse scale."""
        size = min(self.batch_size, len(roots))
        places = [np.random.default_rng(n).choice(len(roots), size, replace=False, shuffle=False) for n in range(TRIALS)]
        found = [self.drawn(roots[each], n).size for n, each in enumerate(places)]
        most = self.capacities[0]

        def bounded(sizes: Any, room: tuple[int, ...]) -> tuple[int, ...]:
            spread = np.mean(sizes, 0) + 4 * np.std(sizes, 0)
            return tuple(min(round_up(math.ceil(size)), most) for size, most in zip(spread, room, strict=True))

        added = bounded([size.added for size in found], most.added)
        return SampleCapacity(added, bounded([size.slots for size in found], most.slots))

    def sample(self, roots: Any, seed: int | Sequence[int]) -> Sample:
        """Samples the neighbourhoods of at most `batch_size` roots, deterministically for a seed.

        Args:
            roots: node ids.
            seed: seed of the sample.

        Raises:
            ValueError: there are more roots than the batch size, or a root is not a node.
        """
        (sample,) = self.samples([roots], [seed])
        return Sample(sample.nodes, jnp.asarray(sample.rows), jax.tree.map(jnp.asarray, sample.layers), sample.edges)

    def samples(self, roots: Sequence[Any], seeds: Sequence[int | Sequence[int]]) -> list[Sample]:
        """Draws several samples of one shape, with arrays of the host but for those of tables; see `sample`."""
        each = [self.checked_roots(ids) for ids in roots]
        if not self.deduplicate:
            return [self.forest(ids, seed) for ids, seed in zip(each, seeds, strict=True)]
        drawn = [self.drawn(ids, seed) for ids, seed in zip(each, seeds, strict=True)]
        capacity = next(room for room in self.capacities if all(room.holds(sample.size) for sample in drawn))
        return [self.padded(sample, capacity) for sample in drawn]

    def checked_roots(self, roots: Any) -> np.ndarray:
        roots = np.asarray(roots)
        if roots.ndim != 1 or (roots.size and roots.dtype.kind not in "iu"):
            raise ValueError(f"expected roots to be a list of node ids, found {roots.dtype} of shape {list(roots.shape)}")
        if len(roots) > self.batch_size:
            raise ValueError(f"expected at most {self.batch_size} roots, found {len(roots)}")
        if len(roots) and not (roots.min() >= 0 and roots.max() < self.num_nodes):
            wrong = roots[(roots < 0) | (roots >= self.num_nodes)][0]
            raise ValueError(f"expected roots from 0 to {self.num_nodes - 1}, found {wrong}")
        return roots

    def counts(self, nodes: Int32[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
        """Returns the number of neighbours of the nodes in the whole graph; 0 for -1."""
        return np.where(nodes >= 0, self.offsets[nodes + 1] - self.offsets[nodes], 0)

    def padded_roots(self, roots: np.ndarray) -> Int32[np.ndarray, " B"]:
        """Returns the roots, padded with -1."""
        nodes = np.full(self.batch_size, -1, np.int32)
        nodes[: len(roots)] = roots
        return nodes

    def hops(self, seed: int | Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the fan-out and the random key of each hop."""
        keys = np.random.SeedSequence(seed).generate_state(len(self.fan_outs), np.uint64)
        yield from zip(self.fan_outs, keys.tolist(), strict=True)

    def draw(self, nodes: Int32[np.ndarray, " N"], fan_out: int, key: int, starts: np.ndarray, size: int) -> Any:
        """Draws edges of the nodes; see `reference.draw`."""
        return self.kernels.draw(nodes, self.offsets, self.sources, fan_out, key, starts, size)

    def edges_of(self, picks: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " S"]:
        """Returns the caller's edges at places in the sampler's list."""
        out = np.full(len(picks), NO_EDGE, np.int64)
        out[picks >= 0] = self.edges[picks[picks >= 0]]
        return out

    def forest(self, roots: np.ndarray, seed: int | Sequence[int]) -> Sample:
        """Samples a forest."""
        nodes = self.padded_roots(roots)
        layers = []
        drawn_edges = []
        for fan_out, key in self.hops(seed):
            degrees = np.minimum(self.counts(nodes), fan_out).astype(np.int32)
            picks, near = self.draw(nodes, fan_out, key, np.arange(len(nodes)) * fan_out, len(nodes) * fan_out)
            drawn_edges.append(self.edges_of(picks))
            nodes = np.concatenate([nodes, near])
            layers.append(SampledLayer(degrees, self.counts(nodes).astype(np.int32), fan_out, self.self_loops))
        return Sample(np.maximum(nodes, 0), nodes >= 0, tuple(reversed(layers)), tuple(reversed(drawn_edges)))

    def drawn(self, roots: np.ndarray, seed: int | Sequence[int]) -> DrawnSample:
        """Draws a deduplicated sample."""
        nodes = self.padded_roots(roots)
        found = []
        for fan_out, key in self.hops(seed):
            loops = (nodes >= 0) & self.self_loops
            starts = np.zeros(len(nodes) + 1, np.int64)
            np.cumsum(np.minimum(self.counts(nodes), fan_out) + loops, out=starts[1:])
            picks, near = self.draw(nodes, fan_out, key, starts[:-1] + self.self_loops, int(starts[-1]))
            near[starts[:-1][loops]] = nodes[loops]
            sources, added = self.kernels.relabel(nodes, near)
            sources[starts[:-1][loops]] = np.flatnonzero(loops)  # a node that is a root twice has two rows
            nodes = np.concatenate([nodes, added])
            found.append(Hop(starts, sources, picks, len(added)))
        return DrawnSample(nodes, tuple(found))

    def padded(self, drawn: DrawnSample, capacity: SampleCapacity) -> Sample:
        """Pads a deduplicated sample; the rows that a hop adds start at a fixed row, so that no others count as its sources."""
        sizes = drawn.size.rows
        place = np.arange(sizes[-1], dtype=np.int32)
        for before, after, room in zip(sizes[:-1], sizes[1:], capacity.rows[:-1], strict=True):
            place[before:after] += room - before
        nodes = np.full(capacity.rows[-1], -1, np.int32)
        nodes[place] = drawn.nodes
        neighbours = self.counts(nodes).astype(np.int32)
        layers = []
        drawn_edges = []
        for n, (hop, slots) in enumerate(zip(drawn.hops, capacity.slots, strict=True)):
            rows, sources = capacity.rows[n : n + 2]
            degrees = np.zeros(rows, np.int64)
            degrees[place[: sizes[n]]] = np.diff(hop.starts)
            table = self.table(degrees, place[hop.sources], sources, slots)
            layers.append(SampledTable(table, neighbours[:sources], self.self_loops))
            drawn_edges.append(np.pad(self.edges_of(hop.picks), (0, slots - len(hop.picks)), constant_values=NO_EDGE))
        return Sample(np.maximum(nodes, 0), nodes >= 0, tuple(reversed(layers)), tuple(reversed(drawn_edges)))

    def table(
        self, degrees: Int64[np.ndarray, " N"], sources: Int32[np.ndarray, " S"], num_sources: int, slots: int
    ) -> NeighborTable:
        """Builds the table of a layer from edges sorted by row."""
        rows = np.repeat(np.arange(len(degrees), dtype=np.int32), degrees)
        count = len(sources)
        back, order = self.kernels.group(sources, num_sources)
        inverse = np.empty(count, np.int32)
        inverse[order] = np.arange(count, dtype=np.int32)
        padded = partial(np.pad, pad_width=(0, slots - count))
        beyond = np.full(slots - count, slots, np.int32)
        each = np.arange(slots, dtype=np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(degrees, dtype=np.int32)])
        lists = [offsets, padded(sources), padded(rows), each, np.concatenate([each[:count], beyond])]
        forward = CsrRows(*map(jnp.asarray, lists))
        lists = [back.astype(np.int32), padded(rows[order]), padded(sources[order]), padded(order.astype(np.int32))]
        backward = CsrRows(*map(jnp.asarray, lists), slots=jnp.asarray(np.concatenate([inverse, beyond])))
        loops = 1 - np.bincount(rows[rows == sources], minlength=len(degrees)).astype(np.float32)
        ends = len(degrees), num_sources, num_sources, slots
        return NeighborTable(forward, backward, None, jnp.asarray(loops), None, None, None, *ends, "csr")
