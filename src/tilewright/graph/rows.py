"""One direction of a graph as arrays of fixed shape: for each row the places of its neighbours, and how to reduce over them.

There are two forms with the same methods. `BucketRows` holds rows of equal width together, padded; `CsrRows` holds all
neighbours one after another. What there is for each neighbour of each row (a *slot*) is a tuple of arrays, one per bucket; the
two forms differ in nothing else that a caller sees. Nothing here scatters.

Legend: N rows, M nodes to gather from, R rows of a bucket, K slots of a row, E edges, H heads, F features, S slots in a list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.kernels import select
from tilewright.kernels.select import Reduce

Slots = tuple[Array, ...]
"""A value for each slot: `[R, K, ...]` for each bucket, or one array `[E, ...]`."""

CHUNK = 2**20
"""Elements of gathered features that exist at a time where a slot's value takes whole rows: they stay in a CPU's cache."""
UNROLLED = 32
"""Slots in one loop of a program; wider rows take a loop over slots."""


def take(values: Array, places: Array) -> Array:
    """Rows of `values`, at places that are known to exist; zeros where there are no rows, so that all places are padding."""
    if not values.shape[0]:
        return jnp.zeros((*places.shape, *values.shape[1:]), values.dtype)
    return values.at[places].get(mode="promise_in_bounds")


def map_chunks(value: Callable[..., Array], width: int, *places: Array) -> Array:
    """`value(*places)` for arrays `[S, ...]` of places, a chunk at a time, so that what it gathers stays small."""
    size = places[0].shape[0]
    chunk = max(1, CHUNK // max(width, 1))
    if size <= chunk:
        return value(*places)
    count = -(-size // chunk)
    padded = [jnp.pad(p, ((0, count * chunk - size), *((0, 0) for _ in p.shape[1:]))) for p in places]
    done = jax.lax.map(lambda part: value(*part), tuple(p.reshape(count, chunk, *p.shape[1:]) for p in padded))
    return done.reshape(-1, *done.shape[2:])[:size]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bucket:
    """Rows of one width.

    Attributes:
        sources: places to gather from; those from `degrees` on are padding, 0.
        nodes: the row of the result that each belongs to.
        edges: the caller's number of each slot's edge, 0 in padding; None if the slots are no edges.
    """

    sources: Int32[Array, "R K"]
    degrees: Int32[Array, " R"]
    nodes: Int32[Array, " R"]
    edges: Int32[Array, "R K"] | None

    def reduce_slots(self, values: Float[Array, "R K H"], reduce: Reduce) -> Float[Array, "R H"]:
        """Reduces values that are in memory; a row without any gets zeros."""
        counts = (jnp.arange(self.sources.shape[1], dtype=jnp.int32) < self.degrees[:, None])[:, :, None]
        if reduce == "sum":
            return jnp.where(counts, values, 0).sum(axis=1)
        best = jnp.max(jnp.where(counts, values, -jnp.inf), axis=1, initial=-jnp.inf)
        return jnp.where(self.degrees[:, None] > 0, best, 0)

    def sum_slots(self, message: Callable[..., Array], extra: Slots) -> Array:
        """The sum of `message(nodes, sources, *extra)` over the slots, one after another: no message is ever in memory."""
        taken = (self.sources, *extra)

        def add(slot: Array | int, total: Array) -> Array:
            picked = (jax.lax.dynamic_index_in_dim(values, slot, 1, keepdims=False) for values in taken)
            return total + jnp.where((slot < self.degrees)[:, None], message(self.nodes, *picked), 0)

        shape = jax.eval_shape(message, self.nodes, *(values[:, 0] for values in taken)).shape
        total = jnp.zeros(shape, jnp.float32)
        slots = self.sources.shape[1]
        if slots > UNROLLED:
            return jax.lax.fori_loop(0, slots, add, total)
        for slot in range(slots):
            total = add(slot, total)
        return total

    def map_slots(self, value: Callable[..., Array], width: int, extra: Slots) -> Array:
        """`value(nodes, sources, *extra)` of each slot; `width` features are gathered for it."""
        rows, slots = self.sources.shape
        nodes = jnp.broadcast_to(self.nodes[:, None], (rows, slots))
        flat = [v.reshape(rows * slots, *v.shape[2:]) for v in (nodes, self.sources, *extra)]
        out = map_chunks(value, width, *flat)
        return out.reshape(rows, slots, *out.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BucketRows:
    """Rows in buckets of equal width; parts of the longest are reduced by another, small stage.

    Attributes:
        buckets: whole rows by their widths.
        parts: parts of longer rows by theirs. (If one bucket held both, XLA would write all that it gathers for two readers.)
        rest: the longer rows, which gather the parts; None if there are none.
        degrees: of each row of the result.
        slots: for each of the caller's edges its place among all slots (beyond them: no edge); None in a later stage.
        order: where each row of the result lies among those that the buckets give; None if they are in that order.
    """

    buckets: tuple[Bucket, ...]
    parts: tuple[Bucket, ...]
    rest: "BucketRows | None"
    degrees: Int32[Array, " N"]
    slots: Int32[Array, " E"] | None
    order: Int32[Array, " N"] | None

    @property
    def num_edges(self) -> int:
        """Edges that there is room for."""
        assert self.slots is not None, "only the first stage has edges"
        return self.slots.shape[0]

    @property
    def blocks(self) -> tuple[Bucket, ...]:
        """Blocks that have slots: buckets, and parts of rows that are split."""
        return self.buckets + self.parts

    def join(self, done: Slots, reduce: Reduce) -> Float[Array, "N F"]:
        """Makes the rows' results of what each bucket gave, `[R, F]`."""
        pieces = list(done[: len(self.buckets)])
        if self.rest is not None:
            pieces.append(self.rest.reduce(jnp.concatenate(done[len(self.buckets) :]), None, reduce))
        out = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        return out if self.order is None else take(out, self.order)

    def reduce(self, x: Float[Array, "M F"], weights: Slots | None, reduce: Reduce) -> Float[Array, "N F"]:
        """Gathers and reduces, by the kernels. Weights are `[R, K]` or, one for each head's share of F, `[R, K, H]`."""
        split_mean = reduce == "mean" and self.rest is not None
        inner: Reduce = "sum" if split_mean else reduce
        scales = [None] * len(self.blocks) if weights is None else weights
        done = tuple(
            select.gather_reduce(x, bucket.sources, bucket.degrees, scale, inner)
            for bucket, scale in zip(self.blocks, scales, strict=True)
        )
        out = self.join(done, inner)
        if not split_mean:
            return out
        degrees = jnp.maximum(self.degrees, 1).astype(jnp.float32)[:, None]
        return (out.astype(jnp.float32) / degrees).astype(x.dtype)

    def reduce_slots(self, values: Slots, reduce: Reduce) -> Float[Array, "N H"]:
        """The sum or maximum of values `[R, K, H]` that are in memory; a row without slots gets zeros."""
        done = [bucket.reduce_slots(value, reduce) for bucket, value in zip(self.blocks, values, strict=True)]
        return self.join(tuple(done), reduce)

    def sum_slots(self, message: Callable[..., Array], *extra: Slots) -> Float[Array, "N F"]:
        """The sum of `message(rows [S], sources [S], *extra [S, ...])`, float32 `[S, F]`, over the slots of each row."""
        given = zip(*extra, strict=True) if extra else [()] * len(self.blocks)
        done = [bucket.sum_slots(message, values) for bucket, values in zip(self.blocks, given, strict=True)]
        return self.join(tuple(done), "sum")

    def map_slots(self, value: Callable[..., Array], width: int, *extra: Slots) -> Slots:
        """`value(rows [S], sources [S], *extra [S, ...])` for each slot, where that gathers `width` features."""
        given = zip(*extra, strict=True) if extra else [()] * len(self.blocks)
        return tuple(bucket.map_slots(value, width, values) for bucket, values in zip(self.blocks, given, strict=True))

    def from_edges(self, values: Float[Array, "E ..."]) -> Slots:
        """Brings values of the caller's edges to their slots. Padding holds any of them."""
        if not values.shape[0]:
            return tuple(jnp.zeros((*bucket.sources.shape, *values.shape[1:]), values.dtype) for bucket in self.blocks)
        return tuple(take(values, bucket.edges) for bucket in self.blocks if bucket.edges is not None)

    def to_edges(self, values: Slots) -> Float[Array, "E ..."]:
        """The inverse; what is no edge gets zeros."""
        assert self.slots is not None, "only the first stage has edges"
        flat = jnp.concatenate([value.reshape(-1, *value.shape[2:]) for value in values])
        if not flat.shape[0]:
            return jnp.zeros((self.num_edges, *flat.shape[1:]), flat.dtype)
        return flat.at[self.slots].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CsrRows:
    """Rows one after another: row r has the slots from `offsets[r]` to `offsets[r + 1]`; behind the last there may be padding.

    Attributes:
        rows: the row of each slot.
        edges: the caller's number of each slot's edge.
        slots: of each of the caller's edges its slot (beyond them: no edge).
    """

    offsets: Int32[Array, " N1"]
    sources: Int32[Array, " E"]
    rows: Int32[Array, " E"]
    edges: Int32[Array, " E"]
    slots: Int32[Array, " E"]

    @property
    def num_edges(self) -> int:
        return self.slots.shape[0]

    @property
    def degrees(self) -> Int32[Array, " N"]:
        return self.offsets[1:] - self.offsets[:-1]

    def reduce(self, x: Float[Array, "M F"], weights: Slots | None, reduce: Reduce) -> Float[Array, "N F"]:
        if not x.shape[0]:
            return jnp.zeros((self.degrees.shape[0], x.shape[1]), x.dtype)
        scale = None if weights is None else weights[0]
        return select.gather_reduce_csr(x, self.offsets, self.sources, scale, reduce)

    def reduce_slots(self, values: Slots, reduce: Reduce) -> Float[Array, "N H"]:
        places = jnp.arange(self.sources.shape[0], dtype=jnp.int32)
        return select.gather_reduce_csr(values[0], self.offsets, places, None, reduce)

    def sum_slots(self, message: Callable[..., Array], *extra: Slots) -> Float[Array, "N F"]:
        """Sums of messages over each row, as of `BucketRows`, but the messages are in memory: no kernel makes them."""
        return self.reduce_slots((message(self.rows, self.sources, *(value[0] for value in extra)),), "sum")

    def map_slots(self, value: Callable[..., Array], width: int, *extra: Slots) -> Slots:
        return (map_chunks(value, width, self.rows, self.sources, *(values[0] for values in extra)),)

    def from_edges(self, values: Float[Array, "E ..."]) -> Slots:
        return (take(values, self.edges),)

    def to_edges(self, values: Slots) -> Float[Array, "E ..."]:
        return values[0].at[self.slots].get(mode="fill", fill_value=0)


Rows = BucketRows | CsrRows


def row_dot(a: Array, b: Array, rows: Array, sources: Array) -> Float[Array, "S H"]:
    """For each slot the product of its row's features of `a` and its source's of `b`, both `[..., H, D]`, in float32."""
    return jnp.sum(take(a, rows).astype(jnp.float32) * take(b, sources).astype(jnp.float32), axis=-1)


def dot_slots(rows: Rows, a: Float[Array, "N H D"], b: Float[Array, "M H D"]) -> Slots:
    """`row_dot` for every slot."""

    def by_slots() -> Slots:
        return rows.map_slots(partial(row_dot, a, b), 2 * a.shape[1] * a.shape[2])

    if isinstance(rows, BucketRows):
        return by_slots()
    return (select.edge_dot_csr(a, b, (rows.offsets, rows.sources), lambda: by_slots()[0]),)
