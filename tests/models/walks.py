"""Helpers of tests of walks through candidates: many draws of the engine, and wrong rules for comparison."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reference.sampling_numpy import chi_square_excess
from tilewright.models import dflash2
from tilewright.runtime.noise import gumbel
from tilewright.runtime.sampling import Sampling, row_sampling

Draw = Callable[..., jax.Array]
TEMPERATURE = 1.3
ROWS = 64
BATCHES = 60


def one_noise(scores: Any, candidates: Any, temperature: Any, gumbel: Any) -> jax.Array:
    """All slots draw with the same noise."""
    return dflash2.walk(scores, candidates, temperature, jnp.broadcast_to(gumbel[:, :1], gumbel.shape))


def cold(scores: Any, candidates: Any, temperature: Any, gumbel: Any) -> jax.Array:
    """The temperature is left out."""
    return dflash2.walk(scores, candidates, jnp.ones_like(temperature), gumbel)


def pairs_unseen(scores: Any, candidates: Any, temperature: Any, gumbel: Any) -> jax.Array:
    """Every slot follows the first candidate of the slot before, whichever was taken."""
    return dflash2.walk(jnp.broadcast_to(scores[:, :, :1], scores.shape), candidates, temperature, gumbel)


BROKEN = (one_noise, cold, pairs_unseen)


def draw_walks(scores: np.ndarray, candidates: np.ndarray, rule: Draw = dflash2.walk) -> np.ndarray:
    """Many sampled walks through one block, each under a key of its own, `[walks, L]`.

    Args:
        scores: `[L, K, K]`.
        candidates: `[L, K]`.
    """
    slots = len(candidates)
    repeated = jnp.broadcast_to(jnp.asarray(candidates, jnp.int32), (ROWS, *candidates.shape))
    alike = jnp.broadcast_to(jnp.asarray(scores, jnp.float32), (ROWS, *scores.shape))

    @jax.jit
    def batch(n: jax.Array) -> jax.Array:
        rows = row_sampling([Sampling(temperature=TEMPERATURE, seed=0)] * ROWS, [1] * ROWS)
        key = jnp.asarray(rows.key).at[:, 1].set((jnp.arange(ROWS) + n * ROWS).astype(jnp.uint32))
        positions = jnp.broadcast_to(5 + jnp.arange(slots, dtype=jnp.int32), (ROWS, slots))
        return rule(alike, repeated, jnp.asarray(rows.temperature), gumbel(key, positions, repeated))

    return np.concatenate([np.asarray(batch(jnp.int32(n))) for n in range(BATCHES)])


def excess(exact: dict[tuple[int, ...], float], drawn: np.ndarray) -> float:
    """The chi-square statistic over what chance allows.

    Args:
        exact: the probability of every walk.
    """
    places = {walk: n for n, walk in enumerate(exact)}
    counts = np.bincount([places[tuple(walk)] for walk in drawn.tolist()], minlength=len(exact))
    return chi_square_excess(counts, np.array(list(exact.values())))
