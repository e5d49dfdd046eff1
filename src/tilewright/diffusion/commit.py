"""Which tokens a step commits: the choice at each masked position of a block, and how these rank.

Legend: B rows of a batch, K positions of a block, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32

from tilewright.diffusion.options import ALWAYS, LLADA_RULES, REMASKING, RowOptions
from tilewright.kernels.select import argmax
from tilewright.runtime.noise import noise
from tilewright.runtime.per_row import filters, for_each, of_row, where_asked
from tilewright.runtime.sampling import RowSampling, temper, warp_logits

ENTROPY_EPSILON = 1e-10


class Choices(NamedTuple):
    """Candidates for each position, `[B, K]`: the token, its probability, and the score that it ranks by."""

    token: Array
    probability: Array
    score: Array


def step_keys(rows: RowSampling, positions: Int[Array, "B K"], steps: Int[Array, " B"]) -> Array:
    """The randomness of a position in a step, keys `[B, K]`: a position is drawn again and again, each time anew."""

    def of_one(key: Array, position: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), position), step)

    return jax.vmap(jax.vmap(of_one, in_axes=(None, 0, None)))(jnp.asarray(rows.key), positions, steps)


def step_noise(keys: Array, vocab: int) -> Float32[Array, "B K {vocab}"]:
    """Gumbel noise for every token, of the keys of positions in a step, `[B, K]`."""
    raw = jax.random.key_data(keys)
    return noise((raw[..., :1], raw[..., 1:]), jnp.arange(vocab))


def ranked_by(rule: Int[Array, " B"], logits: Float[Array, "B K V"], token: Int[Array, "B K"], chance: Array) -> Choices:
    """Choices under the distribution of these logits."""
    p = jax.nn.softmax(logits, axis=-1)
    likely = jnp.take_along_axis(p, token[..., None], axis=-1)[..., 0]
    first = argmax(logits)
    best = jnp.take_along_axis(p, first[..., None], axis=-1)[..., 0]
    second = jnp.max(jnp.where(jnp.arange(p.shape[-1]) == first[..., None], 0.0, p), axis=-1)
    scores = {
        "random": chance,
        "origin": chance,
        "topk_margin": best - second,
        "entropy": jnp.sum(p * jnp.log(p + ENTROPY_EPSILON), axis=-1),
    }
    score = likely
    for name, found in scores.items():
        score = jnp.where(rule[:, None] == REMASKING.index(name), found, score)
    return Choices(token, likely, score)


def choose(
    logits: Float32[Array, "B K V"],
    options: RowOptions,
    positions: Int32[Array, "B K"],
    steps: Int32[Array, " B"],
    mask_token_id: int,
) -> Choices:
    """The choice at each of `positions`, from the logits that predict it; a mask is never chosen.

    What ranks by the most likely token's probability is computed for all rows together. Others are gone through one by one, in
    loops of as many turns as there are such rows: only they pay for randomness, for sums over the vocabulary, for a filter.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) == mask_token_id, -jnp.inf, logits)
    rule = jnp.asarray(options.rule)
    rows = options.sampling
    temperature = jnp.asarray(rows.temperature)
    draws = (temperature > 0) | (jnp.asarray(rows.top_p) < 1)

    def seen(row: Array, found: Choices) -> tuple[Array, Array, Array]:
        """A row's logits, `[1, K, V]`, its keys and a chance for each position, `[1, K]`."""
        keys = step_keys(of_row(row, rows), of_row(row, positions), of_row(row, steps))
        chance = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1))))(keys)
        return of_row(row, logits), keys, chance

    def ranked(row: Array, found: Choices) -> Choices:
        own, _, chance = seen(row, found)
        return with_row(found, row, ranked_by(of_row(row, rule), own, of_row(row, found.token), chance))

    def drawn(row: Array, found: Choices) -> Choices:
        own, keys, chance = seen(row, found)
        own_rule, own_rows = of_row(row, (rule, rows))
        filtered = filters(own_rows)[0]  # which takes 64 passes over the logits
        kept = where_asked(filtered, row, lambda _, logits: warp_logits(logits, own_rows), own)
        drawn_from: Any = jnp.where(filtered, kept, temper(own, own_rows))
        noisy = drawn_from + jnp.where(temperature[row] > 0, step_noise(keys, own.shape[-1]), 0.0)
        of_llada = own_rule[0] < len(LLADA_RULES)
        return with_row(found, row, ranked_by(own_rule, jnp.where(of_llada, own, drawn_from), argmax(noisy), chance))

    likely = 1 / jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1)
    found = Choices(argmax(logits), likely, likely)
    by_likelihood = (rule == REMASKING.index("low_confidence")) | (rule == REMASKING.index("maskgit_plus"))
    return for_each(draws, drawn, for_each(~by_likelihood & ~draws, ranked, found))


def with_row(found: Choices, row: Array, one: Choices) -> Choices:
    """The choices of all rows with those of one in their place."""
    return jax.tree.map(lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, row, 0), found, one)


def commits(
    choices: Choices, candidates: Bool[Array, "B K"], options: RowOptions, block_step: Int[Array, " B"]
) -> Bool[Array, "B K"]:
    """Mask of the candidates that are committed; of equal scores the first goes first."""
    score = jnp.where(candidates, choices.score, -jnp.inf)
    slot = jnp.arange(score.shape[1])
    mine = score[:, :, None]
    other = score[:, None, :]
    ahead = (other > mine) | ((other == mine) & (slot[None, :] < slot[:, None]))
    rank = jnp.sum(ahead & candidates[:, None, :], axis=-1)
    at = jnp.minimum(block_step, score.shape[1] - 1)[:, None]
    quota, share = (jnp.take_along_axis(jnp.asarray(x), at, axis=1) for x in (options.quotas, options.shares))
    threshold = jnp.asarray(options.threshold)[:, None]
    by_quota = rank < quota
    by_threshold = (rank == 0) | (choices.probability >= threshold)
    taken = jnp.where(threshold < ALWAYS, by_threshold, by_quota)
    origin = jnp.asarray(options.rule)[:, None] == REMASKING.index("origin")
    return candidates & jnp.where(origin, choices.score < share, taken)
