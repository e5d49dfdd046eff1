"""`Exact`: the same bits on any number of devices.

A sum of floats depends on its order, and a matrix product on how a library blocks it, which goes by its shape: XLA's on a CPU
gives other bits for the same column of a narrower matrix. So everything that a device's share could change is cut into blocks
of one shape, a loop over which has the same body everywhere, and blocks are added up as a binary tree whose lower part is
within a device and whose upper part is between devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.linear.scaled import ScaledMatrix, Table
from tilewright.kernels.operations import (
    PLAIN_SCORES,
    Heads,
    Joined,
    KeyValuePages,
    Norm,
    Operations,
    RoutedProduct,
    RoutedWeights,
    Scores,
    Transposed,
)
from tilewright.kernels.select import allowed
from tilewright.parallel.rings import Axis
from tilewright.parallel.schedules import TensorParallel, run_layers

Columns = Callable[[Array, Any], Array]
"""`columns(x, w) -> y`: of some of a matrix's columns, as many of each of its parts."""


@dataclass(frozen=True)
class Exact(TensorParallel):
    """`TensorParallel` whose logits have the same bits on 1, 2, 4, ... up to `parts` devices, in float32 on CPUs.

    Contractions that devices share are summed in `parts` parts, in the order of a binary tree; other products, and the head,
    are computed by columns in as many blocks, attention by query heads, and linear attention by key heads. Between devices the
    sum is that of `tree_sum`, which sends as many bytes as a ring: 2 (n - 1) / n times the stream for n devices after each half
    of a layer. It costs memory traffic instead: each of n devices writes and reads `parts / n` partial sums, and each query
    head reads its keys and values for itself, where otherwise those of a group do so together. With as many devices as parts,
    products of heads and of the MLP are what they would be.

    Gradients are right, but not the same bits. It takes bundles that compute with matrices as they are, and hidden sizes from
    64 on: with 32, bits differed, where XLA computes small products inside the loops around them.

    Attributes:
        axis: of the mesh, or axes; `()` is a single device, outside of `jax.shard_map`.
        parts: a power of two; it divides heads times their size, the MLP's columns and the vocabulary; experts, and the columns
            of one that all rows have; the value heads of linear attention.
    """

    axis: Axis = ()
    parts: int = 8

    def __post_init__(self) -> None:
        if self.parts < 1 or self.parts & (self.parts - 1):
            raise ValueError(f"expected a power of two as the number of parts, found {self.parts}")

    @property
    def size(self) -> int:
        """The devices.

        Raises:
            ValueError: the parts cannot be divided among them.
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
        self, stack: Any, x: Float[Array, "B T H"], rows: Any, kept: tuple[Any, ...], taps: tuple[int, ...]
    ) -> tuple[Array, tuple[Array, ...], tuple[Any, ...]]:
        """See `models.stack.Schedule.run`.

        Raises:
            ValueError: devices, columns or inputs that do not divide; operations that pack their weights.
        """
        check_unprepared(stack.ops)
        # Key/value heads lie over the first of several axes, and every device of the others has the same ones.
        copies = self.size // jax.lax.axis_size(self.axis[0]) if isinstance(self.axis, tuple) and self.axis else 1
        ops = in_parts(stack.ops, self.parts // self.size, self.parts // self.size * copies)
        return run_layers(replace(stack, ops=ops), x, rows, kept, taps, self.reduce)

    def logits(self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None) -> Float[Array, "*rows V"]:
        check_unprepared(ops)
        x = x if norm is None else ops.rms_norm(x, *norm)
        own = by_columns(lambda x, w: ops.linear(x, w, jnp.float32), x, head, self.parts // self.size)
        return jax.lax.all_gather(own, self.axis, axis=own.ndim - 1, tiled=True) if self.axis else own

    def head_argmax(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, norm: Any = None, masks: Any = None
    ) -> Int[Array, "*rows"]:
        """The largest of `logits`, which are held for it."""
        logits = self.logits(ops, x, head, norm)
        return jnp.argmax(logits if masks is None else allowed(logits, masks), axis=-1).astype(jnp.int32)

    def head_top_k(
        self, ops: Any, x: Float[Array, "*rows H"], head: Any, k: int
    ) -> tuple[Int[Array, "*rows {k}"], Float[Array, "*rows {k}"]]:
        values, index = jax.lax.top_k(self.logits(ops, x, head, None), k)
        return index, values


def check_unprepared(ops: Any) -> None:
    """Raises a `ValueError` for operations that pack their weights, of which there are no blocks."""
    if ops.packs:
        raise ValueError(f"expected operations on matrices as they are, kernels 'xla', found {ops.name!r}")


def block(w: Any, n: Array | int, count: int, dim: int) -> Any:
    """Block n of so many along a dim of a matrix `[I, O]`, of one that is `Transposed`, or of the parts of `Joined` ones."""
    if isinstance(w, Joined):
        return replace(w, parts=tuple(block(part, n, count, dim) for part in w.parts))
    if isinstance(w, Transposed):
        return Transposed(block(w.w, n, count, 1 - dim))
    if isinstance(w, ScaledMatrix):
        return w.cut(n, count, dim)
    if not isinstance(w, Array) or w.shape[dim] % count:
        found = f"one {list(w.shape)}" if isinstance(w, Array) else f"a {type(w).__name__}"
        raise ValueError(f"expected a matrix that {count} blocks divide along its dim {dim}, found {found}")
    size = w.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(w, n * size, size, dim)


def for_each(count: int, of: Callable[[Array], Any]) -> Any:
    """`of(n)` for each n below `count`, stacked; a loop whose body is the same program however often it runs."""
    return jax.lax.scan(lambda _, n: (None, jax.lax.optimization_barrier(of(n))), None, jnp.arange(count))[1]


def by_columns(product: Columns, x: Float[Array, "*rows I"], w: Any, count: int) -> Float[Array, "*rows O"]:
    """`product(x, w)`, so many blocks of columns one after another."""
    blocks = jnp.moveaxis(for_each(count, lambda n: product(x, block(w, n, count, 1))), 0, -2)
    return blocks.reshape(*blocks.shape[:-2], -1)


def by_inputs(product: Columns, x: Float[Array, "*rows I"], w: Any, count: int) -> Float[Array, "*rows O"]:
    """The sum of so many products of some inputs each, as a tree."""

    def of(n: Array) -> Array:
        size = x.shape[-1] // count
        return product(jax.lax.dynamic_slice_in_dim(x, n * size, size, x.ndim - 1), block(w, n, count, 0))

    return as_tree(for_each(count, of))


def as_tree(sums: Float[Array, "count *of"]) -> Float[Array, "*of"]:
    """The sum of a power of two of arrays, as a binary tree."""
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def by_experts(ops: Operations, product: RoutedProduct, x: Float[Array, "R H"], w: RoutedWeights, count: int) -> Array:
    """The sum of so many products, of some of a device's experts each, as a tree; rows choose again for each of them.

    An expert that all rows have is summed with them, some of its columns with each product.
    """

    def of(n: Array) -> Array:
        part = replace(ops, first_expert=lambda held: ops.first_expert(held * count) + n * held)
        shared = None if w.shared is None else (block(w.shared[0], n, count, 1), block(w.shared[1], n, count, 0))
        own = jax.tree.map(lambda each: block(each, n, count, 0), w.divided)
        return product(part, x, RoutedWeights(w.whole, own, shared))

    return as_tree(for_each(count, of))


def heads_apart(ops: Operations, projection: tuple[Array, ...], spec: Heads) -> tuple[Any, Any, Any]:
    """`ops.heads`, one head after another: XLA's sums over the entries of a head go by how many heads there are."""
    q, kv = (projection[0], projection[1:]) if len(projection) != 2 else (None, projection)

    def of(parts: tuple[Array, ...], take: Callable[[tuple[Any, Any, Any]], Any]) -> Any:
        def one(n: Array) -> Any:
            own = [jax.lax.dynamic_slice_in_dim(part, n * spec.head_dim, spec.head_dim, 2) for part in parts]
            return take(ops.heads(tuple(own), spec))

        return for_each(parts[0].shape[-1] // spec.head_dim, one)

    queries = None if q is None else jnp.moveaxis(of((q,), lambda made: made[0][:, :, 0]), 0, 2)
    if not kv:
        return queries, None, None
    k, v = (jnp.moveaxis(part, 0, 1) for part in of(kv, lambda made: tuple(part[:, 0] for part in made[1:])))
    return queries, k, v


def head_by_head(of: Callable[..., Any], heads: int, arguments: tuple[Any, ...], dims: Any, made_dims: Any) -> Any:
    """`Operations.each_head`, one head after another."""

    def cut(n: Array, dim: int | None, part: Any) -> Any:
        return part if dim is None else jax.tree.map(lambda x: block(x, n, heads, dim), part)

    def side_by_side(dim: int, x: Array) -> Array:
        apart = jnp.moveaxis(x, 0, dim)
        return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 2 :])

    def joined(dim: int | None, part: Any) -> Any:
        return part if dim is None else jax.tree.map(partial(side_by_side, dim), part)

    over = partial(jax.tree.map, is_leaf=lambda dim: dim is None)
    return over(joined, made_dims, for_each(heads, lambda n: of(*over(partial(cut, n), dims, arguments))))


def rule_of(scores: Scores, n: Array) -> dict[str, Scores]:
    """What attention of query head n is told beyond its operands: nothing where all keys are weighed as usual."""
    if scores.default:
        return {}
    sinks = None if scores.sinks is None else jax.lax.dynamic_slice_in_dim(scores.sinks, n, 1)
    return {"rule": scores._replace(sinks=sinks)}


def by_heads(
    ops: Operations,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    scores: Scores = PLAIN_SCORES,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries, one query head after another."""
    heads = q.shape[2]

    def of(n: Array) -> Array:
        own = [jax.lax.dynamic_slice_in_dim(part, n // (heads // k.shape[1]), 1, 1) for part in (k, v)]
        return ops.prefix_attention(jax.lax.dynamic_slice_in_dim(q, n, 1, 2), *own, lengths, **rule_of(scores, n))[:, :, 0]

    return jnp.moveaxis(for_each(heads, of), 0, 2)


def by_heads_over_pages(
    ops: Operations,
    q: Float[Array, "B T N D"],
    pool: KeyValuePages,
    table: Int[Array, "B M"],
    lengths: Int[Array, "B T"],
    scores: Scores,
) -> Float[Array, "B T N D"]:
    """Attention over entries in pages, one query head after another."""
    heads = q.shape[2]
    kv_heads = pool.k.shape[1]

    def of(n: Array) -> Array:
        own = jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, n // (heads // kv_heads), 1, 1), pool)
        query = jax.lax.dynamic_slice_in_dim(q, n, 1, 2)
        return ops.paged_attention(query, own, table, lengths, **rule_of(scores, n))[:, :, 0]

    return jnp.moveaxis(for_each(heads, of), 0, 2)


def append_attend_pages(
    ops: Operations, projection: Any, spec: Heads, pool: KeyValuePages, table: Array, start: Array, count: Array
) -> tuple[Array, KeyValuePages]:
    """`Operations.paged_append_attend`, each query head by itself."""
    q, new_k, new_v = heads_apart(ops, projection, spec)
    pool = cast(KeyValuePages, ops.paged_append(pool, table, new_k, new_v, start, count))
    at = jnp.arange(q.shape[1])[None]
    lengths = jnp.where(at < count[:, None], start[:, None] + at + 1, 0)
    out = by_heads_over_pages(ops, q, pool, table, lengths, spec.scores)
    return out.reshape(*out.shape[:2], -1), pool


def in_parts(ops: Operations, count: int, key_count: int) -> Operations:
    """Operations that layers compute with, in blocks.

    Args:
        count: blocks of this device's columns, or inputs where it has these.
        key_count: blocks of its keys' and values' columns.
    """

    def flat(out: Array) -> Array:
        return out.reshape(*out.shape[:2], -1)

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else ops.rms_norm(x, *norm)

    def project(x: Array, w: Joined, norm: Norm | None = None, bias: Any = None) -> tuple[Array, ...]:
        x = normed(x, norm)
        counts = (count, key_count, key_count)
        made = [by_columns(ops.linear, x, part, n) for part, n in zip(w.parts, counts, strict=True)]
        return tuple(made if bias is None else (y + b for y, b in zip(made, bias, strict=True)))

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

    def append_attend(projection: Any, spec: Heads, k: Array, v: Array, start: Array, count: Array) -> tuple[Array, ...]:
        q, new_k, new_v = heads_apart(ops, projection, spec)
        k = ops.append(k, new_k, start, count)
        v = ops.append(v, new_v, start, count)
        lengths = jnp.minimum(start[:, None] + jnp.arange(q.shape[1])[None] + 1, k.shape[2])
        return flat(by_heads(ops, q, k, v, lengths, spec.scores)), k, v

    def causal_attention(projection: Any, spec: Heads) -> Array:
        q, k, v = heads_apart(ops, projection, spec)
        lengths = jnp.broadcast_to(jnp.arange(q.shape[1]) + 1, q.shape[:2])
        return flat(by_heads(ops, q, k, v, lengths, spec.scores))

    return replace(
        one_after_another(ops),
        begin=partial(begun_in_parts, ops, count, project),
        project=project,
        linear=linear,
        gated_linear=gated_linear,
        routed=partial(routed_in_parts, ops, count),
        heads=partial(heads_apart, ops),
        append_attend=append_attend,
        paged_append_attend=cast(Any, partial(append_attend_pages, ops)),
        causal_attention=causal_attention,
        prefix_attention=partial(by_heads, ops),
    )


def one_after_another(ops: Operations) -> Operations:
    """Operations whose heads of linear attention go one after another, in layers and where their states are settled."""
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
    """`Operations.begin`, whose products are computed by columns in so many blocks, or as `project` does."""

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
    """`Operations.routed`, in so many blocks of a device's experts."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    y = by_experts(ops, product, h.reshape(-1, x.shape[-1]), w, blocks).reshape(x.shape).astype(x.dtype)
    return y if add is None else add + y


def tree_sum(x: Float[Array, "..."], axis: Axis) -> Float[Array, "..."]:
    """`jax.lax.psum(x, axis)` as a tree: ((0 + 1) + (2 + 3)) + ... of the devices, with the same bits on all of them.

    By recursive halving (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):
    devices that differ in one bit of their index exchange halves of what they hold, until each holds its piece of the sum;
    then these are gathered. Of n devices each sends and receives 2 (n - 1) / n times the bytes of `x`, padded to n pieces.

    Raises:
        ValueError: the number of devices is no power of two.
    """
    size = jax.lax.axis_size(axis)
    own = jax.lax.axis_index(axis)
    if size & (size - 1):
        raise ValueError(f"expected a power of two devices, found {size}")
    held = jnp.pad(x.reshape(-1), (0, -x.size % size)).reshape(size, -1)
    bit = 1
    while bit < size:
        halves = held.reshape(len(held) // 2, 2, -1)
        mine = (own // bit) % 2
        kept, sent = (jax.lax.dynamic_index_in_dim(halves, n, 1, keepdims=False) for n in (mine, 1 - mine))
        held = kept + jax.lax.ppermute(sent, axis, [(device, device ^ bit) for device in range(size)])
        bit *= 2
    return jax.lax.all_gather(held[0], axis, tiled=True)[: x.size].reshape(x.shape)
