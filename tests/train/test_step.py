"""The train step: parts of a batch, activations that are computed again, and states in bfloat16, against the plain step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tilewright.kernels.operations import Operations
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.experts import Mixture
from tilewright.train.diffusion import Batch, masked_denoiser
from tilewright.train.drafter import DFlashOptions, Frozen, drafter_loss, draw_blocks
from tilewright.train.finite import FINITE
from tilewright.train.lm import hidden_matrices, language_model, train_lm
from tilewright.train.loop import TrainResult
from tilewright.train.predictions import Predictor
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import Loss, TrainingPlacement, accumulated, compiled_step
from tilewright.train.text import make_optimizer
from train.support import DRAFTER, TARGET, counting_stream, drafter_params, kept_target, options, silent, target_params

ROWS = 8
TOKENS = np.random.default_rng(0).integers(1, 23, (ROWS, 17)).astype(np.int32)
SHALLOW = replace(TARGET, num_layers=1)
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
    model = language_model(SHALLOW)
    chosen = options(weight_decay=0.0)
    optimizer = make_optimizer(chosen, hidden_matrices)
    step = compiled_step(
        lambda params, _, drawn: model.loss(PLAIN, params, drawn),
        optimizer,
        draw=lambda _, batch, key: model.predict(batch, key),
        parts=4,
    )
    params = target_params(SHALLOW)
    batch = (TOKENS, np.zeros_like(IN_LOSS))
    after, _, metrics = step(jax.tree.map(jnp.copy, params), optimizer.init(params), None, batch, jax.random.key(0))
    assert float(metrics["loss"]) == float(metrics["weight"]) == 0
    assert bool(metrics[FINITE].flags.all())
    jax.tree.map(np.testing.assert_array_equal, after, params)


@pytest.mark.parametrize("ops", [PLAIN, training_operations("float32")], ids=["xla", "here"])
def test_activations_that_are_computed_again_change_nothing(ops: Operations):
    model = language_model(TARGET)
    params = target_params()
    drawn = model.predict((jnp.asarray(TOKENS), jnp.asarray(IN_LOSS)), jax.random.key(0))
    found = {}
    products = {}
    for remat in ("everything_saveable", "dots_saveable", "nothing_saveable"):
        loss = prediction_loss(model, ops, TrainingPlacement(remat=remat))
        gradient = jax.jit(jax.value_and_grad(lambda p, loss=loss: loss(p, None, drawn)[0]))
        products[remat] = str(jax.make_jaxpr(gradient)(params)).count("dot_general" if ops is PLAIN else "ffi_call")
        found[remat] = gradient(params)
    assert products["everything_saveable"] <= products["dots_saveable"] <= products["nothing_saveable"]
    assert products["everything_saveable"] < products["nothing_saveable"]
    if ops is PLAIN:
        assert products["dots_saveable"] < products["nothing_saveable"]
    for remat in ("dots_saveable", "nothing_saveable"):
        for one, other in zip(*map(jax.tree.leaves, (found[remat], found["everything_saveable"])), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(other))))


def test_experts_with_a_balance_loss_save_all_activations():
    sparse = replace(TARGET, family="qwen3_moe", mixture=Mixture(4, 2, 16), balance=0.1)
    with pytest.raises(ValueError, match="where experts have a balance loss; found nothing_saveable"):
        prediction_loss(language_model(sparse), PLAIN, TrainingPlacement(remat="nothing_saveable"))
    with pytest.raises(ValueError, match=r"expected a policy among everything_saveable, .*, found 'all'"):
        TrainingPlacement(remat="all")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_in_bfloat16_learn_what_float32_ones_do(tmp_path: Path, optimizer: str):
    def trained(out: str, **changes: Any) -> TrainResult:
        chosen = options(**{"optimizer": optimizer, "steps": 24, "evaluate_every": 12, "save_every": 12, **changes})
        return train_lm(SHALLOW, counting_stream(), counting_stream(100), chosen, tmp_path / out, silent())

    plain = trained("plain")
    narrow = trained("narrow", state_dtype="bfloat16")
    assert plain.curve["held_out_loss"][0] > plain.last("held_out_loss")
    assert narrow.last("held_out_loss") == pytest.approx(plain.last("held_out_loss"), rel=0.02)
    assert narrow.last("held_out_loss") != plain.last("held_out_loss")
    with ocp.StandardCheckpointer() as saved:
        leaves = saved.metadata(tmp_path / "narrow" / "checkpoints" / "24" / "state").item_metadata.tree
    stored = {name: str(leaf.dtype) for name, leaf in leaves.items()}
    assert {dtype for name, dtype in stored.items() if name.startswith("[1]") and "embed" in name} == {"bfloat16"}
    assert {dtype for name, dtype in stored.items() if name.startswith("[0]")} == {"float32"}
    again = trained("narrow", state_dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, again.params, narrow.params)
    with pytest.raises(ValueError, match="state_dtype: checkpoint 'bfloat16', now 'float32'"):
        trained("narrow")
    with pytest.raises(ValueError, match="expected the state dtype float32 or bfloat16, found 'float16'"):
        options(state_dtype="float16")


def test_a_finished_run_is_extended_and_not_shortened(tmp_path: Path):
    def trained(steps: int) -> TrainResult:
        chosen = options(steps=steps, evaluate_every=4, save_every=4)
        return train_lm(SHALLOW, counting_stream(), counting_stream(100), chosen, tmp_path, silent())

    first = trained(8)
    longer = trained(16)
    assert longer.curve["step"].tolist() == [4, 8, 12, 16]
    np.testing.assert_array_equal(longer.curve["loss"][:2], first.curve["loss"])
    assert longer.last("held_out_loss") < first.last("held_out_loss")
    with pytest.raises(ValueError, match="steps: checkpoint 16, now 8"):
        trained(8)
