"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) as it is defined, position by position, in float32.

Legend: B rows of a batch, T positions, K key heads, R value heads to each of them, D size of a key, E size of a value.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32


def step(
    state: Float32[Array, "B K R D E"],
    q: Float[Array, "B K D"],
    k: Float[Array, "B K D"],
    v: Float[Array, "B K R E"],
    log_decay: Float[Array, "B K R"],
    beta: Float[Array, "B K R"],
) -> tuple[Float32[Array, "B K R D E"], Float32[Array, "B K R E"]]:
    """One position: the state fades, the value that it has under the key moves towards `v` by the share `beta`, and `q` reads.

    A decay of 0 (its logarithm) with a beta of 0 leaves the state as it is, to the bit.
    """
    state = state * jnp.exp(log_decay)[..., None, None]
    predicted = jnp.sum(state * k[:, :, None, :, None], axis=-2)
    state = state + k[:, :, None, :, None] * ((v - predicted) * beta[..., None])[..., None, :]
    return state, jnp.sum(state * q[:, :, None, :, None], axis=-2)


def delta_rule(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K R E"],
    log_decay: Float[Array, "B T K R"],
    beta: Float[Array, "B T K R"],
    state: Float32[Array, "B K R D E"],
) -> tuple[Float32[Array, "B T K R E"], Float32[Array, "B K R D E"]]:
    """Reads of all positions, one after the other, and the state behind the last one.

    Args:
        q, k: of each key head, as they are: norms and scales are the caller's.
        log_decay: logarithms of the shares of the state that stay, at most 0.
        beta: shares of a value that are written, from 0 to 1.
        state: before the first position; a value for each key, read by a product with it.
    """
    each = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, log_decay, beta))
    if q.shape[1] == 1:  # decoding: no loop around a single position
        state, out = step(state, *(x[0] for x in each))
        return out[:, None], state
    state, out = jax.lax.scan(lambda state, one: step(state, *one), state, each)
    return jnp.moveaxis(out, 0, 1), state
