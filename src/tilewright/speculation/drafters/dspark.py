"""Drafting with DSpark: one pass in which slot 0 drafts too, then a walk scored by a serial head."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.models import dflash, dflash2, dspark
from tilewright.models.dspark import DSparkConfig
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.dflash import Candidates
from tilewright.speculation.drafters.walking import Walking


@dataclass(frozen=True)
class DSpark(Walking):
    """DFlash drafter with a serial head that scores the most likely tokens of each slot (DSpark)."""

    config: DSparkConfig

    name = "dspark"

    @cached_property
    def declared(self) -> Any:
        return self.with_separate_head(dspark.declare(self.config))

    def run_block(self, models: Models, *block: Any) -> Array:
        return dflash.run_block(self.config, self.ops, models.drafter.backbone, *block)

    def candidates(
        self, target: Target, models: Models, state: DecodeState, last: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        drafted, tokens, logits = self.head_top_k(target, models, hidden, self.config.candidate_top_k)
        serial = models.drafter.selector
        scores = dflash2.transition_scores(self.ops, serial, hidden, last, drafted, logits.astype(jnp.float32), tokens)
        return Candidates(tokens, scores)
