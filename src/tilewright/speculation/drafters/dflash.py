"""Drafting with DFlash: one pass proposes the whole block (arXiv 2602.06036)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.operations import Norm, Operations
from tilewright.models import dflash, draft_vocab
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime.cache import KVCache, Ring, Sliding
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.state import DecodeState, Models, Target, block_positions
from tilewright.speculation.drafters import base


def is_copy(params: Any, other: Any) -> bool:
    """Returns True if `params` equals `other` cast to the dtype of `params`."""
    same = isinstance(other, Array) and params.shape == other.shape
    return same and bool(jnp.array_equal(other.astype(params.dtype), params))


@dataclass(frozen=True)
class DFlash(OneKind):
    """Drafter that proposes a block in one pass, by denoising masks (DFlash).

    Attributes:
        config: configuration of the drafter.
        block_size: tokens in a block, the last token included; at most the block size that the drafter was trained with.
        window: number of last positions in the drafter's context; None keeps all.
        dtype: dtype of the drafter's weights and activations. The target verifies all drafts, so a lower precision than the
            target's changes acceptance, not the output.
        refine: further passes over a drafted block. Each reads the drafts of the pass before in place of the mask tokens.
        ops: operations that the parameters were prepared for.
    """

    config: DFlashConfig
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"
    refine: int = 0
    ops: Operations = select.PLAIN

    name = "dflash"
    may_be_idle = False

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window, self.config.block_size)
        if self.refine < 0:
            raise ValueError(f"expected 0 or more refining passes, found {self.refine}")

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def expected_acceptance(self) -> tuple[float, ...]:
        return self.config.expected_acceptance[: self.block_size - 1]

    @property
    def reads_target_head(self) -> bool:
        return not self.config.has_head

    @cached_property
    def declared(self) -> Any:
        return self.with_separate_head(dflash.declare(self.config))

    def with_separate_head(self, declared: Any) -> Any:
        """Adds the declaration of the draft vocabulary, if the drafter has one."""
        vocab = draft_vocab.declare(self.config.num_proposable, self.config.hidden_size)
        return dflash.with_vocab(declared, vocab) if self.config.has_head else declared

    def with_head(self, params: Any, columns: Callable[[Int[Array, " W"]], Array]) -> Any:
        """Adds an output head to a draft vocabulary that was stored without one.

        Args:
            columns: returns the columns of the target's output head for the given tokens, `[hidden, W]`.
        """
        vocab = dflash.backbone_of(params).vocab
        if vocab is None or vocab.head is not None:
            return params
        return dflash.with_vocab(params, replace(vocab, head=columns(vocab.ids).astype(DTYPES[self.dtype])))

    def without_copies(self, params: Any, embed: Any, columns: Callable[[Int[Array, " W"]], Array]) -> tuple["DFlash", Any]:
        """Drops an embedding or a head that is a copy of the target's. Returns the drafter and its parameters.

        Args:
            embed: embedding of the target.
            columns: see `with_head`.
        """
        config = self.config
        backbone = dflash.backbone_of(params)
        if config.own_embedding and is_copy(backbone.embed, embed):
            config = replace(config, own_embedding=False)
            params = dflash.with_backbone(params, embed=None)
        whole = config.own_head and config.draft_vocab_size is None and config.hidden_size == config.tap_size
        if whole and is_copy(backbone.vocab.head, columns(backbone.vocab.ids)):
            config = replace(config, own_head=False)
            params = dflash.with_vocab(params, None)
        return replace(self, config=config), params

    def allocate(self, layout: Layout, target: Target, dtype: DTypeLike) -> Any:
        return tuple(self.allocate_layer(n, layout) for n in range(self.config.num_layers))

    def allocate_layer(self, n: int, layout: Layout) -> KVCache:
        """Allocates the context of one layer.

        A window as long as the context is none. Pages hold layers that attend to all positions of the context; sliding windows,
        causal blocks and attention sinks need a ring.
        """
        config = self.config
        end = layout.capacity + self.config.block_size
        sizes = (self.ops, 1, config.num_kv_heads, config.head_dim, DTYPES[self.dtype])
        window = min(config.windows[n] or end, end)
        causal = n in config.causal_layers
        if window == end and not causal and not config.attention_sinks:
            (whole,) = layout.caches(*sizes, self.window)
            return whole
        (ring,) = layout.caches(*sizes, window - 1 if self.window is None else min(window - 1, self.window))
        assert isinstance(ring, Ring)
        return Sliding(ring.k, ring.v, window, causal)

    def propose(self, target: Target, models: Models, state: DecodeState) -> Proposal:
        """Drafts the most likely token of each slot after the last token."""
        block = base.masked_block(state, self.block_size, self.config.mask_token_id)
        for _ in range(1 + self.refine):
            drafts = self.fill(target, models, state, block)
            block = jnp.concatenate([block[:, :1], drafts], axis=1)
        return Proposal(block, jnp.full(block.shape[:1], self.block_size - 1, jnp.int32))

    def fill(self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]) -> Int[Array, "B drafts"]:
        """Runs one pass. Returns the most likely token of every drafting slot."""
        hidden = self.hidden(target, models, state, block)
        return base.most_likely(self.ops, target, models, self.backbone(models).vocab, hidden)

    def hidden(
        self, target: Target, models: Models, state: DecodeState, block: Int[Array, "B T"]
    ) -> Float[Array, "B drafts H"]:
        """Returns the hidden states of the drafting slots, the head's input."""
        first = self.config.first_slot
        tokens = block[:, : block.shape[1] - 1 + first]
        positions = block_positions(state.last_position, tokens.shape[1])
        embedded = self.embed(target, models, tokens)
        ran = self.run_block(models, embedded, positions, self.caches(state), dflash.attend_context, state.last_position)
        return ran[:, first:]

    def embed(self, target: Target, models: Models, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Returns the drafter's or the target's embeddings; the mask token may have an embedding of its own."""
        backbone = self.backbone(models)
        if backbone.embed is None:
            rows = target.schedule.embed(target.ops, models.target.embed, tokens)
        else:
            rows = self.ops.gather_rows(backbone.embed, tokens)
        rows = rows.astype(DTYPES[self.dtype])
        if backbone.mask is None:
            return rows
        return jnp.where((tokens == self.config.mask_token_id)[..., None], backbone.mask.astype(rows.dtype), rows)

    def caches(self, state: DecodeState) -> tuple[Any, ...]:
        """Returns the KV caches of the context, one per layer."""
        return state.draft_cache

    def backbone(self, models: Models) -> DFlashParams:
        """Returns the parameters that compute the context."""
        return dflash.backbone_of(models.drafter)

    def run_block(self, models: Models, *block: Any) -> Array:
        """See `models.dflash.run_block`."""
        return dflash.run_block(self.config, self.ops, models.drafter, *block)

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
        return replace(state, draft_cache=self.appended(models, state, features, start, stop))

    def features(self, target: Target, models: Models, taps: tuple[Array, ...]) -> Float[Array, "B T H"]:
        """Returns one feature for each tapped position."""
        taps = dflash.normal_taps(self.config, target.ops, taps, Norm(models.target.norm, target.config.rms_norm_eps))
        casts = [tap.astype(DTYPES[self.dtype]) for tap in taps]
        return dflash.context_features(self.config, self.ops, self.backbone(models), casts)

    def appended(
        self,
        models: Models,
        state: DecodeState,
        features: Float[Array, "B T H"],
        start: Int[Array, " B"],
        stop: Int[Array, " B"],
    ) -> tuple[Any, ...]:
        """Appends the keys and values of positions `start` to `stop - 1`, computed from the features from `start` on."""
        positions = block_positions(start, features.shape[1])
        new = dflash.context_kv(self.config, self.ops, self.backbone(models), features, positions)
        pairs = zip(self.caches(state), new, strict=True)
        return tuple(old.append(self.ops, k, v, start, stop - start) for old, (k, v) in pairs)
