"""Drafting with the target itself, which denoises a block of masks in one pass: linear self-speculation.

Nemotron-Labs-Diffusion (arXiv 2607.05722) was trained to denoise blocks and to decode with the same weights. A round runs the
target twice: over the last token and masks, which all see each other, for the drafts; then over the drafts, as in decoding. The
first pass may have a low-rank adapter of its own, and leaves nothing in the cache, so the output is that of decoding.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import attend_context
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.sampling import sample
from tilewright.runtime.state import DecodeState, Models, Target, block_positions
from tilewright.speculation.drafters import base


@dataclass(frozen=True)
class SelfDiffusion(OneKind):
    """Proposes the tokens that the target puts in place of masks in one pass.

    Attributes:
        block_size: tokens in a block, the last token included.
        mask_token_id, shifted: see `models.config.MaskedBlocks`.
        adapter: number of the draft pass's low-rank adapter; 0 for that of each row's request.
    """

    block_size: int
    mask_token_id: int
    shifted: bool = False
    adapter: int = 0

    name = "self"
    may_be_idle = False
    reads_target_head = False
    dtype = None
    declared = None
    tap_layers = ()

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size)

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return ()

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        block = base.masked_block(state, self.block_size, self.mask_token_id)
        drafts = self.drafts(target, models, state, self.hidden(target, models, state, block))
        return Proposal(
            jnp.concatenate([block[:, :1], drafts], axis=1), jnp.full(block.shape[:1], self.block_size - 1, jnp.int32)
        )

    def hidden(
        self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]
    ) -> Float[Array, "B drafts H"]:
        """Returns the hidden states that predict the block's masks."""
        adapter = jnp.full(block.shape[:1], self.adapter, jnp.int32) if self.adapter else state.adapter
        ran = decoder.forward(
            target.config,
            target.ops,
            models.target,
            block,
            block_positions(state.last_position, self.block_size),
            attend_context,
            state.last_position,
            state.target_cache,
            schedule=target.schedule,
            adapter=adapter,
        )
        return ran.hidden[:, :-1] if self.shifted else ran.hidden[:, 1:]

    def drafts(
        self, target: Target, models: Models, state: DecodeState, hidden: Float[Array, "B drafts H"]
    ) -> Int[Array, "B drafts"]:
        """Returns the most likely tokens, or for rows that draw, a draw with the noise of the token's position.

        The target draws with the same noise, so the two agree more often than independent draws.
        """

        def best() -> Array:
            return decoder.most_likely(target.config, target.ops, models.target, hidden, target.schedule)

        def drawn() -> Array:
            logits = decoder.logits(target.config, target.ops, models.target, hidden, target.schedule)
            return sample(logits, state.sampling, block_positions(state.last_position + 1, self.block_size - 1))

        if target.sampling == "greedy":
            return best()
        if not target.loops:
            return drawn()
        draws = jnp.any(~state.done & (jnp.asarray(state.sampling.temperature) > 0))
        # Neither branch changes its inputs, so XLA:CPU copies none of them.
        return jax.lax.cond(draws, drawn, best)

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        return state


def self_diffusion(target: DecoderConfig, block_size: int | None) -> SelfDiffusion:
    """Returns the drafter of a target; by default with the blocks of its training.

    Raises:
        ValueError: the target was not trained to denoise blocks.
    """
    blocks = target.masked_blocks
    if blocks is None:
        raise ValueError(
            f"expected a target that was trained to denoise blocks, such as Nemotron-Labs-Diffusion, for the drafter "
            f"{SelfDiffusion.name}, found a model of the family {target.family}"
        )
    return SelfDiffusion(block_size or blocks.length, blocks.mask_token_id, blocks.shifted)
