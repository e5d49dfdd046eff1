"""Drafting with DFlash: one pass proposes the whole block (arXiv 2602.06036)."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.decode import cache
from tilewright.decode.drafters import base
from tilewright.decode.drafters.base import Proposal
from tilewright.decode.state import DecodeState, Models, block_positions, embed
from tilewright.kernels.linear.cpu import Format
from tilewright.kernels.select import head_argmax
from tilewright.models import decoder, dflash
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import DFlashConfig
from tilewright.models.params import DTYPES, Dtype


@dataclass(frozen=True)
class DFlash:
    """How to draft.

    Attributes:
        config: the drafter's.
        block_size: tokens in a block, the known one included; at most what the drafter was trained for.
        window: how many of the last positions the drafter's context keeps; None keeps all.
        dtype: of the drafter's weights and activations. Drafts are guesses that the target checks: a lower precision than the
            target's costs accuracy in drafting and nothing in the output.
        refine: further passes over a drafted block, each of which reads the last one's drafts in place of the mask tokens.
    """

    config: DFlashConfig
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"
    refine: int = 0

    name = "dflash"
    reads_target_head = True
    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window, self.config.block_size)
        if self.refine < 0:
            raise ValueError(f"expected 0 or more refining passes, found {self.refine}")

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def allocate(self, batch: int, capacity: int) -> Any:
        config, slots = self.config, base.context_slots(self.window, capacity)
        return cache.allocate(config.num_layers, batch, config.num_kv_heads, slots, config.head_dim, DTYPES[self.dtype])

    def pack(self, params: Any, kind: Format | None) -> Any:
        return dflash.pack_drafter(params, kind)

    def propose(self, target: DecoderConfig, models: Models, state: DecodeState) -> Proposal:
        """Drafts the drafter's most likely token for each slot behind the known one."""
        block = base.masked_block(state, self.block_size, self.config.mask_token_id)
        for _ in range(1 + self.refine):
            drafts = self.fill(models, state, block)
            block = jnp.concatenate([block[:, :1], drafts], axis=1)
        return Proposal(block, jnp.full(block.shape[:1], self.block_size - 1, jnp.int32))

    def fill(self, models: Models, state: DecodeState, block: Int[Array, "B T"]) -> Int[Array, "B drafts"]:
        """One pass: the most likely token for every slot but the first."""
        slots = state.draft_cache[0][0].shape[2]
        hidden = dflash.draft_hidden(
            self.config,
            models.drafter,
            embed(models.target, block).astype(DTYPES[self.dtype]),
            block_positions(state.known, self.block_size),
            state.draft_cache,
            cache.visible_context(slots, state.known),
        )
        if models.draft_head is None:
            return decoder.choose(models.target, hidden[:, 1:])
        return head_argmax(hidden[:, 1:], models.draft_head)

    def extend(
        self, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Int[Array, " B"], stop: Int[Array, " B"]
    ) -> DecodeState:
        params = models.drafter
        features = dflash.context_features(self.config, params, [tap.astype(DTYPES[self.dtype]) for tap in taps])
        new = dflash.context_kv(self.config, params, features, block_positions(start, features.shape[1]))
        return replace(state, draft_cache=base.store(self.window, state.draft_cache, new, start, stop))
