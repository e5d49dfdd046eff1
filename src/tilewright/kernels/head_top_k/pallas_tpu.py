"""Top-k of a head on a TPU: the head passes through VMEM tile by tile, and logits never reach HBM.

Every lane keeps a sorted list of its K largest logits so far and their indices; a new logit is inserted behind all that are
equal or larger. After the last tile the lists of the lanes are merged by taking the best head K times. On a chip with two
cores, each core processes one half of the tiles; other chips process the halves in sequence.

The first of equal logits comes first. NaN counts as -inf.

Legend: R rows, H hidden size, V vocabulary, C columns of a tile, P halves, L lanes, K results.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.head_argmax.pallas_tpu import LANES, VMEM_BYTES, over_tiles, tile_columns, tile_logits
from tilewright.kernels.head_argmax.pallas_tpu import vmem_bytes as argmax_vmem_bytes
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.operations import Transposed

NOWHERE = 2**31 - 1
"""Index of an empty list entry, which loses against every other."""


def vmem_bytes(rows: int, hidden: int, columns: int, itemsize: int, k: int) -> int:
    """Returns the VMEM bytes of the kernel: those of an argmax, and the lists."""
    return argmax_vmem_bytes(rows, hidden, columns, itemsize) + 2 * k * -(-rows // 8) * 8 * LANES * 4


def refuses(x: Array | jax.ShapeDtypeStruct, head: Any, k: int) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    head = head.w if isinstance(head, Transposed) else head
    if isinstance(head, ScaledMatrix):
        return "needs a head in the dtype of the rows"
    rows = x.size // x.shape[-1]
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    wanted = vmem_bytes(rows, hidden, tile_columns(hidden, itemsize), itemsize, k)
    dtypes = x.dtype == head.dtype and head.dtype in (jnp.float32, jnp.bfloat16)
    if rows > 0 and 1 <= k <= LANES and wanted <= VMEM_BYTES and dtypes:
        return ""
    return "needs rows that fit VMEM, one dtype (float32 or bfloat16), and k up to 128"


def sink(part: Array, at: Array, values_ref, places_ref, k: int, unroll: bool) -> None:
    """Inserts one logit per lane, `part` with indices `at` [R, L], into the lane's sorted list."""

    def one(depth: Array, falling: tuple[Array, Array]) -> tuple[Array, Array]:
        value, place = falling
        held = values_ref[depth]
        where = places_ref[depth]
        goes_in = (value > held) | ((value == held) & (place < where))
        values_ref[depth] = jnp.where(goes_in, value, held)
        places_ref[depth] = jnp.where(goes_in, place, where)
        return jnp.where(goes_in, held, value), jnp.where(goes_in, where, place)

    jax.lax.fori_loop(0, k, one, (part, at), unroll=unroll)


def merge(best_ref, place_ref, values_ref, places_ref, k: int) -> None:
    """Writes the K best of all lanes, sorted, to the first K lanes of `best` and `place` [1, R, L]. Consumes the lists."""
    lane = jax.lax.broadcasted_iota(jnp.int32, best_ref.shape[1:], 1)
    best_ref[0] = jnp.full(best_ref.shape[1:], -jnp.inf, jnp.float32)
    place_ref[0] = jnp.full(place_ref.shape[1:], NOWHERE, jnp.int32)

    def take(n: Array, _: None) -> None:
        head = values_ref[0]
        where = places_ref[0]
        largest = jnp.max(head, axis=1, keepdims=True)
        first = jnp.min(jnp.where(head == largest, where, NOWHERE), axis=1, keepdims=True)
        best_ref[0] = jnp.where(lane == n, largest, best_ref[0])
        place_ref[0] = jnp.where(lane == n, first, place_ref[0])
        chosen = (head == largest) & (where == first)

        def up(depth: Array, _: None) -> None:
            values_ref[depth] = jnp.where(chosen, values_ref[depth + 1], values_ref[depth])
            places_ref[depth] = jnp.where(chosen, places_ref[depth + 1], places_ref[depth])

        jax.lax.fori_loop(0, k - 1, up, None)
        places_ref[k - 1] = jnp.where(chosen, NOWHERE, places_ref[k - 1])
        values_ref[k - 1] = jnp.where(chosen, -jnp.inf, values_ref[k - 1])

    jax.lax.fori_loop(0, k, take, None)


def kernel(
    x_ref,
    head_ref,
    best_ref,
    place_ref,
    values_ref,
    places_ref,
    *,
    vocab: int,
    tiles: int,
    transposed: bool,
    k: int,
    unroll: bool,
):
    """Processes a tile: x [R, H], head [H, C] or transposed [C, H]; the lists [K, R, L] persist in VMEM through a half."""
    half = pl.program_id(0)
    tile = pl.program_id(1)
    lane = jax.lax.broadcasted_iota(jnp.int32, best_ref.shape[1:], 1)

    @pl.when(tile == 0)
    def _():
        values_ref[...] = jnp.full(values_ref.shape, -jnp.inf, jnp.float32)
        places_ref[...] = jnp.full(places_ref.shape, NOWHERE, jnp.int32)

    logits = tile_logits(x_ref, head_ref, transposed)
    columns = logits.shape[1]
    first = (half * tiles + tile) * columns
    for start in range(0, columns, LANES):
        at = first + start + lane
        part = logits[:, start : start + LANES]
        real = at < vocab  # columns beyond the vocabulary hold arbitrary data
        finite = jnp.where(real & (part > -jnp.inf), part, -jnp.inf)
        sink(finite, jnp.where(real, at, NOWHERE), values_ref, places_ref, k, unroll)

    @pl.when(tile == tiles - 1)
    def _():
        merge(best_ref, place_ref, values_ref, places_ref, k)


def head_top_k(
    x: Float[Array, "*rows H"], head: Any, k: int, interpret: bool = False
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Returns indices and values of the `k` largest of `x @ head`, with float32 sums, for operands that `refuses` accepts.

    Args:
        head: `[H, V]`, or a `Transposed` `[V, H]`, the layout of an embedding.
        interpret: run without a TPU, slowly.
    """
    transposed = isinstance(head, Transposed)
    head = head.w if isinstance(head, Transposed) else head
    rows = x.size // x.shape[-1]
    hidden = x.shape[-1]
    itemsize = head.dtype.itemsize
    vmem = vmem_bytes(rows, hidden, tile_columns(hidden, itemsize), itemsize, k)
    lists = [pltpu.VMEM((k, rows, LANES), dtype) for dtype in (jnp.float32, jnp.int32)]
    run = partial(kernel, k=k, unroll=not interpret)
    best, place = over_tiles(run, x, head, transposed, vmem, "head_top_k", interpret, lists)
    # Indices of the first half are all smaller, so the first of equal values in this order has the smallest index.
    value, among = jax.lax.top_k(jnp.concatenate(list(best[:, :, :k]), axis=1), k)
    index = jnp.take_along_axis(jnp.concatenate(list(place[:, :, :k]), axis=1), among, axis=1)
    return index.reshape(*x.shape[:-1], k), value.reshape(*x.shape[:-1], k)
