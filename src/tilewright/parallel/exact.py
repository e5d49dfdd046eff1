"""`Exact`: tensor parallelism with bitwise equal results on any number of devices.

A sum of floats depends on its order, and a matmul on the blocking of the library, which depends on shapes: XLA on a CPU gives
different bits for the same column of a narrower matrix. Every computation that depends on a device's share is therefore split
into blocks of one shape. A loop over the blocks has the same body on every device count. Blocks are summed as a binary tree,
with the lower levels within a device and the upper levels between devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.linear.scaled import ScaledMatrix, Table
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import (
    PLAIN_SCORES,
    Heads,
    Joined,
    Norm,
    Operations,
    PagedCache,
    RoutedProduct,
    RoutedWeights,
    Scores,
    Transposed,
    attend_in_steps,
)
from tilewright.kernels.select import allowed
from tilewright.parallel.rings import Axis
from tilewright.parallel.strategies import TensorParallel, run_layers

Columns = Callable[[Array, Any], Array]
"""`columns(x, w) -> y`: a product with some columns of a matrix, equally many of each part of a joined matrix."""


@dataclass(frozen=True)
class Exact(TensorParallel):
    """`TensorParallel` with bitwise equal logits on 1, 2, 4, ... up to `parts` devices, in float32 on CPUs.

    Contractions over sharded dims are summed in `parts` parts, in the order of a binary tree. Other matmuls and the head are
    computed by columns in `parts` blocks, attention by query heads, and linear attention by key heads. `tree_sum` sums over
    devices and sends as many bytes as a ring: 2 (n - 1) / n times the residual stream for n devices after each half of a layer.
    The price is memory traffic: each of n devices writes and reads `parts / n` partial sums, and each query head reads its keys
    and values separately instead of once per group. With `parts` devices, matmuls of heads and of the MLP cost nothing extra.

    Gradients are correct, but not bitwise equal. The strategy needs operations on unpacked matrices, and hidden sizes of at
    least 64: with 32, bits differed where XLA computes small matmuls inside the surrounding loops.

    Attributes:
        axis: mesh axis or axes; `()` for a single device outside of `jax.shard_map`.
        parts: number of parts, a power of two. It divides heads times head size, the MLP's columns, the vocabulary, the number
            of experts, the columns of a shared expert, and the value heads of linear attention.
    """

    axis: Axis = ()
    parts: int = 8

    def __post_init__(self) -> None:
        if self.parts < 1 or self.parts & (self.parts - 1):
            raise ValueError(f"expected a power of two as the number of parts, found {self.parts}")

    @property
    def size(self) -> int:
        """Number of devices.

        Raises:
            ValueError: the devices do not divide the parts.
        """
        size = jax.lax.axis_size(self.axis) if self.axis else 1
        if self.parts % size:
            raise ValueError(f"expected devices that divide the {self.parts} parts of an exact sum, found {size}")
        return size

    def reduce(self, x: Array) -> Array:
        return tree_sum(x, self.axis) if self.size > 1 else x

    def embed(self, ops: Operations, table: Table, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        return super().embed(ops, table, tokens) if self.axis else ops.gather_rows(table, tokens)

    def run(
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, caches: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Strategy.run`.

        Raises:
            ValueError: sizes do not divide, or the operations pack their weights.
        """
        check_unprepared(stack.ops)
        # Key/value heads are sharded over the first of several axes and replicated over the others.
        copies = self.size // jax.lax.axis_size(self.axis[0]) if isinstance(self.axis, tuple) and self.axis else 1
        ops = in_parts(stack.ops, self.parts // self.size, self.parts // self.size * copies)
        return run_layers(replace(stack, ops=ops), x, rows, caches, taps, self.reduce)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None) -> Float[Array, "*rows V"]:
        check_unprepared(ops)
        x = x if norm is None else ops.rms_norm(x, *norm)
        logits = by_columns(lambda x, w: ops.linear(x, w, jnp.float32), x, head, self.parts // self.size)
        return jax.lax.all_gather(logits, self.axis, axis=logits.ndim - 1, tiled=True) if self.axis else logits

    def head_argmax(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None, masks: Any = None
    ) -> Int[Array, "*rows"]:
        """Index of the largest logit; materialises all logits."""
        logits = self.logits(ops, x, head, norm)
        return jnp.argmax(logits if masks is None else allowed(logits, masks), axis=-1).astype(jnp.int32)

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        values, index = jax.lax.top_k(self.logits(ops, x, head, None), k)
        return index, values


def check_unprepared(ops: Any) -> None:
    """Raises a `ValueError` for operations that pack their weights: packed weights cannot be sliced into blocks."""
    if ops.packs:
        raise ValueError(f"expected operations on matrices as they are, kernels 'xla', found {ops.name!r}")


def block(w: Any, n: Array | int, count: int, dim: int) -> Any:
    """Returns block `n` of `count` along a dim of a matrix `[I, O]`, `Transposed` or of each part of a `Joined`."""
    if isinstance(w, Joined):
        return replace(w, parts=tuple(block(part, n, count, dim) for part in w.parts))
    if isinstance(w, Transposed):
        return Transposed(block(w.w, n, count, 1 - dim))
    if isinstance(w, ScaledMatrix):
        return w.cut(n, count, dim)
    if not isinstance(w, Array) or w.shape[dim] % count:
        found = f"one {list(w.shape)}" if isinstance(w, Array) else f"a {type(w).__name__}"
        raise ValueError(f"expected a matrix that divides into {count} blocks along its dim {dim}, found {found}")
    size = w.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(w, n * size, size, dim)


def for_each(count: int, function: Callable[[Array], Any]) -> Any:
    """Stacks `function(n)` for each n below `count`, by a loop with a body that does not depend on `count`."""
    return jax.lax.scan(lambda _, n: (None, jax.lax.optimization_barrier(function(n))), None, jnp.arange(count))[1]


def by_columns(product: Columns, x: Float[Array, "*rows I"], w: Any, count: int) -> Float[Array, "*rows O"]:
    """Computes `product(x, w)` in `count` blocks of columns, one after another."""
    blocks = jnp.moveaxis(for_each(count, lambda n: product(x, block(w, n, count, 1))), 0, -2)
    return blocks.reshape(*blocks.shape[:-2], -1)


def by_inputs(product: Columns, x: Float[Array, "*rows I"], w: Any, count: int) -> Float[Array, "*rows O"]:
    """Computes `product(x, w)` as a tree sum over `count` blocks of inputs."""

    def one(n: Array) -> Array:
        size = x.shape[-1] // count
        return product(jax.lax.dynamic_slice_in_dim(x, n * size, size, x.ndim - 1), block(w, n, count, 0))

    return as_tree(for_each(count, one))


def as_tree(sums: Float[Array, "count *dims"]) -> Float[Array, "*dims"]:
    """Sums arrays in the order of a binary tree; their number is a power of two."""
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def by_experts(ops: Operations, product: RoutedProduct, x: Float[Array, "R H"], w: RoutedWeights, count: int) -> Array:
    """Computes a routed product as a tree sum over `count` blocks of a device's experts; routing is repeated for each block.

    Each block also has a share of the columns of the shared expert.
    """

    def one(n: Array) -> Array:
        part = replace(ops, first_expert=lambda held: ops.first_expert(held * count) + n * held)
        shared = None if w.shared is None else (block(w.shared[0], n, count, 1), block(w.shared[1], n, count, 0))
        experts = jax.tree.map(lambda each: block(each, n, count, 0), w.sharded)
        return product(part, x, RoutedWeights(w.replicated, experts, shared))

    return as_tree(for_each(count, one))


def heads_apart(ops: Operations, projection: tuple[Array, ...], spec: Heads) -> tuple[Any, Any, Any]:
    """`Operations.heads`, one head after another.

    XLA sums over a head's entries in an order that depends on the number of heads.
    """
    if spec.keys_are_values:
        projection, spec = (*projection, projection[-1]), spec._replace(keys_are_values=False)
    q, kv = (projection[0], projection[1:]) if len(projection) != 2 else (None, projection)

    def stacked(parts: tuple[Array, ...], select: Callable[[tuple[Any, Any, Any]], Any]) -> Any:
        def one(n: Array) -> Any:
            head = [jax.lax.dynamic_slice_in_dim(part, n * spec.head_dim, spec.head_dim, 2) for part in parts]
            return select(ops.heads(tuple(head), spec))

        return for_each(parts[0].shape[-1] // spec.head_dim, one)

    queries = None if q is None else jnp.moveaxis(stacked((q,), lambda heads: heads[0][:, :, 0]), 0, 2)
    if not kv:
        return queries, None, None
    k, v = (jnp.moveaxis(part, 0, 1) for part in stacked(kv, lambda heads: tuple(part[:, 0] for part in heads[1:])))
    return queries, k, v


def head_by_head(function: Callable[..., Any], heads: int, arguments: tuple[Any, ...], dims: Any, result_dims: Any) -> Any:
    """`Operations.each_head`, one head after another."""

    def cut(n: Array, dim: int | None, part: Any) -> Any:
        return part if dim is None else jax.tree.map(lambda x: block(x, n, heads, dim), part)

    def side_by_side(dim: int, x: Array) -> Array:
        apart = jnp.moveaxis(x, 0, dim)
        return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 2 :])

    def joined(dim: int | None, part: Any) -> Any:
        return part if dim is None else jax.tree.map(partial(side_by_side, dim), part)

    over = partial(jax.tree.map, is_leaf=lambda dim: dim is None)
    return over(joined, result_dims, for_each(heads, lambda n: function(*over(partial(cut, n), dims, arguments))))


def by_heads(
    ops: Operations,
    q: Float[Array, "B T N D"],
    cache: Any,
    mask: AttentionMask,
    block_kv: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """`Operations.attend`, one query head after another."""
    heads = q.shape[2]
    pool = cache.pool if isinstance(cache, PagedCache) else cache
    kv_heads = jax.tree.leaves(block_kv if pool is None else pool)[0].shape[1]

    def one(n: Array) -> Array:
        def of_head(parts: Any) -> Any:
            return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, n // (heads // kv_heads), 1, 1), parts)

        held = cache._replace(pool=of_head(pool)) if isinstance(cache, PagedCache) else of_head(pool)
        sinks = None if scores.sinks is None else jax.lax.dynamic_slice_in_dim(scores.sinks, n, 1)
        query = jax.lax.dynamic_slice_in_dim(q, n, 1, 2)
        return ops.attend(query, held, mask, of_head(block_kv), scores._replace(sinks=sinks))[:, :, 0]

    return jnp.moveaxis(for_each(heads, one), 0, 2)


def in_parts(ops: Operations, count: int, key_count: int) -> Operations:
    """Returns operations that compute in blocks, for the layers.

    Args:
        count: number of blocks of this device's columns, or inputs of row-sharded matrices.
        key_count: number of blocks of the columns of its keys and values.
    """

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else ops.rms_norm(x, *norm)

    def project(x: Array, w: Joined, norm: Norm | None = None, bias: Any = None) -> tuple[Array, ...]:
        x = normed(x, norm)
        counts = (count, key_count, key_count)
        results = [by_columns(ops.linear, x, part, n) for part, n in zip(w.parts, counts, strict=True)]
        return tuple(results if bias is None else (y + b for y, b in zip(results, bias, strict=True)))

    def gated_linear(x: Array, w: Joined, norm: Norm | None = None, count: Any = None, blocks: int = count) -> Array:
        return by_columns(ops.gated_linear, normed(x, norm), w, blocks)

    def linear(
        x: Array,
        w: Any,
        out_dtype: Any = None,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Any = None,
        blocks: int = count,
    ) -> Array:
        y = by_inputs(partial(ops.linear, out_dtype=out_dtype), normed(x, norm), w, blocks)
        return y if add is None else add + y

    return replace(
        head_by_head_operations(ops),
        begin=partial(begun_in_parts, ops, count, project),
        project=project,
        linear=linear,
        gated_linear=gated_linear,
        routed=partial(routed_in_parts, ops, count),
        heads=partial(heads_apart, ops),
        attend=partial(by_heads, ops),
        attend_projected=attend_in_steps,
    )


def head_by_head_operations(ops: Operations) -> Operations:
    """Returns operations that run heads of linear attention one after another, in layers and where states are committed."""
    return replace(ops, each_head=head_by_head)


def begun_in_parts(
    ops: Operations,
    blocks: int,
    project: Callable[..., Any],
    _: Operations,
    product: Callable[..., Any],
    x: Float[Array, "B T H"],
    w: Any,
    norm: Norm | None = None,
    count: Any = None,
) -> Any:
    """`Operations.begin` with matmuls by columns in `blocks` blocks, or by `project`."""

    def linear(x: Array, w: Any, out_dtype: Any = None, norm: Norm | None = None, count: Any = None) -> Array:
        h = x if norm is None else ops.rms_norm(x, *norm)
        return by_columns(partial(ops.linear, out_dtype=out_dtype), h, w, blocks)

    return product(replace(ops, linear=linear, project=project), x, w, norm, count)


def routed_in_parts(
    ops: Operations,
    blocks: int,
    _: Operations,
    product: RoutedProduct,
    x: Float[Array, "B T H"],
    w: RoutedWeights,
    norm: Norm | None = None,
    add: Array | None = None,
    count: Any = None,
) -> Float[Array, "B T H"]:
    """`Operations.routed` in `blocks` blocks of a device's experts."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    y = by_experts(ops, product, h.reshape(-1, x.shape[-1]), w, blocks).reshape(x.shape).astype(x.dtype)
    return y if add is None else add + y


def tree_sum(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """`jax.lax.psum(x, axis)` in the order of a tree, ((0 + 1) + (2 + 3)) + ... of the devices; equal bits on all devices.

    Recursive halving (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):
    devices with indices that differ in one bit exchange halves of their arrays until each device has its piece of the sum. An
    all-gather of the pieces follows. Each of n devices sends and receives 2 (n - 1) / n times the bytes of `x`, padded to n
    pieces.

    Raises:
        ValueError: the number of devices is no power of two.
    """
    size = jax.lax.axis_size(axis)
    index = jax.lax.axis_index(axis)
    if size & (size - 1):
        raise ValueError(f"expected a power of two devices, found {size}")
    held = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
    bit = 1
    while bit < size:
        halves = held.reshape(len(held) // 2, 2, -1)
        bit_value = (index // bit) % 2
        keep, send = (jax.lax.dynamic_index_in_dim(halves, n, 1, keepdims=False) for n in (bit_value, 1 - bit_value))
        held = keep + jax.lax.ppermute(send, axis, [(device, device ^ bit) for device in range(size)])
        bit *= 2
    return jax.lax.all_gather(held[0], axis, tiled=True)[: x.size].reshape(x.shape)
