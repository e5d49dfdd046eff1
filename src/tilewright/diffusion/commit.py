"""Commit rules of a step: the token at each masked position of a block, its score, and the committed positions.

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
from tilewright.runtime.per_row import Tree, filters, for_each, run_if, slice_row
from tilewright.runtime.sampling import RowSampling, temper, warp_logits

ENTROPY_EPSILON = 1e-10


class Choices(NamedTuple):
    """Chosen token at each position, its probability, and the score that ranks the position, `[B, K]` each."""

    token: Array
    probability: Array
    score: Array


def step_keys(rows: RowSampling, positions: Int[Array, "B K"], steps: Int[Array, " B"]) -> Array:
    """Returns random keys `[B, K]` for each position and step; a position gets a new draw in every step."""

    def fold(key: Array, position: Array, step: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), position), step)

    return jax.vmap(jax.vmap(fold, in_axes=(None, 0, None)))(jnp.asarray(rows.key), positions, steps)


def step_noise(keys: Array, vocab: int) -> Float32[Array, "B K {vocab}"]:
    """Returns the Gumbel noise of every token for keys `[B, K]`."""
    raw = jax.random.key_data(keys)
    return noise((raw[..., :1], raw[..., 1:]), jnp.arange(vocab))


def ranked_by(rule: Int[Array, " B"], logits: Float[Array, "B K V"], token: Int[Array, "B K"], chance: Array) -> Choices:
    """Scores tokens under the distribution of these logits by a rule."""
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
    rule: Int[Array, " B"],
    rows: RowSampling,
    positions: Int32[Array, "B K"],
    steps: Int32[Array, " B"],
    mask_token_id: int,
    unranked: Bool[Array, "B V"] | None = None,
) -> Choices:
    """Chooses a token at each of `positions`, from the logits that predict it; a mask is never chosen.

    Rows that rank by the most likely token's probability are computed together. Other rows run in loops, row by row, so that
    only they pay for randomness, for sums over the vocabulary, and for filters.

    Args:
        rule: index of each row's rule in `REMASKING`.
        unranked: tokens whose logits are -inf for the probabilities of a row; they may be chosen. None for no such tokens.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) == mask_token_id, -jnp.inf, logits)
    rule = jnp.asarray(rule)
    temperature = jnp.asarray(rows.temperature)
    draws = (temperature > 0) | filters(rows)

    def inputs(row: Array) -> tuple[Array, Array, Array]:
        """Returns a row's logits, `[1, K, V]`, its keys and a random number for each position, `[1, K]`."""
        keys = step_keys(slice_row(row, rows), slice_row(row, positions), slice_row(row, steps))
        chance = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1))))(keys)
        return slice_row(row, logits), keys, chance

    def ranking(row: Array, row_logits: Array) -> Array:
        """Returns the logits whose probabilities rank a row's positions."""
        if unranked is None:
            return row_logits
        return jnp.where(slice_row(row, unranked)[:, None], -jnp.inf, row_logits)

    def ranked(row: Array, found: Choices) -> Choices:
        row_logits, _, chance = inputs(row)
        token = slice_row(row, found.token)
        return with_row(found, row, ranked_by(slice_row(row, rule), ranking(row, row_logits), token, chance))

    def drawn(row: Array, found: Choices) -> Choices:
        row_logits, keys, chance = inputs(row)
        row_rule, row_sampling = slice_row(row, (rule, rows))
        filtered = filters(row_sampling)[0]  # filters take 64 passes over the logits
        kept = run_if(filtered, row, lambda _, logits: warp_logits(logits, row_sampling), row_logits)
        drawn_from: Any = jnp.where(filtered, kept, temper(row_logits, row_sampling))
        noisy = drawn_from + jnp.where(temperature[row] > 0, step_noise(keys, row_logits.shape[-1]), 0.0)
        is_llada = row_rule[0] < len(LLADA_RULES)
        ranked_logits = jnp.where(is_llada, row_logits, drawn_from)
        return with_row(found, row, ranked_by(row_rule, ranking(row, ranked_logits), argmax(noisy), chance))

    likely = 1 / jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1)
    found = Choices(argmax(logits), likely, likely)
    by_likelihood = (rule == REMASKING.index("low_confidence")) | (rule == REMASKING.index("maskgit_plus"))
    if unranked is not None:
        by_likelihood &= ~jnp.any(unranked, axis=1)
    return for_each(draws, drawn, for_each(~by_likelihood & ~draws, ranked, found))


def with_row(found: Tree, row: Array, one: Tree) -> Tree:
    """Replaces one row of arrays with an entry for each row."""
    return jax.tree.map(lambda whole, new: jax.lax.dynamic_update_slice_in_dim(whole, new, row, 0), found, one)


def commits(
    choices: Choices, candidates: Bool[Array, "B K"], options: RowOptions, block_step: Int[Array, " B"]
) -> Bool[Array, "B K"]:
    """Returns a mask of the committed candidates; of equal scores the first position wins."""
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
    committed = jnp.where(threshold < ALWAYS, by_threshold, by_quota)
    origin = jnp.asarray(options.rule)[:, None] == REMASKING.index("origin")
    committed = jnp.where(origin, choices.score < share, committed)
    alone = (jnp.asarray(options.first_alone) & (block_step == 0)) | jnp.asarray(options.left_to_right)
    return candidates & jnp.where(alone[:, None], jnp.cumsum(candidates, axis=1) == 1, committed)
