"""State of a batch that is being decoded, and the operations that all kinds of steps share."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from tilewright.kernels import select
from tilewright.kernels.masks import AttentionMask, causal_from
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import decoder
from tilewright.models.config import Canvas, MaskedBlocks
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.delta import DeltaState
from tilewright.models.stack import TRACED_ONCE, Strategy
from tilewright.runtime.cache import CausalCache
from tilewright.runtime.logprobs import Logprobs, logprobs_of, no_logprobs
from tilewright.runtime.per_row import PenaltyHistory, penalises, sample_each
from tilewright.runtime.sampling import RowSampling, SamplingMode, penalise, sample
from tilewright.runtime.trees import DraftTree, accepted_nodes, along

NOT_FINITE = -1
"""Token id in place of a token whose logits are not finite; it ends its row."""

KvDtype = Literal["auto", "int8"]
"""Dtype of the target's KV cache: "auto" for the target's own, "int8" for 8 bits with a scale for each position and head."""


@dataclass(frozen=True)
class Target:
    """Constants of the target that a program is compiled with.

    Attributes:
        ops: operations that its parameters were prepared for.
        schedule: tensor-parallel schedule of its layers.
        mesh: mesh of its devices, see `placement.Placement`; None for the default device.
        compiler_options: compiles with the options of `parallel/compiling.py` if the mesh has several TPUs.
        loops: whether the compiler takes loops of data-dependent length. Without them, every step runs the most general
            sampling, and reports no log-probabilities.
        sampling: the most general sampling that rows may request.
        kv_dtype: dtype of its KV cache. Drafters' caches have the drafters' dtype.
        block_length: positions of a block, for a model whose blocks are denoised; None for a model that decodes token by token.
    """

    config: DecoderConfig
    ops: Operations = select.PLAIN
    schedule: Strategy = TRACED_ONCE
    mesh: Mesh | None = None
    compiler_options: bool = False
    loops: bool = True
    sampling: SamplingMode = "logprobs"
    kv_dtype: KvDtype = "auto"
    block_length: int | None = None

    @property
    def reports_logprobs(self) -> bool:
        return self.loops and self.sampling == "logprobs"

    @property
    def blocks(self) -> MaskedBlocks | None:
        """The blocks that are denoised; None for a model that decodes token by token."""
        return None if self.block_length is None else self.config.masked_blocks

    @property
    def canvas(self) -> Canvas | None:
        """The canvas of a model that refines random tokens; None for other models."""
        return self.config.canvas


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """Positions of each row: `count` of them from `start` on, `[B]` each. A row with count 0 does not change.

    Attributes:
        uncommitted: whether `commit` decides later how many of the positions stay. Rejected positions are stale in a cache; a
            layer with a state (`models/delta.py`) updates the state at the commit.
    """

    start: Any
    count: Any
    uncommitted: bool = field(default=False, metadata={"static": True})

    def positions(self, first: int, count: int) -> "Span":
        """Returns the part of the span between offsets `first` and `first + count` from each row's start."""
        return Span(self.start + first, jnp.clip(self.count - first, 0, count), self.uncommitted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Models:
    """Parameters that a step reads.

    Attributes:
        drafter: the drafter's own parameters; None without a drafter, or for a drafter without parameters.
        draft_head: the target's output head in the drafter's dtype, for drafters that use the head in a different dtype.
        corpus: index of texts that n-gram drafters search besides a row's own; None for none.
    """

    target: DecoderParams
    drafter: Any = None
    draft_head: Any = None
    corpus: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """Batch of rows of fixed size, allocated before the loop and donated to every step.

    Positions of a row:

        [0 ........ last_position)   tokens with keys and values in the target's cache and features in the drafter's context
        [last_position]              the last committed token; the next step runs it through the target
        (last_position ....... end)  not generated yet; the caches may hold stale entries here

    Attributes:
        tokens: int32 `[B, capacity]`; entries beyond `last_position` are undefined.
        last_position: int32 `[B]`, position of the last committed token.
        end: int32 `[B]`; no token is generated at or beyond this position.
        done: bool `[B]`; a row that is done does not change. Padding rows are done from the start.
        ignore_eos: bool `[B]`.
        sampling: the rows' sampling parameters.
        target_cache: one cache for each layer; layers with linear attention have a `DeltaState`.
        draft_cache: the drafter's context; empty without a drafter.
        adapter: int32 `[B]`, number of each row's low-rank adapter, 0 for none; None if no row has an adapter.
        automaton: int32 `[B]`, state of each row's automaton behind the last rounds; see `automaton_table.py`. None if no
            program needs it.
        denoising: denoising state of rows whose blocks or canvases are denoised (`diffusion.blocks.BlockRows`,
            `diffusion.canvas.CanvasRows`); None for other rows.
        proposed: int32 `[B, T]` for rounds under masks of width T: the number of each row's drafts for its next round, then the
            drafts; 0 drafts behind other rounds. None if no program needs it.
    """

    tokens: Any
    last_position: Any
    end: Any
    done: Any
    ignore_eos: Any
    sampling: RowSampling
    target_cache: tuple[CausalCache | DeltaState, ...]
    draft_cache: Any
    adapter: Any = None
    automaton: Any = None
    proposed: Any = None
    denoising: Any = None


class Verified(NamedTuple):
    """Result of the target for a block.

    Attributes:
        tokens: the target's own token *behind* each slot, `[B, T]`, or `NOT_FINITE`.
        taps: auxiliary hidden states for the drafter.
        state: state with the block's keys and values in the target's cache; `commit` updates layers with states.
        logprobs: log-probabilities of the tokens that may be committed, for rows that want them; None without loops.
    """

    tokens: Array
    taps: tuple[Array, ...]
    state: DecodeState
    logprobs: Logprobs | None = None


def block_positions(last_position: Int[Array, " B"], size: int) -> Int[Array, "B T"]:
    return last_position[:, None] + jnp.arange(size)[None]


def cached_attend(
    ops: Operations, projection: Projection, heads: Heads, span: Span, cache: CausalCache
) -> tuple[Array, CausalCache]:
    """Appends the span's keys and values to the cache, and attends to the cache; see `decoder.Attend`."""
    return cache.attend_projected(ops, projection, heads, causal_from(span.start, span.count, heads.window))


def bounded_attend(
    ends: Int[Array, "B T"], ops: Operations, projection: Projection, heads: Heads, span: Span, cache: CausalCache
) -> tuple[Array, CausalCache]:
    """Appends the span's keys and values to the cache, and attends to the positions before each query's end.

    See `decoder.Attend`.
    """
    q, k, v = ops.heads(projection, heads)
    after = cache.append(ops, k, v, span.start, span.count)
    out = after.attend(ops, q, AttentionMask(ends, counts=span.count), scores=heads.scores)
    return out.reshape(*q.shape[:2], -1), after


def run_target(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    span: Span,
    tap_layers: tuple[int, ...],
    ends: Int[Array, "B T"] | None = None,
) -> decoder.Forward:
    """Runs `tokens` at positions `span.start` onwards over the target's cache; the updated cache is in the result's `caches`.

    Results of tokens behind the first `span.count` are undefined.

    Args:
        ends: a token sees the positions before this one. By default those up to its own, or where finished tokens see their
            whole block, those up to the block's end.
    """
    positions = block_positions(span.start, tokens.shape[1])
    blocks = target.blocks
    if ends is None and blocks is not None and not blocks.causal:
        ends = (positions // blocks.length + 1) * blocks.length
    attend = cached_attend if ends is None else partial(bounded_attend, ends)
    return decoder.forward(
        target.config,
        target.ops,
        params,
        tokens,
        positions,
        attend,
        span,
        state.target_cache,
        tap_layers,
        target.schedule,
        state.adapter,
    )


def verify(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    block: Int[Array, "B T"],
    tap_layers: tuple[int, ...],
    masks: Array | None = None,
) -> Verified:
    """Runs a block that begins with the last committed token through the target, and draws the token behind each slot.

    Slots behind the cache's last position write nothing, since no token is committed there.

    Args:
        masks: masks of the tokens allowed behind each slot, uint32 `[B, T, ceil(V / 32)]`; None if all are allowed.
    """
    left = jnp.where(state.done, 0, state.tokens.shape[1] - state.last_position)
    span = Span(state.last_position, jnp.minimum(left, block.shape[1]), uncommitted=True)
    ran = run_target(target, params, state, block, span, tap_layers)
    tokens, logprobs = next_tokens(target, params, state, block, ran.hidden, masks)
    # Weights were checked to be finite, so logits are finite where hidden states are.
    finite = jnp.isfinite(jnp.sum(ran.hidden.astype(jnp.float32), axis=-1))
    return Verified(jnp.where(finite, tokens, NOT_FINITE), ran.taps, replace(state, target_cache=ran.caches), logprobs)


class TreeEntries(NamedTuple):
    """Cache of a layer, and keys and values of a tree's nodes that are not in it, `[B, K, N, D]`."""

    cache: Any
    k: Array
    v: Array


def tree_attend(
    tree: DraftTree, ops: Operations, projection: Projection, heads: Heads, span: Span, cache: CausalCache
) -> tuple[Array, TreeEntries]:
    """Attends from each node to the context, the node's ancestors and itself; the cache stays as it is.

    See `decoder.Attend`.
    """
    q, k, v = ops.heads(projection, heads)
    mask = AttentionMask(span.start[:, None], tree.bits, counts=span.count, window=heads.window)
    out = cache.attend(ops, q, mask, cache.as_held(k, v), heads.scores)
    return out.reshape(*q.shape[:2], -1), TreeEntries(cache, k, v)


class VerifiedTree(NamedTuple):
    """Result of the target for a tree.

    Attributes:
        tokens: the target's own token *behind* each node, `[B, N]`, or `NOT_FINITE`. Tokens behind nodes that the target's
            tokens do not lead to may be undefined.
        taps: auxiliary hidden states for the drafter, of all nodes.
        entries: the layers' caches, and the nodes' keys and values.
        logprobs: as in `Verified`, by node.
    """

    tokens: Array
    taps: tuple[Array, ...]
    entries: tuple[TreeEntries, ...]
    logprobs: Logprobs | None = None


def forward_tree(
    target: Target, params: DecoderParams, state: DecodeState, tree: DraftTree, tap_layers: tuple[int, ...]
) -> decoder.Forward:
    """Runs a tree through the target's layers in one pass; `caches` of the result are `TreeEntries`."""
    span = Span(state.last_position, jnp.where(state.done, 0, tree.tokens.shape[1]), uncommitted=True)
    return decoder.forward(
        target.config,
        target.ops,
        params,
        tree.tokens,
        state.last_position[:, None] + tree.depths,
        partial(tree_attend, tree),
        span,
        state.target_cache,
        tap_layers,
        target.schedule,
        state.adapter,
    )


def verify_tree(
    target: Target, params: DecoderParams, state: DecodeState, tree: DraftTree, tap_layers: tuple[int, ...]
) -> VerifiedTree:
    """Runs a tree through the target in one pass, and draws the token behind each node. Writes nothing into the caches."""
    ran = forward_tree(target, params, state, tree, tap_layers)
    tokens, logprobs = next_tokens(target, params, state, tree.tokens, ran.hidden, tree=tree)
    finite = jnp.isfinite(jnp.sum(ran.hidden.astype(jnp.float32), axis=-1))
    return VerifiedTree(jnp.where(finite, tokens, NOT_FINITE), ran.taps, ran.caches, logprobs)


def with_path(
    target: Target, entries: tuple[TreeEntries, ...], path: Int[Array, "B S"], start: Int[Array, " B"], count: Int[Array, " B"]
) -> tuple[CausalCache, ...]:
    """Writes the keys and values of a path's first `count` nodes into the layers' caches, from position `start` on."""
    return tuple(
        each.cache.append(target.ops, along(path, each.k, axis=2), along(path, each.v, axis=2), start, count)
        for each in entries
    )


def next_tokens(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    block: Int[Array, "B T"],
    hidden: Array,
    masks: Array | None = None,
    tree: DraftTree | None = None,
) -> tuple[Int[Array, "B T"], Logprobs | None]:
    """Returns the token behind each slot of a block, and log-probabilities for rows that want them.

    If every row takes the most likely token and wants nothing else, the head computes that token without its logits. Programs
    for such rows only have no other branch.

    Args:
        hidden: the target's hidden states, `[B, T, H]`.
        masks: see `verify`. Masked logits, where logits are computed, are the input of everything that follows.
        tree: tree whose nodes are the slots; None for a chain.
    """
    rows = state.sampling
    after = state.last_position[:, None] + 1 + (jnp.arange(block.shape[1])[None] if tree is None else tree.depths)
    if target.sampling == "greedy":
        return decoder.most_likely(target.config, target.ops, params, hidden, target.schedule, masks), None

    def logits_of() -> Array:
        logits = decoder.logits(target.config, target.ops, params, hidden, target.schedule)
        return logits if masks is None else select.allowed(logits, masks)

    if not target.loops:
        return sample(penalise(logits_of(), rows, state.tokens, state.last_position, block, tree), rows, after), None
    running = ~state.done
    asking = running & jnp.asarray(rows.wants_logprobs) & target.reports_logprobs
    drawing = running & (penalises(rows) | (jnp.asarray(rows.temperature) > 0))
    none = partial(no_logprobs, block.shape, target.config.vocab_size)

    def best() -> tuple[Array, Logprobs | None]:
        tokens = decoder.most_likely(target.config, target.ops, params, hidden, target.schedule, masks)
        return tokens, none() if target.reports_logprobs else None

    def row_by_row() -> tuple[Array, Logprobs | None]:
        logits = logits_of()
        history = PenaltyHistory(state.tokens, state.last_position, block)
        tokens = sample_each(logits, rows, history, after, running, *(() if tree is None else (tree,)))
        if not target.reports_logprobs:
            return tokens, None

        def report() -> Logprobs:
            if tree is not None:
                return logprobs_of(logits, tokens, asking[:, None] & accepted_nodes(tree, tokens))
            agreed = jnp.cumprod((block[:, 1:] == tokens[:, :-1]).astype(jnp.int32), axis=1) > 0
            committed = jnp.pad(agreed, ((0, 0), (1, 0)), constant_values=True)
            return logprobs_of(logits, tokens, asking[:, None] & committed)

        return tokens, jax.lax.cond(jnp.any(asking), report, none)

    # Neither branch changes its inputs, so XLA:CPU copies none of them.
    return jax.lax.cond(jnp.any(asking | drawing), row_by_row, best)


def commit(
    target: Target, state: DecodeState, tokens: Int[Array, "B T"], accepted: Int[Array, " B"]
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Commits the first `accepted + 1` of a round's tokens, fewer at the row's end. Returns how many it committed.

    That many positions of the block are final, from that of the last committed token on: layers with states take them in.
    """
    slot = jnp.arange(tokens.shape[1])[None]
    is_eos = jnp.zeros(tokens.shape, bool)
    for eos in target.config.eos_token_ids:
        is_eos = is_eos | (tokens == eos)
    is_eos = ((is_eos & ~state.ignore_eos[:, None]) | (tokens == NOT_FINITE)) & (slot <= accepted[:, None])
    until_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, accepted + 1)
    committed = jnp.minimum(until_eos, state.end - 1 - state.last_position)
    committed = jnp.where(state.done, 0, committed)
    stopped = jnp.any(is_eos & (slot < committed[:, None]), axis=1)
    last_position = state.last_position + committed
    written = select.write_buffer(state.tokens, tokens, state.last_position + 1, committed)
    done = state.done | stopped | (last_position >= state.end - 1)
    caches = tuple(each.commit(target.ops, committed) if isinstance(each, DeltaState) else each for each in state.target_cache)
    return replace(state, tokens=written, last_position=last_position, done=done, target_cache=caches), committed


def last_token(state: DecodeState) -> Int[Array, "B 1"]:
    return jnp.take_along_axis(state.tokens, state.last_position[:, None], axis=1)


FROM_NGRAMS = 1 << 16
"""Flag in the reported number of drafts of a row whose drafts n-grams made; a block has fewer drafts."""


class StepInfo(NamedTuple):
    """Report of a step or round: all results that the host reads; int32 except for log-probabilities.

    Attributes:
        tokens: `[B, T]`, T being 1 or the block size; a row's first `committed` entries are its new tokens, others are
            undefined.
        committed: `[B]`; number of new tokens of each row.
        drafted: `[B]`; number of drafts that it ran.
        accepted: `[B]`; number of drafts that the target agreed with, including any behind the row's end.
        logprobs: log-probabilities of the new tokens of rows that want them; None if no row does.
        from_ngrams: `[B]`; true where n-grams made the drafts in place of a model; None for a drafter that never does so.
    """

    tokens: Any
    committed: Any
    drafted: Any
    accepted: Any
    logprobs: Logprobs | None = None
    from_ngrams: Any = None

    def widened(self, width: int) -> "StepInfo":
        """Returns a copy with `width` slots, empty behind the existing ones."""

        def wide(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

        return self._replace(tokens=wide(self.tokens), logprobs=jax.tree.map(wide, self.logprobs))

    def packed(self) -> Int[Array, "B _"]:
        """Packs everything but the log-probabilities into one array, for one transfer to the host."""
        drafted = self.drafted if self.from_ngrams is None else self.drafted + FROM_NGRAMS * self.from_ngrams.astype(jnp.int32)
        counts = jnp.stack([self.committed, drafted, self.accepted], axis=1)
        return jnp.concatenate([counts, self.tokens], axis=1).astype(jnp.int32)

    @staticmethod
    def unpacked(reports: "Reports", wanted: bool = False) -> "StepInfo":
        """Unpacks the steps of a dispatch that ran. Each of them committed a token of some row.

        Args:
            wanted: whether a row wants log-probabilities; otherwise these stay on the device.
        """
        packed = np.asarray(reports.packed)
        ran = np.count_nonzero(np.any(packed[..., 0] > 0, axis=1))
        logprobs = jax.tree.map(lambda each: np.asarray(each)[:ran], reports.logprobs) if wanted else None
        committed, drafted, accepted = np.moveaxis(packed[:ran, :, :3], -1, 0)
        from_ngrams, drafted = np.divmod(drafted, FROM_NGRAMS)
        return StepInfo(packed[:ran, :, 3:], committed, drafted, accepted, logprobs, from_ngrams > 0)


class Reports(NamedTuple):
    """Reports of the steps of a dispatch, on the device; 0 for steps that did not run.

    Attributes:
        packed: int32 `[most, B, 3 + T]`, see `StepInfo.packed`.
        logprobs: log-probabilities of all steps; None if the steps report none.
        proposed: `DecodeState.proposed` behind rounds under masks; None behind other rounds.
    """

    packed: Any
    logprobs: Logprobs | None
    proposed: Any = None


Step = Callable[[Models, DecodeState], tuple[DecodeState, Any]]
"""Function `step(models, state) -> (state, info)`: one step or round. `info` has `packed()` and `logprobs`, as `StepInfo`."""


def run_steps(
    step: Step, models: Models, state: DecodeState, limit: Int[Array, ""], most: int, width: int, vocab: int | None
) -> tuple[DecodeState, Reports]:
    """Runs up to `limit` (at most `most`) steps on the device, fewer once every row is done.

    Args:
        width: T, the number of tokens that a step reports for each row.
        vocab: size of the target's vocabulary, if the steps report log-probabilities.
    """
    batch = state.last_position.shape[0]
    logprobs = None if vocab is None else no_logprobs((most, batch, width), vocab)
    none = Reports(jnp.zeros((most, batch, 3 + width), jnp.int32), logprobs)

    def going(carry: tuple[DecodeState, Reports, Array]) -> Bool[Array, ""]:
        state, _, n = carry
        return (n < limit) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, Reports, Array]) -> tuple[DecodeState, Reports, Array]:
        state, reports, n = carry
        state, info = step(models, state)
        report = Reports(info.packed(), info.logprobs)
        update = partial(jax.lax.dynamic_update_index_in_dim, index=n, axis=0)
        return state, jax.tree.map(update, reports, report), n + 1

    return jax.lax.while_loop(going, body, (state, none, jnp.int32(0)))[:2]
