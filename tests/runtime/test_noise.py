"""The noise is made of JAX's own bits and reaches far; drafts that are drawn with it are the target's draws more often."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.sampling_numpy import chi_square_excess, gumbel_of
from tilewright.kernels.select import argmax
from tilewright.runtime.noise import from_bits, gumbel, threefry
from tilewright.runtime.sampling import Sampling, noise, row_sampling, sample, warp_logits

SEEDS = st.integers(0, 2**32 - 1)


def test_the_hash_gives_the_published_answers():
    """Random123's known answers for Threefry-2x32 with 20 rounds, of those whose first counter is 0."""
    x, y = threefry((jnp.uint32(0), jnp.uint32(0)), jnp.zeros(1, jnp.uint32))
    assert (int(x[0]), int(y[0])) == (0x6B200159, 0x99BA4EFE)


@given(SEEDS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), st.sampled_from([1, 5, 64]))
def test_the_numbers_are_those_of_the_bits_of_jax(seed: int, positions: list[int], vocab: int):
    row = jnp.asarray([[0, seed], [0, seed ^ 1]], jnp.uint32)
    places = jnp.asarray([positions, positions[::-1]], jnp.int32)
    tokens = jnp.arange(vocab)
    found = np.asarray(gumbel(row, places, tokens[None, None]))
    for r in range(2):
        for t in range(len(positions)):
            key = jax.random.fold_in(jax.random.wrap_key_data(row[r]), places[r, t])
            np.testing.assert_allclose(found[r, t], gumbel_of(np.asarray(jax.random.bits(key, (vocab,)))), rtol=1e-5, atol=1e-6)
    some = jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (2, len(positions), 7)), jnp.int32)
    np.testing.assert_array_equal(gumbel(row, places, some), np.take_along_axis(found, np.asarray(some), axis=-1))


def test_noise_of_every_size_is_exact_and_reaches_far():
    """Also of the largest and smallest bits, of which one in 4 billion is drawn; nowhere infinite."""
    ends = np.concatenate([2 ** np.arange(32), 2**32 - 2 ** np.arange(32), np.random.default_rng(0).integers(0, 2**32, 1000)])
    bits = np.unique(ends).astype(np.uint32)
    found = np.asarray(from_bits(jnp.asarray(bits)))
    want = gumbel_of(bits)
    np.testing.assert_allclose(found[want > -1.5], want[want > -1.5], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[want <= -1.5], np.maximum(want[want <= -1.5], -2.81), atol=0.02)
    assert (np.diff(found) >= 0).all()
    assert found[-1] > 22.8


TAIL = 100_000


@pytest.fixture
def optimised() -> Iterator[None]:
    """As with `--optimised`: this is much to compute."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimised")
def test_a_tail_of_unlikely_tokens_is_drawn_as_often_as_it_is_likely():
    """One hundredth in tokens of 1e-7 each, a vocabulary as large as real ones.

    With E = exp(-noise) of the likely token, the chance that one of the others wins is 1 - exp(-E / 99). Rows are taken where
    E is about 1: there, noise that ends at 15.9 lets none of them win.
    """
    many = 3000
    seeds = np.arange(20_000)
    keys = jnp.asarray(np.stack([np.zeros_like(seeds), seeds], axis=1), jnp.uint32)
    rare = np.exp(-np.asarray(gumbel(keys, jnp.full((len(seeds), 1), 5), jnp.zeros((1, 1, 1), jnp.int32)), np.float64)[:, 0, 0])
    chosen = np.flatnonzero((rare > 0.75) & (rare < 1.15))[:many]
    logits = jnp.log(jnp.concatenate([jnp.full(1, 0.99), jnp.full(TAIL, 1e-7)]))[None, None]
    draw = jax.jit(lambda logits, rows, at: sample(jnp.broadcast_to(logits, (50, 1, logits.shape[-1])), rows, at))
    # All rows warp the same logits in the same way, which takes `sample` most of its time: one row's will do.
    warped = jax.jit(warp_logits)(logits, row_sampling([Sampling(temperature=1.0, seed=0)], [1]))
    draw_warped = jax.jit(lambda warped, rows, at: argmax(warped + noise(rows, at, warped.shape[-1])))
    drawn = 0
    at = jnp.full((50, 1), 5)
    for n, group in enumerate(chosen.reshape(-1, 50)):
        rows = row_sampling([Sampling(temperature=1.0, seed=int(seed)) for seed in group], [1] * len(group))
        found = np.asarray(draw_warped(warped, rows, at))
        if n % 20 == 0:
            np.testing.assert_array_equal(draw(logits, rows, at), found)
        drawn += int(np.count_nonzero(found))
    p = float(np.mean(-np.expm1(-rare[chosen] / 99)))
    assert chi_square_excess(np.asarray([many - drawn, drawn]), np.asarray([1 - p, p])) < 1


@pytest.mark.parametrize("apart", [0.3, 1.0, 2.0])
def test_draws_with_the_same_noise_agree_as_the_bound_says(apart: float):
    """More often than (1 - d) / (1 + d), and far more often than independent ones; with other noise they don't."""
    rng = np.random.default_rng(0)
    many = 20_000
    vocab = 16
    p = rng.normal(0, 1.5, vocab)
    q = p + rng.normal(0, apart, vocab)
    keys = jnp.stack([jnp.zeros(many, jnp.uint32), jnp.arange(many, dtype=jnp.uint32)], axis=1)
    tokens = jnp.arange(vocab)[None, None]
    at = jnp.full((many, 1), 9, jnp.int32)
    same = np.asarray(gumbel(keys, at, tokens))
    other = np.asarray(gumbel(keys, at + 1, tokens))
    drawn, drafted, apart_drafted = ((logits + noise).argmax(-1) for logits, noise in ((p, same), (q, same), (q, other)))
    p, q = (np.exp(each) / np.exp(each).sum() for each in (p, q))
    distance = np.abs(p - q).sum() / 2
    error = 3 * 0.5 / np.sqrt(many)
    assert np.mean(drawn == drafted) > (1 - distance) / (1 + distance) - error
    assert np.mean(drawn == apart_drafted) == pytest.approx(p @ q, abs=error)
    assert np.mean(drawn == drafted) > np.mean(drawn == apart_drafted) + 0.2
