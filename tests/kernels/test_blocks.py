"""Weights in blocks of 4 and 8 bits: a file's bits are kept, and matmuls use the quantised numbers."""

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import block_checks
from kernels.block_checks import drawn
from kernels.linear_checks import normal
from tilewright.kernels import native, select
from tilewright.kernels.gather_rows import cpu as gather
from tilewright.kernels.linear import blocks, cpu
from tilewright.kernels.linear.blocks import BLOCK, BlockFormat, QuantisedMatrix
from tilewright.kernels.operations import Joined, Weights
from tilewright.models.gguf_blocks import read_blocks


def some(w: QuantisedMatrix, outputs: np.ndarray) -> QuantisedMatrix:
    """Some of a matrix's outputs."""
    return QuantisedMatrix(w.kind, **{name: array[outputs] for name, array in w.arrays.items()})


needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
formats = pytest.mark.parametrize("kind", block_checks.FORMATS)
seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 100))  # blocks and outputs


def bits_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@formats
@given(seeds, sizes)
def test_packing_keeps_every_bit(kind: BlockFormat, seed: int, shape: tuple[int, int]):
    found = drawn(np.random.default_rng(seed), *shape, kind)
    packed = cpu.pack(found)
    assert packed.panels.shape[2] == blocks.FORMS[kind].group_bytes
    assert packed.shape == (-(-shape[0] // found.form.group) * found.form.group * BLOCK, shape[1])
    np.testing.assert_array_equal(np.asarray(cpu.unpack(packed))[: shape[0] * BLOCK], blocks.dequantise(found))
    again = blocks.blocks_of(np.asarray(packed.panels), shape[1])
    assert again.arrays.keys() == found.arrays.keys()
    for name, kept in again.arrays.items():
        given_bits = found.arrays[name]
        np.testing.assert_array_equal(bits_of(kept[:, : given_bits.shape[1]]), bits_of(given_bits), err_msg=name)


@formats
def test_panels_written_in_parts_are_those_written_at_once(kind: BlockFormat, monkeypatch: pytest.MonkeyPatch):
    found = drawn(np.random.default_rng(0), 9, 70, kind)
    monkeypatch.setattr(blocks, "CACHED", 1 << 30)
    whole = blocks.panels_of(found)
    monkeypatch.setattr(blocks, "CACHED", 2 * whole[0].size)  # two panels at a time, and one
    np.testing.assert_array_equal(blocks.panels_of(found), whole)


@given(seeds, st.sampled_from([4, 5, 6, 8]))
def test_integers_side_by_side_are_found_again(seed: int, bits: int):
    """Checks the layout: four bits of two inputs per byte, and the higher bits of four inputs in four bytes."""
    units = np.random.default_rng(seed).integers(0, 1 << bits, (3, 32), np.uint8)
    found = blocks.joined_bits(units, bits)
    assert found.shape == (3, 4 * bits)
    np.testing.assert_array_equal(blocks.units_of(found, bits), units)
    for i in range(32 if bits < 8 else 0):
        low = found[:, i % 16] >> (4 if i >= 16 else 0) & 15
        at = (bits - 4) * (i // 4)
        above = found[:, 16 + at // 8 * 4 + i % 4] >> at % 8 & ((1 << (bits - 4)) - 1) if bits > 4 else 0
        np.testing.assert_array_equal(low | above << 4, units[:, i])


@needs_native
@formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(seeds, sizes)
def test_rows_of_a_table_are_those_of_the_dequantised_matrix(kind: BlockFormat, dtype: str, seed: int, shape: tuple[int, int]):
    rng = np.random.default_rng(seed)
    w = drawn(rng, *shape, kind)
    table = blocks.PackedTable(cpu.pack(w).panels, shape[1], shape[0] * BLOCK - 3, dtype)
    index = rng.integers(0, shape[1], (2, 7))
    index[1, 2:] = index[1, 2]  # as the mask tokens of a block
    found = gather.gather_rows(table, jnp.asarray(index, jnp.int32))
    wanted = np.asarray(blocks.dequantise(w).T[index, : table.width]).astype(jnp.dtype(dtype))
    assert (found.shape, found.dtype.name) == ((2, 7, table.width), dtype)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.astype(np.float32))


@needs_native
@formats
@settings(max_examples=15)
@given(seeds, st.integers(1, 40), sizes)
def test_products_are_those_of_the_quantised_numbers(kind: BlockFormat, seed: int, rows: int, shape: tuple[int, int]):
    block_checks.check_product(seed, rows, shape, kind)


@needs_native
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_products_are_near_those_of_inputs_that_are_not_rounded(kind: BlockFormat):
    rng = np.random.default_rng(0)
    w = read_blocks(gguf.quants.quantize(normal(rng, 200, 576), Kind[kind.upper()]), kind.upper())
    assert w is not None
    x = normal(rng, 16, 576)
    found = np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(w)))
    wanted = x @ blocks.dequantise(w)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@needs_native
@pytest.mark.parametrize("rows", [1, 7, 17])
def test_an_outlier_leaves_the_products_of_other_inputs_accurate(rows: int):
    block_checks.check_outlier(rows)


@needs_native
@formats
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_gets_the_same_bits_alone_and_among_up_to_forty(kind: BlockFormat, dtype: Any):
    block_checks.check_rows(kind, dtype)


@needs_native
@formats
def test_the_largest_outputs_are_those_of_all_outputs(kind: BlockFormat):
    block_checks.check_largest(kind)


@needs_native
@formats
def test_outputs_are_the_same_permuted_joined_and_gated(kind: BlockFormat):
    """Permuted outputs keep their order, and concatenated matrices keep their own outputs."""
    rng = np.random.default_rng(2)
    first = drawn(rng, 4, 48, kind)
    second = drawn(rng, 4, 50, kind)
    x = jnp.asarray(normal(rng, 5, 4 * BLOCK))
    order = rng.permutation(48)
    each = [np.asarray(cpu.linear(x, cpu.pack(w))) for w in (first, second)]
    turned = np.asarray(cpu.linear(x, cpu.pack(some(first, order))))
    np.testing.assert_array_equal(turned, each[0][:, order])
    joined = cpu.pack_joined([first, second])
    assert joined.parts == (48, 50)
    np.testing.assert_array_equal(cpu.linear(x, joined), np.concatenate(each, axis=1))
    np.testing.assert_array_equal(cpu.linear(x, joined, parts=(1, 2)), each[1])
    one = some(second, np.arange(48))
    gate = each[0].astype(np.float64)
    up = np.asarray(cpu.linear(x, cpu.pack(one)), np.float64)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(cpu.linear(x, cpu.pack_gated(first, one)), wanted, rtol=1e-5, atol=1e-20)


@formats
def test_matrices_of_one_product_are_brought_to_one_format_exactly(kind: BlockFormat):
    rng = np.random.default_rng(3)
    w = drawn(rng, 8, 16, kind)
    for other in block_checks.FORMATS:
        made = blocks.of_one_kind([w, drawn(rng, 8, 16, other)])
        if made is None:
            assert not {kind, *blocks.WIDER.get(kind, ())} & {other, *blocks.WIDER.get(other, ())}
            continue
        assert made[0].kind == made[1].kind
        np.testing.assert_array_equal(blocks.dequantise(made[0]), blocks.dequantise(w))


@needs_native
def test_matrices_of_formats_that_have_none_in_common_are_products_of_their_own():
    rng = np.random.default_rng(4)
    first = drawn(rng, 8, 48, "q4_k")
    second = drawn(rng, 8, 48, "q6_k")
    x = jnp.asarray(normal(rng, 5, 8 * BLOCK))
    ops = select.operations("cpu", "int4")
    each = [np.asarray(cpu.linear(x, cpu.pack(w))) for w in (first, second, first)]
    joined = ops.prepare_joined(Joined((first, second, first)), "w")
    for changes in ({}, {"first": 1}, {"first": 1, "last": 2}):
        found = ops.project(x, joined, **changes)
        wanted = each[changes.get("first", 0) : changes.get("last")]
        np.testing.assert_array_equal(found.array, np.concatenate(wanted, axis=1))
        assert found.parts == tuple(y.shape[1] for y in wanted)
    gate = each[0].astype(np.float64)
    up = each[1].astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    found = ops.gated_linear(x, ops.prepare_joined(Joined((first, second), gated=True), "w"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-20)


@given(seeds, st.sampled_from([0.0, 1.0, 100.0]))
def test_the_search_for_4_bits_is_at_least_as_near_as_llama_cpps_rounding(seed: int, mean: float):
    w = normal(np.random.default_rng(seed), 64, 5) + np.float32(mean)
    found = blocks.dequantise(blocks.quantise(w, "q4_1"))
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w.T, Kind.Q4_1), Kind.Q4_1).T
    assert np.square(found - w).sum() <= np.square(theirs - w).sum()


@given(seeds, st.integers(1, 100))
def test_8_bits_err_by_half_a_step_at_most(seed: int, inputs: int):
    w = normal(np.random.default_rng(seed), inputs, 3)
    found = blocks.dequantise(blocks.quantise(w, "q8_0"))[:inputs]
    assert np.abs(found - w).max() <= np.abs(w).max() / 127 * 0.57  # the scale itself is rounded


@pytest.mark.parametrize("value", [0.0, -0.75, 3.0])
def test_blocks_of_one_number_are_exact(value: float):
    w = np.full((40, 3), value, np.float32)
    np.testing.assert_array_equal(blocks.dequantise(blocks.quantise(w, "q4_1"))[:32], w[:32])


@needs_native
@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_few_bits_do_not_hide_an_input_that_is_no_number(kind: BlockFormat):
    """A block's scale carries it to every output of that row, and to no other row."""
    x = np.ones((3, 40), np.float32)
    x[1, 7] = np.nan
    x[2, 3] = np.inf
    actual = np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(jnp.ones((40, 20)), kind)))
    assert np.isfinite(actual[0]).all()
    assert not np.isfinite(actual[1:]).any()


def test_what_blocks_cannot_hold_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.w: expected weights below 32768 for block formats, found larger weights or NaN"):
        cpu.pack(jnp.full((2, 3), 1e5), "q4_1", "a.w")
    with pytest.raises(ValueError, match=r"a\.w: expected weights below 32768"):
        cpu.pack(jnp.full((2, 3), jnp.nan), "q8_0", "a.w")
    spoilt = QuantisedMatrix("q8_0", np.zeros((1, 1, 32), np.uint8), np.full((1, 1), np.inf, np.float16))
    with pytest.raises(ValueError, match=r"a\.w: expected finite scales and minima, found infinity or NaN"):
        cpu.pack(spoilt, name="a.w")


@needs_native
@pytest.mark.parametrize(("weights", "kind"), [("int4", "q4_1"), ("int8", "q8_0")])
def test_operations_hold_layers_in_blocks_and_the_head_in_8_bits(weights: Weights, kind: BlockFormat):
    ops = select.operations("cpu", weights)
    w = jnp.asarray(normal(np.random.default_rng(4), 64, 32))
    bytes_of = {
        name: packed.panels.shape[2]
        for name, packed in {
            "matrix": ops.prepare_matrix(w, "w"),
            "head": ops.prepare_matrix(w, "w", head=True),
            "joined": ops.prepare_joined(Joined((w, w)), "w"),
            "gated": ops.prepare_joined(Joined((w, w), gated=True), "w"),
        }.items()
    }
    four, eight = (blocks.FORMS[kind].group_bytes for kind in (kind, "q8_0"))
    assert bytes_of == {"matrix": four, "head": eight, "joined": four, "gated": four}
