"""Prefill: prompts go into the caches, chunk by chunk, each row at its own place."""

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
from tilewright.runtime.per_row import for_each, of_row
from tilewright.runtime.pooling import pooled
from tilewright.runtime.state import DecodeState, Models, Span, Target, block_positions, run_target


class Prefilled(NamedTuple):
    """Result of a prefill, beside the state.

    Attributes:
        end: the position behind each row's chunk, int32 `[B]`. The host waits for it to know that the chunk was computed: the
            state is donated to the next program.
        logprobs: of what follows each token, `[B, chunk]`: slot t is of the token at position `start + t + 1`. None where rows
            cannot ask for any.
        pooled: of the chunk's hidden states, float32 `[B, 2, H]`, see `pooling.pooled`; None likewise.
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

    Rows of count 0 stay as they are, so that others may be admitted while they decode.

    Args:
        chunk: the most tokens of a row, which is what the program computes whatever the counts are.
        count: at most `chunk`; a row's spans follow one another, and its tokens up to `start + count` are known.
        wanted: the rows that get log-probabilities. The output head is computed for them alone. None where nobody reads what
            the last layer's hidden states are needed for.

    Returns:
        the state, and the result; of that only `end` without `wanted`.
    """
    state, hidden = run_chunk(target, drafter, chunk, models, state, start, count)
    if wanted is None:
        return state, Prefilled(start + count)
    following = tokens_at(state, block_positions(start + 1, chunk))
    slots = jnp.arange(chunk)[None]
    asking = wanted & (count > 0)
    nothing = partial(no_logprobs, (start.shape[0], chunk), target.config.vocab_size)

    def add(row: Array, carry: Logprobs) -> Logprobs:
        own, tokens, most = of_row(row, (hidden, following, count))
        logits = decoder.logits(target.config, target.ops, models.target, own, target.schedule)
        found = logprobs_of(logits, tokens, slots < most[:, None])
        return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, row, 0), carry, found)

    # A branch, and not the loop alone: XLA takes the logits of a single row out of that, and computes them asked for or not.
    logprobs = jax.lax.cond(jnp.any(asking), lambda: for_each(asking, add, nothing()), nothing)
    return state, Prefilled(start + count, logprobs, pooled(target, models.target, hidden, count))


def run_chunk(
    target: Target, drafter: Drafter | None, chunk: int, models: Models, state: DecodeState, start: Array, count: Array
) -> tuple[DecodeState, Array]:
    """The state after a chunk, and the target's hidden states `[B, chunk, H]`."""
    tokens = tokens_at(state, block_positions(start, chunk))
    ran = run_target(target, models.target, state, tokens, Span(start, count), () if drafter is None else drafter.tap_layers)
    state = replace(state, target_cache=ran.kept)
    if drafter is not None:
        state = drafter.extend(target, models, state, ran.taps, start, start + count)
    return state, ran.hidden


def tokens_at(state: DecodeState, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The rows' tokens; behind the last position, its token."""
    return jnp.take_along_axis(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), axis=1)
