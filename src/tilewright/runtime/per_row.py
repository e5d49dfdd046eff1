"""Sampling for batches that mix rows of every kind: a row pays for what it asks, and the others do not.

The argmax is taken for all rows together, if one of them wants it. Rows that ask for more are gone through in a loop on the
device that has as many turns as it takes: one by one on a CPU, whose caches hold the logits of a row and hardly those of
several, and in groups of one kind on accelerators. Of a block one slot after the other is drawn, up to the first token that is
not the block's own, for none behind it is committed. The functions are those of `sampling.py`, on slices.
"""

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
    threshold,
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


def counted(x: Tree, counter: Array) -> Tree:
    """Arrays that XLA takes to depend on a loop's counter."""
    return jax.lax.optimization_barrier((x, counter))[0]


def for_each(which: Bool[Array, " N"], run: Callable[[Array, Tree], Tree], carry: Tree) -> Tree:
    """`carry = run(n, carry)` for each `n` that `which` names, in ascending order: no turn for the others."""
    order = jnp.argsort(~which, stable=True)
    return jax.lax.fori_loop(0, jnp.sum(which), lambda turn, carry: run(counted(order[turn], turn), carry), carry)


TOGETHER = 16
"""Rows that draw a single token together on a TPU, at most."""


def drawn_together(batch: int, slots: int) -> int:
    """Number of rows that draw together.

    Of a block one. Of single tokens on a CPU also one, whose logits stay in its caches; on a GPU all, for a turn costs as much
    there as a draw of all rows.
    """
    backend = jax.default_backend()
    if slots > 1 or backend == "cpu":
        return 1
    return batch if backend == "gpu" else min(batch, TOGETHER)


def in_groups(kinds: Bool[Array, "K N"], most: int, run: Callable[[Array, Array, Array, Tree], Tree], carry: Tree) -> Tree:
    """`carry = run(kind, members, count, carry)` for groups of up to `most` rows of one kind, one kind after the other.

    Only the first `count` of the `most` members are meant. A row is of one kind at most.
    """
    counts = jnp.sum(kinds, axis=1)
    order = jnp.argsort(~kinds, axis=1, stable=True)
    turns = (counts + most - 1) // most
    ends = jnp.cumsum(turns)

    def turn(n: Array, carry: Tree) -> Tree:
        kind = jnp.sum(n >= ends)
        first = (n - (ends - turns)[kind]) * most
        members = order[kind, jnp.minimum(first + jnp.arange(most), kinds.shape[1] - 1)]
        return run(kind, counted(members, n), jnp.minimum(counts[kind] - first, most), carry)

    return jax.lax.fori_loop(0, ends[-1], turn, carry)


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


TRIES = 8
"""How many of the best tokens `draw_kept` asks for before it filters them all."""


def draw_kept(tempered: Float[Array, "B T V"], scores: Float[Array, "B T V"], rows: RowSampling) -> Int32[Array, "B T"]:
    """Tokens drawn after all filters, in loops whose length is data: much less work than `sampling.sample`.

    Top-p takes a bisection, 32 passes over the vocabulary. But what is wanted is the first token in the order of the draw that
    it keeps, and whether it keeps a single one takes one pass: those that are more likely must hold less than the mass. Of the
    best ones, a nucleus of mass m keeps each with a chance of about m.

    Args:
        tempered: logits at the rows' temperatures.
        scores: these with the draw's noise.
    """
    once = jnp.int32(0)
    asked = jnp.any(jnp.asarray(rows.top_k) > 0)
    kept = where_asked(asked, once, lambda _, kept: keep_best(kept, rows), tempered)
    of = nucleus(kept, rows)
    scores = jnp.where(keep_likely(kept, rows) > -jnp.inf, scores, -jnp.inf)
    whole = jnp.asarray(rows.top_p)[:, None] >= 1
    place = jnp.arange(tempered.shape[-1])

    def searching(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, tokens = carry
        return (tries < TRIES) & jnp.any(tokens < 0)

    def search(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, left, tokens = carry
        best = argmax(left)
        before = of.order > jnp.take_along_axis(of.order, best[..., None], axis=-1)
        found = whole | (of.holding(before) < of.mass)[..., 0]
        left = jnp.where(place == best[..., None], -jnp.inf, left)
        return tries + 1, left, jnp.where((tokens < 0) & found, best, tokens)

    unknown = jnp.full(scores.shape[:-1], -1, jnp.int32)
    tokens = jax.lax.while_loop(searching, search, (jnp.int32(0), scores, unknown))[2]

    def filter_all(n: Array, tokens: Array) -> Array:
        least = threshold(counted(of.order, n), lambda kept: of.holding(kept) >= of.mass)
        filtered = jnp.where((of.order >= least) | whole[..., None], scores, -jnp.inf)
        return jnp.where(tokens < 0, argmax(filtered), tokens)

    return where_asked(jnp.any(tokens < 0), once, filter_all, tokens)


def draw(
    logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"], filtering: Bool[Array, ""]
) -> Int32[Array, "B T"]:
    """Tokens of rows that all draw; `filtering` says if it is from less than the whole vocabulary."""
    once = jnp.int32(0)
    tempered = temper(logits, rows)
    scores = tempered + noise(rows, positions, logits.shape[-1])
    unknown = jnp.full(positions.shape, -1, jnp.int32)
    tokens = where_asked(~filtering, once, lambda n, _: argmax(counted(scores, n)), unknown)
    return where_asked(filtering, once, lambda n, _: draw_kept(*counted((tempered, scores), n), rows), tokens)


def sample_each(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    history: PenaltyHistory,
    positions: Int32[Array, "B T"],
    asking: Bool[Array, " B"],
) -> Int32[Array, "B T"]:
    """Each row's tokens at `positions`, those that the kind of program draws that serves the row alone.

    Of a row that draws they are given up to the first that is not the block's next one; what stands behind it means nothing.

    Args:
        asking: what rows that are not get means nothing, and costs nothing.
    """
    penalised = penalises(rows)
    filtered = filters(rows)
    drawn = jnp.asarray(rows.temperature) > 0
    (batch, slots, _), nothing = logits.shape, jnp.zeros(positions.shape, jnp.int32)
    together = drawn_together(batch, slots)

    def penalise_one(row: Array, known: tuple[Array, Array]) -> tuple[Array, Array]:
        own = penalise(known[0], of_row(row, rows), *of_row(row, history))
        return own, argmax(own)

    def taken(row: Array, tokens: Array) -> tuple[Array, Array]:
        """A row's logits, penalised if it asks for that, and the best tokens of these."""
        return where_asked(penalised[row], row, penalise_one, of_row(row, (logits, tokens)))

    def draw_group(kind: Array, members: Array, count: Array, tokens: Array) -> Array:
        def take(k: Array, group: tuple[Array, Array]) -> tuple[Array, Array]:
            return jax.tree.map(partial(put, place=k), group, taken(members[k], tokens))

        if together == 1:
            own, best = taken(members[0], tokens)
        else:
            own, best = jax.lax.fori_loop(0, count, take, (jnp.zeros((together, *logits.shape[1:])), tokens[members]))
        given = rows, positions, history.block
        settings, places, block = jax.tree.map(lambda each: jnp.asarray(each)[members], given)
        found = draw_slots(own, settings, places, block, kind == 2, best, kind > 0)
        return jax.lax.fori_loop(0, count, lambda k, tokens: put(tokens, of_row(k, found), members[k]), tokens)

    greedy = jnp.any(asking & ~penalised & ~drawn)
    tokens = where_asked(greedy, jnp.int32(0), lambda n, _: argmax(counted(logits, n)), nothing)
    kinds = jnp.stack([penalised & ~drawn, drawn & ~filtered, drawn & filtered])
    return in_groups(asking & kinds, together, draw_group, tokens)


def put(whole: Array, one: Array, place: Array) -> Array:
    """The array with an entry, a batch of one, at a place."""
    return jax.lax.dynamic_update_slice_in_dim(whole, one, place, 0)


def draw_slots(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    positions: Int32[Array, "B T"],
    block: Int32[Array, "B T"],
    filtering: Bool[Array, ""],
    best: Int32[Array, "B T"],
    drawing: Bool[Array, ""],
) -> Int32[Array, "B T"]:
    """Tokens of one row slot by slot, up to the first that is not the block's next one; or of several that have one slot each.

    Args:
        best: what stays unless they are `drawing`.
    """

    def draw_slot(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot, tokens, _ = carry
        own, place = (jax.lax.dynamic_slice_in_dim(each, slot, 1, axis=1) for each in (logits, positions))
        token = draw(*counted((own, rows, place), slot), filtering)
        following = jax.lax.dynamic_slice_in_dim(block, jnp.minimum(slot + 1, block.shape[1] - 1), 1, axis=1)
        more = (slot + 1 < block.shape[1]) & (token == following)[0, 0]
        return slot + 1, jax.lax.dynamic_update_slice_in_dim(tokens, token, slot, 1), more

    return jax.lax.while_loop(lambda carry: carry[2], draw_slot, (jnp.int32(0), best, drawing))[1]
