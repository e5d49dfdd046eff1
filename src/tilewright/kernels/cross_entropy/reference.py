"""Reference cross-entropy."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import softcapped


def cross_entropy(
    x: Float[Array, "*rows H"],
    head: Float[Array, "H V"],
    labels: Int[Array, "*rows"],
    weights: Float[Array, "*rows"],
    cap: float | None = None,
) -> Float[Array, ""]:
    """Returns the sum over rows of `weights * (logsumexp(logits) - logits[label])`, in nats.

    Args:
        cap: softcap of the logits; see `softcapped`.
    """
    logits = softcapped(jnp.matmul(x, head, precision=jax.lax.Precision.HIGHEST), cap)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - picked))
