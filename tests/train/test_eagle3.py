"""Training-time test: the unrolled chain against the reference, what counts, the loss; a drafter learns and resumes."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.dflash_numpy import Target
from reference.eagle3_numpy import Chain
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, draft_vocab, eagle3
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import initialise, to_tensors
from tilewright.train.chain import chain_agreement, chain_loss, step_counts, together
from tilewright.train.data import TokenStream, frequent_tokens
from tilewright.train.eagle3 import (
    Eagle3Options,
    ask_target,
    default_draft_vocab,
    eagle3_kind,
    hidden_matrices,
    train_eagle3,
    unroll,
    warm_start,
)
from tilewright.train.lm import train_lm
from tilewright.train.loop import TrainingRun
from train.support import END, TARGET, counting_stream, kept_target, options, random_stream, silent

STEPS = 3
LENGTH = 12
DRAFTER = Eagle3Config(
    vocab_size=24,
    draft_vocab_size=16,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    target_layer_ids=(0, 1),
    block_size=STEPS + 1,
)
KIND = eagle3_kind(TARGET, DRAFTER, PLAIN)
IDS = np.sort(np.random.default_rng(3).permutation(24)[:16]).astype(np.int32)


@cache
def random_params() -> Any:
    params = initialise(eagle3.declare(DRAFTER), jax.random.key(1))
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x * jnp.linspace(0.5, 1.5, x.size), params)


def frozen() -> tuple[Any, jax.Array]:
    return kept_target(), jnp.asarray(IDS)


def random_tokens(seed: int, rows: int = 2, low: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, 24, (rows, LENGTH)).astype(np.int32)


@jax.jit
def compiled_logits(params: Any, tokens: jax.Array) -> jax.Array:
    teacher = ask_target(TARGET, DRAFTER, PLAIN, kept_target(), jnp.asarray(IDS), (tokens,))
    return jnp.stack(list(unroll(DRAFTER, PLAIN, params, kept_target().embed, teacher.taps, tokens)))


def unrolled(tokens: np.ndarray) -> np.ndarray:
    """Draft logits `[steps, rows, T, W]`."""
    return np.asarray(compiled_logits(random_params(), jnp.asarray(tokens)))


def reference() -> Chain:
    target = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), kept_target(), jnp.float32)))
    tensors = dict(to_tensors(eagle3.declare(DRAFTER), random_params(), jnp.float32)) | draft_vocab.maps_from_target_ids(
        IDS, 24
    )
    return Chain(eagle3.config_to_hf(DRAFTER), tensors, target)


def test_every_chain_is_the_one_that_drafting_runs():
    """From each known token on, a chain that reads the text gives what the reference drafts when it is made to read it."""
    tokens = random_tokens(0)
    chain = reference()
    got = unrolled(tokens)
    for row in range(2):
        text = tokens[row].tolist()
        features = chain.fuse(chain.target.run(text)[1])
        for known in range(1, LENGTH - STEPS + 1):
            want = chain.draft(text[: known + 1], features, STEPS, forced=text[known + 1 :])
            np.testing.assert_allclose(got[:, row, known - 1], want.logits, rtol=1e-4, atol=3e-4)


def test_a_chain_sees_the_text_up_to_the_token_it_reads_and_none_after():
    tokens = random_tokens(1, rows=1)
    before = unrolled(tokens)
    for position in range(LENGTH):
        other = tokens.copy()
        other[0, position] = 1 + other[0, position] % 23
        changed = np.abs(unrolled(other) - before)[:, 0].max(axis=-1)
        for step in range(STEPS):
            for at in range(LENGTH - STEPS):
                assert (changed[step, at] > 1e-5) == (position <= at + 1 + step), (position, step, at)


def test_rows_do_not_influence_each_other():
    tokens = random_tokens(2)
    together = unrolled(tokens)
    for row in range(2):
        np.testing.assert_allclose(unrolled(tokens[row : row + 1])[:, 0], together[:, row], rtol=0, atol=1e-5)


def plain_counts(tokens: np.ndarray, in_loss: np.ndarray, step: int, at: int) -> bool:
    """Whether the token that step `step` of the chain at `at` predicts counts."""
    predicted = at + 2 + step
    return bool(predicted < len(tokens) and in_loss[predicted] and END not in tokens[at + 1 : predicted])


@given(st.integers(0, 1000))
def test_counts_equal_a_plain_loop(seed: int):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 4, (2, 10)).astype(np.int32)
    flags = rng.random((2, 10)) < 0.7
    counted = [np.asarray(x) for x in step_counts(jnp.asarray(tokens), jnp.asarray(flags), 4, END)]
    for step in range(4):
        for row in range(2):
            assert counted[step][row].tolist() == [plain_counts(tokens[row], flags[row], step, at) for at in range(10)]


def plain_sums(tokens: np.ndarray, flags: np.ndarray, decay: float) -> tuple[float, float, list[int], list[int]]:
    """The loss's sums, and for each step how many choices agree and of how many, position by position."""
    got = unrolled(tokens).astype(np.float64)
    target = reference().target
    summed = 0.0
    total = 0.0
    agreed = [0] * STEPS
    counted = [0] * STEPS
    for row in range(len(tokens)):
        said = target.run(tokens[row].tolist())[0]
        for step in range(STEPS):
            for at in range(LENGTH):
                if not plain_counts(tokens[row], flags[row], step, at):
                    continue
                logits = got[step, row, at]
                wanted = said[at + 1 + step]
                counted[step] += 1
                agreed[step] += int(IDS[logits.argmax()] == wanted.argmax())
                if wanted.argmax() in IDS:
                    shares = np.exp(wanted[IDS] - wanted[IDS].max())
                    log_q = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                    summed -= decay**step * float(shares @ log_q / shares.sum())
                    total += decay**step
    return summed, total, agreed, counted


@pytest.mark.parametrize("decay", [0.8, 0.3])
def test_loss_and_agreement_equal_plain_sums(decay: float):
    rng = np.random.default_rng(5)
    tokens = random_tokens(5, rows=3, low=0)
    flags = rng.random((3, LENGTH)) < 0.8
    summed, total, agreed, counted = plain_sums(tokens, flags, decay)
    batch = (jnp.asarray(tokens), jnp.asarray(flags))
    loss, weight = jax.jit(partial(chain_loss, KIND, decay))(random_params(), frozen(), batch)
    np.testing.assert_allclose(float(weight), total, rtol=1e-5)
    np.testing.assert_allclose(float(loss), summed / total, rtol=1e-4)
    hits, totals = jax.jit(partial(chain_agreement, KIND))(random_params(), frozen(), batch)
    assert hits.tolist() == agreed
    assert totals.tolist() == counted
    assert sum(agreed) > 0
    assert total < sum(counted), "some of the target's choices lie outside the draft vocabulary"


@pytest.mark.parametrize(("positions", "groups"), [(1, 4), (2 * LENGTH, 2), (3 * LENGTH, 2), (100 * LENGTH, 1)])
def test_how_many_sequences_are_worked_on_at_a_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, positions: int, groups: int
):
    rng = np.random.default_rng(7)
    batch = (jnp.asarray(random_tokens(7, rows=4)), jnp.asarray(rng.random((4, LENGTH)) < 0.8))
    monkeypatch.setattr("tilewright.train.chain.POSITIONS", positions)
    assert 4 // together(4, LENGTH) == groups
    loss, total = jax.jit(partial(chain_loss, KIND, Eagle3Options().decay))(random_params(), frozen(), batch)
    summed, weights, _, _ = plain_sums(np.asarray(batch[0]), np.asarray(batch[1]), Eagle3Options().decay)
    np.testing.assert_allclose(float(total), weights, rtol=1e-5)
    np.testing.assert_allclose(float(loss), summed / weights, rtol=1e-4)


def test_a_batch_where_nothing_counts_has_loss_zero():
    batch = (jnp.asarray(random_tokens(0)), jnp.zeros((2, LENGTH), bool))
    loss, total = jax.jit(partial(chain_loss, KIND, Eagle3Options().decay))(random_params(), frozen(), batch)
    assert (float(loss), float(total)) == (0.0, 0.0)


def test_every_array_of_the_drafter_learns():
    batch = (jnp.asarray(random_tokens(6)), jnp.ones((2, LENGTH), bool))
    loss = jax.jit(jax.grad(lambda params: chain_loss(KIND, Eagle3Options().decay, params, frozen(), batch)[0]))
    gradients = jax.tree.leaves(loss(random_params()))
    assert len(gradients) == len(jax.tree.leaves(random_params())) == 13
    assert all(float(jnp.abs(g).max()) > 0 for g in gradients)


@given(st.integers(0, 1000), st.integers(1, 12))
def test_the_draft_vocabulary_is_the_most_frequent_of_what_is_in_the_loss(seed: int, size: int):
    rng = np.random.default_rng(seed)
    stream = TokenStream(rng.integers(0, 12, 60).astype(np.int32), rng.random(60) < 0.5)
    ids = frequent_tokens(stream, 12, size)
    counts = [int(np.sum(stream.tokens[stream.in_loss] == token)) for token in range(12)]
    assert ids.dtype == np.int32
    assert ids.tolist() == sorted(sorted(range(12), key=lambda token: (-counts[token], token))[:size])


def test_default_draft_vocabularies():
    assert [default_draft_vocab(size) for size in (24, 8192, 20000, 151936)] == [24, 8192, 20000, 32000]


def test_hidden_matrices_are_all_but_norms_and_head():
    hidden = hidden_matrices(random_params())
    assert hidden.fc
    assert not any((hidden.norm, hidden.hidden_norm, hidden.head))
    layer = hidden.layer
    assert all(jax.tree.leaves((layer.qkv, layer.o, layer.gate_up, layer.down)))
    assert not any((layer.input_norm, layer.post_attention_norm))


def test_a_drafter_starts_with_its_targets_head_and_last_tap():
    started = warm_start(TARGET, DRAFTER, kept_target(), jnp.asarray(IDS), random_params())
    taps = [jnp.asarray(np.random.default_rng(n).normal(size=(1, 3, 32)), jnp.float32) for n in range(2)]
    passing = replace(started, fc=started.fc - random_params().fc)
    np.testing.assert_allclose(eagle3.fuse(DRAFTER, PLAIN, passing, taps), taps[1], atol=1e-5)
    full = decoder.logits(TARGET, PLAIN, kept_target(), taps[1])
    np.testing.assert_allclose(eagle3.draft_logits(DRAFTER, PLAIN, started, taps[1]), full[..., IDS], atol=1e-4)
    assert all_equal(started.layer, random_params().layer), "an MLP of another size stays as it was drawn"
    alike = replace(DRAFTER, intermediate_size=TARGET.intermediate_size)
    started = warm_start(TARGET, alike, kept_target(), jnp.asarray(IDS), initialise(eagle3.declare(alike), jax.random.key(1)))
    kept = [getattr(started.layer, name) for name in ("gate_up", "down", "post_attention_norm")]
    assert all_equal(kept, [getattr(kept_target().layers[-1], name) for name in ("gate_up", "down", "post_attention_norm")])


def test_an_mlp_of_another_form_stays_as_it_was_drawn():
    """Gemma's has another gate, and a norm behind."""
    target = replace(TARGET, family="gemma2", attention_scale=0.25)
    config = replace(DRAFTER, intermediate_size=48)
    gemma = initialise(decoder.declare(replace(target, intermediate_size=48)), jax.random.key(0))
    drawn = initialise(eagle3.declare(config), jax.random.key(1))
    started = warm_start(replace(target, intermediate_size=48), config, gemma, jnp.asarray(IDS), drawn)
    assert jax.tree.structure(started) == jax.tree.structure(drawn)
    assert all_equal(started.layer, drawn.layer)


def all_equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
def test_a_drafter_learns_what_its_target_says_and_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a text that goes round, every step of the chain comes to agree with the target."""
    stream = counting_stream(600)
    chosen = options(steps=60, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=30, save_every=20)
    target = train_lm(TARGET, stream, stream, chosen, tmp_path / "target", silent()).params
    frozen = jax.tree.map(np.asarray, target)
    chosen = replace(chosen, optimizer="muon", steps=50)
    given = (TARGET, target, DRAFTER, stream, stream, chosen, Eagle3Options())
    result, agreed = train_eagle3(*given, tmp_path / "whole", silent())
    assert all_equal(target, frozen)
    assert result.curve["held_out_loss"][0] > 1.2 * result.last("held_out_loss")
    assert len(agreed) == STEPS
    assert min(agreed) > 0.95
    assert set(range(1, 8)) <= set(result.params.target_ids.tolist())

    advance = TrainingRun.advance

    def interrupted(self: TrainingRun, batch: Any) -> None:
        if self.step == 33:
            raise KeyboardInterrupt
        advance(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_eagle3(*given, tmp_path / "parts", silent())
    again, agreed_again = train_eagle3(*given, tmp_path / "parts", silent())
    assert all_equal(again.params, result.params)
    assert agreed_again == agreed
    jax.tree.map(np.testing.assert_array_equal, again.curve, result.curve)
    with pytest.raises(ValueError, match=r"eagle3\.decay: checkpoint 0\.8, now 0\.5"):
        train_eagle3(*given[:-1], Eagle3Options(0.5), tmp_path / "parts", silent())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vocab_size": 25}, "vocab_size is 25 but the target's is 24"),
        ({"own_embedding": True}, "expected a drafter that reads its target's embedding"),
        ({"block_size": 16}, "expected a sequence length above the block size 16, found 16"),
        ({"text": "short"}, "expected at least 48 tokens in the training text"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], problem: str):
    long = random_stream(200)
    short = TokenStream(np.ones(30, np.int32), np.ones(30, bool))
    text = short if change.get("text") else long
    config = replace(DRAFTER, **{name: value for name, value in change.items() if value != "short"})
    with pytest.raises(ValueError, match=problem):
        train_eagle3(TARGET, kept_target(), config, text, long, options(), Eagle3Options(), tmp_path / "out", silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5])
def test_decays_out_of_range_are_refused(decay: float):
    with pytest.raises(ValueError, match=f"above 0 and at most 1, found {decay}"):
        Eagle3Options(decay)
