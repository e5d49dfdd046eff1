"""Speculative decoding with a DFlash drafter: a round is draft, verify, accept, extend, in fixed shapes.

Why the output is the target's own: in each slot the target draws its token from its full, warped distribution with the
randomness of that *position* (`sampling.sample`), and a draft is accepted only if it is that very token. So every settled token
is the one that autoregressive decoding with the same seed would have drawn; the draft decides only how many of them a round may
settle. For a drafter that proposes its argmax this has the acceptance probability of the one-hot rejection rule, p(draft).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tilewright.decode import cache
from tilewright.decode.sampling import Warp, argmax
from tilewright.decode.state import DecodeState, Models, block_positions, commit, embed, known_token, verify
from tilewright.kernels.select import linear
from tilewright.models import dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.params import DTYPES, Dtype


@dataclass(frozen=True)
class Drafting:
    """How to draft.

    Attributes:
        config: the drafter's.
        block_size: tokens in a block, the known one included; at most what the drafter was trained for.
        window: how many of the last positions the drafter's context keeps; None keeps all.
        dtype: of the drafter's weights and activations. Drafts are guesses that the target checks: a lower precision than the
            target's costs accuracy in drafting and nothing in the output.
    """

    config: DFlashConfig
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if not 2 <= self.block_size <= self.config.block_size:
            raise ValueError(f"expected a block size from 2 to the drafter's {self.config.block_size}, found {self.block_size}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected a draft window of at least 1, found {self.window}")

    def context_slots(self, capacity: int) -> int:
        return capacity if self.window is None else min(self.window, capacity)


def draft(drafting: Drafting, target: DecoderConfig, models: Models, state: DecodeState) -> Int[Array, "B T"]:
    """Drafts a block: the known token, then the drafter's most likely token for each later slot."""
    known, size = known_token(state), drafting.block_size
    masks = jnp.full((known.shape[0], size - 1), drafting.config.mask_token_id, known.dtype)
    slots = state.draft_cache[0][0].shape[2]
    embedded = embed(models.target, jnp.concatenate([known, masks], axis=1))
    hidden = dflash.draft_hidden(
        drafting.config,
        drafter_params(models),
        embedded.astype(DTYPES[drafting.dtype]),
        block_positions(state.known, size),
        state.draft_cache,
        cache.visible_context(slots, state.known),
    )
    logits = linear(hidden[:, 1:], models.draft_head, jnp.float32)
    return jnp.concatenate([known, argmax(logits)], axis=1)


def drafter_params(models: Models) -> DFlashParams:
    assert models.drafter is not None, "a speculative program needs a drafter"
    return models.drafter


def extend(
    drafting: Drafting,
    params: DFlashParams,
    state: DecodeState,
    taps: tuple[Array, ...],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
) -> DecodeState:
    """Adds positions `start` to `stop - 1` to the drafter's context, from the target's hidden states at `start` onwards.

    Without a window, entries from `stop` on are written as well and stay masked until the next round replaces them.
    """
    features = dflash.context_features(drafting.config, params, [tap.astype(DTYPES[drafting.dtype]) for tap in taps])
    new = dflash.context_kv(drafting.config, params, features, block_positions(start, features.shape[1]))

    def store(cached: Array, entries: Array) -> Array:
        if drafting.window is None:
            return cache.write(cached, entries, start)
        return cache.write_ring(cached, entries, start, stop)

    return replace(state, draft_cache=jax.tree.map(store, state.draft_cache, new))


def speculative_round(
    drafting: Drafting, target: DecoderConfig, warp: Warp, models: Models, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """One round. Returns how many tokens it settled in each row: the accepted drafts and one more from the target."""
    block = draft(drafting, target, models, state)
    verified = verify(target, models.target, state, block, drafting.config.target_layer_ids, warp)
    agrees = block[:, 1:] == verified.tokens[:, :-1]
    accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
    after, settled = commit(target, verified.state, verified.tokens, accepted)
    return extend(drafting, drafter_params(models), after, verified.taps, state.known, after.known), settled
