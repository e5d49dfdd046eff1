"""Drafting of a chain: single steps within one round, each of which reads the state and the token before."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models.config import HeadSizes
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime.cache import KVCache
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, block_positions, last_token
from tilewright.speculation.drafters import base

ChainStep = Callable[[int, Array, Array], tuple[Array, Array]]
"""Step of a chain, `(n, h [B, 1, H], token [B, 1]) -> (next token, h of the next step)`, for n from 0 on, in order."""


class ChainContext(NamedTuple):
    """Context at the start of a chain.

    Attributes:
        keys: keys and values of all (feature, token) pairs up to the last token; None for a drafter without a cache.
        feature: feature of the position before the last token, `[B, 1, H]`.
    """

    keys: KVCache | None
    feature: Array


@dataclass(frozen=True)
class Chain(OneKind, ABC):
    """Base of drafters that propose a chain, one token after another.

    Attributes:
        config: configuration of the drafter.
        block_size: tokens in a block, the last token included; the chain has `block_size - 1` steps.
        dtype: dtype of the drafter's weights and activations.
        ops: operations that the parameters were prepared for.
    """

    config: Any
    block_size: int
    dtype: Dtype = "float32"
    ops: Operations = select.PLAIN

    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @abstractmethod
    def stepper(self, target: Target, models: Models, state: DecodeState) -> ChainStep:
        """Returns the step of the chains of a round."""

    def features(self, target: Target, models: Models, taps: tuple[Array, ...]) -> Float[Array, "B T H"]:
        """Returns a feature for each tapped position, by default the target's hidden state after its final norm."""
        (stream,) = taps
        return target.ops.rms_norm(stream, models.target.norm, target.config.rms_norm_eps).astype(DTYPES[self.dtype])

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return ChainContext(None, jnp.zeros((layout.batch, 1, self.config.hidden_size), DTYPES[self.dtype]))

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts one token after another. Each step reads the hidden state and the token of the step before."""
        step = self.stepper(target, models, state)
        token = last_token(state)
        # A row of a single token has no pair yet; its slot may still hold another request's context.
        h = jnp.where(state.last_position[:, None, None] > 0, state.draft_cache.feature, 0)
        block = [token]
        for number in range(self.block_size - 1):
            token, h = step(number, h, token)
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
        context: ChainContext = state.draft_cache
        features = self.features(target, models, taps)
        keys = self.extended(target, models, state, features, start, stop)
        return replace(state, draft_cache=ChainContext(keys, base.last_feature(features, start, stop, context.feature)))

    def extended(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        features: Float[Array, "B T H"],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> KVCache | None:
        """Returns the keys and values of the context after `extend`; None without a cache."""
        return None


@dataclass(frozen=True)
class PairChain(Chain, ABC):
    """Base of chains by one layer that caches its own keys and values, of pairs of a feature and the token behind it.

    Attributes:
        window: number of last positions in the context; None keeps all.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window)

    @property
    @abstractmethod
    def heads(self) -> HeadSizes:
        """Heads of keys and values."""

    def embed(self, target: Target, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Returns the embeddings of tokens, by default the target's."""
        return target.schedule.embed(target.ops, models.target.embed, tokens).astype(DTYPES[self.dtype])

    @abstractmethod
    def keys(
        self, params: Any, h: Float[Array, "B T H"], embeds: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        """Returns keys and values of pairs at the positions of their features; `embeds` are of the tokens *after* them."""

    @abstractmethod
    def step(
        self,
        params: Any,
        h: Float[Array, "B 1 H"],
        embeds: Float[Array, "B 1 H"],
        positions: Int[Array, "B 1"],
        attend: Callable[[Projection, Heads], Float[Array, "B 1 _"]],
    ) -> Float[Array, "B 1 H"]:
        """Runs the layer over one pair of each row (see `keys`). Returns `h` of the next step."""

    @abstractmethod
    def choose(self, target: Target, models: Models, h: Float[Array, "B 1 H"]) -> Int[Array, "B 1"]:
        """Returns the most likely token after a step."""

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        precision = DTYPES[self.dtype]
        (keys,) = layout.caches(self.ops, 1, self.heads.kv_heads, self.heads.head_dim, precision, self.window)
        return super().allocate(layout, target, dtype)._replace(keys=keys)

    def stepper(self, target: Target, models: Models, state: DecodeState) -> ChainStep:
        context: KVCache = state.draft_cache.keys
        visible = context.visible(state.last_position)[:, None]
        chain: list[tuple[Array, Array]] = []

        def step(number: int, h: Array, token: Array) -> tuple[Array, Array]:
            def attend(projection: Projection, heads: Heads) -> Array:
                q, k, v = self.ops.heads(projection, heads)
                if number > 0:  # the first pair is already in the context
                    chain.append((k, v))
                block_kv = None
                if chain:
                    keys, values = zip(*chain, strict=True)
                    block_kv = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
                mask = AttentionMask(visible, None if block_kv is None else "full")
                out = context.attend(self.ops, q, mask, block_kv, heads.scores)
                return out.reshape(*q.shape[:2], -1)

            positions = state.last_position[:, None] - 1 + number
            h = self.step(models.drafter, h, self.embed(target, models, token), positions, attend)
            return self.choose(target, models, h), h

        return step

    def extended(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        features: Float[Array, "B T H"],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> KVCache:
        positions = block_positions(start, features.shape[1])
        after = jnp.take_along_axis(state.tokens, jnp.minimum(positions + 1, state.tokens.shape[1] - 1), axis=1)
        k, v = self.keys(models.drafter, features, self.embed(target, models, after), positions)
        return state.draft_cache.keys.append(self.ops, k, v, start, stop - start)
