"""Log-probabilities: what the target thought of a token, and of those that it thought most likely there.

They are of its logits as they are, before temperature, filters and penalties, and those of plain decoding whatever was drafted:
the target's logits at a committed position do not depend on who proposed the token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from tilewright.kernels.select import top_k
from tilewright.runtime.per_row import for_each

MOST_ALTERNATIVES = 20
"""The most tokens that come with each; K, unless the vocabulary has fewer."""


class Logprobs(NamedTuple):
    """Of each position in rows of T; 0 where nobody asked.

    Attributes:
        chosen: float32 `[B, T]`, the log-probability of the token that stands there.
        ids: int32 `[B, T, K]`, the most likely tokens in descending order, of equally likely ones the lower id first.
        logprobs: float32 `[B, T, K]`, theirs.
    """

    chosen: Any
    ids: Any
    logprobs: Any


def no_logprobs(shape: tuple[int, ...], vocab: int) -> Logprobs:
    """Log-probabilities of positions `shape` of which nobody asked for any."""
    k = min(MOST_ALTERNATIVES, vocab)
    return Logprobs(jnp.zeros(shape), jnp.zeros((*shape, k), jnp.int32), jnp.zeros((*shape, k)))


def logprobs_of(logits: Float32[Array, "B T V"], tokens: Int32[Array, "B T"], asking: Bool[Array, "B T"]) -> Logprobs:
    """Log-probabilities of `tokens` at the positions that are `asking`.

    They are computed one by one: the others cost nothing, and a result does not depend on how many there are.
    """
    shape = tokens.shape
    vocab = logits.shape[-1]
    each = logits.reshape(-1, vocab)
    chosen = tokens.reshape(-1)
    k = min(MOST_ALTERNATIVES, vocab)

    def add(n: Array, carry: Logprobs) -> Logprobs:
        own = jax.lax.dynamic_slice_in_dim(each, n, 1)
        own = jnp.where(own == 0, 0.0, own)  # -0.0 equals it, and would go behind it
        ids, values = top_k(own, k)
        most = jnp.max(own, axis=1, keepdims=True)  # not `values[:, :1]`, with which XLA sorts all instead of seeking the best
        total = jnp.log(jnp.sum(jnp.exp(own - most), axis=1, keepdims=True))
        value = jax.lax.dynamic_slice(own, (0, chosen[n]), (1, 1))
        found = Logprobs((value - most - total)[:, 0], ids, values - most - total)
        return jax.tree.map(lambda whole, one: jax.lax.dynamic_update_slice_in_dim(whole, one, n, 0), carry, found)

    found = for_each(asking.reshape(-1), add, no_logprobs(chosen.shape, vocab))
    return jax.tree.map(lambda part: part.reshape(*shape, *part.shape[1:]), found)
