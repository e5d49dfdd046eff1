"""Sums that go hop by hop under products which do not depend on them: of another micro-batch, or of other columns.

After Wang et al., "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping" (2024): its
split of inputs by rows is `Domino`, that of weights by columns is `Column`.

Legend: M rows of a device, R of a micro-batch (M times devices), H hidden size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.operations import Norm, Operations, RoutedProduct, RoutedWeights, routed_in_place
from tilewright.parallel import rings
from tilewright.parallel.lanes import Lanes, Rows, farthest_first, gather, scatter
from tilewright.parallel.ordering import tied
from tilewright.parallel.schedules import TensorParallel, run_layers
from tilewright.parallel.turns import cut

LEAST_ROWS = 256
"""Of a tile: with fewer, a TPU takes longer to read the weights again than to multiply."""

INTENSITY = 4000.0
"""Operations that a chip does while a link passes a byte, where nothing else is said: about those of a v5e in bfloat16."""

LOADING = 128
"""Rows that take a chip as long as loading weights does, where nothing else is said; see `chips.tpu.TpuChip.loading_rows`."""

MOVING = 240.0
"""Operations that a chip does while a byte passes to or from its memory, where nothing else is said: those of a v5e."""

ATTENTION = 4.0
"""Factor on attention's products over the causal half: softmax was seen to take that much longer."""

PROJECTION_PASSES = 3
OUT_PASSES = 6
"""Passes through memory: of queries, keys and values before attention (placed together, rotated, cached), and of its output
around it (other layouts, and back)."""


@dataclass(frozen=True)
class Domino(TensorParallel):
    """Micro-batches that take turns, so that what one of them waits for is under way while another is computed.

    The residual stream is divided along the rows, as that of `Sequence`. A product that begins a half is computed of the rows
    of one device after another, as they come; one that ends it, of those of the farthest device first, whose sums set out at
    once. So collectives may begin before the half is done that makes them, and end after the half has begun that needs them.
    All of them, of all micro-batches, queue for the two ways round the ring (`lanes.Lanes`). As many bytes travel as in
    `TensorParallel`'s sums.

    A batch is divided by its rows, or, where these cannot be, by positions over caches; see `turns.cut`. It pays in prefill and
    training: in decoding every micro-batch reads all weights again. Micro-batches whose rows times positions the devices do not
    divide go the way of `TensorParallel`, as do layers whose halves begin with anything but a norm.

    Attributes:
        count: of the micro-batches; by default 4 where these are rows of the batch that leave a device enough of each for two
            tiles, and 2 elsewhere. The more there are, the more there is to compute while one of them waits.
        route: how rows and sums go round the ring: both ways or one; unrolled and in one chunk, whatever it says.
        least: rows of a tile; tiles are of as many devices' rows as make so many.
        intensity: operations of the core while a link passes a byte, which tell how much is computed beside a hop.
        loading, moving: rows that a product counts for besides its own, and operations of the core while a byte passes to or
            from its memory.
    """

    count: int | None = None
    route: rings.Route = field(default_factory=rings.Route)
    least: int = LEAST_ROWS
    intensity: float = INTENSITY
    loading: int = LOADING
    moving: float = MOVING

    def __post_init__(self) -> None:
        if (self.count is not None and self.count < 2) or self.least < 1:
            found = f"{self.count} and {self.least}"
            raise ValueError(f"expected at least 2 micro-batches, and tiles of at least 1 row, found {found}")

    def reduce(self, x: Array) -> Array:
        return rings.all_reduce(x.reshape(-1, x.shape[-1]), self.axis, self.route).reshape(x.shape)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`.

        Raises:
            ValueError: the batch cannot be divided; see `turns.cut`.
        """
        size, (batch, length, _) = jax.lax.axis_size(self.axis), x.shape
        many = batch % 4 == 0 and batch // 4 * length >= 2 * self.least * size
        count = self.count or (4 if many else 2)
        division = cut(x, rows, kept, count)
        if stack.norms is None or batch * length // count % size:
            return super().run(stack, x, rows, kept, taps)
        lanes = Lanes(self.axis, self.route.bidirectional, self.intensity, self.loading, self.moving)
        norms = [stack.norms(layer) for layer in stack.layers]
        groups = [MicroBatch(stack.ops, lanes, self.least, part, norms[0][0]) for part in division.streams(x)]
        around = [division.rows(rows, n) for n in range(count)]
        left = []
        turn = 0
        after = [norm for norm, _ in norms[1:]]
        for layer, whole, (_, norm), next_norm in zip(stack.layers, kept, norms, [*after, None], strict=True):
            for n, group in enumerate(groups):
                ops = group.operations(turn + count + n, norm, partial(stack.summed, stack.ops, layer, "attention"))
                projection = stack.project(ops, layer, group.own[None])
                lanes.moved(projection, PROJECTION_PASSES)
                projection = lanes.beside(projection)
                out, own = stack.attend(stack.ops, layer, projection, around[n], division.kept(whole, n))
                whole = division.with_group(whole, n, own)
                lanes.worked(ATTENTION * 2.0 * out.size * out.shape[1])
                lanes.moved(out, OUT_PASSES)
                stack.output(ops, layer, lanes.beside(out))
            for n, group in enumerate(groups):
                summed = partial(stack.summed, stack.ops, layer, "mlp")
                stack.mlp(group.operations(turn + 2 * count + n, next_norm, summed), layer, group.own[None])
            turn += 2 * count
            left.append(whole)

        def joined(layer: int) -> Array:
            own = [group.after(layer) for group in groups]
            parts = [rings.all_gather(part, self.axis, self.route) for part in own]
            return division.joined([part.reshape(group.shape) for group, part in zip(groups, parts, strict=True)])

        last = len(stack.layers) - 1
        return joined(last), tuple(joined(tap) for tap in taps), tuple(left)


class MicroBatch:
    """A micro-batch on its way through the layers. It exists while a program is traced.

    Attributes:
        own: this device's rows of its residual stream, `[M, H]`, after the last half whose sum has come.
        halves: the same after each half.
        begun: halves whose sums were begun.
        rows: normed ones of all devices, as far as they have come.
    """

    def __init__(self, ops: Operations, lanes: Lanes, least: int, x: Float[Array, "B T H"], norm: Norm):
        """`norm` is the one that the layers begin with."""
        self.ops = ops
        self.lanes = lanes
        self.shape = x.shape
        size = rings.shard_rows(x.shape[0] * x.shape[1], lanes.axis)
        self.own = jax.lax.dynamic_slice_in_dim(x.reshape(-1, x.shape[-1]), jax.lax.axis_index(lanes.axis) * size, size)
        self.halves: list[Array] = []
        self.begun = 0
        self.at_once = min(lanes.size, ceil(least / size))
        self.rows: Rows = self.cut(ops.rms_norm(x, *norm))

    def starts(self, order: Iterable[int]) -> tuple[Array, ...]:
        """First rows of devices in the micro-batch; they are named by how many places they are ahead."""
        return rings.row_starts(order, len(self.own), len(self.own), self.lanes.axis)

    def after(self, layer: int) -> Float[Array, "M H"]:
        """`own` after a layer that was begun."""
        self.lanes.wait(lambda: len(self.halves) >= 2 * layer + 2)
        return self.halves[2 * layer + 1]

    def operations(self, due: int, after: Norm | None, summed: Callable[[Array], Array]) -> Operations:
        """Products of a half: one of the rows that come, and one whose sum is begun and is added to `own` when it has come.

        Args:
            due: the turn of this micro-batch's next half among all halves, in the order in which they are computed.
            after: the norm of the next half, for which rows are gathered when the sum has come; None if there is none.
            summed: what the sum becomes before it is added, row by row.
        """
        ops = self.ops
        inner = []
        end = SumEnd(due, after, summed)

        def begin(
            _: Operations, product: Callable[..., Any], x: Array, w: Any, norm: Norm | None = None, count: Any = None
        ) -> Any:
            return self.of_all_rows(partial(product, ops), w)

        def project(x: Array, w: Any, norm: Norm | None = None, bias: Any = None, count: Any = None, **which: int) -> Any:
            return self.of_all_rows(lambda rows, w: ops.project(rows, w[0], bias=w[1], **which), (w, bias))

        def gated_linear(x: Array, w: Any, norm: Norm | None = None, count: Any = None) -> Array:
            inner.append(self.tiles(ops.gated_linear, w))  # for `linear`, by which both are computed device by device
            return x

        def linear(
            x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, add: Array | None = None, count: Any = None
        ) -> Array:
            def part(rows: Array, w: Any) -> Array:
                return ops.linear(rows, w, jnp.float32)

            if inner:
                self.sum_tiles(inner.pop(), part, w, end)
            else:
                self.begin_sum(self.lanes.ways(), self.cut(x), part, w, end)
            return self.own[None]

        def routed(
            _: Operations,
            product: RoutedProduct,
            x: Array,
            w: RoutedWeights,
            norm: Norm | None = None,
            add: Array | None = None,
            count: Any = None,
        ) -> Array:
            tiles = self.tiles(lambda rows, w: product(ops, rows, w), w, product.chosen / product.experts)
            self.sum_tiles(tiles, lambda rows, _: rows, None, end)
            return self.own[None]

        return replace(ops, begin=begin, project=project, gated_linear=gated_linear, linear=linear, routed=routed)

    def of_all_rows(self, product: rings.Product, w: Any) -> Any:
        """A product of all rows, `[B, T, ...]`, as they come."""
        made = self.tiles(product, w).all()
        starts = self.starts(made)

        def whole(*parts: Array) -> Array:
            return rings.placed(parts, starts).reshape(*self.shape[:-1], *parts[0].shape[1:])

        return jax.tree.map(whole, *made.values())

    def tiles(self, product: rings.Product, w: Any, share: float = 1.0) -> "Tiles":
        """A product of the rows that come, once the sum has come that was begun last."""
        self.lanes.wait(lambda: len(self.halves) == self.begun)
        return Tiles(self.lanes, product, w, self.rows, self.at_once, share)

    def cut(self, x: Float[Array, "B T I"]) -> Rows:
        """All rows, device by device."""
        order = range(self.lanes.size)
        return dict(zip(order, rings.sliced(x.reshape(-1, x.shape[-1]), self.starts(order)), strict=True))

    def sum_tiles(self, tiles: "Tiles", product: rings.Product, w: Any, end: "SumEnd") -> None:
        """Begins a sum, as `begin_sum`, of tiles that are made of rows as they come.

        When all have come, the farthest devices' are made first.
        """
        while len(tiles.rows) < self.lanes.size > len(tiles.made):
            tiles.next()
        lengths = self.lanes.ways()
        tiles.order = farthest_first(lengths, self.lanes.size)
        while not tiles.made.keys() >= set(tiles.order[: len(lengths)]):
            tiles.next()
        self.begin_sum(lengths, tiles, product, w, end)
        tiles.all()

    def begin_sum(self, lengths: dict[int, int], rows: "Rows | Tiles", product: rings.Product, w: Any, end: "SumEnd") -> None:
        """Begins the sum of the devices' products of rows, and what follows when it has come; see `operations`."""

        def part(at: int, *came: Array) -> Array:
            self.lanes.worked(self.lanes.of_products(w, len(self.own)))
            own, came = tied((rows[at], came))  # else what comes is added by itself
            made = weighted(product, w, own)
            return sum((each.astype(made.dtype) for each in came), made).astype(self.own.dtype)

        def then(total: Array) -> None:
            self.own = self.own + end.summed(total)
            self.halves.append(self.own)
            if end.after is not None:
                self.rows = {0: self.ops.rms_norm(self.own, *end.after)}
                gather(self.lanes, self.rows, end.due)

        self.begun += 1
        scatter(self.lanes, lengths, part, end.due, then)


class SumEnd(NamedTuple):
    """End of a half, when its sum has come; see `MicroBatch.operations`."""

    due: int
    after: Norm | None
    summed: Callable[[Array], Array]


@dataclass
class Tiles:
    """A product of the rows of one device after another, computed when its turn comes or when it is asked for.

    Attributes:
        rows: as far as they have come.
        at_once: how many devices' rows make a tile.
        share: of the rows, that are multiplied with a matrix.
        made: what was computed, by how many places the device is ahead.
        order: of the devices; that in which they come if it is empty.
    """

    lanes: Lanes
    product: rings.Product
    w: Any
    rows: Rows
    at_once: int
    share: float = 1.0
    made: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def __getitem__(self, at: int) -> Any:
        if at not in self.made:
            self.compute([at])
        return self.made[at]

    def compute(self, places: Sequence[int]) -> None:
        rows = together([self.rows[at] for at in places])
        self.lanes.worked(self.lanes.of_products(self.w, self.share * len(rows)))
        leaves, tree = jax.tree.flatten(weighted(self.product, self.w, rows))
        for at, *parts in zip(places, *(jnp.split(leaf, len(places)) for leaf in leaves), strict=True):
            self.made[at] = tree.unflatten(parts)
            self.lanes.loose.append((self.made, at))

    def next(self) -> None:
        """The next tile, beside what is under way."""
        most = min(self.at_once, self.lanes.size - len(self.made))
        self.lanes.wait(lambda: len(self.rows) >= len(self.made) + most)
        new = [at for at in self.order or self.rows if at not in self.made][:most]
        self.compute(new)
        made = {at: self.made[at] for at in new}
        left = {at: rows for at, rows in self.rows.items() if at not in self.made}
        made, left = self.lanes.beside((made, left), self.lanes.of_products(self.w, self.share * most * len(self.rows[0])))
        self.made.update(made)
        self.rows.update(left)

    def all(self) -> dict[int, Any]:
        """Results of all rows; makes those that are missing."""
        while len(self.made) < self.lanes.size:
            self.next()
        return self.made


def weighted(product: rings.Product, w: Any, rows: Array) -> Any:
    """The product, and its gradient by the weights for itself; see `rings.weighted`."""
    return rings.weighted(product, w, rows, product(rows, jax.lax.stop_gradient(w)))


def together(tiles: Sequence[Array]) -> Array:
    """One after another; a TPU's compiler takes longer to concatenate them."""
    starts = tuple(jnp.int32(n * len(tiles[0])) for n in range(len(tiles)))
    return tiles[0] if len(tiles) == 1 else rings.placed(tuple(tiles), starts)


@dataclass(frozen=True)
class Column(TensorParallel):
    """The columns of each half's last product in parts, the sum of one under way while the next one is computed.

    The last part's sum is exposed, for the halves of a layer follow one another; what is hidden is at most all but one of
    `parts`. Every weight is read once, so that it suits batches that cannot be divided. As many bytes as `TensorParallel`'s.

    Attributes:
        parts: of the columns of output and down projections; they divide the hidden size.
        route, least: see `Domino`.
    """

    parts: int = 2
    route: rings.Route = field(default_factory=rings.Route)
    least: int = LEAST_ROWS

    def __post_init__(self) -> None:
        if self.parts < 2 or self.least < 1:
            found = f"{self.parts} and {self.least}"
            raise ValueError(f"expected at least 2 parts, and tiles of at least 1 row, found {found}")

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`.

        Raises:
            ValueError: the parts do not divide the hidden size, or weights were packed, which cannot be cut.
        """
        own = stack.ops
        ops = replace(own, linear=partial(self.summed, own), routed=partial(self.routed, own), begin=partial(self.begun, own))
        return run_layers(replace(stack, ops=ops), x, rows, kept, taps, lambda x: x)

    def begun(
        self,
        ops: Operations,
        _: Operations,
        product: Callable[..., Any],
        x: Array,
        w: Any,
        norm: Norm | None = None,
        count: Any = None,
    ) -> Any:
        """`Operations.begin` by a device's own columns, whose products are summed nowhere."""
        return product(ops, x, w, norm, count)

    def summed(
        self,
        ops: Operations,
        x: Array,
        w: Any,
        out_dtype: Any = None,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Any = None,
    ) -> Array:
        """The sum of the devices' products."""
        cut = isinstance(w, Array | ScaledMatrix)
        if not cut or w.shape[1] % self.parts:
            found = f"one of {w.shape[1]} columns" if cut else f"a {type(w).__name__}"
            raise ValueError(f"expected a matrix whose columns {self.parts} parts divide, found {found}")
        rows = (x if norm is None else ops.rms_norm(x, *norm)).reshape(-1, x.shape[-1])
        lanes = Lanes(self.axis, self.route.bidirectional)
        sums = []
        for n in range(self.parts):
            part = jnp.split(w, self.parts, axis=1)[n] if isinstance(w, Array) else w.cut(n, self.parts, 1)
            made = self.product(lanes, lambda rows, w: ops.linear(rows, w, out_dtype), rows, part)
            sums.append(Sum(lanes, made, len(sums)))
        y = jnp.concatenate([each.wait() for each in sums], axis=-1).reshape(*x.shape[:-1], -1)
        return y if add is None else add + y

    def routed(
        self,
        ops: Operations,
        _: Operations,
        product: RoutedProduct,
        x: Array,
        w: RoutedWeights,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Any = None,
    ) -> Array:
        """The sum of the devices' experts, in one part: experts' matrices are cut nowhere."""
        made = routed_in_place(ops, product, x, w, norm, count=count)
        y = Sum(Lanes(self.axis, self.route.bidirectional), made.reshape(-1, x.shape[-1]), 0).wait().reshape(x.shape)
        return y if add is None else add + y

    def product(self, lanes: Lanes, product: rings.Product, rows: Float[Array, "R I"], w: Any) -> Float[Array, "R O"]:
        """The product of all rows, a tile of them beside each hop of a sum that is under way, where tiles are large enough."""
        most = max(1, *(2 * lane.hops for lane in lanes.lanes.values()))
        fixed = jax.lax.stop_gradient(w)
        count = next(n for n in range(most, 0, -1) if n == 1 or (len(rows) % n == 0 and len(rows) // n >= self.least))
        left = jnp.split(rows, count)
        made = []
        while left:
            tile, left = lanes.beside((product(left[0], fixed), left[1:]))
            made.append(tile)
        return rings.weighted(product, w, rows, together(made))


class Sum:
    """A sum over the devices on its way. Rows that they do not divide go in pieces of their numbers, the last one padded."""

    def __init__(self, lanes: Lanes, x: Float[Array, "R O"], due: int):
        self.lanes = lanes
        self.shape = x.shape
        pieces = x if len(x) % lanes.size == 0 else jnp.pad(x.reshape(-1), (0, -x.size % lanes.size)).reshape(lanes.size, -1)
        self.size = len(pieces) // lanes.size
        parts = rings.sliced(pieces, self.starts(range(lanes.size)))
        self.rows: Rows = {}

        def then(total: Array) -> None:
            self.rows[0] = total
            gather(lanes, self.rows, due)

        def part(at: int, *came: Array) -> Array:
            return sum(came, parts[at])

        scatter(lanes, lanes.ways(), part, due, then)

    def starts(self, order: Iterable[int]) -> tuple[Array, ...]:
        return rings.row_starts(order, self.size, self.size, self.lanes.axis)

    def wait(self) -> Float[Array, "R O"]:
        self.lanes.wait(lambda: len(self.rows) == self.lanes.size)
        whole = rings.placed(tuple(self.rows.values()), self.starts(self.rows))
        return whole.reshape(-1)[: prod(self.shape)].reshape(self.shape)
