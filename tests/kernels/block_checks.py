"""Checks of block-quantised matmuls for every instruction set; see `linear_checks.py`."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.linear import blocks, cpu
from tilewright.kernels.linear.blocks import BLOCK, BlockFormat, QuantisedMatrix

FORMATS: tuple[BlockFormat, ...] = get_args(BlockFormat)
ROWS = 40


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def drawn(rng: np.random.Generator, count: int, outputs: int, kind: BlockFormat) -> QuantisedMatrix:
    """Blocks of any bits: scales and minima of either sign, some of them subnormal or zero."""
    form = blocks.FORMS[kind]
    groups = -(-count // form.group)

    def halves(each: int) -> np.ndarray:
        shape = (outputs, groups if each == 1 else count)
        return (normal(rng, *shape) * rng.choice(np.asarray([1, 1e-3, 1e-6, 0], np.float32), shape)).astype(np.float16)

    def bytes_(each: int) -> np.ndarray:
        return rng.integers(-128, 128, (outputs, count * each // form.group), np.int8)

    names = {"scales": halves, "minima": halves, "steps": bytes_, "lows": bytes_}
    heads = {name: draw(getattr(form, name)) for name, draw in names.items() if getattr(form, name)}
    return QuantisedMatrix(kind, rng.integers(0, 256, (outputs, count, 4 * form.bits), np.uint8), **heads)


def rounded(x: np.ndarray, kind: BlockFormat) -> np.ndarray:
    """Rows as the kernel multiplies them, in float64: of each block integers from -127 to 127 times a float32 scale.

    Beside weights of 8 bits, a block whose largest number is beyond 3 times the row's root mean square has 256ths as well.
    """
    parts = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    largest = np.max(np.abs(parts), axis=2, keepdims=True)
    exact = parts * np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    units = np.rint(exact)
    if kind == "q8_0":
        more = np.clip(np.rint((exact - units) * 256), -127, 127) / 256
        units += np.where(largest > 3 * np.sqrt(np.mean(np.square(x), axis=1))[:, None, None], more, 0)
    return (units.astype(np.float64) * (largest / np.float32(127))).reshape(len(x), -1)[:, : x.shape[1]]


def bounded(x: np.ndarray, w: QuantisedMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float64 product of the quantised operands, and a bound on the float32 error.

    The products of a block are exact, or of each half that has a scale. They take two roundings of scales and one of each sum;
    those of 16-bit inputs one more, which makes them float32.
    """
    inputs = x.shape[1]  # of which the last block may have less than 32
    a = rounded(x, w.kind)
    b = blocks.dequantise(w)[:inputs].astype(np.float64)
    found = w.weight_minima()
    parts = w.weight_scales().shape[1] // w.count
    minima = 0.0 if found is None else np.abs(found.astype(np.float64)).T.repeat(BLOCK, axis=0)[:inputs]
    size = np.abs(a) @ (np.abs(b) + 2 * minima)  # an integer times its scale is within |b| and the minimum
    return a @ b, 2.0**-24 * ((1 + parts) * w.count + 5) * size


def check_outlier(rows: int) -> None:
    """Products with other inputs stay accurate beside one input a hundred times as large."""
    rng = np.random.default_rng(rows)
    x = normal(rng, rows, 576)
    w = normal(rng, 576, 40)
    x[:, 7] *= 100 / np.abs(x[:, 7])
    found = cpu.pack(w, "q8_0")
    held = np.asarray(cpu.unpack(found), np.float64)
    found = np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), found), np.float64)
    wanted = x.astype(np.float64) @ held
    others = np.delete(x, 7, axis=1).astype(np.float64) @ np.delete(held, 7, axis=0)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(others)


def check_product(seed: int, rows: int, shape: tuple[int, int], kind: BlockFormat) -> None:
    """Products of the quantised numbers; `shape` blocks and outputs."""
    rng = np.random.default_rng(seed)
    w = drawn(rng, *shape, kind)
    x = normal(rng, rows, shape[0] * BLOCK)
    expected, bound = bounded(x, w)
    excess = np.abs(np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(w)), np.float64) - expected) - bound
    assert (excess <= 1e-37).all(), f"{excess.max()} beyond the bound"


def check_rows(kind: BlockFormat, dtype: Any) -> None:
    """Checks that a row gets the same bits and index alone and as the last of up to 40, plain and gated."""
    rng = np.random.default_rng(1)
    first, second = (drawn(rng, 3, 77, kind) for _ in range(2))
    x = normal(rng, ROWS, 3 * BLOCK).astype(dtype)  # in NumPy, whose slices are no programs
    plain = cpu.pack(first)
    gated = cpu.pack_gated(first, second)

    @jax.jit
    def run(parts: list[jax.Array], plain: cpu.PackedMatrix, gated: cpu.PackedMatrix) -> list[tuple[jax.Array, ...]]:
        return [(cpu.linear(x, plain), cpu.linear(x, gated), *cpu.head_argmax(x, plain)) for x in parts]

    *found, whole = run([*(x[-n:] for n in range(1, ROWS)), x], plain, gated)
    for n, results in enumerate(found, 1):
        for one, every in zip(results, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(every)[-n:], err_msg=f"{n} rows")


def check_largest(kind: BlockFormat) -> None:
    """Checks that the largest outputs and their indices equal those of all outputs, bit for bit."""
    rng = np.random.default_rng(2)
    w = cpu.pack(drawn(rng, 2, 300, kind))
    x = jnp.asarray(normal(rng, 9, 2 * BLOCK))

    @jax.jit
    def run(x: jax.Array, w: cpu.PackedMatrix) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return cpu.linear(x, w), cpu.head_argmax(x, w), cpu.head_top_k(x, w, 16)

    outputs, (index, value), (places, values) = run(x, w)
    order = np.argsort(-np.asarray(outputs), axis=1, kind="stable")[:, :16]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(outputs), order, axis=1))
    np.testing.assert_array_equal((index, value), (np.asarray(places)[:, 0], np.asarray(values)[:, 0]))


def check_all() -> None:
    for kind in FORMATS:
        for rows, shape in ((1, (1, 20)), (7, (4, 33)), (40, (3, 50))):
            check_product(rows, rows, shape, kind)
        for dtype in (jnp.float32, jnp.bfloat16):
            check_rows(kind, dtype)
        check_largest(kind)
    for rows in (1, 7, 17):
        check_outlier(rows)
