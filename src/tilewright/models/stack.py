"""Layers of a model as tensor-parallel strategies run them, and the strategy for one device.

A layer is four functions, of which the last two return this shard's *partial sum*. A strategy owns the loop over the layers and
decides how parts and collectives interleave. A strategy may reduce partial sums between devices, split a batch in two
micro-batches, prefetch a layer's weights, or replace the operations that the parts are called with.

Replaced operations may return other rows than they take. If the residual stream is sharded along its rows, operations that
begin a sublayer (`project`, `gated_linear`, `begin`) take a shard's rows and return all rows, and `linear`, which ends a
sublayer, takes all rows and returns a shard's. Models know no mesh, and strategies know no model.

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
    """Rotation and attention metadata of each row. Every array's first dim is the batch, so that rows can be split.

    Attributes:
        rope: cosines and sines of the positions, for each rotation that the layers use.
        attn_metadata: attention metadata for `attend`, such as the positions of new entries in a cache.
    """

    rope: dict[Rotation, Rope]
    attn_metadata: Any

    @property
    def divisible(self) -> bool:
        """True if rows can be split along positions, because later positions read the earlier ones from a cache."""
        return hasattr(self.attn_metadata, "positions")

    def positions(self, first: int, count: int) -> "Rows":
        """Returns `count` positions of each row, from `first` on."""
        rope = jax.tree.map(lambda part: jax.lax.slice_in_dim(part, first, first + count, axis=1), self.rope)
        return Rows(rope, self.attn_metadata.positions(first, count))


Sublayer = Literal["attention", "mlp"]
"""Sublayer of a layer."""


@dataclass(frozen=True)
class Stack:
    """Layers, and the functions of each.

    Attributes:
        ops: operations that the functions are called with, unless a strategy replaces them.
        layers: the parameters of each layer.
        project: `(ops, layer, x [B, T, H]) -> projection`: norm, then queries, keys and values.
        attend: `(ops, layer, projection, rows, kv_cache) -> (out [B, T, N * D], kv_cache)`.
        output: `(ops, layer, out, add=None) -> partial sum [B, T, H]` of the attention sublayer, plus `add` if given. A
            strategy that does nothing before the residual addition passes the residual stream as `add`.
        mlp: `(ops, layer, x, add=None) -> partial sum` of the MLP sublayer, including its norm.
        post_reduce: `(ops, layer, sublayer, y) -> y`: applied to a sublayer's reduced sum before the residual addition. A
            strategy that reduces partial sums calls it; with `add`, `output` and `mlp` have already applied it.
        norms: `layer -> (norm, norm)`: the norms with which `project` and `mlp` begin, and which they pass to their operations,
            for strategies that norm rows earlier; None if they begin otherwise.
    """

    ops: Operations
    layers: tuple[Any, ...]
    project: Callable[[Operations, Any, Array], Projection]
    attend: Callable[[Operations, Any, Projection, Rows, Any], tuple[Array, Any]]
    output: Callable[..., Array]
    mlp: Callable[..., Array]
    post_reduce: Callable[[Operations, Any, Sublayer, Array], Array]
    norms: Callable[[Any], tuple[Norm, Norm]] | None = None


@runtime_checkable
class Strategy(Protocol):
    """Strategy by which a model runs on its devices. Frozen and hashable: a static argument of compiled functions."""

    def reduce(self, x: Array) -> Array:
        """Sums `x` over the shards of the model: a partial sum, or a sum over heads."""
        ...

    def embed(self, ops: Operations, table: Array, tokens: Array) -> Array:
        """Looks up rows of an embedding `[V, H]`, or of its shard."""
        ...

    def run(
        self, stack: Stack, x: Array, rows: Rows, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """Runs all layers in order.

        Returns:
            the residual stream after the last layer, the streams after each of `taps`, and each layer's cache.
        """
        ...

    def logits(self, ops: Operations, x: Array, head: Any, norm: Norm | None = None) -> Array:
        """Applies the final norm and the output head; float32 `[..., V]`. Without `norm`, `x` is already normalised."""
        ...

    def head_argmax(self, ops: Operations, x: Array, head: Any, norm: Norm | None = None, masks: Array | None = None) -> Array:
        """Returns the index of the largest logit, the first among equals. Without `norm`, `x` is already normalised.

        Args:
            masks: see `Operations.head_argmax`.
        """
        ...

    def head_top_k(self, ops: Operations, x: Array, head: Any, k: int) -> tuple[Array, Array]:
        """Returns indices and values of the `k` largest logits of a normalised `x`; see `Operations.head_top_k`."""
        ...


@dataclass(frozen=True)
class SingleDevice:
    """Strategy without collectives: partial sums are whole sums."""

    def traced(self, run_layer: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
        """Returns the function that runs a layer."""
        return run_layer

    def reduce(self, x: Array) -> Array:
        return x

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return ops.gather_rows(table, tokens)

    def run(
        self, stack: Stack, x: Float[Array, "B T H"], rows: Rows, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        ops = stack.ops
        after = []
        new_caches = []

        def run_layer(layer: Any, x: Array, rows: Rows, kv_cache: Any) -> tuple[Array, Any]:
            out, kv_cache = stack.attend(ops, layer, stack.project(ops, layer, x), rows, kv_cache)
            x = stack.output(ops, layer, out, x)
            return stack.mlp(ops, layer, x, x), kv_cache

        run_layer = self.traced(run_layer)
        for layer, kv_cache in zip(stack.layers, caches, strict=True):
            x, kv_cache = run_layer(layer, x, rows, kv_cache)
            after.append(x)
            new_caches.append(kv_cache)
        return x, tuple(after[tap] for tap in taps), tuple(new_caches)

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
    """Strategy without collectives that traces layers of one kind once, for programs with many layers.

    A layer's only outputs are therefore its results, and its cache and attention metadata are arrays.
    """

    def traced(self, run_layer: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
        return jax.jit(run_layer, inline=True)


TRACED_ONCE = TracedOnce()
