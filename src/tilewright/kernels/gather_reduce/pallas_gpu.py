"""The operation on a GPU, through Pallas and Triton: pointers from indices, the sum in registers, only the result written.

A program takes a block of rows and of columns. It runs as many rounds as its longest row has slots; what is padding is masked,
and a masked pointer is not followed.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, F features, T rows and C columns of a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int32

from tilewright.kernels.gather_reduce.reference import Reduce

COLUMNS = 256
"""C, at most."""
ELEMENTS = 2048
"""T times C: 16 numbers to a thread of four warps."""
COMBINE = {"sum": jnp.add, "mean": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def refuses(
    x: Array | jax.ShapeDtypeStruct, sources: Array | jax.ShapeDtypeStruct, weights: Array | jax.ShapeDtypeStruct | None
) -> str:
    """The reason why the kernel does not take these; empty if it does. It indexes memory by 32 bits."""
    full = 0 < x.size < 2**31 and 0 < sources.size < 2**31 and x.dtype in (jnp.float32, jnp.bfloat16)
    if full and (weights is None or weights.ndim == 2):
        return ""
    return "it takes up to 2^31 elements, and a weight for each slot"


def kernel(x_ref, sources_ref, degrees_ref, *rest, rows: int, columns: int, reduce: Reduce):
    """One block: all references are to whole arrays in memory; the last one is the result."""
    *weights_ref, out_ref = rest
    total_rows, features = out_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    column = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    inside = (row < total_rows)[:, None] & (column < features)[None, :]
    degrees = triton.load(degrees_ref.at[row], mask=row < total_rows, other=0)

    def add(slot: Array, total: Array) -> Array:
        live = slot < degrees
        source = triton.load(sources_ref.at[row, slot], mask=live, other=0)
        counts = inside & live[:, None]
        message = triton.load(x_ref.at[source[:, None], column[None, :]], mask=counts, other=0.0).astype(jnp.float32)
        if weights_ref:
            message = message * triton.load(weights_ref[0].at[row, slot], mask=live, other=0.0)[:, None]
        return jnp.where(counts, COMBINE[reduce](total, message), total)

    start = jnp.full((rows, columns), {"max": -jnp.inf, "min": jnp.inf}.get(reduce, 0.0), jnp.float32)
    total = jax.lax.fori_loop(0, jnp.max(degrees), add, start)
    if reduce == "mean":
        total = total / jnp.maximum(degrees, 1).astype(jnp.float32)[:, None]
    total = jnp.where(degrees[:, None] > 0, total, 0.0)
    triton.store(out_ref.at[row[:, None], column[None, :]], total.astype(out_ref.dtype), mask=inside)


def gather_reduce(
    x: Float[Array, "M F"],
    sources: Int32[Array, "R K"],
    degrees: Int32[Array, " R"],
    weights: Float[Array, "R K"] | None = None,
    reduce: Reduce = "sum",
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Reduces for each row the features of its first `degrees` sources, times their weights, in float32, unless it `refuses`.

    Args:
        interpret: runs without a GPU, slowly.
    """
    rows, features = sources.shape[0], x.shape[1]
    columns = min(pl.next_power_of_2(features), COLUMNS)
    block = min(pl.next_power_of_2(rows), ELEMENTS // columns)
    inputs = (x, sources, degrees, *(() if weights is None else (weights,)))
    return pl.pallas_call(
        partial(kernel, rows=block, columns=columns, reduce=reduce),
        grid=(pl.cdiv(rows, block), pl.cdiv(features, columns)),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(inputs),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((rows, features), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="gather_reduce",
    )(*inputs)
