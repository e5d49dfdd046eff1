"""Prefill: writes prompts into the caches, chunk by chunk, each row at its own position."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from tilewright.models import decoder
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.logprobs import Logprobs, logprobs_of, no_logprobs
from tilewright.runtime.per_row import for_each, slice_row
from tilewright.runtime.pooling import pooled
from tilewright.runtime.state import DecodeState, Models, Span, Target, block_positions, run_target


class Prefilled(NamedTuple):
    """Result of a prefill, beside the state.

    Attributes:
        end: position behind each row's chunk, int32 `[B]`. The host waits for this array, since the state is donated to the
            next program.
        logprobs: log-probabilities of the tokens behind each token, `[B, chunk]`: slot t has that of the token at position
            `start + t + 1`. None if rows cannot want any.
        pooled: pooled hidden states of the chunk, float32 `[B, 2, H]`, see `pooling.pooled`; None likewise.
    """

    end: Any
    logprobs: Logprobs | None = None
    pooled: Any = None


def prefill(
    target: Target,
    drafter: Drafter | None,
    chunk: int,
    models: Models,
    state: DecodeState,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    wanted: Bool[Array, " B"] | None = None,
) -> tuple[DecodeState, Prefilled]:
    """Runs each row's committed tokens at positions `start` to `start + count - 1` and fills both caches. DONATES state.

    Rows with count 0 do not change, so that others may be admitted while they decode.

    Args:
        chunk: the most tokens of a row; the program always computes that many.
        count: at most `chunk`. A row's spans are contiguous, and its tokens up to `start + count` are committed.
        wanted: rows that get log-probabilities. The output head runs for these rows only. None if nothing reads the last
            layer's hidden states.

    Returns:
        the state, and the result, which is `end` alone without `wanted`.
    """
    state, hidden = run_chunk(target, drafter, chunk, models, state, start, count)
    if wanted is None:
        return state, Prefilled(start + count)
    following = tokens_at(state, block_positions(start + 1, chunk))
    slots = jnp.arange(chunk)[None]
    asking = wanted & (count > 0)
    nothing = partial(no_logprobs, (start.shape[0], chunk), target.config.vocab_size)

    def add(row: Array, carry: Logprobs) -> Logprobs:
        states, tokens, most = slice_row(row, (hidden, following, count))
        logits = decoder.logits(target.config, target.ops, models.target, states, target.schedule)
        found = logprobs_of(logits, tokens, slots < most[:, None])
        return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, row, 0), carry, found)

    # A branch around the loop: XLA hoists the logits of a single row out of the loop, and would compute them unconditionally.
    logprobs = jax.lax.cond(jnp.any(asking), lambda: for_each(asking, add, nothing()), nothing)
    return state, Prefilled(start + count, logprobs, pooled(target, models.target, hidden, count))


def run_chunk(
    target: Target, drafter: Drafter | None, chunk: int, models: Models, state: DecodeState, start: Array, count: Array
) -> tuple[DecodeState, Array]:
    """Returns the state after a chunk, and the target's hidden states `[B, chunk, H]`."""
    tokens = tokens_at(state, block_positions(start, chunk))
    ran = run_target(target, models.target, state, tokens, Span(start, count), () if drafter is None else drafter.tap_layers)
    state = replace(state, target_cache=ran.caches)
    if drafter is not None:
        state = drafter.extend(target, models, state, ran.taps, start, start + count)
    return state, ran.hidden


def tokens_at(state: DecodeState, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the rows' tokens at positions; beyond the last position, its token."""
    return jnp.take_along_axis(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), axis=1)
