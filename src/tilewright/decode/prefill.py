"""Prefill: prompts go into the caches, chunk by chunk, each row at its own place."""

from dataclasses import replace

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.decode.drafters.base import Drafter
from tilewright.decode.state import DecodeState, Models, Span, Target, block_positions, run_target
from tilewright.decode.team import Team


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
    positions = jnp.minimum(block_positions(start, chunk), state.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(state.tokens, positions, axis=1)
    ran = run_target(target, models.target, state, tokens, Span(start, count), () if drafter is None else drafter.tap_layers)
    state = replace(state, target_cache=ran.kept)
    return state if drafter is None else drafter.extend(target, models, state, ran.taps, start, start + count)
