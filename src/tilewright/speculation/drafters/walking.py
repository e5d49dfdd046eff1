"""Drafting by a walk over each slot's best candidates, the common part of DFlash 2, DSpark and LiLiCorr.

Such a drafter takes the K most likely tokens of each slot, scores pairs of neighbouring candidates, and chooses slot by slot.
Each drafter computes its scores in its own way.
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
"""Choice of a candidate: the best one, or a sample at the row's temperature, drawn with the target's noise at that position
(see `runtime/noise.py`). The output is the same; only the number of tokens that a round commits differs."""


class Candidates(NamedTuple):
    """Candidates of a block.

    Attributes:
        tokens: candidates of every drafting slot as ids of the target, most likely first, `[B, L, K]`.
        scores: score of each slot's candidate after each candidate of the slot before, float32 `[B, L, K, K]`. The first
            slot's candidates follow the last token, so all its rows are equal.
    """

    tokens: Array
    scores: Array


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
        positions = block_positions(state.last_position + 1, tokens.shape[1])
        noise = gumbel(jnp.asarray(state.sampling.key), positions, tokens)
        return dflash2.walk(scores, tokens, state.sampling.temperature, noise)

    def head_top_k(
        self, target: Target, models: Models, hidden: Float[Array, "B L H"], k: int
    ) -> tuple[Int[Array, "B L {k}"], Int[Array, "B L {k}"], Float[Array, "B L {k}"]]:
        """Returns the `k` most likely tokens of each slot: ids of the draft vocabulary, ids of the target, logits."""
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
        """Returns the float32 logits of all tokens of the draft vocabulary."""
        vocab = self.backbone(models).vocab
        head = models.draft_head if vocab is None else vocab.head
        if head is not None:
            return self.ops.linear(hidden, head, jnp.float32)
        return target.schedule.logits(target.ops, hidden, decoder.output_head(models.target))
