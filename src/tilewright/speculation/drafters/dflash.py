"""Drafting with DFlash: one pass proposes the whole block (arXiv 2602.06036)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels import select
from tilewright.kernels.operations import Norm, Operations
from tilewright.models import dflash, draft_vocab
from tilewright.models.dflash import DFlashConfig, DFlashParams
from tilewright.models.params import DTYPES, Dtype
from tilewright.runtime import trees as draft_trees
from tilewright.runtime.cache import KVCache, Ring, Sliding
from tilewright.runtime.interfaces import OneKind, Proposal
from tilewright.runtime.layout import Layout
from tilewright.runtime.noise import gumbel
from tilewright.runtime.state import DecodeState, Models, Target, block_positions
from tilewright.speculation import trees
from tilewright.speculation.drafters import base

TOP_K = 8
"""Candidates of a slot in the trees of a drafter without pair scores."""


class Candidates(NamedTuple):
    """Candidates of a block.

    Attributes:
        tokens: candidates of every drafting slot as ids of the target, most likely first, `[B, L, K]`.
        scores: score of each slot's candidate after each candidate of the slot before, float32 `[B, L, K, K]`. The first
            slot's candidates follow the last token, so all its rows are equal.
    """

    tokens: Array
    scores: Array


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
        nodes: nodes of its trees, the last token included; 0 for chains.
    """

    config: DFlashConfig
    block_size: int
    window: int | None = None
    dtype: Dtype = "float32"
    refine: int = 0
    ops: Operations = select.PLAIN
    nodes: int = 0

    name = "dflash"
    may_be_idle = False
    branches = True

    def __post_init__(self) -> None:
        base.check_block_size(self.block_size, self.window, self.config.block_size)
        base.check_nodes(self.nodes)
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

    def propose_tree(self, target: Target, models: Models, state: DecodeState) -> draft_trees.Proposal:
        """Drafts the tree with the most probable paths; see `speculation/trees.py`."""
        block = base.masked_block(state, self.block_size, self.config.mask_token_id)
        for _ in range(self.refine):
            block = jnp.concatenate([block[:, :1], self.fill(target, models, state, block)], axis=1)
        hidden = self.hidden(target, models, state, block)
        tokens, scores = self.candidates(target, models, state, block[:, 0], hidden)
        drawn = (jnp.asarray(state.sampling.temperature), self.noise(state, tokens)) if self.draws() else ()
        return draft_trees.Proposal(trees.best_first(block[:, 0], tokens, trees.log_probs(scores, *drawn), self.nodes))

    def draws(self) -> bool:
        """Returns True if trees follow the noise of the target's draws."""
        return True

    def noise(self, state: DecodeState, tokens: Int[Array, "B L K"]) -> Float[Array, "B L K"]:
        """Returns the noise of the target's draws for the candidates of each slot."""
        positions = block_positions(state.last_position + 1, tokens.shape[1])
        return gumbel(jnp.asarray(state.sampling.key), positions, tokens)

    def candidates(
        self, target: Target, models: Models, state: DecodeState, last: Int[Array, " B"], hidden: Float[Array, "B L H"]
    ) -> Candidates:
        """Returns the most likely tokens of each slot, with scores that do not depend on the token before."""
        _, tokens, logits = self.head_top_k(target, models, hidden, TOP_K)
        scores = logits.astype(jnp.float32)[:, :, None]
        return Candidates(tokens, jnp.broadcast_to(scores, (*tokens.shape, TOP_K)))

    def head_top_k(
        self, target: Target, models: Models, hidden: Float[Array, "B L H"], k: int
    ) -> tuple[Int[Array, "B L {k}"], Int[Array, "B L {k}"], Float[Array, "B L {k}"]]:
        """Returns the `k` most likely tokens of each slot; see `base.best_tokens`."""
        return base.best_tokens(self.ops, target, models, self.backbone(models).vocab, hidden, k)

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
