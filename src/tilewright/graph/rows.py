"""Rows of neighbours as arrays of fixed shape, for one direction of a graph, with reductions over them.

Two classes have the same methods. `BucketRows` stores padded rows of equal width together; `CsrRows` stores all neighbours in
one list. A *slot* is a place for a neighbour of a row. Values of slots are a tuple of arrays, one per bucket. No method
scatters.

A *slot list* has the slots of all rows in one array `[S, ...]`, the order of edges in which messages are computed.

Legend: N rows, M nodes to gather from, R rows of a bucket, K slots of a row, E edges, H heads, F features, S slots in a list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax

# JAX 0.12: importing Pallas while a program is traced changes the context of traces, so that the next call would trace again.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32, Shaped

from tilewright.kernels import select
from tilewright.kernels.select import Reduce

Slots = tuple[Array, ...]
"""Values of slots: `[R, K, ...]` per bucket, or one array `[E, ...]`."""

CHUNK = 2**20
"""Elements of gathered features in memory at a time, for values that read whole rows: they fit a CPU's cache."""
UNROLLED = 32
"""Most slots that a program unrolls; wider rows use a loop over slots."""


def take(values: Array, places: Array) -> Array:
    """Gathers rows of `values` without bounds checks; returns zeros if `values` has no rows, since all places are padding."""
    if not values.shape[0]:
        return jnp.zeros((*places.shape, *values.shape[1:]), values.dtype)
    return values.at[places].get(mode="promise_in_bounds")


def map_chunks(value: Callable[..., Array], width: int, *places: Array) -> Array:
    """Computes `value(*places)` for arrays `[S, ...]` in chunks, so that gathered features stay small."""
    size = places[0].shape[0]
    chunk = max(1, CHUNK // max(width, 1))
    if size <= chunk:
        return value(*places)
    count = -(-size // chunk)
    padded = [jnp.pad(p, ((0, count * chunk - size), *((0, 0) for _ in p.shape[1:]))) for p in places]
    values = jax.lax.map(lambda part: value(*part), tuple(p.reshape(count, chunk, *p.shape[1:]) for p in padded))
    return values.reshape(-1, *values.shape[2:])[:size]


class SlotList(NamedTuple):
    """Slot list of a graph. Padding slots repeat the caller's first edge, so that functions of them are as finite as its.

    Attributes:
        rows: row of each slot.
        sources: source of each slot.
        edges: caller's edge of each slot.
        filled: mask of the slots with an edge.
    """

    rows: Int32[Array, " S"]
    sources: Int32[Array, " S"]
    edges: Int32[Array, " S"]
    filled: Bool[Array, " S"]


def slot_list(rows: Array, sources: Array, edges: Array, filled: Array, slots: Array) -> SlotList:
    """Builds a slot list; `slots` has the slot of each of the caller's edges."""
    if not rows.shape[0] or not slots.shape[0]:
        return SlotList(rows, sources, edges, filled)
    first = slots[0]
    ends = [jnp.where(filled, values, values.at[first].get(mode="clip")) for values in (rows, sources, edges)]
    return SlotList(ends[0], ends[1], ends[2], filled)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bucket:
    """Rows of one width.

    Attributes:
        sources: source of each slot; 0 in padding.
        degrees: number of filled slots of each row, which come first.
        nodes: result row of each row.
        edges: caller's edge of each slot, 0 in padding; None if slots are not edges.
    """

    sources: Int32[Array, "R K"]
    degrees: Int32[Array, " R"]
    nodes: Int32[Array, " R"]
    edges: Int32[Array, "R K"] | None

    @property
    def filled(self) -> Bool[Array, "R K"]:
        """Mask of the filled slots."""
        return jnp.arange(self.sources.shape[1], dtype=jnp.int32) < self.degrees[:, None]

    def reduce_slots(self, values: Float[Array, "R K H"], reduce: Reduce) -> Float[Array, "R H"]:
        """Reduces stored values over the slots; an empty row gets zeros."""
        counts = self.filled[:, :, None]
        if reduce == "sum":
            return jnp.where(counts, values, 0).sum(axis=1)
        best, worst = (jnp.min, jnp.inf) if reduce == "min" else (jnp.max, -jnp.inf)
        return jnp.where(self.degrees[:, None] > 0, best(jnp.where(counts, values, worst), axis=1, initial=worst), 0)

    def sum_slots(self, message: Callable[..., Array], extra: Slots) -> Array:
        """Sums `message(nodes, sources, *extra)` over the slots, slot by slot, without storing the messages."""
        per_slot = (self.sources, *extra)

        def add(slot: Array | int, total: Array) -> Array:
            picked = (jax.lax.dynamic_index_in_dim(values, slot, 1, keepdims=False) for values in per_slot)
            return total + jnp.where((slot < self.degrees)[:, None], message(self.nodes, *picked), 0)

        shape = jax.eval_shape(message, self.nodes, *(values[:, 0] for values in per_slot)).shape
        total = jnp.zeros(shape, jnp.float32)
        slots = self.sources.shape[1]
        if slots > UNROLLED:
            return jax.lax.fori_loop(0, slots, add, total)
        for slot in range(slots):
            total = add(slot, total)
        return total

    def map_slots(self, value: Callable[..., Array], width: int, extra: Slots) -> Array:
        """Computes `value(nodes, sources, *extra)` of each slot, which gathers `width` features."""
        rows, slots = self.sources.shape
        nodes = jnp.broadcast_to(self.nodes[:, None], (rows, slots))
        flat = [v.reshape(rows * slots, *v.shape[2:]) for v in (nodes, self.sources, *extra)]
        out = map_chunks(value, width, *flat)
        return out.reshape(rows, slots, *out.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BucketRows:
    """Rows in buckets of equal width; a second, small stage reduces the parts of split rows.

    Attributes:
        buckets: whole rows by width.
        parts: parts of split rows by width. They are separate buckets, since XLA would store gathered features for two readers.
        rest: rows that gather the parts of split rows; None without.
        degrees: degree of each result row.
        slots: slot of each of the caller's edges (out of range for padding); None in a later stage.
        order: place of each result row among the buckets' rows; None for the same order.
    """

    buckets: tuple[Bucket, ...]
    parts: tuple[Bucket, ...]
    rest: "BucketRows | None"
    degrees: Int32[Array, " N"]
    slots: Int32[Array, " E"] | None
    order: Int32[Array, " N"] | None

    @property
    def num_edges(self) -> int:
        """Number of edges in the arrays, including padding."""
        assert self.slots is not None, "only the first stage has edges"
        return self.slots.shape[0]

    @property
    def num_slots(self) -> int:
        """Number of slots of a slot list."""
        return sum(bucket.sources.size for bucket in self.blocks)

    @property
    def blocks(self) -> tuple[Bucket, ...]:
        """All buckets: whole rows, and parts of split rows."""
        return self.buckets + self.parts

    def join(self, reduced: Slots, reduce: Reduce) -> Float[Array, "N F"]:
        """Combines the results of the buckets, `[R, F]` each, to the result rows."""
        pieces = list(reduced[: len(self.buckets)])
        if self.rest is not None:
            pieces.append(self.rest.reduce(jnp.concatenate(reduced[len(self.buckets) :]), None, reduce))
        out = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        return out if self.order is None else take(out, self.order)

    @property
    def slot_list(self) -> SlotList:
        """The slots of all buckets."""
        assert self.slots is not None, "only the first stage has edges"
        rows = [jnp.broadcast_to(bucket.nodes[:, None], bucket.sources.shape) for bucket in self.blocks]
        edges = [jnp.zeros_like(bucket.sources) if bucket.edges is None else bucket.edges for bucket in self.blocks]
        filled = [bucket.filled for bucket in self.blocks]
        sources = [bucket.sources for bucket in self.blocks]
        flat = [self.flatten(tuple(values)) for values in (rows, sources, edges, filled)]
        return slot_list(flat[0], flat[1], flat[2], flat[3], self.slots)

    def flatten(self, values: Slots) -> Shaped[Array, "S ..."]:
        """Joins the values of slots to a slot list."""
        return jnp.concatenate([value.reshape(-1, *value.shape[2:]) for value in values])

    def split(self, values: Shaped[Array, "S ..."]) -> Slots:
        """Splits a slot list into the values of slots, the inverse of `flatten`."""
        sizes = [bucket.sources.size for bucket in self.blocks]
        ends = list(accumulate(sizes))
        return tuple(
            values[end - size : end].reshape(*bucket.sources.shape, *values.shape[1:])
            for size, end, bucket in zip(sizes, ends, self.blocks, strict=True)
        )

    def reduce(
        self, x: Float[Array, "M F"], weights: Slots | None, reduce: Reduce, sources: Slots | None = None
    ) -> Float[Array, "N F"]:
        """Gathers and reduces features with kernels.

        Args:
            x: features.
            weights: weights `[R, K]`, or `[R, K, H]` for H equal parts of F; None for 1.
            reduce: the reduction.
            sources: rows of `x` for the slots; None for their sources.
        """
        split_mean = reduce == "mean" and self.rest is not None
        inner: Reduce = "sum" if split_mean else reduce
        scales = [None] * len(self.blocks) if weights is None else weights
        gathered = [bucket.sources for bucket in self.blocks] if sources is None else sources
        reduced = tuple(
            select.gather_reduce(x, places, bucket.degrees, scale, inner)
            for bucket, places, scale in zip(self.blocks, gathered, scales, strict=True)
        )
        out = self.join(reduced, inner)
        if not split_mean:
            return out
        degrees = jnp.maximum(self.degrees, 1).astype(jnp.float32)[:, None]
        return (out.astype(jnp.float32) / degrees).astype(x.dtype)

    def reduce_slots(self, values: Slots, reduce: Reduce) -> Float[Array, "N H"]:
        """Computes the sum, maximum or minimum of stored values `[R, K, H]` over each row; an empty row gets zeros."""
        reduced = [bucket.reduce_slots(value, reduce) for bucket, value in zip(self.blocks, values, strict=True)]
        return self.join(tuple(reduced), reduce)

    def sum_slots(self, message: Callable[..., Array], *extra: Slots) -> Float[Array, "N F"]:
        """Sums `message(rows [S], sources [S], *extra [S, ...])`, float32 `[S, F]`, over the slots of each row."""
        slot_values = zip(*extra, strict=True) if extra else [()] * len(self.blocks)
        reduced = [bucket.sum_slots(message, values) for bucket, values in zip(self.blocks, slot_values, strict=True)]
        return self.join(tuple(reduced), "sum")

    def map_slots(self, value: Callable[..., Array], width: int, *extra: Slots) -> Slots:
        """Computes `value(rows [S], sources [S], *extra [S, ...])` of each slot, which gathers `width` features."""
        slot_values = zip(*extra, strict=True) if extra else [()] * len(self.blocks)
        return tuple(bucket.map_slots(value, width, values) for bucket, values in zip(self.blocks, slot_values, strict=True))

    def from_edges(self, values: Shaped[Array, "E ..."]) -> Slots:
        """Gathers values of the caller's edges for the slots; padding has arbitrary values."""
        if not values.shape[0]:
            return tuple(jnp.zeros((*bucket.sources.shape, *values.shape[1:]), values.dtype) for bucket in self.blocks)
        return tuple(take(values, bucket.edges) for bucket in self.blocks if bucket.edges is not None)

    def to_edges(self, values: Slots) -> Shaped[Array, "E ..."]:
        """Gathers values of slots for the caller's edges, the inverse of `from_edges`; padding gets zeros."""
        assert self.slots is not None, "only the first stage has edges"
        flat = self.flatten(values)
        if not flat.shape[0]:
            return jnp.zeros((self.num_edges, *flat.shape[1:]), flat.dtype)
        return flat.at[self.slots].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CsrRows:
    """Concatenated rows: row r has the slots `offsets[r]` to `offsets[r + 1] - 1`, followed by padding after the last row.

    Attributes:
        offsets: first slot of each row, and the end of the last row, int32 `[N + 1]`.
        sources: source of each slot, int32 `[E]`.
        rows: row of each slot, `[E]`.
        edges: caller's edge of each slot, `[E]`.
        slots: slot of each of the caller's edges (out of range for padding), `[E]`.
    """

    offsets: Any  # trees of samples also hold shapes, and stacked arrays
    sources: Any
    rows: Any
    edges: Any
    slots: Any

    @property
    def num_edges(self) -> int:
        return self.slots.shape[0]

    @property
    def num_slots(self) -> int:
        return self.sources.shape[0]

    @property
    def degrees(self) -> Int32[Array, " N"]:
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def slot_list(self) -> SlotList:
        filled = jnp.arange(self.sources.shape[0], dtype=jnp.int32) < self.offsets[-1]
        return slot_list(self.rows, self.sources, self.edges, filled, self.slots)

    def flatten(self, values: Slots) -> Shaped[Array, "S ..."]:
        return values[0]

    def split(self, values: Shaped[Array, "S ..."]) -> Slots:
        return (values,)

    def reduce(
        self, x: Float[Array, "M F"], weights: Slots | None, reduce: Reduce, sources: Slots | None = None
    ) -> Float[Array, "N F"]:
        if not x.shape[0]:
            return jnp.zeros((self.degrees.shape[0], x.shape[1]), x.dtype)
        scale = None if weights is None else weights[0]
        return select.gather_reduce_csr(x, self.offsets, self.sources if sources is None else sources[0], scale, reduce)

    def reduce_slots(self, values: Slots, reduce: Reduce) -> Float[Array, "N H"]:
        places = jnp.arange(self.sources.shape[0], dtype=jnp.int32)
        return select.gather_reduce_csr(values[0], self.offsets, places, None, reduce)

    def sum_slots(self, message: Callable[..., Array], *extra: Slots) -> Float[Array, "N F"]:
        """Sums messages over each row like `BucketRows.sum_slots`, but stores the messages, since no kernel fuses them."""
        return self.reduce_slots((message(self.rows, self.sources, *(value[0] for value in extra)),), "sum")

    def map_slots(self, value: Callable[..., Array], width: int, *extra: Slots) -> Slots:
        return (map_chunks(value, width, self.rows, self.sources, *(values[0] for values in extra)),)

    def from_edges(self, values: Shaped[Array, "E ..."]) -> Slots:
        return (take(values, self.edges),)

    def to_edges(self, values: Slots) -> Shaped[Array, "E ..."]:
        return values[0].at[self.slots].get(mode="fill", fill_value=0)


Rows = BucketRows | CsrRows


def row_dot(a: Array, b: Array, rows: Array, sources: Array) -> Float[Array, "S H"]:
    """Computes the dot product of `a` at the row and `b` at the source of each slot, both `[..., H, D]`, in float32."""
    return jnp.sum(take(a, rows).astype(jnp.float32) * take(b, sources).astype(jnp.float32), axis=-1)


def dot_slots(rows: Rows, a: Float[Array, "N H D"], b: Float[Array, "M H D"]) -> Slots:
    """Computes `row_dot` of each slot."""

    def slot_path() -> Slots:
        return rows.map_slots(partial(row_dot, a, b), 2 * a.shape[1] * a.shape[2])

    if isinstance(rows, BucketRows):
        return slot_path()
    return (select.edge_dot_csr(a, b, (rows.offsets, rows.sources), lambda: slot_path()[0]),)
