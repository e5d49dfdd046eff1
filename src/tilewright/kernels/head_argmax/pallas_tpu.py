"""The operation on a TPU: the vocabulary passes through VMEM tile by tile, and the logits never reach memory.

Every lane keeps the largest logit that it has seen, and where; the lanes are compared once, after the last tile. A chip with
two cores gives each of them one half of the tiles; on the others the halves run one after the other.

Of equal logits the first wins, and a row of nothing but -inf gives 0. A NaN never wins (the reference gives the first NaN).

Legend: R rows, H hidden size, V vocabulary, C columns of a tile, P halves, L lanes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

LANES = 128
HALVES = 2
TILE_BYTES = 2**22
"""Bytes of one tile of the head, at most; two are in VMEM at a time. Some microseconds of any chip's bandwidth, so that
starting a copy does not count."""
VMEM_BYTES = 40 * 2**20
"""Bytes of VMEM that the kernel may take: the smallest of v5e, v5p and v6e has 64 MiB to a core."""


def tile_columns(hidden: int, itemsize: int) -> int:
    """C: a multiple of the lanes, of at most `TILE_BYTES` if that holds 128 columns."""
    return min(2048, max(LANES, TILE_BYTES // (hidden * itemsize) // LANES * LANES))


def vmem_bytes(rows: int, hidden: int, columns: int, itemsize: int) -> int:
    """Bytes that the kernel holds in VMEM: two of each block, and a tile's logits with a copy of them."""
    rows = -(-rows // 16) * 16
    blocks = (rows + columns) * hidden * itemsize + 2 * rows * LANES * 4
    return 2 * blocks + 2 * rows * columns * 4


def refuses(x: Array | jax.ShapeDtypeStruct, head: Array | jax.ShapeDtypeStruct) -> str:
    """The reason why the kernel does not take these; empty if it does."""
    rows = x.size // x.shape[-1]
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    wanted = vmem_bytes(rows, hidden, tile_columns(hidden, itemsize), itemsize)
    if rows > 0 and wanted <= VMEM_BYTES and x.dtype == head.dtype and head.dtype in (jnp.float32, jnp.bfloat16):
        return ""
    return "it takes rows that VMEM holds, all in float32 or all in bfloat16"


def tile_logits(x_ref, head_ref, transposed: bool) -> Float32[Array, "R C"]:
    """The logits of one tile: x [R, H], head [H, C] or transposed [C, H]."""
    return jax.lax.dot_general(
        x_ref[...],
        head_ref[...],
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def kernel(x_ref, head_ref, best_ref, place_ref, *, vocab: int, tiles: int, transposed: bool):
    """One tile: x [R, H], head [H, C] or transposed [C, H]; best and place [1, R, L] stay in VMEM through a half."""
    half = pl.program_id(0)
    tile = pl.program_id(1)
    lane = jax.lax.broadcasted_iota(jnp.int32, best_ref.shape[1:], 1)

    @pl.when(tile == 0)
    def _():
        best_ref[0] = jnp.full(best_ref.shape[1:], -jnp.inf, jnp.float32)
        place_ref[0] = lane

    logits = tile_logits(x_ref, head_ref, transposed)
    best = best_ref[0]
    place = place_ref[0]
    columns = logits.shape[1]
    first = (half * tiles + tile) * columns
    for start in range(0, columns, LANES):
        at = first + start + lane
        part = logits[:, start : start + LANES]
        larger = (part > best) & (at < vocab)  # what lies beyond the vocabulary may be anything
        best = jnp.where(larger, part, best)
        place = jnp.where(larger, at, place)
    best_ref[0] = best
    place_ref[0] = place


def over_tiles(
    kernel: Callable[..., None],
    x: Float[Array, "*rows H"],
    head: Float[Array, "..."],
    transposed: bool,
    vmem: int,
    name: str,
    interpret: bool,
    scratch_shapes: Sequence[Any] = (),
) -> tuple[Float32[Array, "P R L"], Int32[Array, "P R L"]]:
    """Runs a kernel over all tiles of the head.

    Args:
        kernel: takes x, head, the blocks [1, R, L] of the two results and the scratch; by name `vocab`, `tiles` (of a half)
            and `transposed`.
        vmem: bytes that it holds in VMEM.

    Returns:
        what each half leaves in the lanes: values and places.
    """
    rows = x.size // x.shape[-1]
    hidden = x.shape[-1]
    vocab = head.shape[0 if transposed else 1]
    columns = tile_columns(hidden, head.dtype.itemsize)
    last = pl.cdiv(vocab, columns) - 1
    tiles = pl.cdiv(last + 1, HALVES)

    def head_block(half: Array, tile: Array) -> tuple[Array | int, Array | int]:
        at = jnp.minimum(half * tiles + tile, last)
        return (at, 0) if transposed else (0, at)

    kept = pl.BlockSpec((1, rows, LANES), lambda half, tile: (half, 0, 0))
    moved = (head.size + rows * hidden) * head.dtype.itemsize + HALVES * rows * LANES * 8
    values, places = pl.pallas_call(
        partial(kernel, vocab=vocab, tiles=tiles, transposed=transposed),
        grid=(HALVES, tiles),
        in_specs=[
            pl.BlockSpec((rows, hidden), lambda half, tile: (0, 0)),
            pl.BlockSpec((columns, hidden) if transposed else (hidden, columns), head_block),
        ],
        out_specs=[kept, kept],
        out_shape=[jax.ShapeDtypeStruct((HALVES, rows, LANES), dtype) for dtype in (jnp.float32, jnp.int32)],
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=max(2**24, vmem * 5 // 4)
        ),
        cost_estimate=pl.CostEstimate(flops=2 * rows * head.size, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name=name,
    )(x.reshape(rows, hidden), head)
    return values, places


def head_argmax(
    x: Float[Array, "*rows H"], head: Float[Array, "..."], transposed: bool = False, interpret: bool = False
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Index and value of the largest of `x @ head`, unless it `refuses`; logits are float32 sums.

    Args:
        head: `[H, V]`, or with `transposed` `[V, H]`, as an embedding lies in memory.
        interpret: runs without a TPU, slowly.
    """
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    vmem = vmem_bytes(x.size // hidden, hidden, tile_columns(hidden, itemsize), itemsize)
    best, place = over_tiles(kernel, x, head, transposed, vmem, "head_argmax", interpret)
    # The halves take turns in no lane: of equal logits the one with the smaller index is first.
    largest = jnp.max(best, axis=(0, 2), keepdims=True)
    nowhere = head.shape[0 if transposed else 1] - 1
    first = jnp.min(jnp.where(best == largest, place, nowhere), axis=(0, 2))
    return first.reshape(x.shape[:-1]), largest.reshape(x.shape[:-1])
