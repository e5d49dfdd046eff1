"""Drafting with EAGLE-3: a chain of single steps, all in one round (arXiv 2503.01840)."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import eagle3
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import DTYPES, ArraySpec, Dtype
from tilewright.runtime.cache import KVCache
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, block_positions, known_token
from tilewright.speculation.drafters import base


class Eagle3Context(NamedTuple):
    """Context that the chain starts from.

    Attributes:
        keys: keys and values of all pairs (see `models/eagle3.py`) before the last one, and that one's too.
        feature: of the position before the known token, `[B, 1, H]`.
    """

    keys: KVCache
    feature: Array


@dataclass(frozen=True)
class Eagle3(OneKind):
    """Drafter that proposes a chain, one token after another (EAGLE-3).

    Attributes:
        config: the drafter's.
        block_size: tokens in a block, the known one included: the chain has one step fewer.
        window: how many of the last positions the context keeps; None keeps all.
        dtype: of the drafter's weights and activations.
        ops: what its parameters were prepared for.
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
        own = DTYPES[self.dtype]
        (keys,) = layout.caches(self.ops, 1, config.num_kv_heads, config.head_dim, own, self.window)
        return Eagle3Context(keys, jnp.zeros((layout.batch, 1, config.hidden_size), own))

    def embed(self, target: Target, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        own = models.drafter.embed  # which is whole on every device
        if own is None:
            return target.schedule.embed(target.ops, models.target.embed, tokens).astype(DTYPES[self.dtype])
        return self.ops.gather_rows(own, tokens).astype(DTYPES[self.dtype])

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts token after token: each step reads its own output of the step before, and the token drafted there."""
        context: Eagle3Context = state.draft_cache
        visible = context.keys.visible(state.known)[:, None]
        # A row of a single token has no pair yet, whatever its context held for another request.
        token = known_token(state)
        h = jnp.where(state.known[:, None, None] > 0, context.feature, 0)
        block = [token]
        chain = []
        for step in range(self.block_size - 1):

            def attend(projection: Projection, heads: Heads, first: bool = step == 0) -> Array:
                q, k, v = self.ops.heads(projection, heads)
                if not first:  # of the first step, its own pair is in the context already
                    chain.append((k, v))
                own = None
                if chain:
                    keys, values = zip(*chain, strict=True)
                    own = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
                return context.keys.attend(self.ops, q, visible, own).reshape(*q.shape[:2], -1)

            positions = state.known[:, None] - 1 + step
            h = eagle3.step(self.config, self.ops, models.drafter, h, self.embed(target, models, token), positions, attend)
            token = eagle3.choose(self.config, self.ops, models.drafter, h)
            block.append(token)
        return Proposal(jnp.concatenate(block, axis=1), jnp.full(state.known.shape, self.block_size - 1, jnp.int32))

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
