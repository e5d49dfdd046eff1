"""Training of a decoder that denoises blocks: each step runs a clean and a noisy copy of every sequence side by side.

A noisy block sees itself and the clean tokens before it, as in generation, so one pass over both copies teaches all blocks. If
clean tokens see those before them only, the same pass also teaches decoding token by token.

Sources: block diffusion (arXiv 2503.09573 §3.2 and appendix B), SDAR (arXiv 2510.06303), Nemotron-Labs-Diffusion
(arXiv 2607.05722).

Legend: B sequences, L tokens of a sequence, T positions of a block.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt32

from tilewright.kernels.masks import AttentionMask, packed
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.kernels.select import QUERIES
from tilewright.models.config import MaskedBlocks
from tilewright.models.decoder import DecoderConfig
from tilewright.train.diffusion import Batch, response_weights
from tilewright.train.predictions import Predicted, Predictor


def block_denoiser(config: DecoderConfig) -> Predictor:
    """Returns a model that denoises blocks. Raises a `ValueError` for a model that does not, or has a window.

    The loss is the sum of the cross-entropies of the masked tokens, each divided by the expected share t of its block; and of
    the next tokens, if clean tokens see those before them only. Both are over the weight of all response tokens.
    """
    blocks = config.masked_blocks
    if blocks is None:
        raise ValueError(f"expected a model whose blocks are denoised, found one of the family {config.family}")
    if any(config.windows):
        raise ValueError("expected a model without sliding windows, found one with them")
    return Predictor(
        config=config,
        predict=partial(block_predictions, blocks),
        attend=visible_attend,
        copies=2,
    )


def block_predictions(blocks: MaskedBlocks, batch: Batch, key: Array) -> Predicted:
    """Masks random tokens of the noisy copies; returns the predictions, whose counts are the weights of response tokens.

    Inputs are the clean copy and behind it the noisy one, `[B, 2 L]`. Prompts are never masked. The expected share t of masked
    tokens of a block is uniform from 1 / T to 1, evenly spread over the rows of the batch.

    Blocks begin at any position if clean tokens see those before them only, since each block follows a decoded token, which
    is its first one and never masked. Otherwise they begin at multiples of T.
    """
    rows, length = batch.tokens.shape
    for_offset, for_t, for_mask = jax.random.split(key, 3)
    place = jnp.arange(length)
    offset = jax.random.randint(for_offset, (rows, 1), 0, blocks.length) if blocks.causal else jnp.zeros((rows, 1), jnp.int32)
    block = (place + offset) // blocks.length
    is_decoded = ((place + offset) % blocks.length == 0) & blocks.causal

    count = length // blocks.length + 2
    spread = (jax.random.uniform(for_t, (count,)) + jnp.arange(rows, dtype=jnp.float32)[:, None] / rows) % 1
    least = 1 / blocks.length
    t = jnp.take_along_axis(least + (1 - least) * spread, block, axis=1)
    weights = response_weights(batch)
    masked = (weights > 0) & ~is_decoded & (jax.random.uniform(for_mask, (rows, length)) < t)
    noisy = jnp.where(masked, blocks.mask_token_id, batch.tokens)

    def ahead(x: Array) -> Array:
        return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)

    denoised = jnp.where(masked, weights / t, 0.0)
    denoised_labels = batch.tokens
    if blocks.shifted:
        denoised = ahead(denoised)
        denoised_labels = ahead(denoised_labels)
    decoded = ahead(weights) if blocks.causal else jnp.zeros_like(weights)

    both = jnp.concatenate([block, block], axis=1)
    position = jnp.concatenate([place, place])
    is_noisy = jnp.arange(2 * length) >= length

    def visible_to(query: Int[Array, ""]) -> UInt32[Array, "B W"]:
        """Returns the bits of the positions that one position of the two copies sees."""
        own = both[:, query][:, None]
        earlier = jnp.broadcast_to(position <= position[query], both.shape) if blocks.causal else both <= own
        sees_clean = jnp.where(is_noisy[query], both < own, earlier)
        return packed(jnp.where(is_noisy, is_noisy[query] & (both == own), sees_clean))

    visible = jax.lax.map(visible_to, jnp.arange(2 * length), batch_size=min(QUERIES, 2 * length))
    return Predicted(
        inputs=jnp.concatenate([batch.tokens, noisy], axis=1),
        labels=jnp.concatenate([ahead(batch.tokens), denoised_labels], axis=1),
        weights=jnp.concatenate([decoded, denoised], axis=1),
        counts=jnp.sum(weights, axis=1),
        attn_metadata=visible.swapaxes(0, 1),
        positions=jnp.broadcast_to(position, (rows, 2 * length)),
    )


def visible_attend(
    ops: Operations, projection: Projection, heads: Heads, is_visible: UInt32[Array, "B T W"], kv_cache: Any
) -> tuple[Float[Array, "B T _"], None]:
    """Computes attention of each position over the positions whose bits are set; differentiable if `ops` trains."""
    q, k, v = ops.heads(projection, heads)
    nothing = jnp.zeros((q.shape[0], 1), jnp.int32)
    out = ops.attend(q, None, AttentionMask(nothing, is_visible), (k, v), heads.scores)
    return out.reshape(*out.shape[:2], -1), None
