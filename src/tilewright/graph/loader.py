"""Mini-batches of declared shapes, in PyG's names: of nodes or edges with sampled neighbourhoods, and of many graphs.

A loader states its shapes before it starts (`str(loader)`), and counts what they held afterwards (`loader.report`). A program
compiles once for each of its shapes: one for samples, at most two for batches of graphs.

Legend: B roots or graphs of a batch, M rows, F features, E edges, D features of an edge.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped

from tilewright.graph.batch import PADDING, Capacity, pack, round_up
from tilewright.graph.data import GraphData, NodeData, no_labels
from tilewright.graph.edges import check_edge_features, check_weights, from_edge_index
from tilewright.graph.sample import NeighbourSampler, Sample, SampledTable

Batch = TypeVar("Batch")


@dataclass
class LoadReport:
    """Counts of an epoch's batches, of which every batch updates the newest.

    Attributes:
        batches: batches so far.
        shapes: distinct shapes of batches, each of which a program compiles for.
        rows: rows of nodes, with padding.
        filled_rows: rows that are nodes.
        edges: places for edges, with padding.
        filled_edges: places that hold an edge.
    """

    batches: int = 0
    shapes: set[Any] = field(default_factory=set)
    rows: int = 0
    filled_rows: int = 0
    edges: int = 0
    filled_edges: int = 0

    def add(self, shape: Any, rows: int, filled_rows: int, edges: int, filled_edges: int) -> None:
        """Counts a batch."""
        self.batches += 1
        self.shapes.add(shape)
        self.rows += rows
        self.filled_rows += filled_rows
        self.edges += edges
        self.filled_edges += filled_edges

    def __str__(self) -> str:
        rows, edges = self.filled_rows / max(1, self.rows), self.filled_edges / max(1, self.edges)
        shapes = f"{len(self.shapes)} shape{'' if len(self.shapes) == 1 else 's'}, each of which a program compiles for once"
        return f"{self.batches:,} batches of {shapes}; filled: {rows:.0%} of the rows of nodes, {edges:.0%} of the edges"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NeighborBatch:
    """Mini-batch of sampled neighbourhoods.

    Attributes:
        x: features of the input rows, `[M, F]`; the roots come first.
        layers: neighbours in each layer, the input layer first, for `models.gnn.apply`.
        edge_attr: features of each layer's slots of edges, `[S, D]`; None without.
        rows: mask of the rows that are not padding, `[M]`.
        y: labels of the roots, `[B]` or `[B, T]`; -1 (or NaN) in padding. For links, their labels.
    """

    x: Any
    layers: Any
    edge_attr: Any
    rows: Any
    y: Any


def node_data(data: Any) -> NodeData:
    """Returns PyG's `Data` as `NodeData`, with labels -1 where it has none.

    Raises:
        ValueError: an array has a wrong shape, or ids out of range.
    """
    if isinstance(data, NodeData):
        return data
    x = np.asarray(data.x, np.float32)
    edges = from_edge_index(data.edge_index, len(x)).edge_index.astype(np.int32)
    y = getattr(data, "y", None)
    labels = np.full(len(x), PADDING, np.int32) if y is None else np.asarray(y)
    if len(labels) != len(x) or labels.ndim not in (1, 2):
        raise ValueError(f"expected y of {len(x)} nodes, [nodes] or [nodes, labels], found {list(labels.shape)}")
    if labels.dtype.kind == "f":
        labels = labels.reshape(len(x), -1).astype(np.float32)
    else:
        labels = (labels[:, 0] if labels.shape[1:] == (1,) else labels).astype(np.int32)
    parts = (getattr(data, f"{part}_mask", None) for part in ("train", "val", "test"))
    ids = [np.flatnonzero([] if mask is None else np.asarray(mask)).astype(np.int32) for mask in parts]
    given = getattr(data, "edge_attr", None)
    features = None if given is None else check_edge_features(given, edges.shape[1])
    weights = getattr(data, "edge_weight", None)
    weights = None if weights is None else check_weights(weights, edges.shape[1])
    return NodeData("data", edges, x, labels, ids[0], ids[1], ids[2], weights, features)


def prefetched(batches: Iterable[Callable[[], Batch]], workers: int, ahead: int = 2) -> Iterator[Batch]:
    """Yields the results of the calls, in their order, which threads compute beforehand.

    Args:
        batches: the calls.
        workers: number of threads; 0 calls in the caller's thread.
        ahead: calls beyond the number of threads that wait or have finished.
    """
    if not workers:
        yield from (make() for make in batches)
        return
    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for make in batches:
                waiting.append(pool.submit(make))
                if len(waiting) > workers + ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Neighborhoods:
    """Sampled neighbourhoods of a graph's nodes, with features: what loaders and training make batches of.

    Args:
        data: the graph.
        fan_outs: see `sample.NeighbourSampler`.
        batch_size: roots per batch.
        loops: "given" takes self-loops like any other edge; "table" gives each node exactly one, as attention expects; "layer"
            leaves them out for models that add them (see `models.gnn.Config.self_loops`).
        roots: nodes from which roots will come; None for all.

    Raises:
        ValueError: the graph has edge weights, or see `sample.NeighbourSampler`.
    """

    def __init__(
        self,
        data: NodeData,
        fan_outs: Sequence[int],
        batch_size: int,
        loops: Literal["given", "table", "layer"] = "given",
        roots: Any = None,
    ):
        if data.weights is not None:
            raise ValueError(
                f"expected no edge weights for sampled neighbours, found some in {data.name}; leave out edge_weight"
            )
        edges = data.edge_index
        kept = (edges[0] != edges[1]) | (loops == "given")
        everything = bool(kept.all())  # edges of large graphs are not copied
        self.data = data
        self.edge_attr = data.edge_attr if everything or data.edge_attr is None else data.edge_attr[kept]
        edges = edges if everything else edges[:, kept]
        self.sampler = NeighbourSampler(edges, data.num_nodes, fan_outs, batch_size, loops == "table", roots=roots)

    def batches(
        self, roots: Sequence[Any], seeds: Sequence[Any], labels: Sequence[Shaped[np.ndarray, "..."]]
    ) -> list[NeighborBatch]:
        """Samples batches of one shape, with all arrays in NumPy.

        Args:
            roots: roots of each batch.
            seeds: seed of each batch.
            labels: labels of each batch.
        """
        samples = self.sampler.samples(roots, seeds)
        return [
            NeighborBatch(self.data.rows(sample.nodes), sample.layers, self.edge_features(sample), sample.rows, y)
            for sample, y in zip(samples, labels, strict=True)
        ]

    def edge_features(self, sample: Sample) -> list[Float[np.ndarray, "S D"]] | None:
        """Returns the features of each layer's slots: zeros in padding, and for a table's self-loop the mean of the row."""
        given = self.edge_attr
        if given is None:
            return None
        found = []
        for layer, ids in zip(sample.layers, sample.edges, strict=True):
            features = np.zeros((len(ids), given.shape[1]), np.float32)
            features[ids >= 0] = given[ids[ids >= 0]]
            if isinstance(layer, SampledTable) and layer.self_loops:
                offsets = np.asarray(layer.offsets)
                counts = np.diff(offsets)
                firsts = offsets[:-1][counts > 0]  # a row's first slot is its self-loop
                if len(firsts):
                    sums = np.add.reduceat(features, firsts)
                    features[firsts] = sums / np.maximum(counts[counts > 0] - 1, 1).astype(np.float32)[:, None]
            found.append(features)
        return found

    def __str__(self) -> str:
        sampler = self.sampler
        rows = " or ".join(f"{capacity.rows[-1]:,}" for capacity in sampler.capacities)
        shapes = "one shape" if len(sampler.capacities) == 1 else f"{len(sampler.capacities)} shapes"
        way = f"; sampled by NumPy, since {sampler.reason}" if sampler.reason else ""
        sizes = f"{sampler.batch_size:,} roots with fan-outs {list(sampler.fan_outs)}"
        return f"{shapes}: {sizes} are {rows} rows of {self.data.num_features:,} features{way}"


class NeighborLoader:
    """Batches of nodes with sampled neighbourhoods, of one or two declared shapes.

    On a CPU, a batch has one row for each node. Nearly all batches then have the usual shape, and any batch fits the other.

    Args:
        data: a graph: `NodeData`, or PyG's `Data`.
        num_neighbors: sampled neighbours of a root, of each of these, etc.; -1 for all.
        input_nodes: ids or mask of the nodes to iterate over; None for all.
        batch_size: roots per batch; the last batch is padded.
        shuffle: draw another order in each epoch.
        drop_last: leave out a batch that is not full.
        seed: seed of order and samples.
        self_loops: each node is its own neighbour once, as attention expects; the graph's own self-loops are left out.
        num_workers: threads that sample ahead; batches do not depend on their number.

    Raises:
        ValueError: ids are out of range, or see `sample.NeighbourSampler`.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],
        input_nodes: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        self_loops: bool = False,
        num_workers: int = 1,
    ):
        self.data = node_data(data)
        nodes = self.data.num_nodes
        ids = np.arange(nodes) if input_nodes is None else np.asarray(input_nodes)
        ids = np.flatnonzero(ids) if ids.dtype == bool else ids
        if ids.ndim != 1 or (ids.size and not (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < nodes)):
            raise ValueError(
                f"expected input_nodes as a mask or ids from 0 to {nodes - 1}, found {ids.dtype} {list(ids.shape)}"
            )
        if num_workers < 0:
            raise ValueError(f"expected num_workers of at least 0, found {num_workers}")
        self.roots = ids
        self.num_workers = num_workers
        self.order = Order(len(ids), batch_size, shuffle, drop_last, seed)
        loops = "table" if self_loops else "given"
        self.neighborhoods = Neighborhoods(self.data, num_neighbors, self.roots_per_batch, loops, self.likely_roots())
        self.report = LoadReport()

    @property
    def sampler(self) -> NeighbourSampler:
        return self.neighborhoods.sampler

    @property
    def roots_per_batch(self) -> int:
        return self.order.size

    def likely_roots(self) -> Int[np.ndarray, " R"]:
        """Returns nodes from which the roots come, for the usual shape."""
        return self.roots

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[NeighborBatch]:
        self.report = LoadReport()
        calls = (partial(self.batch, places, seed) for places, seed in self.order.epoch())
        for counts, batch in prefetched(calls, self.num_workers):
            self.report.add(*counts)
            yield batch

    def rooted(self, places: Int[np.ndarray, " P"], seed: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns roots and labels of a batch."""
        roots = self.roots[places]
        missing = no_labels(self.data.labels, self.order.size - len(roots))
        return roots, np.concatenate([self.data.labels[roots], missing])

    def batch(self, places: Int[np.ndarray, " P"], seed: tuple[int, int, int]) -> tuple[tuple[Any, ...], NeighborBatch]:
        """Samples the batch of some places; returns its counts for the report as well."""
        roots, labels = self.rooted(places, seed)
        (batch,) = self.neighborhoods.batches([roots], [seed], [labels])
        slots = [layer.filled_slots() for layer in batch.layers]
        shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        counts = shape, len(batch.rows), int(batch.rows.sum()), sum(size for size, _ in slots), sum(n for _, n in slots)
        return counts, jax.tree.map(jnp.asarray, batch)

    def __str__(self) -> str:
        return f"{len(self):,} batches of {self.neighborhoods}"


@dataclass
class Order:
    """Places of an epoch's batches, with a seed of each.

    Attributes:
        count: number of places.
        size: places per batch.
        shuffle, drop_last, seed: see `NeighborLoader`.
        epochs: epochs begun.
    """

    count: int
    size: int
    shuffle: bool
    drop_last: bool
    seed: int
    epochs: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"expected a batch_size of at least 1, found {self.size}")

    def __len__(self) -> int:
        return self.count // self.size if self.drop_last else -(-self.count // self.size)

    def epoch(self) -> Iterator[tuple[Int[np.ndarray, " R"], tuple[int, int, int]]]:
        """Yields the places and the seed of each batch of the next epoch."""
        epoch = self.epochs
        self.epochs += 1
        places = np.arange(self.count)
        if self.shuffle:
            places = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        for n in range(len(self)):
            yield places[n * self.size : (n + 1) * self.size], (self.seed, epoch, n)


class LinkNeighborLoader(NeighborLoader):
    """Batches of edges to predict, with sampled neighbourhoods of both ends, all of one shape.

    Row n of a batch is the source of its edge n, and row `links + n` the destination; `y` has the edges' labels. Drawn negative
    edges have label 0, and random ends, as in PyG without a check that they are no edges.

    Args:
        data: see `NeighborLoader`; messages pass along its edges.
        num_neighbors: see `NeighborLoader`.
        edge_label_index: edges to iterate over, `[2, L]`; None for the graph's.
        edge_label: their labels, from 0; None for 1.
        neg_sampling_ratio: drawn negative edges per edge.
        batch_size: edges per batch, without negative ones.
        shuffle, drop_last, seed, self_loops, num_workers: see `NeighborLoader`.

    Raises:
        ValueError: edges or labels are invalid, or see `NeighborLoader`.
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Sequence[int],
        edge_label_index: Any = None,
        edge_label: Any = None,
        neg_sampling_ratio: float = 0.0,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        self_loops: bool = False,
        num_workers: int = 1,
    ):
        data = node_data(data)
        links = from_edge_index(data.edge_index if edge_label_index is None else edge_label_index, data.num_nodes).edge_index
        labels = np.ones(links.shape[1], np.int32) if edge_label is None else np.asarray(edge_label)
        if labels.shape != links.shape[1:] or labels.dtype.kind not in "biu" or (labels.size and labels.min() < 0):
            raise ValueError(f"expected labels from 0 of {links.shape[1]} edges, found {labels.dtype} {list(labels.shape)}")
        if not neg_sampling_ratio >= 0:
            raise ValueError(f"expected neg_sampling_ratio of at least 0, found {neg_sampling_ratio}")
        self.ends = links
        self.edge_label = labels.astype(np.int32)
        self.negatives = math.ceil(batch_size * neg_sampling_ratio)
        super().__init__(data, num_neighbors, None, batch_size, shuffle, drop_last, seed, self_loops, num_workers)
        self.order = Order(links.shape[1], batch_size, shuffle, drop_last, seed)

    @property
    def links(self) -> int:
        """Edges of a batch, with negative ones."""
        return self.order.size + self.negatives

    @property
    def roots_per_batch(self) -> int:
        return 2 * self.links

    def likely_roots(self) -> Int[np.ndarray, " R"]:
        return self.ends.ravel()

    def rooted(self, places: Int[np.ndarray, " P"], seed: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        count = math.ceil(len(places) * self.negatives / self.order.size)
        drawn = np.random.default_rng((*seed, 1)).integers(0, self.data.num_nodes, (2, count))
        ends = np.concatenate([self.ends[:, places], drawn], axis=1)
        labels = np.full(self.links, PADDING, np.int32)
        labels[: ends.shape[1]] = np.concatenate([self.edge_label[places], np.zeros(count, np.int32)])
        roots = np.zeros((2, self.links), np.int64)  # edges in padding are those of node 0, without a label
        roots[:, : ends.shape[1]] = ends
        return roots.ravel(), labels


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GraphsBatch:
    """Mini-batch of graphs in one table.

    Attributes:
        x: features of the rows, `[N, F]`.
        table: `NeighborTable` of the rows.
        pool: `NeighborTable` from nodes to graphs, for readouts.
        edge_attr: features of the table's edges, `[E, D]`; None without.
        rows: mask of the rows that are nodes, `[N]`.
        y: labels of the graphs, `[B]`; -1 in padding.
    """

    x: Any
    table: Any
    pool: Any
    edge_attr: Any
    rows: Any
    y: Any


class DataLoader:
    """Batches of graphs, of one of two shapes chosen from the data: one for nearly all batches, one for any.

    The smaller shape holds the mean of the sizes of random batches plus four standard deviations; the larger one holds the
    largest graphs together.

    Args:
        data: the graphs.
        ids: graphs to iterate over; None for all.
        batch_size: graphs per batch; the last batch is padded.
        shuffle, drop_last, seed: see `NeighborLoader`.
        layout: layout of the tables, see `batch.row_layout`.

    Raises:
        ValueError: an id is out of range or named twice, or there is no graph.
    """

    def __init__(
        self,
        data: GraphData,
        ids: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        layout: str = "auto",
    ):
        self.data = data
        self.ids = np.arange(data.num_graphs) if ids is None else np.asarray(ids)
        if not self.ids.size or self.ids.min() < 0 or self.ids.max() >= data.num_graphs:
            raise ValueError(f"expected graph ids from 0 to {data.num_graphs - 1}, found {self.ids.tolist()[:8]}")
        if len(np.unique(self.ids)) < len(self.ids):  # a batch of the largest graph alone would fit no shape
            raise ValueError("expected different graph ids, found some twice")
        self.order = Order(len(self.ids), batch_size, shuffle, drop_last, seed)
        self.layout = layout
        self.report = LoadReport()
        self.features = jnp.asarray(data.features)
        self.edge_attr = None if data.edge_attr is None else jnp.asarray(data.edge_attr)
        sizes = np.stack([np.diff(data.node_offsets), np.diff(data.edge_offsets)])[:, self.ids].astype(np.float64)
        largest = Capacity.from_batches(data, [self.ids[np.argsort(size)[-batch_size:]] for size in sizes])
        spread = batch_size * sizes.mean(1) + 4 * math.sqrt(batch_size) * sizes.std(1)
        most = Capacity(batch_size, largest.nodes, largest.edges, largest.degree, largest.graph_nodes)
        nodes, edges = (round_up(math.ceil(each)) for each in spread)
        usual = replace(most, nodes=min(max(nodes, round_up(batch_size)), most.nodes), edges=min(edges, most.edges))
        self.capacities = [usual, most]
        if self.capacities[0] == self.capacities[1]:
            self.capacities.pop()

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[GraphsBatch]:
        self.report = LoadReport()
        nodes, edges = (np.diff(ends) for ends in (self.data.node_offsets, self.data.edge_offsets))
        for places, _ in self.order.epoch():
            ids = self.ids[places]
            sizes = int(nodes[ids].sum()), int(edges[ids].sum())
            capacity = next(each for each in self.capacities if sizes[0] <= each.nodes and sizes[1] <= each.edges)
            self.report.add(capacity, capacity.nodes, sizes[0], capacity.edges, sizes[1])
            batch = jax.tree.map(jnp.asarray, pack(self.data, ids, capacity))
            tables = batch.table(capacity, self.layout), batch.pool(capacity, self.layout)
            edge_attr = batch.edge_attr(self.edge_attr)
            yield GraphsBatch(batch.features(self.features), *tables, edge_attr, batch.rows, batch.labels)

    def __str__(self) -> str:
        each = " or ".join(f"{capacity.nodes:,} nodes and {capacity.edges:,} edges" for capacity in self.capacities)
        return f"{len(self):,} batches of {self.order.size:,} graphs in {len(self.capacities)} shapes: {each}"
