"""Schedules over a stack of layers: how its parts and their collectives interleave. See `models/stack.py` for what they see.

They take any stack and any tree of rows, and know no model.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Operations
from tilewright.parallel.rows import rows_of, with_rows


@dataclass(frozen=True)
class MicroBatches:
    """The rows of a batch in groups that take turns: what one of them waits for may run under another's compute.

    Half a layer at a time, across layers too: the groups are kept apart from the first layer to the last. No collective is
    issued here; on one device this is `SingleDevice` in another order, with the same result.

    Attributes:
        count: of the groups, which have the same number of rows.
    """

    count: int = 2

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"expected at least 1 micro-batch, found {self.count}")

    def reduce(self, x: Array) -> Array:
        return x

    def embed(self, ops: Operations, table: Float[Array, "V H"], tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return ops.take(table, tokens)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`.

        Raises:
            ValueError: the micro-batches do not divide the batch.
        """
        size, rest = divmod(x.shape[0], self.count)
        if rest:
            raise ValueError(f"expected a batch that {self.count} micro-batches divide, found {x.shape[0]} rows")
        ops, firsts = stack.ops, range(0, x.shape[0], size)
        streams = [rows_of(x, first, size) for first in firsts]
        around = [rows_of(rows, first, size) for first in firsts]
        after, left = [], []
        for layer, whole in zip(stack.layers, kept, strict=True):
            for n, first in enumerate(firsts):
                projection = stack.project(ops, layer, streams[n])
                out, own = stack.attend(ops, layer, projection, around[n], rows_of(whole, first, size))
                whole = with_rows(whole, first, own)
                streams[n] = streams[n] + stack.output(ops, layer, out)
            for n, stream in enumerate(streams):
                streams[n] = stream + stack.mlp(ops, layer, stream)
            after.append(tuple(streams))
            left.append(whole)
        return jnp.concatenate(streams), tuple(jnp.concatenate(after[tap]) for tap in taps), tuple(left)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any) -> Float[Array, "*rows V"]:
        return ops.linear(x, head, jnp.float32, norm)

    def head_argmax(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None) -> Int[Array, "*rows"]:
        return ops.head_argmax(x, head, norm)[0]

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        return ops.head_top_k(x, head, k)


@dataclass(frozen=True)
class TensorParallel:
    """Heads, MLP columns and vocabulary over an axis of the mesh, and a sum over the devices after each half of a layer.

    For a program under `shard_map` whose parameters are divided by `sharding.TENSOR_PARALLEL` (Shoeybi et al., "Megatron-LM",
    2019). Nothing runs under the sums: this is the plain schedule that others are compared with.

    Attributes:
        axis: of the mesh; it divides the key/value heads.
    """

    axis: str = "tp"

    def reduce(self, x: Array) -> Array:
        return jax.lax.psum(x, self.axis)

    def first(self, size: int) -> Array:
        """Where this device's part of a dim begins, whose parts have this size."""
        return jax.lax.axis_index(self.axis) * size

    def embed(self, ops: Operations, table: Float[Array, "V H"], tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        own = tokens - self.first(len(table))
        here = (own >= 0) & (own < len(table))
        rows = ops.take(table, jnp.clip(own, 0, len(table) - 1))
        return self.reduce(jnp.where(here[..., None], rows, 0))

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`."""
        ops, after, left = stack.ops, [], []
        for layer, own in zip(stack.layers, kept, strict=True):
            out, own = stack.attend(ops, layer, stack.project(ops, layer, x), rows, own)
            x = x + self.reduce(stack.output(ops, layer, out))
            x = x + self.reduce(stack.mlp(ops, layer, x))
            after.append(x)
            left.append(own)
        return x, tuple(after[tap] for tap in taps), tuple(left)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any) -> Float[Array, "*rows V"]:
        own = ops.linear(x, head, jnp.float32, norm)
        return jax.lax.all_gather(own, self.axis, axis=own.ndim - 1, tiled=True)

    def head_argmax(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None) -> Int[Array, "*rows"]:
        index, value = ops.head_argmax(x, head, norm)
        places, values = self.gathered(index, value, head)
        return jnp.take_along_axis(places, jnp.argmax(values, axis=-1)[..., None], axis=-1)[..., 0]  # the first of equals

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        index, value = ops.head_top_k(x, head, k)
        places, values = self.gathered(index, value, head)
        places, values = (part.swapaxes(-1, -2).reshape(*part.shape[:-2], -1) for part in (places, values))
        best, at = jax.lax.top_k(values, k)  # devices' parts lie in the vocabulary's order: of equals the first goes first
        return jnp.take_along_axis(places, at, axis=-1), best

    def gathered(self, index: Array, value: Array, head: Any) -> tuple[Array, Array]:
        """Of all devices, along a new last dim: places in the whole vocabulary, and values."""
        size = head.w.shape[0] if hasattr(head, "w") else head.shape[1]
        parts = (index + self.first(size), value)
        places, values = (jax.lax.all_gather(part, self.axis, axis=part.ndim) for part in parts)
        return places, values
