"""Diffusion models over a mesh against a single device: loss and every gradient, of all ways to predict a position."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models.config import MaskedBlocks
from tilewright.models.diffusion import DiffusionConfig
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.block_diffusion import block_denoiser
from tilewright.train.diffusion import Batch, masked_denoiser
from tilewright.train.predictions import Predictor
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import accumulated
from train.sharded_support import CONFIGS, drawn, placed, tolerance

ROWS = 8
LENGTH = 9


def batch() -> Batch:
    """Rows of different lengths; the first ends long before the window does."""
    rng = np.random.default_rng(0)
    first = rng.integers(1, 3, ROWS)
    valid = np.array([4, 9, 7, 9, 5, 8, 9, 6])
    return Batch(*(x.astype(np.int32) for x in (rng.integers(0, 63, (ROWS, LENGTH)), first, valid - 1, valid)))


CASES = {
    "llada": ("llama", (2, 4), FullyShardedPlan()),
    "dream": ("qwen2", (4, 2), FullyShardedPlan(weights="ring", activations="ring")),
    "dream, in parts": ("qwen2", (4, 1), FullyShardedPlan()),
    "blocks": ("llama", (2, 2), FullyShardedPlan()),
    "shifted blocks, in parts": ("llama", (4, 2), FullyShardedPlan(weights="ring", activations="ring")),
}


def denoiser(name: str) -> Predictor:
    sizes = CONFIGS[CASES[name][0]]
    if "blocks" in name:
        blocks = MaskedBlocks(63, 4, "shifted" in name)
        return block_denoiser(replace(sizes, family="nemotron_labs_diffusion", masked_blocks=blocks))
    return masked_denoiser(DiffusionConfig(family="dream" if "dream" in name else "llada", decoder=sizes, mask_token_id=63))


@pytest.mark.parametrize("name", [*list(CASES)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])])
def test_loss_and_every_gradient_equal_those_of_one_device(name: str):
    sizes, mesh, plan = CASES[name]
    model = denoiser(name)
    placement = placed(sizes, *mesh, plan)
    params = drawn(sizes)
    key = jax.random.key(3)
    loss = prediction_loss(model, PLAIN, placement)
    alone = jax.value_and_grad(lambda p: model.loss(PLAIN, p, model.predict(Batch(*map(jnp.asarray, batch())), key))[0])
    wanted = jax.jit(alone)(params)

    @jax.jit
    def gradient(params: Any, each: Batch) -> Any:
        parts = 2 if "parts" in name else 1
        predicted = model.predict(each, key)
        value, _, found = accumulated(lambda p, drawn: loss(p, None, drawn), params, predicted, parts)
        return value, found

    found = gradient(jax.device_put(params, placement.shardings(model.specs)), batch())
    share = tolerance(CONFIGS[sizes])
    for ours, one in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        largest = float(jnp.max(jnp.abs(one)))
        assert largest > 1e-5
        np.testing.assert_allclose(ours, one, rtol=0, atol=share * largest)
