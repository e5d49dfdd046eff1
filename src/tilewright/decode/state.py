"""The state of a batch that is being decoded, and what every kind of step does with it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from tilewright.decode.cache import CausalCache
from tilewright.decode.mixed import History, sample_each
from tilewright.decode.sampling import RowSampling, Warp, penalise, sample
from tilewright.decode.scores import Scores, score_each
from tilewright.kernels import select
from tilewright.kernels.operations import Heads, Operations, Projection
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.stack import SINGLE_DEVICE, Schedule


@dataclass(frozen=True)
class Target:
    """What a program must know of the target when it is compiled.

    Attributes:
        ops: what its parameters were prepared for.
        schedule: how it runs on its devices.
        mesh: these devices, as `division.Division` has them; None for the default one.
    """

    config: DecoderConfig
    ops: Operations = select.PLAIN
    schedule: Schedule = SINGLE_DEVICE
    mesh: Mesh | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Span:
    """Positions of each row: `count` of them from `start` on, `[B]` each. A row of count 0 is left as it is."""

    start: Any
    count: Any

    def positions(self, first: int, count: int) -> "Span":
        """Those among `count` of them from the first on, counted from each row's start."""
        return Span(self.start + first, jnp.clip(self.count - first, 0, count))


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
        [known]              the last token that is settled; the next step runs it through the target
        (known ....... end)  still to come; the caches may hold stale entries here

    Attributes:
        tokens: int32 `[B, capacity]`; entries beyond `known` mean nothing.
        known: int32 `[B]`.
        end: int32 `[B]`; no token is produced at or beyond this position.
        done: bool `[B]`; a row that is done stays as it is. Padding rows are done from the start.
        ignore_eos: bool `[B]`.
        sampling: the rows' sampling parameters.
        target_cache: one for each layer.
        draft_cache: the drafter's context; empty where nothing drafts.
    """

    tokens: Any
    known: Any
    end: Any
    done: Any
    ignore_eos: Any
    sampling: RowSampling
    target_cache: tuple[CausalCache, ...]
    draft_cache: Any


class Verified(NamedTuple):
    """What the target says of a block.

    Attributes:
        tokens: for each slot the token that the target itself puts *after* it, `[B, T]`.
        taps: hidden states for the drafter.
        state: the state with the block's keys and values in the target's cache.
        logits: what tokens are scored by, `[B, T, V]`; None where the program scores none.
    """

    tokens: Array
    taps: tuple[Array, ...]
    state: DecodeState
    logits: Array | None = None

    def scores(self, settled: Int[Array, " B"]) -> Scores | None:
        """Of the first `settled` tokens of the rows that ask."""
        if self.logits is None:
            return None
        asking = jnp.asarray(self.state.sampling.scored)[:, None]
        return score_each(self.logits, self.tokens, asking & (jnp.arange(self.tokens.shape[1])[None] < settled[:, None]))


def block_positions(known: Int[Array, " B"], size: int) -> Int[Array, "B T"]:
    return known[:, None] + jnp.arange(size)[None]


def cached_attend(
    ops: Operations, projection: Projection, heads: Heads, seen: Span, kept: CausalCache
) -> tuple[Array, CausalCache]:
    """Attention over a cache to which the span's own keys and values are appended first; see `decoder.Attend`."""
    return kept.append_attend(ops, projection, heads, seen.start, seen.count)


def run_target(
    target: Target, params: DecoderParams, state: DecodeState, tokens: Int[Array, "B T"], span: Span,
    tap_layers: tuple[int, ...],
) -> decoder.Forward:  # fmt: skip
    """Runs `tokens` at positions `span.start` onwards over the target's cache; the updated cache is in the result's `kept`.

    What comes of tokens behind the first `span.count` means nothing.
    """
    positions = block_positions(span.start, tokens.shape[1])
    return decoder.forward(
        target.config, target.ops, params, tokens, positions, cached_attend, span, state.target_cache, tap_layers,
        target.schedule,
    )  # fmt: skip


def verify(
    target: Target, params: DecoderParams, state: DecodeState, block: Int[Array, "B T"], tap_layers: tuple[int, ...],
    warp: Warp,
) -> Verified:  # fmt: skip
    """Runs a block that begins with the known token through the target and draws the token after each slot.

    Slots behind the last position that the cache has write nothing: no token is settled there.
    """
    left = jnp.where(state.done, 0, state.tokens.shape[1] - state.known)
    span = Span(state.known, jnp.minimum(left, block.shape[1]))
    ran = run_target(target, params, state, block, span, tap_layers)
    kept = replace(state, target_cache=ran.kept)
    if warp == "greedy":
        return Verified(decoder.most_likely(target.config, target.ops, params, ran.hidden, target.schedule), ran.taps, kept)
    logits = decoder.logits(target.config, target.ops, params, ran.hidden, target.schedule)
    after = block_positions(state.known + 1, block.shape[1])
    if warp in ("mixed", "scored"):
        history = History(state.tokens, state.known, block)
        tokens = sample_each(logits, state.sampling, history, after, ~state.done)
        return Verified(tokens, ran.taps, kept, logits if warp == "scored" else None)
    if warp == "penalised":
        logits = penalise(logits, state.sampling, state.tokens, state.known, block)
    return Verified(sample(logits, state.sampling, after, warp), ran.taps, kept)


def commit(
    target: Target, state: DecodeState, tokens: Int[Array, "B T"], accepted: Int[Array, " B"]
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Settles the first `accepted + 1` of a round's tokens, fewer where the row ends before. Returns how many it settled."""
    slot = jnp.arange(tokens.shape[1])[None]
    is_eos = jnp.zeros(tokens.shape, bool)
    for eos in target.config.eos_token_ids:
        is_eos = is_eos | (tokens == eos)
    is_eos = is_eos & ~state.ignore_eos[:, None] & (slot <= accepted[:, None])
    until_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, accepted + 1)
    settled = jnp.minimum(until_eos, state.end - 1 - state.known)
    settled = jnp.where(state.done, 0, settled)
    stopped = jnp.any(is_eos & (slot < settled[:, None]), axis=1)
    known = state.known + settled
    written = select.write(state.tokens, tokens, state.known + 1, settled)
    done = state.done | stopped | (known >= state.end - 1)
    return replace(state, tokens=written, known=known, done=done), settled


def known_token(state: DecodeState) -> Int[Array, "B 1"]:
    return jnp.take_along_axis(state.tokens, state.known[:, None], axis=1)


class StepInfo(NamedTuple):
    """What a step or round reports, and all that the host reads of it; int32 but for log-probabilities.

    Attributes:
        tokens: `[B, T]`, T being 1 or the block size; the first `settled` of a row's are those it added, the rest mean nothing.
        settled: `[B]`; how many tokens it added to each row.
        drafted: `[B]`; drafts that it ran.
        accepted: `[B]`; drafts that the target agreed with, those behind the row's end included.
        scores: of the tokens that it added to rows that ask for them; None where the program scores none.
    """

    tokens: Any
    settled: Any
    drafted: Any
    accepted: Any
    scores: Scores | None = None

    def widened(self, width: int) -> "StepInfo":
        """The same with `width` slots, those behind the last one empty."""

        def wide(x: Array) -> Array:
            return jnp.pad(x, [(0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

        return self._replace(tokens=wide(self.tokens), scores=jax.tree.map(wide, self.scores))

    @staticmethod
    def packed_size(width: int, alternatives: int = 0) -> int:
        """Entries of a row when `packed`."""
        return 3 + width * (2 + 2 * alternatives if alternatives else 1)

    def packed(self) -> Int[Array, "B _"]:
        """All of it in one array: what a dispatch reports then comes to the host in one piece. Floats go by their bits."""
        counts = jnp.stack([self.settled, self.drafted, self.accepted], axis=1)
        parts = [counts, self.tokens]
        if self.scores is not None:
            chosen, logprobs = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (self.scores.chosen, self.scores.logprobs))
            parts += [part.reshape(len(counts), -1) for part in (chosen, self.scores.ids, logprobs)]
        return jnp.concatenate(parts, axis=1).astype(jnp.int32)

    @staticmethod
    def unpacked(packed: np.ndarray, alternatives: int = 0) -> "StepInfo":
        """The steps of a dispatch that ran: each settles a token of some row, or it would not have run.

        Args:
            alternatives: K of the scores that the steps report; 0 if they report none.
        """
        ran = packed[: np.count_nonzero(np.any(packed[..., 0] > 0, axis=1))]
        width = (packed.shape[-1] - 3) // (2 + 2 * alternatives if alternatives else 1)
        tokens, chosen, ids, logprobs = np.split(ran[..., 3:], np.cumsum([width, width, width * alternatives]), axis=-1)
        scores = None
        if alternatives:
            shape = (*chosen.shape, alternatives)
            scores = Scores(chosen.view(np.float32), ids.reshape(shape), logprobs.view(np.float32).reshape(shape))
        return StepInfo(tokens, ran[..., 0], ran[..., 1], ran[..., 2], scores)


Step = Callable[[Models, DecodeState], tuple[DecodeState, StepInfo]]
"""`step(models, state) -> (state, info)`: one step or round."""


def run_steps(
    step: Step, models: Models, state: DecodeState, limit: Int[Array, ""], most: int, width: int, alternatives: int = 0
) -> tuple[DecodeState, Int[Array, "most B _"]]:
    """Runs up to `limit` (at most `most`) steps on the device, fewer once every row is done.

    Args:
        width: T, the tokens that a step reports for each row.
        alternatives: K of the scores that it reports (`scores.alternatives`); 0 if it reports none.

    Returns:
        the state, and the steps' packed infos, 0 where nothing ran.
    """
    none = jnp.zeros((most, state.known.shape[0], StepInfo.packed_size(width, alternatives)), jnp.int32)

    def going(carry: tuple[DecodeState, Array, Array]) -> Bool[Array, ""]:
        state, _, n = carry
        return (n < limit) & ~jnp.all(state.done)

    def body(carry: tuple[DecodeState, Array, Array]) -> tuple[DecodeState, Array, Array]:
        state, infos, n = carry
        state, info = step(models, state)
        return state, jax.lax.dynamic_update_index_in_dim(infos, info.packed(), n, 0), n + 1

    return jax.lax.while_loop(going, body, (state, none, jnp.int32(0)))[:2]
