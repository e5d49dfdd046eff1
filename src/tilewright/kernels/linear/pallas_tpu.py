"""Block-quantised matmul on a TPU: HBM holds the quantised values, which are dequantised in VMEM.

XLA fuses conversions into matmuls, but with block scales it writes the dequantised matrix to HBM.

Legend: R rows, I inputs, O outputs, N blocks of inputs, K inputs of a block, C columns of a tile.
"""

from math import lcm
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float

from tilewright.kernels.linear.scaled import ScaledMatrix, widened

COLUMNS = (512, 256, 128)
"""Choices of C, widest first."""
MOST_INPUTS = 2048
"""Limit of inputs per tile, unless the matrix cannot be split so."""
INT4_ROWS = 64
"""Rows of a register tile of 4-bit integers; wider types have fewer rows, which divide this number."""
SUBLANES = 8
VMEM_BYTES = 40 * 2**20
"""Limit of VMEM for the kernel; the smallest of v5e, v5p and v6e has 64 MiB per core."""


def tile_inputs(inputs: int, count: int) -> int:
    """Returns the inputs of a tile: whole blocks and whole register tiles; all inputs if nothing smaller divides them."""
    step = lcm(SUBLANES * (inputs // count), INT4_ROWS)
    fitting = [size for size in range(step, MOST_INPUTS + 1, step) if inputs % size == 0]
    return inputs if inputs <= MOST_INPUTS or not fitting else fitting[-1]


def vmem_bytes(rows: int, inputs: int, columns: int, itemsize: int) -> int:
    """Returns the VMEM bytes of the kernel: two buffers per block, and a tile's weights in float32 and in the dtype of x."""
    return 2 * (rows * inputs * itemsize + inputs * columns) + inputs * columns * (8 + itemsize) + 3 * rows * columns * 4


def columns_of(rows: int, inputs: int, itemsize: int) -> int | None:
    """Returns C; None if no tile fits VMEM."""
    return next((c for c in COLUMNS if vmem_bytes(rows, inputs, c, itemsize) <= VMEM_BYTES), None)


def refuses(x: Any, w: Any) -> str:
    """Returns the reason why the kernel does not support these operands; empty if it does."""
    if not isinstance(w, ScaledMatrix) or w.scales.shape[1] != w.shape[1]:
        return "needs a matrix in blocks of inputs, with scales per output"
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return "needs rows in float32 or bfloat16"
    if (w.shape[0] // w.scales.shape[0]) % SUBLANES:
        return f"needs blocks of a multiple of {SUBLANES} inputs"
    rows = x.size // x.shape[-1]
    inputs = tile_inputs(w.shape[0], w.scales.shape[0])
    if rows == 0 or columns_of(-(-rows // 16) * 16, inputs, x.dtype.itemsize) is None:
        return "needs rows and blocks that fit VMEM"
    return ""


def kernel(x_ref, values_ref, scales_ref, *rest):
    """Processes a tile: x [R, I], values [I, C], scales [N, C], optional minima [N, C], out [R, C], accumulator [R, C]."""
    *minima_ref, out_ref, sums_ref = rest
    (inputs, columns), blocks, part = values_ref.shape, scales_ref.shape[0], pl.program_id(1)

    @pl.when(part == 0)
    def _():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)

    values = values_ref[...]
    whole = values.astype(jnp.int32) if jnp.issubdtype(values.dtype, jnp.integer) else values
    wide = whole.astype(jnp.float32).reshape(blocks, inputs // blocks, columns) * widened(scales_ref[...])[:, None]
    for ref in minima_ref:
        wide = wide + widened(ref[...])[:, None]
    sums_ref[...] += jnp.dot(
        x_ref[...],
        wide.reshape(inputs, columns).astype(x_ref.dtype),
        precision=jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )

    @pl.when(part == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sums_ref[...].astype(out_ref.dtype)


def product(
    x: Float[Array, "*rows I"], w: ScaledMatrix, out_dtype: DTypeLike | None = None, interpret: bool = False
) -> Float[Array, "*rows O"]:
    """Computes `x @ w` with float32 sums and weights rounded to the dtype of `x`, for operands that `refuses` accepts.

    Args:
        interpret: run without a TPU, slowly.
    """
    (inputs, outputs), count = w.shape, w.scales.shape[0]
    rows = x.size // inputs
    size = tile_inputs(inputs, count)
    columns = min(columns_of(-(-rows // 16) * 16, size, x.dtype.itemsize) or COLUMNS[-1], -(-outputs // 128) * 128)
    held = [w.scales] if w.minima is None else [w.scales, w.minima]
    of_blocks = pl.BlockSpec((count * size // inputs, columns), lambda column, part: (part, column))
    moved = sum(one.size * one.dtype.itemsize for one in (x, *held)) + w.values.size + 4 * rows * outputs
    y: Any = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(outputs, columns), inputs // size),
        in_specs=[
            pl.BlockSpec((rows, size), lambda column, part: (0, part)),
            pl.BlockSpec((size, columns), lambda column, part: (part, column)),
            *(of_blocks for _ in held),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda column, part: (0, column)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), out_dtype or x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(2**24, vmem_bytes(-(-rows // 16) * 16, size, columns, x.dtype.itemsize) * 5 // 4),
        ),
        cost_estimate=pl.CostEstimate(flops=2 * rows * inputs * outputs, bytes_accessed=moved, transcendentals=0),
        interpret=interpret,
        name="block_product",
    )(x.reshape(rows, inputs), w.values, *held)
    return y.reshape(*x.shape[:-1], outputs)
