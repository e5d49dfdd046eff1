"""Sampling of batches that mix all kinds of rows: each row costs only what its own options need.

If any row needs the plain argmax, it is taken for all rows together. Rows with further options run in a loop on the device: row
by row on a CPU, whose caches hold the logits of about one row, and in groups of one kind on accelerators. The slots of a block
are drawn one after another, up to the first token that differs from the block's next one, since none behind it is committed.
The functions are those of `sampling.py`, on slices.
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
    NO_TOKEN,
    RowSampling,
    keep_best,
    keep_likely,
    noise,
    nucleus,
    penalise,
    temper,
    threshold,
)
from tilewright.runtime.trees import DraftTree

Tree = TypeVar("Tree")


class PenaltyHistory(NamedTuple):
    """History of `penalise`: `tokens` `[B, L]`, committed up to `last_position` `[B]`, and the `block` `[B, T]`."""

    tokens: Any
    last_position: Any
    block: Any


def slice_row(row: Array, arrays: Tree) -> Tree:
    """Slices one row from arrays with an entry for each row, as a batch of one.

    In a loop whose counter determines the row, computations on the slice stay inside the loop, even for a batch of one row. XLA
    would otherwise hoist them out of the loop, and compute them unconditionally.
    """
    sliced = jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(jnp.asarray(each), row, 1), arrays)
    return jax.lax.optimization_barrier((sliced, row))[0]


def tied(x: Tree, counter: Array) -> Tree:
    """Makes arrays depend on a loop's counter, as far as XLA knows, so that it does not hoist their users out of the loop."""
    return jax.lax.optimization_barrier((x, counter))[0]


def for_each(mask: Bool[Array, " N"], run: Callable[[Array, Tree], Tree], carry: Tree) -> Tree:
    """Runs `carry = run(n, carry)` for each `n` that is true in `mask`, in ascending order, without iterations for others."""
    order = jnp.argsort(~mask, stable=True)
    return jax.lax.fori_loop(0, jnp.sum(mask), lambda i, carry: run(tied(order[i], i), carry), carry)


TOGETHER = 16
"""The most rows that draw a single token together on a TPU."""


def drawn_together(batch: int, slots: int) -> int:
    """Returns the number of rows that draw together.

    It is 1 for blocks, and for single tokens on a CPU, whose caches then hold the row's logits. On a GPU all rows draw
    together, since an iteration costs as much as a draw of all rows.
    """
    backend = jax.default_backend()
    if slots > 1 or backend == "cpu":
        return 1
    return batch if backend == "gpu" else min(batch, TOGETHER)


def in_groups(kinds: Bool[Array, "K N"], most: int, run: Callable[[Array, Array, Array, Tree], Tree], carry: Tree) -> Tree:
    """Runs `carry = run(kind, members, count, carry)` for groups of up to `most` rows of one kind, one kind after the other.

    Only the first `count` of the `most` members are valid. A row is of at most one kind.
    """
    counts = jnp.sum(kinds, axis=1)
    order = jnp.argsort(~kinds, axis=1, stable=True)
    groups = (counts + most - 1) // most
    ends = jnp.cumsum(groups)

    def run_group(n: Array, carry: Tree) -> Tree:
        kind = jnp.sum(n >= ends)
        first = (n - (ends - groups)[kind]) * most
        members = order[kind, jnp.minimum(first + jnp.arange(most), kinds.shape[1] - 1)]
        return run(kind, tied(members, n), jnp.minimum(counts[kind] - first, most), carry)

    return jax.lax.fori_loop(0, ends[-1], run_group, carry)


def run_if(condition: Bool[Array, ""], row: Array, run: Callable[[Array, Tree], Tree], otherwise: Tree) -> Tree:
    """Returns `run(row, otherwise)` if `condition` is true, else `otherwise`.

    It is a loop of at most one iteration, since XLA:CPU copies the inputs of a branch. XLA hoists computations that depend
    neither on a loop's counter nor on its carry, and runs them unconditionally. So the counter is the row, and all costly
    computations must depend on the arguments of `run`.
    """
    return jax.lax.fori_loop(row, row + condition.astype(row.dtype), run, otherwise)


def penalises(rows: RowSampling) -> Bool[Array, " B"]:
    """Returns a mask of the rows that change logits: by penalties, biases, or masked tokens."""
    repetition, presence, frequency = map(jnp.asarray, (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty))
    return (repetition != 1) | (presence != 0) | (frequency != 0) | (jnp.asarray(rows.adjusted)[:, 0] != NO_TOKEN)


def filters(rows: RowSampling) -> Bool[Array, " B"]:
    """Returns a mask of the rows that filter the vocabulary, if they draw."""
    top_p, top_k, min_p = map(jnp.asarray, (rows.top_p, rows.top_k, rows.min_p))
    return (top_p != 1) | (top_k != 0) | (min_p != 0)


TRIES = 8
"""Number of best tokens that `draw_kept` tests one by one before it filters the whole vocabulary."""


def draw_kept(tempered: Float[Array, "B T V"], scores: Float[Array, "B T V"], rows: RowSampling) -> Int32[Array, "B T"]:
    """Draws tokens after all filters, in loops of data-dependent length, with much less work than `sampling.sample`.

    Top-p by bisection takes 32 passes over the vocabulary. But a draw needs only the best-scored token that top-p keeps, and
    one pass tests whether it keeps a token: the more likely tokens must hold less than the mass. A nucleus of mass m keeps each
    of the best tokens with a probability of about m.

    Args:
        tempered: logits divided by the rows' temperatures.
        scores: `tempered` plus the noise of the draw.
    """
    once = jnp.int32(0)
    limited = jnp.any(jnp.asarray(rows.top_k) > 0)
    kept = run_if(limited, once, lambda _, kept: keep_best(kept, rows), tempered)
    top_p = nucleus(kept, rows)
    scores = jnp.where(keep_likely(kept, rows) > -jnp.inf, scores, -jnp.inf)
    whole = jnp.asarray(rows.top_p)[:, None] >= 1
    place = jnp.arange(tempered.shape[-1])

    def searching(carry: tuple[Array, Array, Array]) -> Array:
        tries, _, tokens = carry
        return (tries < TRIES) & jnp.any(tokens < 0)

    def search(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, left, tokens = carry
        best = argmax(left)
        before = top_p.order > jnp.take_along_axis(top_p.order, best[..., None], axis=-1)
        found = whole | (top_p.holding(before) < top_p.mass)[..., 0]
        left = jnp.where(place == best[..., None], -jnp.inf, left)
        return tries + 1, left, jnp.where((tokens < 0) & found, best, tokens)

    unknown = jnp.full(scores.shape[:-1], -1, jnp.int32)
    tokens = jax.lax.while_loop(searching, search, (jnp.int32(0), scores, unknown))[2]

    def filter_all(n: Array, tokens: Array) -> Array:
        least = threshold(tied(top_p.order, n), lambda kept: top_p.holding(kept) >= top_p.mass)
        filtered = jnp.where((top_p.order >= least) | whole[..., None], scores, -jnp.inf)
        return jnp.where(tokens < 0, argmax(filtered), tokens)

    return run_if(jnp.any(tokens < 0), once, filter_all, tokens)


def draw(
    logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"], filtering: Bool[Array, ""]
) -> Int32[Array, "B T"]:
    """Draws the tokens of rows that all draw; `filtering` is true if they filter the vocabulary."""
    once = jnp.int32(0)
    tempered = temper(logits, rows)
    scores = tempered + noise(rows, positions, logits.shape[-1])
    unknown = jnp.full(positions.shape, -1, jnp.int32)
    tokens = run_if(~filtering, once, lambda n, _: argmax(tied(scores, n)), unknown)
    return run_if(filtering, once, lambda n, _: draw_kept(*tied((tempered, scores), n), rows), tokens)


def sample_each(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    history: PenaltyHistory,
    positions: Int32[Array, "B T"],
    asking: Bool[Array, " B"],
    tree: DraftTree | None = None,
) -> Int32[Array, "B T"]:
    """Draws each row's tokens at `positions`: the same tokens as a program for that row alone.

    A row that draws has valid tokens up to the first one that differs from the block's next token, or along the path that its
    tokens take through its tree; the others are undefined.

    Args:
        asking: rows that need tokens; the tokens of other rows are undefined and cost nothing.
    """
    penalised = penalises(rows)
    filtered = filters(rows)
    drawn = jnp.asarray(rows.temperature) > 0
    (batch, slots, _), nothing = logits.shape, jnp.zeros(positions.shape, jnp.int32)
    together = drawn_together(batch, slots)

    def penalise_row(row: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        branches = {} if tree is None else {"tree": slice_row(row, tree)}
        changed = penalise(inputs[0], slice_row(row, rows), *slice_row(row, history), **branches)
        return changed, argmax(changed)

    def row_logits(row: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns a row's logits, penalised if necessary, and their best tokens."""
        return run_if(penalised[row], row, penalise_row, slice_row(row, (logits, tokens)))

    def draw_group(kind: Array, members: Array, count: Array, tokens: Array) -> Array:
        def add_row(k: Array, group: tuple[Array, Array]) -> tuple[Array, Array]:
            return jax.tree.map(partial(set_row, place=k), group, row_logits(members[k], tokens))

        if together == 1:
            group_logits, best = row_logits(members[0], tokens)
        else:
            empty = jnp.zeros((together, *logits.shape[1:]))
            group_logits, best = jax.lax.fori_loop(0, count, add_row, (empty, tokens[members]))
        arrays = rows, positions, history.block, None if tree is None else tree.parents
        settings, places, block, parents = jax.tree.map(lambda each: jnp.asarray(each)[members], arrays)
        branches = () if parents is None else (parents,)
        found = draw_slots(group_logits, settings, places, block, kind == 2, best, kind > 0, *branches)
        return jax.lax.fori_loop(0, count, lambda k, tokens: set_row(tokens, slice_row(k, found), members[k]), tokens)

    greedy = jnp.any(asking & ~penalised & ~drawn)
    tokens = run_if(greedy, jnp.int32(0), lambda n, _: argmax(tied(logits, n)), nothing)
    kinds = jnp.stack([penalised & ~drawn, drawn & ~filtered, drawn & filtered])
    return in_groups(asking & kinds, together, draw_group, tokens)


def set_row(whole: Array, row: Array, place: Array) -> Array:
    """Returns the array with the row at `place` replaced by `row`, a batch of one."""
    return jax.lax.dynamic_update_slice_in_dim(whole, row, place, 0)


def draw_slots(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    positions: Int32[Array, "B T"],
    block: Int32[Array, "B T"],
    filtering: Bool[Array, ""],
    best: Int32[Array, "B T"],
    drawing: Bool[Array, ""],
    parents: Int32[Array, "B T"] | None = None,
) -> Int32[Array, "B T"]:
    """Draws the tokens of one row slot by slot, up to the first that differs from the block's next token; or of one-slot rows.

    Args:
        best: result if they are not `drawing`.
        parents: for a tree, see `DraftTree.parents`: the slot behind another one is the child with its token.
    """

    def draw_slot(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot, tokens, _ = carry
        slot_logits, place = (jax.lax.dynamic_slice_in_dim(each, slot, 1, axis=1) for each in (logits, positions))
        token = draw(*tied((slot_logits, rows, place), slot), filtering)
        if parents is not None:
            is_next = (parents[0] == slot) & (block[0] == token[0, 0])
            drawn = jax.lax.dynamic_update_slice_in_dim(tokens, token, slot, 1)
            return jnp.argmax(is_next).astype(slot.dtype), drawn, jnp.any(is_next)
        following = jax.lax.dynamic_slice_in_dim(block, jnp.minimum(slot + 1, block.shape[1] - 1), 1, axis=1)
        more = (slot + 1 < block.shape[1]) & (token == following)[0, 0]
        return slot + 1, jax.lax.dynamic_update_slice_in_dim(tokens, token, slot, 1), more

    return jax.lax.while_loop(lambda carry: carry[2], draw_slot, (jnp.int32(0), best, drawing))[1]
