"""Argmax of a head compiled by XLA, for any device: writes the logits to memory and reads them again."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt32

from tilewright.kernels.linear.xla import Product, normed, product
from tilewright.kernels.operations import Norm, Transposed


def argmax(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows"]:
    """Returns the first index of the largest entry.

    Uses two plain reductions, which XLA vectorises on a CPU; XLA's own argmax is scalar there.
    """
    vocab = x.shape[-1]
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(index, axis=-1)


def allowed(logits: Float[Array, "*rows V"], masks: UInt32[Array, "*rows W"]) -> Float[Array, "*rows V"]:
    """Sets the logits of tokens whose bit is not set to minus infinity; token 0 is the lowest bit of a row's first word."""
    bits = (masks[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]] == 1, logits, -jnp.inf)


def head_argmax(
    x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None, masks: Any = None, product: Product = product
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns index and value of the largest of `x @ head`, after `norm`, for a head `[H, V]` or `Transposed`.

    The head may be quantised. Logits are float32 sums, and the first of equal logits wins. A row with a NaN gives the last
    index.

    Args:
        masks: uint32 `[*rows, ceil(V / 32)]` for `allowed`; None to allow all tokens.
    """
    logits = product(normed(x, norm), head.w.T if isinstance(head, Transposed) else head, jnp.float32)
    logits = logits if masks is None else allowed(logits, masks)
    return argmax(logits), jnp.max(logits, axis=-1)
