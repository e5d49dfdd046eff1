"""Drafting with EAGLE-3: a chain of single steps within one round (arXiv 2503.01840)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Heads, Projection
from tilewright.models import eagle3
from tilewright.models.config import HeadSizes
from tilewright.models.params import DTYPES, ArraySpec
from tilewright.runtime.state import Models, Target
from tilewright.speculation.drafters.chain import PairChain


@dataclass(frozen=True)
class Eagle3(PairChain):
    """Drafter that proposes a chain from the target's hidden states after a few tapped layers (EAGLE-3)."""

    name = "eagle3"
    reads_target_head = False

    @cached_property
    def declared(self) -> Any:
        ids = ArraySpec("d2t", (self.config.draft_vocab_size,), ("vocab",))
        return replace(eagle3.declare(self.config), target_ids=ids)

    @property
    def heads(self) -> HeadSizes:
        return HeadSizes(self.config.num_kv_heads, self.config.head_dim)

    def embed(self, target: Target, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        table = models.drafter.embed  # replicated on every device
        if table is None:
            return super().embed(target, models, tokens)
        return self.ops.gather_rows(table, tokens).astype(DTYPES[self.dtype])

    def features(self, target: Target, models: Models, taps: tuple[Array, ...]) -> Float[Array, "B T H"]:
        return eagle3.fuse(self.config, self.ops, models.drafter, [tap.astype(DTYPES[self.dtype]) for tap in taps])

    def keys(
        self, params: Any, h: Float[Array, "B T H"], embeds: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        return eagle3.keys(self.config, self.ops, params, h, embeds, positions)

    def step(
        self,
        params: Any,
        h: Float[Array, "B F H"],
        embeds: Float[Array, "B F H"],
        positions: Int[Array, "B F"],
        attend: Callable[[Projection, Heads], Float[Array, "B F _"]],
    ) -> Float[Array, "B F H"]:
        return eagle3.step(self.config, self.ops, params, h, embeds, positions, attend)

    def candidates(
        self, target: Target, models: Models, h: Float[Array, "B F H"], k: int
    ) -> tuple[Int[Array, "B F {k}"], Float[Array, "B F {k}"]]:
        return eagle3.best_tokens(self.config, self.ops, models.drafter, h, k)
