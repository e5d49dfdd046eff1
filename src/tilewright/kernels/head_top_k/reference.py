"""Reference top-k of a head: the largest float32 logits in descending order, the first of equals first."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from tilewright.kernels.linear import reference


def head_top_k(
    x: Float[Array, "*rows H"], head: Float[Array, "..."], k: int, transposed: bool = False
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Returns indices and values of the `k` largest of `x @ head`, for a head `[H, V]`, or `[V, H]` if `transposed`."""
    logits = reference.linear(x.astype(jnp.float32), (head.T if transposed else head).astype(jnp.float32))
    order = jnp.argsort(-logits, axis=-1, stable=True)[..., :k]
    return order.astype(jnp.int32), jnp.take_along_axis(logits, order, axis=-1)
