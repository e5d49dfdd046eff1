"""The loss that balances experts: transformers' formula in NumPy, its gradient, where it counts, and what it does."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.experts import Mixture, RouterLoad, balancing_loss, router_load
from tilewright.models.params import count, initialise
from tilewright.parallel.experts import with_router_callback
from tilewright.train.flops import token_flops
from tilewright.train.lm import hidden_matrices, next_token_loss, train_lm
from train.support import TARGET, counting_stream, options, silent

MIXTURE = Mixture(4, 2, 16)
SPARSE = replace(TARGET, family="qwen3_moe", mixture=MIXTURE, balance=0.3)


def load_balancing(layers: list[np.ndarray], chosen: int) -> float:
    """As transformers' `load_balancing_loss_func` has it: the scores of all layers one below the other, in float64."""
    scores = np.concatenate([np.asarray(layer, np.float64) for layer in layers])
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    best = np.argsort(-shares, axis=-1, kind="stable")[:, :chosen]
    mask = np.eye(scores.shape[1])[best]  # [rows, K, E]
    return float(np.sum(mask.mean(axis=0) * shares.mean(axis=0)[None]) * scores.shape[1])


def loss_of(mixture: Mixture, layers: Any) -> jax.Array:
    loads = [router_load(mixture, scores) for scores in layers]
    return balancing_loss(mixture, jax.tree.map(lambda *each: sum(each), *loads))


@settings(max_examples=20)
@given(st.integers(0, 2**31 - 1), st.integers(1, 4), st.floats(0.1, 10))
def test_the_formula(seed: int, chosen: int, scale: float):
    """Of several layers; K where rows are spread evenly."""
    rng = np.random.default_rng(seed)
    mixture = Mixture(4, chosen, 16)
    layers = (scale * rng.standard_normal((3, 11, 4))).astype(np.float32)
    found = jax.jit(partial(loss_of, mixture))(layers)
    assert float(found) == pytest.approx(load_balancing(list(layers), chosen), rel=1e-5)
    even = RouterLoad(jnp.full(4, 5.0 * chosen), jnp.full(4, 5.0))
    assert float(balancing_loss(mixture, even)) == pytest.approx(chosen)


def test_its_gradient_is_that_of_the_shares_alone():
    rng = np.random.default_rng(0)
    layers = rng.standard_normal((2, 5, 4))
    step = 1e-5
    found = jax.jit(jax.grad(partial(loss_of, MIXTURE)))(layers.astype(np.float32))
    for place in ((0, 0, 0), (1, 3, 2), (1, 4, 1)):
        ends = []
        for sign in (1, -1):
            moved = layers.copy()
            moved[place] += sign * step
            ends.append(load_balancing(list(moved), 2))
        assert float(found[place]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-6)


def batch() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(1, 24, (3, 9)), jnp.int32), jnp.asarray(rng.random((3, 9)) < 0.6)


def test_it_comes_on_top_of_the_cross_entropy():
    """Over all positions that are read, whatever is in the loss, and of all layers."""
    params = jax.jit(partial(initialise, decoder.declare(SPARSE)))(jax.random.key(0))
    tokens, in_loss = batch()

    @jax.jit
    def run(params: Any) -> Any:
        noted: list[jax.Array] = []
        decoder.forward_full(SPARSE, with_router_callback(PLAIN, noted.append), params, tokens[:, :-1])
        losses = [next_token_loss(replace(SPARSE, balance=weight), PLAIN, params, tokens, in_loss)[0] for weight in (0.3, 0.0)]
        return noted, losses

    scores, (with_it, without) = run(params)
    assert [each.shape for each in scores] == [(24, 4)] * 2
    assert float(with_it - without) == pytest.approx(0.3 * load_balancing(scores, 2), rel=1e-4)


def test_matrices_and_operations_of_experts():
    """Experts' matrices decay, their biases do not; a token is multiplied with K of E."""
    specs = decoder.declare(replace(SPARSE, family="gpt_oss", mixture=replace(MIXTURE, clamped=None)))
    flags = hidden_matrices(jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)).layers[0]
    assert (flags.down, flags.router.weight, flags.router.expert_bias) == (True, True, (False, False))
    layers = decoder.declare(SPARSE).layers
    experts = count([(layer.gate_up, layer.down) for layer in layers])
    dense = replace(SPARSE, mixture=replace(MIXTURE, chosen=4))
    assert token_flops(dense, 16) - token_flops(SPARSE, 16) == pytest.approx(6 * experts / 2)


@pytest.mark.slow
def test_training_spreads_rows(tmp_path: Path):
    """On a text that goes round: it is learnt either way, and experts get more even shares with the loss than without."""
    stream = counting_stream(600)
    chosen = options(steps=40, batch_size=4, sequence_length=16, learning_rate=1e-2, evaluate_every=20, save_every=40)
    tokens = jnp.asarray(stream.tokens[:64].reshape(4, 16))
    uneven = {}
    for weight in (0.0, 1.0):
        config = replace(SPARSE, balance=weight)
        result = train_lm(config, stream, stream, chosen, tmp_path / f"{weight}", silent())
        assert result.last("held_out_loss") < 0.5 * result.curve["held_out_loss"][0]
        noted: list[jax.Array] = []
        decoder.forward_full(config, with_router_callback(PLAIN, noted.append), result.params, tokens)
        uneven[weight] = load_balancing(list(map(np.asarray, noted)), 2)
    assert uneven[1.0] < uneven[0.0]
    assert uneven[1.0] == pytest.approx(2, rel=0.05)
