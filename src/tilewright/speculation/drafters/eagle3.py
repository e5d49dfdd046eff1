"""Drafting with EAGLE-3: a chain of single steps within one round (arXiv 2503.01840)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import eagle3
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import DTYPES, ArraySpec, Dtype
from tilewright.runtime.cache import KVCache
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, block_positions, last_token
from tilewright.speculation.drafters import base


class Eagle3Context(NamedTuple):
    """Context at the start of a chain.

    Attributes:
        keys: keys and values of all (feature, token) pairs up to the last token (see `models/eagle3.py`).
        feature: feature of the position before the last token, `[B, 1, H]`.
    """

    keys: KVCache
    feature: Array


@dataclass(frozen=True)
class Eagle3(OneKind):
    """Drafter that proposes a chain, one token after another (EAGLE-3).

    Attributes:
        config: configuration of the drafter.
        block_size: tokens in a block, the last token included; the chain has `block_size - 1` steps.
        window: number of last positions in the context; None keeps all.
        dtype: dtype of the drafter's weights and activations.
        ops: operations that the parameters were prepared for.
    """

    config: Eagle3Config
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"
    ops: Operations = select.PLAIN

    name = "eagle3"
    reads_target_head = False
    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @cached_property
    def declared(self) -> Any:
        ids = ArraySpec("d2t", (self.config.draft_vocab_size,), ("vocab",))
        return replace(eagle3.declare(self.config), target_ids=ids)

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        config = self.config
        precision = DTYPES[self.dtype]
        (keys,) = layout.caches(self.ops, 1, config.num_kv_heads, config.head_dim, precision, self.window)
        return Eagle3Context(keys, jnp.zeros((layout.batch, 1, config.hidden_size), precision))

    def embed(self, target: Target, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        table = models.drafter.embed  # replicated on every device
        if table is None:
            return target.schedule.embed(target.ops, models.target.embed, tokens).astype(DTYPES[self.dtype])
        return self.ops.gather_rows(table, tokens).astype(DTYPES[self.dtype])

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts one token after another. Each step reads the hidden state and the token of the step before."""
        context: Eagle3Context = state.draft_cache
        visible = context.keys.visible(state.last_position)[:, None]
        # A row of a single token has no pair yet; its slot may still hold another request's context.
        token = last_token(state)
        h = jnp.where(state.last_position[:, None, None] > 0, context.feature, 0)
        block = [token]
        chain = []
        for step in range(self.block_size - 1):

            def attend(projection: Projection, heads: Heads, first: bool = step == 0) -> Array:
                q, k, v = self.ops.heads(projection, heads)
                if not first:  # the first pair is already in the context
                    chain.append((k, v))
                block_kv = None
                if chain:
                    keys, values = zip(*chain, strict=True)
                    block_kv = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
                mask = AttentionMask(visible, None if block_kv is None else "full")
                return context.keys.attend(self.ops, q, mask, block_kv).reshape(*q.shape[:2], -1)

            positions = state.last_position[:, None] - 1 + step
            h = eagle3.step(self.config, self.ops, models.drafter, h, self.embed(target, models, token), positions, attend)
            token = eagle3.choose(self.config, self.ops, models.drafter, h)
            block.append(token)
        return Proposal(jnp.concatenate(block, axis=1), jnp.full(state.last_position.shape, self.block_size - 1, jnp.int32))

    def extend(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        taps: tuple[Array, ...],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> DecodeState:
        context: Eagle3Context = state.draft_cache
        features = eagle3.fuse(self.config, self.ops, models.drafter, [tap.astype(DTYPES[self.dtype]) for tap in taps])
        positions = block_positions(start, features.shape[1])
        after = jnp.take_along_axis(state.tokens, jnp.minimum(positions + 1, state.tokens.shape[1] - 1), axis=1)
        embeds = self.embed(target, models, after)
        k, v = eagle3.keys(self.config, self.ops, models.drafter, features, embeds, positions)
        feature = base.last_feature(features, start, stop, context.feature)
        return replace(state, draft_cache=Eagle3Context(context.keys.append(self.ops, k, v, start, stop - start), feature))
