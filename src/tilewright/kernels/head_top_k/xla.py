"""The operation as XLA compiles it, on any device: it writes the logits to memory and reads them once more.

Sorting a vocabulary is slow on every chip. So it is taken in chunks: the `k` largest entries lie in the `k` chunks with the
largest maxima, and only these are sorted. Of equal maxima the first chunks are taken: then each of the `k` has an entry that
goes before every entry of a chunk that was left out.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.linear.xla import Product, product

CHUNK = 128
"""Entries, as many as a TPU's register has lanes."""


def top_k(x: Float32[Array, "*rows V"], k: int) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Indices and values of the `k` largest entries, in descending order; of equal ones the first goes first."""
    rows = x.shape[:-1]
    vocab = x.shape[-1]
    count = -(-vocab // CHUNK)
    if count <= k:
        value, index = jax.lax.top_k(x, k)
        return index.astype(jnp.int32), value
    # What is behind the vocabulary loses against anything that is in it, being last.
    padded = jnp.pad(x, [(0, 0)] * len(rows) + [(0, count * CHUNK - vocab)], constant_values=-jnp.inf)
    chunks = padded.reshape(*rows, count, CHUNK)
    _, chosen = jax.lax.top_k(jnp.max(chunks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # so that candidates stay in the order of the vocabulary
    candidates = jnp.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*rows, k * CHUNK)
    value, place = jax.lax.top_k(candidates, k)
    chunk = jnp.take_along_axis(chosen, place // CHUNK, axis=-1)
    return (chunk * CHUNK + place % CHUNK).astype(jnp.int32), value


def head_top_k(
    x: Float[Array, "*rows H"], head: Any, k: int, transposed: bool = False, product: Product = product
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Indices and values of the `k` largest of `x @ head`, for a head `[H, V]`, or `[V, H]` if it is `transposed`.

    The head may be in few bits. Logits are float32 sums.
    """
    return top_k(product(x, head.T if transposed else head, jnp.float32), k)
