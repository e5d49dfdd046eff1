"""The operation as XLA compiles it, on any device, from whatever a bundle's `heads` takes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.attention.xla import attention, seen_entries
from tilewright.kernels.heads.xla import heads as split_and_turn
from tilewright.kernels.operations import Heads


def causal_attention(
    projection: Any, spec: Heads, heads: Callable[[Any, Heads], tuple[Any, Any, Any]] = split_and_turn
) -> Float[Array, "B T _"]:
    """Attention of each position's query over all keys up to its own position, heads side by side."""
    q, k, v = heads(projection, spec)
    t = q.shape[1]
    lengths = jnp.arange(1, t + 1)[None]
    return attention(q, k, v, seen_entries(jnp.arange(t), lengths, spec.scores), spec.scores).reshape(*q.shape[:2], -1)
