"""The linear layer: every implementation against NumPy in float64, and the CPU kernel's promise that rows are independent."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import linear_checks
from kernels.linear_checks import normal
from tilewright.kernels import native, select
from tilewright.kernels.linear import cpu, reference, scaled, xla
from tilewright.kernels.operations import Joined, Norm, Transposed

seeds = st.integers(0, 2**31 - 1)
needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
rows = st.integers(1, 70)
widths = st.tuples(st.integers(1, 200), st.integers(1, 150))  # inputs and outputs
SIZES = st.sampled_from([(1, 1), (64, 16), (33, 100), (7, 250), (130, 48)])
formats = pytest.mark.parametrize("kind", linear_checks.FORMATS)


def packed_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.jit(cpu.linear)(x, cpu.pack(w))


IMPLEMENTATIONS = [pytest.param(reference.linear, id="reference"), pytest.param(xla.linear, id="xla")]


def rounding(d_in: int, unit: float) -> float:
    """Bound on the error of a sum of `d_in` products of standard normal numbers: the root of their number, with a margin."""
    return 8 * unit * math.sqrt(d_in) + 4 * unit


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@given(seeds, st.sampled_from([1, 4, 16, 23]), SIZES)
def test_linear_float32(run, seed: int, rows: int, sizes: tuple[int, int]):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, sizes[0])
    w = normal(rng, *sizes)
    expected = x.astype(np.float64) @ w.astype(np.float64)
    actual = np.asarray(run(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(sizes[0], 2**-22))


@pytest.mark.parametrize("run", [*IMPLEMENTATIONS, pytest.param(packed_linear, id="cpu", marks=needs_native)])
@given(seeds, st.sampled_from([1, 16]), SIZES)
def test_linear_bfloat16(run, seed: int, rows: int, sizes: tuple[int, int]):
    """Inputs are bfloat16 numbers, so that only sums and the result's own rounding differ."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(normal(rng, rows, sizes[0]), jnp.bfloat16)
    w = jnp.asarray(normal(rng, *sizes), jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    actual = run(x, w)
    assert actual.dtype == jnp.bfloat16
    bound = rounding(sizes[0], 2**-20) + 2**-8 * np.abs(expected)
    assert (np.abs(np.asarray(actual, np.float64) - expected) <= bound).all()


def plain_gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return select.PLAIN.gated_linear(x, Joined((gate, up), gated=True))


@pytest.mark.parametrize("run", [plain_gated, reference.gated_linear])
@given(seeds, st.sampled_from([1, 16]), st.sampled_from([(64, 48), (33, 100)]))
def test_gated_linear(run, seed: int, rows: int, sizes: tuple[int, int]):
    rng = np.random.default_rng(seed)
    x, gate, up = (jnp.asarray(normal(rng, *shape)) for shape in ((rows, sizes[0]), sizes, sizes))
    gate = gate / 4
    wide = [np.asarray(a, np.float64) for a in (x, gate, up)]
    g = wide[0] @ wide[1]
    expected = g / (1 + np.exp(-g)) * (wide[0] @ wide[2])
    np.testing.assert_allclose(run(x, gate, up), expected, rtol=2e-5, atol=rounding(sizes[0], 2**-19))


@needs_native
@formats
@given(seeds, rows, widths)
def test_packed_products_are_within_the_bounds_of_their_format(kind: cpu.Format, seed: int, rows: int, sizes: tuple[int, int]):
    linear_checks.check_product(seed, rows, sizes, kind)


@needs_native
@formats
@settings(max_examples=10)
@given(seeds, rows, widths)
def test_packed_gated_products_are_within_the_bounds_of_their_format(
    kind: cpu.Format, seed: int, rows: int, sizes: tuple[int, int]
):
    linear_checks.check_gated(seed, rows, sizes, kind)


@needs_native
@formats
@settings(max_examples=12)
@given(seeds, rows, widths, st.sampled_from(["random", "ties", "negative", "zeros"]))
def test_the_largest_outputs_are_found_and_the_first_of_equal_ones_first(
    kind: cpu.Format, seed: int, rows: int, sizes: tuple[int, int], case: str
):
    linear_checks.check_largest(seed, rows, sizes, kind, case)


@needs_native
@formats
@pytest.mark.parametrize("sizes", [(1, 1), (95, 250), *linear_checks.SHAPES])
def test_a_row_gets_the_same_bits_whatever_the_number_of_rows(kind: cpu.Format, sizes: tuple[int, int]):
    linear_checks.check_rows(0, sizes, kind)


@needs_native
@formats
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_of_many_rows_give_the_bits_of_few(kind: cpu.Format, dtype: Any):
    """Thousands of rows run in blocks (float32 in other tiles), seven rows do not. Includes an added term."""
    rng = np.random.default_rng(0)
    count = 1540
    few = 7
    x, add = (jnp.asarray(normal(rng, count, width), dtype) for width in (40, 100))
    weights = [cpu.pack(jnp.asarray(normal(rng, 40, 100)), kind)]
    weights.append(cpu.pack_gated(jnp.asarray(normal(rng, 40, 100)), jnp.asarray(normal(rng, 40, 100)), kind))
    for w, adds in ((weights[0], True), (weights[0], False), (weights[1], False)):

        def run(x: jax.Array, add: jax.Array, w: cpu.PackedMatrix = w, adds: bool = adds) -> jax.Array:
            return cpu.linear(x, w, add=add if adds else None)

        by_few = jax.lax.map(lambda both: run(*both), (x.reshape(-1, few, 40), add.reshape(-1, few, 100)))
        np.testing.assert_array_equal(jax.jit(run)(x, add), by_few.reshape(count, -1))


@needs_native
@formats
def test_norm_addition_and_joined_matrices_in_one_call_give_the_bits_of_several(kind: cpu.Format):
    linear_checks.check_joined_calls(0, 5, (33, 1), kind, jnp.bfloat16)


@needs_native
@pytest.mark.parametrize("kind", linear_checks.FORMATS[:2])
@given(seeds, rows, widths)
def test_matmul_of_two_new_matrices_is_the_packed_product(kind: cpu.Format, seed: int, rows: int, sizes: tuple[int, int]):
    linear_checks.check_matmul(seed, rows, sizes, kind)


@needs_native
@pytest.mark.parametrize("case", ["infinity", "nan", "inputs"])
def test_argmax_of_what_is_no_number_stays_in_range(case: str):
    """Outputs that are all minus infinity tie; a row of NaN has no largest output."""
    w = np.full((8, 21), -np.inf if case == "infinity" else np.nan if case == "nan" else 1.0, np.float32)
    x = jnp.full((3, 8), np.nan if case == "inputs" else 1.0)
    index, value = jax.jit(cpu.head_argmax)(x, cpu.pack(jnp.asarray(w)))
    assert (np.asarray(index) == 0).all()
    assert np.isneginf(value).all()
    index, value = jax.jit(cpu.head_top_k, static_argnums=2)(x, cpu.pack(jnp.asarray(w)), 4)
    np.testing.assert_array_equal(index, [[0, 1, 2, 3]] * 3)
    assert np.isneginf(value).all()


@formats
@given(seeds, widths)
def test_unpacking_gives_the_rounded_matrix(kind: cpu.Format, seed: int, sizes: tuple[int, int]):
    w = normal(np.random.default_rng(seed), *sizes)
    found = np.asarray(cpu.unpack(cpu.pack(jnp.asarray(w), kind)), np.float64)
    _, expected = linear_checks.operands(np.ones((1, sizes[0]), np.float32), w, kind)
    np.testing.assert_array_equal(found[: sizes[0]], expected)
    assert (found[sizes[0] :] == 0).all()


def test_the_largest_weight_of_an_output_becomes_127():
    w = np.asarray([[0.5, 0.0, -4.0], [-2.0, 0.0, 1.0]], np.float32)
    units, scales = scaled.quantise_outputs(w)
    np.testing.assert_array_equal(units, [[32, 0, -127], [-127, 0, 32]])
    np.testing.assert_array_equal(scales, np.asarray([2.0, 0.0, 4.0], np.float32) / np.float32(127))


@pytest.mark.parametrize(
    ("w", "kind", "complaint"),
    [
        (jnp.ones(5), "float32", r"model.w: expected a matrix \[inputs, outputs\], found shape \(5,\)"),
        (jnp.ones((2, 3, 4)), "q8_0", r"model.w: expected a matrix .* found shape \(2, 3, 4\)"),
        (jnp.ones((0, 3)), "float32", r"model.w: expected a matrix .* found shape \(0, 3\)"),
        (None, "float32", "model.w: expected a matrix .* found shape None"),
        (jnp.ones((2, 3), jnp.int32), "q8_0", "model.w: expected float32 or bfloat16, found int32"),
        (jnp.ones((2, 3), jnp.float16), "bfloat16", "model.w: expected float32 or bfloat16, found float16"),
        (jnp.ones((2, 3)), "int4", "model.w: expected the format float32, bfloat16, q4_1, q8_0, found 'int4'"),
        (
            jnp.full((2, 3), jnp.nan),
            "q8_0",
            "model.w: expected weights below 32768 for block formats, found larger weights or NaN",
        ),
    ],
)
def test_a_weight_that_cannot_be_packed_is_refused_by_name(w: Any, kind: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        cpu.check(w, kind, "model.w")


def test_packing_refuses_by_name():
    with pytest.raises(ValueError, match=r"blocks\.0\.q: expected weights below 32768"):
        cpu.pack(jnp.full((2, 3), jnp.inf), "q8_0", "blocks.0.q")
    with pytest.raises(ValueError, match=r"blocks\.0\.gate: expected weights below 32768"):
        cpu.pack_gated(jnp.ones((2, 3)), jnp.full((2, 3), jnp.inf), "q8_0", "blocks.0.gate")
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv\[1\]: expected weights below 32768"):
        cpu.pack_joined([jnp.ones((2, 3)), jnp.full((2, 3), jnp.inf)], "q8_0", "blocks.0.qkv")
    with pytest.raises(ValueError, match=r"qkv: expected matrices with equal inputs, found \(2, 3\), \(4, 3\)"):
        cpu.pack_joined([jnp.ones((2, 3)), jnp.ones((4, 3))], name="qkv")


TRAINED = [cpu.TrainingPrecision(False), cpu.TrainingPrecision(True)]
KINDS: dict[bool, cpu.Format] = {False: "float32", True: "bfloat16"}


@needs_native
@pytest.mark.parametrize("precision", TRAINED, ids=["float32", "bfloat16"])
@given(
    seeds,
    st.sampled_from([(3,), (2, 5), (31,), (121,)]),
    st.sampled_from([(33, 47), (64, 16), (400, 20)]),
    st.booleans(),
    st.booleans(),
)
def test_gradients_of_a_trained_matrix_are_products_of_the_same_kind(
    precision: cpu.TrainingPrecision, seed: int, rows: tuple[int, ...], sizes: tuple[int, int], tied: bool, added: bool
):
    rng = np.random.default_rng(seed)
    x = normal(rng, *rows, sizes[0])
    w = normal(rng, *sizes)
    dy = normal(rng, *rows, sizes[1])
    add = normal(rng, *rows, sizes[1])

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array, add: jax.Array) -> Any:
        def multiplied(x: jax.Array, w: jax.Array, add: jax.Array) -> jax.Array:
            return cpu.trained_linear(precision, x, Transposed(w.T) if tied else w, add=add if added else None)

        y, backward = jax.vjp(multiplied, x, w, add)
        return y, *backward(dy)

    y, dx, dw, dadd = run(x, w, dy, add)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)
    flat_x = x.reshape(-1, sizes[0])
    flat_dy = dy.reshape(-1, sizes[1])
    flat_add = add.reshape(-1, sizes[1])
    expected, bound = linear_checks.product(flat_x, w, KINDS[precision.bfloat16])
    if added:
        bound += 2.0**-22 * (np.abs(expected) + np.abs(flat_add))
        expected += flat_add
    linear_checks.within(y.reshape(flat_dy.shape), expected, bound)
    linear_checks.within(dx.reshape(flat_x.shape), *linear_checks.product(flat_dy, w.T, KINDS[precision.bfloat16]))
    linear_checks.within(dw, *linear_checks.product(flat_x.T, flat_dy, KINDS[precision.bfloat16]))
    np.testing.assert_array_equal(dadd, dy if added else np.zeros_like(dy))


@needs_native
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(seeds, st.sampled_from([(1, 1), (7, 40), (100, 33)]), st.sampled_from([5, 16, 90]), st.sampled_from(range(4)))
def test_products_of_either_type_lie_either_way(dtype: Any, seed: int, sizes: tuple[int, int], columns: int, way: int):
    """Sums use the unrounded operands and are rounded once to the result's type."""
    rng = np.random.default_rng(seed)
    a, b = (jnp.asarray(normal(rng, *shape), dtype) for shape in (sizes, (sizes[1], columns)))
    wide_a, wide_b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    expected, bound = linear_checks.product(wide_a, wide_b, "float32")
    turned = {"a_transposed": way % 2 == 1, "b_transposed": way >= 2}
    run = jax.jit(partial(cpu.matmul, out_dtype=dtype, **turned))
    found = run(a.T if turned["a_transposed"] else a, b.T if turned["b_transposed"] else b)
    assert found.dtype == dtype
    rounding = 0 if dtype == jnp.float32 else linear_checks.UNIT["bfloat16"] * (np.abs(expected) + bound)
    linear_checks.within(found.astype(jnp.float32), expected, bound + rounding)


@needs_native
@pytest.mark.parametrize("precision", TRAINED, ids=["float32", "bfloat16"])
@given(seeds, st.sampled_from([1, 50, 200]), st.sampled_from([7, 420]), st.sampled_from([(32, 96), (224, 32, 192), (64,)]))
def test_joined_matrices_give_the_bits_of_concatenated_ones(
    precision: cpu.TrainingPrecision, seed: int, rows: int, inputs: int, sizes: tuple[int, ...]
):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, inputs)
    parts = tuple(normal(rng, inputs, size) for size in sizes)
    dy = jnp.asarray(normal(rng, rows, sum(sizes)), precision.dtype)

    @jax.jit
    def both(x: jax.Array, parts: tuple[jax.Array, ...], dy: jax.Array) -> Any:
        found: list[Any] = [
            jax.vjp(lambda x, parts: cpu.trained_joined(precision, x, parts), x, parts),
            jax.vjp(lambda x, parts: cpu.trained_linear(precision, x, jnp.concatenate(parts, 1), precision.dtype), x, parts),
        ]
        return [(y, back(dy)) for y, back in found]

    joined, concatenated = both(x, parts, dy)
    for actual, expected in zip(jax.tree.leaves(joined), jax.tree.leaves(concatenated), strict=True):
        np.testing.assert_array_equal(actual, expected)


@needs_native
def test_parts_that_a_kernel_cannot_read_are_concatenated():
    narrow = (jnp.ones((4, 32)), jnp.ones((4, 40)))
    assert [part.shape for part in cpu.divisible(narrow)] == [(4, 72)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiples of 32"):
        cpu.matmul(jnp.ones((2, 4)), narrow)
    with pytest.raises(jax.errors.JaxRuntimeError, match="differ in type or rows"):
        cpu.matmul(jnp.ones((2, 4)), (jnp.ones((4, 32)), jnp.ones((5, 32))))
    with pytest.raises(jax.errors.JaxRuntimeError, match="multiples of 32"):
        cpu.weight_gradients(jnp.ones((2, 4)), jnp.ones((2, 72)), (32, 40), jnp.float32, False)


@needs_native
@pytest.mark.parametrize("precision", TRAINED, ids=["float32", "bfloat16"])
@given(seeds, st.sampled_from([1, 9, 40]), st.sampled_from([(33, 5), (16, 48), (40, 64)]))
def test_a_trained_gate_has_the_gradient_of_the_plain_one(
    precision: cpu.TrainingPrecision, seed: int, rows: int, sizes: tuple[int, int]
):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, sizes[0])
    gate = normal(rng, *sizes)
    up = normal(rng, *sizes)
    dy = normal(rng, rows, sizes[1])
    w = np.concatenate([gate, up], axis=1) / sizes[0] ** 0.5

    @jax.jit
    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        found: Any = jax.vjp(lambda x, w: cpu.trained_gated(precision, x, cpu.divisible(jnp.split(w, 2, axis=1))), x, w)
        y, back = found
        z, plain = jax.vjp(lambda x, w: reference.gated_linear(x, *jnp.split(w, 2, axis=1)), x, w)
        return (y, *back(dy.astype(y.dtype))), (z, *plain(dy))

    unit = 2.0**-20 if not precision.bfloat16 else 2.0**-6
    for one, other in zip(*both(x, w, dy), strict=True):
        scale = float(jnp.abs(other).max()) + 1
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=8 * unit * scale, rtol=unit)


@needs_native
def test_gates_far_from_zero_saturate():
    """exp is clamped inside the kernel: silu must still be 0 on the far left and the identity on the far right."""
    x = jnp.asarray([[-1e4], [1e4], [0.0]], jnp.float32)
    one = jnp.ones((1, 1), jnp.float32)
    actual = np.asarray(jax.jit(cpu.linear)(x, cpu.pack_gated(one, one)))[:, 0]
    np.testing.assert_allclose(actual, [0.0, 1e8, 0.0], atol=1e-25, rtol=1e-6)


def test_float32_products_ask_for_full_precision():
    """TPU and GPU would round the inputs otherwise; bfloat16 leaves the choice to the chip."""
    x = jnp.ones((2, 4))
    bf16 = jnp.ones((2, 4), jnp.bfloat16)
    assert "HIGHEST" in str(jax.make_jaxpr(xla.linear)(x, x.T))
    assert "HIGHEST" not in str(jax.make_jaxpr(xla.linear)(bf16, bf16.T))


@needs_native
def test_the_bundle_decides_which_kernel_is_in_the_program():
    x = jnp.ones((2, 32))
    w = jnp.ones((32, 16))
    for ops, runs in ((select.operations("cpu"), True), (select.operations("cpu", kernels="xla"), False)):
        program = jax.jit(ops.linear).lower(x, ops.prepare_matrix(w, "w")).as_text()
        assert ("tilewright_linear" in program) is runs


def broken(w: cpu.PackedMatrix) -> dict[str, tuple[cpu.PackedMatrix, str]]:
    """Weights of 32 inputs and 20 outputs with one thing wrong each, and the complaint."""
    return {
        "outputs": (replace(w, outputs=33), "do not fit"),
        "panels": (replace(w, panels=w.panels[:1]), "do not fit"),
        "lanes": (replace(w, panels=w.panels[:, :, :8]), "no packed weights" if w.in_blocks else "do not fit"),
        "type": (replace(w, panels=w.panels.astype(jnp.float16)), "no packed weights"),
        "rank": (replace(w, panels=w.panels.reshape(-1)), "no packed weights"),
    }


@needs_native
@pytest.mark.parametrize("run", [cpu.linear, cpu.head_argmax, partial(cpu.head_top_k, k=2)])
@pytest.mark.parametrize("case", ["inputs", "outputs", "panels", "lanes", "type", "rank"])
@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_weights_that_do_not_fit_are_refused(run, case: str, kind: cpu.Format):
    w = cpu.pack(jnp.ones((32, 20)), kind)
    wrong, complaint = broken(w)[case] if case != "inputs" else (w, "do not fit")
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        jax.block_until_ready(jax.jit(run)(jnp.ones((2, 70 if case == "inputs" else 32)), wrong))


@needs_native
@pytest.mark.parametrize(
    ("operands", "complaint"),
    [
        ({"norm": Norm(jnp.ones(32, jnp.bfloat16), 1e-5)}, "input and norm in one type"),
        ({"add": jnp.ones((2, 20), jnp.bfloat16)}, "like it"),
        ({"out_dtype": jnp.float16}, "an output in float32 or bfloat16"),
    ],
)
def test_operands_that_do_not_fit_are_refused(operands: dict[str, Any], complaint: str):
    out_dtype = operands.pop("out_dtype", None)
    run = jax.jit(lambda x, w: cpu.linear(x, w, out_dtype, **operands))
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=complaint):  # the latter from a program that ran at once
        jax.block_until_ready(run(jnp.ones((2, 32)), cpu.pack(jnp.ones((32, 20)))))


@needs_native
@pytest.mark.parametrize("shapes", [((2, 5), (6, 3)), ((2, 5), (5,))])
def test_matrices_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    call = jax.ffi.ffi_call("tilewright_matmul", jax.ShapeDtypeStruct((2, 3), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"expected matrices|shapes do not fit"):
        run = jax.jit(lambda a, b: call(a, b, jnp.zeros(0), a_transposed=False, b_transposed=False, bfloat16=False))
        jax.block_until_ready(run(*(jnp.ones(shape) for shape in shapes)))
