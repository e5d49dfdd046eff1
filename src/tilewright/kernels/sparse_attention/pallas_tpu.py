"""Sparse denoising attention on a TPU: keys, values and changes pass through VMEM block by block under an online softmax.

Neither scores nor new contexts are read back: the statistics of the contexts' change are summed where contexts are written.
Caches have the layout `[B, S, heads * D]`, so that a head's lanes are read in place. Values are multiplied only for blocks of
queries with an exact one, and changes only for blocks of positions with a changed one.

Legend: B rows of a batch, W queries of a window, S positions, N query heads, K key/value heads, D head size, C changes, Q
queries and P positions of a block, L lanes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int

from tilewright.kernels.attention.xla import MASKED
from tilewright.kernels.sparse_attention.reference import CARRIED, EXACT

LANES = 128
QUERIES = 256
"""Limit of Q."""
POSITIONS = 512
"""Limit of P."""
STATISTICS = 8
"""Rows of statistics, a register's height, of which three are used."""


def refuses(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, *rest: object) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    whole = q.shape[3] % LANES == 0 and q.shape[1] % LANES == 0 and k.shape[1] % LANES == 0 and q.size > 0 and k.size > 0
    if whole and q.dtype == k.dtype and q.dtype in (jnp.float32, jnp.bfloat16):
        return ""
    return "needs head sizes and windows that are multiples of 128, in one dtype (float32 or bfloat16)"


def block_size(most: int, size: int) -> int:
    """Returns the largest multiple of the lanes up to `most` that divides `size`."""
    return next(each for each in range(most, 0, -LANES) if size % each == 0)


def kernel(
    live_ref,
    exact_ref,
    moved_ref,
    q_ref,
    kinds_ref,
    before_ref,
    k_ref,
    v_ref,
    changes_ref,
    out_ref,
    statistics_ref,
    largest_ref,
    total_ref,
    values_ref,
    *,
    positions: int,
    scale: float,
):
    """Processes a block: q, before and out [1, Q, D], kinds [1, Q, 1], k and v [1, P, D], changes [1, C, P, D], statistics
    [1, 1, 8, Q].

    Scratch, persistent over all blocks of positions: running maximum and sum of weights [Q, L], accumulators of values and of
    each change [1 + C, Q, D].
    """
    row = pl.program_id(0)
    part = pl.program_id(2)
    block = pl.program_id(3)
    count = changes_ref.shape[1]
    precision = jax.lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None

    @pl.when(block == 0)
    def _():
        largest_ref[...] = jnp.full(largest_ref.shape, MASKED, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        values_ref[...] = jnp.zeros(values_ref.shape, jnp.float32)

    first = block * positions

    @pl.when(first < live_ref[row])
    def _():
        scores = jax.lax.dot_general(
            q_ref[0], k_ref[0], (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        is_visible = first + jax.lax.broadcasted_iota(jnp.int32, (1, positions), 1) < live_ref[row]
        scores = jnp.where(is_visible, scores * scale, MASKED)
        before = largest_ref[:, :1]
        largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(is_visible, jnp.exp(scores - largest), 0.0)
        rescale = jnp.exp(before - largest)
        total_ref[...] = total_ref[...] * rescale + jnp.sum(weights, axis=1, keepdims=True)
        largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)
        values_ref[...] = values_ref[...] * rescale[None]
        narrow = weights.astype(v_ref.dtype)

        def add(number: int, values: Array) -> None:
            values_ref[number] += jnp.dot(narrow, values, precision=precision, preferred_element_type=jnp.float32)

        @pl.when(exact_ref[row, part] > 0)
        def _():
            add(0, v_ref[0])

        for change in range(count):

            @pl.when(moved_ref[row, change, block] > 0)
            def _(change: int = change):
                add(1 + change, changes_ref[0, change])

    @pl.when(block == pl.num_programs(3) - 1)
    def _():
        total = total_ref[:, :1]
        share = jnp.where(total > 0, 1.0 / total, 0.0)
        old = before_ref[0].astype(jnp.float32)
        kinds = kinds_ref[0]
        after = jnp.where(kinds == EXACT, values_ref[0] * share, old)
        for change in range(count):
            after = jnp.where(kinds == CARRIED + change, old + values_ref[1 + change] * share, after)
        out_ref[0] = after.astype(out_ref.dtype)
        sums = [jnp.sum(x * y, axis=1, keepdims=True) for x, y in ((old, after), (old, old), (after, after))]
        padding = [jnp.zeros_like(sums[0])] * (STATISTICS - len(sums))
        statistics_ref[0, 0] = jnp.concatenate([*sums, *padding], axis=1).T


def sparse_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
    interpret: bool = False,
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """Computes attention of a denoising step over a window; see `reference.sparse_attention`.

    Args:
        interpret: run without a TPU, slowly.
    """
    (b, w, n, d), (s, heads), count = q.shape, k.shape[1:3], changes.shape[1]
    rows = block_size(QUERIES, w)
    positions = block_size(POSITIONS, s)
    parts = w // rows
    blocks = s // positions
    exact = jnp.any((kinds == EXACT).reshape(b, parts, rows), axis=2).astype(jnp.int32)
    moved = jnp.any((changes != 0).reshape(b, count, blocks, -1), axis=3).astype(jnp.int32)
    flat_k, flat_v = (x.reshape(b, s, heads * d) for x in (k, v))

    def of_position(row: Any, head: Any, _: Any, block: Any, live: Any, *rest: Any) -> tuple[Any, ...]:
        """Stays at the last visible block, since a block that is already in VMEM is not fetched again."""
        last = jnp.maximum(pl.cdiv(live[row], positions) - 1, 0)
        return row, jnp.minimum(block, last), jax.lax.div(head, n // heads)

    def of_change(*at: Any) -> tuple[Any, ...]:
        row, block, head = of_position(*at)
        return row, 0, block, head

    queries = pl.BlockSpec((1, rows, d), lambda row, head, part, *_: (row, part, head))
    cached = pl.BlockSpec((1, positions, d), of_position)
    contexts, statistics = pl.pallas_call(
        partial(kernel, positions=positions, scale=d**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b, n, parts, blocks),
            in_specs=[
                queries,
                pl.BlockSpec((1, rows, 1), lambda row, head, part, *_: (row, part, 0)),
                queries,
                cached,
                cached,
                pl.BlockSpec((1, count, positions, d), of_change),
            ],
            out_specs=[queries, pl.BlockSpec((1, 1, STATISTICS, rows), lambda row, head, part, *_: (row, head, 0, part))],
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((1 + count, rows, d), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct((b, n, STATISTICS, w), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * (2 + count) * q.size * s,
            bytes_accessed=(3 * q.size + parts * b * n * (2 + count) * s * d) * q.dtype.itemsize,
            transcendentals=b * n * w * s,
        ),
        interpret=interpret,
        name="sparse_attention",
    )(
        lengths.astype(jnp.int32),
        exact,
        moved,
        q.reshape(b, w, n * d),
        kinds.astype(jnp.int32)[..., None],
        before,
        flat_k,
        flat_v,
        changes.reshape(b, count, s, heads * d),
    )
    return contexts, jnp.sum(statistics[:, :, :3], axis=1).transpose(0, 2, 1)
