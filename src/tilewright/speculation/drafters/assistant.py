"""Drafting with an assistant of Gemma 4: a chain that attends over the target's own keys and values (`models/assistant.py`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array

from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import assistant, decoder
from tilewright.models.params import DTYPES
from tilewright.runtime.state import DecodeState, Models, Target
from tilewright.speculation.drafters.chain import Chain, ChainStep


@dataclass(frozen=True)
class Assistant(Chain):
    """Drafter without a cache and a prefill of its own, for a Gemma 4 target."""

    name = "assistant"
    reads_target_head = False
    beyond_windows = assistant.BEYOND_WINDOW

    @cached_property
    def declared(self) -> Any:
        return assistant.declare(self.config)

    def stepper(self, target: Target, models: Models, state: DecodeState) -> ChainStep:
        params = models.drafter
        precision = DTYPES[self.dtype]
        position = state.last_position[:, None]
        caches = tuple(state.target_cache[layer] for layer in self.config.cached_layers)
        running = (~state.done).astype(jnp.int32)  # rows that are done may have no pages

        def attend(
            ops: Operations, projection: Projection, heads: Heads, attn_metadata: Any, kv_cache: Any
        ) -> tuple[Array, Any]:
            q, _, _ = ops.heads(projection, heads)
            # Without a block, the window counts from the position before the query's.
            window = None if heads.window is None else heads.window + 1
            mask = AttentionMask(position, counts=running, window=window)
            out = kv_cache.attend(target.ops, q.astype(models.target.norm.dtype), mask, scores=heads.scores)
            return out.astype(precision).reshape(*q.shape[:2], -1), kv_cache

        def step(number: int, h: Array, token: Array) -> tuple[Array, Array]:
            embeds = decoder.embed(target.config, target.ops, models.target, token, target.schedule).astype(precision)
            x = assistant.step(self.config, self.ops, params, h, embeds, position, attend, caches)
            return assistant.choose(self.config, self.ops, params, x), self.ops.linear(x, params.post)

        return step
