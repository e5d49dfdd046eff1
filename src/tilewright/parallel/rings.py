"""Exchanges between the devices of a mesh axis that go hop by hop, within `jax.shard_map`.

`ring` passes the shards round and works on the one at hand while the next is under way; `gathered` brings them all together
first. A visit is the same function for both, so what is computed does not depend on how data travels. `ring_collect` and
`gathered_collect` also bring home what the devices give to the shards that they see, as a gradient or a reduce-scatter does.

These rings are unrolled, for XLA overlaps a transfer with what stands beside it in the same program, and that may differ from
hop to hop. The collectives of matrices' rows (`all_gather_matmul`, `matmul_reduce_scatter`, and both without a product) take a
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
"""A pytree of arrays; a shard is one, and what is computed of it."""

Axis = str | tuple[str, ...]
"""A mesh axis, or several that count as one: the devices along the first of them lie farthest apart."""


def shift(tree: Tree, axis: Axis, by: int = 1) -> Tree:
    """Each device takes what the device `by` places behind it on the axis holds; the last stands before the first."""
    size = jax.lax.axis_size(axis)
    if by % size == 0:
        return tree
    pairs = [(device, (device - by) % size) for device in range(size)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, axis, pairs), tree)


def checked_hops(hops: Sequence[int] | None, axis: Axis) -> list[int]:
    """Hops that have a visit, by default all; the first of them needs no transfer."""
    size = jax.lax.axis_size(axis)
    chosen = list(range(size)) if hops is None else list(hops)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < size:
        raise ValueError(f"expected ascending hops from 0 to below the {size} devices of {axis!r}, found {chosen}")
    return chosen


def ring(
    visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: Axis, hops: Sequence[int] | None = None
) -> Tree:
    """Every shard visits every device.

    Args:
        visit: `visit(hop, shard, total) -> total`. At hop h, device i is visited by the shard of device `(i + h) % size`.
        shard: this device's.
        total: what the first visit starts from.
        axis: name of the mesh axis.
        hops: those at which there is a visit; the shards skip the others.

    Returns:
        the total after the last visit. It is differentiable, and its gradient is a ring in the other direction.
    """
    chosen = checked_hops(hops, axis)
    shard = shift(shard, axis, chosen[0])
    for hop, after in zip(chosen, [*chosen[1:], None], strict=True):
        arriving = None if after is None else shift(shard, axis, after - hop)  # under way while the visit is computed
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
    """Every shard visits every device and is given something there, and the sum of it all comes home.

    Args:
        visit: `visit(hop, shard, total) -> (total, given)`, where `given` always has the same shapes. At hop h, device i is
            visited by the shard of device `(i + h) % size`.
        shard, total, axis, hops: see `ring`; nothing is given at a hop without a visit. The shard may be an empty tuple.

    Returns:
        the total after the last visit, and the sum of what all devices gave to this device's shard.
    """
    chosen = checked_hops(hops, axis)
    shard = shift(shard, axis, chosen[0])
    carried = None
    for hop, after in zip(chosen, [*chosen[1:], jax.lax.axis_size(axis)], strict=True):
        arriving = None if hop == chosen[-1] else shift(shard, axis, after - hop)
        total, given = visit(hop, shard, total)
        # What was carried here has travelled while this visit was computed.
        carried = given if carried is None else jax.tree.map(lambda a, b: a + b, carried, given)
        carried = shift(carried, axis, after - hop)
        shard = arriving
    return total, carried


def gathered(visit: Callable[[int, Tree, Tree], Tree], shard: Tree, total: Tree, axis: Axis) -> Tree:
    """One visit, at hop 0, of all shards at once: their leading dims one after another, in the order of the devices."""
    return visit(0, gather(shard, axis), total)


def gathered_collect(
    visit: Callable[[int, Tree, Tree], tuple[Tree, Tree]], shard: Tree, total: Tree, axis: Axis
) -> tuple[Tree, Tree]:
    """`gathered`, where what is given is for all shards one after another, and each gets its own sum."""
    total, given = visit(0, gather(shard, axis), total)
    return total, jax.tree.map(lambda leaf: jax.lax.psum_scatter(leaf, axis, tiled=True), given)


def gather(shard: Tree, axis: Axis) -> Tree:
    """The shards of all devices, their leading dims one after another."""
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, axis, tiled=True), shard)


UNROLLED = 16
"""Devices on an axis up to which a route is unrolled unless it says otherwise: beyond it, programs take long to compile."""

Product = Callable[[Array, Any], Tree]
"""`product(rows [R, ...], w) -> tree of arrays [R, ...]`: what is computed of some rows, each row by itself."""


class RingDirection(NamedTuple):
    """One of the ways round a ring: rows come from the device `by` ahead (see `shift`), and go so many hops."""

    by: int
    hops: int


@dataclass(frozen=True)
class Route:
    """Route of the rows of shards round a ring.

    Attributes:
        bidirectional: every shard goes both ways at the same time, half as far each: links are used in both directions, there
            are half as many hops one after another, and two products to hide each. An even number of devices leaves the
            first way one hop more.
        looped: a `jax.lax.scan` over the hops, which compiles faster, for one more copy of the rows on the side where they are
            all together; by default where the axis has more than `UNROLLED` devices.
        chunk: rows that are sent and computed with at once, at most: the largest number up to it that divides a shard's rows,
            so that one route serves every shape. By default all of them, which makes the largest products and the fewest
            transfers; smaller ones let a part of a shard go on while the rest is computed.
    """

    bidirectional: bool = True
    looped: bool | None = None
    chunk: int | None = None

    def ways(self, size: int) -> list[RingDirection]:
        """Of a ring of so many devices, the longer one first; none goes nowhere."""
        back = (size - 1) // 2 if self.bidirectional else 0
        return [way for way in (RingDirection(1, size - 1 - back), RingDirection(-1, back)) if way.hops]

    def loop(self, size: int) -> int:
        """Number of rounds in a loop: those in which rows come and go on all ways."""
        looped = size > UNROLLED if self.looped is None else self.looped
        return max(0, min((way.hops for way in self.ways(size)), default=0) - 1) if looped else 0

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"expected a chunk of at least one row, found {self.chunk}")

    def chunk_of(self, rows: int) -> int:
        """Rows of a chunk of a shard that has so many."""
        return next(n for n in range(min(self.chunk or rows, rows), 0, -1) if rows % n == 0)


def all_gather_matmul(
    x: Shaped[Array, "M ..."],
    w: Any,
    axis: Axis,
    product: Product = jnp.matmul,
    route: Route = Route(),
) -> Tree:
    """The product of all devices' rows with this device's columns: rows are under way while those that came are multiplied.

    Equals `product(jax.lax.all_gather(x, axis, tiled=True), w)`. Its gradient by `x` is the ring of `matmul_reduce_scatter`;
    that by `w` is one product over all rows, which are kept for it; `jax.checkpoint` has them travel again.

    Args:
        x: this device's M rows.
        w: whatever the product takes: columns `[I, O]` of a matrix, several matrices, packed ones.
        axis: name of the mesh axis.
        product: of some rows and `w`. It may hold constants, but nothing that the gradient is taken by.
        route: how the rows travel.

    Returns:
        rows of all devices, in their order: `[M * devices, O]`, or a tree of such.

    Source: Wang et al. 2023, AllGather-Einsum with bidirectional transfers. What it replaces is the all-gather of Korthikanti
    et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
    """
    size = jax.lax.axis_size(axis)
    rows = len(x)
    ways = route.ways(size)
    chunk = route.chunk_of(rows)

    fixed = jax.lax.stop_gradient(w)

    def visit(held: list[list[Array]], going: list[RingDirection]) -> tuple[list[list[Array]], list[list[Tree]]]:
        return _sent(held, going, axis), [[(part, product(part, fixed)) for part in parts] for parts in held]

    own = [x[first : first + chunk] for first in range(0, rows, chunk)]
    held, (each, *_) = visit([own] * max(1, len(ways)), ways)
    tiles = {0: each}
    repeated = route.loop(size)
    if repeated:
        held, stacked = jax.lax.scan(lambda held, _: visit(held, ways), held, length=repeated)
        for way, each in zip(ways, stacked, strict=True):
            tiles |= {way.by * (hop + 1): jax.tree.map(itemgetter(hop), each) for hop in range(repeated)}
    for hop in range(repeated + 1, farthest(ways) + 1):
        held, made = visit(held, [way for way in ways if way.hops > hop])
        tiles |= {way.by * hop: each for way, each in zip(ways, made, strict=False)}
    starts = row_starts(tiles, rows, chunk, axis)
    whole, y = jax.tree.map(lambda *leaves: placed(leaves, starts), *(tile for each in tiles.values() for tile in each))
    return weighted(product, w, whole, y)


def _sent(held: list[list[Array]], going: list[RingDirection], axis: Axis) -> list[list[Array]]:
    """Arrays that arrive on the ways that go on, where each device sends what it holds."""
    arriving = [shift(parts, axis, way.by) for way, parts in zip(going, held, strict=False)]
    return tied(arriving)  # together: else the compiler lets one direction wait for the other


def matmul_reduce_scatter(
    x: Shaped[Array, "R ..."],
    w: Any,
    axis: Axis,
    product: Product = jnp.matmul,
    route: Route = Route(),
    dtype: DTypeLike | None = None,
) -> Tree:
    """The devices' products summed, each keeping its rows; sums are under way while the products that join them are computed.

    Equals `jax.lax.psum_scatter(product(x, w), axis, tiled=True)` but for the order of the sums. With n devices, p[i] for what
    device i has of the rows of device d, and i modulo n, rows that go one way have `((p[d + 1] + p[d + 2]) + ...) + p[d]`, and
    those that go both `(before + behind) + p[d]`: `before` is `(p[d - n // 2] + ...) + p[d - 1]`, and `behind`
    `(p[d + (n - 1) // 2] + ...) + p[d + 1]`. The gradient by `x` is the ring of `all_gather_matmul`, by `w` a sum over hops.

    Args:
        x: this device's columns of all rows, R of them.
        w: whatever the product takes: rows `[I, O]` of a matrix, for example.
        axis, product, route: see `all_gather_matmul`.
        dtype: of the sums on their way and of the result, by default that of the products. These may be wider.

    Returns:
        `[R / devices, O]`, or a tree of such.

    Raises:
        ValueError: the devices do not divide the rows.

    Source: Wang et al. 2023, Einsum-ReduceScatter; see `all_gather_matmul`.
    """
    size = jax.lax.axis_size(axis)
    ways = route.ways(size)
    chunk = route.chunk_of(shard_rows(len(x), axis))
    parts = _parts(x, ways, chunk, axis)

    def visit(sums: list[Tree], here: Sequence[Sequence[Array]]) -> list[Tree]:
        arriving = [shift(total, axis, -way.by) for way, total in zip(ways, sums, strict=False)]
        made = [[product(part, w) for part in each] for each in here]  # while those arrive
        joined = [_added(new, dtype, total) for total, new in zip(arriving, made, strict=False)]
        return joined + [_added(new, dtype) for new in made[len(arriving) :]]

    sums = []
    repeated = route.loop(size)
    for hop in range(farthest(ways), repeated, -1):
        sums = visit(sums, [parts[way.by * hop] for way in ways if way.hops >= hop])
    if repeated:
        here = [
            jax.tree.map(lambda *hops: jnp.stack(hops), *(parts[way.by * n] for n in range(repeated, 0, -1))) for way in ways
        ]
        sums, _ = jax.lax.scan(lambda sums, here: (visit(sums, here), None), sums, here)
    arriving = [shift(total, axis, -way.by) for way, total in zip(ways, sums, strict=True)]
    total = _added([product(part, w) for part in parts[0]], dtype, *arriving)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *total)


def _parts(x: Array, ways: Sequence[RingDirection], chunk: int, axis: Axis) -> dict[int, tuple[Array, ...]]:
    """For each hop the chunks of the device so far ahead."""
    hops = [0, *(way.by * hop for way in ways for hop in range(1, way.hops + 1))]
    tiles = sliced(x, row_starts(hops, len(x) // len(hops), chunk, axis))
    per = len(tiles) // len(hops)
    return {hop: tiles[n * per : (n + 1) * per] for n, hop in enumerate(hops)}


def _added(new: Tree, dtype: DTypeLike | None, *totals: Tree) -> Tree:
    """The sum of what came, `totals` in their order, and what is new, rounded once."""

    def of(own: Array, *came: Array) -> Array:
        before = [each.astype(own.dtype) for each in came]
        return (sum(before[1:], start=before[0]) + own if before else own).astype(dtype or own.dtype)

    return jax.tree.map(of, new, *totals)


def all_gather(x: Shaped[Array, "M ..."], axis: Axis, route: Route = Route()) -> Shaped[Array, "R ..."]:
    """`jax.lax.all_gather(x, axis, tiled=True)` by hops between neighbours; raises as `all_gather_matmul` does."""
    return all_gather_matmul(x, None, axis, _rows_alone, route)


def reduce_scatter(x: Shaped[Array, "R ..."], axis: Axis, route: Route = Route()) -> Shaped[Array, "M ..."]:
    """`jax.lax.psum_scatter(x, axis, tiled=True)` by hops between neighbours.

    The order of the sum is that of `matmul_reduce_scatter`, which raises the same.
    """
    return matmul_reduce_scatter(x, None, axis, _rows_alone, route)


def all_reduce(x: Float[Array, "R ..."], axis: Axis, route: Route = Route()) -> Float[Array, "R ..."]:
    """`jax.lax.psum(x, axis)` by `reduce_scatter` and `all_gather`: the same bits on all devices, rows summed in that order.

    Rows that the devices do not divide are taken for one row of numbers each, in as many pieces as there are devices: so
    little is sent for a few rows as for many, and at most a number per device is padding. A chunk of such pieces is the whole.
    """
    size = jax.lax.axis_size(axis)
    if len(x) % size == 0:
        return all_gather(reduce_scatter(x, axis, route), axis, route)
    pieces = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
    whole = replace(route, chunk=None)
    return all_gather(reduce_scatter(pieces, axis, whole), axis, whole).reshape(-1)[: x.size].reshape(x.shape)


def shard_rows(rows: int, axis: Axis) -> int:
    """A device's share of so many rows.

    Raises:
        ValueError: the devices do not divide them.
    """
    size = jax.lax.axis_size(axis)
    if rows % size:
        raise ValueError(f"expected rows that the {size} devices of {axis!r} divide, found {rows}")
    return rows // size


def farthest(ways: Sequence[RingDirection]) -> int:
    """Hops of the longest way; none of a single device."""
    return max((way.hops for way in ways), default=0)


def row_starts(hops: Iterable[int], rows: int, chunk: int, axis: Axis) -> tuple[Array, ...]:
    """First rows of chunks among the rows of all devices: for each hop those of the shard of the device so far ahead."""
    size = jax.lax.axis_size(axis)
    own = jax.lax.axis_index(axis)
    return tuple((own + hop) % size * rows + first for hop in hops for first in range(0, rows, chunk))


@jax.custom_vjp
def placed(tiles: tuple[Array, ...], starts: tuple[Array, ...]) -> Array:
    """Tiles of as many rows each, which begin in the whole at `starts` and cover it."""
    whole = jax.lax.empty((len(tiles) * len(tiles[0]), *tiles[0].shape[1:]), tiles[0].dtype)
    for tile, start in zip(tiles, starts, strict=True):
        whole = jax.lax.dynamic_update_slice_in_dim(whole, tile, start, 0)
    return whole


@jax.custom_vjp
def sliced(whole: Array, starts: tuple[Array, ...]) -> tuple[Array, ...]:
    """The inverse of `placed`."""
    size = len(whole) // len(starts)
    return tuple(jax.lax.dynamic_slice_in_dim(whole, start, size) for start in starts)


# They are permutations of rows, so that each is the other's transpose. JAX does not know that tiles cover the whole: it would
# write zeros in their places, or add as many whole arrays as there are tiles.
placed.defvjp(
    lambda tiles, starts: (placed(tiles, starts), starts), lambda starts, cotangent: (sliced(cotangent, starts), None)
)
sliced.defvjp(
    lambda whole, starts: (sliced(whole, starts), starts), lambda starts, cotangent: (placed(tuple(cotangent), starts), None)
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted(product: Product, w: Any, rows: Array, made: Tree) -> Tree:
    """A product of rows and constant weights as it was made, with the weights' gradient.

    That is one product over all rows: a sum of as many as there are tiles would go through memory as often.
    """
    return made


def _weights_backward(product: Product, kept: tuple[Any, Array], cotangent: Tree) -> tuple[Any, None, Tree]:
    w, rows = kept
    _, back = jax.vjp(lambda w: product(rows, w), w)
    return *back(cotangent), None, cotangent


weighted.defvjp(lambda product, w, rows, made: (made, (w, rows)), _weights_backward)


def _rows_alone(rows: Array, _: None) -> Array:
    return rows
