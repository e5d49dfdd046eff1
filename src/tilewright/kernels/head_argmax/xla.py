"""The operation as XLA compiles it, on any device: it writes the logits to memory and reads them again."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.linear.xla import Product, product


def argmax(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """The first index of the largest entry.

    Two plain reductions, which XLA vectorises on a CPU; its own argmax is scalar there.
    """
    vocab = x.shape[-1]
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(index, axis=-1)


def head_argmax(
    x: Float[Array, "*rows H"], head: Any, transposed: bool = False, product: Product = product
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Index and value of the largest of `x @ head`, for a head `[H, V]`, or `[V, H]` if it is `transposed`.

    The head may be in few bits. Logits are float32 sums, and of equal ones the first wins. A row with a NaN gives the last
    index.
    """
    logits = product(x, head.T if transposed else head, jnp.float32)
    return argmax(logits), jnp.max(logits, axis=-1)
