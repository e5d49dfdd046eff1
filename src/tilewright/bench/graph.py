"""Message passing as it is usually written, against this package's neighbour tables, on any graph.

The experiments are those of a comparison published for Trainium2: scatter, gather and scatter, whole models. The baseline
gathers the neighbours' features into `[nodes, degree, features]`, multiplies them by a mask and sums; a segment sum over the
edges stands beside it. A model runs the same code on all sides: only the reduction differs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Int32

from tilewright.compiled.compare import Comparison, Function, compare_all
from tilewright.graph.data import GraphData, read_data
from tilewright.graph.edges import from_edge_index, missing_loops, with_self_loops
from tilewright.graph.rows import BucketRows
from tilewright.graph.table import NeighborTable, default_layout
from tilewright.kernels import select
from tilewright.models import gnn
from tilewright.models.params import DTYPES, Dtype

MODELS = ("graphsage", "gcn", "gin", "gat")
EXPERIMENTS = ("scatter-add", "gather-scatter", *MODELS)
PUBLISHED = EXPERIMENTS[:-1]
"""Experiments of the published comparison: all but GAT."""
LAYERS = 2
"""Of a model, each as wide as the features."""

SEED_SHAPE = "uniform:2048:64"
"""The graph of the published comparison: as many nodes, and degrees from 1 to this."""

LARGEST_MESSAGES = 2**32
"""Bytes of gathered messages beyond which there is no baseline and no padded layout: 4 GiB, a quarter of a v5e's memory."""

RMAT = (0.57, 0.19, 0.19, 0.05)
"""Probabilities of the four quarters of the adjacency matrix (Chakrabarti et al. 2004; these are Graph500's)."""


@dataclass(frozen=True)
class BenchGraph:
    """Edges to measure on, `[2, E]`, sources above destinations, and how many nodes they are among."""

    name: str
    edge_index: Int[np.ndarray, "2 E"]
    num_nodes: int

    @property
    def degrees(self) -> Int[np.ndarray, " N"]:
        return np.bincount(self.edge_index[1], minlength=self.num_nodes)

    def record(self) -> dict[str, Any]:
        most = int(self.degrees.max(initial=0))
        return {"graph": self.name, "nodes": self.num_nodes, "edges": self.edge_index.shape[1], "max_degree": most}


def read_graph(data: str) -> BenchGraph:
    """The graph that `--data` names: "seed", "uniform:NODES:MAXDEGREE", "rmat:NODES:EDGES", "karate" or an `.npz` file.

    Of a file, only the edges are used.

    Raises:
        ValueError: it is none of these, or without an edge.
    """
    kind, *sizes = (SEED_SHAPE if data == "seed" else data).split(":")
    if kind in ("uniform", "rmat"):
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and 0 < int(size) < 2**31 for size in sizes):
            wanted = "uniform:NODES:MAXDEGREE" if kind == "uniform" else "rmat:NODES:EDGES"
            raise ValueError(f"expected {wanted} with numbers of at least 1, found {data!r}")
        make = uniform if kind == "uniform" else rmat
        return BenchGraph(data, make(int(sizes[0]), int(sizes[1])), int(sizes[0]))
    found = read_data(data)
    if isinstance(found, GraphData):
        raise ValueError(f"{data}: expected one graph, found a folder of {found.num_graphs}")
    if not found.edge_index.size:
        raise ValueError(f"{data}: expected a graph with edges, found none")
    return BenchGraph(found.name, found.edge_index, found.num_nodes)


def uniform(nodes: int, most: int) -> Int[np.ndarray, "2 E"]:
    """Degrees uniform from 1 to `most`, neighbours uniform among the nodes; always the same ones."""
    rng = np.random.default_rng(0)
    destinations = np.repeat(np.arange(nodes), rng.integers(1, most + 1, nodes))
    return np.stack([rng.integers(0, nodes, destinations.size), destinations])


def rmat(nodes: int, edges: int) -> Int[np.ndarray, "2 E"]:
    """A random graph with hubs: each edge falls into one quarter of the matrix, then of that quarter, and so on."""
    rng = np.random.default_rng(0)
    found = np.zeros((2, 0), np.int64)
    while found.shape[1] < edges:
        drawn = np.zeros((2, edges), np.int64)
        for _ in range((nodes - 1).bit_length()):
            quarter = rng.choice(4, edges, p=RMAT)
            drawn = 2 * drawn + np.stack([quarter // 2, quarter % 2])
        found = np.concatenate([found, drawn[:, (drawn < nodes).all(0)]], axis=1)
    return found[:, :edges]


@dataclass(frozen=True)
class PeerReduction(ABC):
    """Base of the other sides: `models.gnn.Neighbours` over sums of messages, every factor worked out before.

    Attributes:
        sources: neighbours of each node: slots padded with 0, or edges in the order of their destinations.
        symmetric, own: GCN's factors of the neighbours, and of the node itself.
    """

    sources: Int32[Array, "*K"]
    symmetric: Float[Array, "*K"]
    own: Float[Array, " N"]
    degrees: Float[Array, " N"]
    num_nodes: int = field(metadata={"static": True})

    @property
    def num_sources(self) -> int:
        return self.num_nodes

    @abstractmethod
    def total(self, messages: Array, factors: Array | None = None) -> Array:
        """The sum of each node's messages, each times its factor."""

    def aggregate(self, x: Array, *, reduce: str = "sum", normalisation: str | None = None) -> Array:
        if normalisation is not None:
            return self.total(x[self.sources], self.symmetric) + x * self.own.astype(x.dtype)[:, None]
        total = self.total(x[self.sources])
        return total / jnp.maximum(self.degrees, 1).astype(x.dtype)[:, None] if reduce == "mean" else total


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered(PeerReduction):
    """The baseline: gather, mask, sum. Offers `models.gnn.Neighbours`.

    Attributes:
        mask: 1 for a slot that is a neighbour.
    """

    mask: Float[Array, "N K"]

    def total(self, messages: Array, factors: Array | None = None) -> Array:
        factors = self.mask if factors is None else factors
        return (messages * factors.astype(messages.dtype)[:, :, None]).sum(axis=1)

    def attend(self, x: Array, source_score: Array, target_score: Array, negative_slope: float, *dropout: Any) -> Array:
        scores = jax.nn.leaky_relu(source_score[self.sources] + target_score[:, None], negative_slope)
        weights = jax.nn.softmax(scores, axis=1, where=self.mask[:, :, None] > 0)
        return (gnn.dropout(weights, *dropout)[..., None] * x[self.sources]).sum(axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments(PeerReduction):
    """JAX's own reduction: a segment sum over edges that are sorted by destination. Offers `models.gnn.Neighbours`."""

    destinations: Int32[Array, " E"]

    def total(self, messages: Array, factors: Array | None = None) -> Array:
        weighted = messages if factors is None else messages * factors.astype(messages.dtype)[:, None]
        return jax.ops.segment_sum(weighted, self.destinations, self.num_nodes, indices_are_sorted=True)

    def attend(self, x: Array, source_score: Array, target_score: Array, negative_slope: float, *dropout: Any) -> Array:
        scores = jax.nn.leaky_relu(source_score[self.sources] + target_score[self.destinations], negative_slope)
        best = jax.ops.segment_max(scores, self.destinations, self.num_nodes, indices_are_sorted=True)
        weights = jnp.exp(scores - best[self.destinations])
        weights = gnn.dropout(weights / self.total(weights)[self.destinations], *dropout)
        return self.total(weights[..., None] * x[self.sources])


def peers(graph: BenchGraph, gathered: bool) -> dict[str, Any]:
    """Inputs of the other sides: `segments`, and `gathered` if that is asked for."""
    order = np.argsort(graph.edge_index[1], kind="stable")
    sources, destinations = graph.edge_index[:, order].astype(np.int32)
    degrees = graph.degrees
    loops = missing_loops(from_edge_index(graph.edge_index, graph.num_nodes))
    root = (degrees + loops) ** -0.5
    factors = root[sources] * root[destinations]
    own = jnp.asarray(loops * root * root, jnp.float32)
    counts = jnp.asarray(degrees, jnp.float32)
    edges = jnp.asarray(sources), jnp.asarray(factors, jnp.float32)
    inputs: dict[str, Any] = {"segments": Segments(*edges, own, counts, graph.num_nodes, jnp.asarray(destinations))}
    if gathered:
        shape = (graph.num_nodes, max(1, int(degrees.max())))
        filled = np.arange(shape[1]) < degrees[:, None]
        slots = [np.zeros(shape, dtype) for dtype in (np.int32, np.float32, np.float32)]
        for slot, values in zip(slots, (sources, 1, factors), strict=True):
            slot[filled] = values
        named, mask, symmetric = map(jnp.asarray, slots)
        inputs["gathered"] = Gathered(named, symmetric, own, counts, graph.num_nodes, mask)
    return inputs


@dataclass(frozen=True)
class Experiment:
    """Functions to compare, all of one argument.

    Attributes:
        functions: by name; the first is what the others are held against.
        inputs: what each takes.
        counts: for the kernels behind a function, what their DMAs do; see `dma_counts`.
        notes: what is missing, and why.
    """

    name: str
    functions: Mapping[str, Function]
    inputs: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...]


def prepare(
    graph: BenchGraph, names: Sequence[str], layouts: Sequence[str], features: int, dtype: Dtype, chips: Sequence[str] = ()
) -> list[Experiment]:
    """The experiments, ready to compare.

    Args:
        names: of `EXPERIMENTS`.
        layouts: of the neighbour tables; "auto" is the one that suits this machine, or a TPU where `chips` are given.
    """
    automatic = "bucketed" if chips else default_layout()
    wanted = list(dict.fromkeys(automatic if layout == "auto" else layout for layout in layouts))
    x = jax.random.normal(jax.random.key(0), (graph.num_nodes, features), DTYPES[dtype])
    ready = []
    arrays = None
    for name in names:
        if name == "gat":  # whose nodes are neighbours of themselves
            looped = with_self_loops(from_edge_index(graph.edge_index, graph.num_nodes))
            own = make_arrays(replace(graph, edge_index=looped.edge_index), wanted, x)
        else:
            own = arrays = arrays or make_arrays(graph, wanted, x)
        ready.append(scatter_add(x, own) if name == "scatter-add" else gathering(name, x, own, dtype, here=not chips))
    return ready


@dataclass(frozen=True)
class Arrays:
    """A graph as each side holds it; without `gathered` and a padded table where their messages would be too large."""

    peers: Mapping[str, Any]
    tables: Mapping[str, NeighborTable]
    notes: tuple[str, ...]


def make_arrays(graph: BenchGraph, layouts: Sequence[str], x: Float[Array, "N F"]) -> Arrays:
    shape = (graph.num_nodes, int(graph.degrees.max()), x.shape[1])
    size = math.prod(shape) * x.dtype.itemsize
    fits = size <= LARGEST_MESSAGES
    notes = () if fits else (f"messages [{shape[0]:,}, {shape[1]:,}, {shape[2]}] would take {size / 1e9:,.1f} GB",)
    tables = {
        layout: NeighborTable.from_edges(graph.edge_index, graph.num_nodes, layout=layout)
        for layout in layouts
        if fits or layout != "padded"
    }
    return Arrays(peers(graph, fits), tables, notes)


def scatter_add(x: Float[Array, "N F"], arrays: Arrays) -> Experiment:
    """The sum over messages that are gathered already; without functions where these don't fit."""
    if "gathered" not in arrays.peers:
        return Experiment("scatter-add", {}, {}, {}, tuple(f"scatter-add left out: {note}" for note in arrays.notes))
    gathered = arrays.peers["gathered"]
    inputs = {"messages": x[gathered.sources], "mask": gathered.mask, "degrees": gathered.degrees.astype(jnp.int32)}

    def baseline(given: Mapping[str, Any]) -> Array:
        messages = given["messages"]
        return (messages * given["mask"].astype(messages.dtype)[:, :, None]).sum(axis=1)

    def fused(given: Mapping[str, Any]) -> Array:
        return select.scatter_add(given["messages"], given["degrees"])

    rows, slots, features = inputs["messages"].shape
    moved = select.kernel_of("sums of messages", "trainium").transfers(rows, slots, features, x.dtype.itemsize)
    counts = {"nki_dma_descriptors": moved.descriptors, "nki_read_bytes": moved.read, "nki_written_bytes": moved.written}
    return Experiment("scatter-add", {"baseline": baseline, "fused": fused}, inputs, {"fused": counts}, ())


def gathering(name: str, x: Float[Array, "N F"], arrays: Arrays, dtype: Dtype, here: bool) -> Experiment:
    """The reduction itself, or a model that holds it `LAYERS` times; from and to the caller's order of nodes on all sides.

    Args:
        here: it will run on this machine, so that a model's matrices are prepared for that.
    """
    inputs: dict[str, Any] = {"x": x, **arrays.peers, **arrays.tables}
    config = model_config(name, x.shape[1])
    ops = select.operations() if here else select.PLAIN
    if config is not None:
        params, inputs["state"] = gnn.init(config, jax.random.key(1), dtype)
        inputs["params"] = ops.prepare(gnn.declare(config), params)

    def reduced(given: Mapping[str, Any], neighbours: Any, x: Array) -> Array:
        if config is None:
            return neighbours.aggregate(x)
        return gnn.apply(config, given["params"], neighbours, x, given["state"], ops=ops)[0]

    def side(graph: str) -> Function:
        def run(given: Mapping[str, Any]) -> Array:
            neighbours = given[graph]
            x = given["x"]
            if isinstance(neighbours, NeighborTable):
                return neighbours.unpermute(reduced(given, neighbours, neighbours.permute(x)))
            return reduced(given, neighbours, x)

        return run

    functions = {"baseline": side("gathered")} if "gathered" in arrays.peers else {}
    functions |= {"segment_sum": side("segments"), **{layout: side(layout) for layout in arrays.tables}}
    notes = tuple(f"{name} without baseline and padded layout, so against segment_sum: {note}" for note in arrays.notes)
    if name == "gat":  # which another kernel reduces
        return Experiment(name, functions, inputs, {}, notes)
    times = 1 if config is None else LAYERS
    counts = {layout: dma_counts(table, x, name == "graphsage", times) for layout, table in arrays.tables.items()}
    return Experiment(name, functions, inputs, counts, notes)


def model_config(name: str, features: int) -> gnn.Config | None:
    """A model of `LAYERS` layers, each as wide as the features; None for what is no model."""
    if name == "gat":
        heads = math.gcd(features, 8)
        return gnn.GATConfig(features, features, features // heads, LAYERS, heads=heads)
    alike = {"graphsage": gnn.GraphSAGEConfig, "gcn": gnn.GCNConfig, "gin": gnn.GINConfig}
    return alike[name](features, features, features, LAYERS) if name in alike else None


def dma_counts(table: NeighborTable, x: Float[Array, "N F"], mean: bool, times: int) -> dict[str, int]:
    """Transfers of the TPU and NKI kernels for reductions of features like `x`, as the kernels count them.

    Nothing for lists, which they don't take.

    Args:
        mean: whether a reduction divides by the degree.
        times: reductions.
    """
    stage: Any = table.forward
    if not isinstance(stage, BucketRows):
        return {}
    scaled = mean and stage.rest is None  # the mean of split rows is made of their sums
    totals: dict[str, int] = dict.fromkeys(DMA_FIELDS, 0)
    on_tpu, on_trainium = (select.kernel_of("graph reduction", chip) for chip in ("tpu", "trainium"))
    while stage is not None:
        for block in stage.blocks:
            rows, slots = block.sources.shape
            tpu = on_tpu.transfers(np.asarray(block.degrees), slots, x.shape[1], x.dtype)
            trainium = on_trainium.transfers(rows, slots, x.shape[1], x.dtype.itemsize, scaled=scaled)
            moved = (tpu.descriptors, tpu.gathered, tpu.read, tpu.written)
            moved += (trainium.descriptors, trainium.read, trainium.written)
            totals = {key: totals[key] + times * count for key, count in zip(DMA_FIELDS, moved, strict=True)}
        stage = stage.rest
    return totals


DMA_FIELDS = (
    "tpu_dma_descriptors",
    "tpu_gathered_bytes",
    "tpu_read_bytes",
    "tpu_written_bytes",
    "nki_dma_descriptors",
    "nki_read_bytes",
    "nki_written_bytes",
)
"""Fields of a record about transfers of kernels, besides the figures of a comparison."""


def measure(
    experiment: Experiment, repetitions: int, chips: Sequence[str] = (), on_run: Callable[[], None] = lambda: None
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Compares an experiment's functions, here or, where there are chips, as compiled for those.

    Returns:
        The comparison, and a record of each of its programs.
    """
    given = (experiment.inputs,)
    compared = compare_all(experiment.functions, given, repetitions, chips=chips, run=not chips, on_run=on_run)
    empty = dict.fromkeys(DMA_FIELDS)
    about = {"experiment": experiment.name, "compared_with": next(iter(experiment.functions))}
    records = [{**about, **row, **empty, **experiment.counts.get(row["name"], {})} for row in compared.record()["programs"]]
    return compared, records
