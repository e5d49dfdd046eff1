"""Reduce-scatters and all-gathers, hop by hop, under matmuls of another micro-batch or of other columns.

After Wang et al., "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping" (2024):
`Domino` splits inputs by rows, `Column` splits weights by columns.

Legend: M rows of a device, R rows of a micro-batch (M times devices), H hidden size, I inner size, O output size.
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
from tilewright.parallel.micro_batches import split_batch
from tilewright.parallel.ordering import tied
from tilewright.parallel.strategies import TensorParallel, run_layers

LEAST_ROWS = 256
"""Minimum rows of a tile; with fewer rows, a TPU takes longer to read the weights again than to multiply."""

INTENSITY = 4000.0
"""Default operations of a chip per byte on a link, about those of a v5e in bfloat16."""

LOADING = 128
"""Default number of rows with the matmul time of one weight load; see `hardware.tpu.TpuChip.loading_rows`."""

MOVING = 240.0
"""Default operations of a chip per byte of device memory traffic, those of a v5e."""

ATTENTION = 4.0
"""Factor on the operations of causal attention, for the observed time of softmax."""

PROJECTION_PASSES = 3
OUT_PASSES = 6
"""Passes through device memory: of queries, keys and values before attention (joined, rotated, cached), and of its output
(changes of layout)."""


@dataclass(frozen=True)
class Domino(TensorParallel):
    """Tensor-parallel strategy that overlaps the collectives of one micro-batch with the compute of another.

    The residual stream is sharded along its rows, as in `Sequence`. The first product of a half computes one device's rows
    after another, as the rows arrive; the last product starts with the farthest device's rows, whose partial sums leave at
    once. A half's collectives may therefore begin before its products end and end after the next half begins. The collectives
    of all micro-batches queue for the two directions of the ring (`lanes.Lanes`). The bytes sent equal those of
    `TensorParallel`'s all-reduces.

    The batch is divided by rows or, where `count` does not divide them, by positions over caches; see
    `micro_batches.split_batch`. The strategy pays off in prefill and training; a decode step reads all weights once per
    micro-batch. Micro-batches with rows times positions that the devices do not divide run as under `TensorParallel`, as do
    layers with a half that begins with anything but a norm.

    Attributes:
        count: number of micro-batches. Default: 4 where the batch's rows divide by 4 and each device gets at least two tiles of
            rows per micro-batch, else 2. More micro-batches leave more compute to overlap with each collective.
        route: directions of the ring: both or one. Hops are always unrolled and in one chunk, whatever the route sets.
        least: minimum rows of a tile; a tile joins the rows of several devices to reach it.
        intensity: operations of the core per byte on a link; sets how much compute is placed beside a hop.
        loading: extra rows that each product counts for, the time to load its weights.
        moving: operations of the core per byte of device memory traffic.
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
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`.

        Raises:
            ValueError: the batch cannot be divided; see `micro_batches.split_batch`.
        """
        size, (batch, length, _) = jax.lax.axis_size(self.axis), x.shape
        many = batch % 4 == 0 and batch // 4 * length >= 2 * self.least * size
        count = self.count or (4 if many else 2)
        split = split_batch(x, rows, caches, count)
        if stack.norms is None or batch * length // count % size:
            return super().run(stack, x, rows, caches, taps)
        lanes = Lanes(self.axis, self.route.bidirectional, self.intensity, self.loading, self.moving)
        norms = [stack.norms(layer) for layer in stack.layers]
        groups = [MicroBatch(stack.ops, lanes, self.least, part, norms[0][0]) for part in split.split(x)]
        group_rows = [split.rows(rows, n) for n in range(count)]
        new_caches = []
        position = 0  # of this layer's first half among the halves of all micro-batches, in the order of compute
        next_norms = [norm for norm, _ in norms[1:]]
        for layer, cache, (_, norm), next_norm in zip(stack.layers, caches, norms, [*next_norms, None], strict=True):
            for n, group in enumerate(groups):
                post_reduce = partial(stack.post_reduce, stack.ops, layer, "attention")
                ops = group.operations(position + count + n, norm, post_reduce)
                projection = stack.project(ops, layer, group.stream[None])
                lanes.count_traffic(projection, PROJECTION_PASSES)
                projection = lanes.overlap(projection)
                out, part = stack.attend(stack.ops, layer, projection, group_rows[n], split.cache(cache, n))
                cache = split.with_cache(cache, n, part)
                lanes.count_compute(ATTENTION * 2.0 * out.size * out.shape[1])
                lanes.count_traffic(out, OUT_PASSES)
                stack.output(ops, layer, lanes.overlap(out))
            for n, group in enumerate(groups):
                post_reduce = partial(stack.post_reduce, stack.ops, layer, "mlp")
                stack.mlp(group.operations(position + 2 * count + n, next_norm, post_reduce), layer, group.stream[None])
            position += 2 * count
            new_caches.append(cache)

        def joined(layer: int) -> Array:
            streams = [group.after(layer) for group in groups]
            parts = [rings.all_gather(stream, self.axis, self.route) for stream in streams]
            return split.join([part.reshape(group.shape) for group, part in zip(groups, parts, strict=True)])

        last = len(stack.layers) - 1
        return joined(last), tuple(joined(tap) for tap in taps), tuple(new_caches)


class MicroBatch:
    """Residual stream of a micro-batch and its progress through the layers, while a program is traced.

    Attributes:
        stream: this device's rows of the residual stream, `[M, H]`, after the last half with a complete sum.
        halves: `stream` after each half.
        begun: number of halves with a sum that has begun.
        rows: normed rows of all devices that have arrived so far.
    """

    def __init__(self, ops: Operations, lanes: Lanes, least: int, x: Float[Array, "B T H"], norm: Norm):
        """Takes this device's rows of `x`, and norms all rows with `norm`, the first norm of the layers."""
        self.ops = ops
        self.lanes = lanes
        self.shape = x.shape
        size = rings.shard_rows(x.shape[0] * x.shape[1], lanes.axis)
        first = jax.lax.axis_index(lanes.axis) * size
        self.stream = jax.lax.dynamic_slice_in_dim(x.reshape(-1, x.shape[-1]), first, size)
        self.halves: list[Array] = []
        self.begun = 0
        self.at_once = min(lanes.size, ceil(least / size))
        self.rows: Rows = self.by_device(ops.rms_norm(x, *norm))

    def starts(self, order: Iterable[int]) -> tuple[Array, ...]:
        """First rows of devices in the micro-batch; a device is given by the number of places it is ahead."""
        return rings.row_starts(order, len(self.stream), len(self.stream), self.lanes.axis)

    def after(self, layer: int) -> Float[Array, "M H"]:
        """`stream` after a layer that has begun; waits for the layer's sums."""
        self.lanes.wait(lambda: len(self.halves) >= 2 * layer + 2)
        return self.halves[2 * layer + 1]

    def operations(self, deadline: int, next_norm: Norm | None, post_reduce: Callable[[Array], Array]) -> Operations:
        """Operations of a half: the first matmul takes rows as they arrive, the last one begins the half's sum.

        The sum is added to `stream` when complete.

        Args:
            deadline: position of this micro-batch's next half among all halves, in the order of compute.
            next_norm: norm of the next half; its rows are gathered when the sum is complete. None after the last half.
            post_reduce: applied to the sum, row by row, before the addition.
        """
        ops = self.ops
        inner = []
        end = SumEnd(deadline, next_norm, post_reduce)

        def begin(
            _: Operations, product: Callable[..., Any], x: Array, w: Any, norm: Norm | None = None, count: Any = None
        ) -> Any:
            return self.of_all_rows(partial(product, ops), w)

        def project(x: Array, w: Any, norm: Norm | None = None, bias: Any = None, count: Any = None, **span: int) -> Any:
            return self.of_all_rows(lambda rows, w: ops.project(rows, w[0], bias=w[1], **span), (w, bias))

        def gated_linear(x: Array, w: Any, norm: Norm | None = None, count: Any = None) -> Array:
            inner.append(self.tiles(ops.gated_linear, w))  # `linear` computes both matmuls device by device
            return x

        def linear(
            x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, add: Array | None = None, count: Any = None
        ) -> Array:
            def part(rows: Array, w: Any) -> Array:
                return ops.linear(rows, w, jnp.float32)

            if inner:
                self.sum_tiles(inner.pop(), part, w, end)
            else:
                self.begin_sum(self.lanes.hop_counts(), self.by_device(x), part, w, end)
            return self.stream[None]

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
            return self.stream[None]

        return replace(ops, begin=begin, project=project, gated_linear=gated_linear, linear=linear, routed=routed)

    def of_all_rows(self, product: rings.Product, w: Any) -> Any:
        """Computes a product of all rows, `[B, T, ...]`, as they arrive."""
        results = self.tiles(product, w).all()
        starts = self.starts(results)

        def whole(*parts: Array) -> Array:
            return rings.placed(parts, starts).reshape(*self.shape[:-1], *parts[0].shape[1:])

        return jax.tree.map(whole, *results.values())

    def tiles(self, product: rings.Product, w: Any, share: float = 1.0) -> "Tiles":
        """Returns a product of the rows as they arrive, after waiting for the last sum that has begun."""
        self.lanes.wait(lambda: len(self.halves) == self.begun)
        return Tiles(self.lanes, product, w, self.rows, self.at_once, share)

    def by_device(self, x: Float[Array, "B T I"]) -> Rows:
        """Splits all rows by device."""
        order = range(self.lanes.size)
        return dict(zip(order, rings.sliced(x.reshape(-1, x.shape[-1]), self.starts(order)), strict=True))

    def sum_tiles(self, tiles: "Tiles", product: rings.Product, w: Any, end: "SumEnd") -> None:
        """Begins a sum, as `begin_sum`, of tiles that are computed from rows as they arrive.

        Once all rows have arrived, the farthest devices' tiles are computed first.
        """
        while len(tiles.rows) < self.lanes.size > len(tiles.results):
            tiles.next()
        hop_counts = self.lanes.hop_counts()
        tiles.order = farthest_first(hop_counts, self.lanes.size)
        while not tiles.results.keys() >= set(tiles.order[: len(hop_counts)]):
            tiles.next()
        self.begin_sum(hop_counts, tiles, product, w, end)
        tiles.all()

    def begin_sum(
        self, hop_counts: dict[int, int], rows: "Rows | Tiles", product: rings.Product, w: Any, end: "SumEnd"
    ) -> None:
        """Begins the reduce-scatter of the devices' products of rows; see `operations` for its end."""

        def part(at: int, *received: Array) -> Array:
            self.lanes.count_compute(self.lanes.matmul_operations(w, len(self.stream)))
            inputs, received = tied((rows[at], received))  # otherwise the compiler adds the received sums separately
            result = weighted(product, w, inputs)
            return sum((each.astype(result.dtype) for each in received), result).astype(self.stream.dtype)

        def on_complete(total: Array) -> None:
            self.stream = self.stream + end.post_reduce(total)
            self.halves.append(self.stream)
            if end.next_norm is not None:
                self.rows = {0: self.ops.rms_norm(self.stream, *end.next_norm)}
                gather(self.lanes, self.rows, end.deadline)

        self.begun += 1
        scatter(self.lanes, hop_counts, part, end.deadline, on_complete)


class SumEnd(NamedTuple):
    """Arguments for the end of a half's sum; see `MicroBatch.operations`."""

    deadline: int
    next_norm: Norm | None
    post_reduce: Callable[[Array], Array]


@dataclass
class Tiles:
    """A product of rows, computed device by device on demand.

    Attributes:
        rows: rows that have arrived so far.
        at_once: number of devices in a tile.
        share: share of the rows that are multiplied with a matrix.
        results: results so far, by the number of places that the device is ahead.
        order: order of devices; empty for the order of arrival.
    """

    lanes: Lanes
    product: rings.Product
    w: Any
    rows: Rows
    at_once: int
    share: float = 1.0
    results: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def __getitem__(self, at: int) -> Any:
        if at not in self.results:
            self.compute([at])
        return self.results[at]

    def compute(self, places: Sequence[int]) -> None:
        """Computes the rows of some devices as one tile."""
        rows = together([self.rows[at] for at in places])
        self.lanes.count_compute(self.lanes.matmul_operations(self.w, self.share * len(rows)))
        leaves, tree = jax.tree.flatten(weighted(self.product, self.w, rows))
        for at, *parts in zip(places, *(jnp.split(leaf, len(places)) for leaf in leaves), strict=True):
            self.results[at] = tree.unflatten(parts)
            self.lanes.untied.append((self.results, at))

    def next(self) -> None:
        """Computes the next tile and ties hops in flight to it."""
        most = min(self.at_once, self.lanes.size - len(self.results))
        self.lanes.wait(lambda: len(self.rows) >= len(self.results) + most)
        places = [at for at in self.order or self.rows if at not in self.results][:most]
        self.compute(places)
        new = {at: self.results[at] for at in places}
        left = {at: rows for at, rows in self.rows.items() if at not in self.results}
        following = self.lanes.matmul_operations(self.w, self.share * most * len(self.rows[0]))
        new, left = self.lanes.overlap((new, left), following)
        self.results.update(new)
        self.rows.update(left)

    def all(self) -> dict[int, Any]:
        """Computes the missing tiles and returns the results of all rows."""
        while len(self.results) < self.lanes.size:
            self.next()
        return self.results


def weighted(product: rings.Product, w: Any, rows: Array) -> Any:
    """Computes a product with the weight gradient as a separate product; see `rings.weighted`."""
    return rings.weighted(product, w, rows, product(rows, jax.lax.stop_gradient(w)))


def together(tiles: Sequence[Array]) -> Array:
    """Joins tiles along their rows by updates in place, which a TPU compiler makes faster than a concatenation."""
    starts = tuple(jnp.int32(n * len(tiles[0])) for n in range(len(tiles)))
    return tiles[0] if len(tiles) == 1 else rings.placed(tuple(tiles), starts)


@dataclass(frozen=True)
class Column(TensorParallel):
    """Tensor-parallel strategy that computes each half's last matmul in parts of columns, each part under the sum of the last.

    The sum of the last part is exposed, because the next half needs it; at most all parts but one are hidden. Each weight is
    read once, so the strategy suits batches that cannot be divided. It sends as many bytes as `TensorParallel`.

    Attributes:
        parts: number of parts of the columns of output and down projections; divides the hidden size.
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
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`.

        Raises:
            ValueError: the parts do not divide the hidden size, or the weights are packed and cannot be sliced.
        """
        plain = stack.ops
        ops = replace(
            plain,
            linear=partial(self.summed, plain),
            routed=partial(self.routed, plain),
            begin=partial(self.begin, plain),
        )
        return run_layers(replace(stack, ops=ops), x, rows, caches, taps, lambda x: x)

    def begin(
        self,
        ops: Operations,
        _: Operations,
        product: Callable[..., Any],
        x: Array,
        w: Any,
        norm: Norm | None = None,
        count: Any = None,
    ) -> Any:
        """`Operations.begin` with this device's columns; no sum over devices follows."""
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
        """Computes `Operations.linear` and sums it over the devices, a part of the columns at a time."""
        sliceable = isinstance(w, Array | ScaledMatrix)
        if not sliceable or w.shape[1] % self.parts:
            found = f"one of {w.shape[1]} columns" if sliceable else f"a {type(w).__name__}"
            raise ValueError(f"expected a matrix whose columns {self.parts} parts divide, found {found}")
        rows = (x if norm is None else ops.rms_norm(x, *norm)).reshape(-1, x.shape[-1])
        lanes = Lanes(self.axis, self.route.bidirectional)
        sums = []
        for n in range(self.parts):
            part = jnp.split(w, self.parts, axis=1)[n] if isinstance(w, Array) else w.cut(n, self.parts, 1)
            partial_sum = self.product(lanes, lambda rows, w: ops.linear(rows, w, out_dtype), rows, part)
            sums.append(Sum(lanes, partial_sum, len(sums)))
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
        """`Operations.routed`, summed over the devices in one part; the matrices of experts are not split."""
        partial_sum = routed_in_place(ops, product, x, w, norm, count=count)
        lanes = Lanes(self.axis, self.route.bidirectional)
        y = Sum(lanes, partial_sum.reshape(-1, x.shape[-1]), 0).wait().reshape(x.shape)
        return y if add is None else add + y

    def product(self, lanes: Lanes, product: rings.Product, rows: Float[Array, "R I"], w: Any) -> Float[Array, "R O"]:
        """Computes a product with one tile of rows per hop in flight, as far as tiles have at least `least` rows."""
        most = max(1, *(2 * lane.hops for lane in lanes.lanes.values()))
        fixed = jax.lax.stop_gradient(w)
        count = next(n for n in range(most, 0, -1) if n == 1 or (len(rows) % n == 0 and len(rows) // n >= self.least))
        left = jnp.split(rows, count)
        tiles = []
        while left:
            tile, left = lanes.overlap((product(left[0], fixed), left[1:]))
            tiles.append(tile)
        return rings.weighted(product, w, rows, together(tiles))


class Sum:
    """A sum over the devices in progress.

    Rows that the devices do not divide are flattened and padded to one piece per device.
    """

    def __init__(self, lanes: Lanes, x: Float[Array, "R O"], deadline: int):
        self.lanes = lanes
        self.shape = x.shape
        pieces = x if len(x) % lanes.size == 0 else jnp.pad(x.reshape(-1), (0, -x.size % lanes.size)).reshape(lanes.size, -1)
        self.size = len(pieces) // lanes.size
        parts = rings.sliced(pieces, self.starts(range(lanes.size)))
        self.rows: Rows = {}

        def on_complete(total: Array) -> None:
            self.rows[0] = total
            gather(lanes, self.rows, deadline)

        def part(at: int, *received: Array) -> Array:
            return sum(received, parts[at])

        scatter(lanes, lanes.hop_counts(), part, deadline, on_complete)

    def starts(self, order: Iterable[int]) -> tuple[Array, ...]:
        return rings.row_starts(order, self.size, self.size, self.lanes.axis)

    def wait(self) -> Float[Array, "R O"]:
        self.lanes.wait(lambda: len(self.rows) == self.lanes.size)
        whole = rings.placed(tuple(self.rows.values()), self.starts(self.rows))
        return whole.reshape(-1)[: prod(self.shape)].reshape(self.shape)
