"""Muon: its updates are optax's in float32, and near them where products are taken in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array

from tilewright.kernels import native
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.train.muon import muon, near_orthogonal

SHAPES = {"wide": (12, 40), "tall": (40, 12), "square": (24, 24)}


def matrices(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def updates(optimiser: optax.GradientTransformation, steps: int = 3) -> list[dict[str, np.ndarray]]:
    """The updates of some steps, under weight decay."""
    params = matrices(0)
    state = optimiser.init(params)
    made = []
    for step in range(steps):
        with jax.numpy_dtype_promotion("standard"):  # optax counts on it
            change, state = jax.jit(optimiser.update)(matrices(1 + step), state, params)
        params = optax.apply_updates(params, change)
        made.append(jax.tree.map(np.asarray, change))
    return made


@pytest.mark.parametrize("ops", [PLAIN, training_operations("float32")], ids=["xla", "cpu"])
def test_updates_are_those_of_optax(ops: Operations):
    for ours, theirs in zip(updates(muon(0.1, 0.25, ops)), updates(optax.contrib.muon(0.1, weight_decay=0.25)), strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def test_the_rate_may_follow_a_schedule():
    rising = optax.linear_schedule(0.0, 0.2, 2)
    first, second, third = updates(muon(rising, 0.0, PLAIN))
    assert not np.any(first["wide"])
    np.testing.assert_allclose(np.linalg.norm(third["wide"]) / np.linalg.norm(second["wide"]), 2, rtol=0.1)


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
@pytest.mark.parametrize("name", SHAPES)
def test_products_in_bfloat16_bring_singular_values_near_one_as_well(name: str):
    x = matrices(0)[name]
    rounded, exact = (np.asarray(near_orthogonal(training_operations(products), x)) for products in ("bfloat16", "float32"))
    assert 0 < np.linalg.norm(rounded - exact) < 0.05 * np.linalg.norm(exact)
    values = np.linalg.svd(rounded, compute_uv=False)
    assert 0.6 < values.min() <= values.max() < 1.3
