"""Drafting with DFlash 2: one pass, then a walk through each slot's candidates."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.models import decoder, dflash2
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.params import DTYPES
from tilewright.runtime import cache
from tilewright.runtime.cache import KVCache
from tilewright.runtime.layout import Layout
from tilewright.runtime.noise import gumbel
from tilewright.runtime.state import DecodeState, Models, Target, block_positions
from tilewright.speculation.drafters.dflash import DFlash

Walk = Literal["greedy", "sampled"]
"""How a candidate is taken: the best one, or one that is drawn at the row's temperature, unless that is 0, with the noise that
the target draws with there (see `noise.py`). The output is the same: drafts only decide how many tokens a round settles."""


@dataclass(frozen=True)
class DFlash2(DFlash):
    """DFlash drafter that walks through each slot's best candidates (DFlash 2).

    Attributes:
        walk: how a candidate is taken.
    """

    config: DFlash2Config
    walk: Walk = "sampled"

    name = "dflash2"

    @cached_property
    def declared(self) -> Any:
        return self.with_own_head(dflash2.declare(self.config))

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return tuple(self.allocate_layer(window, layout) for window in self.config.windows)

    def allocate_layer(self, window: int | None, layout: Layout) -> KVCache:
        """The context of a layer with this window; in a cache that is shorter, no query comes to the window's end."""
        sizes = (self.ops, 1, self.config.num_kv_heads, self.config.head_dim, DTYPES[self.dtype])
        if window is None or window >= layout.capacity + self.config.block_size:
            (whole,) = layout.caches(*sizes, self.window)
            return whole
        (ring,) = layout.caches(*sizes, window - 1 if self.window is None else min(window - 1, self.window))
        assert isinstance(ring, cache.Ring)
        return cache.Sliding(ring.k, ring.v, window)

    def run_block(self, models: Models, *block: Any) -> Array:
        return dflash2.run_block(self.config, self.ops, models.drafter, *block)

    def fill(self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]) -> Int[Array, "B drafts"]:
        """One pass, and a walk over every slot but the first."""
        hidden = self.hidden(target, models, state, block)
        candidates, ids, logits = self.candidates(target, models, hidden)
        selector = models.drafter.selector
        scores = dflash2.transition_scores(self.config, self.ops, selector, hidden, block[:, 0], candidates, logits, ids)
        if self.walk == "greedy":
            return dflash2.walk(scores, ids)
        positions = block_positions(state.known + 1, ids.shape[1])
        noise = gumbel(jnp.asarray(state.sampling.key), positions, ids)
        return dflash2.walk(scores, ids, state.sampling.temperature, noise)

    def candidates(
        self, target: Target, models: Models, hidden: Float[Array, "B L H"]
    ) -> tuple[Int[Array, "B L K"], Int[Array, "B L K"], Float[Array, "B L K"]]:
        """Each slot's most likely tokens: their draft ids, the target's ids of them, and their logits."""
        k, vocab = self.config.selector_top_k, self.backbone(models).vocab
        if vocab is not None:
            candidates, logits = self.ops.head_top_k(hidden, vocab.head, k)
            return candidates, vocab.ids[candidates], logits
        if models.draft_head is not None:
            candidates, logits = self.ops.head_top_k(hidden, models.draft_head, k)
        else:
            candidates, logits = target.schedule.head_top_k(target.ops, hidden, decoder.output_head(models.target), k)
        return candidates, candidates, logits
