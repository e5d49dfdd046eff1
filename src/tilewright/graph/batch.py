"""Many graphs in one table of fixed size, so that every mini-batch runs the same program.

Graphs stand one after another and share no edge. What is left of the capacity is padding: nodes without neighbours that belong
to no graph, edges that no node has, graphs without nodes. None of it reaches a graph.

Legend: L batches, B graphs of a batch, N nodes, E edges, K slots of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Int32

from tilewright.graph.data import GraphData
from tilewright.graph.rows import Bucket, BucketRows, CsrRows, Rows
from tilewright.graph.table import NeighborTable, default_layout

PADDING = -1
"""Stands for a graph, node or label that is not there."""


@dataclass(frozen=True)
class Capacity:
    """Room of a batch: graphs, nodes, edges and degrees. Batches of equal capacity have equal shapes.

    Attributes:
        degree: the largest number of neighbours of a node (only padded rows depend on it).
        graph_nodes: the largest number of nodes of a graph (likewise).
    """

    graphs: int
    nodes: int
    edges: int
    degree: int
    graph_nodes: int

    @classmethod
    def of(cls, data: GraphData, batches: Iterable[Int[np.ndarray, "... B"]]) -> "Capacity":
        """Room for all of these batches, rounded up to a coarse scale so that few capacities occur."""
        sizes = np.append(np.diff(data.node_offsets), 0), np.append(np.diff(data.edge_offsets), 0)
        graphs = nodes = edges = 0
        for ids in batches:
            graphs = max(graphs, ids.shape[-1])
            nodes, edges = (max(most, int(size[ids].sum(-1).max())) for most, size in zip((nodes, edges), sizes, strict=True))
        degrees = np.bincount(data.edge_index[1] + np.repeat(data.node_offsets[:-1], np.diff(data.edge_offsets)))
        graph_nodes = int(sizes[0].max())
        return cls(graphs, round_up(max(nodes, graphs)), round_up(edges), int(degrees.max(initial=1)), graph_nodes)


def round_up(n: int) -> int:
    """The next of eight sizes between one power of two and the next."""
    step = max(8, 1 << max(n - 1, 0).bit_length() >> 4)
    return max(step, -(-n // step) * step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GraphBatch:
    """A batch, or several of one capacity with leading dims (which a program maps over or scans).

    Attributes:
        nodes: which node of the data set stands in each row, int32 `[N]`; `PADDING` behind the last.
        offsets: row i has the edges from `offsets[i]` to `offsets[i + 1]`, int32 `[N + 1]`.
        sources: of each edge, int32 `[E]`.
        destinations: of each edge, int32 `[E]`.
        graphs: the graph of each row, int32 `[N]`.
        starts: graph g has the rows from `starts[g]` to `starts[g + 1]`, int32 `[B + 1]`.
        labels: of the graphs, int32 `[B]`; `PADDING` where there is none.
    """

    nodes: Any
    offsets: Any
    sources: Any
    destinations: Any
    graphs: Any
    starts: Any
    labels: Any

    @property
    def rows(self) -> Bool[Array, " N"]:
        """Mask of the rows that are nodes."""
        return self.nodes != PADDING

    def features(self, features: Array) -> Array:
        """The rows' features, from those of all nodes of the data set; zeros in padding."""
        return jnp.where(self.rows[:, None], features[jnp.maximum(self.nodes, 0)], 0)

    @property
    def loops(self) -> Float[Array, " N"]:
        """1 less the number of each row's edges to itself, see `NeighborTable.loops`; edges of padding are no row's."""
        before = jnp.pad(jnp.cumsum(self.sources == self.destinations), (1, 0))  # a scatter by destination would be slow
        own = before[self.offsets[1:]] - before[self.offsets[:-1]]
        return 1 - own.astype(jnp.float32)

    def table(self, capacity: Capacity, layout: str = "auto") -> NeighborTable:
        """The neighbours of the rows; both directions are one, as graphs of a `GraphData` are undirected."""
        rows = make_rows(self.offsets, self.sources, self.destinations, capacity.degree, layout)
        n = self.nodes.shape[0]
        e = self.sources.shape[0]
        return NeighborTable(rows, rows, None, self.loops, None, None, None, n, n, n, e, layout_of(layout))

    def pool(self, capacity: Capacity, layout: str = "auto") -> NeighborTable:
        """The table whose rows are the graphs, and whose neighbours are their nodes."""
        n = self.nodes.shape[0]
        b = self.labels.shape[0]
        each = jnp.arange(n + 1, dtype=jnp.int32)
        forward = make_rows(self.starts, each[:n], self.graphs, capacity.graph_nodes, layout)
        backward = make_rows(jnp.minimum(each, self.starts[-1]), self.graphs, each[:n], 1, layout)
        return NeighborTable(forward, backward, None, jnp.ones(b, jnp.float32), None, None, None, b, n, n, n, layout_of(layout))


def layout_of(layout: str) -> Any:
    """ "csr" or "padded": the width of buckets would differ from batch to batch."""
    if layout not in ("auto", "csr", "padded"):
        raise ValueError(f"expected the layout auto, csr or padded, found {layout!r}")
    return ("csr" if default_layout() == "csr" else "padded") if layout == "auto" else layout


def make_rows(
    offsets: Int32[Array, " N_and_one"], sources: Int32[Array, " E"], rows: Int32[Array, " E"], width: int, layout: str
) -> Rows:
    """The rows of edges that are sorted by row, where none has more than `width`."""
    edges = jnp.arange(sources.shape[0], dtype=jnp.int32)
    real = edges < offsets[-1]
    if layout_of(layout) == "csr":
        return CsrRows(offsets, sources, rows, edges, jnp.where(real, edges, edges.shape[0]))
    places = offsets[:-1, None] + jnp.arange(width, dtype=jnp.int32)
    degrees = jnp.diff(offsets)
    filled = jnp.arange(width) < degrees[:, None]
    edges_of = jnp.where(filled, places, 0)
    count = degrees.shape[0]
    padded = jnp.where(filled, sources.at[edges_of].get(mode="promise_in_bounds"), 0)
    slots = rows * width + edges - offsets.at[rows].get(mode="promise_in_bounds")
    slots = jnp.where(real, slots, count * width)
    bucket = Bucket(padded, degrees, jnp.arange(count, dtype=jnp.int32), edges_of)
    return BucketRows((bucket,), (), None, degrees, slots, None)


def pack(data: GraphData, ids: Int[np.ndarray, "*batches B"], capacity: Capacity) -> GraphBatch:
    """Batches of these graphs, `PADDING` among the ids for none; in NumPy, all at once.

    Raises:
        ValueError: a batch does not fit the capacity, or an id is no graph.
    """
    wrong = ids[(ids < PADDING) | (ids >= data.num_graphs)]
    if wrong.size:
        raise ValueError(f"graph {wrong[0]} is none of the {data.num_graphs} graphs")
    if ids.shape[-1] > capacity.graphs:
        raise ValueError(f"expected at most {capacity.graphs} graphs, found {ids.shape[-1]}")
    lead = ids.shape[:-1]
    flat = np.full((int(np.prod(lead)), capacity.graphs), PADDING, np.int64)
    flat[:, : ids.shape[-1]] = ids.reshape(-1, ids.shape[-1])
    present = flat != PADDING
    sizes, edge_counts = (np.where(present, np.diff(ends)[flat], 0) for ends in (data.node_offsets, data.edge_offsets))
    for what, counts, room in (("nodes", sizes, capacity.nodes), ("edges", edge_counts, capacity.edges)):
        if (most := int(counts.sum(1).max(initial=0))) > room:
            raise ValueError(f"expected at most {room} {what}, found a batch of {most}")
    starts = np.concatenate([np.zeros((len(flat), 1), np.int64), np.cumsum(sizes, 1)], 1)
    batch, place, graph, local = ragged(sizes)
    node = data.node_offsets[flat[batch, graph]] + local
    in_degree = np.bincount(
        data.edge_index[1] + np.repeat(data.node_offsets[:-1], np.diff(data.edge_offsets)), minlength=len(data.features)
    )
    offsets = np.zeros((len(flat), capacity.nodes + 1), np.int64)
    offsets[batch, place + 1] = in_degree[node]

    def rows(width: int, fill: int, where: tuple[np.ndarray, np.ndarray], values: np.ndarray) -> Int32[np.ndarray, "..."]:
        out = np.full((len(flat), width), fill, np.int32)
        out[where] = values
        return out.reshape(*lead, width)

    nodes = rows(capacity.nodes, PADDING, (batch, place), node)
    graphs = rows(capacity.nodes, 0, (batch, place), graph)
    batch, place, graph, local = ragged(edge_counts)
    edge = data.edge_offsets[flat[batch, graph]] + local
    sources, destinations = (
        rows(capacity.edges, 0, (batch, place), data.edge_index[end][edge] + starts[batch, graph]) for end in (0, 1)
    )
    labels = np.where(present, data.labels[flat], PADDING).astype(np.int32).reshape(*lead, -1)
    ends = np.cumsum(offsets, 1).astype(np.int32).reshape(*lead, -1)
    return GraphBatch(nodes, ends, sources, destinations, graphs, starts.astype(np.int32).reshape(*lead, -1), labels)


def ragged(counts: Int[np.ndarray, "L B"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Places of things of which graph g of batch b has `counts[b, g]`: for each its batch, its place there, its graph, and its
    number in that graph."""
    flat = counts.ravel()
    owner = np.repeat(np.arange(flat.size), flat)
    local = np.arange(owner.size) - np.repeat(np.cumsum(flat) - flat, flat)
    before = (np.cumsum(counts, 1) - counts).ravel()
    return owner // counts.shape[1], before[owner] + local, owner % counts.shape[1], local
