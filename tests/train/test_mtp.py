"""Training of MTP heads: the unrolled chain against the reference, the loss, a head that learns."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference.dflash_numpy import Target
from reference.mtp_numpy import Head
from tilewright.kernels.operations import PLAIN_SCORES, Scores
from tilewright.kernels.select import PLAIN
from tilewright.models import decoder, draft_vocab, mtp
from tilewright.models.draft_vocab import DraftVocab
from tilewright.models.mtp import MtpConfig
from tilewright.models.params import initialise, to_tensors
from tilewright.train.chain import chain_agreement, chain_attention, chain_loss, step_counts
from tilewright.train.lm import train_lm
from tilewright.train.mtp import Frozen, MtpOptions, mtp_kind, train_mtp
from train.support import END, TARGET, counting_stream, kept_target, options, random_stream, silent

STEPS = 3
LENGTH = 12
IDS = np.sort(np.random.default_rng(3).permutation(24)[:16]).astype(np.int32)
WHOLE = MtpConfig(layer=mtp.layer_config(TARGET), num_target_layers=2, block_size=STEPS + 1)
PART = replace(WHOLE, draft_vocab_size=16)


@cache
def random_params() -> Any:
    params = initialise(mtp.declare(WHOLE), jax.random.key(1))
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x * jnp.linspace(0.5, 1.5, x.size), params)


def frozen(config: MtpConfig) -> Frozen:
    target = kept_target()
    vocab = None if config.draft_vocab_size is None else DraftVocab(jnp.asarray(IDS), target.embed.T[:, IDS])
    return Frozen(target, vocab)


def reference(config: MtpConfig) -> Head:
    target = Target(decoder.config_to_hf(TARGET), dict(to_tensors(decoder.declare(TARGET), kept_target(), jnp.float32)))
    tensors = dict(to_tensors(mtp.declare(config), random_params(), jnp.float32))
    if config.draft_vocab_size is not None:
        tensors |= draft_vocab.maps_from_target_ids(IDS, 24)
    return Head(target.config, tensors, target)


@cache
def unrolled(seed: int, part: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the draft logits `[steps, rows, T, W]` of chains over them."""
    config = PART if part else WHOLE
    kind = mtp_kind(TARGET, config, PLAIN)
    tokens = np.random.default_rng(seed).integers(0, 24, (2, LENGTH)).astype(np.int32)

    @jax.jit
    def run(params: Any, held: Frozen, tokens: jax.Array) -> jax.Array:
        teacher = kind.teach(held, (tokens,), False)
        return jnp.stack(list(kind.unrolled(params, held, teacher, tokens)))

    return tokens, np.asarray(run(random_params(), frozen(config), jnp.asarray(tokens)))


@pytest.mark.parametrize("part", [False, True])
def test_every_chain_is_the_one_that_drafting_runs(part: bool):
    """From each token on, a chain that reads the text gives what the reference drafts when it is made to read it."""
    tokens, got = unrolled(0, part)
    head = reference(PART if part else WHOLE)
    for row in range(2):
        text = tokens[row].tolist()
        features = head.features(text)
        for known in range(1, LENGTH - STEPS + 1):
            want = head.draft(text[: known + 1], features, STEPS, forced=text[known + 1 :])
            np.testing.assert_allclose(got[:, row, known - 1], want.logits, rtol=1e-4, atol=3e-4)


def test_loss_and_agreement_equal_plain_sums():
    """A token counts in the loss if the text's token is in the draft vocabulary; the agreement is with the target's choice."""
    tokens, got = unrolled(0, True)
    flags = np.random.default_rng(5).random((2, LENGTH)) < 0.8
    target = reference(PART).target
    counted = [np.asarray(x) for x in step_counts(jnp.asarray(tokens), jnp.asarray(flags), STEPS, END)]
    summed = total = 0.0
    agreed = [0] * STEPS
    for row in range(2):
        said = target.run(tokens[row].tolist())[0]
        for step in range(STEPS):
            for at in np.flatnonzero(counted[step][row]):
                wanted = said[at + 1 + step]
                logits = got[step, row, at].astype(np.float64)
                agreed[step] += int(IDS[logits.argmax()] == wanted.argmax())
                if tokens[row, at + 2 + step] in IDS:
                    shares = np.exp(wanted[IDS] - wanted[IDS].max())
                    log_q = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
                    summed -= 0.5**step * float(shares @ log_q / shares.sum())
                    total += 0.5**step
    batch = (jnp.asarray(tokens), jnp.asarray(flags))
    kind = mtp_kind(TARGET, PART, PLAIN)
    loss, weight = jax.jit(partial(chain_loss, kind, 0.5))(random_params(), frozen(PART), batch)
    np.testing.assert_allclose([float(weight), float(loss)], [total, summed / total], rtol=1e-4)
    hits, totals = jax.jit(partial(chain_agreement, kind))(random_params(), frozen(PART), batch)
    assert hits.tolist() == agreed
    assert totals.tolist() == [int(each.sum()) for each in counted]


@pytest.mark.parametrize("rules", [PLAIN_SCORES, Scores(0.3, 2.0, jnp.array([0.5, -1.0, 2.0, 0.0]))])
def test_attention_of_a_later_step_equals_a_plain_softmax(rules: Scores):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 5, 4, 6))
    pairs = [tuple(rng.normal(size=(1, 2, 5, 6)) for _ in range(2)) for _ in range(2)]
    got = chain_attention(jnp.asarray(q, jnp.float32), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pairs), rules)
    for at in range(5):
        for n in range(4):
            keys, values = (
                np.concatenate([pairs[0][i][0, n // 2, : at + 1], pairs[1][i][0, n // 2, at : at + 1]]) for i in range(2)
            )
            scores = keys @ q[0, at, n] * rules.scale_of(6)
            if rules.softcap is not None:
                scores = rules.softcap * np.tanh(scores / rules.softcap)
            weights = np.exp(scores)
            sink = 0.0 if rules.sinks is None else np.exp(float(rules.sinks[n]))
            np.testing.assert_allclose(got[0, at, n], weights @ values / (weights.sum() + sink), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_trained_head_agrees_with_its_target(tmp_path: Path):
    """On a text that goes round, every step of the chain comes to agree with the target."""
    stream = counting_stream(600)
    chosen = options(steps=60, batch_size=4, sequence_length=32, learning_rate=1e-2, evaluate_every=30, save_every=20)
    target = train_lm(TARGET, stream, stream, chosen, tmp_path / "target", silent()).params
    chosen = replace(chosen, optimizer="muon", steps=50)
    result, agreed = train_mtp(TARGET, target, PART, stream, stream, chosen, MtpOptions(), tmp_path / "head", silent())
    assert result.last("held_out_loss") < 0.1  # from 3 nats of a guess
    assert min(agreed) > 0.95
    assert set(range(1, 8)) <= set(result.params.vocab.ids.tolist())
    with pytest.raises(ValueError, match=r"mtp\.decay: checkpoint 0\.8, now 0\.5"):
        train_mtp(TARGET, target, PART, stream, stream, chosen, MtpOptions(0.5), tmp_path / "head", silent())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_target_layers": 3}, "num_target_layers is 3 but the target's is 2"),
        ({"block_size": 16}, "expected a sequence length above the block size 16, found 16"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, change: dict[str, Any], problem: str):
    text = random_stream(200)
    with pytest.raises(ValueError, match=problem):
        train_mtp(
            TARGET, kept_target(), replace(PART, **change), text, text, options(), MtpOptions(), tmp_path / "out", silent()
        )
    assert not (tmp_path / "out").exists()
