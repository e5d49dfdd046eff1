"""Products with weights in few bits, by XLA and by the TPU's kernel, against NumPy in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.linear import blocks, pallas_tpu, scaled, xla
from tilewright.kernels.linear.blocks import BLOCK, FORMS, BlockFormat
from tilewright.kernels.linear.scaled import FP8, ScaledMatrix
from tilewright.kernels.operations import Joined, Transposed
from tilewright.kernels.select import operations

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.product,
    "tpu xla": xla.tpu_product,
    "pallas": partial(pallas_tpu.product, interpret=True),
}
INPUTS = 320
OUTPUTS = 136


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def fp8_blocks(w: np.ndarray) -> ScaledMatrix:
    """FP8 as a file has it in blocks: 64 inputs share a scale, which outputs have for themselves."""
    scales = np.abs(w).reshape(-1, 64, w.shape[1]).max(axis=1) / 448
    return ScaledMatrix((w / np.repeat(scales, 64, axis=0)).astype(FP8), scales)


def few_bits(form: str, w: np.ndarray) -> ScaledMatrix:
    if form == "fp8 in blocks":
        return scaled.prepared(fp8_blocks(w), "fp8", "w")
    if form == "q8_0":  # a file's blocks, whose bits stay
        return scaled.prepared(blocks.quantise(w, "q8_0"), "int4", "w")
    return scaled.prepared(jnp.asarray(w), form, "w")  # type: ignore[arg-type]


FORMS_MADE = ("int8", "fp8", "int4", "q8_0", "fp8 in blocks")


def exact(w: ScaledMatrix) -> np.ndarray:
    """The matrix in float64, by another way than `dequantised`."""
    values = np.asarray(w.values, np.float32).astype(np.float64)

    def spread(numbers: Any) -> np.ndarray:
        held = np.asarray(numbers)
        wide = held.view(np.float16) if held.dtype == np.uint16 else held
        return np.repeat(wide.astype(np.float64), len(values) // len(wide), axis=0)

    return values * spread(w.scales) + (0 if w.minima is None else spread(w.minima))


@pytest.mark.parametrize("form", FORMS_MADE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_is_that_of_the_weights(implementation: str, form: str, rows: int):
    w = few_bits(form, drawn(INPUTS, OUTPUTS))
    x = jnp.asarray(drawn(rows, INPUTS, seed=1))
    if implementation == "pallas" and pallas_tpu.refuses(x, w):
        assert (form in ("int8", "fp8") and not w.in_blocks) or len(w) % len(w.scales) == 0
    want = np.asarray(x, np.float64) @ exact(w)
    found = jax.jit(IMPLEMENTATIONS[implementation])(x, w)
    np.testing.assert_allclose(found, want, rtol=0, atol=INPUTS * 2**-22 * np.abs(exact(w)).max() * 4)
    low = jax.jit(partial(IMPLEMENTATIONS[implementation], out_dtype=jnp.float32))(x.astype(jnp.bfloat16), w)
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_inputs_of_several_tiles_add_up():
    w = few_bits("int4", drawn(4096, 130))
    x = jnp.asarray(drawn(3, 4096, seed=1))
    assert pallas_tpu.tile_inputs(4096, 128) == 2048
    want = np.asarray(x, np.float64) @ exact(w)
    np.testing.assert_allclose(pallas_tpu.product(x, w, interpret=True), want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_z"])
def test_a_files_blocks_keep_their_weights(kind: BlockFormat):
    """For every format, the matrix and a part of it equal `blocks.dequantise` bit for bit."""
    form = FORMS[kind]
    rng = np.random.default_rng(3)
    count = 16
    outputs = 24
    sizes = {"scales": form.scales, "minima": form.minima, "steps": form.steps, "lows": form.lows}
    dtypes = {"scales": np.float16, "minima": np.float16, "steps": np.int8, "lows": np.int8}
    arrays = {
        name: rng.integers(1, 9, (outputs, count // form.group * each)).astype(dtypes[name])
        for name, each in sizes.items()
        if each
    }
    units = rng.integers(0, 1 << form.bits, (outputs, count, BLOCK)).astype(np.uint8)
    held = blocks.QuantisedMatrix(kind, blocks.joined_bits(units, form.bits), **arrays)
    made = scaled.prepared(held, "int4", "w")
    assert made.values.dtype == {True: jnp.int4, False: jnp.uint4}[form.offset > 0] if form.bits == 4 else jnp.int8
    np.testing.assert_array_equal(made.dequantised(jnp.float32), blocks.dequantise(held))
    inputs = slice(8 * BLOCK, 16 * BLOCK)
    some = slice(3, 11)
    part = held.part((inputs, some))
    assert part is not None
    np.testing.assert_array_equal(blocks.dequantise(part), blocks.dequantise(held)[inputs, some])
    assert held.part((slice(0, 40), some)) is None
    # No more than is said before a file is read.
    bytes_held = sum(leaf.nbytes // (2 if form.bits == 4 and leaf is made.values else 1) for leaf in jax.tree.leaves(made))
    assert bytes_held <= scaled.bytes_of(count * BLOCK, outputs, kind)


def test_blocks_are_as_wide_as_scales_allow():
    """Groups of 128 are stored in blocks of 32; one scale per output gives a single block."""
    units = np.random.default_rng(0).integers(0, 16, (8, 16, BLOCK)).astype(np.uint8)
    integers = blocks.joined_bits(units, 4)
    groups = np.random.default_rng(1).integers(1, 99, (8, 4)).astype(np.float16)
    spread = scaled.of_blocks(blocks.QuantisedMatrix("q4_0", integers, np.repeat(groups, 4, axis=1)))
    assert spread.scales.shape == (4, 8)
    assert not scaled.of_blocks(blocks.QuantisedMatrix("q4_0", integers, np.repeat(groups[:, :1], 16, axis=1))).in_blocks


@pytest.mark.parametrize("numbers, dtype", [([1.5, -2.0, 0.0], np.uint16), ([1e-6, 1.0], np.float32), ([0.1], np.float32)])
def test_scales_are_exact_in_either_precision(numbers: list[float], dtype: Any):
    held = scaled.narrowed(np.asarray(numbers, np.float32))
    assert held.dtype == dtype
    np.testing.assert_array_equal(scaled.widened(held), np.asarray(numbers, np.float32))


@pytest.mark.parametrize("weights, error", [("int8", 0.02), ("fp8", 0.25), ("int4", 0.4)])
def test_a_bundles_weights(weights: Any, error: float):
    """Heads and embeddings have 8 bits, and are read quantised; a tied one is one table."""
    ops = operations("gpu", weights)
    w = drawn(64, 96)
    for spec in (ops.prepare_matrix(jnp.asarray(w), "w"), *ops.prepare_joined(Joined((jnp.asarray(w),)), "w").parts):
        assert isinstance(spec, ScaledMatrix)
        assert float(jnp.max(jnp.abs(ops.restore(spec) - w))) < error
    table = ops.prepare_table(jnp.asarray(w, jnp.bfloat16), "embed")
    rows = ops.gather_rows(table, jnp.asarray([[3, 5]]))
    assert (table.values.dtype, table.values.shape, rows.dtype, rows.shape) == (jnp.int8, (64, 128), jnp.bfloat16, (1, 2, 96))
    np.testing.assert_allclose(rows[0].astype(jnp.float32), w[jnp.asarray([3, 5])], atol=0.03)
    x = jnp.asarray(drawn(2, 96, seed=2))
    index, _ = ops.head_argmax(x, Transposed(table))
    np.testing.assert_array_equal(index, jnp.argmax(x @ ops.restore(Transposed(table))[:96], axis=-1))
    np.testing.assert_array_equal(ops.head_top_k(x, Transposed(table), 1)[0][:, 0], index)


def test_cuts():
    """Tests parts of whole blocks, parts within a block, and parts across a border of blocks."""
    w = few_bits("int4", drawn(128, 32))
    wide = np.asarray(w.dequantised(jnp.float32))
    for count in (2, 4, 8):
        parts = [np.asarray(w.cut(n, count, 0).dequantised(jnp.float32)) for n in range(count)]
        np.testing.assert_array_equal(np.concatenate(parts), wide)
    with pytest.raises(ValueError, match="expected a matrix whose dim"):
        w.cut(0, 3, 0)
    held = jax.tree.map(np.asarray, w)
    assert held.part((slice(16, 48), slice(0, 32))) is None
    assert held.part((slice(16, 24), slice(0, 32))) is not None


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_what_few_bits_cannot_hold_is_named(weights: Any):
    ops = operations("gpu", weights)
    with pytest.raises(ValueError, match=r"^layer 3: expected finite weights"):
        ops.prepare_matrix(jnp.full((32, 4), jnp.inf), "layer 3")
    with pytest.raises(ValueError, match=r"^w: expected a matrix \[inputs, outputs\], found shape"):
        ops.prepare_matrix(jnp.ones(4), "w")
