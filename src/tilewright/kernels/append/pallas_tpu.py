"""The operation on a TPU for few new entries: those of all rows, and of several caches, in one call.

The caches stay where they are, in the layout that the attention kernel reads. (XLA's own updates take the layout that the new
entries come in; where a device holds one head, that is another one, and both caches are copied there and back in every layer.)
Memory is written in whole tiles: of each row the tiles around its new entries are fetched into VMEM, changed, and put back. The
rows of a part are all fetched before the first is waited for.

Legend: B rows of a batch, K key/value heads, T new entries, S entries of a cache, W entries of a window, D head size, R rows of
a part.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int, Shaped

LANES = 128
TILE = 16
"""Windows begin at multiples of this: whole tiles of bfloat16, and of float32."""
NEW_ENTRIES = 64
"""T, at most: XLA writes long runs of entries as fast."""
ROW_BYTES = 1 << 16
"""Bytes of a row's window in float32, at most, for the same reason: one entry of eight heads, or 16 of four."""
PART_BYTES = 1 << 20
"""Bytes of the windows of a part, in float32."""
PART_ROWS = 16
"""R, at most: the program has the steps of each."""


def window_size(count: int) -> int:
    """W, so that this many entries lie in it, wherever they begin."""
    return pl.cdiv(TILE - 1 + count, TILE) * TILE


def refuses(cache: Array | jax.ShapeDtypeStruct, new: Array | jax.ShapeDtypeStruct) -> str:
    """The reason why the kernel does not take these; empty if it does."""
    (b, heads, slots, d), count = cache.shape, new.shape[2]
    whole = d % LANES == 0 and slots % TILE == 0 and cache.dtype == new.dtype and cache.dtype in (jnp.float32, jnp.bfloat16)
    few = 0 < count <= NEW_ENTRIES and window_size(count) <= slots
    if b > 1 and whole and few and heads * window_size(count) * d * 4 <= ROW_BYTES:
        return ""
    return "it takes few entries of several rows, heads of a multiple of 128, all in float32 or all in bfloat16"


def kernel(start_ref, count_ref, *refs, caches: int, rows: int):
    """A part of the rows: of each cache the new entries in float32, [B K, D] if each row has one, otherwise [R, K, W, D] with
    those of a row in the first places; then the caches [B, K, S, D] as they come, and the same ones as they go.

    Scratch: a window [R, K, W, D] for each cache, semaphores [caches, R].
    """
    new_refs, cache_refs, (*window_refs, done) = refs[:caches], refs[2 * caches : 3 * caches], refs[3 * caches :]
    _, heads, slots, _ = cache_refs[0].shape
    size = window_refs[0].shape[2]
    first = pl.program_id(0) * rows

    def begin(row: int) -> Any:
        aligned = jax.lax.div(jnp.maximum(start_ref[first + row], 0), TILE) * TILE
        return pl.multiple_of(jnp.minimum(aligned, slots - size), TILE)

    def copy(number: int, row: int, back: bool) -> Any:
        there = cache_refs[number].at[first + row, :, pl.ds(begin(row), size), :]
        here = window_refs[number].at[row]
        return pltpu.make_async_copy(*((here, there) if back else (there, here)), done.at[number, row])

    def each(do: Any) -> None:
        for row in range(rows):

            @pl.when(count_ref[first + row] > 0)
            def _(row: int = row):
                for number in range(caches):
                    do(number, row)

    def change(number: int, row: int) -> None:
        copy(number, row, back=False).wait()
        new = new_refs[number]
        shift = start_ref[first + row] - begin(row)
        window = window_refs[number][row].astype(jnp.float32)  # all shifts and choices are there in 32 bits
        one = len(new.shape) == 2
        placed = new[pl.ds((first + row) * heads, heads), :][:, None] if one else pltpu.roll(new[row], shift, 1)
        at = jax.lax.broadcasted_iota(jnp.int32, window.shape, 1)
        written = (at >= shift) & (at < shift + count_ref[first + row])
        window_refs[number][row] = jnp.where(written, placed, window).astype(window_refs[number].dtype)
        copy(number, row, back=True).start()

    each(lambda number, row: copy(number, row, back=False).start())
    each(change)
    each(lambda number, row: copy(number, row, back=True).wait())


def append_all(
    caches: Sequence[Shaped[Array, "B K S D"]],
    new: Sequence[Shaped[Array, "B K T D"]],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    interpret: bool = False,
) -> tuple[Shaped[Array, "B K S D"], ...]:
    """Writes new entries into several caches of one shape and dtype, in place if nothing else reads them.

    Args:
        interpret: runs without a TPU, slowly.
    """
    (b, heads, slots, d), t, many, dtype = caches[0].shape, new[0].shape[2], len(caches), caches[0].dtype
    size = window_size(t)
    most = min(PART_ROWS, max(1, PART_BYTES // (heads * size * d * 4)))
    rows = next(each for each in range(min(b, most), 0, -1) if b % each == 0)
    wide = [each.astype(jnp.float32) for each in new]
    if t == 1:  # in the layout that products of one position have: nothing is copied
        wide = [each.reshape(b * heads, d) for each in wide]
        windows = pl.BlockSpec((b * heads, d), lambda part: (0, 0))
    else:
        wide = [jnp.pad(each, ((0, 0), (0, 0), (0, size - t), (0, 0))) for each in wide]
        windows = pl.BlockSpec((rows, heads, size, d), lambda part: (part, 0, 0, 0))
    moved = 2 * many * b * heads * size * d * dtype.itemsize + sum(4 * each.size for each in wide)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(kernel, caches=many, rows=rows),
        grid=(b // rows,),
        in_specs=[scalars, scalars, *[windows] * many, *[in_memory] * many],
        out_specs=[in_memory] * many,
        out_shape=[jax.ShapeDtypeStruct((b, heads, slots, d), dtype)] * many,
        scratch_shapes=[*[pltpu.VMEM((rows, heads, size, d), dtype)] * many, pltpu.SemaphoreType.DMA((many, rows))],
        input_output_aliases={2 + many + number: number for number in range(many)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="append",
    )(start.astype(jnp.int32), count.astype(jnp.int32), *wide, *caches)
