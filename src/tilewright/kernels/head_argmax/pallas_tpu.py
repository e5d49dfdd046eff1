"""Argmax of a head on a TPU: the head passes through VMEM tile by tile, and logits never reach HBM.

Every lane keeps its largest logit so far and the logit's index; the lanes are compared once, after the last tile. On a chip
with two cores, each core processes one half of the tiles; other chips process the halves in sequence.

The first of equal logits wins, and a row of only -inf gives index 0. NaN never wins (the reference returns the first NaN).

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

from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.linear.xla import normed
from tilewright.kernels.operations import Norm, Transposed

LANES = 128
HALVES = 2
TILE_BYTES = 2**22
"""Limit of bytes of a tile of the head, double-buffered in VMEM. A tile takes some microseconds of any chip's bandwidth, so
that the latency of a copy is negligible."""
VMEM_BYTES = 40 * 2**20
"""Limit of VMEM for the kernel; the smallest of v5e, v5p and v6e has 64 MiB per core."""


def tile_columns(hidden: int, itemsize: int) -> int:
    """Returns C: a multiple of the lanes, with a tile of at most `TILE_BYTES` if 128 columns fit."""
    return min(2048, max(LANES, TILE_BYTES // (hidden * itemsize) // LANES * LANES))


def vmem_bytes(rows: int, hidden: int, columns: int, itemsize: int) -> int:
    """Returns the VMEM bytes of the kernel: two buffers per block, and a tile's logits with a copy."""
    rows = -(-rows // 16) * 16
    blocks = (rows + columns) * hidden * itemsize + 2 * rows * LANES * 4
    return 2 * blocks + 2 * rows * columns * 4


def refuses(x: Array | jax.ShapeDtypeStruct, head: Any, norm: Norm | None = None, masks: Any = None) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    head = head.w if isinstance(head, Transposed) else head
    if isinstance(head, ScaledMatrix) or masks is not None:
        return "needs a head in the dtype of the rows, and no masks"
    rows = x.size // x.shape[-1]
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    wanted = vmem_bytes(rows, hidden, tile_columns(hidden, itemsize), itemsize)
    if rows > 0 and wanted <= VMEM_BYTES and x.dtype == head.dtype and head.dtype in (jnp.float32, jnp.bfloat16):
        return ""
    return "needs rows that fit VMEM, in one dtype (float32 or bfloat16)"


def tile_logits(x_ref, head_ref, transposed: bool) -> Float32[Array, "R C"]:
    """Computes the logits of a tile: x [R, H], head [H, C] or transposed [C, H]."""
    return jax.lax.dot_general(
        x_ref[...],
        head_ref[...],
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def kernel(x_ref, head_ref, best_ref, place_ref, *, vocab: int, tiles: int, transposed: bool):
    """Processes a tile: x [R, H], head [H, C] or transposed [C, H]; best and place [1, R, L] persist in VMEM through a half."""
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
        larger = (part > best) & (at < vocab)  # columns beyond the vocabulary hold arbitrary data
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
        kernel: takes x, head, the blocks [1, R, L] of the two results and the scratch, and the keywords `vocab`, `tiles` (per
            half) and `transposed`.
        vmem: VMEM bytes of the kernel.

    Returns:
        The lanes' values and indices of each half.
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

    lane_results = pl.BlockSpec((1, rows, LANES), lambda half, tile: (half, 0, 0))
    moved = (head.size + rows * hidden) * head.dtype.itemsize + HALVES * rows * LANES * 8
    values, places = pl.pallas_call(
        partial(kernel, vocab=vocab, tiles=tiles, transposed=transposed),
        grid=(HALVES, tiles),
        in_specs=[
            pl.BlockSpec((rows, hidden), lambda half, tile: (0, 0)),
            pl.BlockSpec((columns, hidden) if transposed else (hidden, columns), head_block),
        ],
        out_specs=[lane_results, lane_results],
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
    x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None, masks: None = None, interpret: bool = False
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns index and value of the largest of `x @ head`, with float32 sums, for operands that `refuses` accepts.

    Args:
        head: `[H, V]`, or a `Transposed` `[V, H]`, the layout of an embedding.
        interpret: run without a TPU, slowly.
    """
    x = normed(x, norm)
    transposed = isinstance(head, Transposed)
    head = head.w if isinstance(head, Transposed) else head
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    vmem = vmem_bytes(x.size // hidden, hidden, tile_columns(hidden, itemsize), itemsize)
    best, place = over_tiles(kernel, x, head, transposed, vmem, "head_argmax", interpret)
    # Lanes hold interleaved indices, so equal maxima are resolved by the smallest index.
    largest = jnp.max(best, axis=(0, 2), keepdims=True)
    nowhere = head.shape[0 if transposed else 1] - 1
    first = jnp.min(jnp.where(best == largest, place, nowhere), axis=(0, 2))
    return first.reshape(x.shape[:-1]), largest.reshape(x.shape[:-1])
