"""Autoregressive decoding: one token a step. The plain path that speculative decoding is held against."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from tilewright.decode.sampling import Warp
from tilewright.decode.state import DecodeState, Models, commit, known_token, verify
from tilewright.models.decoder import DecoderConfig


def autoregressive_step(
    target: DecoderConfig, warp: Warp, models: Models, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Runs the known token through the target and settles the one that follows it."""
    verified = verify(target, models.target, state, known_token(state), (), warp)
    return commit(target, verified.state, verified.tokens, jnp.zeros_like(state.known))
