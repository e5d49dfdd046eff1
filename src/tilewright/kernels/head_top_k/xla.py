"""Top-k of a head compiled by XLA, for any device: writes the logits to memory and reads them once more.

Sorting a vocabulary is slow on every chip. The vocabulary is therefore split into chunks: the `k` largest entries are in the
`k` chunks with the largest maxima, and only these chunks are sorted. Of equal maxima the first chunks are chosen: each of the
`k` then has an entry that precedes every entry of an omitted chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.linear.xla import Product, product
from tilewright.kernels.operations import Transposed

CHUNK = 128
"""Entries of a chunk: the lanes of a TPU register."""


def top_k(x: Float32[Array, "*rows V"], k: int) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Returns indices and values of the `k` largest entries in descending order, the first of equals first."""
    rows = x.shape[:-1]
    vocab = x.shape[-1]
    count = -(-vocab // CHUNK)
    if count <= k:
        value, index = jax.lax.top_k(x, k)
        return index.astype(jnp.int32), value
    # Padding loses against every entry of the vocabulary, as it comes last.
    padded = jnp.pad(x, [(0, 0)] * len(rows) + [(0, count * CHUNK - vocab)], constant_values=-jnp.inf)
    chunks = padded.reshape(*rows, count, CHUNK)
    _, chosen = jax.lax.top_k(jnp.max(chunks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # keeps candidates in the order of the vocabulary
    candidates = jnp.take_along_axis(chunks, chosen[..., None], axis=-2).reshape(*rows, k * CHUNK)
    value, place = jax.lax.top_k(candidates, k)
    chunk = jnp.take_along_axis(chosen, place // CHUNK, axis=-1)
    return (chunk * CHUNK + place % CHUNK).astype(jnp.int32), value


def head_top_k(
    x: Float[Array, "*rows H"], head: Any, k: int, product: Product = product
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Returns indices and values of the `k` largest of `x @ head`, for a head `[H, V]` or `Transposed`.

    The head may be quantised. Logits are float32 sums.
    """
    return top_k(product(x, head.w.T if isinstance(head, Transposed) else head, jnp.float32), k)
