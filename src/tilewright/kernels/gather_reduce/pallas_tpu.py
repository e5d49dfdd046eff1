"""Neighbour reduction on a TPU: a DMA per neighbour fetches its row into VMEM, and only the reduced result is written.

Padding is never fetched. While one chunk of rows is reduced, the copies for the next chunk are in flight. On a chip with two
cores, the cores share the tiles. `x` stays in HBM, or in VMEM if XLA places it there before the kernel runs.

A DMA moves whole 32-bit words, and memory holds bfloat16 rows in interleaved pairs. Therefore bfloat16 features are packed
first, columns c and c + W into one word, which reads and writes `x` once. With up to 128 columns, where float32 rows take no
more memory, they are widened instead. Rows that do not fill 128 lanes are moved with their padding, as memory holds them.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, F features, W words of a row, T rows of a tile,
S slots of a part, G rows of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.gather_reduce.reference import refuses_message_reduce as refuses_message_reduce

LANES = 128
SUBLANES = 8
SLOTS = 64
"""Limit of S; rows with more slots are reduced in parts."""
IN_FLIGHT = 512
"""Slots of a chunk: enough copies in flight to hide a copy's latency."""
TILE_SLOTS = 8192
"""Slots of a tile, whose indices are in scalar memory."""
WORDS = 4096
"""Limit of W."""
VMEM_BYTES = 40 * 2**20
"""Limit of VMEM for the kernel; the smallest of v5e, v5p and v6e has 64 MiB per core."""
COMBINE = {"sum": jnp.add, "mean": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


@dataclass(frozen=True)
class TileSizes:
    """Block sizes of the kernel: rows of a tile (T), rows of a chunk (G), slots of a part (S), words of a row (W)."""

    tile: int
    chunk: int
    part: int
    words: int

    def tiles(self, rows: int) -> int:
        return -(-rows // self.tile)

    def parts(self, slots: int) -> int:
        return -(-slots // self.part)


def blocks_for(rows: int, slots: int, features: int, dtype: DTypeLike) -> TileSizes:
    """Chooses block sizes. Tiles are whole lanes, since indices are stored slot by slot; chunks are whole sublanes."""
    words = row_words(features, dtype)
    part = min(slots, SLOTS)
    chunk = max(SUBLANES, IN_FLIGHT // part // SUBLANES * SUBLANES)
    chunk = 1 << (chunk.bit_length() - 1)
    wide = 2 if words > 1024 else 8  # the tile of the result is in VMEM too
    tile = min(max(LANES, TILE_SLOTS // part // LANES * LANES), wide * LANES, -(-rows // LANES) * LANES)
    while tile % chunk:
        chunk //= 2
    return TileSizes(tile, chunk, part, words)


def row_words(features: int, dtype: DTypeLike) -> int:
    """Returns W: 32-bit columns of a row of `x` as the kernel reads it."""
    return features if jnp.dtype(dtype) == jnp.float32 or features <= LANES else -(-features // (2 * LANES)) * LANES


def refuses(
    x: Array | jax.ShapeDtypeStruct, sources: Array | jax.ShapeDtypeStruct, weights: Array | jax.ShapeDtypeStruct | None
) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does. VMEM holds several copies of a
    row."""
    full = x.size > 0 and sources.size > 0 and x.dtype in (jnp.float32, jnp.bfloat16)
    if full and (weights is None or weights.ndim == 2) and row_words(x.shape[1], x.dtype) <= WORDS:
        return ""
    return "needs rows that fit VMEM, and one weight per slot"


@dataclass(frozen=True)
class TpuTransfers:
    """DMA transfers of the kernel, derived from its structure.

    Attributes:
        descriptors: started copies, including those of index blocks and results.
        gathered: bytes of neighbours' rows, each in whole lanes.
        read, written: all bytes, including indices and weights. XLA's work before the kernel (transposing indices, packing
            features) is not included; see `compiled.traffic`.
    """

    descriptors: int
    gathered: int
    read: int
    written: int


def transfers(degrees: np.ndarray, slots: int, features: int, dtype: DTypeLike, weighted: bool = False) -> TpuTransfers:
    """Counts the kernel's transfers for rows of these degrees, without `into`."""
    rows = degrees.size
    blocks = blocks_for(degrees.size, slots, features, dtype)
    tiles = blocks.tiles(rows)
    steps = blocks.tiles(rows) * blocks.parts(slots)
    gathers = int(np.sum(degrees))
    per_slot = 2 if weighted else 1
    gathered = gathers * lanes(blocks.words) * 4
    read = gathered + blocks.tile * 4 * (tiles + steps * blocks.part * per_slot)
    written = rows * lanes(features) * jnp.dtype(dtype).itemsize
    return TpuTransfers(gathers + steps * per_slot + 2 * tiles, gathered, read, written)


def lanes(columns: int) -> int:
    """Rounds a number of columns up to whole lanes, as memory stores them."""
    return -(-columns // LANES) * LANES


def kernel(
    degrees_ref,
    sources_ref,
    *rest,
    blocks: TileSizes,
    rows: int,
    parts: int,
    reduce: Reduce,
    weighted: bool,
    offset: int | None,
):
    """Processes a part of a tile.

    Operands: degrees [1, T] and sources [S, T] in scalar memory, weights [S, T], x [M, W], out [T, F] or a buffer.

    Scratch: two chunks of rows [2, S, G, W], accumulator of the previous parts [T, F], transposed weights [T, S], and the
        tile's
    result [T, F] if it goes into a buffer.
    """
    refs = list(rest)
    weights_ref = refs.pop(0) if weighted else None
    x_ref = refs.pop(0)
    if offset is not None:
        refs.pop(0)  # the buffer as an input; it is aliased with the output
    out_ref, buffer, arrived, total_ref = refs[:4]
    refs = refs[4:]
    transposed_ref = refs.pop(0) if weighted else None
    staged_ref, stored = refs if offset is not None else (out_ref, None)
    tile = pl.program_id(0)
    part = pl.program_id(1)
    features = staged_ref.shape[1]

    def filled(row: Array) -> Array:
        """Returns the number of this part's slots that a row of the tile fills."""
        return jnp.clip(degrees_ref[0, row] - part * blocks.part, 0, blocks.part)

    def each_slot(chunk: Array, act: Callable[[Array, Array], None]) -> None:
        @pl.loop(0, blocks.chunk)
        def _(row: Array):
            @pl.loop(0, filled(chunk * blocks.chunk + row))
            def _(slot: Array):
                act(row, slot)

    def copy(chunk: Array, row: Array, slot: Array):
        source = sources_ref[slot, chunk * blocks.chunk + row]
        phase = jax.lax.rem(chunk, 2)
        to = buffer.at[phase, slot, pl.ds(row, 1)]
        return pltpu.make_async_copy(x_ref.at[pl.ds(source, 1)], to, arrived.at[phase])

    def fetch(chunk: Array) -> None:
        each_slot(chunk, lambda row, slot: copy(chunk, row, slot).start())

    def reduce_rows(chunk: Array, group: Array) -> None:
        """Reduces eight rows of a chunk."""
        first = pl.multiple_of(chunk * blocks.chunk + group * SUBLANES, SUBLANES)
        of_tile = pl.ds(first, SUBLANES)
        of_chunk = pl.ds(group * SUBLANES, SUBLANES)
        counts = eight_numbers(lambda row: filled(first + row), features)
        total = jnp.full((SUBLANES, features), {"max": -jnp.inf, "min": jnp.inf}.get(reduce, 0.0), jnp.float32)
        if parts > 1:
            total = jnp.where(part == 0, total, total_ref[of_tile])
        weights = None if transposed_ref is None else transposed_ref[of_tile]
        for slot in range(blocks.part):
            message = unpacked(buffer[jax.lax.rem(chunk, 2), slot, of_chunk], features)
            if weights is not None:
                message = message * weights[:, slot : slot + 1]
            total = jnp.where(slot < counts, COMBINE[reduce](total, message), total)  # other slots hold stale data
        if parts > 1:
            total_ref[of_tile] = total
        degrees = eight_numbers(lambda row: degrees_ref[0, first + row], features)
        if reduce == "mean":
            total = total / jnp.maximum(degrees, 1).astype(jnp.float32)
        staged_ref[of_tile] = jnp.where(degrees > 0, total, 0.0).astype(staged_ref.dtype)

    if weights_ref is not None and transposed_ref is not None:
        transposed_ref[...] = weights_ref[...].T
    chunks = blocks.tile // blocks.chunk
    fetch(jnp.int32(0))

    @pl.loop(0, chunks)
    def _(chunk: Array):
        @pl.when(chunk + 1 < chunks)
        def _():
            fetch(chunk + 1)

        # All copies have the same size, so waits need not name their own copy.
        each_slot(chunk, lambda row, slot: copy(chunk, row, slot).wait())

        @pl.loop(0, blocks.chunk // SUBLANES)
        def _(group: Array):
            reduce_rows(chunk, group)

    if offset is not None:

        @pl.when(part == parts - 1)
        def _():
            store(staged_ref, out_ref, stored, tile, offset, rows)


def eight_numbers(number: Callable[[Array], Array], columns: int) -> Int32[Array, "8 columns"]:
    """Broadcasts one scalar per row to all columns of eight rows."""
    at = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, columns), 0)
    whole = jnp.zeros((SUBLANES, columns), jnp.int32)
    for row in range(SUBLANES):
        whole = jnp.where(at == row, number(jnp.int32(row)), whole)
    return whole


def store(staged_ref, out_ref, stored, tile: Array, offset: int, rows: int) -> None:
    """Copies a tile's result into the buffer: eight rows at a time if they are aligned, the others one by one."""
    first = tile * staged_ref.shape[0]
    live = jnp.minimum(staged_ref.shape[0], rows - first)
    whole = jax.lax.div(live, SUBLANES) if offset % SUBLANES == 0 else 0

    def eight(group: Array):
        at = pl.multiple_of(group * SUBLANES, SUBLANES)
        to = out_ref.at[pl.ds(offset + pl.multiple_of(first + at, SUBLANES), SUBLANES)]
        return pltpu.make_async_copy(staged_ref.at[pl.ds(at, SUBLANES)], to, stored)

    def one(row: Array):
        return pltpu.make_async_copy(staged_ref.at[pl.ds(row, 1)], out_ref.at[pl.ds(offset + first + row, 1)], stored)

    singles = staged_ref.dtype == jnp.float32  # `gather_reduce` has excluded single rows for bfloat16
    pl.loop(0, whole)(lambda group: eight(group).start())
    if singles:
        pl.loop(whole * SUBLANES, live)(lambda row: one(row).start())
        pl.loop(whole * SUBLANES, live)(lambda row: one(row).wait())
    pl.loop(0, whole)(lambda group: eight(group).wait())


def packed(x: Float[Array, "M F"]) -> Array:
    """Packs rows into 32-bit words: float32, or two bfloat16 columns per uint32 word. F becomes W."""
    words = row_words(x.shape[1], x.dtype)
    if x.dtype == jnp.float32 or x.shape[1] <= LANES:
        return x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.pad(x, ((0, 0), (0, 2 * words - x.shape[1]))), jnp.uint16).astype(jnp.uint32)
    return bits[:, :words] | (bits[:, words:] << 16)


def unpacked(words: Array, features: int) -> Float[Array, "8 F"]:
    """Inverts `packed`, in float32: a bfloat16 is the upper half of a float32."""
    if words.dtype == jnp.float32:
        return words
    halves = [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (words << 16, words & jnp.uint32(0xFFFF0000))]
    return jnp.concatenate(halves, axis=1)[:, :features]


def gather_reduce(
    x: Float[Array, "M F"],
    sources: Int32[Array, "R K"],
    degrees: Int32[Array, " R"],
    weights: Float[Array, "R K"] | None = None,
    reduce: Reduce = "sum",
    into: tuple[Float[Array, "N C"], int] | None = None,
    interpret: bool = False,
) -> Float[Array, "R F"] | Float[Array, "N F"]:
    """Reduces, for each row, the features of its first `degrees` sources times their weights, in float32.

    Supports operands for which `refuses` returns an empty string.

    Args:
        into: a buffer in the dtype of `x` and a row index: the result is written from that row on, and the buffer is returned,
            without a copy if the program does not use the buffer again. From a row that is no multiple of eight, rows are
            written one by one; in bfloat16 both the row and R must be multiples of eight.
        interpret: run without a TPU, slowly.

    Raises:
        ValueError: `into` has another dtype or width, too little room, or a row that bfloat16 does not allow.
    """
    (rows, slots), features = sources.shape, x.shape[1]
    offset = None if into is None else checked_offset(into, x, rows)
    blocks = blocks_for(rows, slots, features, x.dtype)
    tiles = blocks.tiles(rows)
    parts = blocks.parts(slots)
    missing = tiles * blocks.tile - rows
    words = packed(x)
    by_slot = [jnp.pad(each, ((0, missing), (0, 0))).T for each in (sources, *(() if weights is None else (weights,)))]
    smem = partial(pl.BlockSpec, memory_space=pltpu.SMEM)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    block = (blocks.part, blocks.tile)
    result = (blocks.tile, features)
    out = jax.ShapeDtypeStruct((rows, features) if into is None else into[0].shape, x.dtype)
    moved = (rows * slots * blocks.words + sources.size) * 4 + rows * features * x.dtype.itemsize
    scratch = [
        pltpu.VMEM((2, blocks.part, blocks.chunk, blocks.words), words.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM(result if parts > 1 else (SUBLANES, LANES), jnp.float32),
        *([] if weights is None else [pltpu.VMEM((blocks.tile, blocks.part), jnp.float32)]),
        *([] if into is None else [pltpu.VMEM(result, x.dtype), pltpu.SemaphoreType.DMA]),
    ]
    inputs = (jnp.pad(degrees, (0, missing))[None], *by_slot, words, *(() if into is None else into[:1]))
    return pl.pallas_call(
        partial(kernel, blocks=blocks, rows=rows, parts=parts, reduce=reduce, weighted=weights is not None, offset=offset),
        grid=(tiles, parts),
        in_specs=[
            smem((1, blocks.tile), lambda tile, part: (0, tile)),
            smem(block, lambda tile, part: (part, tile)),
            *([] if weights is None else [pl.BlockSpec(block, lambda tile, part: (part, tile))]),
            anywhere,
            *([] if into is None else [anywhere]),
        ],
        out_specs=pl.BlockSpec(result, lambda tile, part: (tile, 0)) if into is None else anywhere,
        out_shape=out,
        scratch_shapes=scratch,
        input_output_aliases={} if into is None else {len(inputs) - 1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(flops=rows * slots * features, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="gather_reduce",
    )(*inputs)


def checked_offset(into: tuple[Array, int], x: Array, rows: int) -> int:
    """Returns the first row of `into` after checking that the result fits."""
    buffer, first = into
    if buffer.dtype != x.dtype or buffer.shape[1] != x.shape[1] or not 0 <= first <= buffer.shape[0] - rows:
        wanted = f"a {x.dtype} buffer of {x.shape[1]} columns with room for {rows} rows"
        raise ValueError(f"expected {wanted}; found {buffer.dtype}{list(buffer.shape)} and row {first}")
    if x.dtype != jnp.float32 and (first % SUBLANES or rows % SUBLANES):
        raise ValueError(f"expected multiples of {SUBLANES} for rows in {x.dtype}; found {rows} rows at row {first}")
    return first
