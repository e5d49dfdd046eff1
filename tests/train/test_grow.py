"""Growing a language model: it says what it said before, and all of it learns."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.kernels.select import training_operations
from tilewright.models import decoder
from tilewright.models.params import count
from tilewright.train.grow import grow
from tilewright.train.lm import next_token_loss
from train.support import TARGET, random_stream, target_params

OPS = training_operations("float32")


@pytest.mark.parametrize("layers", [2, 3, 5, 6])
def test_the_deeper_model_says_the_same(layers: int):
    params = target_params()
    config, grown = grow(TARGET, params, layers, 512)
    assert config == replace(TARGET, num_layers=layers, max_position_embeddings=512)
    assert len(grown.layers) == layers
    assert count(decoder.declare(config)) == sum(leaf.size for leaf in jax.tree.leaves(grown))
    tokens = jnp.asarray(random_stream(24).tokens.reshape(2, 12))
    before, after = (decoder.forward_full(c, OPS, p, tokens).hidden for c, p in ((TARGET, params), (config, grown)))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_every_layer_adds_where_the_first_of_its_kind_was():
    params = target_params()
    _, grown = grow(TARGET, params, 5)
    adds = [bool(np.any(layer.o)) and bool(np.any(layer.down)) for layer in grown.layers]
    assert adds == [True, False, False, True, False]
    np.testing.assert_array_equal(grown.layers[3].o, params.layers[1].o)


def test_the_new_layers_learn():
    config, grown = grow(TARGET, target_params(), 4)
    stream = random_stream(34)
    batch = jnp.asarray(stream.tokens.reshape(2, 17)), jnp.asarray(stream.in_loss.reshape(2, 17))
    gradient = jax.jit(jax.grad(lambda p: next_token_loss(config, OPS, p, *batch)[0]))(grown)
    for layer in gradient.layers:
        assert np.any(layer.o)
        assert np.any(layer.down)


@pytest.mark.parametrize(
    ("layers", "context", "message"),
    [(1, None, "layers of at least the model's 2, found 1"), (None, 128, "context of at least the model's 256, found 128")],
)
def test_a_model_does_not_shrink(layers: int | None, context: int | None, message: str):
    with pytest.raises(ValueError, match=f"expected {message}"):
        grow(TARGET, target_params(), layers, context)
