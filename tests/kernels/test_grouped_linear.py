"""Grouped products: every implementation against NumPy in float64, and the CPU kernel against products of each group alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.grouped_checks import FORMATS, ROWS, check_groups
from tilewright.kernels import native, select
from tilewright.kernels.grouped_linear import cpu, reference
from tilewright.kernels.linear import blocks
from tilewright.kernels.linear import cpu as linear
from tilewright.kernels.operations import Joined, Operations

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
BUNDLES = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: select.operations("cpu"), id="cpu", marks=needs_native),
        pytest.param(lambda: select.operations("cpu", kernels="xla"), id="xla"),
    ],
)
GROUPS = 5
INPUTS = 33
OUTPUTS = 20


@st.composite
def group_sizes(draw: st.DrawFn) -> list[int]:
    """Sizes of groups of at most `ROWS` rows in all; some have none."""
    left = ROWS
    sizes = []
    for _ in range(GROUPS):
        sizes.append(draw(st.integers(0, left)))
        left -= sizes[-1]
    return draw(st.permutations(sizes))


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@BUNDLES
@settings(max_examples=15)
@given(st.integers(0, 2**31 - 1), group_sizes())
def test_each_row_meets_the_matrix_of_its_group(make: Any, seed: int, sizes: list[int]):
    ops: Operations = make()
    x = drawn(seed, ROWS, INPUTS)
    gate = drawn(seed + 1, GROUPS, INPUTS, OUTPUTS)
    up = drawn(seed + 2, GROUPS, INPUTS, OUTPUTS)
    joined = ops.prepare_groups(Joined((jnp.asarray(gate), jnp.asarray(up)), gated=True), GROUPS, "w")

    @jax.jit
    def run(x: jax.Array, w: Any, joined: Any, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ops.grouped_linear(x, w, sizes), ops.grouped_gated(x, joined, sizes)

    prepared = ops.prepare_groups(jnp.asarray(up), GROUPS, "w")
    found, gated = run(jnp.asarray(x), prepared, joined, jnp.asarray(sizes, jnp.int32))
    of_gate, of_up = (
        reference.grouped_linear(x.astype(np.float64), w.astype(np.float64), np.asarray(sizes)) for w in (gate, up)
    )
    np.testing.assert_allclose(found, of_up, rtol=0, atol=1e-4)
    np.testing.assert_allclose(gated, of_gate / (1 + np.exp(-of_gate)) * of_up, rtol=0, atol=1e-3)


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=10)
@given(st.integers(0, 2**31 - 1), group_sizes(), st.booleans(), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_groups_have_the_bits_of_products_alone(kind: linear.Format, seed: int, sizes: list[int], gated: bool, dtype: Any):
    check_groups(seed, sizes, (INPUTS, OUTPUTS), kind, gated, dtype)


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
def test_many_rows_of_one_group(kind: linear.Format):
    """More than pass a panel at once."""
    x = jnp.asarray(drawn(0, 600, INPUTS))
    w = drawn(1, 2, INPUTS, OUTPUTS)

    @jax.jit
    def run(x: jax.Array, groups: cpu.PackedMatrices, alone: linear.PackedMatrix) -> tuple[jax.Array, jax.Array]:
        return cpu.grouped_linear(x, groups, jnp.asarray([7, 590], jnp.int32)), linear.linear(x, alone)

    found, alone = run(x, cpu.pack([w], 2, kind), linear.pack(w[1], kind))
    np.testing.assert_array_equal(found[7:597], alone[7:597])
    assert not found[597:].any()


@needs_native
@pytest.mark.parametrize("kind", FORMATS)
def test_packed_matrices_are_unpacked(kind: linear.Format):
    w = drawn(3, 3, 64, OUTPUTS)
    found = cpu.unpack(cpu.pack([w], 3, kind))
    np.testing.assert_array_equal(found[:, :64], np.stack([linear.unpack(linear.pack(one, kind))[:64] for one in w]))


@needs_native
def test_blocks_keep_their_bits():
    """A file's blocks of all groups, one group's outputs behind another's."""
    w = drawn(4, 3, 64, OUTPUTS)
    made = [blocks.quantise(one, "q4_1") for one in w]
    kept = cpu.pack([blocks.side_by_side(made)], 3)
    anew = cpu.pack([w], 3, "q4_1")
    np.testing.assert_array_equal(kept.matrix.panels, anew.matrix.panels)


@needs_native
@pytest.mark.parametrize(
    ("sizes", "said"), [((41, 0), "more rows than there are"), ((-1, 3), "negative"), ((1, 1, 1), "a matrix for each group")]
)
def test_groups_that_do_not_fit_are_refused(sizes: tuple[int, ...], said: str):
    packed = cpu.pack([drawn(0, 2, INPUTS, OUTPUTS)], 2)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=said):
        jax.block_until_ready(jax.jit(cpu.grouped_linear)(jnp.ones((ROWS, INPUTS)), packed, jnp.asarray(sizes, jnp.int32)))


@needs_native
@pytest.mark.parametrize("shape", [(INPUTS, OUTPUTS), (3, INPUTS, OUTPUTS)])
def test_weights_that_are_no_matrices_of_so_many_groups_are_named(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"experts: expected 2 matrices \[groups, inputs, outputs\], found"):
        cpu.pack([drawn(0, *shape)], 2, name="experts")
