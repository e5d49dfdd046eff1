"""The DFlash 2 recipe: both losses against NumPy, what learns at once and what later, and a selector that comes to speak."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.dflash2_numpy import Drafter2, block_losses
from reference.dflash_numpy import Target
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, dflash2
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.params import to_tensors
from tilewright.train.dflash2 import DFlash2Options, drafter_losses, hidden_matrices, initial_params, train_dflash2
from tilewright.train.drafter import Frozen, draw_blocks
from train.support import DRAFTER, TARGET, counting_stream, drawing, kept_target, options, silent

CONFIG = DFlash2Config(**vars(DRAFTER), conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=3)
SLIDING = replace(
    CONFIG,
    sliding_window=5,
    sliding_layers=(1,),
    output_multiplier=0.5,
    final_logit_softcapping=10.0,
    input_embedding_scale=0.8,
)
SIZE = CONFIG.block_size


@cache
def random_params(config: DFlash2Config = CONFIG) -> Any:
    """Larger than those that training starts from, and the additions at work."""
    params = dflash2.fresh(config, jax.random.key(1))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    noisy = [8 * x + jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype) if x.ndim == 2 else x for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def batch_of(seed: int, rows: int = 3, length: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 24, (rows, length)).astype(np.int32), rng.random((rows, length)) < 0.9


def reference(config: DFlash2Config) -> Drafter2:
    target = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), kept_target(), jnp.float32)))
    return Drafter2(
        dflash2.config_to_hf(config), dict(to_tensors(dflash2.declare(config), random_params(), jnp.float32)), target
    )


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["plain", "sliding"])
def test_both_losses_equal_the_reference(config: DFlash2Config):
    """Of blocks at every place, some of which pass the text's end or the sequence's; the right token is often no candidate."""
    (tokens, in_loss), chosen, key = batch_of(5), DFlash2Options(anchors=4, gamma=2.0), jax.random.key(7)
    losses = jax.jit(partial(drawing(drafter_losses), TARGET, config, chosen, PLAIN))
    backbone, selector, total = losses(random_params(), Frozen(kept_target()), (jnp.asarray(tokens), jnp.asarray(in_loss)), key)
    blocks = draw_blocks(TARGET, config, chosen, (jnp.asarray(tokens), jnp.asarray(in_loss)), key)
    anchors = np.asarray(blocks.anchors)
    weights = np.asarray(blocks.weights).reshape(3, 4, SIZE - 1)
    second = reference(config)
    sums = np.zeros(3)
    for row in range(3):
        features = second.context_features(second.target.run(tokens[row].tolist())[1], range(16))
        for n, anchor in enumerate(anchors[row]):
            hidden = second.normed(second.hidden(int(tokens[row, anchor]), features, int(anchor), None, SIZE))[1:]
            text = [*tokens[row, anchor : anchor + SIZE].tolist(), *[0] * SIZE][:SIZE]
            found = block_losses(second, hidden, text, (weights[row, n] > 0).tolist(), 2.0)
            sums += [found.backbone, found.selector, found.weight]
    assert float(total) == pytest.approx(sums[2], rel=1e-5)
    assert float(backbone) == pytest.approx(sums[0] / sums[2], rel=1e-4)
    assert float(selector) == pytest.approx(sums[1] / sums[2], rel=1e-4)


def test_a_batch_without_anchors_has_loss_zero():
    batch = (jnp.asarray(batch_of(0)[0]), jnp.zeros((3, 16), bool))
    found = jax.jit(partial(drawing(drafter_losses), TARGET, CONFIG, DFlash2Options(anchors=4), PLAIN))(
        random_params(), Frozen(kept_target()), batch, jax.random.key(0)
    )
    assert [float(x) for x in found] == [0.0, 0.0, 0.0]


def test_a_fresh_drafter_starts_as_dflash_and_learns_everywhere():
    """Its selector says nothing yet, so that its gradient begins with the successors."""
    params = initial_params(TARGET, CONFIG, kept_target(), jax.random.key(3))
    np.testing.assert_array_equal(params.backbone.norm, kept_target().norm)
    tokens = jnp.asarray(batch_of(6, rows=2)[0])
    batch = (tokens, jnp.ones(tokens.shape, bool))

    def loss(params: Any, target: Any) -> jax.Array:
        frozen = Frozen(target)
        key = jax.random.key(0)
        found = drawing(drafter_losses)(TARGET, CONFIG, DFlash2Options(anchors=4), PLAIN, params, frozen, batch, key)
        return found[0] + found[1]

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    gradient, targets = grad(params, kept_target())
    selector = gradient.selector
    assert float(jnp.abs(selector.successor).max()) > 0
    assert float(jnp.abs(selector.predecessor).max()) == float(jnp.abs(selector.projection).max()) == 0
    others = jax.tree.leaves((gradient.backbone, gradient.attention_convs, gradient.mlp_convs))
    assert all(float(jnp.abs(g).max()) > 0 for g in others), "all of them learn at once"
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(targets.layers))
    later, _ = grad(random_params(), kept_target())
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(later))


def test_the_selectors_loss_reaches_the_backbone():
    tokens = jnp.asarray(batch_of(6, rows=2)[0])
    batch = (tokens, jnp.ones(tokens.shape, bool))

    def loss(params: Any) -> jax.Array:
        return drawing(drafter_losses)(
            TARGET, CONFIG, DFlash2Options(anchors=4), PLAIN, params, Frozen(kept_target()), batch, jax.random.key(0)
        )[1]

    gradient = jax.jit(jax.grad(loss))(random_params())
    assert float(jnp.abs(gradient.backbone.fc).max()) > 0


def test_hidden_matrices_are_neither_norms_nor_codebooks_nor_kernels():
    hidden = hidden_matrices(random_params())
    assert hidden.backbone.fc
    assert hidden.selector.projection
    assert hidden.attention_convs[0].kernel_projection
    others = (hidden.selector.predecessor, hidden.selector.successor, hidden.mlp_convs[1].base_kernel, hidden.backbone.norm)
    assert not any(others)


def test_training_brings_the_selector_to_speak(tmp_path: Path):
    """On a text that goes round; the run can be resumed, and its target stays as it is."""
    stream = counting_stream(600)
    chosen = options(steps=30, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=15, save_every=30)
    frozen = jax.tree.map(np.asarray, kept_target())
    arguments = (TARGET, kept_target(), CONFIG, stream, stream, chosen, DFlash2Options(anchors=8), tmp_path / "run", silent())
    result = train_dflash2(*arguments)
    jax.tree.map(np.testing.assert_array_equal, kept_target(), frozen)
    assert result.curve["held_out_loss"][0] > 1.5 * result.last("held_out_loss")
    assert float(jnp.abs(result.params.selector.successor).max()) > 0.01
    again = train_dflash2(*arguments)
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)


def test_options_out_of_range_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="a selector weight of at least 0, found -1"):
        DFlash2Options(selector_weight=-1.0)
    with pytest.raises(ValueError, match="at least 1 anchor, found 0"):
        DFlash2Options(anchors=0)
    stream = counting_stream(600)
    with pytest.raises(ValueError, match="expected fewer anchors than the sequence length 16, found 16"):
        train_dflash2(TARGET, kept_target(), CONFIG, stream, stream, options(), DFlash2Options(16), tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()
