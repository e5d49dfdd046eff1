"""Gated delta rule in chunks: matmuls instead of sequential positions.

Within a chunk, each position's write depends on the writes before: a triangular system (the UT transform of arXiv 2406.06484
§3.2, with the decays of arXiv 2412.06464 §3.3), solved for all chunks at once. The state passes from chunk to chunk. Sums are
float32, in another order than in `reference.py`, so that results agree except for the last bits.

Legend: B rows of a batch, T positions, K key heads, R value heads per key head, D size of a key, E size of a value,
N chunks, C positions of a chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jaxtyping import Float, Float32

from tilewright.kernels.delta_rule import reference

CHUNK = 64
"""Limit of positions per chunk. Larger chunks mean more work within chunks and less between them."""


def delta_rule(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K R E"],
    log_decay: Float[Array, "B T K R"],
    beta: Float[Array, "B T K R"],
    state: Float32[Array, "B K R D E"],
    by_position: bool = False,
) -> tuple[Float32[Array, "B T K R E"], Float32[Array, "B K R D E"]]:
    """Computes `reference.delta_rule`, in chunks for several positions unless `by_position`."""
    if by_position or q.shape[1] == 1:
        return reference.delta_rule(q, k, v, log_decay, beta, state)
    return in_chunks(q, k, v, log_decay, beta, state)


def in_chunks(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K R E"],
    log_decay: Float[Array, "B T K R"],
    beta: Float[Array, "B T K R"],
    state: Float32[Array, "B K R D E"],
    chunk: int = CHUNK,
) -> tuple[Float32[Array, "B T K R E"], Float32[Array, "B K R D E"]]:
    """Computes `reference.delta_rule` chunk by chunk."""
    length = q.shape[1]
    size = min(chunk, q.shape[1])

    def chunked(x: Array) -> Array:
        """Reshapes `[B, T, K, ...]` to `[N, B, K, ..., C, last]`; padded positions change nothing."""
        padded = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    q, k = (jnp.einsum("nbckd->nbkcd", chunked(x)) for x in (q, k))
    v = jnp.einsum("nbckre->nbkrce", chunked(v))
    log_decay, beta = (jnp.einsum("nbckr->nbkrc", chunked(x)) for x in (log_decay, beta))
    since = jnp.cumsum(log_decay, axis=-1)
    between = since[..., :, None] - since[..., None, :]
    is_visible = jnp.tril(jnp.ones((size, size), bool))
    faded = jnp.exp(
        jnp.where(is_visible, between, -jnp.inf)
    )  # [N, B, K, R, C, C]: decay from a position to a later one of the chunk

    dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    system = dot("nbkcd,nbkjd->nbkcj", k, k)[:, :, :, None] * faded * beta[..., None]
    reads = dot("nbkcd,nbkjd->nbkcj", q, k)[:, :, :, None] * faded
    retained = jnp.exp(since)[..., None]
    sides = jnp.concatenate([v * beta[..., None], k[:, :, :, None] * (beta[..., None] * retained)], axis=-1)
    solved = solve_triangular(system, sides, lower=True, unit_diagonal=True)
    written = solved[..., : v.shape[-1]]
    through = solved[..., v.shape[-1] :]
    queried = q[:, :, :, None] * retained
    left = k[:, :, :, None] * jnp.exp(since[..., -1:] - since)[..., None]

    def one(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, through, queried, reads, left, last = chunk
        new = written - dot("bkrcd,bkrde->bkrce", through, state)
        out = dot("bkrcd,bkrde->bkrce", queried, state) + dot("bkrcj,bkrje->bkrce", reads, new)
        return state * jnp.exp(last)[..., None, None] + dot("bkrcd,bkrce->bkrde", left, new), out

    state, out = jax.lax.scan(one, state, (written, through, queried, reads, left, since[..., -1]))
    flat = jnp.einsum("nbkrce->bnckre", out)
    return flat.reshape(flat.shape[0], -1, *flat.shape[3:])[:, :length], state
