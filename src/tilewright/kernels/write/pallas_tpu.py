"""Cache writes on a TPU, for few new entries of a contiguous cache: one call writes the keys and values of all rows.

The cache stays in place, in the layout that the attention kernel reads. (XLA's own updates use the layout of the new entries.
Where a device holds one head, this layout differs, and both arrays are copied there and back in every layer.)
HBM is written in whole tiles: for each row, the window of tiles around its new entries is fetched into VMEM, updated and
written back. All fetches of a part start before the first wait.

Legend: B rows of a batch, K key/value heads, T new entries, S entries of a cache, W entries of a window, D head size, R rows of
a part.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int, Shaped

from tilewright.kernels.operations import KeyValueRows

LANES = 128
TILE = 16
"""Windows start at multiples of this: whole tiles of bfloat16 and of float32."""
NEW_ENTRIES = 64
"""Limit of T; XLA writes longer runs of entries as fast."""
ROW_BYTES = 1 << 16
"""Limit of bytes of a row's window in float32, for the same reason: one entry of eight heads, or 16 of four."""
PART_BYTES = 1 << 20
"""Bytes of a part's windows in float32."""
PART_ROWS = 16
"""Limit of R, as the program has separate steps for each row."""


def window_size(count: int) -> int:
    """Returns W: the size of an aligned window that holds this many entries from any start."""
    return pl.cdiv(TILE - 1 + count, TILE) * TILE


def refuses(cache: Any, k: Array | jax.ShapeDtypeStruct, *rest: Any) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if not isinstance(cache, KeyValueRows):
        return "needs a contiguous cache"
    held = cache.k
    (b, heads, slots, d), count = held.shape, k.shape[2]
    whole = d % LANES == 0 and slots % TILE == 0 and held.dtype == k.dtype and held.dtype in (jnp.float32, jnp.bfloat16)
    few = 0 < count <= NEW_ENTRIES and window_size(count) <= slots
    if b > 1 and whole and few and heads * window_size(count) * d * 4 <= ROW_BYTES:
        return ""
    return "needs few new entries of several rows, head sizes that are multiples of 128, and one dtype (float32 or bfloat16)"


def kernel(start_ref, count_ref, *refs, caches: int, rows: int):
    """Processes a part of the rows.

    Operands: for each cache its new entries in float32, [B K, D] for one entry per row, else [R, K, W, D] with the entries
        first;
    then the caches [B, K, S, D] as inputs, and the same caches as outputs.

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
        in_hbm = cache_refs[number].at[first + row, :, pl.ds(begin(row), size), :]
        in_vmem = window_refs[number].at[row]
        return pltpu.make_async_copy(*((in_vmem, in_hbm) if back else (in_hbm, in_vmem)), done.at[number, row])

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
        window = window_refs[number][row].astype(jnp.float32)  # shifts and selects exist for 32 bits in all cases
        one = len(new.shape) == 2
        placed = new[pl.ds((first + row) * heads, heads), :][:, None] if one else pltpu.roll(new[row], shift, 1)
        at = jax.lax.broadcasted_iota(jnp.int32, window.shape, 1)
        written = (at >= shift) & (at < shift + count_ref[first + row])
        window_refs[number][row] = jnp.where(written, placed, window).astype(window_refs[number].dtype)
        copy(number, row, back=True).start()

    each(lambda number, row: copy(number, row, back=False).start())
    each(change)
    each(lambda number, row: copy(number, row, back=True).wait())


def write(
    cache: KeyValueRows,
    k: Shaped[Array, "B K T D"],
    v: Shaped[Array, "B K T D"],
    start: Int[Array, " B"],
    counts: Int[Array, " B"],
    interpret: bool = False,
) -> KeyValueRows:
    """Writes new entries into a cache, in place if nothing else reads it afterwards.

    Args:
        interpret: run without a TPU, slowly.
    """
    (b, heads, slots, d), t, many, dtype = cache.k.shape, k.shape[2], len(cache), cache.k.dtype
    size = window_size(t)
    most = min(PART_ROWS, max(1, PART_BYTES // (heads * size * d * 4)))
    rows = next(each for each in range(min(b, most), 0, -1) if b % each == 0)
    wide = [each.astype(jnp.float32) for each in (k, v)]
    if t == 1:  # keep the layout of matmul outputs for one position, which avoids a copy
        wide = [each.reshape(b * heads, d) for each in wide]
        windows = pl.BlockSpec((b * heads, d), lambda part: (0, 0))
    else:
        wide = [jnp.pad(each, ((0, 0), (0, 0), (0, size - t), (0, 0))) for each in wide]
        windows = pl.BlockSpec((rows, heads, size, d), lambda part: (part, 0, 0, 0))
    moved = 2 * many * b * heads * size * d * dtype.itemsize + sum(4 * each.size for each in wide)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    keys, values = pl.pallas_call(
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
        name="write",
    )(start.astype(jnp.int32), counts.astype(jnp.int32), *wide, *cache)
    return KeyValueRows(keys, values)
