"""Denoising steps: a pass over the positions of a step's span, logits of masked positions, and the commit.

Legend: B rows of a batch, S positions of a row, W of a window, K of the longest block, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from tilewright.diffusion.commit import Choices, choose, commits
from tilewright.diffusion.state import SPANS, DiffusionState, Span, StepPlan, ended, plan, window_of
from tilewright.diffusion.window import BUCKETS, Trace, run_window
from tilewright.kernels import select
from tilewright.kernels.operations import Operations
from tilewright.models import diffusion
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.stack import TRACED_ONCE, Strategy
from tilewright.runtime.logprobs import Logprobs, logprobs_of, no_logprobs
from tilewright.runtime.per_row import PenaltyHistory, for_each, penalises, set_row, slice_row
from tilewright.runtime.sampling import penalise

STEPS_PER_DISPATCH = 64
"""The most steps of a dispatch."""
NO_STEP = -1
NOT_FINITE = -2
"""Reported count of a row without a step, and of a row whose logits are not finite, which ends."""


@dataclass(frozen=True)
class Denoiser:
    """Constants that a denoising program is compiled with. Hashable.

    Attributes:
        widths: number of positions of a window for each span but the whole: of the longest block, and of the longest response,
            each with the position before it if logits are shifted; None for a span that no row of the program uses.
        block: K.
        dense: whether every row computes everything in every step, without caches.
        guided: whether the second half of the batch repeats the first with masked prompts.
        buckets: numbers of salient positions with a program branch of their own, besides that for all positions.
        logprobs: whether rows may want log-probabilities.
    """

    config: DiffusionConfig
    ops: Operations
    widths: tuple[int | None, int | None]
    block: int
    dense: bool = False
    guided: bool = False
    buckets: tuple[int, ...] = BUCKETS
    schedule: Strategy = TRACED_ONCE
    logprobs: bool = False

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans that passes are compiled for."""
        return tuple(span for span, width in zip(SPANS, (*self.widths, 1), strict=True) if width is not None)

    def width(self, span: Span, positions: int) -> int:
        width = positions if span == "whole" else self.widths[SPANS.index(span)]
        assert width is not None, "no row of this program uses this span"
        multiple = self.ops.sparse_multiple
        return min(-(-width // multiple) * multiple, positions)


class DenoisingStepInfo(NamedTuple):
    """Report of a step: all results that the host reads; int32.

    Attributes:
        committed: `[B]`: number of committed tokens; or `NO_STEP`, or `NOT_FINITE`.
        span: `[]`: index in `SPANS` of the computed span.
        done: `[B]`: whether the row needs no more steps.
        salient: `[B, layers]`: number of positions whose MLP was computed; 0 if every step is dense.
    """

    committed: Any
    span: Any
    done: Any
    salient: Any

    def packed(self) -> Int[Array, "B _"]:
        """Packs the report into one array, for one transfer to the host."""
        span = jnp.broadcast_to(self.span, self.committed.shape)
        columns = [self.committed, span, self.done.astype(jnp.int32)]
        return jnp.concatenate([jnp.stack(columns, axis=1), self.salient], axis=1).astype(jnp.int32)


def candidates(state: DiffusionState, denoiser: Denoiser) -> tuple[Int[Array, "B K"], Array]:
    """Returns the positions of each row's block, and a mask of the masked ones."""
    positions = state.block_start[:, None] + jnp.arange(denoiser.block, dtype=jnp.int32)[None]
    inside = (positions < state.block_stop[:, None]) & ~state.done[:, None]
    at = jnp.minimum(positions, state.tokens.shape[1] - 1)
    masked = jnp.take_along_axis(state.tokens, at, axis=1) == denoiser.config.mask_token_id
    return at, inside & masked


def predicted(
    denoiser: Denoiser,
    params: DecoderParams,
    x: Float[Array, "B W H"],
    begin: Array,
    first: Array,
    positions: Int[Array, "B K"],
) -> Float[Array, "B K V"]:
    """Returns the logits that predict these positions, from a window that begins at `begin` and is valid from `first` on."""
    rows = jnp.maximum(positions - int(denoiser.config.shifted), first[:, None]) - begin[:, None]
    batch, width = x.shape[:2]
    flat = jnp.arange(batch)[:, None] * width + jnp.clip(rows, 0, width - 1)
    hidden = denoiser.ops.gather_rows(x.reshape(batch * width, -1), flat.astype(jnp.int32))
    return diffusion.logits(denoiser.config, denoiser.ops, params, hidden, denoiser.schedule)


def run_pass(
    denoiser: Denoiser, span: Span, params: DecoderParams, state: DiffusionState, step: StepPlan
) -> tuple[Float[Array, "B W H"], Array, Any, Trace | None]:
    """Runs a pass over a span. Returns the residual stream, the first position of its window, the caches, and the trace."""
    length = state.tokens.shape[1]
    if denoiser.dense:
        ran = diffusion.forward_full(
            denoiser.config, denoiser.ops, params, state.tokens, state.visible, schedule=denoiser.schedule
        )
        return ran.hidden, jnp.zeros_like(state.start), state.caches, None
    window = window_of(state, step, denoiser.width(span, length))
    sizes = denoiser.config.decoder
    x, caches, trace = run_window(
        sizes, denoiser.ops, params, state.tokens, window, state.caches, denoiser.buckets, denoiser.schedule
    )
    return x, window.positions[:, 0], caches, trace


class BlockLogits(NamedTuple):
    """Logits of each row's block, with the caches and the trace of the pass.

    Attributes:
        logits: logits that predict `positions`, `[B, K, V]`.
        masked: positions that can be committed.
        caches, trace: results of the pass.
    """

    logits: Array
    positions: Array
    masked: Array
    caches: Any
    trace: Trace | None


def block_logits(denoiser: Denoiser, span: Span, params: DecoderParams, state: DiffusionState) -> BlockLogits:
    """Runs a pass over a span that is wide enough for all rows, and commits nothing."""
    step = plan(state, denoiser.config.shifted)
    x, begin, caches, trace = run_pass(denoiser, span, params, state, step)
    positions, masked = candidates(state, denoiser)
    logits = guided(denoiser, state, predicted(denoiser, params, x, begin, step.first, positions))
    return BlockLogits(logits, positions, masked, caches, trace)


def guided(denoiser: Denoiser, state: DiffusionState, logits: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Applies classifier-free guidance to logits, for both halves of a guided batch."""
    if not denoiser.guided:
        return logits
    with_prompt, without = jnp.split(logits, 2)
    scale = jnp.split(jnp.asarray(state.options.guidance), 2)[0][:, None, None]
    logits = without + (scale + 1) * (with_prompt - without)
    return jnp.concatenate([logits, logits])


SLOTS = 128
"""The most positions of a row whose logits are computed together.

Those of 1,024 positions would take 0.6 GB for each row, with a vocabulary of 152,000.
"""


def choices(
    denoiser: Denoiser,
    state: DiffusionState,
    logits_of: Callable[[Array], Array],
    positions: Int[Array, "B K"],
    masked: Bool[Array, "B K"],
) -> tuple[Choices, Logprobs | None]:
    """Chooses tokens at `positions`; long blocks are computed in parts, up to the longest block of the rows.

    Args:
        logits_of: returns the logits that predict some positions.
        masked: positions that can be committed.

    Returns:
        the choices, and their log-probabilities for rows that want them, from logits without the mask token's, after biases and
        penalties; None if no row can want them.
    """

    def choose_at(positions: Int[Array, "B K"], masked: Bool[Array, "B K"]) -> tuple[Choices, Logprobs | None]:
        options = state.options
        config = denoiser.config
        logits = penalised(denoiser, state, positions, logits_of(positions))
        tokens = jnp.arange(logits.shape[-1])
        is_eos = jnp.isin(tokens, jnp.asarray(config.eos_token_ids, jnp.int32))
        logits = jnp.where(jnp.asarray(options.logits_eos_inf)[:, None, None] & is_eos, -jnp.inf, logits)
        logits = constrained(state, logits)
        unranked = None
        if config.eot_token_id is not None:
            greedy = jnp.asarray(options.sampling.temperature)[:, None] == 0
            ends = (tokens == config.eot_token_id) | (greedy & is_eos)
            unranked = jnp.asarray(options.confidence_eos_eot_inf)[:, None] & ends
        found = choose(logits, options.rule, options.sampling, positions, state.step, config.mask_token_id, unranked)
        if not denoiser.logprobs:
            return found, None
        is_mask = jnp.arange(logits.shape[-1]) == config.mask_token_id
        asking = masked & jnp.asarray(state.wants_logprobs)[:, None]
        return found, logprobs_of(jnp.where(is_mask, -jnp.inf, logits), found.token, asking)

    if denoiser.block <= SLOTS:
        return choose_at(positions, masked)
    parts = -(-denoiser.block // SLOTS)
    more = ((0, 0), (0, parts * SLOTS - denoiser.block))
    padded = jnp.pad(positions, more, mode="edge"), jnp.pad(masked, more)
    nothing = jnp.zeros(padded[0].shape, jnp.float32)
    vocab = denoiser.config.decoder.vocab_size
    empty = (
        Choices(nothing.astype(jnp.int32), nothing, nothing),
        no_logprobs(nothing.shape, vocab) if denoiser.logprobs else None,
    )

    def part(number: Array, found: Any) -> Any:
        some = choose_at(*(jax.lax.dynamic_slice_in_dim(each, number * SLOTS, SLOTS, 1) for each in padded))
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, number * SLOTS, 1), found, some)

    longest = jnp.max(jnp.where(state.done, 0, state.block_stop - state.block_start))
    found = jax.lax.fori_loop(0, -(-longest // SLOTS), part, empty)
    return jax.tree.map(lambda x: x[:, : denoiser.block], found)


def penalised(
    denoiser: Denoiser, state: DiffusionState, positions: Int[Array, "B K"], logits: Float[Array, "B K V"]
) -> Float[Array, "B K V"]:
    """Applies biases and penalties to the logits of `positions`, row by row, so that only rows with any pay for them.

    The history of a position is the row's tokens before it. Masks count as tokens that are never chosen.
    """
    tokens = state.tokens
    if denoiser.guided:  # the second half has no prompts
        tokens = jnp.tile(jnp.split(tokens, 2)[0], (2, 1))
    rows = replace(state.options.sampling, prompt_length=state.start)
    block = jnp.take_along_axis(tokens, positions, axis=1)
    before = jnp.concatenate([block[:, :1], block[:, :-1]], axis=1)  # `penalise` does not read the first entry
    history = PenaltyHistory(tokens, positions[:, 0] - 1, before)

    def penalise_row(row: Array, logits: Array) -> Array:
        changed = penalise(slice_row(row, logits), slice_row(row, rows), *slice_row(row, history))
        return set_row(logits, changed, row)

    return for_each(penalises(rows) & ~state.done, penalise_row, logits)


def constrained(state: DiffusionState, logits: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Masks the tokens that a constraint forbids, in rows from left to right, which commit their first mask alone."""

    def constrain_row(row: Array, logits: Array) -> Array:
        some = slice_row(row, logits)
        bits = jnp.broadcast_to(slice_row(row, state.allowed)[:, None], (*some.shape[:2], state.allowed.shape[-1]))
        return set_row(logits, select.allowed(some, bits), row)

    return for_each(jnp.asarray(state.options.left_to_right) & ~state.done, constrain_row, logits)


def step_span(
    denoiser: Denoiser, span: Span, params: DecoderParams, state: DiffusionState
) -> tuple[DiffusionState, DenoisingStepInfo]:
    """Runs one step over a span that is wide enough for all rows."""
    step = plan(state, denoiser.config.shifted)
    x, begin, caches, trace = run_pass(denoiser, span, params, state, step)
    positions, masked = candidates(state, denoiser)

    def logits_of(some: Int[Array, "B K"]) -> Float[Array, "B K V"]:
        return guided(denoiser, state, predicted(denoiser, params, x, begin, step.first, some))

    found, logprobs = choices(denoiser, state, logits_of, positions, masked)
    failed = jnp.any(masked & ~jnp.isfinite(found.probability), axis=1)
    committed = commits(found, masked, state.options, state.block_step) & ~failed[:, None]
    after = commit(denoiser, replace(state, caches=caches), masked, committed, found.token, logprobs)
    after = replace(after, done=after.done | failed)
    count = jnp.where(state.done, NO_STEP, jnp.where(failed, NOT_FINITE, jnp.sum(committed, axis=1)))
    layers = denoiser.config.decoder.num_layers
    salient = jnp.zeros((len(count), layers), jnp.int32) if trace is None else jnp.sum(trace.salient, axis=2).T
    return after, DenoisingStepInfo(
        count.astype(jnp.int32), jnp.int32(SPANS.index(span)), after.done, salient.astype(jnp.int32)
    )


def commit(
    denoiser: Denoiser,
    state: DiffusionState,
    masked: Bool[Array, "B K"],
    committed: Bool[Array, "B K"],
    token: Int[Array, "B K"],
    logprobs: Logprobs | None = None,
) -> DiffusionState:
    """Returns the state after a commit of tokens: tokens, changed positions, and each row's progress."""
    # Each position gathers from the block, since XLA:CPU runs a scatter entry by entry.
    slot = jnp.arange(state.tokens.shape[1])[None] - state.block_start[:, None]
    inside = (slot >= 0) & (slot < denoiser.block)
    slot = jnp.clip(slot, 0, denoiser.block - 1)
    changed = inside & jnp.take_along_axis(committed, slot, axis=1)
    tokens = jnp.where(changed, jnp.take_along_axis(token, slot, axis=1), state.tokens)

    def update(old: Array, new: Array) -> Array:
        wide = (..., *[None] * (new.ndim - 2))
        return jnp.where(changed[wide], jnp.take_along_axis(new, slot[wide], axis=1), old)

    position_logprobs = None if logprobs is None else jax.tree.map(update, state.logprobs, logprobs)
    eos = ended(tokens, state, denoiser.config.mask_token_id, denoiser.config.eos_token_ids)
    if denoiser.guided:  # the first half decides for both
        eos = jnp.tile(jnp.split(eos, 2)[0], 2)
    full = ~jnp.any(masked & ~committed, axis=1)
    block_start = jnp.where(full, state.block_stop, state.block_start)
    finished = eos | (block_start >= state.stop)

    def where_running(new: Array, old: Array) -> Array:
        return jnp.where(state.done, old, new)

    return replace(
        state,
        tokens=tokens,
        changed=changed,
        step=where_running(state.step + 1, state.step),
        block_step=where_running(jnp.where(full, 0, state.block_step + 1), state.block_step),
        block_start=where_running(block_start, state.block_start),
        done=state.done | finished,
        logprobs=position_logprobs,
    )


def step_of(denoiser: Denoiser) -> Callable[[DecoderParams, DiffusionState], tuple[DiffusionState, DenoisingStepInfo]]:
    """Returns a step over the smallest span that is wide enough for all rows, chosen on the device.

    Each span is a loop of at most one iteration, since XLA:CPU copies the inputs of a branch, and the caches are large.
    """
    if len(denoiser.spans) == 1 or denoiser.dense:
        return lambda params, state: step_span(denoiser, "whole", params, state)

    def step(params: DecoderParams, state: DiffusionState) -> tuple[DiffusionState, DenoisingStepInfo]:
        offered = [SPANS.index(span) for span in denoiser.spans]
        needed = jnp.max(plan(state, denoiser.config.shifted).span)
        least = jnp.min(jnp.where(jnp.asarray(offered) >= needed, jnp.asarray(offered), len(SPANS)))
        layers = denoiser.config.decoder.num_layers
        nothing = DenoisingStepInfo(
            jnp.zeros_like(state.step), jnp.int32(0), state.done, jnp.zeros((len(state.step), layers), jnp.int32)
        )
        carry = (state, nothing)
        for span in denoiser.spans:

            def once(_: Array, carry: tuple[Any, Any], span: Span = span) -> tuple[Any, Any]:
                return step_span(denoiser, span, params, carry[0])

            carry = jax.lax.fori_loop(0, (least == SPANS.index(span)).astype(jnp.int32), once, carry)
        return carry

    return step


def run_steps(
    denoiser: Denoiser, params: DecoderParams, state: DiffusionState, limit: Int[Array, ""], most: int = STEPS_PER_DISPATCH
) -> tuple[DiffusionState, Int[Array, "most B _"]]:
    """Runs up to `limit` (at most `most`) steps on the device, fewer once every row is done. DONATES state."""
    step = step_of(denoiser)
    layers = denoiser.config.decoder.num_layers
    reports = jnp.full((most, len(state.tokens), 3 + layers), NO_STEP, jnp.int32)

    def going(carry: tuple[Any, ...]) -> Array:
        count, state, _ = carry
        return (count < jnp.minimum(limit, most)) & ~jnp.all(state.done)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, state, reports = carry
        state, info = step(params, state)
        return count + 1, state, jax.lax.dynamic_update_slice_in_dim(reports, info.packed()[None], count, 0)

    _, state, reports = jax.lax.while_loop(going, body, (jnp.int32(0), state, reports))
    return state, reports
