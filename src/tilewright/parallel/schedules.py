"""Schedules over a stack of layers: how its parts and their collectives interleave. See `models/stack.py` for what they see.

They take any stack and any tree of rows, and know no model.
"""

from dataclasses import dataclass
from typing import Any

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
