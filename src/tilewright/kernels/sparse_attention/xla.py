"""Sparse denoising attention compiled by XLA, for any device.

Legend: B rows of a batch, W queries of a window, S positions, N query heads, K key/value heads, D head size, C changes.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.attention.xla import MASKED, group_rows, ungroup_rows
from tilewright.kernels.sparse_attention.reference import CARRIED, EXACT


def sparse_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """Computes attention of a denoising step over a window; see `reference.sparse_attention`."""
    window = q.shape[1]
    d = q.shape[3]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    rows = group_rows(q * d**-0.5, k.shape[2])
    scores = jnp.einsum("bkrd,bskd->bkrs", rows, k, precision=precision, preferred_element_type=jnp.float32)
    is_visible = (jnp.arange(k.shape[1])[None] < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores, MASKED), axis=-1)
    weights = jnp.where(lengths[:, None, None, None] > 0, weights, 0.0).astype(q.dtype)

    def over(values: Float[Array, "B S K D"]) -> Array:
        sums = jnp.einsum("bkrs,bskd->bkrd", weights, values, precision=precision, preferred_element_type=jnp.float32)
        return ungroup_rows(sums, window).reshape(before.shape)

    old = before.astype(jnp.float32)
    kind = kinds[..., None]
    after = jnp.where(kind == EXACT, over(v), old)
    for number in range(changes.shape[1]):
        after = jnp.where(kind == CARRIED + number, old + over(changes[:, number]), after)
    sums = [jnp.sum(x * y, axis=-1) for x, y in ((old, after), (old, old), (after, after))]
    return after.astype(before.dtype), jnp.stack(sums, axis=-1)
