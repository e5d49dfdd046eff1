"""The auto-sharded step gives what one device gives: what sharded training is compared with computes the same."""

import jax
import pytest

from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.annotated import annotated_gradient
from train.sharded_support import alone, batch, drawn, equal, setup


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_loss_and_every_gradient_equal_those_of_one_device(family: str):
    sharded = setup(family, 4, 2, FullyShardedPlan())
    equal(jax.jit(annotated_gradient(sharded))(jax.device_put(drawn(family), sharded.shardings), *batch()), family)


def test_in_bfloat16_gradients_are_of_the_masters_dtype():
    sharded = setup("llama", 4, 2, FullyShardedPlan(dtype="bfloat16"))
    value, gradient = jax.jit(annotated_gradient(sharded))(jax.device_put(drawn("llama"), sharded.shardings), *batch())
    assert float(value) == pytest.approx(float(alone("llama")[0]), rel=0.02)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
