"""Weights in blocks of 4 and 8 bits: a file's bits stay what they are, and products are those of the quantised numbers."""

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
from kernels.block_checks import file_of
from kernels.linear_checks import normal
from tilewright.kernels import native, select
from tilewright.kernels.gather_rows import cpu as gather
from tilewright.kernels.linear import blocks, cpu
from tilewright.kernels.linear.blocks import BLOCK, BlockFormat, QuantisedMatrix
from tilewright.kernels.operations import Joined

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
formats = pytest.mark.parametrize("kind", block_checks.FORMATS)
seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 100))  # blocks and outputs


def reference(rows: np.ndarray, kind: BlockFormat) -> np.ndarray:
    """What llama.cpp's own library makes of a file's rows, `[I, O]`."""
    return gguf.quants.dequantize(rows, Kind[kind.upper()]).T


@formats
@given(seeds, sizes)
def test_packing_keeps_every_bit_of_a_file(kind: BlockFormat, seed: int, shape: tuple[int, int]):
    rows = file_of(np.random.default_rng(seed), *shape, kind)
    found = blocks.read_blocks(rows, kind)
    np.testing.assert_array_equal(blocks.dequantise(found), reference(rows, kind))
    packed = cpu.pack(found)
    assert packed.panels.shape[2] == blocks.PAIR_BYTES[kind]
    np.testing.assert_array_equal(np.asarray(cpu.unpack(packed))[: shape[0] * BLOCK], reference(rows, kind))
    again = blocks.blocks_of(np.asarray(packed.panels), shape[1])
    for name in ("integers", "scales", "minima"):
        kept, given_bits = getattr(again, name), getattr(found, name)
        assert (kept is None) == (given_bits is None)
        if kept is not None:
            np.testing.assert_array_equal(kept[:, : shape[0]].view(np.uint8), np.ascontiguousarray(given_bits).view(np.uint8))


@needs_native
@formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(seeds, sizes)
def test_rows_of_a_table_are_those_of_the_dequantised_matrix(kind: BlockFormat, dtype: str, seed: int, shape: tuple[int, int]):
    rng = np.random.default_rng(seed)
    w = blocks.read_blocks(file_of(rng, *shape, kind), kind)
    table = blocks.PackedTable(cpu.pack(w).panels, shape[1], shape[0] * BLOCK - 3, dtype)
    index = rng.integers(0, shape[1], (2, 7))
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
@formats
def test_products_are_near_those_of_inputs_that_are_not_rounded(kind: BlockFormat):
    rng = np.random.default_rng(0)
    w = blocks.read_blocks(gguf.quants.quantize(normal(rng, 200, 576), Kind[kind.upper()]), kind)
    x = normal(rng, 16, 576)
    found, wanted = np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(w))), x @ blocks.dequantise(w)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


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
    """Rows of a file in another order give outputs in another order, and matrices side by side those of each."""
    rng = np.random.default_rng(2)
    rows, others = file_of(rng, 4, 48, kind), file_of(rng, 4, 50, kind)
    x, order = jnp.asarray(normal(rng, 5, 4 * BLOCK)), rng.permutation(48)
    first, second = blocks.read_blocks(rows, kind), blocks.read_blocks(others, kind)
    each = [np.asarray(cpu.linear(x, cpu.pack(w))) for w in (first, second)]
    turned = np.asarray(cpu.linear(x, cpu.pack(blocks.read_blocks(rows[order], kind))))
    np.testing.assert_array_equal(turned, each[0][:, order])
    joined = cpu.pack_joined([first, second])
    assert joined.parts == (48, 50)
    np.testing.assert_array_equal(cpu.linear(x, joined), np.concatenate(each, axis=1))
    np.testing.assert_array_equal(cpu.linear(x, joined, parts=(1, 2)), each[1])
    one = blocks.read_blocks(others[:48], kind)
    gate, up = each[0].astype(np.float64), np.asarray(cpu.linear(x, cpu.pack(one)), np.float64)
    with np.errstate(over="ignore"):
        wanted = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(cpu.linear(x, cpu.pack_gated(first, one)), wanted, rtol=1e-5, atol=1e-20)


def test_matrices_of_one_product_are_brought_to_one_format():
    rng = np.random.default_rng(3)
    four, least, eight = (blocks.read_blocks(file_of(rng, 2, 16, kind), kind) for kind in ("q4_0", "q4_1", "q8_0"))
    wide = [np.asarray(blocks.dequantise(w)) for w in (four, least, eight)]
    kinds = {"q4_1": blocks.of_one_kind([four, least]), "q8_0": blocks.of_one_kind([four, eight])}
    for kind, made in kinds.items():
        assert {w.kind for w in made} == {kind}
        np.testing.assert_array_equal(blocks.dequantise(made[0]), wide[0], err_msg="4 bits are kept exactly")
    rounded_up, same = blocks.of_one_kind([least, eight])
    assert (rounded_up.kind, same) == ("q8_0", eight)
    assert np.abs(blocks.dequantise(rounded_up) - wide[1]).max() <= np.abs(wide[1]).max() / 127


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
def test_4_bits_do_not_hide_an_input_that_is_no_number():
    x = np.ones((3, 40), np.float32)
    x[1, 7], x[2, 3] = np.nan, np.inf
    actual = np.asarray(jax.jit(cpu.linear)(jnp.asarray(x), cpu.pack(jnp.ones((40, 20)), "q4_1")))
    assert np.isfinite(actual[0]).all()
    assert not np.isfinite(actual[1:]).any()


def test_what_blocks_cannot_hold_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.w: expected weights below 32768, as blocks hold them, found larger ones or NaN"):
        cpu.pack(jnp.full((2, 3), 1e5), "q4_1", "a.w")
    with pytest.raises(ValueError, match=r"a\.w: expected weights below 32768"):
        cpu.pack(jnp.full((2, 3), jnp.nan), "q8_0", "a.w")
    spoilt = QuantisedMatrix("q8_0", np.zeros((1, 1, 32), np.uint8), np.full((1, 1), np.inf, np.float16))
    with pytest.raises(ValueError, match=r"a\.w: expected finite scales and minima, found infinity or NaN"):
        cpu.pack(spoilt, name="a.w")


@needs_native
def test_operations_hold_layers_in_4_bits_and_the_head_in_8():
    ops = select.operations("cpu", "int4")
    w = jnp.asarray(normal(np.random.default_rng(4), 64, 32))
    bytes_of = {name: packed.panels.shape[2] for name, packed in {
        "matrix": ops.prepare_matrix(w, "w"), "head": ops.prepare_matrix(w, "w", head=True),
        "joined": ops.prepare_joined(Joined((w, w)), "w"), "gated": ops.prepare_joined(Joined((w, w), gated=True), "w"),
    }.items()}  # fmt: skip
    four, eight = blocks.PAIR_BYTES["q4_1"], blocks.PAIR_BYTES["q8_0"]
    assert bytes_of == {"matrix": four, "head": eight, "joined": four, "gated": four}
