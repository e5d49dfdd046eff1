"""Message passing with the usual implementations and with this package's neighbour tables, on any graph.

The experiments follow a comparison published for Trainium2: scatter, gather and scatter, whole models. The baseline gathers the
neighbours' features into `[nodes, degree, features]`, multiplies with a mask and sums. A segment sum over the edges is also
compared. All sides run the same model code; only the reduction differs.
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
"""Number of layers of a model, each as wide as the features."""

SEED_SHAPE = "uniform:2048:64"
"""Graph of the published comparison: number of nodes, and degrees from 1 to the second number."""

LARGEST_MESSAGES = 2**32
"""Maximum bytes of gathered messages for the baseline and the padded layout: 4 GiB, a quarter of a v5e's memory."""

RMAT = (0.57, 0.19, 0.19, 0.05)
"""Probabilities of the four quarters of the adjacency matrix (Chakrabarti et al. 2004; these are Graph500's)."""


@dataclass(frozen=True)
class BenchGraph:
    """Edges `[2, E]` (sources, destinations) and the number of nodes."""

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
    """Reads or generates the graph of `--data`: "seed", "uniform:NODES:MAXDEGREE", "rmat:NODES:EDGES", "karate" or an `.npz`
    file.

    Only the edges of a file are used.

    Raises:
        ValueError: The name is none of these, or the graph has no edge.
    """
    kind, *sizes = (SEED_SHAPE if data == "seed" else data).split(":")
    if kind in ("uniform", "rmat"):
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and 0 < int(size) < 2**31 for size in sizes):
            form = "uniform:NODES:MAXDEGREE" if kind == "uniform" else "rmat:NODES:EDGES"
            raise ValueError(f"expected {form} with numbers of at least 1, found {data!r}")
        make = uniform if kind == "uniform" else rmat
        return BenchGraph(data, make(int(sizes[0]), int(sizes[1])), int(sizes[0]))
    found = read_data(data)
    if isinstance(found, GraphData):
        raise ValueError(f"{data}: expected one graph, found a folder of {found.num_graphs}")
    if not found.edge_index.size:
        raise ValueError(f"{data}: expected a graph with edges, found none")
    return BenchGraph(found.name, found.edge_index, found.num_nodes)


def uniform(nodes: int, most: int) -> Int[np.ndarray, "2 E"]:
    """Returns edges with degrees uniform from 1 to `most` and uniform neighbours; the seed is fixed."""
    rng = np.random.default_rng(0)
    destinations = np.repeat(np.arange(nodes), rng.integers(1, most + 1, nodes))
    return np.stack([rng.integers(0, nodes, destinations.size), destinations])


def rmat(nodes: int, edges: int) -> Int[np.ndarray, "2 E"]:
    """Returns a random graph with hubs: each edge falls recursively into a random quarter of the adjacency matrix."""
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
    """Base of the compared implementations: `models.gnn.Neighbours` over sums of messages, with precomputed factors.

    Attributes:
        sources: neighbours of each node: slots padded with 0, or edges in the order of their destinations.
        symmetric, self_factors: GCN's factors of the neighbours and of the node itself.
    """

    sources: Int32[Array, "*K"]
    symmetric: Float[Array, "*K"]
    self_factors: Float[Array, " N"]
    degrees: Float[Array, " N"]
    num_nodes: int = field(metadata={"static": True})

    @property
    def num_sources(self) -> int:
        return self.num_nodes

    @abstractmethod
    def total(self, messages: Array, factors: Array | None = None) -> Array:
        """Returns the sum of each node's messages, multiplied with the factors."""

    def aggregate(self, x: Array, *, reduce: str = "sum", normalisation: str | None = None) -> Array:
        if normalisation is not None:
            return self.total(x[self.sources], self.symmetric) + x * self.self_factors.astype(x.dtype)[:, None]
        total = self.total(x[self.sources])
        return total / jnp.maximum(self.degrees, 1).astype(x.dtype)[:, None] if reduce == "mean" else total


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered(PeerReduction):
    """Baseline: gather, mask, sum. Implements `models.gnn.Neighbours`.

    Attributes:
        mask: 1 for slots with a neighbour, else 0.
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
    """JAX's own reduction: a segment sum over edges sorted by destination. Implements `models.gnn.Neighbours`."""

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
    """Returns the inputs of the compared implementations: `segments`, and with `gathered` also the baseline's."""
    order = np.argsort(graph.edge_index[1], kind="stable")
    sources, destinations = graph.edge_index[:, order].astype(np.int32)
    degrees = graph.degrees
    loops = missing_loops(from_edge_index(graph.edge_index, graph.num_nodes))
    root = (degrees + loops) ** -0.5
    factors = root[sources] * root[destinations]
    self_factors = jnp.asarray(loops * root * root, jnp.float32)
    counts = jnp.asarray(degrees, jnp.float32)
    edges = jnp.asarray(sources), jnp.asarray(factors, jnp.float32)
    inputs: dict[str, Any] = {"segments": Segments(*edges, self_factors, counts, graph.num_nodes, jnp.asarray(destinations))}
    if gathered:
        shape = (graph.num_nodes, max(1, int(degrees.max())))
        filled = np.arange(shape[1]) < degrees[:, None]
        slots = [np.zeros(shape, dtype) for dtype in (np.int32, np.float32, np.float32)]
        for slot, values in zip(slots, (sources, 1, factors), strict=True):
            slot[filled] = values
        named, mask, symmetric = map(jnp.asarray, slots)
        inputs["gathered"] = Gathered(named, symmetric, self_factors, counts, graph.num_nodes, mask)
    return inputs


@dataclass(frozen=True)
class Experiment:
    """Functions to compare, all of one argument.

    Attributes:
        functions: functions by name; the first is the reference.
        inputs: argument of the functions.
        counts: DMA counts of the kernels behind a function; see `dma_counts`.
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
    """Returns the experiments, ready to compare.

    Args:
        names: keys of `EXPERIMENTS`.
        layouts: layouts of the neighbour tables; "auto" is the best one for this machine, or for a TPU if `chips` are given.
    """
    automatic = "bucketed" if chips else default_layout()
    selected = list(dict.fromkeys(automatic if layout == "auto" else layout for layout in layouts))
    x = jax.random.normal(jax.random.key(0), (graph.num_nodes, features), DTYPES[dtype])
    ready = []
    arrays = None
    for name in names:
        if name == "gat":  # GAT nodes are their own neighbours
            looped = with_self_loops(from_edge_index(graph.edge_index, graph.num_nodes))
            used = make_arrays(replace(graph, edge_index=looped.edge_index), selected, x)
        else:
            used = arrays = arrays or make_arrays(graph, selected, x)
        ready.append(scatter_add(x, used) if name == "scatter-add" else gathering(name, x, used, dtype, here=not chips))
    return ready


@dataclass(frozen=True)
class Arrays:
    """A graph in the form of each implementation; without `gathered` and a padded table if their messages would be too
    large."""

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
    """Returns the experiment that sums gathered messages; without functions if the messages do not fit."""
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
    moved = select.kernel_of("scatter_add", "trainium").transfers(rows, slots, features, x.dtype.itemsize)
    counts = {"nki_dma_descriptors": moved.descriptors, "nki_read_bytes": moved.read, "nki_written_bytes": moved.written}
    return Experiment("scatter-add", {"baseline": baseline, "fused": fused}, inputs, {"fused": counts}, ())


def gathering(name: str, x: Float[Array, "N F"], arrays: Arrays, dtype: Dtype, here: bool) -> Experiment:
    """Returns the experiment of the reduction, or of a model with `LAYERS` reductions. Inputs and outputs are in the caller's
    node order.

    Args:
        here: True if the experiment runs on this machine; a model's matrices are then prepared for its kernels.
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
    if name == "gat":  # GAT uses another kernel
        return Experiment(name, functions, inputs, {}, notes)
    times = 1 if config is None else LAYERS
    counts = {layout: dma_counts(table, x, name == "graphsage", times) for layout, table in arrays.tables.items()}
    return Experiment(name, functions, inputs, counts, notes)


def model_config(name: str, features: int) -> gnn.Config | None:
    """Returns a model of `LAYERS` layers, each as wide as the features; None if `name` is no model."""
    if name == "gat":
        heads = math.gcd(features, 8)
        return gnn.GATConfig(features, features, features // heads, LAYERS, heads=heads)
    configs = {"graphsage": gnn.GraphSAGEConfig, "gcn": gnn.GCNConfig, "gin": gnn.GINConfig}
    return configs[name](features, features, features, LAYERS) if name in configs else None


def dma_counts(table: NeighborTable, x: Float[Array, "N F"], mean: bool, times: int) -> dict[str, int]:
    """Returns the transfers of the TPU and NKI kernels for reductions of features like `x`, as the kernels count them.

    Empty for tables with lists, which these kernels do not support.

    Args:
        mean: True if a reduction divides by the degree.
        times: number of reductions.
    """
    stage: Any = table.forward
    if not isinstance(stage, BucketRows):
        return {}
    scaled = mean and stage.rest is None  # the mean of split rows is computed from their sums
    totals: dict[str, int] = dict.fromkeys(DMA_FIELDS, 0)
    on_tpu, on_trainium = (select.kernel_of("gather_reduce", chip) for chip in ("tpu", "trainium"))
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
    """Compares an experiment's functions on this machine, or compiled for `chips`.

    Returns:
        The comparison, and a record of each of its programs.
    """
    arguments = (experiment.inputs,)
    compared = compare_all(experiment.functions, arguments, repetitions, chips=chips, run=not chips, on_run=on_run)
    empty = dict.fromkeys(DMA_FIELDS)
    about = {"experiment": experiment.name, "compared_with": next(iter(experiment.functions))}
    records = [{**about, **row, **empty, **experiment.counts.get(row["name"], {})} for row in compared.record()["programs"]]
    return compared, records
