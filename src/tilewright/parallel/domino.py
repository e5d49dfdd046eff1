"""Sums that go hop by hop under tiles of products which do not depend on them: of another micro-batch, or of other columns.

After Wang et al., "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping" (2024): its
split of inputs by rows is `Domino`, that of weights by columns is `Column`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.operations import Norm, Operations
from tilewright.parallel import rings
from tilewright.parallel.schedules import TensorParallel, run_layers
from tilewright.parallel.turns import cut

Tree = TypeVar("Tree")

LEAST_ROWS = 256
"""Of a tile: with fewer, a TPU takes longer to read the weights again than to multiply."""


@dataclass(frozen=True)
class Domino(TensorParallel):
    """Micro-batches that take turns, so that what one of them waits for is under way while another is computed.

    The residual stream is divided along the rows, as that of `Sequence`. Products of the attention half are too short to hide
    their own rows' travels: these are gathered, and partial sums scattered, hop by hop under the other's products. The MLP's
    are long enough: they are those of `Ring`, under whose first one the other's hops find room too. Every hop is a permute
    between neighbours, which every TPU's compiler lets run beside products, and is tied to a tile of them, for otherwise the
    compiler puts all tiles beside one hop and nothing beside the others. As many bytes travel as in `TensorParallel`'s sums.
    The gradient's hops are tied to its tiles in the same way.

    A batch is divided by its rows, or, where these cannot be, by positions over caches; see `turns.cut`. It pays in prefill and
    training: in decoding every micro-batch reads all weights again. Micro-batches whose rows times positions the devices do not
    divide go the way of `TensorParallel`, as do layers whose halves begin with anything but a norm.

    Attributes:
        count: of the micro-batches.
        route: how rows and sums go round the ring; unrolled and in one chunk, whatever it says.
        least: rows of a tile; products of fewer than twice as many stay whole.
    """

    count: int = 2
    route: rings.Route = field(default_factory=rings.Route)
    least: int = LEAST_ROWS

    def __post_init__(self) -> None:
        if self.count < 2 or self.least < 1:
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
        how = cut(x, rows, kept, self.count)
        if stack.norms is None or x.shape[0] * x.shape[1] // self.count % jax.lax.axis_size(self.axis):
            return super().run(stack, x, rows, kept, taps)
        norms, beside = [stack.norms(layer)[0] for layer in stack.layers], BesideTiles(self.axis, self.route, self.least, 4)
        groups = [Group(stack, beside, part, norms[0]) for part in how.streams(x)]
        around, ops = [how.rows(rows, n) for n in range(self.count)], beside.tiled(stack.ops)
        after, left = [], []
        for layer, whole, norm in zip(stack.layers, kept, (*norms[1:], None), strict=True):
            for n, group in enumerate(groups):
                out, own = stack.attend(ops, layer, stack.project(ops, layer, group.normed), around[n], how.kept(whole, n))
                whole = how.put(whole, n, own)
                group.add(stack.output(ops, layer, beside.made(out)))
            for group in groups:
                group.mlp(layer)
                if norm is not None:
                    group.gather(norm)
            after.append([group.own for group in groups])
            left.append(whole)

        def joined(own: list[Array]) -> Array:
            parts = [rings.all_gather(part, self.axis, self.route) for part in own]
            return how.joined([part.reshape(group.shape) for group, part in zip(groups, parts, strict=True)])

        return joined(after[-1]), tuple(joined(after[tap]) for tap in taps), tuple(left)


class Group:
    """A micro-batch on its way through the layers. It exists while a program is traced.

    Attributes:
        own: this device's rows of its residual stream, `[rows, H]`.
    """

    def __init__(self, stack: Any, beside: "BesideTiles", x: Float[Array, "B T H"], norm: Norm):
        """`norm` is the one that the layers begin with."""
        self.stack, self.beside, self.shape = stack, beside, x.shape
        rows = rings.shard_rows(x.shape[0] * x.shape[1], beside.axis)
        first = jax.lax.axis_index(beside.axis) * rows
        self.own = jax.lax.dynamic_slice_in_dim(x.reshape(-1, x.shape[-1]), first, rows)
        self.wait: Callable[[], Array] = lambda: stack.ops.rms_norm(x, *norm)

    def gather(self, norm: Norm) -> None:
        """Has all rows come, normed."""
        normed = self.stack.ops.rms_norm(self.own, *norm)
        self.wait = self.beside.start(rings.all_gather_hops(normed, self.beside.axis, self.beside.route))

    @property
    def normed(self) -> Float[Array, "B T H"]:
        """Those that `gather` had come."""
        return self.wait().reshape(self.shape)

    def add(self, partial: Float[Array, "B T H"]) -> None:
        """Begins the sum of the devices' partial sums."""
        flat = partial.reshape(-1, partial.shape[-1])
        self.wait = self.beside.start(rings.reduce_scatter_hops(flat, self.beside.axis, self.beside.route))

    def mlp(self, layer: Any) -> None:
        """The MLP half, once the sum has come."""
        x = (self.own + self.wait())[None]
        self.own = self.stack.mlp(self.beside.in_rings(self.stack.ops, self.shape), layer, x, x)[0]


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
        ops = replace(stack.ops, linear=partial(self.summed, stack.ops))
        return run_layers(replace(stack, ops=ops), x, rows, kept, taps, lambda x: x)

    def summed(
        self, ops: Operations, x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, add: Array | None = None,
        count: Any = None,
    ) -> Array:  # fmt: skip
        """The sum of the devices' products."""
        if not isinstance(w, Array) or w.shape[1] % self.parts:
            found = f"one of {w.shape[1]} columns" if isinstance(w, Array) else f"a {type(w).__name__}"
            raise ValueError(f"expected a matrix whose columns {self.parts} parts divide, found {found}")
        x = x if norm is None else ops.rms_norm(x, *norm)
        sums = BesideTiles(self.axis, self.route, self.least, products=1)
        waits = []
        for part in jnp.split(w, self.parts, axis=1):
            made = sums.product(lambda rows, w: ops.linear(rows, w, out_dtype), x, part)
            waits.append(sums.start(rings.all_reduce_hops(made.reshape(-1, made.shape[-1]), self.axis, self.route)))
        y = jnp.concatenate([wait().reshape(*x.shape[:-1], -1) for wait in waits], axis=-1)
        return y if add is None else add + y


class BesideTiles:
    """What is under way while something is computed: at most one sum at a time, the next of which begins when it has come."""

    def __init__(self, axis: rings.Axis, route: rings.Route, least: int, products: int):
        """Of a sum's hops, `products` one after another have as many each beside them."""
        self.axis, self.route, self.least = axis, replace(route, looped=False, chunk=None), least
        self.most = 2 * rings.farthest(route.ways(jax.lax.axis_size(axis))) // products
        self.last: Travelling | None = None

    def start(self, hops: rings.Hops) -> Callable[[], Array]:
        """Begins a sum. Returns what waits for it."""
        if self.last is not None:
            self.last.wait()
        self.last = Travelling(hops)
        return self.last.wait

    def made(self, made: Tree) -> Tree:
        """What was made while a hop was under way: both are done before the next hop and what is computed of `made` begin."""
        return made if self.last is None else self.last.beside(made)

    def product(self, product: rings.Product, x: Float[Array, "B T I"], w: Any) -> Any:
        """The product of all rows, a tile of them beside each hop."""
        rows, fixed = x.reshape(-1, x.shape[-1]), jax.lax.stop_gradient(w)
        size = len(rows) // self.tiles(len(rows))
        left, made = rows, None
        for first in range(0, len(rows), size):
            tile = product(left[first : first + size], fixed)
            if made is None:
                made = jax.tree.map(lambda leaf: jax.lax.empty((len(rows), *leaf.shape[1:]), leaf.dtype), tile)
            made = jax.tree.map(partial(rings.put, start=first), made, tile)
            made, left = self.made((made, left))
        made = rings.weighted(product, w, rows, made)
        return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], *leaf.shape[1:]), made)

    def tiles(self, rows: int) -> int:
        """Into how many a product of so many rows is cut: one for each of its hops, if there are any and tiles large enough."""
        most = 0 if self.last is None or self.last.arriving is None else self.most
        return next((n for n in range(most, 1, -1) if rows % n == 0 and rows // n >= self.least), 1)

    def tiled(self, ops: Operations) -> Operations:
        """Products cut into tiles, of rows that were normed before."""

        def project(x: Array, w: Any, norm: Norm | None = None, bias: Any = None, count: Any = None, **which: int) -> Any:
            return self.product(lambda rows, w: ops.project(rows, w[0], bias=w[1], **which), x, (w, bias))

        def gated_linear(x: Array, w: Any, norm: Norm | None = None, count: Any = None) -> Any:
            return self.product(ops.gated_linear, x, w)

        def linear(
            x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, add: Array | None = None, count: Any = None
        ) -> Array:
            y = self.product(lambda rows, w: ops.linear(rows, w, out_dtype), x, w)
            return y if add is None else add + y

        return replace(ops, project=project, gated_linear=gated_linear, linear=linear)

    def in_rings(self, ops: Operations, shape: tuple[int, ...]) -> Operations:
        """The products of an MLP between a device's own rows `[1, rows, H]` and all those of a micro-batch of this shape."""

        def gated_linear(x: Array, w: Any, norm: Norm, count: Any = None) -> Array:
            own = ops.rms_norm(x[0], *norm)
            y = rings.all_gather_matmul(own, w, self.axis, ops.gated_linear, self.route, self.made)
            return y.reshape(*shape[:-1], -1)

        def linear(x: Array, w: Any, add: Array, count: Any = None) -> Array:
            def wide(rows: Array, w: Any) -> Array:
                return ops.linear(rows, w, jnp.float32)

            return add + rings.matmul_reduce_scatter(x.reshape(-1, x.shape[-1]), w, self.axis, wide, self.route, x.dtype)

        return replace(ops, gated_linear=gated_linear, linear=linear)


class Travelling:
    """A sum on its way, whose hops are issued one by one while a program is traced."""

    def __init__(self, hops: rings.Hops):
        self.hops, self.arriving, self.sum = hops, None, None
        self.go_on(None)

    def go_on(self, came: Any) -> None:
        try:
            self.arriving = self.hops.send(came)
        except StopIteration as end:
            self.arriving, self.sum = None, end.value

    def beside(self, made: Tree) -> Tree:
        """Ties a hop to what is computed beside it."""
        if self.arriving is None:
            return made
        came, made = jax.lax.optimization_barrier((self.arriving, made))
        self.go_on(came)
        return made

    def wait(self) -> Array:
        """The sum, once all hops that are left have been issued."""
        while self.arriving is not None:
            self.go_on(self.arriving)
        assert self.sum is not None
        return self.sum
