"""Collectives over a mesh axis as hops around a ring, and collective matmuls. Within `jax.shard_map`.

`ring` passes shards around and computes with one shard while the next one travels; `gathered` all-gathers the shards first. The
visit function is the same for both, so the result does not depend on the form of the exchange. `ring_collect` and
`gathered_collect` also return contributions to their shards, as in a gradient or a reduce-scatter.

These rings are unrolled: XLA overlaps a transfer with the compute beside it in the program, and the compute may differ from hop
to hop. The collective matmuls (`all_gather_matmul`, `matmul_reduce_scatter`) and the collectives without a matmul take a
`Route`. After Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from tilewright.parallel.ordering import tied

Tree = Any
"""A pytree of arrays, such as a shard or a result."""

Axis = str | tuple[str, ...]
"""A mesh axis, or several axes as one, the slowest-varying first."""


def shift(tree: Tree, axis: Axis, by: int = 1) -> Tree:
    """Sends each device's tree to the device `by` places before it on the axis; the axis is a ring.

    Each device receives the tree of the device `by` places ahead.
    """
    size = jax.lax.axis_size(axis)
    if by % size == 0:
        return tree
    pairs = [(device, (device - by) % size) for device in range(size)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, pairs), tree)


def checked_hops(hops: Sequence[int] | None, axis: Axis) -> list[int]:
    """Checks the hops that have a visit, by default all; hop 0 needs no transfer."""
    size = jax.lax.axis_size(axis)
    chosen = list(range(size)) if hops is None else list(hops)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < size:
        raise ValueError(f"expected ascending hops from 0 to below the {size} devices of {axis!r}, found {chosen}")
    return chosen


def ring(
    visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: Axis, hops: Sequence[int] | None = None
) -> Tree:
    """Passes every shard to every device and accumulates a total on each device.

    Args:
        visit: `visit(hop, shard, total) -> total`. At hop h, device i is visited by the shard of device `(i + h) % size`.
        shard: this device's shard.
        total: initial total.
        axis: name of the mesh axis.
        hops: hops with a visit; shards skip the rest.

    Returns:
        the total after the last visit. Differentiable; the gradient is a ring in the other direction.
    """
    chosen = checked_hops(hops, axis)
    shard = shift(shard, axis, chosen[0])
    for hop, after in zip(chosen, [*chosen[1:], None], strict=True):
        arriving = None if after is None else shift(shard, axis, after - hop)  # in flight during the visit
        total = visit(hop, shard, total)
        shard = arriving
    return total


def ring_collect(
    visit: Callable[[int, Tree, Tree], tuple[Tree, Tree]],
    shard: Tree,
    total: Tree,
    axis: Axis,
    hops: Sequence[int] | None = None,
) -> tuple[Tree, Tree]:
    """Passes every shard to every device, and returns to each shard the sum of contributions from all devices.

    Args:
        visit: `visit(hop, shard, total) -> (total, contribution)`, with equal shapes of `contribution` at all hops. At hop h,
            device i is visited by the shard of device `(i + h) % size`.
        shard, total, axis, hops: see `ring`; a hop without a visit contributes nothing. The shard may be an empty tuple.

    Returns:
        the total after the last visit, and the sum of all devices' contributions to this device's shard.
    """
    chosen = checked_hops(hops, axis)
    shard = shift(shard, axis, chosen[0])
    carried = None
    for hop, after in zip(chosen, [*chosen[1:], jax.lax.axis_size(axis)], strict=True):
        arriving = None if hop == chosen[-1] else shift(shard, axis, after - hop)
        total, contribution = visit(hop, shard, total)
        # The carried sum travelled during this visit.
        carried = contribution if carried is None else jax.tree.map(lambda a, b: a + b, carried, contribution)
        carried = shift(carried, axis, after - hop)
        shard = arriving
    return total, carried


def gathered(visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: Axis) -> Tree:
    """Visits once, at hop 0, with all shards concatenated along their leading dims in device order."""
    return visit(0, gather(shard, axis), total)


def gathered_collect(
    visit: Callable[[int, Tree, Tree], tuple[Tree, Tree]], shard: Tree, total: Tree, axis: Axis
) -> tuple[Tree, Tree]:
    """`ring_collect` by an all-gather and a reduce-scatter; contributions are for the concatenated shards."""
    total, contribution = visit(0, gather(shard, axis), total)
    return total, jax.tree.map(lambda leaf: jax.lax.psum_scatter(leaf, axis, tiled=True), contribution)


def gather(shard: Tree, axis: Axis) -> Tree:
    """All-gathers a tree along its leading dims."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis, tiled=True), shard)


UNROLLED = 16
"""Default maximum of devices on an axis for unrolled routes; longer unrolled programs compile slowly."""

Product = Callable[[Array, Any], Tree]
"""`product(rows [R, ...], w) -> tree of arrays [R, ...]`: a function of rows that computes each row separately."""


class RingDirection(NamedTuple):
    """A direction of a ring: rows arrive from the device `by` ahead (see `shift`), over `hops` hops."""

    by: int
    hops: int


@dataclass(frozen=True)
class Route:
    """Route of shards' rows around a ring.

    Attributes:
        bidirectional: shards travel in both directions at once, half as far in each. Links are used in both directions, half
            as many hops follow one another, and two matmuls hide each hop. With an even number of devices, the first
            direction has one hop more.
        looped: hops run in a `jax.lax.scan`, which compiles faster and costs one more copy of all devices' rows. Default: for
            more than `UNROLLED` devices.
        chunk: maximum rows per transfer and matmul; the largest divisor of a shard's rows up to `chunk` is used. Default: all
            rows, for the largest matmuls and fewest transfers. Smaller chunks travel on while the rest of a shard is computed.
    """

    bidirectional: bool = True
    looped: bool | None = None
    chunk: int | None = None

    def directions(self, size: int) -> list[RingDirection]:
        """Directions of a ring of `size` devices, the one with more hops first; directions without hops are left out."""
        back = (size - 1) // 2 if self.bidirectional else 0
        return [direction for direction in (RingDirection(1, size - 1 - back), RingDirection(-1, back)) if direction.hops]

    def looped_hops(self, size: int) -> int:
        """Number of hops in a loop: those with rows arriving and leaving in all directions."""
        looped = size > UNROLLED if self.looped is None else self.looped
        return max(0, min((direction.hops for direction in self.directions(size)), default=0) - 1) if looped else 0

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least one row, found {self.chunk}")

    def chunk_of(self, rows: int) -> int:
        """Rows of a chunk, for a shard of `rows` rows."""
        return next(n for n in range(min(self.chunk or rows, rows), 0, -1) if rows % n == 0)


def all_gather_matmul(
    x: Shaped[Array, "M ..."],
    w: Any,
    axis: Axis,
    product: Product = jnp.matmul,
    route: Route = Route(),
) -> Tree:
    """All-gather fused with a matmul (collective matmul): rows travel around the ring while arrived rows are multiplied.

    Equals `product(jax.lax.all_gather(x, axis, tiled=True), w)`. The gradient by `x` is the ring of `matmul_reduce_scatter`.
    The gradient by `w` is one matmul over all rows, which are kept for it; under `jax.checkpoint` they travel again.

    Args:
        x: this device's M rows.
        w: argument of the product: columns `[I, O]` of a matrix, several matrices, or packed ones.
        axis: name of the mesh axis.
        product: function of some rows and `w`. It may close over constants, but not over differentiated values.
        route: route of the rows.

    Returns:
        rows of all devices in device order, `[M * devices, O]` or a tree of such arrays.

    Source: Wang et al. 2023, AllGather-Einsum with bidirectional transfers. It replaces the all-gather of Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
    """
    size = jax.lax.axis_size(axis)
    rows = len(x)
    directions = route.directions(size)
    chunk = route.chunk_of(rows)

    fixed = jax.lax.stop_gradient(w)

    def visit(held: list[list[Array]], active: list[RingDirection]) -> tuple[list[list[Array]], list[list[Tree]]]:
        return _forwarded(held, active, axis), [[(part, product(part, fixed)) for part in parts] for parts in held]

    chunks = [x[first : first + chunk] for first in range(0, rows, chunk)]
    held, (first_parts, *_) = visit([chunks] * max(1, len(directions)), directions)
    tiles = {0: first_parts}
    repeated = route.looped_hops(size)
    if repeated:
        held, stacked = jax.lax.scan(lambda held, _: visit(held, directions), held, length=repeated)
        for direction, parts in zip(directions, stacked, strict=True):
            tiles |= {direction.by * (hop + 1): jax.tree.map(itemgetter(hop), parts) for hop in range(repeated)}
    for hop in range(repeated + 1, farthest(directions) + 1):
        held, results = visit(held, [direction for direction in directions if direction.hops > hop])
        tiles |= {direction.by * hop: parts for direction, parts in zip(directions, results, strict=False)}
    starts = row_starts(tiles, rows, chunk, axis)
    whole, y = jax.tree.map(lambda *leaves: placed(leaves, starts), *(tile for parts in tiles.values() for tile in parts))
    return weighted(product, w, whole, y)


def _forwarded(held: list[list[Array]], active: list[RingDirection], axis: Axis) -> list[list[Array]]:
    """Sends the held arrays one hop further in the given directions and returns the arrivals."""
    arriving = [shift(parts, axis, direction.by) for direction, parts in zip(active, held, strict=False)]
    return tied(arriving)  # tied together: otherwise the compiler lets one direction wait for the other


def matmul_reduce_scatter(
    x: Shaped[Array, "R ..."],
    w: Any,
    axis: Axis,
    product: Product = jnp.matmul,
    route: Route = Route(),
    dtype: DTypeLike | None = None,
) -> Tree:
    """Matmul fused with a reduce-scatter (collective matmul): partial sums travel while the next addends are computed.

    Equals `jax.lax.psum_scatter(product(x, w), axis, tiled=True)` but for the order of the sums. With n devices, indices modulo
    n, and p[i] as device i's partial sum of the rows of device d: rows that travel in one direction sum to
    `((p[d + 1] + p[d + 2]) + ...) + p[d]`. Rows that travel in both sum to `(before + behind) + p[d]`, with `before` as
    `(p[d - n // 2] + ...) + p[d - 1]` and `behind` as `(p[d + (n - 1) // 2] + ...) + p[d + 1]`. The gradient by `x` is the ring
    of `all_gather_matmul`, the one by `w` a sum over hops.

    Args:
        x: this device's columns of all R rows.
        w: argument of the product, such as rows `[I, O]` of a matrix.
        axis, product, route: see `all_gather_matmul`.
        dtype: dtype of the travelling sums and of the result, by default that of the products. The products may be wider.

    Returns:
        `[R / devices, O]` or a tree of such arrays.

    Raises:
        ValueError: the devices do not divide the rows.

    Source: Wang et al. 2023, Einsum-ReduceScatter; see `all_gather_matmul`.
    """
    size = jax.lax.axis_size(axis)
    directions = route.directions(size)
    chunk = route.chunk_of(shard_rows(len(x), axis))
    parts = _chunks_by_hop(x, directions, chunk, axis)

    def visit(sums: list[Tree], parts_here: Sequence[Sequence[Array]]) -> list[Tree]:
        arriving = [shift(total, axis, -direction.by) for direction, total in zip(directions, sums, strict=False)]
        addends = [[product(part, w) for part in parts] for parts in parts_here]  # in parallel to the arrivals
        joined = [_rounded_sum(new, dtype, total) for total, new in zip(arriving, addends, strict=False)]
        return joined + [_rounded_sum(new, dtype) for new in addends[len(arriving) :]]

    sums = []
    repeated = route.looped_hops(size)
    for hop in range(farthest(directions), repeated, -1):
        sums = visit(sums, [parts[direction.by * hop] for direction in directions if direction.hops >= hop])
    if repeated:
        here = [
            jax.tree.map(lambda *hops: jnp.stack(hops), *(parts[direction.by * n] for n in range(repeated, 0, -1)))
            for direction in directions
        ]
        sums, _ = jax.lax.scan(lambda sums, here: (visit(sums, here), None), sums, here)
    arriving = [shift(total, axis, -direction.by) for direction, total in zip(directions, sums, strict=True)]
    total = _rounded_sum([product(part, w) for part in parts[0]], dtype, *arriving)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *total)


def _chunks_by_hop(x: Array, directions: Sequence[RingDirection], chunk: int, axis: Axis) -> dict[int, tuple[Array, ...]]:
    """Splits rows into chunks, by the number of places that their device is ahead."""
    hops = [0, *(direction.by * hop for direction in directions for hop in range(1, direction.hops + 1))]
    tiles = sliced(x, row_starts(hops, len(x) // len(hops), chunk, axis))
    per = len(tiles) // len(hops)
    return {hop: tiles[n * per : (n + 1) * per] for n, hop in enumerate(hops)}


def _rounded_sum(new: Tree, dtype: DTypeLike | None, *totals: Tree) -> Tree:
    """Adds `new` to the received `totals`, in order, and rounds the sum once."""

    def add(addend: Array, *received: Array) -> Array:
        before = [total.astype(addend.dtype) for total in received]
        return (sum(before[1:], start=before[0]) + addend if before else addend).astype(dtype or addend.dtype)

    return jax.tree.map(add, new, *totals)


def all_gather(x: Shaped[Array, "M ..."], axis: Axis, route: Route = Route()) -> Shaped[Array, "R ..."]:
    """`jax.lax.all_gather(x, axis, tiled=True)` by hops between neighbours; raises as `all_gather_matmul` does."""
    return all_gather_matmul(x, None, axis, _unchanged_rows, route)


def reduce_scatter(x: Shaped[Array, "R ..."], axis: Axis, route: Route = Route()) -> Shaped[Array, "M ..."]:
    """`jax.lax.psum_scatter(x, axis, tiled=True)` by hops between neighbours.

    The order of the sum and the errors are those of `matmul_reduce_scatter`.
    """
    return matmul_reduce_scatter(x, None, axis, _unchanged_rows, route)


def all_reduce(x: Float[Array, "R ..."], axis: Axis, route: Route = Route()) -> Float[Array, "R ..."]:
    """`jax.lax.psum(x, axis)` by `reduce_scatter` and `all_gather`, with equal bits on all devices.

    Rows that the devices do not divide are flattened and split into one piece per device, with at most one element of padding
    per device. Such pieces travel in one chunk.
    """
    size = jax.lax.axis_size(axis)
    if len(x) % size == 0:
        return all_gather(reduce_scatter(x, axis, route), axis, route)
    pieces = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
    whole = replace(route, chunk=None)
    return all_gather(reduce_scatter(pieces, axis, whole), axis, whole).reshape(-1)[: x.size].reshape(x.shape)


def shard_rows(rows: int, axis: Axis) -> int:
    """Returns the number of rows per device.

    Raises:
        ValueError: the devices do not divide the rows.
    """
    size = jax.lax.axis_size(axis)
    if rows % size:
        raise ValueError(f"expected rows that the {size} devices of {axis!r} divide, found {rows}")
    return rows // size


def farthest(directions: Sequence[RingDirection]) -> int:
    """Number of hops of the longest direction; 0 for a single device."""
    return max((direction.hops for direction in directions), default=0)


def row_starts(hops: Iterable[int], rows: int, chunk: int, axis: Axis) -> tuple[Array, ...]:
    """First row of each chunk among the rows of all devices, by the places that the chunk's device is ahead."""
    size = jax.lax.axis_size(axis)
    index = jax.lax.axis_index(axis)
    return tuple((index + hop) % size * rows + first for hop in hops for first in range(0, rows, chunk))


@jax.custom_vjp
def placed(tiles: tuple[Array, ...], starts: tuple[Array, ...]) -> Array:
    """Joins tiles of equal size that cover the whole, each beginning at its row in `starts`."""
    whole = jax.lax.empty((len(tiles) * len(tiles[0]), *tiles[0].shape[1:]), tiles[0].dtype)
    for tile, start in zip(tiles, starts, strict=True):
        whole = jax.lax.dynamic_update_slice_in_dim(whole, tile, start, 0)
    return whole


@jax.custom_vjp
def sliced(whole: Array, starts: tuple[Array, ...]) -> tuple[Array, ...]:
    """Splits an array into tiles that begin at `starts`; the inverse of `placed`."""
    size = len(whole) // len(starts)
    return tuple(jax.lax.dynamic_slice_in_dim(whole, start, size) for start in starts)


# `placed` and `sliced` permute rows, so each is the other's transpose. JAX does not know that tiles cover the whole: its own
# gradient would write zeros in place of each tile, or add one whole array per tile.
placed.defvjp(
    lambda tiles, starts: (placed(tiles, starts), starts), lambda starts, cotangent: (sliced(cotangent, starts), None)
)
sliced.defvjp(
    lambda whole, starts: (sliced(whole, starts), starts), lambda starts, cotangent: (placed(tuple(cotangent), starts), None)
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted(product: Product, w: Any, rows: Array, result: Tree) -> Tree:
    """Returns a product's result that was computed with constant weights, and adds the weights' gradient.

    The gradient is one matmul over all rows; a sum over tiles would pass through memory once per tile.
    """
    return result


def _weights_backward(product: Product, residuals: tuple[Any, Array], cotangent: Tree) -> tuple[Any, None, Tree]:
    w, rows = residuals
    _, back = jax.vjp(lambda w: product(rows, w), w)
    return *back(cotangent), None, cotangent


weighted.defvjp(lambda product, w, rows, result: (result, (w, rows)), _weights_backward)


def _unchanged_rows(rows: Array, _: None) -> Array:
    return rows
