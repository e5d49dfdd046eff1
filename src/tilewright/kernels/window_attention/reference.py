"""Attention of a denoising step as it is defined, in float32 and without grouping.

Of a window of rows some are computed exactly, the others carry their context on: `C + softmax(q K^T) dV`, where dV is what the
values have changed by (DyLLM, arXiv 2603.08026). The same pass measures how far each row's context turned, so that the new one
is not read back for it.

Legend: B rows of a batch, W queries of a window, S positions, N query heads, K key/value heads, D head size, C changes.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

IDLE = -2
EXACT = -1
CARRIED = 0
"""Kinds of queries, by their contexts: one stays as it is; is computed over all values; or is carried on by one of the
changes, whose number is added to the last of these."""


def window_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """The contexts of a window of queries `[B, W, N * D]`, each over the first `lengths` positions of its row.

    A query head n reads key head `n * K // N`; the scale of scores is `D ** -0.5`. Sums are float32.

    Args:
        changes: by how much values have changed since a context was last computed or carried on; C may be more than one, where
            contexts differ in when that was.
        kinds: for each query `IDLE`, `EXACT`, or `CARRIED + c` with change number c.
        before: the contexts so far.

    Returns:
        The contexts, and the sums over their entries of before * after, before ** 2 and after ** 2: the cosine between both is
        `cosine` of them. The sums of idle queries are those of a context that stays.
    """
    batch, window, n, d = q.shape
    group = n // k.shape[2]
    exact = jax.lax.Precision.HIGHEST
    seen = (jnp.arange(k.shape[1])[None] < lengths[:, None])[:, None, None]
    wide = [jnp.repeat(x.astype(jnp.float32), group, axis=-2) for x in (k, v, changes)]
    scores = jnp.einsum("bwnd,bsnd->bnws", q.astype(jnp.float32), wide[0], precision=exact) * d**-0.5
    weights = jnp.where(jnp.any(seen, axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1, where=seen), 0.0)
    full = jnp.einsum("bnws,bsnd->bwnd", weights, wide[1], precision=exact).reshape(batch, window, -1)
    steps = jnp.einsum("bnws,bcsnd->cbwnd", weights, wide[2], precision=exact).reshape(-1, batch, window, n * d)
    old = before.astype(jnp.float32)
    kind = kinds[..., None]
    after = jnp.where(kind == EXACT, full, old)
    for number, step in enumerate(steps):
        after = jnp.where(kind == CARRIED + number, old + step, after)
    return after.astype(before.dtype), jnp.stack(
        [jnp.sum(x * y, axis=-1) for x, y in ((old, after), (old, old), (after, after))], -1
    )


def cosine(statistics: Float32[Array, "*rows 3"]) -> Float32[Array, "*rows"]:
    """The cosine between contexts before and after, from sums over their entries (of shards added up); 0 where one is zero."""
    both, old, new = (statistics[..., n] for n in range(3))
    norm = jnp.sqrt(old) * jnp.sqrt(new)
    return jnp.where(norm > 0, both / jnp.where(norm > 0, norm, 1.0), 0.0)
