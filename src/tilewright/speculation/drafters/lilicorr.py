"""Drafting with LiLiCorr: one pass, a small transformer over each slot's candidates, then a walk."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.models import lilicorr
from tilewright.models.lilicorr import LiLiCorrConfig
from tilewright.models.params import DTYPES
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters import base
from tilewright.speculation.drafters.dflash import Candidates
from tilewright.speculation.drafters.walking import Walking


class LilicorrContext(NamedTuple):
    """Context of a block.

    Attributes:
        caches: keys and values of the positions before the last token, one cache per layer.
        feature: feature of the anchor, the position before the last token, `[B, 1, H]`.
    """

    caches: tuple[Any, ...]
    feature: Array


@dataclass(frozen=True)
class LiLiCorr(Walking):
    """DFlash drafter with a small transformer that scores pairs of neighbouring candidates (LiLiCorr)."""

    config: LiLiCorrConfig

    name = "lilicorr"

    @cached_property
    def declared(self) -> Any:
        return self.with_separate_head(lilicorr.declare(self.config))

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> LilicorrContext:
        feature = jnp.zeros((layout.batch, 1, self.config.hidden_size), DTYPES[self.dtype])
        return LilicorrContext(super().allocate(layout, target, dtype), feature)

    def caches(self, state: DecodeState) -> tuple[Any, ...]:
        return state.draft_cache.caches

    def run_block(self, models: Models, *block: Any) -> Array:
        return lilicorr.run_block(self.config, self.ops, models.drafter, *block)

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        features = self.features(target, models, taps)
        caches = self.appended(models, state, features, start, stop)
        return replace(
            state, draft_cache=LilicorrContext(caches, base.last_feature(features, start, stop, state.draft_cache.feature))
        )

    def candidates(
        self, target: Target, models: Models, state: DecodeState, last: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        logits = self.head_logits(target, models, hidden)
        vocab = self.backbone(models).vocab
        drafted, values = select.top_k(logits, self.config.candidate_top_k)
        tokens = drafted if vocab is None else vocab.ids[drafted]
        log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        flat = tokens.reshape(tokens.shape[0], -1)
        # Always the target's embeddings, even if the drafter has its own for the block.
        embedded = target.schedule.embed(target.ops, models.target.embed, flat).astype(DTYPES[self.dtype])
        # A row of a single token has no anchor; its slot may still hold another request's context.
        anchored = state.last_position > 0
        feature = jnp.where(anchored[:, None], state.draft_cache.feature[:, 0], 0)
        scores = lilicorr.transition_scores(
            self.config,
            self.ops,
            models.drafter.lattice,
            embedded.reshape(*tokens.shape, -1),
            log_probs,
            hidden,
            feature,
            anchored,
        )
        return Candidates(tokens, scores)
