"""Drafting with EAGLE-3: a chain of single steps, all in one round (arXiv 2503.01840)."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, Int32

from tilewright.decode import cache
from tilewright.decode.drafters import base
from tilewright.decode.drafters.base import Proposal
from tilewright.decode.state import DecodeState, Models, known_token
from tilewright.kernels.linear.cpu import Format
from tilewright.kernels.select import head_argmax, prefix_attention, rms_norm
from tilewright.models import eagle3
from tilewright.models.decoder import DecoderConfig
from tilewright.models.eagle3 import Eagle3Config
from tilewright.models.params import DTYPES, Dtype


class Context(NamedTuple):
    """What the chain starts from.

    Attributes:
        keys: keys and values of all pairs (see `models/eagle3.py`) before the last one, and that one's too.
        feature: of the position before the known token, `[B, 1, H]`.
    """

    keys: tuple[Array, Array]
    feature: Array


@dataclass(frozen=True)
class Eagle3:
    """How to draft.

    Attributes:
        config: the drafter's.
        block_size: tokens in a block, the known one included: the chain has one step fewer.
        window: how many of the last positions the context keeps; None keeps all.
        dtype: of the drafter's weights and activations.
    """

    config: Eagle3Config
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"

    name = "eagle3"
    reads_target_head = False
    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def allocate(self, batch: int, capacity: int) -> Any:
        config, dtype = self.config, DTYPES[self.dtype]
        slots = base.context_slots(self.window, capacity)
        (keys,) = cache.allocate(1, batch, config.num_kv_heads, slots, config.head_dim, dtype)
        return Context(keys, jnp.zeros((batch, 1, config.hidden_size), dtype))

    def pack(self, params: Any, kind: Format | None) -> Any:
        return eagle3.pack_eagle3(params, kind)

    def embed(self, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        table = models.target.embed if models.drafter.embed is None else models.drafter.embed
        return table[tokens].astype(DTYPES[self.dtype])

    def propose(self, target: DecoderConfig, models: Models, state: DecodeState) -> Proposal:
        """Drafts token after token: each step reads its own output of the step before, and the token drafted there."""
        context: Context = state.draft_cache
        slots = context.keys[0].shape[2]
        # At least one: a row of a single token has no pair yet, and drafts from an empty entry.
        visible = jnp.maximum(cache.visible_context(slots, state.known), 1)[:, None]
        token, h = known_token(state), context.feature
        block, chain = [token], []
        for step in range(self.block_size - 1):

            def attend(q: Array, k: Array, v: Array, first: bool = step == 0) -> tuple[Array, None]:
                if first:  # its own pair is in the context already
                    return prefix_attention(q, *context.keys, visible, beside=models.drafter.layer.q), None
                chain.append((k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)))
                own_k, own_v = (jnp.concatenate(parts, axis=2) for parts in zip(*chain, strict=True))
                return prefix_attention(q, *context.keys, visible, (own_k, own_v), beside=models.drafter.layer.q), None

            positions = state.known[:, None] - 1 + step
            h, _ = eagle3.step(self.config, models.drafter, h, self.embed(models, token), positions, attend)
            token = self.choose(models, h)
            block.append(token)
        return Proposal(jnp.concatenate(block, axis=1), jnp.full(state.known.shape, self.block_size - 1, jnp.int32))

    def choose(self, models: Models, h: Float[Array, "B 1 H"]) -> Int32[Array, "B 1"]:
        """The most likely token after a step."""
        normal = rms_norm(h, models.drafter.norm, self.config.rms_norm_eps)
        return eagle3.to_target(models.drafter, head_argmax(normal, models.drafter.head))

    def extend(
        self, models: Models, state: DecodeState, taps: tuple[Array, ...], start: Int[Array, " B"], stop: Int[Array, " B"]
    ) -> DecodeState:
        context: Context = state.draft_cache
        features = eagle3.fuse(self.config, models.drafter, [tap.astype(DTYPES[self.dtype]) for tap in taps])
        place = jnp.arange(features.shape[1])[None]
        positions = start[:, None] + place
        after = jnp.take_along_axis(state.tokens, jnp.minimum(positions + 1, state.tokens.shape[1] - 1), axis=1)
        new = eagle3.keys(self.config, models.drafter, features, self.embed(models, after), positions)
        last = jnp.take_along_axis(features, jnp.clip(stop - 1 - start, 0, features.shape[1] - 1)[:, None, None], axis=1)
        feature = jnp.where((stop > start)[:, None, None], last, context.feature)
        return replace(state, draft_cache=Context(base.store(self.window, context.keys, new, start, stop), feature))
