"""Reference of the gated delta rule (Gated DeltaNet, arXiv 2412.06464), position by position, in float32.

Legend: B rows of a batch, T positions, K key heads, R value heads per key head, D size of a key, E size of a value.
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
    """Advances one position: decays the state, moves its value under key `k` towards `v` by `beta`, and reads it with `q`.

    A log decay of 0 with a beta of 0 leaves the state bitwise unchanged.
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
    """Returns the outputs of all positions in sequence, and the final state.

    Args:
        q, k: queries and keys per key head, already normalised and scaled.
        log_decay: logarithm of the fraction of the state that remains, at most 0.
        beta: fraction of a value that is written, from 0 to 1.
        state: state before the first position; a matmul with a key reads the key's value.
    """
    each = tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, log_decay, beta))
    if q.shape[1] == 1:  # decoding: no loop around a single position
        state, out = step(state, *(x[0] for x in each))
        return out[:, None], state
    state, out = jax.lax.scan(lambda state, one: step(state, *one), state, each)
    return jnp.moveaxis(out, 0, 1), state
