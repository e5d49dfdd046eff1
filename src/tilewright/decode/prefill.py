"""Prefill: prompts go into the caches, chunk by chunk, each row at its own place."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.decode.drafters.base import Drafter
from tilewright.decode.mixed import for_each, of_row
from tilewright.decode.scores import Scores, alternatives, score_each
from tilewright.decode.state import DecodeState, Models, Span, Target, block_positions, run_target
from tilewright.decode.team import Team
from tilewright.models import decoder


def prefill(
    target: Target,
    drafter: Drafter | Team | None,
    chunk: int,
    models: Models,
    state: DecodeState,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> DecodeState:
    """Runs each row's settled tokens at positions `start` to `start + count - 1` and fills both caches. DONATES state.

    Rows of count 0 stay as they are, so that others may be admitted while they decode.

    Args:
        chunk: the most tokens of a row, which is what the program computes whatever the counts are.
        count: at most `chunk`; a row's spans follow one another, and its tokens up to `start + count` are known.
    """
    return run_chunk(target, drafter, chunk, models, state, start, count)[0]


def scored_prefill(
    target: Target,
    drafter: Drafter | Team | None,
    chunk: int,
    models: Models,
    state: DecodeState,
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[DecodeState, Scores]:
    """The same, with scores `[B, chunk]` of what follows each of those tokens, for rows that ask. DONATES state.

    Slot t is of the token at position `start + t + 1`. The output head is computed for the chunks of the rows that ask alone.
    """
    state, hidden = run_chunk(target, drafter, chunk, models, state, start, count)
    following = tokens_at(state, block_positions(start + 1, chunk))
    slots, vocab = jnp.arange(chunk)[None], target.config.vocab_size
    k = alternatives("scored", vocab)

    def score_row(row: Array, scores: Scores) -> Scores:
        own, tokens, most = of_row(row, (hidden, following, count))
        logits = decoder.logits(target.config, target.ops, models.target, own, target.schedule)
        found = score_each(logits, tokens, slots < most[:, None])
        return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, row, 0), scores, found)

    shape = (start.shape[0], chunk)
    nothing = Scores(jnp.zeros(shape), jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k)))
    return state, for_each(jnp.asarray(state.sampling.scored) & (count > 0), score_row, nothing)


def run_chunk(
    target: Target, drafter: Drafter | Team | None, chunk: int, models: Models, state: DecodeState, start: Array, count: Array
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
