"""Sampling for batches that mix rows of every kind: a row pays for what it asks, and the others do not.

The argmax is taken for all rows together. Whoever asks for more is gone through one by one, in a loop on the device that has as
many turns as there are such rows, and within it penalties, draws and filters are loops of one turn or none. The functions are
those of `sampling.py`, on slices of one row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from tilewright.decode.sampling import RowSampling, Warp, draw, penalise
from tilewright.kernels.select import argmax

Tree = TypeVar("Tree")


class History(NamedTuple):
    """What penalties read: `tokens` `[B, L]`, settled up to `known` `[B]`, and the `block` `[B, T]`; see `penalise`."""

    tokens: Any
    known: Any
    block: Any


def of_row(row: Array, arrays: Tree) -> Tree:
    """One row of arrays that have one for each, as a batch of one."""
    return jax.tree.map(lambda each: jax.lax.dynamic_slice_in_dim(jnp.asarray(each), row, 1), arrays)


def for_each(which: Bool[Array, " N"], run: Callable[[Array, Tree], Tree], carry: Tree) -> Tree:
    """`carry = run(n, carry)` for each `n` that `which` names, in ascending order: no turn for the others."""
    order = jnp.argsort(~which, stable=True)
    return jax.lax.fori_loop(0, jnp.sum(which), lambda turn, carry: run(order[turn], carry), carry)


def where_asked(asked: Bool[Array, ""], row: Array, run: Callable[[Array, Array], Array], otherwise: Array) -> Array:
    """`run(row, otherwise)` if `asked`, in a loop of one turn or none: on a CPU, XLA copies what it gives to a branch.

    What does not depend on a loop's counter XLA computes before it, asked or not. So the counter is the row: all that costs
    must be of `run`'s own.
    """
    return jax.lax.fori_loop(row, row + asked.astype(row.dtype), run, otherwise)


def penalises(rows: RowSampling) -> Bool[Array, " B"]:
    """Which rows have penalties."""
    repetition, presence, frequency = map(jnp.asarray, (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty))
    return (repetition != 1) | (presence != 0) | (frequency != 0)


def filters(rows: RowSampling) -> Bool[Array, " B"]:
    """Which rows draw from less than the whole vocabulary, if they draw."""
    top_p, top_k, min_p = map(jnp.asarray, (rows.top_p, rows.top_k, rows.min_p))
    return (top_p != 1) | (top_k != 0) | (min_p != 0)


def sample_each(
    logits: Float[Array, "B T V"], rows: RowSampling, history: History, positions: Int32[Array, "B T"],
    asking: Bool[Array, " B"],
) -> Int32[Array, "B T"]:  # fmt: skip
    """Each row's tokens at `positions`, those that the kind of program draws that serves the row alone.

    Args:
        asking: what rows that are not get means nothing, and costs nothing.
    """
    penalised, filtered, drawn = penalises(rows), filters(rows), jnp.asarray(rows.temperature) > 0

    def penalise_one(row: Array, own: Array) -> Array:
        return penalise(own, of_row(row, rows), *of_row(row, history))

    def draw_one(own: Array, warp: Warp, row: Array, _: Array) -> Array:
        return draw(own, of_row(row, rows), of_row(row, positions), warp)

    def settle(row: Array, tokens: Array) -> Array:
        own = where_asked(penalised[row], row, penalise_one, of_row(row, logits))
        token = argmax(own)
        token = where_asked(drawn[row] & ~filtered[row], row, partial(draw_one, own, "plain"), token)
        token = where_asked(drawn[row] & filtered[row], row, partial(draw_one, own, "filtered"), token)
        return jax.lax.dynamic_update_slice_in_dim(tokens, token, row, 0)

    return for_each(asking & (penalised | drawn), settle, argmax(logits))
