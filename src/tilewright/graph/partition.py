"""Neighbour table with nodes partitioned over the devices of a mesh axis.

`PartitionedTable` implements `models.gnn.Neighbours` for arrays sharded over the axis, so that model and training step are the
same program as on one device. XLA partitions the dense parts and inserts their reductions (statistics of batch norm, loss, and
gradients of the replicated parameters); the module `exchange` implements the reductions over neighbours.
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
from tilewright.graph.edges import Edges, find_negative_degree, missing_loops, negative_degree, read_edges, with_self_loops
from tilewright.graph.exchange import ExchangePlan, GraphPart, Shard
from tilewright.graph.rows import Bucket, BucketRows
from tilewright.graph.table import ORDERS, default_layout
from tilewright.models import gnn
from tilewright.models.gnn import Config, GNNParams, State

EdgeList = tuple[build.Ids, build.Ids, build.Ids]
"""Edges sorted by row and source: rows, sources, and edge numbers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartitionedTable:
    """Neighbour table with a block of nodes on each device.

    Between `permute` and `unpermute`, arrays have the concatenated rows of all blocks, padded to equal sizes, and are sharded
    over the axis.

    Attributes:
        shards: block of each device; all arrays have a leading dimension of devices.
        order: caller's number of each row; the number of nodes for padding.
        places: row of each of the caller's nodes.
        nodes: number of nodes without padding.
        num_edges: number of edges.
        mesh: mesh of the devices.
        negative: first node with a negative sum of weights, and the sum, see `edges.find_negative_degree`.
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
        """Partitions a graph into blocks of nodes, consecutive in `order`, with about equal numbers of nodes and edges.

        All processes build the same graph, and keep the arrays of their devices.

        Args:
            graph: an edge_index, a SciPy matrix, a networkx graph or a PyG `Data`; see `edges.read_edges`.
            mesh: the mesh.
            num_nodes: number of nodes, for an edge_index.
            weights: edge weights, instead of the graph's.
            axis: axis of the mesh; optional for a mesh with one axis.
            exchange: "ring" passes blocks of features around a ring, so that a device has at most two blocks in memory, and
                skips pairs of blocks without edges. "all_gather" gathers all features on each device first.
            layout: see `table.make_table`; "padded" is not supported.
            order: see `table.make_table`; "rcm" leaves few pairs of blocks with edges. "metis" makes the blocks itself: METIS
                partitions the nodes so that few edges join different blocks.
            limit: see `table.make_table`.
            self_loops: see `table.make_table`.

        Raises:
            ValueError: an option is unknown, or the edges are invalid.
            ImportError: the order needs SciPy or pymetis, which is not installed.
        """
        axis = checked_axis(mesh, axis)
        for option, value, choices in (
            ("exchange", exchange, ("ring", "all_gather")),
            ("layout", layout, ("auto", "bucketed", "csr")),
            ("order", order, ORDERS),
        ):
            if value not in choices:
                raise ValueError(f"expected the {option} {' or '.join(choices)}, found {value!r}")
        if limit < 2 or limit & (limit - 1):
            raise ValueError(f"expected limit to be a power of two of at least 2, found {limit}")
        edges = read_edges(graph, num_nodes, weights)
        if edges.num_sources != edges.num_nodes:
            raise ValueError(f"expected as many sources as nodes, found {edges.num_sources} and {edges.num_nodes}")
        edges = with_self_loops(edges) if self_loops else edges
        return partition(edges, mesh, axis, exchange, default_layout() if layout == "auto" else layout, order, limit)

    @property
    def num_nodes(self) -> int:
        """Number of rows of all blocks, including padding."""
        return self.order.shape[0]

    @property
    def num_sources(self) -> int:
        return self.num_nodes

    @property
    def rows(self) -> Bool[Array, " rows"]:
        """Mask of the rows that are not padding."""
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
        """Attends over each node's neighbours; see `tilewright.graph.attention.attend`."""
        return attended(self, x, source_score, target_score, key, negative_slope, dropout)

    def map_shards(self, compute: Any, *arrays: Float[Array, "rows ..."], key: Array | None = None) -> Float[Array, "rows ..."]:
        """Computes `compute(shard, key, *arrays)` on each device, with its rows and a key of its own."""
        for array in arrays:
            if array.shape[0] != self.num_nodes:
                raise ValueError(f"expected the {self.num_nodes} rows of `permute`, found {array.shape[0]}")

        def inside(shards: Shard, keys: Array | None, *arrays: Array) -> Array:
            return compute(shards.local(), None if keys is None else keys[0], *arrays)

        # All inputs and outputs are sharded, so check_vma has nothing to check, and the kernels do not support it.
        mapped = jax.shard_map(inside, mesh=self.mesh, in_specs=self.spec, out_specs=self.spec, check_vma=False)
        devices = self.mesh.shape[self.shards.plan.axis]
        return mapped(self.shards, None if key is None else jax.random.split(key, devices), *arrays)

    def permute(self, x: Any, fill: Any = 0) -> Array:
        """Permutes values of the nodes, `[nodes, ...]`, from the caller's order to block order, with `fill` in padding.

        Outside a compiled program, `x` may be any host array; each device receives its rows.
        """
        x = x if isinstance(x, jax.core.Tracer) else np.asarray(x)
        if x.ndim == 0 or x.shape[0] != self.nodes:
            found = x.shape[0] if x.ndim else "a single number"
            raise ValueError(f"expected values of {self.nodes} nodes, found {found}: the table belongs to another graph")
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
        """Permutes values of the nodes to the caller's order; the result is replicated.

        Its gradient scatters, so in training permute the labels to block order instead.
        """
        if y.shape[0] != self.num_nodes:
            raise ValueError(f"expected {self.num_nodes} rows, found {y.shape[0]}: the table belongs to another graph")
        return gather_rows(y, self.places, NamedSharding(self.mesh, PartitionSpec()))

    def summary(self) -> str:
        """Describes devices, rows, parts, and bytes in two lines."""
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
    """Compiles the reduction as one program, since eager `jax.shard_map` is slow."""
    return table.map_shards(lambda shard, _, x: shard.aggregate(x, reduce=reduce, normalisation=normalisation), x)


@partial(jax.jit, static_argnames=("slope", "dropout"))
def attended(
    table: PartitionedTable, x: Array, source: Array, target: Array, key: Array | None, slope: float, dropout: float
) -> Array:
    return table.map_shards(
        lambda shard, key, *operands: shard.attend(*operands, slope, dropout, key), x, source, target, key=key
    )


@partial(jax.jit, static_argnums=2)
def gather_rows(y: Array, places: Array, sharding: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(y.at[places].get(mode="promise_in_bounds"), sharding)


def checked_axis(mesh: Mesh, axis: str | None) -> str:
    """Returns the mesh axis to shard over. Raises a `ValueError` for an unknown or ambiguous axis."""
    names = mesh.axis_names
    if axis is None and len(names) == 1:
        return names[0]
    if axis is None or axis not in names:
        raise ValueError(f"expected one of the mesh's axes {names}, found {axis!r}")
    return axis


def cut(degrees: build.Ids, count: int) -> build.Ids:
    """Returns the starts of `count` blocks and the end of the last; all nodes together weigh as much as all edges."""
    cost = np.cumsum(degrees / max(1, degrees.sum()) + 1 / max(1, degrees.size))
    ends = np.searchsorted(cost, np.arange(1, count) / count * cost[-1:].sum() * (1 + 1e-9), side="right")
    return np.concatenate([[0], ends, [degrees.size]])


def partition(edges: Edges, mesh: Mesh, axis: str, exchange: str, layout: str, order: str, limit: int) -> PartitionedTable:
    """Builds the partitioned table of checked edges."""
    nodes = edges.num_nodes
    devices = mesh.shape[axis]
    degrees = np.bincount(edges.destinations, minlength=nodes)
    if order == "metis":
        sizes = degrees + max(1, -(-edges.sources.size // max(1, nodes)))  # all nodes together weigh as much as all edges
        part = build.metis_parts(edges.destinations, edges.sources, nodes, devices, sizes)
        numbering = np.argsort(part, kind="stable")
        starts = build.row_offsets(np.bincount(part, minlength=devices))
    else:
        numbering = np.arange(nodes)
        if order == "rcm":
            numbering = build.locality_order(order, edges.destinations, edges.sources, nodes)
        starts = cut(degrees[numbering], devices)
    size = max(1, int(np.diff(starts).max()))  # rows of a block
    block = np.repeat(np.arange(devices), np.diff(starts))
    rows = block * size + np.arange(nodes) - starts[block]
    order_of_rows = np.full(devices * size, nodes)
    order_of_rows[rows] = numbering
    places = np.empty(nodes, np.int64)
    places[numbering] = rows

    hops, trees, arrays = partition_edges(edges, places, size, devices, exchange, layout, limit)
    loops = missing_loops(edges)
    sums = np.bincount(edges.destinations, edges.weights, nodes)
    per_row = [np.zeros(devices * size, dtype) for dtype in (np.int32, np.float32, np.float32)]
    for values, target in zip((degrees, sums, loops), per_row, strict=True):
        target[places] = values
    shard_array = partial(place, sharding=NamedSharding(mesh, PartitionSpec(axis)))
    plan = ExchangePlan(axis, exchange, hops, trees)
    row_degrees, row_sums, row_loops = (shard_array(values.reshape(devices, size)) for values in per_row)
    shards = Shard(jax.tree.map(shard_array, arrays), row_degrees, row_sums, row_loops, plan)
    replicated = NamedSharding(mesh, PartitionSpec())
    placed_order, placed_places = (place(values.astype(np.int32), replicated) for values in (order_of_rows, places))
    return PartitionedTable(shards, placed_order, placed_places, nodes, edges.sources.size, mesh, find_negative_degree(edges))


def place(values: np.ndarray, sharding: NamedSharding) -> Array:
    """Moves an array to the devices of a mesh; each process fills the shards of its devices."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def partition_edges(
    edges: Edges, places: build.Ids, size: int, devices: int, exchange: str, layout: str, limit: int
) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[tuple[np.ndarray, ...], ...]]:
    """Builds the parts of an exchange: their hops, tree structures, and arrays with a leading dimension of devices.

    Args:
        edges: the edges.
        places: row of each of the caller's nodes.
        size: rows per block.
        devices: number of devices.
        exchange: "ring" or "all_gather".
        layout: "bucketed" or "csr".
        limit: widest row of a bucket.
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
        forward = equal_rows([sort_by_row(r, s) for r, s in lists], size, layout, limit, room)
        backward = equal_rows([sort_by_row(s, r) for r, s in lists], width, layout, limit, room)
        weights = [None if edges.weights is None else np.pad(edges.weights[ids], (0, room - ids.size)) for ids in members]
        parts = [jax.tree.flatten(GraphPart(*three)) for three in zip(forward, backward, weights, strict=True)]
        trees.append(parts[0][1])
        assert all(tree == trees[-1] for _, tree in parts), "the parts of a hop have the same structure"
        arrays.append(
            tuple(np.stack([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*(p for p, _ in parts), strict=True))
        )
    return hops, tuple(trees), tuple(arrays)


def sort_by_row(rows: build.Ids, sources: build.Ids) -> EdgeList:
    order = np.lexsort((sources, rows))
    return rows[order], sources[order], order


def equal_rows(lists: list[EdgeList], count: int, layout: str, limit: int, room: int) -> list[Any]:
    """Builds the rows of each list, with the same structure and shapes."""
    degrees = np.stack([np.bincount(rows, minlength=count) for rows, _, _ in lists])
    if layout == "bucketed":
        return equal_buckets(degrees, lists, limit, room)
    offsets = [build.row_offsets(row) for row in degrees]
    return [build.csr_rows(each, sources, ids, room) for each, (_, sources, ids) in zip(offsets, lists, strict=True)]


def equal_buckets(degrees: build.Ids, lists: list[EdgeList], limit: int, room: int) -> list[BucketRows]:
    """Builds bucketed rows with the same widths in all lists.

    The rows of each list are ranked by degree; all rows of a rank have the width of the longest one.

    Args:
        degrees: degrees of each list's rows, `[lists, rows]`.
        lists: sorted edges.
        limit: widest row of a bucket.
        room: number of edges in the arrays of a list, including padding.
    """
    ranked = np.argsort(degrees, axis=1, kind="stable")
    sizes = np.take_along_axis(degrees, ranked, 1)
    starts = np.take_along_axis(np.cumsum(degrees, axis=1) - degrees, ranked, 1)
    widest = sizes.max(axis=0)
    bucket_rows = []
    for row, ranks, start, size, (_, sources, ids) in zip(degrees, ranked, starts, sizes, lists, strict=True):
        slots = np.zeros(sources.size, np.int64)
        rows = ranked_rows(widest, start, size, ranks, sources, ids, limit, slots)
        places = np.full(room, sum(bucket.sources.size for bucket in rows.blocks))
        places[ids] = slots
        bucket_rows.append(
            replace(
                rows,
                degrees=build.int32_array(row),
                slots=build.int32_array(places),
                order=build.int32_array(build.inverse(ranks)),
            )
        )
    return bucket_rows


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
    """Builds bucketed rows with given widths; rows longer than `limit` are split.

    Args:
        widest: least number of slots of each row, in ascending order.
        starts: first entry of each row in `sources` and `edges`.
        sizes: number of entries of each row.
        nodes: result row of each row.
        sources: source of each entry.
        edges: caller's edge of each entry; None for entries that are not edges.
        limit: widest row of a bucket.
        slots: the slot of each entry is WRITTEN to this array.
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
    before = build.row_offsets(count)[:-1]
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
    """Runs a model on a partitioned graph, with inputs and outputs in the caller's order; see `models.gnn.apply`.

    Results equal those of one device up to the order of sums. Dropout draws other random numbers than on one device.

    Args:
        config: configuration of the model.
        params: parameters, the same on all processes.
        table: the graph.
        x: features of all nodes.
        state: running statistics, the same on all processes.
        train: run in training mode.
        key: random key of the dropout.

    Raises:
        ValueError: features do not fit the graph or the model, or have a NaN (the message names the first place).
    """
    return program(config, params, table, table.permute(check_numbers(x, "features")), state, train, key)
