"""A graph whose nodes are divided over the devices of a mesh axis.

`PartitionedTable` offers `models.gnn.Neighbours` for arrays that are sharded over that axis, so a model and a training step are
the same program as on one device: its dense parts XLA divides by itself, and sums them over the devices where that is due
(batch norm's statistics, the loss, the gradients of parameters, which every device holds); only reductions over neighbours are
written out, in `exchange`.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.core
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float

from tilewright.graph import build
from tilewright.graph.aggregate import check_numbers
from tilewright.graph.edges import Edges, missing_loops, negative_degree, negative_degree_of, read_edges, with_self_loops
from tilewright.graph.exchange import ExchangePlan, GraphPart, Shard
from tilewright.graph.rows import Bucket, BucketRows
from tilewright.graph.table import ORDERS, default_layout
from tilewright.models import gnn
from tilewright.models.gnn import Config, GNNParams, State

EdgeList = tuple[build.Ids, build.Ids, build.Ids]
"""Edges by row, those of a row by source: the rows, the sources, and the number of each edge."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartitionedTable:
    """A graph's neighbours, a block of the nodes on each device.

    Between `permute` and `unpermute`, arrays have the rows of all blocks one after another, each padded to the same number of
    rows, and are sharded over the axis.

    Attributes:
        shards: each device's block; every array has a leading dim of devices.
        order: the caller's number of each row; of padding, the number of nodes.
        places: the row of each of the caller's nodes.
        nodes: of the graph, padding not counted.
        num_edges: of the graph.
        negative: the first node whose weights sum to a negative degree, and that sum, see `edges.negative_degree_of`.
    """

    shards: Shard
    order: Any
    places: Any
    nodes: int = field(metadata={"static": True})
    num_edges: int = field(metadata={"static": True})
    mesh: Mesh = field(metadata={"static": True})
    negative: tuple[int, float] | None = field(default=None, metadata={"static": True})

    @classmethod
    def build(
        cls,
        graph: Any,
        mesh: Mesh,
        num_nodes: int | None = None,
        weights: Any = None,
        axis: str | None = None,
        exchange: str = "ring",
        layout: str = "auto",
        order: str = "given",
        limit: int = 64,
        self_loops: bool = False,
    ) -> "PartitionedTable":
        """Divides a graph so that blocks hold nodes that follow one another, and about as many nodes and edges each.

        Every process of several builds it, of the same graph, and keeps what its own devices need.

        Args:
            graph: an edge_index, a SciPy matrix, a networkx graph or a PyG `Data`; see `edges.read_edges`.
            axis: of the mesh; may be left out if there is one only.
            exchange: "ring": blocks of features go round and are reduced on the way, and nobody holds more than two. Blocks
                that have no edge between them do not meet. "all_gather": everyone gets all features first.
            layout, order, limit, self_loops: see `table.make_table`. "rcm" leaves few blocks that must meet.

        Raises:
            ValueError: an unknown option, or edges that are not right.
            ImportError: the order needs SciPy, and that is not installed.
        """
        axis = checked_axis(mesh, axis)
        for what, value, known in (
            ("exchange", exchange, ("ring", "all_gather")),
            ("layout", layout, ("auto", "bucketed", "csr")),
            ("order", order, ORDERS),
        ):
            if value not in known:
                raise ValueError(f"expected the {what} {' or '.join(known)}, found {value!r}")
        if limit < 2 or limit & (limit - 1):
            raise ValueError(f"expected limit to be a power of two of at least 2, found {limit}")
        edges = read_edges(graph, num_nodes, weights)
        if edges.num_sources != edges.num_nodes:
            raise ValueError(f"expected as many sources as nodes, found {edges.num_sources} and {edges.num_nodes}")
        edges = with_self_loops(edges) if self_loops else edges
        return divide(edges, mesh, axis, exchange, default_layout() if layout == "auto" else layout, order, limit)

    @property
    def num_nodes(self) -> int:
        """Rows of all blocks, padding included."""
        return self.order.shape[0]

    @property
    def num_sources(self) -> int:
        return self.num_nodes

    @property
    def rows(self) -> Bool[Array, " rows"]:
        """Mask of the rows that are nodes and no padding."""
        return self.order < self.nodes

    @property
    def spec(self) -> PartitionSpec:
        """Partition spec of arrays in this order, and of `shards`."""
        return PartitionSpec(self.shards.plan.axis)

    def aggregate(
        self,
        x: Float[Array, "rows F"],
        *,
        reduce: str = "sum",
        normalisation: str | None = None,
    ) -> Float[Array, "rows F"]:
        """Reduces over each node's neighbours; see `tilewright.graph.aggregate.aggregate`."""
        if normalisation == "symmetric" and self.negative is not None:
            raise negative_degree(*self.negative)
        return aggregated(self, x, reduce, normalisation)

    def attend(
        self,
        x: Float[Array, "rows H D"],
        source_score: Float[Array, "rows H"],
        target_score: Float[Array, "rows H"],
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "rows H D"]:
        """Attention over each node's neighbours; see `tilewright.graph.attention.attend`."""
        return attended(self, x, source_score, target_score, key, negative_slope, dropout)

    def on_each(self, compute: Any, *arrays: Float[Array, "rows ..."], key: Array | None = None) -> Float[Array, "rows ..."]:
        """`compute(shard, key, *arrays)` on each device, of its own rows and with a key of its own."""
        for array in arrays:
            if array.shape[0] != self.num_nodes:
                raise ValueError(f"expected {self.num_nodes} rows, as `permute` makes them, found {array.shape[0]}")

        def inside(shards: Shard, keys: Array | None, *arrays: Array) -> Array:
            return compute(shards.local(), None if keys is None else keys[0], *arrays)

        # Everything that goes in or out is sharded, so there is nothing for check_vma to check, which the kernels don't pass.
        mapped = jax.shard_map(inside, mesh=self.mesh, in_specs=self.spec, out_specs=self.spec, check_vma=False)
        devices = self.mesh.shape[self.shards.plan.axis]
        return mapped(self.shards, None if key is None else jax.random.split(key, devices), *arrays)

    def permute(self, x: Any, fill: Any = 0) -> Array:
        """Brings values of the nodes, `[nodes, ...]`, from the caller's order to that of the blocks, with `fill` in padding.

        Values from outside of a compiled program may be any array of the host; each device gets its own rows of them.
        """
        x = x if isinstance(x, jax.core.Tracer) else np.asarray(x)
        if x.ndim == 0 or x.shape[0] != self.nodes:
            found = x.shape[0] if x.ndim else "a single number"
            raise ValueError(f"expected values of {self.nodes} nodes, found {found}: this is another graph's table")
        sharding = NamedSharding(self.mesh, self.spec)
        if isinstance(x, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(x.at[self.order].get(mode="fill", fill_value=fill), sharding)
        order = np.asarray(self.order)
        shape = (order.size, *x.shape[1:])

        def rows(index: Any) -> np.ndarray:
            wanted = order[index[0]]
            picked = np.full((wanted.size, *shape[1:]), fill, x.dtype)
            picked[wanted < self.nodes] = x[wanted[wanted < self.nodes]]
            return picked

        return jax.make_array_from_callback(shape, sharding, rows)

    def unpermute(self, y: Float[Array, "rows ..."]) -> Float[Array, "nodes ..."]:
        """Brings values of the nodes to the caller's order; every device gets all of them.

        In training, rather bring the labels to the order of the blocks: the gradient of this scatters.
        """
        if y.shape[0] != self.num_nodes:
            raise ValueError(f"expected {self.num_nodes} rows, found {y.shape[0]}: this is another graph's table")
        return to_caller(y, self.places, NamedSharding(self.mesh, PartitionSpec()))

    def summary(self) -> str:
        """Devices, rows, parts, and bytes, in a few lines."""
        plan = self.shards.plan
        devices = self.shards.degrees.shape[0]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(self.shards)) // devices
        parts = "all features gathered" if plan.exchange == "all_gather" else f"{len(plan.hops)} of {devices} hops of a ring"
        return (
            f"{self.nodes:,} nodes and {self.num_edges:,} edges on {devices} devices (axis {plan.axis!r}): {parts}\n"
            f"{self.num_nodes // devices:,} rows and {size / 1e6:.1f} MB on each"
        )

    def __str__(self) -> str:
        return self.summary()

    def __rich__(self) -> str:
        return self.summary()


@partial(jax.jit, static_argnames=("reduce", "normalisation"))
def aggregated(table: PartitionedTable, x: Array, reduce: str, normalisation: str | None) -> Array:
    """A program of its own, for step by step a `jax.shard_map` takes long."""
    return table.on_each(lambda shard, _, x: shard.aggregate(x, reduce=reduce, normalisation=normalisation), x)


@partial(jax.jit, static_argnames=("slope", "dropout"))
def attended(
    table: PartitionedTable, x: Array, source: Array, target: Array, key: Array | None, slope: float, dropout: float
) -> Array:
    return table.on_each(lambda shard, key, *given: shard.attend(*given, slope, dropout, key), x, source, target, key=key)


@partial(jax.jit, static_argnums=2)
def to_caller(y: Array, places: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(y.at[places].get(mode="promise_in_bounds"), sharding)


def checked_axis(mesh: Mesh, axis: str | None) -> str:
    """The mesh axis to divide over."""
    names = mesh.axis_names
    if axis is None and len(names) == 1:
        return names[0]
    if axis is None or axis not in names:
        raise ValueError(f"expected one of the mesh's axes {names}, found {axis!r}")
    return axis


def cut(degrees: build.Ids, count: int) -> build.Ids:
    """Starts of `count` blocks, and the end of the last: nodes and edges weigh as much in total."""
    cost = np.cumsum(degrees / max(1, degrees.sum()) + 1 / max(1, degrees.size))
    ends = np.searchsorted(cost, np.arange(1, count) / count * cost[-1:].sum() * (1 + 1e-9), side="right")
    return np.concatenate([[0], ends, [degrees.size]])


def divide(edges: Edges, mesh: Mesh, axis: str, exchange: str, layout: str, order: str, limit: int) -> PartitionedTable:
    """The table of checked edges."""
    nodes = edges.num_nodes
    devices = mesh.shape[axis]
    numbering = np.arange(nodes)
    if order == "rcm":
        numbering = build.locality_order(edges.destinations, edges.sources, nodes)
    degrees = np.bincount(edges.destinations, minlength=nodes)
    starts = cut(degrees[numbering], devices)
    size = max(1, int(np.diff(starts).max()))  # rows of a block
    block = np.repeat(np.arange(devices), np.diff(starts))
    rows = block * size + np.arange(nodes) - starts[block]
    order_of_rows = np.full(devices * size, nodes)
    order_of_rows[rows] = numbering
    places = np.empty(nodes, np.int64)
    places[numbering] = rows

    hops, trees, arrays = divided_edges(edges, places, size, devices, exchange, layout, limit)
    loops = missing_loops(edges)
    sums = np.bincount(edges.destinations, edges.weights, nodes)
    per_row = [np.zeros(devices * size, dtype) for dtype in (np.int32, np.float32, np.float32)]
    for values, target in zip((degrees, sums, loops), per_row, strict=True):
        target[places] = values
    put = partial(place, sharding=NamedSharding(mesh, PartitionSpec(axis)))
    plan = ExchangePlan(axis, exchange, hops, trees)
    degrees_of, sums_of, loops_of = (put(values.reshape(devices, size)) for values in per_row)
    shards = Shard(jax.tree.map(put, arrays), degrees_of, sums_of, loops_of, plan)
    everywhere = NamedSharding(mesh, PartitionSpec())
    put_order, put_places = (place(values.astype(np.int32), everywhere) for values in (order_of_rows, places))
    return PartitionedTable(shards, put_order, put_places, nodes, edges.sources.size, mesh, negative_degree_of(edges))


def place(values: np.ndarray, sharding: NamedSharding) -> Array:
    """An array on the devices of a mesh, of which each process fills its own."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def divided_edges(
    edges: Edges, places: build.Ids, size: int, devices: int, exchange: str, layout: str, limit: int
) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[tuple[np.ndarray, ...], ...]]:
    """The parts' hops, structures and arrays, which have a leading dim of devices.

    Args:
        places: the row of each of the caller's nodes.
        size: rows of a block.
    """
    rows = places[edges.destinations]
    sources = places[edges.sources]
    device = rows // size
    hop = (sources // size - device) % devices if exchange == "ring" else np.zeros_like(rows)
    width = size if exchange == "ring" else devices * size
    hops = tuple(int(h) for h in np.unique(hop)) or (0,)
    key = hop * devices + device
    groups = np.split(np.argsort(key, kind="stable"), np.cumsum(np.bincount(key, minlength=devices**2))[:-1])
    trees = []
    arrays = []
    for each in hops:
        members = groups[each * devices : (each + 1) * devices]
        lists = [(rows[ids] % size, sources[ids] % width) for ids in members]
        room = max(1, *(ids.size for ids in members))
        forward = equal_rows([by_row(r, s) for r, s in lists], size, layout, limit, room)
        backward = equal_rows([by_row(s, r) for r, s in lists], width, layout, limit, room)
        weights = [None if edges.weights is None else np.pad(edges.weights[ids], (0, room - ids.size)) for ids in members]
        parts = [jax.tree.flatten(GraphPart(*three)) for three in zip(forward, backward, weights, strict=True)]
        trees.append(parts[0][1])
        assert all(tree == trees[-1] for _, tree in parts), "the parts of a hop have one structure"
        arrays.append(
            tuple(np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*(p for p, _ in parts), strict=True))
        )
    return hops, tuple(trees), tuple(arrays)


def by_row(rows: build.Ids, sources: build.Ids) -> EdgeList:
    order = np.lexsort((sources, rows))
    return rows[order], sources[order], order


def equal_rows(lists: list[EdgeList], count: int, layout: str, limit: int, room: int) -> list[Any]:
    """The rows of each list, all of one structure and of equal shapes."""
    degrees = np.stack([np.bincount(rows, minlength=count) for rows, _, _ in lists])
    if layout == "bucketed":
        return equal_buckets(degrees, lists, limit, room)
    offsets = [build.offsets_of(row) for row in degrees]
    return [build.csr_rows(each, sources, ids, room) for each, (_, sources, ids) in zip(offsets, lists, strict=True)]


def equal_buckets(degrees: build.Ids, lists: list[EdgeList], limit: int, room: int) -> list[BucketRows]:
    """Rows in buckets, where the same number of rows has the same width in every list.

    Rows are ranked by degree in each list, and those of a rank are all as wide as the longest of them needs.

    Args:
        degrees: of each list's rows, `[lists, rows]`.
        room: edges that each list has room for.
    """
    ranked = np.argsort(degrees, axis=1, kind="stable")
    sizes = np.take_along_axis(degrees, ranked, 1)
    starts = np.take_along_axis(np.cumsum(degrees, axis=1) - degrees, ranked, 1)
    widest = sizes.max(axis=0)
    made = []
    for row, ranks, start, size, (_, sources, ids) in zip(degrees, ranked, starts, sizes, lists, strict=True):
        slots = np.zeros(sources.size, np.int64)
        rows = ranked_rows(widest, start, size, ranks, sources, ids, limit, slots)
        places = np.full(room, sum(bucket.sources.size for bucket in rows.blocks))
        places[ids] = slots
        made.append(
            replace(
                rows,
                degrees=build.int32_array(row),
                slots=build.int32_array(places),
                order=build.int32_array(build.inverse(ranks)),
            )
        )
    return made


def ranked_rows(
    widest: build.Ids,
    starts: build.Ids,
    sizes: build.Ids,
    nodes: build.Ids,
    sources: build.Ids,
    edges: build.Ids | None,
    limit: int,
    slots: build.Ids | None,
) -> BucketRows:
    """Rows whose slots are as many as `widest` says, in ascending order; longer ones than `limit` in parts.

    Args:
        starts, sizes: a row's entries of `sources` and `edges`.
        nodes: what each row belongs to.
        slots: the places of entries' slots are WRITTEN here.
    """
    filled = 0

    def bucket(starts: build.Ids, sizes: build.Ids, nodes: build.Ids, width: int) -> Bucket:
        nonlocal filled
        entries, counts = build.slot_places(starts, sizes, width)
        if slots is not None:
            slots[entries[counts]] = filled + np.flatnonzero(counts)
            filled += counts.size
        numbers = None if edges is None else build.pick(edges, entries, counts)
        return Bucket(build.pick(sources, entries, counts), build.int32_array(sizes), build.int32_array(nodes), numbers)

    whole = np.flatnonzero(widest <= limit)
    long = np.flatnonzero(widest > limit)
    widths = build.log_width(widest[whole])
    groups = [(whole[widths == exponent], 1 << int(exponent)) for exponent in np.unique(widths)]
    buckets = tuple(bucket(starts[ranks], sizes[ranks], nodes[ranks], width) for ranks, width in groups)
    if not long.size:
        return BucketRows(buckets, (), None, build.int32_array(sizes), None, None)
    count = -(-widest[long] // limit)
    before = build.offsets_of(count)[:-1]
    row = np.repeat(long, count)
    first = (np.arange(row.size) - np.repeat(before, count)) * limit
    parts = bucket(starts[row] + first, np.clip(sizes[row] - first, 0, limit), nodes[row], limit)
    rest = ranked_rows(count, before, -(-sizes[long] // limit), long, np.arange(row.size), None, limit, None)
    return BucketRows(buckets, (parts,), rest, build.int32_array(sizes), None, None)


@partial(jax.jit, static_argnames=("config", "train"))
def program(
    config: Config, params: GNNParams, table: PartitionedTable, x: Array, state: State, train: bool, key: Array | None
) -> tuple[Array, State]:
    scores, state = gnn.apply(config, params, table, x, state, train=train, key=key, rows=table.rows)
    return table.unpermute(scores), state


def run(
    config: Config,
    params: GNNParams,
    table: PartitionedTable,
    x: Float[Array | np.ndarray, "nodes F"],
    state: State = (),
    *,
    train: bool = False,
    key: Array | None = None,
) -> tuple[Float[Array, "nodes C"], State]:
    """Runs a model on a partitioned graph, from the caller's order of nodes to the caller's order; see `models.gnn.apply`.

    Results are those of one device up to the order of sums. Dropout draws other numbers than on one device.

    Args:
        params, state: the same on every process.
        x: features of all nodes.

    Raises:
        ValueError: features that are another graph's or the model's not, or hold a NaN (the first place is named).
    """
    return program(config, params, table, table.permute(check_numbers(x, "features")), state, train, key)
