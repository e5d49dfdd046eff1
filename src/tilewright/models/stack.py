"""The layers of a model as a schedule sees them, and the plain schedule.

A layer is four plain functions, of which the last two give this shard's *partial sum*. A schedule owns the loop over the layers
and decides how parts and collectives interleave: it may add the partial sums up between devices, divide a batch in two whose
parts take turns, fetch a layer's weights while another one runs, or hand the parts other products, in the place of the
operations that they are called with. Such products need not give the rows that they take: where the stream is divided along its
rows, those that begin a half (`project`, `gated_linear`, `begin`) take a shard's and give all, and those that end it (`linear`)
take all and give a shard's. So a model knows no mesh, and a schedule no model.

Legend: B rows of a batch, T positions, H hidden size, N heads, D head size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.linear.scaled import Table
from tilewright.kernels.operations import Norm, Operations, Projection
from tilewright.models.config import Rotation
from tilewright.models.layers import Rope


class Rows(NamedTuple):
    """Rotation of each row, and where its keys and values go. Every array's first dim is the batch, so that it can be divided.

    Attributes:
        rope: cosines and sines of its positions, for each of the rotations that the layers have.
        seen: what `attend` asks for, such as where its entries go in a cache.
    """

    rope: dict[Rotation, Rope]
    seen: Any

    @property
    def divisible(self) -> bool:
        """True if they can be divided along their positions, so that later ones see the earlier ones in a cache."""
        return hasattr(self.seen, "positions")

    def positions(self, first: int, count: int) -> "Rows":
        """A part of it: so many positions of each row, from the first on."""
        rope = jax.tree.map(lambda part: jax.lax.slice_in_dim(part, first, first + count, axis=1), self.rope)
        return Rows(rope, self.seen.positions(first, count))


Half = Literal["attention", "mlp"]
"""A half of a layer."""


@dataclass(frozen=True)
class Stack:
    """Layers, and the parts of each.

    Attributes:
        ops: the operations that the parts are called with, unless a schedule puts others in their place.
        layers: the parameters of each layer.
        project: `(ops, layer, x [B, T, H]) -> projection`: norm, then queries, keys and values.
        attend: `(ops, layer, projection, rows, kept) -> (out [B, T, N * D], kept)`: what the layer keeps, a cache for example,
            goes in and comes out.
        output: `(ops, layer, out, add=None) -> partial sum [B, T, H]` of the attention half, on top of `add` if that is given:
            a schedule that has nothing to do before the addition leaves it to the product.
        mlp: `(ops, layer, x, add=None) -> partial sum` of the MLP half, its norm included.
        summed: `(ops, layer, half, y) -> y`: what the whole sum of a half becomes before it is added to the stream. A schedule
            that adds partial sums up calls it; one that gave `add` has that in the result.
        norms: `layer -> (norm, norm)`, which `project` and `mlp` begin with and hand to their operations, for a schedule that
            has rows normed before they come to these; None if they begin otherwise.
    """

    ops: Operations
    layers: tuple[Any, ...]
    project: Callable[[Operations, Any, Array], Projection]
    attend: Callable[[Operations, Any, Projection, Rows, Any], tuple[Array, Any]]
    output: Callable[..., Array]
    mlp: Callable[..., Array]
    summed: Callable[[Operations, Any, Half, Array], Array]
    norms: Callable[[Any], tuple[Norm, Norm]] | None = None


@runtime_checkable
class Schedule(Protocol):
    """Strategy by which a model runs on its devices. Frozen and hashable: a static argument of whatever is compiled."""

    def reduce(self, x: Array) -> Array:
        """The sum of what the shards of the model have: a partial sum, or whatever is summed over heads."""
        ...

    def embed(self, ops: Operations, table: Array, tokens: Array) -> Array:
        """The rows of an embedding `[V, H]`, or of its shard."""
        ...

    def run(
        self, stack: Stack, x: Array, rows: Rows, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """All layers, in order: the residual stream after the last one, after each of `taps`, and what each layer keeps."""
        ...

    def logits(self, ops: Operations, x: Array, head: Any, norm: Norm | None = None) -> Array:
        """Final norm and output head, float32 `[..., V]`. Without a norm, `x` is normalised already."""
        ...

    def head_argmax(self, ops: Operations, x: Array, head: Any, norm: Norm | None = None, masks: Array | None = None) -> Array:
        """The index of the largest of the logits, the first of equals. Without a norm, `x` is normalised already.

        Args:
            masks: see `Operations.head_argmax`.
        """
        ...

    def head_top_k(self, ops: Operations, x: Array, head: Any, k: int) -> tuple[Array, Array]:
        """Indices and values of the `k` largest logits of an `x` that is normalised already; see `Operations.head_top_k`."""
        ...


@dataclass(frozen=True)
class SingleDevice:
    """The schedule without collectives: a shard's partial sum is the whole sum."""

    def traced(self, run_layer: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
        """Function that runs a layer, as it is called for each."""
        return run_layer

    def reduce(self, x: Array) -> Array:
        return x

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return ops.gather_rows(table, tokens)

    def run(
        self, stack: Stack, x: Float[Array, "B T H"], rows: Rows, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        ops = stack.ops
        after = []
        left = []

        def run_layer(layer: Any, x: Array, rows: Rows, own: Any) -> tuple[Array, Any]:
            out, own = stack.attend(ops, layer, stack.project(ops, layer, x), rows, own)
            x = stack.output(ops, layer, out, x)
            return stack.mlp(ops, layer, x, x), own

        run_layer = self.traced(run_layer)
        for layer, own in zip(stack.layers, kept, strict=True):
            x, own = run_layer(layer, x, rows, own)
            after.append(x)
            left.append(own)
        return x, tuple(after[tap] for tap in taps), tuple(left)

    def logits(
        self, ops: Operations, x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None
    ) -> Float[Array, "*rows V"]:
        return ops.linear(x, head, jnp.float32, norm)

    def head_argmax(
        self, ops: Operations, x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None, masks: Array | None = None
    ) -> Int[Array, "*rows"]:
        return ops.head_argmax(x, head, norm, masks)[0]

    def head_top_k(
        self, ops: Operations, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        return ops.head_top_k(x, head, k)


SINGLE_DEVICE = SingleDevice()


@dataclass(frozen=True)
class TracedOnce(SingleDevice):
    """The schedule without collectives for programs of many layers: those that are alike are traced once.

    So nothing may be taken out of a layer but its results, and what it keeps, or is told of the rows, are arrays.
    """

    def traced(self, run_layer: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
        return jax.jit(run_layer, inline=True)


TRACED_ONCE = TracedOnce()
