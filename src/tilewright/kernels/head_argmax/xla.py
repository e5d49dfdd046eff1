"""The operation as XLA compiles it, on any device: it writes the logits to memory and reads them again."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt32

from tilewright.kernels.linear.xla import Product, product


def argmax(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """The first index of the largest entry.

    Two plain reductions, which XLA vectorises on a CPU; its own argmax is scalar there.
    """
    vocab = x.shape[-1]
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(index, axis=-1)


def allowed(logits: Float[Array, "*rows V"], masks: UInt32[Array, "*rows W"]) -> Float[Array, "*rows V"]:
    """The logits, minus infinity for tokens whose bit is not set: bits from the lowest of a row's first word on."""
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]] == 1, logits, -jnp.inf)


def head_argmax(
    x: Float[Array, "*rows H"], head: Any, transposed: bool = False, product: Product = product, masks: Any = None
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Index and value of the largest of `x @ head`, for a head `[H, V]`, or `[V, H]` if it is `transposed`.

    The head may be in few bits. Logits are float32 sums, and of equal ones the first wins. A row with a NaN gives the last
    index.

    Args:
        masks: uint32 `[*rows, ceil(V / 32)]` for `allowed`; None where all may be taken.
    """
    logits = product(x, head.T if transposed else head, jnp.float32)
    logits = logits if masks is None else allowed(logits, masks)
    return argmax(logits), jnp.max(logits, axis=-1)
