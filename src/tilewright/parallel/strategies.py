"""Tensor-parallel strategies: the collectives of a stack of layers, and their overlap with compute.

A strategy implements `models.stack.Strategy`. It runs any stack with any tree of row metadata, independent of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.hardware.layers import ExpertExchange, StrategyCosts, expert_exchange
from tilewright.hardware.links import Fabric
from tilewright.kernels.linear.scaled import Table
from tilewright.kernels.operations import Norm, Operations, RoutedProduct, RoutedWeights
from tilewright.kernels.select import allowed, argmax
from tilewright.parallel import rings
from tilewright.parallel.experts import all_to_all


def run_layers(
    stack: Any,
    x: Float[Array, "B T H"],
    rows: Any,
    caches: tuple[Any, ...],
    taps: tuple[int, ...],
    reduce: Callable[[Array], Array],
) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
    """Runs layers half by half, with `reduce` on the partial sums; see `models.stack.Strategy.run`."""
    ops = stack.ops
    after = []
    new_caches = []
    for layer, cache in zip(stack.layers, caches, strict=True):
        out, cache = stack.attend(ops, layer, stack.project(ops, layer, x), rows, cache)
        x = x + stack.post_reduce(ops, layer, "attention", reduce(stack.output(ops, layer, out)))
        x = x + stack.post_reduce(ops, layer, "mlp", reduce(stack.mlp(ops, layer, x)))
        after.append(x)
        new_caches.append(cache)
    return x, tuple(after[tap] for tap in taps), tuple(new_caches)


@dataclass(frozen=True)
class TensorParallel:
    """Baseline tensor-parallel strategy: an all-reduce after each half of a layer, with nothing overlapped.

    Heads, MLP columns and vocabulary are sharded by `sharding.TENSOR_PARALLEL` (Shoeybi et al., "Megatron-LM", 2019). For
    programs under `shard_map`.

    Attributes:
        axis: mesh axis or axes; see `sharding.TENSOR_PARALLEL` and `sharding.GROUPED`.
    """

    axis: rings.Axis = "tp"

    def reduce(self, x: Array) -> Array:
        return jax.lax.psum(x, self.axis)

    def first(self, size: int) -> Array:
        """First index of this device's part of a dim with parts of `size` entries."""
        return jax.lax.axis_index(self.axis) * size

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return self.reduce(self.local_rows(ops, table, tokens))

    def local_rows(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Embeds tokens in this device's part of the table; zeros for other tokens."""
        index = tokens - self.first(len(table))
        is_local = (index >= 0) & (index < len(table))
        rows = ops.gather_rows(table, jnp.clip(index, 0, len(table) - 1))
        return jnp.where(is_local[..., None], rows, 0)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`."""
        return run_layers(stack, x, rows, caches, taps, self.reduce)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None) -> Float[Array, "*rows V"]:
        logits = ops.linear(x, head, jnp.float32, norm)
        return jax.lax.all_gather(logits, self.axis, axis=logits.ndim - 1, tiled=True)

    def head_argmax(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None, masks: Any = None
    ) -> Int[Array, "*rows"]:
        if masks is not None:  # a word of the mask may span two devices' parts of the vocabulary
            return argmax(allowed(self.logits(ops, x, head, norm), masks))
        index, value = ops.head_argmax(x, head, norm)
        places, values = self.gathered(index, value, head)
        return jnp.take_along_axis(places, jnp.argmax(values, axis=-1)[..., None], axis=-1)[..., 0]  # the first of equal values

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        index, value = ops.head_top_k(x, head, k)
        places, values = self.gathered(index, value, head)
        places, values = (part.swapaxes(-1, -2).reshape(*part.shape[:-2], -1) for part in (places, values))
        best, at = jax.lax.top_k(values, k)  # parts are in vocabulary order, so the first of equal values wins
        return jnp.take_along_axis(places, at, axis=-1), best

    def gathered(self, index: Array, value: Array, head: Any) -> tuple[Array, Array]:
        """All-gathers indices, as indices of the whole vocabulary, and values, along a new last dim."""
        size = head.w.shape[0] if hasattr(head, "w") else head.shape[1]
        parts = (index + self.first(size), value)
        places, values = (jax.lax.all_gather(part, self.axis, axis=part.ndim) for part in parts)
        return places, values


@dataclass(frozen=True)
class Sequence(TensorParallel):
    """Sequence-parallel strategy: the residual stream is sharded along tokens between tensor-parallel halves.

    Norms and additions run on a device's own tokens. An all-gather precedes q, k and v and the MLP; a reduce-scatter follows
    attention and the MLP. The bytes equal those of `TensorParallel`'s all-reduces. Before and after the layers the stream is
    whole. After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2,
    "sequence parallelism".

    Rows times positions that the devices do not divide, mostly decode steps of few rows, run as under `TensorParallel`. Padding
    them would multiply the bytes by up to the number of devices.

    For experts, tokens are all-gathered and partial sums reduce-scattered; or tokens travel to the devices of their experts
    (`experts.all_to_all`), where this is estimated to be faster.

    Attributes:
        fabric: links between the devices of the axis, for this estimate. None: tokens are always gathered.
        capacity: rows that a pair of devices exchanges in a round. Overrides the estimate; None uses the estimate.
    """

    fabric: Fabric | None = field(default=None, kw_only=True)
    capacity: int | None = field(default=None, kw_only=True)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`."""
        if x.shape[0] * x.shape[1] % jax.lax.axis_size(self.axis):
            return TensorParallel.run(self, stack, x, rows, caches, taps)
        ops = self.sharded_ops(stack.ops, x.shape)
        shape = x.shape
        after = []
        new_caches = []
        size = rings.shard_rows(shape[0] * shape[1], self.axis)
        x = jax.lax.dynamic_slice_in_dim(x.reshape(1, -1, shape[2]), self.first(size), size, 1)
        for layer, cache in zip(stack.layers, caches, strict=True):
            out, cache = stack.attend(stack.ops, layer, stack.project(ops, layer, x), rows, cache)
            x = stack.output(ops, layer, out, x)
            x = stack.mlp(ops, layer, x, x)
            after.append(x)
            new_caches.append(cache)

        def whole(x: Array) -> Array:
            return self.gather(x[0], None, lambda rows, _: rows).reshape(shape)

        return whole(x), tuple(whole(after[tap]) for tap in taps), tuple(new_caches)

    def sharded_ops(self, ops: Operations, shape: tuple[int, ...]) -> Operations:
        """Returns operations that convert between a device's rows `[1, M, H]` and all rows of a batch of this shape.

        First matmuls of a half gather rows; last matmuls scatter sums.
        """

        def gathered(product: Callable[..., Any], x: Array, w: Any, norm: Norm | None) -> Any:
            rows = x[0] if norm is None else ops.rms_norm(x[0], *norm)
            result = self.gather(rows, w, product)
            return jax.tree.map(lambda leaf: leaf.reshape(*shape[:2], *leaf.shape[1:]), result)

        # `count` is a minimum of rows to compute; all rows are computed here.
        def project(x: Array, w: Any, norm: Norm | None = None, bias: Any = None, count: Any = None, **span: int) -> Any:
            return gathered(lambda rows, w: ops.project(rows, w[0], bias=w[1], **span), x, (w, bias), norm)

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
        """Computes a routed product of this device's rows with the experts of all devices."""
        rows = len(x) * jax.lax.axis_size(self.axis)
        estimate = self.way_to_experts(rows, x.shape[1], product.experts, product.chosen)
        capacity = self.capacity if estimate is None else estimate.capacity
        capacity = None if product.shared else capacity
        if capacity is not None:
            return all_to_all(ops, product, x, w, self.axis, capacity)
        partial_sums = self.gather(x, w, lambda rows, w: product(ops, rows, w))
        return self.scatter(partial_sums, None, lambda rows, _, dtype: rows.astype(dtype), x.dtype)

    def way_to_experts(self, rows: int, hidden: int, experts: int, chosen: int) -> ExpertExchange | None:
        """Estimates the faster exchange of tokens with experts; None where `capacity` is set or the links are unknown.

        Args:
            rows: tokens of all devices.
        """
        if self.capacity is not None or self.fabric is None or rows % len(self.fabric.places):
            return None
        return expert_exchange(StrategyCosts(self.fabric), rows, hidden, experts, chosen)

    def gather(self, x: Float[Array, "M H"], w: Any, product: rings.Product) -> Any:
        """Computes a product of all devices' rows."""
        return product(jax.lax.all_gather(x, self.axis, tiled=True), w)

    def scatter(self, x: Float[Array, "R I"], w: Any, product: Callable[..., Any], dtype: Any) -> Float[Array, "M H"]:
        """Computes a product and reduce-scatters it to this device's rows."""
        return jax.lax.psum_scatter(product(x, w, dtype), self.axis, tiled=True)


@dataclass(frozen=True)
class CollectiveMatmul(Sequence):
    """`Sequence` with collective matmuls: hops of the collectives run under the adjacent matmuls.

    Layers and the embedding have no other collectives; see `rings.all_gather_matmul`. After Wang et al., "Overlap Communication
    with Dependent Computation via Decomposition" (ASPLOS 2023).

    Attributes:
        route: route of rows around the ring.
    """

    route: rings.Route = field(default_factory=rings.Route)

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        rows = self.local_rows(ops, table, tokens)
        return rings.all_reduce(rows.reshape(-1, rows.shape[-1]), self.axis, self.route).reshape(rows.shape)

    def gather(self, x: Float[Array, "M H"], w: Any, product: rings.Product) -> Any:
        return rings.all_gather_matmul(x, w, self.axis, product, self.route)

    def scatter(self, x: Float[Array, "R I"], w: Any, product: Callable[..., Any], dtype: Any) -> Float[Array, "M H"]:
        # A sum is rounded once, after the addition of the received sum, so that XLA fuses matmul and addition.
        def wide(rows: Array, w: Any) -> Array:
            return product(rows, w, jnp.float32)

        rounded = jax.eval_shape(lambda rows, w: product(rows, w, dtype), x, w).dtype
        return rings.matmul_reduce_scatter(x, w, self.axis, wide, self.route, rounded)
