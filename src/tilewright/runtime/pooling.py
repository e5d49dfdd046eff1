"""Embeddings: what prefill makes of a prompt, pooled to one vector of length 1.

Programs of prefill give, for each chunk, the sum of its normed hidden states and the last of them; the host does the rest.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tilewright.models.decoder import DecoderParams
from tilewright.runtime.state import Target

Pooling = Literal["last", "mean"]
"""Of a prompt's hidden states behind the final norm: that of its last token, or the mean of all."""


class PooledChunk(NamedTuple):
    """Pooled hidden states of a chunk, still on the device.

    Attributes:
        states: float32 `[n, 2, H]`: for each row the sum over the chunk, and its last.
        row: of the one that is meant.
        positions: how many the chunk has.
    """

    states: Any
    row: int
    positions: int


def pooled(
    target: Target, params: DecoderParams, hidden: Float[Array, "B T H"], count: Int[Array, " B"]
) -> Float[Array, "B 2 H"]:
    """For each row the sum of its first `count` hidden states behind the final norm, and the last of these; zeros for none."""
    normed = target.ops.rms_norm(hidden, params.norm, target.config.rms_norm_eps).astype(jnp.float32)
    slot = jnp.arange(hidden.shape[1])[None, :, None]
    inside = slot < count[:, None, None]
    last = slot == count[:, None, None] - 1
    return jnp.stack([jnp.sum(jnp.where(each, normed, 0), axis=1) for each in (inside, last)], axis=1)


def embedding(chunks: Sequence[PooledChunk], pooling: Pooling) -> np.ndarray:
    """The embedding of a prompt that was computed in these chunks, float32 `[H]`, of length 1; a zero vector stays one."""
    states = np.stack([np.asarray(chunk.states)[chunk.row].astype(np.float64) for chunk in chunks])
    if pooling == "last":
        return unit(states[-1, 1])
    return unit(np.sum(states[:, 0], axis=0) / sum(chunk.positions for chunk in chunks))


def unit(vector: np.ndarray) -> np.ndarray:
    """A vector in float32, brought to length 1; a zero vector stays one."""
    length = np.linalg.norm(vector)
    return (vector / length if length > 0 else vector).astype(np.float32)
