"""Drafting by a walk over each slot's best candidates, the common part of DFlash 2, DSpark and LiLiCorr.

Such a drafter takes the K most likely tokens of each slot, scores pairs of neighbouring candidates, and chooses slot by slot.
Each drafter computes its scores in its own way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.models import decoder, dflash2
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.dflash import Candidates, DFlash

Walk = Literal["greedy", "sampled"]
"""Choice of a candidate: the best one, or a sample at the row's temperature, drawn with the target's noise at that position
(see `runtime/noise.py`). The output is the same; only the number of tokens that a round commits differs."""


@dataclass(frozen=True)
class Walking(DFlash, ABC):
    """Base class of DFlash drafters that walk over each slot's best candidates.

    Attributes:
        walk: choice of a candidate.
    """

    walk: Walk = "sampled"

    @abstractmethod
    def candidates(
        self, target: Target, models: Models, state: DecodeState, last: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        """Returns the candidates of a block.

        Args:
            last: last token of each row, the first of its block.
            hidden: normalised hidden states of the slots, the head's input.
        """

    def fill(self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]) -> Int[Array, "B drafts"]:
        """Runs one pass and a walk over every drafting slot."""
        hidden = self.hidden(target, models, state, block)
        tokens, scores = self.candidates(target, models, state, block[:, 0], hidden)
        if self.walk == "greedy":
            return dflash2.walk(scores, tokens)
        return dflash2.walk(scores, tokens, state.sampling.temperature, self.noise(state, tokens))

    def draws(self) -> bool:
        return self.walk == "sampled"

    def head_logits(self, target: Target, models: Models, hidden: Float[Array, "B L H"]) -> Float[Array, "B L W"]:
        """Returns the float32 logits of all tokens of the draft vocabulary."""
        vocab = self.backbone(models).vocab
        head = models.draft_head if vocab is None else vocab.head
        if head is not None:
            return self.ops.linear(hidden, head, jnp.float32)
        return target.schedule.logits(target.ops, hidden, decoder.output_head(models.target))
