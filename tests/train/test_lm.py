"""Next-token training: the loss, what is in it, its gradient, and which arrays Muon takes."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.dflash_numpy import Target
from tilewright.kernels import native
from tilewright.kernels.delta_rule import reference as delta_reference
from tilewright.kernels.select import PLAIN, training_operations
from tilewright.models import decoder
from tilewright.models.params import abstract, initialise, spec_leaves, to_tensors
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.train.data import TokenStream
from tilewright.train.lm import hidden_matrices, language_model, next_token_loss, next_tokens, train_lm
from tilewright.train.sharded import prediction_loss
from tilewright.train.step import ONE_DEVICE, TrainingPlacement, compiled_step, training_mesh
from tilewright.train.text import HELD_OUT_BATCHES, Windows, make_optimizer
from train.support import HYBRID, TARGET, counting_stream, options, random_stream, silent, target_params

UNTIED = replace(TARGET, tie_word_embeddings=False)


def batch(seed: int = 0, rows: int = 3, length: int = 9) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 24, (rows, length)).astype(np.int32), rng.random((rows, length)) < 0.6


def reference_losses(config: decoder.DecoderConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    """-log p of every token but the first, `[B, T - 1]`, in NumPy float64."""
    target = Target(decoder.config_to_hf(config), dict(to_tensors(decoder.declare(config), params, jnp.float32)))
    losses = []
    for row in tokens:
        logits = target.run(row[:-1])[0]
        best = logits.max(axis=1, keepdims=True)
        log_p = logits - best - np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
        losses.append(-log_p[np.arange(len(row) - 1), row[1:]])
    return np.stack(losses)


@pytest.mark.parametrize("config", [TARGET, UNTIED], ids=["tied", "untied"])
def test_loss_is_the_mean_cross_entropy_of_what_is_in_it(config: decoder.DecoderConfig):
    params, (tokens, flags) = target_params(config), batch()
    each = reference_losses(config, params, tokens)
    loss, count = jax.jit(partial(next_token_loss, config, PLAIN))(params, jnp.asarray(tokens), jnp.asarray(flags))
    assert float(count) == flags[:, 1:].sum()
    assert each.std() > 0.5, "the tokens must differ in their loss"
    np.testing.assert_allclose(float(loss), each[flags[:, 1:]].mean(), rtol=1e-4)


def test_capped_logits_are_those_of_the_loss():
    config = replace(UNTIED, logit_softcap=2.0)
    params, (tokens, flags) = target_params(config), batch()

    def plain(params: Any) -> Any:
        hidden = decoder.forward_full(config, PLAIN, params, jnp.asarray(tokens)[:, :-1]).hidden
        log_p = jax.nn.log_softmax(decoder.logits(config, PLAIN, params, hidden))
        return -jnp.take_along_axis(log_p, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]

    each = np.asarray(jax.jit(plain)(params))[flags[:, 1:]]
    loss, _ = jax.jit(partial(next_token_loss, config, PLAIN))(params, jnp.asarray(tokens), jnp.asarray(flags))
    np.testing.assert_allclose(float(loss), each.mean(), rtol=1e-5)
    assert each.max() < 4 + np.log(24)
    assert reference_losses(config, params, tokens).max() > each.max() + 1, "the cap shows"


def test_a_hybrid_is_trained_by_the_gradient_of_its_steps_of_one_position():
    """Its chunks and the bundle that trains on this CPU have the gradient of the rule as it is defined, for every array."""
    params = initialise(decoder.declare(HYBRID), jax.random.key(0))
    tokens, flags = map(jnp.asarray, batch(2, rows=2, length=12))
    by_position = replace(PLAIN, delta_rule=lambda *operands, by_position: delta_reference.delta_rule(*operands))
    (want, _), gradient = jax.jit(jax.value_and_grad(partial(next_token_loss, HYBRID, by_position), has_aux=True))(
        params, tokens, flags
    )
    assert all(float(jnp.max(jnp.abs(part))) > 1e-6 for part in jax.tree.leaves(gradient))
    trained = jax.jit(jax.value_and_grad(partial(next_token_loss, HYBRID, training_operations("float32")), has_aux=True))
    (loss, _), found = trained(params, tokens, flags)
    np.testing.assert_allclose(float(loss), float(want), rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4 * float(jnp.max(jnp.abs(other))))


def test_a_batch_without_predictions_has_loss_zero():
    tokens, _ = batch()
    loss_of = jax.jit(partial(next_token_loss, TARGET, PLAIN))
    loss, count = loss_of(target_params(), jnp.asarray(tokens), jnp.zeros(tokens.shape, bool))
    assert (float(loss), float(count)) == (0.0, 0.0)


def test_gradient_is_that_of_the_loss():
    """Along random directions, against central differences of the float64 loss."""
    params, (tokens, flags) = target_params(), batch(1)

    def loss_of(params: Any) -> jax.Array:
        return next_token_loss(TARGET, PLAIN, params, jnp.asarray(tokens), jnp.asarray(flags))[0]

    gradient = jax.jit(jax.grad(loss_of))(params)
    rng = np.random.default_rng(0)
    for _ in range(3):
        direction = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params)
        slope = sum(float(np.vdot(g, d)) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
        step = 2e-4

        def moved(by: float, direction: Any = direction) -> np.ndarray:
            return reference_losses(TARGET, jax.tree.map(lambda x, y: np.asarray(x) + by * y, params, direction), tokens)

        numeric = (moved(step) - moved(-step))[flags[:, 1:]].mean() / (2 * step)
        np.testing.assert_allclose(slope, numeric, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("config", [TARGET, UNTIED], ids=["tied", "untied"])
def test_hidden_matrices_are_those_of_the_layers(config: decoder.DecoderConfig):
    params = target_params(config)
    flags = jax.tree.leaves(hidden_matrices(params))
    names = {spec.name for spec, flag in zip(spec_leaves(decoder.declare(config)), flags, strict=True) if flag}
    kinds = [f"self_attn.{which}_proj" for which in "qkvo"] + [f"mlp.{which}_proj" for which in ("gate", "up", "down")]
    assert names == {f"model.layers.{n}.{kind}.weight" for n in range(2) for kind in kinds}
    assert jax.tree.structure(hidden_matrices(params)) == jax.tree.structure(params)


def test_held_out_batches_are_always_the_same():
    stream = random_stream(300)
    first, again = (Windows(random_stream(50), stream, 16, options()).held_out_batches() for _ in range(2))
    assert len(first) == len(again) > 3
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    assert len(Windows(stream, random_stream(3000), 16, options()).held_out_batches()) == HELD_OUT_BATCHES


def test_training_learns_a_text_that_repeats(tmp_path: Path):
    stream = counting_stream()
    result = train_lm(TARGET, stream, stream, options(steps=40, learning_rate=1e-2, evaluate_every=20), tmp_path, silent())
    assert result.curve["held_out_loss"][0] < np.log(24)
    assert result.last("held_out_loss") < 0.2
    tokens = jnp.asarray(stream.tokens[None, :30])
    logits = decoder.logits(TARGET, PLAIN, result.params, decoder.forward_full(TARGET, PLAIN, result.params, tokens).hidden)
    np.testing.assert_array_equal(jnp.argmax(logits[0, :-1], axis=-1), tokens[0, 1:])


def test_too_little_text_is_refused_before_anything_is_written(tmp_path: Path):
    short, given = (TokenStream(np.ones(50, np.int32), np.full(50, in_loss)) for in_loss in (True, False))
    with pytest.raises(
        ValueError, match="expected at least 51 tokens in the training text, for a batch of 2 windows of 17, found 50"
    ):
        train_lm(TARGET, short, counting_stream(), options(), tmp_path / "out", silent())
    with pytest.raises(ValueError, match="expected tokens in the loss in the held-out text, found none among 50"):
        train_lm(TARGET, counting_stream(), given, options(), tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()


def test_the_loss_of_several_steps_is_the_mean_over_their_tokens(tmp_path: Path):
    """A window that is all given has no part in it."""
    stream = TokenStream(random_stream(120).tokens, np.arange(120) >= 68)
    fixed = options(steps=4, learning_rate=1e-12, weight_decay=0.0, batch_size=1, evaluate_every=4, matmul_dtype="float32")
    result = train_lm(TARGET, stream, stream, fixed, tmp_path, silent())
    batches = Windows(stream, stream, 17, fixed).batches(0)
    parts = [next_token_loss(TARGET, PLAIN, result.params, *map(jnp.asarray, next(batches))) for _ in range(4)]
    losses, tokens = np.asarray(parts).T
    assert 0 in tokens
    np.testing.assert_allclose(result.last("loss"), (losses * tokens).sum() / tokens.sum(), rtol=1e-4)


def test_a_short_held_out_text_fills_a_batch():
    """Rows and ends of rows that it does not fill are not in the loss; each of its tokens but windows' first ones is."""
    stream = TokenStream(np.arange(1, 21, dtype=np.int32), np.arange(20) != 4)
    ((tokens, in_loss),) = Windows(counting_stream(), stream, 17, options(batch_size=4)).held_out_batches()
    assert tokens.shape == (4, 17)
    assert sorted(tokens[in_loss].tolist()) == [n for n in range(1, 21) if n != 5]
    (mine,) = Windows(counting_stream(), stream, 17, options(batch_size=4), np.asarray([1])).held_out_batches()
    np.testing.assert_array_equal(mine[0], tokens[1:2])


def documents(lengths: Sequence[int], seed: int = 0) -> TokenStream:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 24, sum(lengths)).astype(np.int32)
    return TokenStream(tokens, rng.random(len(tokens)) < 0.8, np.repeat(np.arange(len(lengths)), lengths).astype(np.int32))


def loss_apart(config: decoder.DecoderConfig, params: Any, batch: Sequence[np.ndarray]) -> float:
    """Mean loss over the documents of a batch of windows, each in a row of its own with padding behind it."""
    rows = [
        np.stack([np.resize(part[numbers == number], 17) for part in (tokens, in_loss)])
        * (np.arange(17) < np.sum(numbers == number))
        for tokens, in_loss, numbers in zip(*batch, strict=True)
        for number in np.unique(numbers)
    ]
    tokens, in_loss = np.stack(rows, axis=1)
    return float(jax.jit(partial(next_token_loss, config, PLAIN))(params, tokens, in_loss.astype(bool))[0])


@pytest.mark.parametrize(
    ("strategy", "window"),
    [("xla", None), ("here", 4), ("mesh", 4), ("here", None), ("mesh", None)],
)
def test_documents_of_a_sequence_do_not_see_each_other(strategy: str, window: int | None):
    """The loss of windows with several documents is that of each document by itself."""
    sliding = {} if window is None else {"family": "smollm3", "sliding_window": window, "sliding_layers": (0,)}
    config = replace(TARGET, **{"num_kv_heads": 4, **sliding})
    params = target_params(config)
    stream = documents((5, 9, 3, 17, 1, 12, 7, 20, 6, 8) * 2)
    windows = Windows(stream, stream, 17, options(batch_size=4, sequence_length=16), segments=True)
    batch = next(windows.batches(0))
    assert len(batch) == 3
    assert all(len(np.unique(row)) > 1 for row in batch[2])
    model = language_model(config)
    placement = ONE_DEVICE
    if strategy == "mesh":
        placement = TrainingPlacement(training_mesh({"fsdp": 2, "tp": 2}, config), FullyShardedPlan())
        params = jax.device_put(params, placement.shardings(model.specs))
    loss = prediction_loss(model, training_operations("float32") if strategy == "here" else PLAIN, placement)
    found, weight = jax.jit(lambda p, batch: loss(p, None, model.predict(batch, jax.random.key(0))))(params, batch)
    same = batch[2][:, 1:] == batch[2][:, :-1]
    assert float(weight) == (batch[1][:, 1:] & same).sum()
    assert float(found) == pytest.approx(loss_apart(config, target_params(config), batch), rel=1e-5)


def test_positions_begin_anew_with_each_segment():
    tokens, in_loss = batch(rows=2, length=9)
    segments = np.asarray([[1, 1, 1, 2, 3, 3, 3, 3, 3], [7, 7, 7, 7, 1, 1, 0, 0, 0]], np.int32)
    predicted = next_tokens(jnp.asarray(tokens), jnp.asarray(in_loss), jnp.asarray(segments))
    np.testing.assert_array_equal(predicted.places, [[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 0, 1]])
    np.testing.assert_array_equal(next_tokens(jnp.asarray(tokens), jnp.asarray(in_loss)).places, [np.arange(8)] * 2)


def test_segments_need_documents_and_attention(tmp_path: Path):
    stream = documents((40, 60, 80))
    with pytest.raises(ValueError, match="without linear attention for --text segments=true, found one with it"):
        train_lm(HYBRID, stream, stream, options(), tmp_path, silent(), segments=True)
    with pytest.raises(ValueError, match="expected text whose documents are known for segments, found joined text"):
        train_lm(TARGET, counting_stream(), stream, options(), tmp_path, silent(), segments=True)
    apart, joined = (Windows(stream, stream, 17, options(), segments=flag).run_fingerprint() for flag in (True, False))
    assert apart.pop("segments")
    assert apart == joined, "checkpoints of runs without segments go on"


@pytest.mark.skipif(native.kernels().isa is None, reason=native.kernels().reason or "no kernels")
@pytest.mark.parametrize("segments", [False, True])
def test_no_scores_of_all_pairs_of_positions_are_in_memory(segments: bool):
    """In the compiled step no array has two dims of the sequence's length, which no other size has."""
    config = replace(TARGET, head_dim=16)
    length = 211
    model = language_model(config)
    ops = training_operations("float32")
    chosen = options(sequence_length=length)
    step = compiled_step(
        lambda params, _, drawn: model.loss(ops, params, drawn),
        make_optimizer(chosen, hidden_matrices, ops),
        draw=lambda _, batch, key: model.predict(batch, key),
    )
    params = abstract(model.specs, jnp.float32)
    state = jax.eval_shape(make_optimizer(chosen, hidden_matrices, ops).init, params)
    shape = (2, length + 1)
    batch = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_, jnp.int32)]
    text = step.lower(params, state, None, batch[: 3 if segments else 2], jax.random.key(0)).compile().as_text()
    shapes = [found.split(",") for found in re.findall(r"\w+\[([\d,]+)\]", text)]
    assert any(str(length) in each for each in shapes)
    assert not [each for each in shapes if each.count(str(length)) > 1]
