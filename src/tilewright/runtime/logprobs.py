"""Log-probabilities of tokens under the target, and of the most likely alternatives.

They are computed from the target's raw logits, before temperature, filters and penalties. They equal those of plain decoding,
since the target's logits at a committed position do not depend on drafts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from tilewright.kernels.select import top_k
from tilewright.runtime.per_row import for_each

MOST_ALTERNATIVES = 20
"""The most alternatives of a token, and the value of K unless the vocabulary is smaller."""


class Logprobs(NamedTuple):
    """Log-probabilities of each position in rows of T; 0 at positions without a request for them.

    Attributes:
        chosen: float32 `[B, T]`, log-probability of the token at the position.
        ids: int32 `[B, T, K]`, the most likely tokens in descending order; of equally likely tokens the lower id is first.
        logprobs: float32 `[B, T, K]`, the log-probabilities of `ids`.
    """

    chosen: Any
    ids: Any
    logprobs: Any


def no_logprobs(shape: tuple[int, ...], vocab: int) -> Logprobs:
    """Returns zeros as log-probabilities of positions `shape`."""
    k = min(MOST_ALTERNATIVES, vocab)
    return Logprobs(jnp.zeros(shape), jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k)))


def logprobs_of(logits: Float32[Array, "B T V"], tokens: Int32[Array, "B T"], asking: Bool[Array, "B T"]) -> Logprobs:
    """Returns the log-probabilities of `tokens` at the positions that are `asking`.

    It computes position by position: other positions cost nothing, and a result does not depend on the number of positions.
    """
    shape = tokens.shape
    vocab = logits.shape[-1]
    each = logits.reshape(-1, vocab)
    chosen = tokens.reshape(-1)
    k = min(MOST_ALTERNATIVES, vocab)

    def add(n: Array, carry: Logprobs) -> Logprobs:
        position = jax.lax.dynamic_slice_in_dim(each, n, 1)
        position = jnp.where(position == 0, 0.0, position)  # -0.0 equals 0.0, but would be sorted behind it
        ids, values = top_k(position, k)
        most = jnp.max(position, axis=1, keepdims=True)  # not `values[:, :1]`, for which XLA would sort instead of selecting
        total = jnp.log(jnp.sum(jnp.exp(position - most), axis=1, keepdims=True))
        value = jax.lax.dynamic_slice(position, (0, chosen[n]), (1, 1))
        found = Logprobs((value - most - total)[:, 0], ids, values - most - total)
        return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, n, 0), carry, found)

    found = for_each(asking.reshape(-1), add, no_logprobs(chosen.shape, vocab))
    return jax.tree.map(lambda part: part.reshape(*shape, *part.shape[1:]), found)
