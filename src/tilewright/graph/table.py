"""The neighbour table: a graph as arrays of fixed shape, and reductions over its neighbours.

A table may number its nodes anew, by the width of their rows or for locality. `aggregate` and `attend` of this package take
and give the caller's order; the methods here work in table order throughout, which is what a model wants between its layers.

Legend: N nodes, M sources, E edges, F features, H heads, D features of a head.
"""

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32

from tilewright.graph import build
from tilewright.graph.edges import (
    Edges,
    from_edge_index,
    missing_loops,
    negative_degree,
    read_edges,
    repeated_loops,
    with_self_loops,
)
from tilewright.graph.gradients import kept_edges, neighbour_attention, neighbour_reduce, permute
from tilewright.graph.rows import BucketRows, Rows
from tilewright.kernels import select
from tilewright.kernels.select import Reduce

LAYOUTS = ("auto", "padded", "bucketed", "csr")
ORDERS = ("given", "rcm")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NeighborTable:
    """A graph's neighbours in rows of fixed shape.

    Attributes:
        forward: for each node its sources.
        backward: for each source the nodes that it is a source of.
        weights: of the edges, in the caller's order; None if all are 1.
        loops: what each node's self-loops lack to weigh 1 together, all edges having the weight 1; in table order. 1 for a node
            without one, 0 with one, negative with several.
        repeated: mask of the self-loops behind which the same node has another one, in the caller's order; None if there are
            none.
        order: the caller's number of each source in table order; None if it is the same.
        places: the table's number of each of the caller's sources; None if it is the same.
        num_nodes: nodes that come out of a reduction.
        num_sources: nodes that go in, at least `num_nodes`; the first `num_nodes` of them are the nodes that come out, unless
            the graph is a relation between two kinds of nodes.
        given_sources: the caller's sources. Where they are fewer than the nodes, `permute` puts rows of zeros behind them.
        num_edges: edges that the arrays have room for.
    """

    forward: Rows
    backward: Rows
    weights: Float[Array, " E"] | None
    loops: Float[Array, " N"]
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
        cls, edge_index: Any, num_nodes: int | None = None, weights: Any = None, num_sources: int | None = None, **how: Any
    ) -> "NeighborTable":
        """The table of `edge_index` `[2, E]`, sources above destinations.

        Args:
            num_nodes: destinations; None takes the largest id plus one.
            weights: of the edges, `[E]`.
            num_sources: None takes `num_nodes`. Another number is that of a relation between two kinds of nodes.
            how: options of `make_table`.

        Raises:
            ValueError: ids that are not integers or out of range, weights that do not fit; with the first offending place.
        """
        return make_table(from_edge_index(edge_index, num_nodes, num_sources, weights), **how)

    @classmethod
    def build(cls, graph: Any, num_nodes: int | None = None, weights: Any = None, **how: Any) -> "NeighborTable":
        """The table of an edge_index, a SciPy matrix, a networkx graph or a PyG `Data`; see `edges.read_edges`.

        Raises:
            ValueError: it is none of these, or its edges are not right.
        """
        return make_table(read_edges(graph, num_nodes, weights), **how)

    @property
    def transposed(self) -> "NeighborTable":
        """The table with every edge turned round. It shares all arrays.

        Raises:
            ValueError: there are other sources than the nodes.
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
        """Brings values of the sources from the caller's order to the table's."""
        x = check_rows(x, self.given_sources)
        if self.given_sources < self.num_sources:
            x = jnp.pad(x, ((0, self.num_sources - self.given_sources), *[(0, 0)] * (x.ndim - 1)))
        return x if self.order is None or self.places is None else permute(x, self.order, self.places)

    def permute_nodes(self, y: Float[Array | np.ndarray, "N ..."]) -> Float[Array, "N ..."]:
        """Brings values of the nodes from the caller's order to the table's."""
        y = check_rows(y, self.num_nodes)
        if self.order is None or self.places is None:
            return y
        return permute(y, self.order[: self.num_nodes], self.places[: self.num_nodes])

    def unpermute(self, y: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """Brings values of the nodes from the table's order to the caller's."""
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
        how = known_reduction(reduce)
        if x.ndim != 2 or x.shape[0] != self.num_sources:
            raise ValueError(f"expected features of shape [{self.num_sources}, F], found {list(x.shape)}")
        check_features(x)
        if normalisation is None:
            return neighbour_reduce(self.forward, self.backward, x, weights, how)
        if normalisation not in ("symmetric", "row") or reduce != "sum":
            raise ValueError(
                f"expected the normalisation symmetric or row, of a sum, found {normalisation!r} with reduce={reduce!r}"
            )
        if normalisation == "row":
            return self.row_normalised(x, weights)
        return self.symmetric(x, weights)

    def row_normalised(self, x: Float[Array, "M F"], weights: Float[Array, " E"] | None) -> Float[Array, "N F"]:
        """`D^-1 A x`, where D holds the sums of the weights of each node's edges."""
        if weights is None:
            return neighbour_reduce(self.forward, self.backward, x, None, "mean")
        total = self.weight_sums(weights)
        scale = jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1), 0)[:, None]
        summed = neighbour_reduce(self.forward, self.backward, x, weights, "sum")
        return (summed.astype(jnp.float32) * scale).astype(x.dtype)

    def symmetric(self, x: Float[Array, "M F"], weights: Float[Array, " E"] | None) -> Float[Array, "N F"]:
        """`D^-1/2 (A + I) D^-1/2 x` (Kipf & Welling 2017, equation 2), where only nodes without a self-loop get one.

        Of several self-loops of a node the last counts alone, as in PyG.
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
        own = scaled[: self.num_nodes].astype(jnp.float32) * loops[:, None]
        return ((summed + own) * near).astype(x.dtype)

    def degree_root(self, degrees: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """`inverse_root` of degrees in table order.

        Raises:
            ValueError: a degree is negative. In a program that is being compiled its node's results are NaN, as in PyG.
        """
        if not isinstance(degrees, jax.core.Tracer) and (wrong := np.flatnonzero(np.asarray(degrees) < 0)).size:
            row = int(wrong[0])
            raise negative_degree(row if self.order is None else int(self.order[row]), float(degrees[row]))
        return inverse_root(degrees)

    def weight_sums(self, weights: Float[Array, " E"] | None, back: bool = False) -> Float[Array, " rows"]:
        """For each node the sum of its edges' weights; with `back`, for each source."""
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
        """Attention over each node's neighbours, all in table order; see `tilewright.graph.attention.attend`."""
        check_features(x)
        check_scores(source_score, target_score)
        heads = x.shape[1] if x.ndim == 3 else -1
        wanted = [(self.num_sources, heads), (self.num_nodes, heads)]
        found = [source_score.shape, target_score.shape]
        if x.ndim != 3 or x.shape[0] != self.num_sources or found != wanted:
            raise ValueError(
                f"expected features [M, H, D] and scores [M, H] and [N, H], M = {self.num_sources} and N = {self.num_nodes}, "
                f"found {list(x.shape)}, {list(found[0])} and {list(found[1])}"
            )
        kept = kept_edges(self.num_edges, heads, dropout, key)
        return neighbour_attention(self.forward, self.backward, x, source_score, target_score, kept, negative_slope)

    def checked_weights(self, weights: Float[Array, " E"] | None) -> Float[Array, " E"] | None:
        """The weights that count: those given, or else the table's own."""
        if weights is None:
            return self.weights
        if weights.shape != (self.num_edges,):
            raise ValueError(f"expected a weight for each of {self.num_edges} edges, found shape {list(weights.shape)}")
        return weights.astype(jnp.float32)

    def buckets(self) -> list[tuple[int, int]]:
        """Rows and width of each array of neighbours, those of later stages too."""
        shapes = []
        stage = self.forward
        while isinstance(stage, BucketRows):
            shapes += [bucket.sources.shape for bucket in stage.blocks]
            stage = stage.rest
        return shapes

    def summary(self) -> str:
        """Shapes, slots per edge, and bytes, in a few lines."""
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
    """Refuses features that are neither float32 nor bfloat16, whose dtype results have."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"expected features in float32 or bfloat16, found {x.dtype}")


def check_scores(*scores: Array) -> None:
    """Refuses scores that are no floating-point numbers, whose dtype weights or gradients have."""
    for each in scores:
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise ValueError(f"expected floating-point scores, found {each.dtype}")


def known_reduction(reduce: str) -> Reduce:
    for known in get_args(Reduce):
        if reduce == known:
            return known
    raise ValueError(f"expected to reduce by one of {', '.join(get_args(Reduce))}, found {reduce!r}")


def inverse_root(values: Float[Array, " N"]) -> Float[Array, " N"]:
    """`values ** -0.5`; 0 where a value is 0, and NaN where it is negative."""
    fits = values != 0
    return jnp.where(fits, jax.lax.rsqrt(jnp.where(fits, values, 1)), 0)


def check_rows(values: Any, rows: int) -> Array:
    """The values as an array. Refuses those that are not one for each of `rows` nodes."""
    values = jnp.asarray(values)
    if values.ndim == 0 or values.shape[0] != rows:
        found = values.shape[0] if values.ndim else "a single number"
        raise ValueError(f"expected values of {rows} nodes, found {found}: this is another graph's table")
    return values


def default_layout() -> str:
    """Lists of neighbours where the CPU kernels reduce them, buckets elsewhere."""
    return "csr" if select.reduces_lists() else "bucketed"


def make_table(
    edges: Edges,
    layout: str = "auto",
    order: str = "given",
    limit: int = 64,
    self_loops: bool = False,
    widths: tuple[int, int] | None = None,
    capacity: int | None = None,
) -> NeighborTable:
    """Builds the table.

    Args:
        layout: "padded": one row of slots for each node, as many as the largest degree. "bucketed": nodes numbered by the
            widths of their rows, powers of two up to `limit`; longer rows are split. "csr": all neighbours in one list.
            "auto": the last where this package's CPU kernels run, "bucketed" elsewhere.
        order: "rcm" numbers nodes so that neighbours lie near each other (reverse Cuthill-McKee; needs SciPy).
        limit: widest row of a bucket, a power of two.
        self_loops: gives each node one edge to itself, see `edges.with_self_loops`. The table's edges are then those between
            different nodes in the caller's order, and behind them a self-loop of each node.
        widths: slots of a padded row and of one of the transposed graph, in place of the largest degrees.
        capacity: edges to have room for: weights, scores and results of edges then have as many rows. Padded tables of equal
            `num_nodes`, `widths` and `capacity` have equal shapes, and lists of equal `num_nodes` and `capacity`, so a program
            compiled for one runs them all. Shapes of bucketed tables depend on the degrees, too.

    Raises:
        ValueError: an unknown option, or a graph that does not fit `widths` or `capacity`.
        ImportError: the order needs SciPy, and that is not installed.
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
    order_of, places_of = (None if one is None else build.int32_array(one) for one in (numbering, places))
    missing = missing_loops(replace(edges, weights=None))
    repeated = repeated_loops(edges)
    loops = jnp.asarray(missing if numbering is None else missing[numbering[: edges.num_nodes]])
    repeated_of = jnp.asarray(np.pad(repeated, (0, room - count))) if repeated.any() else None
    return NeighborTable(
        forward,
        backward,
        weights,
        loops,
        repeated_of,
        order_of,
        places_of,
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
    """The rows of the nodes and those of the sources, for edges in table order. A row's neighbours are sorted."""
    by_source = build.stable_order(sources, edges.num_sources)
    ahead = by_source[build.stable_order(rows[by_source], edges.num_nodes)]
    back = ahead[build.stable_order(sources[ahead], edges.num_sources)]
    forward = make_rows(rows[ahead], sources[ahead], ahead, edges.num_nodes, layout, limit, widths[0], room)
    backward = make_rows(sources[back], rows[back], back, edges.num_sources, layout, limit, widths[1], room)
    if jax.tree.structure(forward) == jax.tree.structure(backward):
        backward = jax.tree.map(lambda a, b: a if np.array_equal(a, b) else b, forward, backward)  # a symmetric graph's
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
    if order == "rcm" and edges.num_sources != edges.num_nodes:
        raise ValueError(f"expected as many sources as nodes for order='rcm', found {edges.num_sources} and {edges.num_nodes}")


def number_nodes(edges: Edges, layout: str, order: str, limit: int) -> build.Ids | None:
    """The caller's number of each source in table order; None if it is the same."""
    numbering = np.arange(edges.num_sources)
    if order == "rcm":
        numbering = build.locality_order(edges.destinations, edges.sources, edges.num_nodes)
    if layout == "bucketed":
        degrees = np.bincount(edges.destinations, minlength=edges.num_nodes)
        keys = build.bucket_keys(degrees[numbering[: edges.num_nodes]], limit)
        numbering[: edges.num_nodes] = numbering[: edges.num_nodes][np.argsort(keys, kind="stable")]
    return None if (numbering == np.arange(edges.num_sources)).all() else numbering


def make_rows(
    rows: build.Ids, sources: build.Ids, edges: build.Ids, count: int, layout: str, limit: int, width: int | None, room: int
) -> Rows:
    """The rows of edges that are sorted by row."""
    degrees = np.bincount(rows, minlength=count)
    offsets = build.offsets_of(degrees)
    if layout == "csr":
        return build.csr_rows(offsets, sources, edges, room)
    if layout == "bucketed":
        return build.bucket_rows(offsets, sources, edges, limit, room)
    if width is not None and degrees.max(initial=0) > width:
        row = int(np.argmax(degrees > width))
        raise ValueError(f"expected rows of at most {width} neighbours, found {int(degrees[row])} in row {row}")
    return build.padded_rows(offsets, sources, edges, width, room)
