"""The operation on a TPU: keys and values pass through VMEM block by block under a running softmax (Milakov & Gimelshein 2018;
Dao et al. 2022), and the scores never reach memory. Of a cache only the blocks that some query sees are read.

Legend: B rows of a batch, T queries, N query heads, K key/value heads, S cache entries, U extra entries, D head size, R rows of
a key head (N / K * T, see `xla.group_rows`), Q rows and C entries of a block, L lanes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from tilewright.kernels.attention.xla import MASKED, group_rows, ungroup_rows

LANES = 128
ROWS = 512
"""Q, at most."""
ENTRIES = 512
"""C, at most."""
EXTRA_ENTRIES = 1024
"""U, at most: they are in VMEM whole."""


def refuses(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, extra: tuple[Array, Array] | None) -> str:
    """The reason why the kernel does not take these; empty if it does."""
    whole = q.shape[3] % LANES == 0 and k.shape[2] > 0 and q.shape[1] > 0
    few = extra is None or 0 < extra[0].shape[2] <= EXTRA_ENTRIES
    if whole and few and q.dtype == k.dtype and q.dtype in (jnp.float32, jnp.bfloat16):
        return ""
    return "it takes heads of a multiple of 128, all in float32 or all in bfloat16, and few keys of a block"


def kernel(live_ref, q_ref, lengths_ref, k_ref, v_ref, *rest, entries: int, slots: int, extra: bool):
    """One block: q and out [1, 1, Q, D], lengths [1, Q, 1], k and v [1, 1, C, D], extra ones [1, 1, U, D].

    Scratch, kept through all blocks of the same queries: largest score and sum of weights [Q, L], weighted values [Q, D].
    """
    (extra_k_ref, extra_v_ref), rest = (rest[:2], rest[2:]) if extra else ((None, None), rest)
    out_ref, largest_ref, total_ref, values_ref = rest
    block = pl.program_id(3)
    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    def take(keys: Array, values: Array, seen: Array | None) -> None:
        """Adds some keys under the running softmax."""
        scores = jax.lax.dot_general(
            q_ref[0, 0], keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        scores = scores * keys.shape[1] ** -0.5
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        before = largest_ref[:, :1]
        largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - largest)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)  # a row that has seen nothing yet has MASKED for its largest
        kept = jnp.exp(before - largest)
        total_ref[...] = total_ref[...] * kept + jnp.sum(weights, axis=1, keepdims=True)
        added = jnp.dot(weights.astype(values.dtype), values, precision=precision, preferred_element_type=jnp.float32)
        values_ref[...] = values_ref[...] * kept + added
        largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)

    @pl.when(block == 0)
    def _():
        largest_ref[...] = jnp.full(largest_ref.shape, MASKED, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)
        if extra_k_ref is not None and extra_v_ref is not None:
            take(extra_k_ref[0, 0], extra_v_ref[0, 0], None)

    first = block * entries

    @pl.when(first < live_ref[pl.program_id(0)])
    def _():
        values = v_ref[0, 0]
        if slots % entries:  # behind the cache's end there may be anything, NaN times zero included
            at = first + jax.lax.broadcasted_iota(jnp.int32, (entries, 1), 0)
            values = jnp.where(at < slots, values, jnp.zeros_like(values))
        at = first + jax.lax.broadcasted_iota(jnp.int32, (1, entries), 1)
        take(k_ref[0, 0], values, at < lengths_ref[0])

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        total = total_ref[:, :1]
        out_ref[0, 0] = jnp.where(total > 0, values_ref[...] / total, 0.0).astype(out_ref.dtype)


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    extra: tuple[Float[Array, "B K U D"], Float[Array, "B K U D"]] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of a cache, and over all of `extra`.

    Scores and sums are float32. A query that sees nothing gets zeros.

    Args:
        interpret: runs without a TPU, slowly.
    """
    (b, t, n, d), (heads, slots) = q.shape, k.shape[1:3]
    grouped = group_rows(q, heads)
    rows = min(ROWS, grouped.shape[2])
    entries = min(ENTRIES, slots)
    blocks = pl.cdiv(slots, entries)
    each = jnp.tile(lengths.astype(jnp.int32), (1, n // heads))[:, :, None]
    live = jnp.minimum(jnp.max(lengths, axis=1), slots).astype(jnp.int32)

    def entry_block(row: Any, head: Any, _: Any, block: Any, live: Any) -> tuple[Any, ...]:
        """Stays at the last block that is seen: what is there already is not fetched again."""
        last = jnp.maximum(pl.cdiv(live[row], entries) - 1, 0)
        return row, head, jnp.minimum(block, last), 0

    def query_block(row: Any, head: Any, part: Any, *_: Any) -> tuple[Any, ...]:
        return row, head, part, 0

    cached = pl.BlockSpec((1, 1, entries, d), entry_block)
    queries = pl.BlockSpec((1, 1, rows, d), query_block)
    extra_size = 0 if extra is None else extra[0].shape[2]
    whole = pl.BlockSpec((1, 1, extra_size, d), lambda row, head, *_: (row, head, 0, 0))
    parts = pl.cdiv(grouped.shape[2], rows)
    keys = 2 * parts * b * heads * (slots + extra_size) * d  # both keys and values, once for each block of queries
    out = pl.pallas_call(
        partial(kernel, entries=entries, slots=slots, extra=extra is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, heads, parts, blocks),
            in_specs=[
                queries,
                pl.BlockSpec((1, rows, 1), lambda row, head, part, *_: (row, part, 0)),
                cached,
                cached,
                *([] if extra is None else [whole, whole]),
            ],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM((rows, size), jnp.float32) for size in (LANES, LANES, d)],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * (slots + extra_size),
            bytes_accessed=(2 * q.size + keys) * q.dtype.itemsize + each.size * 4 * LANES,
            transcendentals=b * n * t * (slots + extra_size),
        ),
        interpret=interpret,
        name="prefix_attention",
    )(live, grouped, each, k, v, *(() if extra is None else extra))
    return ungroup_rows(out, t)
