"""The operations on a CPU; the kernels are those of `append/cpu.cc` and `attention/cpu.cc`, told where a row's entries lie.

Results are those of a cache in one block, bit for bit: pages hold whole panels of 16 keys, and sums go on from page to page.
What a row has no page for is an error. Keys and values in 8 bits have a kernel for `append_attend` alone, which is all that a
target computes; XLA does the rest.

Legend: P pages, E entries of a page, M pages that a row may have, B rows, T positions, N query heads, K key/value heads, D head
size, h pairs of its entries that are rotated, U extra keys.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Int32, Shaped

from tilewright.kernels.attention.cpu import refuses_heads
from tilewright.kernels.native import or_nothing
from tilewright.kernels.operations import KeyValuePages, Quantised
from tilewright.kernels.paged import xla


def refuses(head_dim: int, dtype: DTypeLike) -> str:
    """The reason why the kernels do not take keys and values of this size; empty if they do. They take any dtype."""
    return refuses_heads(head_dim)


def append(
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> KeyValuePages:
    """Writes new entries of each row into its pages, in place if nothing else reads the pool afterwards; see `xla.append`."""
    if isinstance(pool.k, Quantised):
        return xla.append(pool, table, k, v, start, count)
    places = start.astype(jnp.int32), count.astype(jnp.int32), table

    def put(held: Array, new: Array) -> Array:
        shape = jax.ShapeDtypeStruct(held.shape, held.dtype)
        return jax.ffi.ffi_call("tilewright_paged_append", shape, input_output_aliases={0: 0})(held, new, *places)

    return jax.tree.map(put, pool, KeyValuePages(k, v))


def prefix_attention(
    q: Float[Array, "B T N D"],
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of its row, and over all of `extra`.

    A query that sees nothing gets zeros.
    """
    if isinstance(pool.k, Quantised):
        return xla.prefix_attention(q, pool, table, lengths, extra)
    if extra is None:
        nothing = jnp.zeros((q.shape[0], pool.k.shape[1], 0, q.shape[3]), q.dtype)
        extra = (nothing, nothing)
    call = jax.ffi.ffi_call("tilewright_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(q, *pool, table, lengths.astype(jnp.int32), *extra)


def append_attend(
    qkv: Float[Array, "B T _"],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    q_norm: Float[Array, " D"] | None,
    k_norm: Float[Array, " D"] | None,
    eps: float,
    cos: Float32[Array, "B T h"],
    sin: Float32[Array, "B T h"],
    pool: KeyValuePages,
    table: Int32[Array, "B M"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T _"], KeyValuePages]:
    """A layer's attention in one call, as `attention.cpu.append_attend`."""
    assert pool.k.shape[1::2] == (kv_heads, head_dim), "the pages' heads are the projection's"
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], heads * head_dim), qkv.dtype)
    held, kept = jax.tree.flatten(pool)
    results = (out, *(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in held))
    norms = or_nothing(q_norm, qkv.dtype), or_nothing(k_norm, qkv.dtype)
    seen = {"window": np.int64(window or 0), "scale": np.float32(scale or 0)}
    places = start.astype(jnp.int32), count.astype(jnp.int32)
    name = f"tilewright_{'quantised' if isinstance(pool.k, Quantised) else 'paged'}_append_attend"
    aliases = {7 + number: 1 + number for number in range(len(held))}
    attended, *parts = jax.ffi.ffi_call(name, results, input_output_aliases=aliases)(
        qkv, *norms, cos, sin, *places, *held, table, eps=np.float32(eps), **seen
    )
    return attended, jax.tree.unflatten(kept, parts)
