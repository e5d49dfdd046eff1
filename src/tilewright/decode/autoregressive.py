"""Autoregressive decoding: one token a step. The plain path that speculative decoding is held against."""

import jax.numpy as jnp

from tilewright.decode.sampling import Warp
from tilewright.decode.state import DecodeState, Models, StepInfo, Target, commit, known_token, verify


def autoregressive_step(target: Target, warp: Warp, models: Models, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Runs the known token through the target and settles the one that follows it."""
    verified = verify(target, models.target, state, known_token(state), (), warp)
    none = jnp.zeros_like(state.known)
    state, settled = commit(target, verified.state, verified.tokens, none)
    return state, StepInfo(verified.tokens, settled, none, none, verified.scores(settled))
