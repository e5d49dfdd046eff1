"""Drafting by a walk through each slot's best candidates, which DFlash 2 and what came after it have in common.

Such a drafter takes the K most likely tokens of each slot, says of any two neighbours how well they go together, and goes from
slot to slot. What it says, and of what, is each drafter's own.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tilewright.models import decoder, dflash2
from tilewright.runtime.noise import gumbel
from tilewright.runtime.state import DecodeState, Models, Target, block_positions
from tilewright.speculation.drafters.dflash import DFlash

Walk = Literal["greedy", "sampled"]
"""How a candidate is taken: the best one, or one that is drawn at the row's temperature, unless that is 0, with the noise that
the target draws with there (see `noise.py`). The output is the same: drafts only decide how many tokens a round commits."""


class Candidates(NamedTuple):
    """Candidates of a block.

    Attributes:
        tokens: of every slot that drafts, by the target's ids, the most likely first, `[B, L, K]`.
        scores: of each slot's candidates after each of the slot before, float32 `[B, L, K, K]`; of the first slot's after the
            known token, whatever the row.
    """

    tokens: Array
    scores: Array


@dataclass(frozen=True)
class Walking(DFlash, ABC):
    """Base of DFlash drafters that walk through each slot's best candidates.

    Attributes:
        walk: how a candidate is taken.
    """

    walk: Walk = "sampled"

    @abstractmethod
    def candidates(
        self, target: Target, models: Models, state: DecodeState, known: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        """The candidates of a block.

        Args:
            known: the tokens that the blocks begin with.
            hidden: of the slots, normalised, as the head reads it.
        """

    def fill(self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]) -> Int[Array, "B drafts"]:
        """One pass, and a walk over every slot that drafts."""
        hidden = self.hidden(target, models, state, block)
        tokens, scores = self.candidates(target, models, state, block[:, 0], hidden)
        if self.walk == "greedy":
            return dflash2.walk(scores, tokens)
        positions = block_positions(state.known + 1, tokens.shape[1])
        noise = gumbel(jnp.asarray(state.sampling.key), positions, tokens)
        return dflash2.walk(scores, tokens, state.sampling.temperature, noise)

    def head_top_k(
        self, target: Target, models: Models, hidden: Float[Array, "B L H"], k: int
    ) -> tuple[Int[Array, "B L {k}"], Int[Array, "B L {k}"], Float[Array, "B L {k}"]]:
        """Each slot's `k` most likely tokens: their draft ids, the target's ids of them, and their logits."""
        vocab = self.backbone(models).vocab
        if vocab is not None:
            drafted, logits = self.ops.head_top_k(hidden, vocab.head, k)
            return drafted, vocab.ids[drafted], logits
        if models.draft_head is not None:
            tokens, logits = self.ops.head_top_k(hidden, models.draft_head, k)
        else:
            tokens, logits = target.schedule.head_top_k(target.ops, hidden, decoder.output_head(models.target), k)
        return tokens, tokens, logits

    def head_logits(self, target: Target, models: Models, hidden: Float[Array, "B L H"]) -> Float[Array, "B L W"]:
        """The logits of all tokens that can be proposed, float32."""
        vocab = self.backbone(models).vocab
        head = models.draft_head if vocab is None else vocab.head
        if head is not None:
            return self.ops.linear(hidden, head, jnp.float32)
        return target.schedule.logits(target.ops, hidden, decoder.output_head(models.target))
