"""Drafting of a chain: single steps within one round, each of which reads the state and the token before."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Float32, Int

from tilewright.kernels import select
from tilewright.kernels.masks import AttentionMask, packed
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models.config import HeadSizes
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime import trees as draft_trees
from tilewright.runtime.cache import KVCache
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.noise import gumbel
from tilewright.runtime.state import DecodeState, Models, Target, block_positions, last_token
from tilewright.speculation import trees
from tilewright.speculation.drafters import base

TOP_K = 8
"""Candidates behind each token."""
BEAM = 8
"""The most tokens of one depth of a tree that are continued."""

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
        h = self.first_feature(state)
        block = [token]
        for number in range(self.block_size - 1):
            token, h = step(number, h, token)
            block.append(token)
        return Proposal(jnp.concatenate(block, axis=1), jnp.full(state.last_position.shape, self.block_size - 1, jnp.int32))

    def first_feature(self, state: DecodeState) -> Float[Array, "B 1 H"]:
        """Returns the feature of the position before the last token."""
        # A row of a single token has no pair yet; its slot may still hold another request's context.
        return jnp.where(state.last_position[:, None, None] > 0, state.draft_cache.feature, 0)

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

    Where a row draws its tokens, its drafts follow the noise of the target's draws (see `runtime/noise.py`).

    Legend: B rows, F tokens that are continued at one depth (1 in a chain), K candidates behind each, U pairs of a tree.

    Attributes:
        window: number of last positions in the context; None keeps all.
        nodes: nodes of its trees, the last token included; 0 for chains.
    """

    window: int | None = None
    nodes: int = 0

    branches = True

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window)
        base.check_nodes(self.nodes)

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
        h: Float[Array, "B F H"],
        embeds: Float[Array, "B F H"],
        positions: Int[Array, "B F"],
        attend: Callable[[Projection, Heads], Float[Array, "B F _"]],
    ) -> Float[Array, "B F H"]:
        """Runs the layer over pairs (see `keys`). Returns `h` of the next step."""

    @abstractmethod
    def candidates(
        self, target: Target, models: Models, h: Float[Array, "B F H"], k: int
    ) -> tuple[Int[Array, "B F {k}"], Float[Array, "B F {k}"]]:
        """Returns the `k` most likely tokens after a step, in descending order, and their logits."""

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        precision = DTYPES[self.dtype]
        (keys,) = layout.caches(self.ops, 1, self.heads.kv_heads, self.heads.head_dim, precision, self.window)
        return super().allocate(layout, target, dtype)._replace(keys=keys)

    def run(
        self,
        target: Target,
        models: Models,
        state: DecodeState,
        number: int,
        h: Float[Array, "B F H"],
        tokens: Int[Array, "B F"],
        pairs: list[tuple[Array, Array]],
        seen: Bool[Array, "B F U"] | None = None,
    ) -> Float[Array, "B F H"]:
        """Runs step `number` over pairs.

        Args:
            pairs: keys and values `[B, K, F, D]` of earlier steps; those of this step are added. The first step's are in the
                context already.
            seen: pairs that each one sees, itself included; None if each sees all.
        """
        context: KVCache = state.draft_cache.keys
        visible = context.visible(state.last_position)[:, None]

        def attend(projection: Projection, heads: Heads) -> Array:
            q, k, v = self.ops.heads(projection, heads)
            if number > 0:
                pairs.append((k, v))
            block_kv = None
            if pairs:
                keys, values = zip(*pairs, strict=True)
                block_kv = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
            mask = AttentionMask(visible, None if block_kv is None else "full" if seen is None else packed(seen))
            out = context.attend(self.ops, q, mask, block_kv, heads.scores)
            return out.reshape(*q.shape[:2], -1)

        positions = jnp.broadcast_to(state.last_position[:, None] - 1 + number, tokens.shape)
        return self.step(models.drafter, h, self.embed(target, models, tokens), positions, attend)

    def ranked(
        self, target: Target, models: Models, state: DecodeState, number: int, h: Float[Array, "B F H"]
    ) -> tuple[Int[Array, "B F K"], Float32[Array, "B F K"]]:
        """Returns the candidates behind the tokens of step `number`, and the log-probability that the target draws each."""
        tokens, scores = self.candidates(target, models, h, min(TOP_K, self.config.num_proposable))
        position = jnp.broadcast_to(state.last_position[:, None] + 1 + number, tokens.shape[:2])
        noise = gumbel(jnp.asarray(state.sampling.key), position, tokens)
        temperature = jnp.asarray(state.sampling.temperature)
        return tokens, trees.log_probs(scores.astype(jnp.float32)[:, :, None], temperature, noise)[:, :, 0]

    def stepper(self, target: Target, models: Models, state: DecodeState) -> ChainStep:
        pairs: list[tuple[Array, Array]] = []

        def step(number: int, h: Array, token: Array) -> tuple[Array, Array]:
            h = self.run(target, models, state, number, h, token, pairs)
            tokens, log_probs = self.ranked(target, models, state, number, h)
            best = jnp.argmax(log_probs, axis=2)
            return jnp.take_along_axis(tokens, best[:, :, None], axis=2)[:, :, 0], h

        return step

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> draft_trees.Proposal:
        """Drafts the tree with the most probable of the paths that a beam search finds.

        Each step continues the `BEAM` most probable paths of its depth (EAGLE-2, arXiv 2406.16858, section 4).
        """
        last = last_token(state)
        rows = last.shape[0]
        tokens = last
        h = self.first_feature(state)
        path = jnp.zeros(last.shape, jnp.float32)  # log-probability of each path that is continued
        place = jnp.full_like(last, -1)  # place of its last token among all candidates
        seen: Array | None = None
        pairs: list[tuple[Array, Array]] = []
        found: list[trees.Candidates] = []
        for number in range(self.block_size - 1):
            h = self.run(target, models, state, number, h, tokens, pairs, seen)
            behind, log_probs = self.ranked(target, models, state, number, h)
            k = behind.shape[2]
            paths = (path[:, :, None] + log_probs).reshape(rows, -1)
            behind = behind.reshape(rows, -1)
            before = sum(each.tokens.shape[1] for each in found)
            found.append(trees.Candidates(behind, jnp.repeat(place, k, axis=1), paths))
            path, chosen = jax.lax.top_k(paths, min(BEAM, self.nodes - 1, paths.shape[1]))
            parent = chosen // k
            h = jnp.take_along_axis(h, parent[:, :, None], axis=1)
            tokens = jnp.take_along_axis(behind, chosen, axis=1)
            place = before + chosen.astype(place.dtype)
            itself = jnp.broadcast_to(jnp.eye(chosen.shape[1], dtype=bool), (rows, chosen.shape[1], chosen.shape[1]))
            above = [] if seen is None else [jnp.take_along_axis(seen, parent[:, :, None], axis=1)]
            seen = jnp.concatenate([*above, itself], axis=2)
        return draft_trees.Proposal(trees.most_probable(last[:, 0], found, self.nodes))

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
