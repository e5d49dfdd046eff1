"""Parts of a batch give the loss, the weight and the gradient of the batch at once, whatever is learned and drawn."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.models.diffusion import DiffusionConfig
from tilewright.train.diffusion import Batch, masked_denoiser
from tilewright.train.drafter import DFlashOptions, Frozen, drafter_loss, draw_blocks
from tilewright.train.finite import FINITE
from tilewright.train.lm import hidden_matrices, language_model
from tilewright.train.predictions import Predictor
from tilewright.train.step import Loss, accumulated, compiled_step
from tilewright.train.text import make_optimizer
from train.support import DRAFTER, TARGET, drafter_params, kept_target, options, target_params

ROWS = 8
TOKENS = np.random.default_rng(0).integers(1, 23, (ROWS, 17)).astype(np.int32)
IN_LOSS = np.random.default_rng(1).random((ROWS, 17)) < np.linspace(0.3, 1, ROWS)[:, None]
"""Rows, and so parts, have different numbers of tokens in the loss."""


def predictions(model: Predictor, batch: Any) -> tuple[Loss, Any, Any]:
    return lambda params, _, drawn: model.loss(PLAIN, params, drawn), target_params(), model.predict(batch, jax.random.key(2))


def lm() -> tuple[Loss, Any, Any]:
    return predictions(language_model(TARGET), (jnp.asarray(TOKENS), jnp.asarray(IN_LOSS)))


def diffusion() -> tuple[Loss, Any, Any]:
    config = DiffusionConfig(family="llada", decoder=TARGET, mask_token_id=23)
    valid = np.linspace(8, 17, ROWS).astype(np.int32)
    batch = Batch(jnp.asarray(TOKENS), jnp.full(ROWS, 2), jnp.asarray(valid - 1), jnp.asarray(valid))
    return predictions(masked_denoiser(config), batch)


def drafter() -> tuple[Loss, Any, Any]:
    chosen = DFlashOptions(anchors=3)
    batch = (jnp.asarray(TOKENS), jnp.asarray(IN_LOSS))
    drawn = batch, draw_blocks(TARGET, DRAFTER, chosen, batch, jax.random.key(2))
    loss = partial(drafter_loss, TARGET, DRAFTER, chosen, PLAIN)
    return lambda params, _, drawn: loss(params, Frozen(kept_target()), *drawn), drafter_params(), drawn


@pytest.mark.parametrize("case", [lm, diffusion, drafter])
def test_parts_of_a_batch_are_the_batch_at_once(case: Callable[[], tuple[Loss, Any, Any]]):
    loss, params, drawn = case()
    run = jax.jit(
        lambda params, drawn, parts: accumulated(lambda p, d: loss(p, None, d), params, drawn, parts), static_argnums=2
    )
    whole = run(params, drawn, 1)
    split = run(params, drawn, 4)
    assert float(whole[1]) > 20
    np.testing.assert_allclose(split[:2], whole[:2], rtol=1e-5)
    for (path, one), other in zip(jax.tree.leaves_with_path(whole[2]), jax.tree.leaves(split[2]), strict=True):
        largest = float(jnp.max(jnp.abs(one)))
        assert largest > 1e-6, path
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * largest, err_msg=str(path))


def test_a_batch_without_tokens_in_the_loss_changes_nothing_in_parts_either():
    model = language_model(TARGET)
    chosen = options(weight_decay=0.0)
    optimizer = make_optimizer(chosen, hidden_matrices)
    step = compiled_step(
        lambda params, _, drawn: model.loss(PLAIN, params, drawn),
        optimizer,
        draw=lambda _, batch, key: model.predict(batch, key),
        parts=4,
    )
    params = target_params()
    batch = (TOKENS, np.zeros_like(IN_LOSS))
    after, _, metrics = step(jax.tree.map(jnp.copy, params), optimizer.init(params), None, batch, jax.random.key(0))
    assert float(metrics["loss"]) == float(metrics["weight"]) == 0
    assert bool(metrics[FINITE].flags.all())
    jax.tree.map(np.testing.assert_array_equal, after, params)
