"""The state of a batch that is being decoded, and what every kind of step does with it."""

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
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.delta import DeltaState
from tilewright.models.stack import TRACED_ONCE, Schedule
from tilewright.runtime.cache import CausalCache
from tilewright.runtime.logprobs import Logprobs, logprobs_of, no_logprobs
from tilewright.runtime.per_row import PenaltyHistory, penalises, sample_each
from tilewright.runtime.sampling import RowSampling, SamplingMode, penalise, sample

NOT_FINITE = -1
"""The token that stands where the target's logits are not finite; it ends its row."""

KvDtype = Literal["auto", "int8"]
"""Of the target's keys and values: its own dtype, or 8 bits with a scale for each position and head."""


@dataclass(frozen=True)
class Target:
    """Constants of the target that a program is compiled with.

    Attributes:
        ops: what its parameters were prepared for.
        schedule: how it runs on its devices.
        mesh: these devices, as `placement.Placement` has them; None for the default one.
        compiler_options: compile with the options of `parallel/compiling.py` where these devices are several TPUs.
        loops: whether the compiler takes loops whose length is data. Without them, every step samples for the most that a row
            may ask for, and reports no log-probabilities.
        sampling: what rows may ask for.
        kv_dtype: of its caches. Drafters keep theirs in their own dtype.
    """

    config: DecoderConfig
    ops: Operations = select.PLAIN
    schedule: Schedule = TRACED_ONCE
    mesh: Mesh | None = None
    compiler_options: bool = False
    loops: bool = True
    sampling: SamplingMode = "logprobs"
    kv_dtype: KvDtype = "auto"

    @property
    def reports_logprobs(self) -> bool:
        return self.loops and self.sampling == "logprobs"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """Positions of each row: `count` of them from `start` on, `[B]` each. A row of count 0 is left as it is.

    Attributes:
        open_ended: how many of them stay is said when they are committed. What lies behind those is stale in a cache; a layer
            with a state (`models/delta.py`) changes it then.
    """

    start: Any
    count: Any
    open_ended: bool = field(default=False, metadata={"static": True})

    def positions(self, first: int, count: int) -> "Span":
        """Those among `count` of them from the first on, counted from each row's start."""
        return Span(self.start + first, jnp.clip(self.count - first, 0, count), self.open_ended)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Models:
    """The parameters that a step reads.

    Attributes:
        drafter: the drafter's own; None where nothing drafts, or what drafts has none.
        draft_head: the target's output head in the drafter's dtype, for drafters that read it and whose dtype is another.
    """

    target: DecoderParams
    drafter: Any = None
    draft_head: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch of rows, fixed in size, allocated before the loop and donated to every step.

    Row by row, positions divide so:

        [0 ........ known)   tokens whose keys and values are in the target's cache and whose features are in the drafter's
        [known]              the last token that is committed; the next step runs it through the target
        (known ....... end)  still to come; the caches may hold stale entries here

    Attributes:
        tokens: int32 `[B, capacity]`; entries beyond `known` mean nothing.
        known: int32 `[B]`.
        end: int32 `[B]`; no token is produced at or beyond this position.
        done: bool `[B]`; a row that is done stays as it is. Padding rows are done from the start.
        ignore_eos: bool `[B]`.
        sampling: the rows' sampling parameters.
        target_cache: one for each layer; layers with linear attention have a `DeltaState`.
        draft_cache: the drafter's context; empty where nothing drafts.
        adapter: int32 `[B]`, the number of each row's low-rank adapter, 0 for none; None for none in any row.
        automaton: int32 `[B]`, the state that rounds left each row's automaton in; see `automaton_table.py`. None where no
            rounds ask for it.
        proposed: int32 `[B, T]`, how many drafts each row has for its next round under masks, T being the width of such rounds,
            and the drafts; none behind other rounds. None where no rounds ask for it.
    """

    tokens: Any
    known: Any
    end: Any
    done: Any
    ignore_eos: Any
    sampling: RowSampling
    target_cache: tuple[CausalCache | DeltaState, ...]
    draft_cache: Any
    adapter: Any = None
    automaton: Any = None
    proposed: Any = None


class Verified(NamedTuple):
    """Target's verdict on a block.

    Attributes:
        tokens: for each slot the token that the target itself puts *after* it, `[B, T]`, or `NOT_FINITE`.
        taps: hidden states for the drafter.
        state: the state with the block's keys and values in the target's cache; states of layers are settled by `commit`.
        logprobs: of the tokens that may be committed, in rows that ask for them; None without loops.
    """

    tokens: Array
    taps: tuple[Array, ...]
    state: DecodeState
    logprobs: Logprobs | None = None


def block_positions(known: Int[Array, " B"], size: int) -> Int[Array, "B T"]:
    return known[:, None] + jnp.arange(size)[None]


def cached_attend(
    ops: Operations, projection: Projection, heads: Heads, seen: Span, kept: CausalCache
) -> tuple[Array, CausalCache]:
    """Attention over a cache to which the span's own keys and values are appended first; see `decoder.Attend`."""
    return kept.append_attend(ops, projection, heads, seen.start, seen.count)


def run_target(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    span: Span,
    tap_layers: tuple[int, ...],
) -> decoder.Forward:
    """Runs `tokens` at positions `span.start` onwards over the target's cache; the updated cache is in the result's `kept`.

    What comes of tokens behind the first `span.count` means nothing.
    """
    positions = block_positions(span.start, tokens.shape[1])
    return decoder.forward(
        target.config,
        target.ops,
        params,
        tokens,
        positions,
        cached_attend,
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
    """Runs a block that begins with the known token through the target and draws the token after each slot.

    Slots behind the last position that the cache has write nothing: no token is committed there.

    Args:
        masks: of the tokens that may come after each slot, uint32 `[B, T, ceil(V / 32)]`; None where all may.
    """
    left = jnp.where(state.done, 0, state.tokens.shape[1] - state.known)
    span = Span(state.known, jnp.minimum(left, block.shape[1]), open_ended=True)
    ran = run_target(target, params, state, block, span, tap_layers)
    tokens, logprobs = next_tokens(target, params, state, block, ran.hidden, masks)
    # Weights are finite when they are read: logits are not where hidden states are not.
    finite = jnp.isfinite(jnp.sum(ran.hidden.astype(jnp.float32), axis=-1))
    return Verified(jnp.where(finite, tokens, NOT_FINITE), ran.taps, replace(state, target_cache=ran.kept), logprobs)


def next_tokens(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    block: Int[Array, "B T"],
    hidden: Array,
    masks: Array | None = None,
) -> tuple[Int[Array, "B T"], Logprobs | None]:
    """The token after each slot of a block, and what rows that ask are told about those that may be committed.

    Where every row takes the most likely token and asks for nothing else, the head gives that at once, without its logits. A
    program that is for such rows alone has no other part.

    Args:
        hidden: the target's hidden states, `[B, T, H]`.
        masks: see `verify`. Logits, where any are computed, are the masked ones to all that follows.
    """
    rows = state.sampling
    after = block_positions(state.known + 1, block.shape[1])
    if target.sampling == "greedy":
        return decoder.most_likely(target.config, target.ops, params, hidden, target.schedule, masks), None

    def logits_of() -> Array:
        logits = decoder.logits(target.config, target.ops, params, hidden, target.schedule)
        return logits if masks is None else select.allowed(logits, masks)

    if not target.loops:
        return sample(penalise(logits_of(), rows, state.tokens, state.known, block), rows, after), None
    running = ~state.done
    asking = running & jnp.asarray(rows.wants_logprobs) & target.reports_logprobs
    drawing = running & (penalises(rows) | (jnp.asarray(rows.temperature) > 0))
    none = partial(no_logprobs, block.shape, target.config.vocab_size)

    def best() -> tuple[Array, Logprobs | None]:
        tokens = decoder.most_likely(target.config, target.ops, params, hidden, target.schedule, masks)
        return tokens, none() if target.reports_logprobs else None

    def row_by_row() -> tuple[Array, Logprobs | None]:
        logits = logits_of()
        tokens = sample_each(logits, rows, PenaltyHistory(state.tokens, state.known, block), after, running)
        if not target.reports_logprobs:
            return tokens, None

        def told() -> Logprobs:
            agreed = jnp.cumprod((block[:, 1:] == tokens[:, :-1]).astype(jnp.int32), axis=1) > 0
            committed = jnp.pad(agreed, ((0, 0), (1, 0)), constant_values=True)
            return logprobs_of(logits, tokens, asking[:, None] & committed)

        return tokens, jax.lax.cond(jnp.any(asking), told, none)

    # Neither side changes what it reads, so that XLA:CPU copies nothing of it to a branch.
    return jax.lax.cond(jnp.any(asking | drawing), row_by_row, best)


def commit(
    target: Target, state: DecodeState, tokens: Int[Array, "B T"], accepted: Int[Array, " B"]
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Commits the first `accepted + 1` of a round's tokens, fewer where the row ends before. Returns how many it committed.

    So many positions of the round's block are final, its known token's being the first: states of layers take in those.
    """
    slot = jnp.arange(tokens.shape[1])[None]
    is_eos = jnp.zeros(tokens.shape, bool)
    for eos in target.config.eos_token_ids:
        is_eos = is_eos | (tokens == eos)
    is_eos = ((is_eos & ~state.ignore_eos[:, None]) | (tokens == NOT_FINITE)) & (slot <= accepted[:, None])
    until_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, accepted + 1)
    committed = jnp.minimum(until_eos, state.end - 1 - state.known)
    committed = jnp.where(state.done, 0, committed)
    stopped = jnp.any(is_eos & (slot < committed[:, None]), axis=1)
    known = state.known + committed
    written = select.write(state.tokens, tokens, state.known + 1, committed)
    done = state.done | stopped | (known >= state.end - 1)
    settled = tuple(each.settle(target.ops, committed) if isinstance(each, DeltaState) else each for each in state.target_cache)
    return replace(state, tokens=written, known=known, done=done, target_cache=settled), committed


def known_token(state: DecodeState) -> Int[Array, "B 1"]:
    return jnp.take_along_axis(state.tokens, state.known[:, None], axis=1)


FROM_NGRAMS = 1 << 16
"""Added to the number of drafts in a report where n-grams made them; a block has fewer drafts."""


class StepInfo(NamedTuple):
    """Report of a step or round, and all that the host reads of it; int32 but for log-probabilities.

    Attributes:
        tokens: `[B, T]`, T being 1 or the block size; the first `committed` of a row's are those it added, others mean nothing.
        committed: `[B]`; how many tokens it added to each row.
        drafted: `[B]`; drafts that it ran.
        accepted: `[B]`; drafts that the target agreed with, those behind the row's end included.
        logprobs: of the tokens that it added to rows that ask for them; None where nobody asked.
        from_ngrams: `[B]`; true where n-grams made the drafts in place of a model; None for a drafter that never does.
    """

    tokens: Any
    committed: Any
    drafted: Any
    accepted: Any
    logprobs: Logprobs | None = None
    from_ngrams: Any = None

    def widened(self, width: int) -> "StepInfo":
        """Copy with `width` slots, those behind the last one empty."""

        def wide(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

        return self._replace(tokens=wide(self.tokens), logprobs=jax.tree.map(wide, self.logprobs))

    def packed(self) -> Int[Array, "B _"]:
        """All but the log-probabilities in one array: what a dispatch reports then comes to the host in one piece."""
        drafted = self.drafted if self.from_ngrams is None else self.drafted + FROM_NGRAMS * self.from_ngrams.astype(jnp.int32)
        counts = jnp.stack([self.committed, drafted, self.accepted], axis=1)
        return jnp.concatenate([counts, self.tokens], axis=1).astype(jnp.int32)

    @staticmethod
    def unpacked(reports: "Reports", wanted: bool = False) -> "StepInfo":
        """The steps of a dispatch that ran: each commits a token of some row, or it would not have run.

        Args:
            wanted: whether anybody asks for log-probabilities, which stay on the device otherwise.
        """
        packed = np.asarray(reports.packed)
        ran = np.count_nonzero(np.any(packed[..., 0] > 0, axis=1))
        logprobs = jax.tree.map(lambda each: np.asarray(each)[:ran], reports.logprobs) if wanted else None
        committed, drafted, accepted = np.moveaxis(packed[:ran, :, :3], -1, 0)
        from_ngrams, drafted = np.divmod(drafted, FROM_NGRAMS)
        return StepInfo(packed[:ran, :, 3:], committed, drafted, accepted, logprobs, from_ngrams > 0)


class Reports(NamedTuple):
    """Reports of the steps of a dispatch, on the device, 0 where nothing ran.

    Attributes:
        packed: int32 `[most, B, 3 + T]`, see `StepInfo.packed`.
        logprobs: of all steps; None where they report none.
        proposed: `DecodeState.proposed` behind rounds under masks; None behind others.
    """

    packed: Any
    logprobs: Logprobs | None
    proposed: Any = None


Step = Callable[[Models, DecodeState], tuple[DecodeState, StepInfo]]
"""`step(models, state) -> (state, info)`: one step or round."""


def run_steps(
    step: Step, models: Models, state: DecodeState, limit: Int[Array, ""], most: int, width: int, vocab: int | None
) -> tuple[DecodeState, Reports]:
    """Runs up to `limit` (at most `most`) steps on the device, fewer once every row is done.

    Args:
        width: T, the tokens that a step reports for each row.
        vocab: the size of the target's vocabulary, where steps report log-probabilities.
    """
    batch = state.known.shape[0]
    logprobs = None if vocab is None else no_logprobs((most, batch, width), vocab)
    none = Reports(jnp.zeros((most, batch, 3 + width), jnp.int32), logprobs)

    def going(carry: tuple[DecodeState, Reports, Array]) -> Bool[Array, ""]:
        state, _, n = carry
        return (n < limit) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, Reports, Array]) -> tuple[DecodeState, Reports, Array]:
        state, reports, n = carry
        state, info = step(models, state)
        own = Reports(info.packed(), info.logprobs)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=n, axis=0)
        return state, jax.tree.map(put, reports, own), n + 1

    return jax.lax.while_loop(going, body, (state, none, jnp.int32(0)))[:2]
