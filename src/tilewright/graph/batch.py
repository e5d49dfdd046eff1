"""Mini-batches of graphs in one table of fixed size, so that all mini-batches run the same program.

The graphs are concatenated without edges between them. Padding fills the rest of the capacity: nodes without neighbours and
graph, edges without node, and graphs without nodes. Padding never affects a graph.

Legend: L batches, B graphs of a batch, N nodes, E edges, K slots of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
"""Id of a graph, node or label in padding."""


@dataclass(frozen=True)
class Capacity:
    """Capacity of a batch. Batches of equal capacity have equal shapes.

    Attributes:
        graphs: most graphs of a batch.
        nodes: most nodes of a batch.
        edges: most edges of a batch.
        degree: most neighbours of a node; only the layout "padded" depends on it.
        graph_nodes: most nodes of a graph; only the layout "padded" depends on it.
    """

    graphs: int
    nodes: int
    edges: int
    degree: int
    graph_nodes: int

    @classmethod
    def from_batches(cls, data: GraphData, batches: Iterable[Int[np.ndarray, "... B"]]) -> "Capacity":
        """Returns the capacity for all batches, rounded up to a coarse scale, so that few capacities occur."""
        sizes = np.append(np.diff(data.node_offsets), 0), np.append(np.diff(data.edge_offsets), 0)
        graphs = nodes = edges = 0
        for ids in batches:
            graphs = max(graphs, ids.shape[-1])
            nodes, edges = (max(most, int(size[ids].sum(-1).max())) for most, size in zip((nodes, edges), sizes, strict=True))
        degrees = np.bincount(data.edge_index[1] + np.repeat(data.node_offsets[:-1], np.diff(data.edge_offsets)))
        graph_nodes = int(sizes[0].max())
        return cls(graphs, round_up(max(nodes, graphs)), round_up(edges), int(degrees.max(initial=1)), graph_nodes)


def round_up(n: int) -> int:
    """Rounds up to one of eight sizes between consecutive powers of two."""
    step = max(8, 1 << max(n - 1, 0).bit_length() >> 4)
    return max(step, -(-n // step) * step)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GraphBatch:
    """Mini-batch of graphs, or several of one capacity with leading dimensions.

    Attributes:
        nodes: node of the data set in each row, int32 `[N]`; `PADDING` after the last node.
        offsets: row i has the edges `offsets[i]` to `offsets[i + 1] - 1`, int32 `[N + 1]`.
        sources: source row of each edge, int32 `[E]`.
        destinations: destination row of each edge, int32 `[E]`.
        graphs: graph of each row, int32 `[N]`.
        starts: graph g has the rows `starts[g]` to `starts[g + 1] - 1`, int32 `[B + 1]`.
        labels: labels of the graphs, int32 `[B]`; `PADDING` in padding.
        edges: edge of the data set of each edge, int32 `[E]`; `PADDING` in padding.
        reverse: edge of the batch in the opposite direction of each edge, int32 `[E]`; itself in padding.
    """

    nodes: Any
    offsets: Any
    sources: Any
    destinations: Any
    graphs: Any
    starts: Any
    labels: Any
    edges: Any
    reverse: Any

    def edge_attr(self, features: Float[Array, "all D"] | None) -> Float[Array, "E D"] | None:
        """Gathers the features of the edges from those of all edges of the data set; zeros in padding, None without."""
        if features is None:
            return None
        return jnp.where((self.edges != PADDING)[:, None], features[jnp.maximum(self.edges, 0)], 0)

    @property
    def rows(self) -> Bool[Array, " N"]:
        """Mask of the rows with nodes."""
        return self.nodes != PADDING

    def features(self, features: Array) -> Array:
        """Gathers the features of the rows from the features of all nodes of the data set; zeros in padding."""
        return jnp.where(self.rows[:, None], features[jnp.maximum(self.nodes, 0)], 0)

    @property
    def loops(self) -> Float[Array, " N"]:
        """1 minus the number of each row's self-loops, see `NeighborTable.loops`."""
        before = jnp.pad(jnp.cumsum(self.sources == self.destinations), (1, 0))  # avoids a slow scatter by destination
        loops = before[self.offsets[1:]] - before[self.offsets[:-1]]
        return 1 - loops.astype(jnp.float32)

    def table(self, capacity: Capacity, layout: str = "auto") -> NeighborTable:
        """Builds the neighbour table of the rows; both directions differ by the numbers of the edges alone."""
        rows = make_rows(self.offsets, self.sources, self.destinations, capacity.degree, layout)
        back = reversed_rows(rows, self.reverse)
        n = self.nodes.shape[0]
        e = self.sources.shape[0]
        return NeighborTable(rows, back, None, self.loops, None, None, None, n, n, n, e, row_layout(layout))

    def pool(self, capacity: Capacity, layout: str = "auto") -> NeighborTable:
        """Builds the table for pooling: the rows are graphs, and the neighbours of a graph are its nodes."""
        n = self.nodes.shape[0]
        b = self.labels.shape[0]
        each = jnp.arange(n + 1, dtype=jnp.int32)
        forward = make_rows(self.starts, each[:n], self.graphs, capacity.graph_nodes, layout)
        backward = make_rows(jnp.minimum(each, self.starts[-1]), self.graphs, each[:n], 1, layout)
        return NeighborTable(
            forward, backward, None, jnp.ones(b, jnp.float32), None, None, None, b, n, n, n, row_layout(layout)
        )


def row_layout(layout: str) -> Any:
    """Returns "csr" or "padded" for a layout; bucketed rows would have different shapes in each batch."""
    if layout not in ("auto", "csr", "padded"):
        raise ValueError(f"expected the layout auto, csr or padded, found {layout!r}")
    return ("csr" if default_layout() == "csr" else "padded") if layout == "auto" else layout


def make_rows(
    offsets: Int32[Array, " N_and_one"], sources: Int32[Array, " E"], rows: Int32[Array, " E"], width: int, layout: str
) -> Rows:
    """Builds rows from edges sorted by row; no row has more than `width` edges."""
    edges = jnp.arange(sources.shape[0], dtype=jnp.int32)
    real = edges < offsets[-1]
    if row_layout(layout) == "csr":
        return CsrRows(offsets, sources, rows, edges, jnp.where(real, edges, edges.shape[0]))
    places = offsets[:-1, None] + jnp.arange(width, dtype=jnp.int32)
    degrees = jnp.diff(offsets)
    filled = jnp.arange(width) < degrees[:, None]
    edge_ids = jnp.where(filled, places, 0)
    count = degrees.shape[0]
    padded = jnp.where(filled, sources.at[edge_ids].get(mode="promise_in_bounds"), 0)
    slots = rows * width + edges - offsets.at[rows].get(mode="promise_in_bounds")
    slots = jnp.where(real, slots, count * width)
    bucket = Bucket(padded, degrees, jnp.arange(count, dtype=jnp.int32), edge_ids)
    return BucketRows((bucket,), (), None, degrees, slots, None)


def reversed_rows(rows: Rows, reverse: Int32[Array, " E"]) -> Rows:
    """Returns the rows of the sources, which have the neighbours of the rows of the nodes; `reverse` is its own inverse."""
    if isinstance(rows, CsrRows):
        real = jnp.arange(reverse.shape[0], dtype=jnp.int32) < rows.offsets[-1]
        return replace(rows, edges=reverse, slots=jnp.where(real, reverse, reverse.shape[0]))
    assert rows.slots is not None
    (bucket,) = rows.buckets
    assert bucket.edges is not None
    return replace(
        rows,
        buckets=(replace(bucket, edges=reverse.at[bucket.edges].get(mode="promise_in_bounds")),),
        slots=rows.slots.at[reverse].get(mode="promise_in_bounds"),
    )


def pack(data: GraphData, ids: Int[np.ndarray, "*batches B"], capacity: Capacity) -> GraphBatch:
    """Packs graphs into batches, in NumPy, vectorised over all batches.

    Args:
        data: the graphs.
        ids: graph ids of each batch; `PADDING` for none.
        capacity: capacity of a batch.

    Raises:
        ValueError: a batch exceeds the capacity, or an id is out of range.
    """
    wrong = ids[(ids < PADDING) | (ids >= data.num_graphs)]
    if wrong.size:
        raise ValueError(f"expected graph ids from 0 to {data.num_graphs - 1}, found {wrong[0]}")
    if ids.shape[-1] > capacity.graphs:
        raise ValueError(f"expected at most {capacity.graphs} graphs, found {ids.shape[-1]}")
    lead = ids.shape[:-1]
    flat = np.full((int(np.prod(lead)), capacity.graphs), PADDING, np.int64)
    flat[:, : ids.shape[-1]] = ids.reshape(-1, ids.shape[-1])
    present = flat != PADDING
    sizes, edge_counts = (np.where(present, np.diff(ends)[flat], 0) for ends in (data.node_offsets, data.edge_offsets))
    for noun, counts, room in (("nodes", sizes, capacity.nodes), ("edges", edge_counts, capacity.edges)):
        if (most := int(counts.sum(1).max(initial=0))) > room:
            raise ValueError(f"expected at most {room} {noun}, found a batch of {most}")
    starts = np.concatenate([np.zeros((len(flat), 1), np.int64), np.cumsum(sizes, 1)], 1)
    batch, place, graph, local = ragged(sizes)
    node = data.node_offsets[flat[batch, graph]] + local
    in_degree = np.bincount(
        data.edge_index[1] + np.repeat(data.node_offsets[:-1], np.diff(data.edge_offsets)), minlength=len(data.features)
    )
    offsets = np.zeros((len(flat), capacity.nodes + 1), np.int64)
    offsets[batch, place + 1] = in_degree[node]

    def rows(width: int, fill: int, index: tuple[np.ndarray, np.ndarray], values: np.ndarray) -> Int32[np.ndarray, "..."]:
        out = np.full((len(flat), width), fill, np.int32)
        out[index] = values
        return out.reshape(*lead, width)

    nodes = rows(capacity.nodes, PADDING, (batch, place), node)
    graphs = rows(capacity.nodes, 0, (batch, place), graph)
    batch, place, graph, local = ragged(edge_counts)
    edge = data.edge_offsets[flat[batch, graph]] + local
    sources, destinations = (
        rows(capacity.edges, 0, (batch, place), data.edge_index[end][edge] + starts[batch, graph]) for end in (0, 1)
    )
    edges = rows(capacity.edges, PADDING, (batch, place), edge)
    opposite = np.broadcast_to(np.arange(capacity.edges, dtype=np.int32), (len(flat), capacity.edges)).copy()
    opposite[batch, place] = place + data.reverse[edge] - edge  # both directions are in the same graph
    labels = np.where(present, data.labels[flat], PADDING).astype(np.int32).reshape(*lead, -1)
    ends = np.cumsum(offsets, 1).astype(np.int32).reshape(*lead, -1)
    firsts = starts.astype(np.int32).reshape(*lead, -1)
    reverse = opposite.reshape(*lead, capacity.edges)
    return GraphBatch(nodes, ends, sources, destinations, graphs, firsts, labels, edges, reverse)


def ragged(counts: Int[np.ndarray, "L B"]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Enumerates items, of which graph g of batch b has `counts[b, g]`.

    Returns:
        for each item its batch, its place in the batch, its graph, and its number in the graph.
    """
    flat = counts.ravel()
    owner = np.repeat(np.arange(flat.size), flat)
    local = np.arange(owner.size) - np.repeat(np.cumsum(flat) - flat, flat)
    before = (np.cumsum(counts, 1) - counts).ravel()
    return owner // counts.shape[1], before[owner] + local, owner % counts.shape[1], local
