"""Training of models whose blocks are denoised: what a pass over both copies predicts, and that its loss is that of NumPy."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sizes import decoder_config
from reference import block_diffusion_numpy, self_speculation_numpy
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder
from tilewright.models.config import MaskedBlocks
from tilewright.models.decoder import DecoderConfig
from tilewright.models.params import initialise, to_tensors
from tilewright.train.block_diffusion import block_denoiser
from tilewright.train.diffusion import PADDING_WEIGHT, Batch
from tilewright.train.predictions import Predictor

SIZES = (40, 32, 48, 2, 4, 2, 8)
ROWS = 6
LENGTH = 21
MASK = 39
BLOCK = 4


def model_of(family: str, shifted: bool = False) -> DecoderConfig:
    blocks = MaskedBlocks(MASK, BLOCK, shifted, causal=family != "sdar")
    return replace(decoder_config(family, *SIZES, rope_theta=1e4), masked_blocks=blocks)


CASES = {
    "decodes too": model_of("nemotron_labs_diffusion"),
    "decodes too, shifted": model_of("nemotron_labs_diffusion", shifted=True),
    "blocks alone": model_of("sdar"),
}


def small_batch(rows: int = ROWS) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MASK, (rows, LENGTH))
    first = rng.integers(1, 6, rows)
    return Batch(*(jnp.asarray(x, jnp.int32) for x in (tokens, first, rng.integers(12, 18, rows), np.full(rows, LENGTH))))


def weights_of(batch: Batch) -> np.ndarray:
    place = np.arange(LENGTH)
    weights = np.where(place < np.asarray(batch.end)[:, None], 1.0, PADDING_WEIGHT)
    return np.where(place >= np.asarray(batch.first)[:, None], weights, 0.0)


def noisy_logits(config: DecoderConfig, tensors: Any, clean: list[int], noisy: list[int], start: int) -> np.ndarray:
    """Logits of a block of masks and tokens behind the clean tokens before it, as in generation."""
    tokens = [*clean[:start], *noisy]
    if config.family == "sdar":
        return block_diffusion_numpy.Model(decoder.config_to_hf(config), tensors).logits(tokens)[start:]
    visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
    visible[start:, start:] = True
    return self_speculation_numpy.Model(decoder.config_to_hf(config), tensors).logits(tokens, visible)[start:]


def cross_entropy(logits: np.ndarray, token: int) -> float:
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])


def edges(block: np.ndarray) -> list[tuple[int, int]]:
    """Starts and ends of the blocks of a row."""
    cuts = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(block)]
    return list(pairwise(cuts))


def blocks_of(model: Predictor, key: Any, masked: np.ndarray) -> np.ndarray:
    """Block numbers of each row's positions; those of rows that decode have the random offset of the key."""
    blocks = model.sizes.masked_blocks
    assert blocks is not None
    offset = np.zeros((len(masked), 1), int)
    if blocks.causal:
        offset = np.asarray(jax.random.randint(jax.random.split(key, 3)[0], (len(masked), 1), 0, BLOCK))
    return (np.arange(LENGTH) + offset) // BLOCK


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_each_block_behind_clean_tokens(name: str):
    config = CASES[name]
    blocks = config.masked_blocks
    assert blocks is not None
    model = block_denoiser(config)
    params = initialise(model.specs, jax.random.key(0))
    params = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)
    tensors = dict(to_tensors(model.specs, params, jnp.float32))
    batch = small_batch()
    key = jax.random.key(2)
    predicted = jax.jit(model.predict)(batch, key)
    total = jnp.sum(predicted.counts)
    loss, weight = jax.jit(partial(model.loss, PLAIN))(params, predicted)
    clean = np.asarray(batch.tokens)
    noisy = np.asarray(predicted.inputs)[:, LENGTH:]
    np.testing.assert_array_equal(np.asarray(predicted.inputs)[:, :LENGTH], clean)
    masked = noisy == MASK
    weights = weights_of(batch)
    np.testing.assert_allclose(float(weight), weights.sum(), rtol=1e-6)
    assert float(weight) == float(total)
    numbers = blocks_of(model, key, masked)
    stated = np.asarray(predicted.weights)[:, LENGTH:]
    expected = 0.0
    for row in range(ROWS):
        for start, end in edges(numbers[row]):
            logits = noisy_logits(config, tensors, clean[row].tolist(), noisy[row, start:end].tolist(), start)
            for n in np.flatnonzero(masked[row, start:end]).tolist():
                weight_at = stated[row, start + n - blocks.shifted]
                share = weights[row, start + n] / weight_at
                assert 1 / BLOCK - 1e-6 <= share <= 1 + 1e-6
                expected += weight_at * cross_entropy(logits[n - blocks.shifted], clean[row, start + n])
        if blocks.causal:
            causal = np.tril(np.ones((LENGTH, LENGTH), bool))
            logits = self_speculation_numpy.Model(model.fields, tensors).logits(clean[row].tolist(), causal)
            expected += sum(weights[row, n + 1] * cross_entropy(logits[n], clean[row, n + 1]) for n in range(LENGTH - 1))
    np.testing.assert_allclose(float(loss), expected / float(total), rtol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_masks_are_spread_over_responses(name: str):
    """On average each response token has its weight; prompts, and tokens that decoding gives, are never masked."""
    config = CASES[name]
    blocks = config.masked_blocks
    assert blocks is not None
    model = block_denoiser(config)
    batch = small_batch(64)
    keys = jax.random.split(jax.random.key(1), 400)
    predicted = jax.jit(jax.vmap(lambda key: model.predict(batch, key)))(keys)
    masked = np.asarray(predicted.inputs)[:, :, LENGTH:] == MASK
    weights = weights_of(batch)
    assert not masked[:, weights == 0].any()
    given = np.asarray(predicted.weights)[:, :, LENGTH:].mean(axis=0)
    if blocks.shifted:
        given = np.concatenate([np.zeros((len(given), 1)), given[:, :-1]], axis=1)
    share = 1 - 1 / BLOCK if blocks.causal else 1.0
    np.testing.assert_allclose(given[weights == 1].mean(), share, rtol=0.02)
    np.testing.assert_allclose(given[weights == PADDING_WEIGHT].mean(), share * PADDING_WEIGHT, rtol=0.02)
    for key, found in zip(keys[:20], masked[:20], strict=True):
        number = blocks_of(model, key, found)
        whole = [found[row, start:end] for row in range(64) for start, end in edges(number[row]) if end - start == BLOCK]
        assert not blocks.causal or not any(each[0] for each in whole)
        assert any(each[1:].all() for each in whole)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="expected a model whose blocks are denoised, found one of the family llama"):
        block_denoiser(decoder_config("llama", *SIZES))
