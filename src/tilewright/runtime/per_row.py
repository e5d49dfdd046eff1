"""Sampling for batches that mix rows of every kind: a row pays for what it asks, and the others do not.

The argmax is taken for all rows together, if one of them wants it. Rows that draw are gone through in loops on the device that
have as many turns as it takes: where a row has a single token, many at once, for there a turn costs more than its rows; of a
block one slot after the other, up to the first token that is not the block's own, for none behind it is committed. Rows with
penalties are gone through one by one. The functions are those of `sampling.py`, on slices.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tilewright.kernels.select import argmax
from tilewright.runtime.sampling import (
    NOBODY,
    RowSampling,
    keep_best,
    keep_likely,
    noise,
    nucleus,
    penalise,
    temper,
    warp_logits,
)

Tree = TypeVar("Tree")


class PenaltyHistory(NamedTuple):
    """Tokens that `penalise` counts: `tokens` `[B, L]`, committed up to `known` `[B]`, and the `block` `[B, T]`."""

    tokens: Any
    known: Any
    block: Any


def of_row(row: Array, arrays: Tree) -> Tree:
    """One row of arrays that have one for each, as a batch of one.

    In a loop whose counter the row depends on, what is made of it stays in there, even where there is only one: XLA would
    compute it before the loop, asked for or not.
    """
    own = jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(jnp.asarray(each), row, 1), arrays)
    return jax.lax.optimization_barrier((own, row))[0]


def counted(x: Array, counter: Array) -> Array:
    """An array that XLA takes to depend on a loop's counter."""
    return jax.lax.optimization_barrier((x, counter))[0]


def for_each(which: Bool[Array, " N"], run: Callable[[Array, Tree], Tree], carry: Tree) -> Tree:
    """`carry = run(n, carry)` for each `n` that `which` names, in ascending order: no turn for the others."""
    order = jnp.argsort(~which, stable=True)
    return jax.lax.fori_loop(0, jnp.sum(which), lambda turn, carry: run(counted(order[turn], turn), carry), carry)


TOGETHER = 16
"""How many rows draw a single token together at most."""


def for_some(which: Bool[Array, " N"], most: int, run: Callable[[list[Array], Array], list[Array]], carry: Array) -> Array:
    """Replaces the rows of `carry` that `which` names by what `run` makes of their numbers, `most` at a time.

    The last time, rows that were asked for before, or not at all, may fill up; what is made of those is dropped.
    """
    count, order = jnp.sum(which), jnp.argsort(~which, stable=True)

    def turn(n: Array, carry: Array) -> Array:
        places = [n * most + k for k in range(most)]
        rows = [counted(order[jnp.minimum(place, which.shape[0] - 1)], n) for place in places]
        for place, row, made in zip(places, rows, run(rows, carry), strict=True):
            made = jnp.where(place < count, made, of_row(row, carry))
            carry = jax.lax.dynamic_update_slice_in_dim(carry, made, row, 0)
        return carry

    turns = jnp.sum(count > jnp.arange(0, which.shape[0], most))
    return jax.lax.fori_loop(0, turns, turn, carry)


def where_asked(asked: Bool[Array, ""], row: Array, run: Callable[[Array, Tree], Tree], otherwise: Tree) -> Tree:
    """`run(row, otherwise)` if `asked`, in a loop of one turn or none: on a CPU, XLA copies what it gives to a branch.

    What depends neither on a loop's counter nor on what it carries XLA computes before it, asked or not. So the counter is the
    row: all that costs must be made of `run`'s own arguments.
    """
    return jax.lax.fori_loop(row, row + asked.astype(row.dtype), run, otherwise)


def penalises(rows: RowSampling) -> Bool[Array, " B"]:
    """Mask of the rows that change logits: by penalties, biases, or tokens that may not come yet."""
    repetition, presence, frequency = map(jnp.asarray, (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty))
    return (repetition != 1) | (presence != 0) | (frequency != 0) | (jnp.asarray(rows.adjusted)[:, 0] != NOBODY)


def filters(rows: RowSampling) -> Bool[Array, " B"]:
    """Mask of the rows that draw from less than the whole vocabulary, if they draw."""
    top_p, top_k, min_p = map(jnp.asarray, (rows.top_p, rows.top_k, rows.min_p))
    return (top_p != 1) | (top_k != 0) | (min_p != 0)


Draw = Callable[[Array, RowSampling, Array], Array]
"""`draw(logits, rows, positions)`: the tokens `[B, T]` of rows that all draw."""


def draw_plain(logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Tokens drawn from the whole tempered distribution."""
    return argmax(temper(logits, rows) + noise(rows, positions, logits.shape[-1]))


TRIES = 8
"""How many of the best tokens `draw_kept` asks for before it filters them all."""


def draw_kept(logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Tokens drawn after all filters, in loops whose length is data: much less work than `draw`.

    Top-p takes a bisection, 32 passes over the vocabulary. But what is wanted is the first token in the order of the draw that
    it keeps, and whether it keeps a single one takes one pass: those that are more likely must hold less than the mass. Of the
    best ones, a nucleus of mass m keeps each with a chance of about m.
    """
    once, asked = jnp.int32(0), jnp.any(jnp.asarray(rows.top_k) > 0)
    kept = where_asked(asked, once, lambda _, kept: keep_best(kept, rows), temper(logits, rows))
    of, random = nucleus(kept, rows), noise(rows, positions, logits.shape[-1])
    whole, place = jnp.asarray(rows.top_p)[:, None] >= 1, jnp.arange(logits.shape[-1])

    def searching(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, tokens = carry
        return (tries < TRIES) & jnp.any(tokens < 0)

    def search(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, scores, tokens = carry
        best = argmax(scores)
        before = of.order > jnp.take_along_axis(of.order, best[..., None], axis=-1)
        found = whole | (of.holding(before) < of.mass)[..., 0]
        scores = jnp.where(place == best[..., None], -jnp.inf, scores)
        return tries + 1, scores, jnp.where((tokens < 0) & found, best, tokens)

    unknown = jnp.full(positions.shape, -1, jnp.int32)
    tokens = jax.lax.while_loop(searching, search, (jnp.int32(0), keep_likely(kept, rows) + random, unknown))[2]

    def filter_all(_: Array, tokens: Array) -> Array:
        left = jnp.where(tokens[..., None] < 0, logits, 0.0)
        return jnp.where(tokens < 0, argmax(warp_logits(left, rows) + random), tokens)

    return where_asked(jnp.any(tokens < 0), once, filter_all, tokens)


def sample_each(
    logits: Float[Array, "B T V"], rows: RowSampling, history: PenaltyHistory, positions: Int32[Array, "B T"],
    asking: Bool[Array, " B"],
) -> Int32[Array, "B T"]:  # fmt: skip
    """Each row's tokens at `positions`, those that the kind of program draws that serves the row alone.

    Of a row that draws they are given up to the first that is not the block's next one; what stands behind it means nothing.

    Args:
        asking: what rows that are not get means nothing, and costs nothing.
    """
    penalised, filtered, drawn = penalises(rows), filters(rows), jnp.asarray(rows.temperature) > 0

    def penalise_one(row: Array, known: tuple[Array, Array]) -> tuple[Array, Array]:
        own = penalise(known[0], of_row(row, rows), *of_row(row, history))
        return own, argmax(own)

    def draw_row(row: Array, tokens: Array) -> Array:
        own, best = where_asked(penalised[row], row, penalise_one, of_row(row, (logits, tokens)))
        kinds = [(drawn[row] & ~filtered[row], draw_plain), (drawn[row] & filtered[row], draw_kept)]
        found = draw_slots(own, of_row(row, rows), of_row(row, positions), of_row(row, history.block), kinds, best)
        return jax.lax.dynamic_update_slice_in_dim(tokens, found, row, 0)

    def draw_some(how: Draw, some: list[Array], _: Array) -> list[Array]:
        own = [of_row(row, (logits, rows, positions)) for row in some]
        asked, sampling, places = jax.tree.map(lambda *each: jnp.concatenate(each), *own)
        return jnp.split(how(asked, sampling, places), len(some))

    greedy, nothing = jnp.any(asking & ~penalised & ~drawn), jnp.zeros(positions.shape, jnp.int32)
    tokens = where_asked(greedy, jnp.int32(0), lambda n, _: argmax(counted(logits, n)), nothing)
    if logits.shape[1] > 1:
        return for_each(asking & (penalised | drawn), draw_row, tokens)
    tokens = for_each(asking & penalised, draw_row, tokens)
    together, left = min(logits.shape[0], TOGETHER), asking & drawn & ~penalised
    if jax.default_backend() == "gpu":
        # A turn of the loop costs a GPU as much as a draw of all rows.
        def draw_all(n: Array, tokens: Array) -> Array:
            found = draw_plain(counted(logits, n), rows, positions)
            return jnp.where((left & ~filtered)[:, None], found, tokens)

        tokens = where_asked(jnp.any(left & ~filtered), jnp.int32(0), draw_all, tokens)
    else:
        tokens = for_some(left & ~filtered, together, partial(draw_some, draw_plain), tokens)
    return for_some(left & filtered, together, partial(draw_some, draw_kept), tokens)


def draw_slots(
    logits: Float[Array, "1 T V"], row: RowSampling, positions: Int32[Array, "1 T"], block: Int32[Array, "1 T"],
    kinds: list[tuple[Bool[Array, ""], Draw]], best: Int32[Array, "1 T"],
) -> Int32[Array, "1 T"]:  # fmt: skip
    """A row's tokens, slot by slot up to the first that is not the block's next one.

    Args:
        kinds: how it draws: whichever is true; `best` stays where none is.
    """
    size = block.shape[1]

    def draw_one(how: Draw, slot: Array, _: Array) -> Array:
        own, place = (jax.lax.dynamic_slice_in_dim(each, slot, 1, axis=1) for each in (logits, positions))
        return how(own, row, place)

    def draw_slot(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot, tokens, _ = carry
        token = jax.lax.dynamic_slice_in_dim(tokens, slot, 1, axis=1)
        for asked, how in kinds:
            token = where_asked(asked, slot, partial(draw_one, how), token)
        following = jax.lax.dynamic_slice_in_dim(block, jnp.minimum(slot + 1, size - 1), 1, axis=1)
        more = (slot + 1 < size) & (token == following)[0, 0]
        return slot + 1, jax.lax.dynamic_update_slice_in_dim(tokens, token, slot, 1), more

    first = functools.reduce(jnp.logical_or, [asked for asked, _ in kinds])
    return jax.lax.while_loop(lambda carry: carry[2], draw_slot, (jnp.int32(0), best, first))[1]
