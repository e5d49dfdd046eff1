"""Plain decoding through a block-wide program: a drafter that proposes nothing.

Programs of different shapes may round differently, so in bfloat16 speculative decoding need not equal decoding one token at a
time. Speculative decoding equals block-wide decoding in every dtype and on every chip, since both run the same program. On
TPUs, where sixteen rows can cost less than one, block-wide decoding is also faster.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters import base


@dataclass(frozen=True)
class Blockwise(OneKind):
    """Runs the last token and `block_size - 1` filler tokens. Commits one token per round."""

    block_size: int = 16

    name = "none"
    reads_target_head = False
    dtype = None
    declared = None
    tap_layers = ()
    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size)

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return ()

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        block = base.masked_block(state, self.block_size, 0)
        return Proposal(block, jnp.zeros(block.shape[:1], jnp.int32))

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
