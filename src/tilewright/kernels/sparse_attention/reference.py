"""Reference of sparse denoising attention, in float32 and without grouping.

Some rows of a window are computed exactly; the others update their previous context: `C + softmax(q K^T) dV`, where dV is the
change of the values (DyLLM, arXiv 2603.08026). The same pass measures how much each row's context changed, so that the new
context is not read back.

Legend: B rows of a batch, W queries of a window, S positions, N query heads, K key/value heads, D head size, C changes.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

IDLE = -2
EXACT = -1
CARRIED = 0
"""Kinds of queries: `IDLE` keeps its context; `EXACT` recomputes it from all values; `CARRIED + c` updates it with change c."""


def sparse_attention(
    q: Float[Array, "B W N D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    changes: Float[Array, "B C S K D"],
    lengths: Int[Array, " B"],
    kinds: Int[Array, "B W"],
    before: Float[Array, "B W _"],
) -> tuple[Float[Array, "B W _"], Float32[Array, "B W 3"]]:
    """Returns the contexts of a window of queries `[B, W, N * D]`, each over the first `lengths` positions of its row.

    Query head n uses key head `n * K // N`; the scale of scores is `D ** -0.5`. Sums are float32.

    Args:
        changes: changes of values since a context was last computed or updated; C is above one if contexts differ in when that
            was.
        kinds: `IDLE`, `EXACT`, or `CARRIED + c` with change number c, for each query.
        before: previous contexts.

    Returns:
        The contexts, and the sums over their entries of before * after, before ** 2 and after ** 2, from which `cosine`
        computes their similarity. For idle queries the sums are those of an unchanged context.
    """
    batch, window, n, d = q.shape
    group = n // k.shape[2]
    exact = jax.lax.Precision.HIGHEST
    is_visible = (jnp.arange(k.shape[1])[None] < lengths[:, None])[:, None, None]
    wide = [jnp.repeat(x.astype(jnp.float32), group, axis=-2) for x in (k, v, changes)]
    scores = jnp.einsum("bwnd,bsnd->bnws", q.astype(jnp.float32), wide[0], precision=exact) * d**-0.5
    weights = jnp.where(jnp.any(is_visible, axis=-1, keepdims=True), jax.nn.softmax(scores, axis=-1, where=is_visible), 0.0)
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
    """Returns the cosine between contexts before and after, from sums over their entries (added over shards); 0 for a zero
    context."""
    both, old, new = (statistics[..., n] for n in range(3))
    norm = jnp.sqrt(old) * jnp.sqrt(new)
    return jnp.where(norm > 0, both / jnp.where(norm > 0, norm, 1.0), 0.0)
