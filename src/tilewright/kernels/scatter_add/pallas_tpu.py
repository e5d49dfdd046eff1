"""Message sums on a TPU: tiles of 128 nodes by 16 slots pass through VMEM and are summed there.

Blocks behind the longest row of their tile are not fetched.

Legend: R rows (nodes to reduce for), K slots of a row, F features, T rows of a tile, S slots of a block, C columns of a block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int32

ROWS = 128
"""T."""
SLOTS = 16
"""Limit of S."""
COLUMNS = 512
"""Limit of C."""
SUBLANES = 8


def refuses(messages: Array | jax.ShapeDtypeStruct) -> str:
    """Returns the reason why the kernel does not support these messages; empty if it does."""
    fits = messages.size > 0 and messages.dtype in (jnp.float32, jnp.bfloat16)
    return "" if fits else "needs messages in float32 or bfloat16"


def kernel(live_ref, degrees_ref, messages_ref, out_ref, total_ref, *, slots: int):
    """Processes a block: degrees [1, T] in scalar memory, messages [T, S, C], out and accumulator [T, C]."""
    tile = pl.program_id(0)
    part = pl.program_id(2)
    columns = out_ref.shape[1]

    @pl.when(part == 0)
    def _():
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(part * slots < live_ref[tile])
    def _():
        @pl.loop(0, out_ref.shape[0] // SUBLANES)
        def _(group: Array):
            first = pl.multiple_of(group * SUBLANES, SUBLANES)
            slot = part * slots + jax.lax.broadcasted_iota(jnp.int32, (slots, columns), 0)
            sums = []
            for row in range(SUBLANES):
                messages = messages_ref[first + row].astype(jnp.float32)
                counted = jnp.where(slot < degrees_ref[0, first + row], messages, 0.0)
                sums.append(jnp.sum(counted, axis=0, keepdims=True))
            total_ref[pl.ds(first, SUBLANES)] += jnp.concatenate(sums)

    @pl.when(part == pl.num_programs(2) - 1)
    def _():
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"], interpret: bool = False) -> Float[Array, "R F"]:
    """Sums, for each of R rows, its first `degrees` of K messages in float32, for operands that `refuses` accepts.

    Args:
        interpret: run without a TPU, slowly.
    """
    rows, slots, features = messages.shape
    part = min(slots, SLOTS)
    columns = min(features, COLUMNS)
    tiles = pl.cdiv(rows, ROWS)
    by_tile = jnp.pad(degrees, (0, tiles * ROWS - rows)).reshape(tiles, ROWS)
    live = jnp.max(by_tile, axis=1)

    def block(tile: Any, column: Any, at: Any, live: Any) -> tuple[Any, ...]:
        """Stays at the last block that some row needs, since a block that is already in VMEM is not fetched again."""
        last = jnp.maximum(pl.cdiv(live[tile], part) - 1, 0)
        return tile, jnp.minimum(at, last), column

    return pl.pallas_call(
        partial(kernel, slots=part),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles, pl.cdiv(features, columns), pl.cdiv(slots, part)),
            in_specs=[
                pl.BlockSpec((1, ROWS), lambda tile, column, at, live: (0, tile), memory_space=pltpu.SMEM),
                pl.BlockSpec((ROWS, part, columns), block),
            ],
            out_specs=pl.BlockSpec((ROWS, columns), lambda tile, column, at, live: (tile, column)),
            scratch_shapes=[pltpu.VMEM((ROWS, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, features), messages.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=40 * 2**20
        ),
        cost_estimate=pl.CostEstimate(
            flops=messages.size,
            bytes_accessed=(messages.size + rows * features) * messages.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="scatter_add",
    )(live, by_tile.reshape(1, -1), messages)
