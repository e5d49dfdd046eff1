"""The DSpark recipe: both losses against NumPy, what learns at once and what later, and a serial head that comes to speak."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.dflash_numpy import Target
from reference.dspark_numpy import DSpark, block_losses
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, dflash, dspark
from tilewright.models.checkpoint import read_config
from tilewright.models.dspark import DSparkConfig
from tilewright.models.params import initialise, to_tensors
from tilewright.speculation.drafters.load import load_dflash
from tilewright.train.drafter import Frozen, draw_blocks, frozen_inputs, save_drafter
from tilewright.train.dspark import DSparkOptions, drafter_losses, hidden_matrices, train_dspark
from train.support import DRAFTER, TARGET, counting_stream, drawing, options, silent, target_params

CONFIG = DSparkConfig(**{**vars(DRAFTER), "sample_from_anchor": True}, markov_rank=6, candidate_top_k=3)
BEHIND = replace(CONFIG, sample_from_anchor=False)
TARGET_PARAMS = target_params()
SIZE = CONFIG.block_size
FROZEN = Frozen(TARGET_PARAMS)


def random_params(config: DSparkConfig) -> Any:
    """Larger than those that training starts from, and the serial head at work."""
    leaves, tree = jax.tree.flatten(initialise(dspark.declare(config), jax.random.key(1)))
    rng = np.random.default_rng(0)
    noisy = [8 * x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if x.ndim == 2 else x for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def batch_of(seed: int, rows: int = 3, length: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 24, (rows, length)).astype(np.int32), rng.random((rows, length)) < 0.9


class Behind(DSpark):
    """One whose slot 0 drafts nothing."""

    first_slot = 1


@pytest.mark.parametrize(("config", "cap"), [(CONFIG, None), (BEHIND, 2.0)], ids=["first slot", "behind it, capped target"])
def test_both_losses_equal_the_reference(config: DSparkConfig, cap: float | None):
    """Of blocks at every place, some of which pass the text's end or the sequence's."""
    params, (tokens, in_loss) = random_params(config), batch_of(5)
    chosen = DSparkOptions(anchors=4, gamma=2.0)
    key = jax.random.key(7)
    batch = (jnp.asarray(tokens), jnp.asarray(in_loss))
    capped = replace(TARGET, logit_softcap=cap)
    nll, l1, total = jax.jit(partial(drawing(drafter_losses), capped, config, chosen, PLAIN))(params, FROZEN, batch, key)
    blocks = draw_blocks(TARGET, config, chosen, batch, key)
    anchors = np.asarray(blocks.anchors)
    weights = np.asarray(blocks.weights).reshape(3, 4, SIZE - 1)
    target = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), TARGET_PARAMS, jnp.float32)))
    fields = dspark.config_to_hf(config)
    tensors = dict(to_tensors(dspark.declare(config), params, jnp.float32))
    drafter = (DSpark if config.first_slot == 0 else Behind)(fields, tensors, target)
    sums = np.zeros(3)
    for row in range(3):
        logits, after = target.run(tokens[row].tolist())
        features = drafter.context_features(after, range(16))
        for n, anchor in enumerate(anchors[row]):
            hidden = drafter.block_hidden(int(tokens[row, anchor]), features, int(anchor))
            assert len(hidden) == SIZE - 1
            said = logits[np.minimum(anchor + np.arange(SIZE - 1), 15)]
            said = said if cap is None else cap * np.tanh(said / cap)
            text = [*tokens[row, anchor : anchor + SIZE].tolist(), *[0] * SIZE][:SIZE]
            found = block_losses(drafter, hidden, said, text, (weights[row, n] > 0).tolist(), 2.0)
            sums += [found.nll, found.l1, found.weight]
    assert float(total) == pytest.approx(sums[2], rel=1e-5)
    assert float(nll) == pytest.approx(sums[0] / sums[2], rel=1e-4)
    assert float(l1) == pytest.approx(sums[1] / sums[2], rel=1e-4)


def test_a_batch_without_anchors_has_loss_zero():
    batch = (jnp.asarray(batch_of(0)[0]), jnp.zeros((3, 16), bool))
    run = jax.jit(partial(drawing(drafter_losses), TARGET, CONFIG, DSparkOptions(anchors=4), PLAIN))
    assert [float(x) for x in run(random_params(CONFIG), FROZEN, batch, jax.random.key(0))] == [0.0, 0.0, 0.0]


def test_all_parts_learn_and_the_target_does_not():
    """A fresh serial head adds nothing, so that it begins to learn with what follows a token."""
    tokens = jnp.asarray(batch_of(6, rows=2)[0])
    batch = (tokens, jnp.ones(tokens.shape, bool))

    def loss(params: Any) -> jax.Array:
        found = drawing(drafter_losses)(
            TARGET, CONFIG, DSparkOptions(anchors=4), PLAIN, params, FROZEN, batch, jax.random.key(0)
        )
        return found[0] + found[1]

    grad = jax.jit(jax.grad(loss))
    gradient = grad(initialise(dspark.declare(CONFIG), jax.random.key(3)))
    assert float(jnp.abs(gradient.selector.successor).max()) > 0
    assert float(jnp.abs(gradient.selector.predecessor).max()) == 0
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient.backbone))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grad(random_params(CONFIG))))


def test_hidden_matrices_are_neither_norms_nor_the_serial_heads():
    hidden = hidden_matrices(random_params(CONFIG))
    assert hidden.backbone.fc
    assert not any((hidden.selector.predecessor, hidden.selector.successor, hidden.backbone.norm))


def test_a_draft_vocabulary_leaves_out_what_it_has_not():
    """The losses are those over the whole vocabulary where it has all tokens, in another order or not."""
    stream, (tokens, in_loss) = counting_stream(600, period=23), batch_of(5)
    batch = (jnp.asarray(tokens), jnp.asarray(in_loss))
    small = replace(CONFIG, draft_vocab_size=6)
    whole = replace(CONFIG, draft_vocab_size=24)
    for config in (small, whole):
        frozen = frozen_inputs(config, TARGET_PARAMS, stream)
        chosen = DSparkOptions(anchors=4)
        losses = jax.jit(partial(drawing(drafter_losses), TARGET, config, chosen, PLAIN))
        found = [float(x) for x in losses(random_params(config), frozen, batch, jax.random.key(7))]
        if config is whole:
            losses = jax.jit(partial(drawing(drafter_losses), TARGET, CONFIG, chosen, PLAIN))
            want = losses(random_params(CONFIG), FROZEN, batch, jax.random.key(7))
            np.testing.assert_allclose(found, [float(x) for x in want], rtol=1e-5)
        else:
            assert frozen.vocab is not None
            blocks = draw_blocks(TARGET, CONFIG, chosen, batch, jax.random.key(7))
            known = np.isin(blocks.labels, np.asarray(frozen.vocab.ids))
            assert found[2] == pytest.approx(float(np.sum(known * np.asarray(blocks.weights))), rel=1e-5)


@pytest.mark.parametrize(("share", "vocab"), [(0.0, None), (0.9, None), (0.9, 8)])
def test_training_brings_the_serial_head_to_speak(tmp_path: Path, share: float, vocab: int | None):
    """On a text that goes round, of which its target knows nothing; what is saved is what was trained, and goes on."""
    config = replace(CONFIG, draft_vocab_size=vocab)
    stream = counting_stream(600)
    chosen = options(steps=30, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=15, save_every=30)
    drafter_options = DSparkOptions(anchors=8, l1_weight=share)
    arguments = (TARGET, TARGET_PARAMS, config, stream, stream, chosen, drafter_options, tmp_path / "run", silent())
    result = train_dspark(*arguments)
    assert result.curve["held_out_loss"][0] > (1.05 if share else 1.5) * result.last("held_out_loss")
    assert float(jnp.abs(result.params.selector.successor).max()) > 0.01
    again = train_dspark(*arguments)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
    folder = tmp_path / "saved"
    save_drafter(folder, dspark, config, result.params, jnp.float32)
    found, params = load_dflash(folder, read_config(folder), TARGET, "float32", None)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, dflash.with_vocab(params, None), dflash.with_vocab(result.params, None))
    if vocab is not None:
        np.testing.assert_array_equal(params.backbone.vocab.ids, result.params.backbone.vocab.ids)
    again = train_dspark(*arguments[:-2], tmp_path / "on", silent(), start=params)
    assert again.curve["held_out_loss"][0] < result.curve["held_out_loss"][0]


def test_options_out_of_range_are_refused():
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"expected an L1 weight from 0 to 1, found {share}"):
            DSparkOptions(l1_weight=share)
    with pytest.raises(ValueError, match="at least 1 anchor, found 0"):
        DSparkOptions(anchors=0)
