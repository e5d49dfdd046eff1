"""The LiLiCorr recipe: its losses against NumPy, what learns from them, and a lattice that comes to tell candidates apart."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.dflash_numpy import Target
from reference.lilicorr_numpy import LiLiCorr, block_losses
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, dflash, lilicorr
from tilewright.models.checkpoint import read_config
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.params import initialise, to_tensors
from tilewright.speculation.drafters.load import load_dflash
from tilewright.train.drafter import Frozen, draw_blocks, frozen_inputs, save_drafter
from tilewright.train.lilicorr import (
    LiLiCorrOptions,
    drafter_losses,
    hidden_matrices,
    initial_params,
    target_logits,
    train_lilicorr,
)
from train.support import DRAFTER, TARGET, counting_stream, drawing, kept_target, options, silent, target_params

CONFIG = LiLiCorrConfig(
    **vars(DRAFTER),
    candidate_top_k=5,
    lattice_size=12,
    lattice_layers=2,
    lattice_heads=3,
    mlp_ratio=1.5,
    vector_size=8,
    vector_eps=1e-4,
    logit_scale=8.0,
)
CONV = replace(CONFIG, conv_kernel_size=2, conv_group_size=8)
SIZE = CONFIG.block_size


@cache
def random_params(config: LiLiCorrConfig = CONFIG) -> Any:
    """Larger than those that training starts from, and none of them zero."""
    leaves, tree = jax.tree.flatten(initialise(lilicorr.declare(config), jax.random.key(1)))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) for x in leaves])


def batch_of(seed: int, rows: int = 3, length: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 24, (rows, length)).astype(np.int32), rng.random((rows, length)) < 0.95


@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["plain", "with convolutions"])
def test_all_losses_equal_the_reference(config: LiLiCorrConfig):
    """Of blocks at every place, also at the beginning, which has no anchor; the right tokens often are no candidates."""
    params = random_params(config)
    tokens, in_loss = batch_of(5, rows=6)
    chosen = LiLiCorrOptions(anchors=12, gamma=2.0)
    key = jax.random.key(7)
    batch = (jnp.asarray(tokens), jnp.asarray(in_loss))
    found = jax.jit(partial(drawing(drafter_losses), TARGET, config, chosen, PLAIN))(params, Frozen(kept_target()), batch, key)
    blocks = draw_blocks(TARGET, config, chosen, batch, key)
    anchors = np.asarray(blocks.anchors)
    weights = np.asarray(blocks.weights).reshape(6, 12, SIZE - 1)
    assert (anchors == 0).any()
    target = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), kept_target(), jnp.float32)))
    tensors = dict(to_tensors(lilicorr.declare(config), params, jnp.float32))
    drafter = LiLiCorr(lilicorr.config_to_hf(config), tensors, target)
    sums = np.zeros(5)
    longest = 0
    for row in range(6):
        logits, after = target.run(tokens[row].tolist())
        features = drafter.context_features(after, range(16))
        for n, anchor in enumerate(anchors[row]):
            hidden = drafter.block_hidden(int(tokens[row, anchor]), features, int(anchor))
            said = logits[np.minimum(anchor + np.arange(SIZE - 1), 15)]
            text = [*tokens[row, anchor : anchor + SIZE].tolist(), *[0] * SIZE][:SIZE]
            before = features[anchor - 1] if anchor > 0 else None
            losses = block_losses(drafter, hidden, said, before, text, (weights[row, n] > 0).tolist(), 2.0)
            sums += [losses.backbone, losses.weight, losses.lattice, losses.penalty, losses.count]
            longest = max(longest, losses.count)
    assert longest >= 2, "some right tokens are candidates, and those behind them too"
    backbone, lattice, penalty, total = map(float, found)
    assert total == pytest.approx(sums[1], rel=1e-5)
    assert backbone == pytest.approx(sums[0] / sums[1], rel=1e-4)
    assert lattice == pytest.approx(sums[2] / sums[4], rel=1e-3)
    assert penalty == pytest.approx(sums[3] / sums[4], rel=1e-3)


@pytest.mark.parametrize(("tied", "cap"), [(True, None), (False, 2.0)])
def test_the_targets_logits_of_candidates_are_its_own(tied: bool, cap: float | None):
    target = replace(TARGET, logit_softcap=cap)
    params = kept_target() if tied else target_params(replace(TARGET, tie_word_embeddings=False))
    stream = jax.random.normal(jax.random.key(0), (2, 3, 32))
    candidates = jax.random.randint(jax.random.key(1), (2, 3, 4), 0, 24)
    want = jnp.take_along_axis(decoder.logits(target, PLAIN, params, stream), candidates, axis=-1)
    found = target_logits(target, PLAIN, Frozen(params), stream, candidates)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    some = frozen_inputs(replace(CONFIG, draft_vocab_size=6), params, counting_stream())
    assert some.vocab is not None
    found = target_logits(target, PLAIN, some, stream, candidates % 6)
    want = jnp.take_along_axis(decoder.logits(target, PLAIN, params, stream), some.vocab.ids[candidates % 6], axis=-1)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_a_batch_without_anchors_has_loss_zero():
    batch = (jnp.asarray(batch_of(0)[0]), jnp.zeros((3, 16), bool))
    run = jax.jit(partial(drawing(drafter_losses), TARGET, CONFIG, LiLiCorrOptions(anchors=4), PLAIN))
    assert [float(x) for x in run(random_params(), Frozen(kept_target()), batch, jax.random.key(0))] == [0.0] * 4


def test_the_lattices_losses_reach_everything_that_they_read():
    tokens = jnp.asarray(batch_of(6, rows=8)[0])
    batch = (tokens, jnp.ones(tokens.shape, bool))

    def loss(part: int, params: Any) -> jax.Array:
        options = LiLiCorrOptions(anchors=12)
        return drawing(drafter_losses)(TARGET, CONFIG, options, PLAIN, params, Frozen(kept_target()), batch, jax.random.key(0))[
            part
        ]

    for part in (1, 2):
        grads = jax.jit(jax.grad(partial(loss, part)))(random_params())
        moved = [float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads.lattice)]
        assert all(moved), "the whole lattice learns"
        assert float(jnp.abs(grads.backbone.fc).max()) > 0, "and the backbone by it"
    grads = jax.jit(jax.grad(partial(loss, 0)))(random_params())
    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(grads.lattice))


def test_hidden_matrices_are_neither_norms_nor_biases_nor_tables():
    hidden = hidden_matrices(CONFIG, random_params())
    assert all((hidden.backbone.fc, hidden.lattice.out.weight, hidden.lattice.layers[1].qkv.weight))
    tables = (hidden.lattice.slots, hidden.lattice.ranks, hidden.lattice.slot_bias, hidden.lattice.same_slot_bias)
    assert not any((*tables, hidden.lattice.out.bias, hidden.lattice.norm, hidden.backbone.norm))


@pytest.mark.parametrize("vocab", [None, 8])
def test_training_brings_the_lattice_to_tell_candidates_apart(tmp_path: Path, vocab: int | None):
    """On a text that goes round; what is saved is what was trained, and the run can be resumed."""
    config = CONFIG if vocab is None else replace(CONV, draft_vocab_size=vocab)
    stream = counting_stream(600)
    chosen = options(steps=40, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=20, save_every=40)
    drafter_options = LiLiCorrOptions(anchors=8)
    arguments = (TARGET, kept_target(), config, stream, stream, chosen, drafter_options, tmp_path / "run", silent())
    result = train_lilicorr(*arguments)
    assert result.curve["held_out_loss"][0] > 1.5 * result.last("held_out_loss")
    batch = tuple(jnp.asarray(part) for part in next(stream.windows(32, 4, 0, 0)))
    losses = jax.jit(partial(drawing(drafter_losses), TARGET, config, drafter_options, PLAIN))
    frozen = frozen_inputs(config, kept_target(), stream)
    fresh = initial_params(TARGET, config, kept_target(), jax.random.key(0))
    trained = dflash.with_vocab(result.params, None)
    if vocab is not None:
        assert float(fresh.attention_convs[0].base_kernel[0, 0].min()) == 1, "convolutions begin as if there were none"
    before, after = (losses(params, frozen, batch, jax.random.key(1)) for params in (fresh, trained))
    assert float(before[1]) > 1, "at first it knows nothing: the logarithm of five"
    assert float(after[1]) < 0.3
    again = train_lilicorr(*arguments)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
    folder = tmp_path / "saved"
    save_drafter(folder, lilicorr, config, result.params, jnp.float32)
    found, params = load_dflash(folder, read_config(folder), TARGET, "float32", None)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, dflash.with_vocab(params, None), trained)
    if vocab is not None:
        np.testing.assert_array_equal(params.backbone.vocab.ids, result.params.backbone.vocab.ids)


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="a lattice weight of at least 0, found -1"):
        LiLiCorrOptions(lattice_weight=-1.0)
    with pytest.raises(ValueError, match="a penalty weight of at least 0, found -1"):
        LiLiCorrOptions(penalty_weight=-1.0)
