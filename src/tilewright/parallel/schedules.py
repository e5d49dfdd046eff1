"""Schedules over a stack of layers: how its parts and their collectives interleave. See `models/stack.py` for what they see.

They take any stack and any tree of rows, and know no model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.hardware.layers import Costs, ExpertExchange, expert_exchange
from tilewright.hardware.links import Fabric
from tilewright.kernels.linear.scaled import Table
from tilewright.kernels.operations import Norm, Operations, RoutedProduct, RoutedWeights
from tilewright.kernels.select import allowed, argmax
from tilewright.parallel import rings
from tilewright.parallel.experts import all_to_all
from tilewright.parallel.turns import take_turns


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

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return ops.gather_rows(table, tokens)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`.

        Raises:
            ValueError: see `turns.take_turns`.
        """
        return take_turns(self.count, stack, x, rows, kept, taps)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None) -> Float[Array, "*rows V"]:
        return ops.linear(x, head, jnp.float32, norm)

    def head_argmax(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None, masks: Any = None
    ) -> Int[Array, "*rows"]:
        return ops.head_argmax(x, head, norm, masks)[0]

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        return ops.head_top_k(x, head, k)


def run_layers(
    stack: Any,
    x: Float[Array, "B T H"],
    rows: Any,
    kept: tuple[Any, ...],
    taps: tuple[int, ...],
    reduce: Callable[[Array], Array],
) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
    """A schedule's `run` (see `models.stack.Schedule`), half a layer after the other, where `reduce` sums the partial sums."""
    ops = stack.ops
    after = []
    left = []
    for layer, own in zip(stack.layers, kept, strict=True):
        out, own = stack.attend(ops, layer, stack.project(ops, layer, x), rows, own)
        x = x + stack.summed(ops, layer, "attention", reduce(stack.output(ops, layer, out)))
        x = x + stack.summed(ops, layer, "mlp", reduce(stack.mlp(ops, layer, x)))
        after.append(x)
        left.append(own)
    return x, tuple(after[tap] for tap in taps), tuple(left)


@dataclass(frozen=True)
class TensorParallel:
    """Heads, MLP columns and vocabulary over an axis of the mesh, and a sum over the devices after each half of a layer.

    For a program under `shard_map` whose parameters are divided by `sharding.TENSOR_PARALLEL` (Shoeybi et al., "Megatron-LM",
    2019). Nothing runs under the sums: this is the plain schedule that others are compared with.

    Attributes:
        axis: of the mesh, or axes; see `sharding.TENSOR_PARALLEL` and `sharding.GROUPED`.
    """

    axis: rings.Axis = "tp"

    def reduce(self, x: Array) -> Array:
        return jax.lax.psum(x, self.axis)

    def first(self, size: int) -> Array:
        """First index of this device's part of a dim whose parts have this size."""
        return jax.lax.axis_index(self.axis) * size

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return self.reduce(self.own_rows(ops, table, tokens))

    def own_rows(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """The rows that are in this device's part of the table, and zeros for the others."""
        own = tokens - self.first(len(table))
        here = (own >= 0) & (own < len(table))
        rows = ops.gather_rows(table, jnp.clip(own, 0, len(table) - 1))
        return jnp.where(here[..., None], rows, 0)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`."""
        return run_layers(stack, x, rows, kept, taps, self.reduce)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None) -> Float[Array, "*rows V"]:
        own = ops.linear(x, head, jnp.float32, norm)
        return jax.lax.all_gather(own, self.axis, axis=own.ndim - 1, tiled=True)

    def head_argmax(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None, masks: Any = None
    ) -> Int[Array, "*rows"]:
        if masks is not None:  # whose words devices' parts of the vocabulary may cut in two
            return argmax(allowed(self.logits(ops, x, head, norm), masks))
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


@dataclass(frozen=True)
class Sequence(TensorParallel):
    """Tensor parallelism whose residual stream is divided along the rows of the batch, one position after another.

    Norms and additions run on a device's own rows; these are gathered before q, k and v and before the MLP, and partial sums
    are added up and divided after attention and after the MLP: as many bytes as `TensorParallel`'s sums, in two steps. The
    stream that a program sees, before the layers and after them, is whole. After Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models" (2022), section 4.2.2, "sequence parallelism".

    Rows times positions that the devices do not divide go the way of `TensorParallel`: a decoding step of few rows, mostly.
    Padded to a multiple they would take up to as many times the bytes as there are devices, and its sum takes no more than
    theirs. Other shapes are in the hands of whoever declares them.

    Rows are gathered where their experts are, too, and partial sums added up; or each goes to the devices that have its experts
    (`experts.all_to_all`), where that is estimated to take less time.

    Attributes:
        fabric: the links between the devices of the axis, by which that is estimated; None for rows that are gathered.
        capacity: rows that a pair of devices exchanges at once, whatever the estimate; None for what it says.
    """

    fabric: Fabric | None = field(default=None, kw_only=True)
    capacity: int | None = field(default=None, kw_only=True)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`."""
        if x.shape[0] * x.shape[1] % jax.lax.axis_size(self.axis):
            return TensorParallel.run(self, stack, x, rows, kept, taps)
        ops = self.sharded_ops(stack.ops, x.shape)
        shape = x.shape
        after = []
        left = []
        own = rings.shard_rows(shape[0] * shape[1], self.axis)
        x = jax.lax.dynamic_slice_in_dim(x.reshape(1, -1, shape[2]), self.first(own), own, 1)
        for layer, before in zip(stack.layers, kept, strict=True):
            out, now = stack.attend(stack.ops, layer, stack.project(ops, layer, x), rows, before)
            x = stack.output(ops, layer, out, x)
            x = stack.mlp(ops, layer, x, x)
            after.append(x)
            left.append(now)

        def whole(x: Array) -> Array:
            return self.gather(x[0], None, lambda rows, _: rows).reshape(shape)

        return whole(x), tuple(whole(after[tap]) for tap in taps), tuple(left)

    def sharded_ops(self, ops: Operations, shape: tuple[int, ...]) -> Operations:
        """Products between a device's own rows `[1, rows, H]` and all of a batch of this shape."""

        def gathered(product: Callable[..., Any], x: Array, w: Any, norm: Norm | None) -> Any:
            own = x[0] if norm is None else ops.rms_norm(x[0], *norm)
            made = self.gather(own, w, product)
            return jax.tree.map(lambda leaf: leaf.reshape(*shape[:2], *leaf.shape[1:]), made)

        # A `count` of rows is what need be computed at least, and here all are.
        def project(x: Array, w: Any, norm: Norm | None = None, bias: Any = None, count: Any = None, **which: int) -> Any:
            return gathered(lambda rows, w: ops.project(rows, w[0], bias=w[1], **which), x, (w, bias), norm)

        def gated_linear(x: Array, w: Any, norm: Norm | None = None, count: Any = None) -> Array:
            return gathered(ops.gated_linear, x, w, norm)

        def begin(
            _: Operations, product: Callable[..., Any], x: Array, w: Any, norm: Norm | None = None, count: Any = None
        ) -> Any:
            return gathered(partial(product, ops), x, w, norm)

        def linear(
            x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, add: Array | None = None, count: Any = None
        ) -> Array:
            rows = x.reshape(-1, x.shape[-1])
            y = self.scatter(rows if norm is None else ops.rms_norm(rows, *norm), w, ops.linear, out_dtype)[None]
            return y if add is None else add + y

        def routed(
            _: Operations,
            product: RoutedProduct,
            x: Array,
            w: RoutedWeights,
            norm: Norm | None = None,
            add: Array | None = None,
            count: Any = None,
        ) -> Array:
            y = self.routed_rows(ops, product, x[0] if norm is None else ops.rms_norm(x[0], *norm), w)[None]
            return y if add is None else add + y

        return replace(ops, begin=begin, project=project, gated_linear=gated_linear, linear=linear, routed=routed)

    def routed_rows(self, ops: Operations, product: RoutedProduct, x: Float[Array, "M H"], w: RoutedWeights) -> Array:
        """A routed product of a device's own rows, of all devices' experts."""
        rows = len(x) * jax.lax.axis_size(self.axis)
        estimate = self.way_to_experts(rows, x.shape[1], product.experts, product.chosen)
        capacity = self.capacity if estimate is None else estimate.capacity
        capacity = None if product.shared else capacity
        if capacity is not None:
            return all_to_all(ops, product, x, w, self.axis, capacity)
        made = self.gather(x, w, lambda rows, w: product(ops, rows, w))
        return self.scatter(made, None, lambda rows, _, dtype: rows.astype(dtype), x.dtype)

    def way_to_experts(self, rows: int, hidden: int, experts: int, chosen: int) -> ExpertExchange | None:
        """Estimate of how rows get to their experts; None where the capacity is given, or nothing is known of the links.

        Args:
            rows: of all devices.
        """
        if self.capacity is not None or self.fabric is None or rows % len(self.fabric.places):
            return None
        return expert_exchange(Costs(self.fabric), rows, hidden, experts, chosen)

    def gather(self, x: Float[Array, "M H"], w: Any, product: rings.Product) -> Any:
        """The product of all devices' rows."""
        return product(jax.lax.all_gather(x, self.axis, tiled=True), w)

    def scatter(self, x: Float[Array, "R I"], w: Any, product: Callable[..., Any], dtype: Any) -> Float[Array, "M H"]:
        """The devices' products summed, of a device's own rows."""
        return jax.lax.psum_scatter(product(x, w, dtype), self.axis, tiled=True)


@dataclass(frozen=True)
class CollectiveMatmul(Sequence):
    """`Sequence` whose collectives are hidden under the products beside them, hop by hop (see `rings.all_gather_matmul`).

    No other collective is left in the layers, nor in the embedding. After Wang et al., "Overlap Communication with Dependent
    Computation via Decomposition" (ASPLOS 2023).

    Attributes:
        route: how rows go round the ring.
    """

    route: rings.Route = field(default_factory=rings.Route)

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        rows = self.own_rows(ops, table, tokens)
        return rings.all_reduce(rows.reshape(-1, rows.shape[-1]), self.axis, self.route).reshape(rows.shape)

    def gather(self, x: Float[Array, "M H"], w: Any, product: rings.Product) -> Any:
        return rings.all_gather_matmul(x, w, self.axis, product, self.route)

    def scatter(self, x: Float[Array, "R I"], w: Any, product: Callable[..., Any], dtype: Any) -> Float[Array, "M H"]:
        # A partial sum is rounded once, after what came has been added: XLA fuses the two then.
        def wide(rows: Array, w: Any) -> Array:
            return product(rows, w, jnp.float32)

        rounded = jax.eval_shape(lambda rows, w: product(rows, w, dtype), x, w).dtype
        return rings.matmul_reduce_scatter(x, w, self.axis, wide, self.route, rounded)
