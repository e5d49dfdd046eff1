"""Cross-entropy: the reference against NumPy in float64, and the blocks with their gradient against the reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels import native, select
from tilewright.kernels.cross_entropy import reference, xla
from tilewright.kernels.operations import Transposed

needs_native = pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")


def drawn(seed: int, rows: tuple[int, ...], inputs: int, vocab: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*rows, inputs))
    head = rng.standard_normal((inputs, vocab))
    weights = rng.uniform(size=rows) * (rng.uniform(size=rows) < 0.7)
    return (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(rng.integers(0, vocab, rows), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


@pytest.mark.parametrize("cap", [None, 1.5])
def test_the_reference_against_numpy(cap: float | None):
    x, head, labels, weights = drawn(0, (3, 5), 7, 11)
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    picked = np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    expected = np.sum((np.log(np.exp(logits).sum(-1)) - picked) * np.asarray(weights, np.float64))
    np.testing.assert_allclose(reference.cross_entropy(x, head, labels, weights, cap), expected, rtol=1e-5)


@pytest.mark.parametrize("products", ["float32", pytest.param("bfloat16", marks=[needs_native, pytest.mark.slow])])
@settings(max_examples=30)  # each compiles three programs
@given(
    seed=st.integers(0, 2**31 - 1),
    rows=st.sampled_from([(1,), (2, 9), (31,)]),
    block=st.integers(1, 40),
    tied=st.booleans(),
    cap=st.sampled_from([None, 1.5]),
)
def test_blocks_give_value_and_gradient_of_the_whole(
    products: str, seed: int, rows: tuple[int, ...], block: int, tied: bool, cap: float | None
):
    x, head, labels, weights = drawn(seed, rows, 8, 21)
    linear = select.training_operations(products).linear
    count = labels.size

    def blocked(x: Any, w: Any, weights: Any) -> Any:
        flat = x.reshape(count, -1), Transposed(w.T) if tied else w, labels.reshape(-1), weights.reshape(-1)
        loss: Any = xla.weighted(partial(xla.capped_products, linear, cap), min(block, count), *flat)
        return 3 * loss

    def whole(x: Any, w: Any, weights: Any) -> Any:
        return 3 * reference.cross_entropy(x, w, labels, weights, cap)

    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, head, weights) for f in (blocked, whole))
    tolerance = 1e-5 if products == "float32" else 0.05
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.abs(other).max()) + 1
        np.testing.assert_allclose(np.asarray(one) / scale, np.asarray(other) / scale, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(jax.jit(blocked)(x, head, weights), found[0], rtol=1e-6)


def test_rows_are_divided_evenly_and_a_block_stays_small():
    assert xla.block_rows(4096, 4096) == 2048
    assert xla.block_rows(100, 4096) == 100
    assert xla.block_rows(4096, 151_936) == xla.LEAST_ROWS
    assert xla.block_rows(2049, 4096) == 1025


@pytest.mark.parametrize("products", ["float32", "auto"])
def test_the_logits_of_all_rows_are_never_in_memory(products: str):
    ops, (x, head, labels, weights) = select.training_operations(products), drawn(0, (4 * xla.LEAST_ROWS,), 8, 40_000)
    run = jax.jit(jax.grad(partial(lambda x, head: ops.cross_entropy(x, head, labels, weights)), (0, 1)))
    text = run.lower(x, head).as_text()
    assert f"{xla.LEAST_ROWS}x40000xf32" in text
    assert f"{4 * xla.LEAST_ROWS}x40000" not in text
