"""Embeddings: prefill's hidden states of a prompt, pooled to a vector of length 1.

Prefill programs return, for each chunk, the sum of its normed hidden states and the last of them. The host does the rest.
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
"""Pooling of a prompt's hidden states behind the final norm: that of the last token, or the mean over all tokens."""


class PooledChunk(NamedTuple):
    """Pooled hidden states of a chunk, still on the device.

    Attributes:
        states: float32 `[n, 2, H]`: for each row the sum over the chunk, and the last hidden state.
        row: row of the prompt.
        positions: number of positions of the chunk.
    """

    states: Any
    row: int
    positions: int


def pooled(
    target: Target, params: DecoderParams, hidden: Float[Array, "B T H"], count: Int[Array, " B"]
) -> Float[Array, "B 2 H"]:
    """Returns for each row the sum of its first `count` normed hidden states, and the last of them; zeros for count 0."""
    normed = target.ops.rms_norm(hidden, params.norm, target.config.rms_norm_eps).astype(jnp.float32)
    slot = jnp.arange(hidden.shape[1])[None, :, None]
    inside = slot < count[:, None, None]
    last = slot == count[:, None, None] - 1
    return jnp.stack([jnp.sum(jnp.where(each, normed, 0), axis=1) for each in (inside, last)], axis=1)


def embedding(chunks: Sequence[PooledChunk], pooling: Pooling) -> np.ndarray:
    """Returns the embedding of a prompt from its chunks, float32 `[H]`, of length 1; a zero vector stays zero."""
    states = np.stack([np.asarray(chunk.states)[chunk.row].astype(np.float64) for chunk in chunks])
    if pooling == "last":
        return unit(states[-1, 1])
    return unit(np.sum(states[:, 0], axis=0) / sum(chunk.positions for chunk in chunks))


def unit(vector: np.ndarray) -> np.ndarray:
    """Scales a vector to length 1, in float32; a zero vector stays zero."""
    length = np.linalg.norm(vector)
    return (vector / length if length > 0 else vector).astype(np.float32)
