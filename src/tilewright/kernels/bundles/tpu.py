"""The bundle of a TPU: Pallas kernels for the operands that they take, and XLA for the others."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.bundles.xla import xla_operations
from tilewright.kernels.delta_rule import xla as delta_xla
from tilewright.kernels.head_argmax import xla as argmax_xla
from tilewright.kernels.head_top_k import xla as top_k_xla
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import xla
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.operations import PLAIN_SCORES, Heads, KeyValuePages, Norm, Pool, Scores, Transposed
from tilewright.kernels.paged import pallas_tpu as paged_tpu
from tilewright.kernels.paged import xla as paged_xla
from tilewright.kernels.registry import first
from tilewright.kernels.window_attention.pallas_tpu import LANES


def product(x: Float[Array, "*rows I"], w: Any, out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    if isinstance(w, ScaledMatrix) and w.in_blocks:
        return first("products of blocks", "tpu", x, w).product(x, w, out_dtype)
    return xla.tpu_product(x, w, out_dtype)


def head_argmax(
    x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None, masks: Array | None = None
) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    x = xla.normed(x, norm)
    w = head.w if tied else head
    if isinstance(w, ScaledMatrix) or masks is not None:  # the kernel reads heads in the dtype of the rows, and no masks
        return argmax_xla.head_argmax(x, w, tied, product, masks)
    return first("head's argmax", "tpu", x, w).head_argmax(x, w, tied)


def head_top_k(x: Float[Array, "*rows H"], head: Any, k: int) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    w = head.w if tied else head
    if isinstance(w, ScaledMatrix):
        return top_k_xla.head_top_k(x, w, k, tied, product)
    return first("head's top-k", "tpu", x, w, k).head_top_k(x, w, k, tied)


def prefix_attention(
    q: Array, k: Array, v: Array, lengths: Array, extra: tuple[Array, Array] | None = None, rule: Scores = PLAIN_SCORES
) -> Array:
    if not rule.default:
        return attention_xla.prefix_attention(q, k, v, lengths, extra, rule)
    return first("attention", "tpu", q, k, extra).prefix_attention(q, k, v, lengths, extra)


def append_all(caches: Sequence[Array], new: Sequence[Array], start: Array, count: Array) -> tuple[Array, ...]:
    return first("appending", "tpu", caches[0], new[0]).append_all(caches, new, start, count)


def append(cache: Array, new: Array, start: Array, count: Array) -> Array:
    return append_all((cache,), (new,), start, count)[0]


def pages(count: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> Pool:
    return first("paged attention", "tpu", head_dim, dtype).empty(count, kv_heads, entries, head_dim, dtype, devices)


def paged_append(pool: Pool, *rest: Array) -> Pool:
    made: Any = paged_xla if isinstance(pool, KeyValuePages) else paged_tpu
    return made.append(pool, *rest)


def paged_attention(
    q: Array, pool: Pool, table: Array, lengths: Array, extra: tuple[Array, Array] | None = None, rule: Scores = PLAIN_SCORES
) -> Array:
    made: Any = paged_xla if isinstance(pool, KeyValuePages) else paged_tpu
    return made.prefix_attention(q, pool, table, lengths, extra, prefix_attention, rule)


def paged_append_attend(projection: Any, spec: Heads, pool: Pool, *rest: Array) -> tuple[Array, Pool]:
    heads = partial(heads_xla.heads, rotate=heads_xla.rotate_by_product)
    if isinstance(pool, KeyValuePages):
        return paged_xla.append_attend(projection, spec, pool, *rest, heads=heads, attend=prefix_attention)
    return paged_tpu.append_attend(projection, spec, pool, *rest, heads=heads)


def window_attention(q: Array, k: Array, *rest: Array) -> tuple[Array, Array]:
    return first("window attention", "tpu", q, k).window_attention(q, k, *rest)


def delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, by_position: bool = False
) -> tuple[Array, Array]:
    """In a chunk, blocks of drafts as well: position by position the vector unit passes over the state for each of them."""
    return delta_xla.delta_rule(q, k, v, log_decay, beta, state)


TPU = replace(
    xla_operations(
        "tpu",
        product,
        heads_xla.rotate_by_product,
        prefix_attention,
        head_argmax,
        head_top_k,
        append_all,
    ),
    append=append,
    delta_rule=delta_rule,
    window_attention=window_attention,
    window_multiple=LANES,
    pages=pages,
    paged_append=paged_append,
    paged_attention=paged_attention,
    paged_append_attend=paged_append_attend,
)
