"""The auto-sharded step gives what one device gives: what sharded training is compared with computes the same."""

import jax
import jax.numpy as jnp
import pytest

from tilewright.kernels.select import PLAIN
from tilewright.train.lm import language_model, next_tokens
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import cast_loss
from tilewright.train.text import TextOptions
from train.sharded_support import CONFIGS, alone, batch, drawn, equal, over_devices, placed


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_loss_and_every_gradient_equal_those_of_one_device(family: str):
    equal(over_devices(placed(family, 4, 2, None), family), family)


def test_in_bfloat16_gradients_are_of_the_masters_dtype():
    model = language_model(CONFIGS["llama"])
    placement = placed("llama", 4, 2, None)
    loss = cast_loss(TextOptions(compute_dtype="bfloat16"), prediction_loss(model, PLAIN, placement))
    params = jax.device_put(drawn("llama"), placement.shardings(model.specs))
    run = jax.jit(jax.value_and_grad(lambda p, drawn: loss(p, None, drawn)[0]))
    value, gradient = run(params, jax.tree.map(jnp.asarray, next_tokens(*batch())))
    assert float(value) == pytest.approx(float(alone("llama")[0]), rel=0.02)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
