"""Drafting with a head for multi-token prediction (MTP): a chain from the target's last hidden state (`models/mtp.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Heads, Projection
from tilewright.models import draft_vocab, mtp
from tilewright.models.config import HeadSizes
from tilewright.models.params import DTYPES
from tilewright.runtime.state import Models, Target
from tilewright.speculation.drafters import base
from tilewright.speculation.drafters.chain import PairChain


@dataclass(frozen=True)
class MTP(PairChain):
    """Drafter that proposes a chain through the target's output head, from the target's last hidden state (MTP)."""

    name = "mtp"

    @property
    def reads_target_head(self) -> bool:
        return self.config.draft_vocab_size is None

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        return self.config.expected_acceptance[: self.block_size - 1]

    @cached_property
    def declared(self) -> Any:
        if self.config.draft_vocab_size is None:
            return mtp.declare(self.config)
        vocab = draft_vocab.declare(self.config.draft_vocab_size, self.config.hidden_size)
        return replace(mtp.declare(self.config), vocab=vocab)

    def with_head(self, params: Any, columns: Callable[[Int[Array, " W"]], Array]) -> Any:
        """Adds the target's output head of the draft vocabulary; see `DFlash.with_head`."""
        if params.vocab is None or params.vocab.head is not None:
            return params
        return replace(params, vocab=replace(params.vocab, head=columns(params.vocab.ids).astype(DTYPES[self.dtype])))

    @property
    def heads(self) -> HeadSizes:
        return self.config.heads

    def keys(
        self, params: Any, h: Float[Array, "B T H"], embeds: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        return mtp.keys(self.config, self.ops, params, h, embeds, positions)

    def step(
        self,
        params: Any,
        h: Float[Array, "B F H"],
        embeds: Float[Array, "B F H"],
        positions: Int[Array, "B F"],
        attend: Callable[[Projection, Heads], Float[Array, "B F _"]],
    ) -> Float[Array, "B F H"]:
        return mtp.step(self.config, self.ops, params, h, embeds, positions, attend)

    def candidates(
        self, target: Target, models: Models, h: Float[Array, "B F H"], k: int
    ) -> tuple[Int[Array, "B F {k}"], Float[Array, "B F {k}"]]:
        return base.best_tokens(self.ops, target, models, models.drafter.vocab, h, k)[1:]
