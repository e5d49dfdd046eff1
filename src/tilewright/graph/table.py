"""Neighbour table: a graph as arrays of fixed shape, with reductions over neighbours.

A table may renumber its nodes, by row width or for locality. The functions `aggregate.aggregate` and `attention.attend` use the
caller's order; the methods of the table use table order, so that the layers of a model need no permutation between them.

Legend: N nodes, M sources, E edges, F features, H heads, D features of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from tilewright.graph import build, messages
from tilewright.graph.edges import (
    Edges,
    from_edge_index,
    missing_loops,
    negative_degree,
    read_edges,
    repeated_loops,
    with_self_loops,
)
from tilewright.graph.gradients import SlotGraph, dropout_factors, neighbour_attention, neighbour_reduce, permute
from tilewright.graph.rows import BucketRows, Rows
from tilewright.kernels import select
from tilewright.kernels.select import Reduce

LAYOUTS = ("auto", "padded", "bucketed", "csr")
ORDERS = ("given", "rcm", "metis")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NeighborTable:
    """Neighbours of a graph's nodes in rows of fixed shape.

    Attributes:
        forward: sources of each node.
        backward: destinations of each source.
        weights: edge weights, in the caller's order; None if all are 1.
        loops: 1 minus the number of each node's self-loops, in table order, float32 `[N]`.
        repeated: mask of the self-loops that a later self-loop of the same node follows, in the caller's order; None without.
        order: caller's number of each source in table order; None for the same order.
        places: table's number of each of the caller's sources; None for the same order.
        num_nodes: number of nodes, the rows of a reduction's result.
        num_sources: number of sources, the rows of a reduction's input, at least `num_nodes`. The first `num_nodes` sources are
            the nodes, unless the graph is a relation between two kinds of nodes.
        given_sources: number of the caller's sources. If there are fewer sources than nodes, `permute` appends rows of zeros.
        num_edges: number of edges in the arrays, including padding.
        layout: layout of the rows, see `make_table`.
    """

    forward: Rows
    backward: Rows
    weights: Float[Array, " E"] | None
    loops: Any  # trees of samples also hold shapes, and stacked arrays
    repeated: Bool[Array, " E"] | None
    order: Int32[Array, " M"] | None
    places: Int32[Array, " M"] | None
    num_nodes: int = field(metadata={"static": True})
    num_sources: int = field(metadata={"static": True})
    given_sources: int = field(metadata={"static": True})
    num_edges: int = field(metadata={"static": True})
    layout: str = field(metadata={"static": True})

    @classmethod
    def from_edges(
        cls, edge_index: Any, num_nodes: int | None = None, weights: Any = None, num_sources: int | None = None, **options: Any
    ) -> "NeighborTable":
        """Builds a table from an `edge_index` `[2, E]` of sources and destinations.

        Args:
            edge_index: integer array, or a pair of arrays.
            num_nodes: number of destination nodes; None takes the largest id plus one.
            weights: edge weights, `[E]`.
            num_sources: number of source nodes; None takes `num_nodes`. Another number makes a relation between two kinds of
                nodes.
            options: options of `make_table`.

        Raises:
            ValueError: ids are not integers or out of range, or weights do not fit; the message names the first wrong edge.
        """
        return make_table(from_edge_index(edge_index, num_nodes, num_sources, weights), **options)

    @classmethod
    def build(cls, graph: Any, num_nodes: int | None = None, weights: Any = None, **options: Any) -> "NeighborTable":
        """Builds a table from an edge_index, a SciPy matrix, a networkx graph or a PyG `Data`; see `edges.read_edges`.

        `options` are those of `make_table`.

        Raises:
            ValueError: the graph is none of these, or its edges are invalid.
        """
        return make_table(read_edges(graph, num_nodes, weights), **options)

    @property
    def transposed(self) -> "NeighborTable":
        """Table with reversed edges, which shares all arrays.

        Raises:
            ValueError: the numbers of sources and nodes differ.
        """
        if self.given_sources != self.num_nodes:
            raise ValueError(f"expected as many sources as nodes, found {self.given_sources} and {self.num_nodes}")
        return NeighborTable(
            self.backward,
            self.forward,
            self.weights,
            self.loops,
            self.repeated,
            self.order,
            self.places,
            self.num_nodes,
            self.num_sources,
            self.given_sources,
            self.num_edges,
            self.layout,
        )

    def permute(self, x: Float[Array | np.ndarray, "given ..."]) -> Float[Array, "M ..."]:
        """Permutes values of the sources from the caller's order to table order."""
        x = check_rows(x, self.given_sources)
        if self.given_sources < self.num_sources:
            x = jnp.pad(x, ((0, self.num_sources - self.given_sources), *[(0, 0)] * (x.ndim - 1)))
        return x if self.order is None or self.places is None else permute(x, self.order, self.places)

    def permute_nodes(self, y: Float[Array | np.ndarray, "N ..."]) -> Float[Array, "N ..."]:
        """Permutes values of the nodes from the caller's order to table order."""
        y = check_rows(y, self.num_nodes)
        if self.order is None or self.places is None:
            return y
        return permute(y, self.order[: self.num_nodes], self.places[: self.num_nodes])

    def unpermute(self, y: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """Permutes values of the nodes from table order to the caller's order."""
        y = check_rows(y, self.num_nodes)
        if self.order is None or self.places is None:
            return y
        return permute(y, self.places[: self.num_nodes], self.order[: self.num_nodes])

    def aggregate(
        self,
        x: Float[Array, "M F"],
        reduce: str = "sum",
        weights: Float[Array, " E"] | None = None,
        normalisation: str | None = None,
    ) -> Float[Array, "N F"]:
        """Reduces over each node's neighbours, all in table order; see `tilewright.graph.aggregate.aggregate`."""
        weights = self.checked_weights(weights)
        reduction = check_reduction(reduce)
        if x.ndim != 2 or x.shape[0] != self.num_sources:
            raise ValueError(f"expected features of shape [{self.num_sources}, F], found {list(x.shape)}")
        check_features(x)
        if normalisation is None:
            return neighbour_reduce(self.forward, self.backward, x, weights, reduction)
        if normalisation not in ("symmetric", "row") or reduce != "sum":
            raise ValueError(
                f"expected the normalisation symmetric or row with reduce='sum', found {normalisation!r} with reduce={reduce!r}"
            )
        if normalisation == "row":
            return self.row_normalised(x, weights)
        return self.symmetric(x, weights)

    def row_normalised(self, x: Float[Array, "M F"], weights: Float[Array, " E"] | None) -> Float[Array, "N F"]:
        """Computes `D^-1 A x`, where D has the sum of the weights of each node's edges."""
        if weights is None:
            return neighbour_reduce(self.forward, self.backward, x, None, "mean")
        total = self.weight_sums(weights)
        scale = jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1), 0)[:, None]
        summed = neighbour_reduce(self.forward, self.backward, x, weights, "sum")
        return (summed.astype(jnp.float32) * scale).astype(x.dtype)

    def symmetric(self, x: Float[Array, "M F"], weights: Float[Array, " E"] | None) -> Float[Array, "N F"]:
        """Computes `D^-1/2 (A + I) D^-1/2 x` (Kipf & Welling 2017, equation 2); nodes with a self-loop get no other one.

        Only the last self-loop of a node counts, as in PyG.
        """
        if self.given_sources < self.num_nodes:
            found = f"{self.given_sources} and {self.num_nodes}"
            raise ValueError(f"expected at least as many sources as nodes for the symmetric normalisation, found {found}")
        loops = self.loops
        if weights is not None:
            loops = jnp.maximum(loops, 0)
            weights = weights if self.repeated is None else jnp.where(self.repeated, 0, weights)
        near = self.degree_root(self.weight_sums(weights) + loops)[:, None]
        if self.num_sources == self.num_nodes:
            far = near
        else:
            beyond = jnp.zeros(self.num_sources - self.num_nodes, jnp.float32)
            far = self.degree_root(self.weight_sums(weights, back=True) + jnp.concatenate([loops, beyond]))[:, None]
        scaled = (x.astype(jnp.float32) * far).astype(x.dtype)
        summed = neighbour_reduce(self.forward, self.backward, scaled, weights, "sum").astype(jnp.float32)
        by_loops = scaled[: self.num_nodes].astype(jnp.float32) * loops[:, None]
        return ((summed + by_loops) * near).astype(x.dtype)

    def degree_root(self, degrees: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """Computes `inverse_root` of degrees in table order.

        Raises:
            ValueError: a degree is negative. In a compiled program the node's results are NaN instead, as in PyG.
        """
        if not isinstance(degrees, jax.core.Tracer) and (wrong := np.flatnonzero(np.asarray(degrees) < 0)).size:
            row = int(wrong[0])
            raise negative_degree(row if self.order is None else int(self.order[row]), float(degrees[row]))
        return inverse_root(degrees)

    def weight_sums(self, weights: Float[Array, " E"] | None, back: bool = False) -> Float[Array, " rows"]:
        """Sums the edge weights of each node; with `back`, of each source."""
        rows, other = (self.backward, self.forward) if back else (self.forward, self.backward)
        if weights is None:
            return rows.degrees.astype(jnp.float32)
        size = self.num_nodes if back else self.num_sources
        return neighbour_reduce(rows, other, jnp.ones((size, 1), jnp.float32), weights, "sum")[:, 0]

    def attend(
        self,
        x: Float[Array, "M H D"],
        source_score: Float[Array, "M H"],
        target_score: Float[Array, "N H"],
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        key: Array | None = None,
    ) -> Float[Array, "N H D"]:
        """Attends over each node's neighbours, all in table order; see `tilewright.graph.attention.attend`."""
        check_features(x)
        check_scores(source_score, target_score)
        heads = x.shape[1] if x.ndim == 3 else -1
        expected = [(self.num_sources, heads), (self.num_nodes, heads)]
        found = [source_score.shape, target_score.shape]
        if x.ndim != 3 or x.shape[0] != self.num_sources or found != expected:
            raise ValueError(
                f"expected features [M, H, D] and scores [M, H] and [N, H], M = {self.num_sources} and N = {self.num_nodes}, "
                f"found {list(x.shape)}, {list(found[0])} and {list(found[1])}"
            )
        factors = dropout_factors(self.num_edges, heads, dropout, key)
        return neighbour_attention(self.forward, self.backward, x, source_score, target_score, factors, negative_slope)

    def propagate(
        self,
        x: Any,
        message: messages.Function | None = None,
        reduce: str | Sequence[str] = "sum",
        *,
        weight: messages.Function | Array | None = None,
        **values: Any,
    ) -> Float[Array, "N ..."]:
        """Computes and reduces messages, with values of nodes in table order; see `tilewright.graph.messages.propagate`."""
        names = messages.reductions(reduce)
        if message is None and weight is None and not values:
            weighted = self.weights is not None and any(name in ("var", "std") for name in names)
            if not any(select.refuses_message_reduce(False, weighted, name) for name in names):
                flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
                each = [self.reduce_features(flat, name).reshape(-1, *x.shape[1:]) for name in names]
                return each[0] if len(each) == 1 else jnp.concatenate(each, axis=-1)
            if self.weights is not None:
                message = messages.weighted_source
                values = {"edge_weight": self.weights}
        slots = SlotGraph(self.forward, self.backward)
        return messages.pass_messages(slots, x, message, reduce, weight, values, (self.num_sources, self.num_nodes))

    def reduce_features(self, x: Float[Array, "M F"], reduce: str) -> Float[Array, "N F"]:
        """Reduces the features of each node's sources with kernels, also to variances and standard deviations."""
        if reduce not in ("var", "std"):
            return self.aggregate(x, reduce)
        wide = x.astype(jnp.float32)
        mean = self.aggregate(wide, "mean")
        variance = self.aggregate(wide * wide, "mean") - mean * mean
        return (variance if reduce == "var" else messages.deviation(variance)).astype(x.dtype)

    def checked_weights(self, weights: Float[Array, " E"] | None) -> Float[Array, " E"] | None:
        """Returns the given weights in float32, or else the table's weights. Raises a `ValueError` for another shape."""
        if weights is None:
            return self.weights
        if weights.shape != (self.num_edges,):
            raise ValueError(f"expected a weight for each of {self.num_edges} edges, found shape {list(weights.shape)}")
        return weights.astype(jnp.float32)

    def buckets(self) -> list[tuple[int, int]]:
        """Lists rows and width of each bucket, including later stages."""
        shapes = []
        stage = self.forward
        while isinstance(stage, BucketRows):
            shapes += [bucket.sources.shape for bucket in stage.blocks]
            stage = stage.rest
        return shapes

    def summary(self) -> str:
        """Describes shapes, slots per edge, and bytes in three lines."""
        shapes = self.buckets()
        slots = sum(rows * width for rows, width in shapes) if shapes else self.num_edges
        size = sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(self)}.values())
        sources = f" from {self.given_sources:,} sources" if self.given_sources != self.num_nodes else ""
        kind = "unweighted" if self.weights is None else "weighted"
        rows = ", ".join(f"{rows:,}×{width}" for rows, width in shapes) if shapes else f"{slots:,} neighbours in one list"
        return (
            f"{self.num_nodes:,} nodes{sources}, {self.num_edges:,} {kind} edges, layout {self.layout}\n"
            f"rows: {rows}\n"
            f"{slots / max(1, self.num_edges):.2f} slots per edge, {size / 1e6:.1f} MB with the transposed graph"
        )

    def __str__(self) -> str:
        return self.summary()

    def __rich__(self) -> str:
        return self.summary()


def check_features(x: Array) -> None:
    """Raises a `ValueError` for features that are neither float32 nor bfloat16."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"expected features in float32 or bfloat16, found {x.dtype}")


def check_scores(*scores: Array) -> None:
    """Raises a `ValueError` for scores that are not floating-point numbers."""
    for each in scores:
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise ValueError(f"expected floating-point scores, found {each.dtype}")


def check_reduction(reduce: str) -> Reduce:
    for choice in get_args(Reduce):
        if reduce == choice:
            return choice
    raise ValueError(f"expected to reduce by one of {', '.join(get_args(Reduce))}, found {reduce!r}")


def inverse_root(values: Float[Array, " N"]) -> Float[Array, " N"]:
    """Computes `values ** -0.5`; 0 for 0, and NaN for negative values."""
    fits = values != 0
    return jnp.where(fits, jax.lax.rsqrt(jnp.where(fits, values, 1)), 0)


def check_rows(values: Any, rows: int) -> Array:
    """Converts values to an array. Raises a `ValueError` unless there is one value for each of `rows` nodes."""
    values = jnp.asarray(values)
    if values.ndim == 0 or values.shape[0] != rows:
        found = values.shape[0] if values.ndim else "a single number"
        raise ValueError(f"expected values of {rows} nodes, found {found}: the table belongs to another graph")
    return values


def default_layout() -> str:
    """Returns "csr" if CPU kernels reduce lists of neighbours, else "bucketed"."""
    return "csr" if select.has_csr_kernels() else "bucketed"


def make_table(
    edges: Edges,
    layout: str = "auto",
    order: str = "given",
    limit: int = 64,
    self_loops: bool = False,
    widths: tuple[int, int] | None = None,
    capacity: int | None = None,
) -> NeighborTable:
    """Builds a table.

    Args:
        edges: the edges.
        layout: "padded" has one row of slots per node, as wide as the largest degree. "bucketed" numbers the nodes by row
            width, powers of two up to `limit`, and splits longer rows. "csr" has all neighbours in one list. "auto" is "csr" if
            the CPU kernels run, else "bucketed".
        order: "given", or an order that numbers neighbours close to each other: "rcm" (reverse Cuthill-McKee; needs SciPy) or
            "metis" (parts with few edges between them; needs SciPy and pymetis).
        limit: widest row of a bucket, a power of two.
        self_loops: give each node exactly one self-loop, see `edges.with_self_loops`. The table's edges are then the other
            edges in the caller's order, followed by a self-loop per node.
        widths: slots of a padded row, and of a padded row of the transposed graph; by default the largest degrees.
        capacity: number of edges in the arrays, including padding: weights, scores and results of edges have this many rows.
            Padded tables with equal `num_nodes`, `widths` and `capacity`, and "csr" tables with equal `num_nodes` and
            `capacity`, have equal shapes, so that one compiled program runs all of them. Shapes of bucketed tables depend on
            the degrees as well.

    Raises:
        ValueError: an option is unknown, or the graph exceeds `widths` or `capacity`.
        ImportError: the order needs SciPy or pymetis, which is not installed.
    """
    check_options(edges, layout, order, limit, widths)
    if self_loops and edges.num_sources < edges.num_nodes:
        found = f"{edges.num_sources} and {edges.num_nodes}"
        raise ValueError(f"expected at least as many sources as nodes for self_loops, found {found}")
    layout = default_layout() if layout == "auto" else layout
    given_sources = edges.num_sources
    edges = with_self_loops(edges) if self_loops else edges
    edges = replace(edges, num_sources=max(edges.num_sources, edges.num_nodes))
    count = edges.sources.size
    room = count if capacity is None else capacity
    if count > room:
        raise ValueError(f"expected at most capacity={capacity} edges, found {count}")
    numbering = number_nodes(edges, layout, order, limit)
    places = None if numbering is None else build.inverse(numbering)
    rows, sources = (ends if places is None else places[ends] for ends in (edges.destinations, edges.sources))
    forward, backward = both_ways(rows, sources, edges, layout, limit, widths or (None, None), room)
    weights = None if edges.weights is None else jnp.asarray(np.pad(edges.weights, (0, room - count)))
    node_order, node_places = (None if ids is None else build.int32_array(ids) for ids in (numbering, places))
    missing = missing_loops(replace(edges, weights=None))
    repeated = repeated_loops(edges)
    loops = jnp.asarray(missing if numbering is None else missing[numbering[: edges.num_nodes]])
    repeated_edges = jnp.asarray(np.pad(repeated, (0, room - count))) if repeated.any() else None
    return NeighborTable(
        forward,
        backward,
        weights,
        loops,
        repeated_edges,
        node_order,
        node_places,
        edges.num_nodes,
        edges.num_sources,
        given_sources,
        room,
        layout,
    )


def both_ways(
    rows: build.Ids,
    sources: build.Ids,
    edges: Edges,
    layout: str,
    limit: int,
    widths: tuple[int | None, int | None],
    room: int,
) -> tuple[Rows, Rows]:
    """Builds the rows of the nodes and the rows of the sources from edges in table order; neighbours in a row are sorted."""
    by_source = build.stable_order(sources, edges.num_sources)
    ahead = by_source[build.stable_order(rows[by_source], edges.num_nodes)]
    back = ahead[build.stable_order(sources[ahead], edges.num_sources)]
    forward = make_rows(rows[ahead], sources[ahead], ahead, edges.num_nodes, layout, limit, widths[0], room)
    backward = make_rows(sources[back], rows[back], back, edges.num_sources, layout, limit, widths[1], room)
    if jax.tree.structure(forward) == jax.tree.structure(backward):
        backward = jax.tree.map(
            lambda a, b: a if np.array_equal(a, b) else b, forward, backward
        )  # shared for a symmetric graph
    return forward, backward


def check_options(edges: Edges, layout: str, order: str, limit: int, widths: tuple[int, int] | None) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"expected the layout to be one of {', '.join(LAYOUTS)}, found {layout!r}")
    if order not in ORDERS:
        raise ValueError(f"expected the order to be one of {', '.join(ORDERS)}, found {order!r}")
    if limit < 2 or limit & (limit - 1):
        raise ValueError(f"expected limit to be a power of two of at least 2, found {limit}")
    if widths is not None and layout != "padded":
        raise ValueError(f"expected widths for the layout padded only, found {layout!r}")
    if order != "given" and edges.num_sources != edges.num_nodes:
        found = f"{edges.num_sources} and {edges.num_nodes}"
        raise ValueError(f"expected as many sources as nodes for order={order!r}, found {found}")


def number_nodes(edges: Edges, layout: str, order: str, limit: int) -> build.Ids | None:
    """Returns the caller's number of each source in table order; None for the same order."""
    numbering = np.arange(edges.num_sources)
    if order != "given":
        numbering = build.locality_order(order, edges.destinations, edges.sources, edges.num_nodes)
    if layout == "bucketed":
        degrees = np.bincount(edges.destinations, minlength=edges.num_nodes)
        keys = build.bucket_keys(degrees[numbering[: edges.num_nodes]], limit)
        numbering[: edges.num_nodes] = numbering[: edges.num_nodes][np.argsort(keys, kind="stable")]
    return None if (numbering == np.arange(edges.num_sources)).all() else numbering


def make_rows(
    rows: build.Ids, sources: build.Ids, edges: build.Ids, count: int, layout: str, limit: int, width: int | None, room: int
) -> Rows:
    """Builds rows from edges sorted by row, in the given layout."""
    degrees = np.bincount(rows, minlength=count)
    offsets = build.row_offsets(degrees)
    if layout == "csr":
        return build.csr_rows(offsets, sources, edges, room)
    if layout == "bucketed":
        return build.bucket_rows(offsets, sources, edges, limit, room)
    if width is not None and degrees.max(initial=0) > width:
        row = int(np.argmax(degrees > width))
        raise ValueError(f"expected rows of at most {width} neighbours, found {int(degrees[row])} in row {row}")
    return build.padded_rows(offsets, sources, edges, width, room)
