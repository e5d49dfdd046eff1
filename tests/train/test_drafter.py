"""The DFlash recipe: anchors, labels, what a block sees, the loss, and that a drafter learns what its target says."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from reference.dflash_numpy import Drafter, Target
from tilewright.kernels.operations import Norm
from tilewright.kernels.select import PLAIN
from tilewright.llm.acceptance import tokens_per_round
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder, dflash
from tilewright.models.checkpoint import read_config
from tilewright.models.dflash import DFlashConfig
from tilewright.models.experts import Mixture
from tilewright.models.params import initialise, to_tensors
from tilewright.runtime import cache
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.speculation.drafters.dflash import DFlash
from tilewright.speculation.drafters.load import load_dflash
from tilewright.train import drafter
from tilewright.train.data import TokenStream
from tilewright.train.drafter import (
    AnchorBlocks,
    DFlashOptions,
    Frozen,
    acceptance_weights,
    block_labels,
    draft_logits,
    drafter_loss,
    draw_anchors,
    draw_blocks,
    frozen_inputs,
    hidden_matrices,
    train_drafter,
    warm_start,
)
from tilewright.train.lm import train_lm
from train.support import (
    DRAFTER,
    END,
    HYBRID,
    TARGET,
    counting_stream,
    drafter_params,
    drawing,
    options,
    random_stream,
    silent,
    target_params,
)

SIZE = DRAFTER.block_size
DENSE_HYBRID = replace(HYBRID, tie_word_embeddings=True, mixture=None, dense_layers=())
TARGET_PARAMS = target_params()
DRAFTER_PARAMS = drafter_params()
FROZEN = Frozen(TARGET_PARAMS)
compiled_logits = jax.jit(draft_logits, static_argnums=(0, 1, 2))


def random_tokens(seed: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 24, (rows, length)).astype(np.int32)


@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from([5, 14]))
def test_anchors_are_distinct_and_in_the_loss_with_their_successor(seed: int, share: float, anchors: int):
    """A row of twelve tokens has room for eleven, however many are asked for."""
    flags = np.random.default_rng(seed).random((3, 12)) < share
    positions, real = (np.asarray(x) for x in draw_anchors(jnp.asarray(flags), anchors, jax.random.key(seed)))
    assert positions.shape == real.shape == (3, min(anchors, 11))
    for row in range(3):
        chosen = positions[row][real[row]].tolist()
        candidates = {p for p in range(11) if flags[row, p] and flags[row, p + 1]}
        assert len(set(chosen)) == len(chosen) == min(anchors, len(candidates))
        assert set(chosen) <= candidates


def test_every_candidate_is_drawn_about_equally_often():
    flags = jnp.ones((1, 9), bool)
    drawn = jax.vmap(lambda key: draw_anchors(flags, 2, key)[0])(jax.random.split(jax.random.key(0), 2000))
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=9)
    assert counts[8] == 0, "nothing follows the last position"
    assert counts[:8].min() > 400, "500 are expected"
    assert counts[:8].max() < 600


def labels_of(tokens: np.ndarray, flags: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    labels, counted = block_labels(jnp.asarray(tokens), jnp.asarray(flags), jnp.asarray(anchors), SIZE, END)
    return np.asarray(labels), np.asarray(counted)


def plain_labels(tokens: np.ndarray, flags: np.ndarray, anchor: int, end: int) -> list[tuple[int, bool]]:
    """Token and whether it counts, slot by slot, of one block."""
    slots = []
    ended = False
    for position in range(anchor, anchor + SIZE):
        if position >= len(tokens):
            slots.append((-1, False))
            continue
        slots.append((int(tokens[position]), bool(flags[position]) and not ended))
        ended = ended or tokens[position] == end
    return slots


@given(st.integers(0, 1000))
def test_labels_equal_a_plain_loop(seed: int):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 4, (2, 10)).astype(np.int32)
    flags = rng.random((2, 10)) < 0.8
    anchors = rng.integers(0, 9, (2, 6)).astype(np.int32)
    labels, counted = labels_of(tokens, flags, anchors)
    for row in range(2):
        for n, anchor in enumerate(anchors[row]):
            for slot, (token, counts) in enumerate(plain_labels(tokens[row], flags[row], int(anchor), END)):
                assert counted[row, n, slot] == counts
                assert token == -1 or labels[row, n, slot] == token


def test_labels_stop_at_the_end_of_the_text_and_of_the_sequence():
    tokens = np.asarray([[5, 6, END, 7, 8, 9]], np.int32)
    labels, counted = labels_of(tokens, np.ones((1, 6), bool), np.asarray([[1, 2, 3, 4]], np.int32))
    assert labels[0, 0].tolist() == [6, END, 7, 8]
    assert counted[0].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]


def logits_at(tokens: np.ndarray, anchors: list[list[int]]) -> np.ndarray:
    """Draft logits `[rows, anchors, slots, V]`."""
    arrays = jnp.asarray(tokens), jnp.asarray(anchors, jnp.int32)
    flat = compiled_logits(TARGET, DRAFTER, PLAIN, FROZEN, DRAFTER_PARAMS, arrays[:1], arrays[1])
    return np.asarray(flat).reshape(len(anchors), len(anchors[0]), SIZE - 1, TARGET.vocab_size)


def test_a_block_sees_tokens_before_its_anchor_and_none_after():
    tokens = random_tokens(0, 1, 16)
    anchors = [[4, 9]]
    before = logits_at(tokens, anchors)
    for position in range(16):
        other = tokens.copy()
        other[0, position] = (other[0, position] + 5) % 24
        difference = np.abs(logits_at(other, anchors) - before).max(axis=(0, 2, 3))
        for anchor, changed in zip(anchors[0], difference, strict=True):
            if position <= anchor:  # at the anchor stands the known token, which the block holds itself
                assert changed > 1e-3, (position, anchor)
            else:
                assert changed < 1e-6, (position, anchor)


def test_a_block_sees_features_strictly_before_its_anchor(monkeypatch: pytest.MonkeyPatch):
    tokens = random_tokens(1, 1, 16)
    anchors = [[6, 11]]
    before = logits_at(tokens, anchors)
    run = decoder.forward_full

    @jax.jit
    def logits_with_other_feature(position: jax.Array) -> jax.Array:
        def disturbed(*arguments: Any) -> decoder.Forward:
            ran = run(*arguments)
            return ran._replace(taps=tuple(tap.at[:, position].add(3 * jnp.cos(jnp.arange(32.0))) for tap in ran.taps))

        with monkeypatch.context() as patched:
            patched.setattr(decoder, "forward_full", disturbed)
            arrays = jnp.asarray(tokens), jnp.asarray(anchors, jnp.int32)
            return draft_logits(TARGET, DRAFTER, PLAIN, FROZEN, DRAFTER_PARAMS, arrays[:1], arrays[1])

    for position in range(16):
        after = np.asarray(logits_with_other_feature(jnp.int32(position))).reshape(before.shape)
        difference = np.abs(after - before).max(axis=(0, 2, 3))
        assert [bool(changed > 1e-3) for changed in difference] == [position < anchor for anchor in anchors[0]]
        assert all(changed < 1e-5 for anchor, changed in zip(anchors[0], difference, strict=True) if position >= anchor)


def test_blocks_and_rows_do_not_influence_each_other():
    tokens = random_tokens(2, 2, 16)
    anchors = [[3, 8, 12], [9, 0, 5]]
    together = logits_at(tokens, anchors)
    for row in range(2):
        for n, anchor in enumerate(anchors[row]):
            alone = logits_at(tokens[row : row + 1], [[anchor]])
            np.testing.assert_allclose(together[row, n], alone[0, 0], rtol=0, atol=1e-5)
    moved = logits_at(tokens, [[3, 8, 9], [9, 0, 6]])
    np.testing.assert_allclose(moved[:, :2], together[:, :2], rtol=0, atol=1e-5)
    assert np.abs(moved[:, 2] - together[:, 2]).max() > 0.1


@partial(jax.jit, static_argnums=0)
def drafted_at_inference(config: DFlashConfig, tokens: jax.Array, block: jax.Array, anchor: jax.Array) -> jax.Array:
    """The logits of the slots after the known one, by the functions that generation is made of."""
    length = tokens.shape[1]
    ran = decoder.forward_full(TARGET, PLAIN, TARGET_PARAMS, tokens, config.target_layer_ids)
    taps = dflash.normal_taps(config, PLAIN, ran.taps, Norm(TARGET_PARAMS.norm, TARGET.rms_norm_eps))
    features = dflash.context_features(config, PLAIN, DRAFTER_PARAMS, taps)
    pairs = dflash.context_kv(config, PLAIN, DRAFTER_PARAMS, features, jnp.arange(length)[None])
    context = tuple(cache.Ring(*pair) for pair in pairs)
    positions = anchor + jnp.arange(SIZE)[None]
    embedded = TARGET_PARAMS.embed[block]
    attend = dflash.attend_context
    seen = anchor[None]
    hidden = dflash.run_block(config, PLAIN, DRAFTER_PARAMS, embedded, positions, context, attend, seen)
    return PLAIN.linear(hidden[:, 1:], decoder.output_head(TARGET_PARAMS), jnp.float32)


@pytest.mark.parametrize(("anchor", "scale"), [(0, 1.0), (1, 1.0), (7, 1.0), (13, 1.0), (7, 5.5)])
def test_a_block_is_drafted_as_at_inference(anchor: int, scale: float):
    """The context of inference holds the positions before the known token, and nothing hides in the rest of it."""
    config = replace(DRAFTER, input_embedding_scale=scale)
    tokens = random_tokens(3, 1, 16)
    block = np.full((1, SIZE), DRAFTER.mask_token_id, np.int32)
    block[0, 0] = tokens[0, anchor]
    expected = drafted_at_inference(config, jnp.asarray(tokens), jnp.asarray(block), jnp.int32(anchor))
    got = compiled_logits(TARGET, config, PLAIN, FROZEN, DRAFTER_PARAMS, (jnp.asarray(tokens),), jnp.asarray([[anchor]]))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("anchor", [0, 5, 13])
def test_a_block_is_drafted_as_in_the_reference(anchor: int):
    tokens = random_tokens(4, 1, 16)
    reference = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), TARGET_PARAMS, jnp.float32)))
    tensors = dict(to_tensors(dflash.declare(DRAFTER), DRAFTER_PARAMS, jnp.float32))
    second = Drafter(dflash.config_to_hf(DRAFTER), tensors, reference)
    known = tokens[0, : anchor + 1].tolist()
    features = second.context_features(reference.run(tokens[0].tolist())[1], range(anchor))
    _, expected = second.draft(known, features, anchor)
    np.testing.assert_allclose(logits_at(tokens, [[anchor]])[0, 0], expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("gamma", [None, 1.5])
def test_loss_is_the_weighted_mean_over_the_slots_after_the_known_one(gamma: float | None):
    rng = np.random.default_rng(5)
    tokens = random_tokens(5, 3, 16)
    flags = rng.random((3, 16)) < 0.8
    key = jax.random.key(7)
    chosen = DFlashOptions(anchors=4, gamma=gamma)
    batch = (jnp.asarray(tokens), jnp.asarray(flags))
    loss, total = jax.jit(partial(drawing(drafter_loss), TARGET, DRAFTER, chosen, PLAIN))(DRAFTER_PARAMS, FROZEN, batch, key)
    anchors, real = (np.asarray(x) for x in draw_anchors(batch[1], 4, key))
    logits = logits_at(tokens, anchors.tolist()).astype(np.float64)
    summed = weight_sum = 0.0
    for row in range(3):
        for n in range(4):
            slots = plain_labels(tokens[row], flags[row], int(anchors[row, n]), END)
            for k in range(1, SIZE):
                weight = np.exp(-(k - 1) / (gamma or 4.0)) * slots[k][1] * real[row, n]
                row_logits = logits[row, n, k - 1]
                best = row_logits.max()
                nll = best + np.log(np.exp(row_logits - best).sum()) - row_logits[slots[k][0]]
                summed = summed + weight * nll
                weight_sum = weight_sum + weight
    np.testing.assert_allclose(float(total), weight_sum, rtol=1e-5)
    np.testing.assert_allclose(float(loss), summed / weight_sum, rtol=1e-4)


def test_a_batch_without_anchors_has_loss_zero():
    batch = (jnp.asarray(random_tokens(0, 3, 16)), jnp.zeros((3, 16), bool))
    loss_of = jax.jit(partial(drawing(drafter_loss), TARGET, DRAFTER, DFlashOptions(anchors=4), PLAIN))
    loss, total = loss_of(DRAFTER_PARAMS, FROZEN, batch, jax.random.key(0))
    assert (float(loss), float(total)) == (0.0, 0.0)


def test_decay_is_the_published_one_for_the_block_size():
    assert [DFlashOptions().decay(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert DFlashOptions().decay(13) == 6.0
    assert DFlashOptions().decay(32) == 14.0
    assert DFlashOptions(gamma=2.5).decay(16) == 2.5


def test_no_gradient_reaches_the_layers_of_the_target():
    tokens = jnp.asarray(random_tokens(6, 2, 14))
    batch = (tokens, jnp.ones(tokens.shape, bool))

    def loss(params: Any, target: Any) -> jax.Array:
        frozen = Frozen(target)
        key = jax.random.key(0)
        return drawing(drafter_loss)(TARGET, DRAFTER, DFlashOptions(anchors=4), PLAIN, params, frozen, batch, key)[0]

    gradient, targets = jax.jit(jax.grad(loss, argnums=(0, 1)))(DRAFTER_PARAMS, TARGET_PARAMS)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient)), "every array of the drafter learns"
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(targets.layers))


def test_hidden_matrices_are_all_but_the_norms():
    hidden = hidden_matrices(DRAFTER_PARAMS)
    assert hidden.fc
    assert not hidden.norm
    assert not hidden.hidden_norm
    layer = hidden.layers[0]
    assert all(jax.tree.leaves((layer.qkv, layer.o, layer.gate_up, layer.down)))
    assert not any((layer.input_norm, layer.q_norm, layer.k_norm, layer.post_attention_norm))


def all_equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_drafter_starts_from_its_target():
    """Copies of the last layers, and a feature that is what the very last of them reads."""
    started = warm_start(TARGET, DRAFTER, TARGET_PARAMS, DRAFTER_PARAMS)
    assert all_equal(started.layers, TARGET_PARAMS.layers)
    assert all_equal(started.norm, TARGET_PARAMS.norm)
    taps = tuple(jnp.asarray(np.random.default_rng(n).normal(size=(1, 3, 32)), jnp.float32) for n in range(2))
    passing = replace(started, fc=started.fc - DRAFTER_PARAMS.fc)
    read = PLAIN.rms_norm(taps[0], TARGET_PARAMS.layers[1].input_norm, TARGET.rms_norm_eps)
    np.testing.assert_allclose(dflash.context_features(DRAFTER, PLAIN, passing, taps), read, atol=1e-5)
    shorter = warm_start(TARGET, replace(DRAFTER, num_layers=1), TARGET_PARAMS, DRAFTER_PARAMS)
    assert all_equal(shorter.layers, TARGET_PARAMS.layers[1:])


def test_a_drafter_of_a_target_with_experts_starts_from_random_layers():
    target = replace(TARGET, family="qwen3_moe", mixture=Mixture(4, 2, 16))
    params = initialise(decoder.declare(target), jax.random.key(0))
    started = warm_start(target, DRAFTER, params, DRAFTER_PARAMS)
    assert all_equal(started.layers, DRAFTER_PARAMS.layers)
    assert all_equal(started.norm, params.norm)


def test_a_drafter_of_other_sizes_starts_from_random_layers():
    started = warm_start(TARGET, replace(DRAFTER, intermediate_size=64), TARGET_PARAMS, DRAFTER_PARAMS)
    assert all_equal(started.layers, DRAFTER_PARAMS.layers)
    assert all_equal(started.fc, DRAFTER_PARAMS.fc)
    assert all_equal(started.norm, TARGET_PARAMS.norm)
    elsewhere = replace(DRAFTER, target_layer_ids=(1,))
    started = warm_start(TARGET, elsewhere, TARGET_PARAMS, drafter_params(elsewhere))
    assert all_equal(started.layers, TARGET_PARAMS.layers)
    assert all_equal(started.fc, drafter_params(elsewhere).fc)


@pytest.mark.slow
def test_a_drafter_learns_what_its_target_says(tmp_path: Path):
    """On a text that goes round, nearly all drafts end up accepted; random ones are not."""
    stream = counting_stream(600)
    chosen = options(steps=60, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=30, save_every=60)
    target = train_lm(TARGET, stream, stream, chosen, tmp_path / "target", silent()).params
    frozen = jax.tree.map(np.asarray, target)
    result = train_drafter(
        TARGET, target, DRAFTER, stream, stream, chosen, DFlashOptions(anchors=8), tmp_path / "drafter", silent()
    )
    jax.tree.map(np.testing.assert_array_equal, target, frozen)
    assert result.curve["held_out_loss"][0] > 2 * result.last("held_out_loss")
    assert result.last("held_out_loss") < 0.2

    def tau(params: Any) -> float | None:
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(24)}, unk_token="t0"))
        table = ShapeTable(batches=(2,), capacities=(64,), chunks=(8,))
        lm = LanguageModel(TARGET, target, tokenizer, table=table).with_drafter(DFlash(DRAFTER, SIZE), params)
        both = lm.generate([[1, 2, 3], [4, 5, 6, 7, 1]], Sampling(32), speculative=True)
        assert both[0].tokens[:6] == [4, 5, 6, 7, 1, 2]
        return tokens_per_round(both.results)

    learned = tau(result.params)
    random = tau(DRAFTER_PARAMS)
    assert learned is not None
    assert random is not None
    assert learned > 3 > 2 > random


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"anchors": 16}, "expected fewer anchors than the sequence length 16, found 16"),
        ({"vocab_size": 25}, "vocab_size is 25 but the target's is 24"),
        ({"text": "short"}, "expected at least 48 tokens in the training text"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], problem: str):
    long = random_stream(200)
    short = TokenStream(np.ones(30, np.int32), np.ones(30, bool))
    text = short if change.get("text") else long
    config = replace(DRAFTER, vocab_size=change.get("vocab_size", 24))
    chosen = DFlashOptions(anchors=change.get("anchors", 4))
    with pytest.raises(ValueError, match=problem):
        train_drafter(TARGET, TARGET_PARAMS, config, text, long, options(), chosen, tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()


def test_texts_at_the_margin_are_trained_on(tmp_path: Path):
    """272 tokens are just enough for 16 windows of 16 wherever they begin; so they are for the held-out loss."""
    text = random_stream(272)
    chosen = options(steps=2, batch_size=16)
    result = train_drafter(TARGET, TARGET_PARAMS, DRAFTER, text, text, chosen, DFlashOptions(4), tmp_path, silent())
    assert np.isfinite(result.last("held_out_loss"))


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="at least 1 anchor, found 0"):
        DFlashOptions(anchors=0)
    with pytest.raises(ValueError, match="a gamma above 0, found -1"):
        DFlashOptions(gamma=-1.0)


def naive_acceptance_weights(p: np.ndarray, counted: np.ndarray, missed: np.ndarray, smoothing: float) -> np.ndarray:
    """D-PACE's weights by their definition, slot by slot."""
    weights = np.zeros(p.shape)
    for row in range(len(p)):
        for slot in np.flatnonzero(counted[row]):
            for end in range(slot, p.shape[1]):
                if counted[row, end]:
                    chances = [
                        smoothing if missed[row, i] else (1 - smoothing) * p[row, i] + smoothing
                        for i in range(end + 1)
                        if counted[row, i] or missed[row, i]
                    ]
                    weights[row, slot] += np.prod(chances)
    return weights


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_weights_follow_the_drafts_that_are_expected_to_be_accepted(seed: int, smoothing: float):
    rng = np.random.default_rng(seed)
    nll = rng.exponential(1.0, (3, 5)).astype(np.float32)
    kind = rng.integers(0, 4, (3, 5))
    counted = kind > 1
    missed = kind == 1
    none = jnp.zeros((3, 5))
    blocks = AnchorBlocks(none, none, none, jnp.asarray(counted, jnp.float32), jnp.asarray(missed))
    found = acceptance_weights(jnp.asarray(nll), blocks, smoothing)
    np.testing.assert_allclose(found, naive_acceptance_weights(np.exp(-nll), counted, missed, smoothing), rtol=1e-5, atol=1e-6)


def test_only_tokens_of_the_draft_vocabulary_are_learnt():
    config = replace(DRAFTER, draft_vocab_size=6)
    text = TokenStream(np.asarray([1, 2, 3, 4, 5, 6] * 30 + [9, 10] * 5, np.int32), np.ones(190, bool))
    frozen = frozen_inputs(config, TARGET_PARAMS, text)
    assert frozen.vocab is not None
    assert np.asarray(frozen.vocab.ids).tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(frozen.head, TARGET_PARAMS.embed.T[:, 1:7])
    tokens = jnp.asarray([[1, 2, 9, 4, 5, 6, 1, 10]])
    batch = (tokens, jnp.ones(tokens.shape, bool))
    blocks = draw_blocks(TARGET, config, DFlashOptions(anchors=7), batch, jax.random.key(0), frozen.vocab)
    whole = draw_blocks(TARGET, config, DFlashOptions(anchors=7), batch, jax.random.key(0))
    known = np.isin(whole.labels, range(1, 7))
    np.testing.assert_array_equal(blocks.weights, np.where(known, whole.weights, 0))
    np.testing.assert_array_equal(blocks.missed, ~known & (np.asarray(whole.weights) > 0))
    assert (np.asarray(frozen.vocab.ids)[np.asarray(blocks.labels)] == np.asarray(whole.labels))[known].all()
    logits = draft_logits(TARGET, config, PLAIN, frozen, drafter_params(config), batch, blocks.anchors)
    every = draft_logits(TARGET, DRAFTER, PLAIN, FROZEN, drafter_params(config), batch, blocks.anchors)
    np.testing.assert_allclose(logits, every[..., 1:7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "target", [pytest.param(TARGET, id="attention"), pytest.param(DENSE_HYBRID, id="hybrid", marks=pytest.mark.slow)]
)
def test_a_drafter_with_a_draft_vocabulary_is_saved_loaded_and_right(target: decoder.DecoderConfig, tmp_path: Path):
    """The layers that it learns from have attention, or attention and states."""
    config = replace(DRAFTER, draft_vocab_size=8)
    text = counting_stream()
    params_of = target_params(target)
    chosen = options(steps=60, batch_size=4, learning_rate=5e-3, evaluate_every=20)
    result = train_drafter(
        target, params_of, config, text, text, chosen, DFlashOptions(4, dpace=0.5), tmp_path / "run", silent()
    )
    assert result.curve["held_out_loss"][0] > 2 * result.last("held_out_loss")
    assert result.last("held_out_loss") < 1.0
    drafter.save_drafter(tmp_path / "drafter", dflash, config, result.params, jnp.float32)
    found, params = load_dflash(tmp_path / "drafter", read_config(tmp_path / "drafter"), target, "float32", None)
    assert found == config
    np.testing.assert_array_equal(params.vocab.ids, result.params.vocab.ids)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(24)}, unk_token="t0"))
    lm = LanguageModel(target, params_of, tokenizer, table=ShapeTable(batches=(1,), capacities=(64,), chunks=(8,)))
    drafting = lm.with_drafter(DFlash(found, 4), params)
    head = np.asarray(drafting.ops.restore(drafting.model.models.drafter.vocab.head))[:32]
    np.testing.assert_allclose(head, np.asarray(params_of.embed.T)[:, np.asarray(params.vocab.ids)], rtol=1e-6)
    for seed in range(3):
        sampling = Sampling(24, temperature=seed % 2, ignore_eos=True, seed=seed)
        drafted, plain = (drafting.generate([[3, 4, 5 + seed]], sampling, speculative=way)[0] for way in (True, False))
        assert drafted.tokens == plain.tokens
        assert sum(drafted.acceptance_lengths) == 24
