"""Sampling: what a request asks for, the warped distribution, and one draw from it.

The randomness of a token is a function of its request's seed and its position alone. So a row of a batch draws what it would
draw by itself, and speculative decoding draws the very token that autoregressive decoding draws (see `speculative.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

Warp = Literal["greedy", "plain", "filtered"]
"""What a program must be able to do: argmax alone; draws from the tempered distribution; draws after top-k and top-p."""


@dataclass(frozen=True)
class Sampling:
    """What one request asks for.

    Attributes:
        max_new_tokens: the length limit.
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens that holds this much probability (ties with the last are kept).
        top_k: keep this many most likely tokens (ties with the last are kept); 0 keeps all.
        seed: the request's own randomness.
        stop: texts that end the generation; they are not part of the result.
        ignore_eos: go on past the end-of-sequence token.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for good, expected, found in (
            (self.max_new_tokens >= 1, "max_new_tokens of at least 1", self.max_new_tokens),
            (0 <= self.temperature < float("inf"), "a temperature of 0 or more", self.temperature),
            (0 < self.top_p <= 1, "top_p above 0 and at most 1", self.top_p),
            (self.top_k >= 0, "top_k of 0 or more", self.top_k),
            (0 <= self.seed < 2**32, "a seed from 0 to 2**32 - 1", self.seed),
            (all(self.stop), "stop strings that are not empty", self.stop),
        ):
            if not good:
                raise ValueError(f"expected {expected}, found {found!r}")

    @property
    def warp(self) -> Warp:
        """The least program that can serve this request."""
        if self.temperature == 0:
            return "greedy"
        return "plain" if self.top_p == 1 and self.top_k == 0 else "filtered"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of a batch, one entry a row; `key` is the raw key made from the seed, uint32 `[B, 2]`."""

    temperature: Any
    top_p: Any
    top_k: Any
    key: Any


def row_sampling(requests: Sequence[Sampling]) -> RowSampling:
    """Gathers requests into arrays, on the host."""
    return RowSampling(
        temperature=np.asarray([r.temperature for r in requests], np.float32),
        top_p=np.asarray([r.top_p for r in requests], np.float32),
        top_k=np.asarray([r.top_k for r in requests], np.int32),
        key=np.asarray([(0, r.seed) for r in requests], np.uint32),
    )


def batch_warp(requests: Sequence[Sampling]) -> Warp:
    """The least program that serves every request of a batch."""
    asked = {r.warp for r in requests}
    return "filtered" if "filtered" in asked else "plain" if "plain" in asked else "greedy"


def sortable(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows V"]:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jnp.where(x == 0, 0, order)  # -0.0 too


def threshold(x: Int32[Array, "*rows V"], enough: Callable[[Array], Array]) -> Int32[Array, "*rows 1"]:
    """The largest t for which `enough(x >= t)` holds, by bisection: 32 passes instead of a sort of the vocabulary.

    `enough` must hold for the whole row and be monotone: once a set is enough, a larger one is too.
    """

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough above high
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean, rounded up, without overflow
        good = enough(x >= middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    shape = (*x.shape[:-1], 1)
    bounds = (jnp.full(shape, jnp.iinfo(jnp.int32).min), jnp.full(shape, jnp.iinfo(jnp.int32).max))
    return jax.lax.fori_loop(0, 32, narrow, bounds)[0]


def warp_logits(logits: Float[Array, "B T V"], rows: RowSampling, warp: Warp) -> Float[Array, "B T V"]:
    """The logits of the distribution that tokens are drawn from: temperature first, then top-k, then top-p of what is left.

    Filtered tokens get -inf. Greedy rows (temperature 0) come out with temperature 1 and are not meant to be drawn from.
    """
    temperature = jnp.asarray(rows.temperature)[:, None, None]
    logits = logits / jnp.where(temperature > 0, temperature, 1.0)
    if warp != "filtered":
        return logits
    vocab = logits.shape[-1]
    order = sortable(logits)
    top_k = jnp.asarray(rows.top_k)[:, None, None]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    at_least = threshold(order, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= wanted)
    logits = jnp.where(order >= at_least, logits, -jnp.inf)
    p = jax.nn.softmax(logits, axis=-1)
    # Rounding may leave the whole row a little short of 1. It also hides whatever is smaller, which top_p = 1 must keep.
    mass = jnp.asarray(rows.top_p)[:, None, None] * jnp.sum(p, axis=-1, keepdims=True)
    order = sortable(p)
    at_least = threshold(order, lambda kept: jnp.sum(jnp.where(kept, p, 0.0), axis=-1, keepdims=True) >= mass)
    kept = (order >= at_least) | (jnp.asarray(rows.top_p)[:, None, None] >= 1)
    return jnp.where(kept, logits, -jnp.inf)


def argmax(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """The first index of the largest entry.

    Two plain reductions, which XLA vectorises on a CPU; its own argmax is scalar there.
    """
    vocab = x.shape[-1]
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(index, axis=-1)


def sample(logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"], warp: Warp) -> Int32[Array, "B T"]:
    """Draws the token at each of `positions` by the Gumbel-max rule; rows of temperature 0 take the argmax."""
    best = argmax(logits)
    if warp == "greedy":
        return best

    def noise(key: Array, row_positions: Array) -> Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.wrap_key_data(key), row_positions)
        return jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[-1:], jnp.float32))(keys)

    gumbel = jax.vmap(noise)(jnp.asarray(rows.key), positions)
    drawn = argmax(warp_logits(logits, rows, warp) + gumbel)
    return jnp.where(jnp.asarray(rows.temperature)[:, None] > 0, drawn, best)
