"""The noise is JAX's own, and drafts that are drawn with the target's noise are the target's draws more often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.decode.noise import gumbel, threefry

SEEDS = st.integers(0, 2**32 - 1)


def test_the_hash_gives_the_published_answers():
    """Random123's known answers for Threefry-2x32 with 20 rounds, of those whose first counter is 0."""
    x, y = threefry((jnp.uint32(0), jnp.uint32(0)), jnp.zeros(1, jnp.uint32))
    assert (int(x[0]), int(y[0])) == (0x6B200159, 0x99BA4EFE)


@given(SEEDS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), st.sampled_from([1, 5, 64]))
def test_the_numbers_are_those_of_jax(seed: int, positions: list[int], vocab: int):
    row = jnp.asarray([[0, seed], [0, seed ^ 1]], jnp.uint32)
    places, tokens = jnp.asarray([positions, positions[::-1]], jnp.int32), jnp.arange(vocab)
    found = np.asarray(gumbel(row, places, tokens[None, None]))
    for r in range(2):
        for t in range(len(positions)):
            key = jax.random.fold_in(jax.random.wrap_key_data(row[r]), places[r, t])
            np.testing.assert_array_equal(found[r, t], jax.random.gumbel(key, (vocab,), jnp.float32))
    some = jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (2, len(positions), 7)), jnp.int32)
    np.testing.assert_array_equal(gumbel(row, places, some), np.take_along_axis(found, np.asarray(some), axis=-1))


@pytest.mark.parametrize("apart", [0.3, 1.0, 2.0])
def test_draws_with_the_same_noise_agree_as_the_bound_says(apart: float):
    """More often than (1 - d) / (1 + d), and far more often than independent ones; with other noise they don't."""
    rng, many, vocab = np.random.default_rng(0), 20_000, 16
    p = rng.normal(0, 1.5, vocab)
    q = p + rng.normal(0, apart, vocab)
    keys = jnp.stack([jnp.zeros(many, jnp.uint32), jnp.arange(many, dtype=jnp.uint32)], axis=1)
    tokens, at = jnp.arange(vocab)[None, None], jnp.full((many, 1), 9, jnp.int32)
    same, other = np.asarray(gumbel(keys, at, tokens)), np.asarray(gumbel(keys, at + 1, tokens))
    drawn, drafted, apart_drafted = ((logits + noise).argmax(-1) for logits, noise in ((p, same), (q, same), (q, other)))
    p, q = (np.exp(each) / np.exp(each).sum() for each in (p, q))
    distance, error = np.abs(p - q).sum() / 2, 3 * 0.5 / np.sqrt(many)
    assert np.mean(drawn == drafted) > (1 - distance) / (1 + distance) - error
    assert np.mean(drawn == apart_drafted) == pytest.approx(p @ q, abs=error)
    assert np.mean(drawn == drafted) > np.mean(drawn == apart_drafted) + 0.2
