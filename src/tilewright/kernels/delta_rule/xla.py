"""The gated delta rule in chunks: products of matrices in the place of one position after the other.

Within a chunk, what each position writes depends on what those before it wrote: a triangular system (the UT transform of
arXiv 2406.06484 §3.2, with the decays of arXiv 2412.06464 §3.3), which is solved for all chunks at once. From chunk to chunk
goes the state. Sums are float32; they come in another order than `reference.py`'s, so that results agree but for the last bits.

Legend: B rows of a batch, T positions, K key heads, R value heads to each of them, D size of a key, E size of a value,
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
"""Positions of a chunk, at most. The work within chunks grows with it, that between them shrinks."""


def delta_rule(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K R E"],
    log_decay: Float[Array, "B T K R"],
    beta: Float[Array, "B T K R"],
    state: Float32[Array, "B K R D E"],
    by_position: bool = False,
) -> tuple[Float32[Array, "B T K R E"], Float32[Array, "B K R D E"]]:
    """As `reference.delta_rule`; in chunks where there are several positions, unless they are to come one after the other."""
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
    """As `reference.delta_rule`, from chunk to chunk."""
    length = q.shape[1]
    size = min(chunk, q.shape[1])

    def chunked(x: Array) -> Array:
        """`[B, T, K, ...]` as `[N, B, K, ..., C, last]`; positions behind the last one change nothing."""
        padded = jnp.pad(x.astype(jnp.float32), [(0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    q, k = (jnp.einsum("nbckd->nbkcd", chunked(x)) for x in (q, k))
    v = jnp.einsum("nbckre->nbkrce", chunked(v))
    log_decay, beta = (jnp.einsum("nbckr->nbkrc", chunked(x)) for x in (log_decay, beta))
    since = jnp.cumsum(log_decay, axis=-1)
    between = since[..., :, None] - since[..., None, :]
    seen = jnp.tril(jnp.ones((size, size), bool))
    faded = jnp.exp(jnp.where(seen, between, -jnp.inf))  # [N, B, K, R, C, C]: from a position of the chunk to a later one

    dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    system = dot("nbkcd,nbkjd->nbkcj", k, k)[:, :, :, None] * faded * beta[..., None]
    reads = dot("nbkcd,nbkjd->nbkcj", q, k)[:, :, :, None] * faded
    kept = jnp.exp(since)[..., None]
    sides = jnp.concatenate([v * beta[..., None], k[:, :, :, None] * (beta[..., None] * kept)], axis=-1)
    solved = solve_triangular(system, sides, lower=True, unit_diagonal=True)
    written = solved[..., : v.shape[-1]]
    through = solved[..., v.shape[-1] :]
    asked = q[:, :, :, None] * kept
    left = k[:, :, :, None] * jnp.exp(since[..., -1:] - since)[..., None]

    def one(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        written, through, asked, reads, left, last = chunk
        new = written - dot("bkrcd,bkrde->bkrce", through, state)
        out = dot("bkrcd,bkrde->bkrce", asked, state) + dot("bkrcj,bkrje->bkrce", reads, new)
        return state * jnp.exp(last)[..., None, None] + dot("bkrcd,bkrce->bkrde", left, new), out

    state, out = jax.lax.scan(one, state, (written, through, asked, reads, left, since[..., -1]))
    flat = jnp.einsum("nbkrce->bnckre", out)
    return flat.reshape(flat.shape[0], -1, *flat.shape[3:])[:, :length], state
