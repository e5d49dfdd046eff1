"""Layers of linear attention: what they keep behind a block is what steps of one position would have left, to the bit."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.kernels.select import PLAIN
from tilewright.models.delta import DeltaInputs, DeltaSizes, DeltaState, DeltaWeights, attend_delta, declare_delta
from tilewright.models.params import initialise

SIZES = DeltaSizes(key_heads=2, value_heads=4, key_dim=16, value_dim=8, taps=4)
ROWS = 3
BLOCK = 5


class Positions(NamedTuple):
    start: Any
    count: Any
    uncommitted: bool = False


def weights(dtype: Any = jnp.float32) -> DeltaWeights:
    return initialise(declare_delta(SIZES, "layer", 8, 0.02, in_one=False)[0], jax.random.key(0), dtype)


def inputs(seed: int, length: int, dtype: Any = jnp.float32) -> DeltaInputs:
    rng = np.random.default_rng(seed)
    widths = (SIZES.channels, SIZES.values, SIZES.value_heads, SIZES.value_heads)
    return DeltaInputs(*(jnp.asarray(rng.standard_normal((ROWS, length, width)), dtype) for width in widths))


@partial(jax.jit, static_argnames="uncommitted")
def passed(kept: DeltaState, new: DeltaInputs, start: Any, count: Any, uncommitted: bool) -> Any:
    return attend_delta(SIZES, PLAIN, weights(new.qkv.dtype), 1e-6, new, Positions(start, count, uncommitted), kept)


committed = jax.jit(lambda kept, count: kept.commit(PLAIN, count))


def at(new: DeltaInputs, begin: int, end: int) -> DeltaInputs:
    return jax.tree.map(lambda x: x[:, begin:end], new)


def begun(dtype: Any = jnp.float32) -> tuple[DeltaState, Any]:
    """A state behind texts of several lengths."""
    lengths = jnp.asarray([7, 3, 1], jnp.int32)
    _, kept = passed(DeltaState.empty(SIZES, ROWS, dtype), inputs(1, 7, dtype), jnp.zeros_like(lengths), lengths, False)
    return kept, lengths


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@given(st.lists(st.integers(0, BLOCK), min_size=ROWS, max_size=ROWS))
def test_a_block_leaves_what_its_accepted_positions_would_have_left(dtype: Any, accepted: list[int]):
    kept, start = begun(dtype)
    new = inputs(2, BLOCK, dtype)
    count = jnp.asarray(accepted, jnp.int32)
    out, uncommitted = passed(kept, new, start, jnp.full_like(start, BLOCK), True)
    for held, before in zip((uncommitted.state, uncommitted.before), (kept.state, kept.before), strict=True):
        np.testing.assert_array_equal(held, before)
    after = committed(uncommitted, count)
    one_by_one = kept
    outs = []
    for n in range(BLOCK):
        alone, one_by_one = passed(one_by_one, at(new, n, n + 1), start + n, (n < count).astype(jnp.int32), True)
        outs.append(alone)
    jax.tree.map(np.testing.assert_array_equal, after, one_by_one)
    for row, most in enumerate(accepted):
        np.testing.assert_array_equal(out[row, :most], jnp.concatenate(outs, axis=1)[row, :most])


def test_a_text_in_pieces_is_the_text():
    """Those of prefill, in chunks: up to the last bits."""
    new = inputs(3, 11)
    start = jnp.zeros(ROWS, jnp.int32)
    kept = DeltaState.empty(SIZES, ROWS, jnp.float32)
    want, whole = passed(kept, new, start, jnp.full_like(start, 11), False)
    outs = []
    for begin, end in ((0, 4), (4, 5), (5, 11)):
        out, kept = passed(kept, at(new, begin, end), start + begin, jnp.full_like(start, end - begin), False)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), want, rtol=0, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-5), kept, whole)


def test_a_row_at_position_0_begins_anew_and_a_row_of_no_positions_stays():
    """Whatever a slot held before; not even what is not a number stays."""
    old = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), begun()[0])
    new = inputs(4, 3)
    zeros = jnp.zeros(ROWS, jnp.int32)
    count = jnp.asarray([3, 0, 2], jnp.int32)
    out, after = passed(old, new, zeros, count, False)
    want, fresh = passed(DeltaState.empty(SIZES, ROWS, jnp.float32), new, zeros, count, False)
    for row in (0, 2):
        jax.tree.map(lambda x, y, row=row: np.testing.assert_array_equal(x[row], y[row]), (out, after), (want, fresh))
    assert bool(jnp.all(jnp.isnan(after.state[1])))
    assert bool(jnp.all(jnp.isnan(after.before[1])))
