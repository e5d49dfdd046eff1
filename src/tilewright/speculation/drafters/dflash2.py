"""Drafting with DFlash 2: one pass, then a walk over each slot's candidates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.models import convolution, dflash2
from tilewright.models.dflash2 import DFlash2Config
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.dflash import Candidates
from tilewright.speculation.drafters.walking import Walking


@dataclass(frozen=True)
class DFlash2(Walking):
    """DFlash drafter with convolutions along the block, and a selector that scores pairs of neighbouring tokens (DFlash 2)."""

    config: DFlash2Config

    name = "dflash2"

    @cached_property
    def declared(self) -> Any:
        return self.with_separate_head(dflash2.declare(self.config))

    def run_block(self, models: Models, *block: Any) -> Array:
        return convolution.run_block(self.config, self.ops, models.drafter, *block)

    def candidates(
        self, target: Target, models: Models, state: DecodeState, last: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        drafted, tokens, logits = self.head_top_k(target, models, hidden, self.config.selector_top_k)
        scaled = dflash2.scaled_logits(self.config, logits.astype(jnp.float32))
        scores = dflash2.transition_scores(self.ops, models.drafter.selector, hidden, last, drafted, scaled, tokens)
        return Candidates(tokens, scores)
