"""Denoising steps: a pass over the positions that matter, logits of those that can be committed, and the commit.

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
from tilewright.kernels.operations import Operations
from tilewright.models import diffusion
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.stack import TRACED_ONCE, Schedule

STEPS_PER_DISPATCH = 64
"""How many steps a dispatch runs at most."""
NO_STEP = -1
NOT_FINITE = -2
"""Reports of a row that took no step, and of one whose logits are not finite, which ends it."""


@dataclass(frozen=True)
class Denoiser:
    """Constants that a denoising program is compiled with. Hashable.

    Attributes:
        widths: positions of a window for each span but the whole: of the longest block, and of the longest response, each with
            the position before it where logits are shifted; None for a span that no row of the program asks for.
        block: K.
        dense: every row computes everything in every step: no caches.
        guided: the second half of the batch repeats the first with the prompt masked.
        buckets: numbers of salient positions that programs are made for, besides all.
    """

    config: DiffusionConfig
    ops: Operations
    widths: tuple[int | None, int | None]
    block: int
    dense: bool = False
    guided: bool = False
    buckets: tuple[int, ...] = BUCKETS
    schedule: Schedule = TRACED_ONCE

    @property
    def spans(self) -> tuple[Span, ...]:
        """Those that passes are made for."""
        return tuple(span for span, width in zip(SPANS, (*self.widths, 1), strict=True) if width is not None)

    def width(self, span: Span, positions: int) -> int:
        width = positions if span == "whole" else self.widths[SPANS.index(span)]
        assert width is not None, "no row of this program asks for such a window"
        multiple = self.ops.window_multiple
        return min(-(-width // multiple) * multiple, positions)


class DenoisingStepInfo(NamedTuple):
    """Report of a step, and all that the host reads of it; int32.

    Attributes:
        committed: `[B]`: tokens that it committed; or `NO_STEP`, or `NOT_FINITE`.
        span: `[]`: the number in `SPANS` of what was looked at.
        done: `[B]`: whether it needs no more steps.
        salient: `[B, layers]`: positions whose MLP was computed; 0 where every step is dense.
    """

    committed: Any
    span: Any
    done: Any
    salient: Any

    def packed(self) -> Int[Array, "B _"]:
        """All of it in one array, which comes to the host in one piece."""
        span = jnp.broadcast_to(self.span, self.committed.shape)
        columns = [self.committed, span, self.done.astype(jnp.int32)]
        return jnp.concatenate([jnp.stack(columns, axis=1), self.salient], axis=1).astype(jnp.int32)


def candidates(state: DiffusionState, how: Denoiser) -> tuple[Int[Array, "B K"], Array]:
    """The positions of each row's block, and which of them are masked."""
    positions = state.block_start[:, None] + jnp.arange(how.block, dtype=jnp.int32)[None]
    inside = (positions < state.block_stop[:, None]) & ~state.done[:, None]
    at = jnp.minimum(positions, state.tokens.shape[1] - 1)
    masked = jnp.take_along_axis(state.tokens, at, axis=1) == how.config.mask_token_id
    return at, inside & masked


def predicted(
    how: Denoiser, params: DecoderParams, x: Float[Array, "B W H"], begin: Array, first: Array, positions: Int[Array, "B K"]
) -> Float[Array, "B K V"]:
    """The logits that predict these positions, from a window that begins at `begin` and whose rows from `first` on count."""
    rows = jnp.maximum(positions - int(how.config.shifted), first[:, None]) - begin[:, None]
    batch, width = x.shape[:2]
    flat = jnp.arange(batch)[:, None] * width + jnp.clip(rows, 0, width - 1)
    hidden = how.ops.gather_rows(x.reshape(batch * width, -1), flat.astype(jnp.int32))
    return diffusion.logits(how.config, how.ops, params, hidden, how.schedule)


def look(
    how: Denoiser, span: Span, params: DecoderParams, state: DiffusionState, what: StepPlan
) -> tuple[Float[Array, "B W H"], Array, Any, Trace | None]:
    """A pass of a span: the residual stream, where its window begins, the caches, and how it went."""
    length = state.tokens.shape[1]
    if how.dense:
        ran = diffusion.forward_full(how.config, how.ops, params, state.tokens, state.visible, schedule=how.schedule)
        return ran.hidden, jnp.zeros_like(state.start), state.caches, None
    window = window_of(state, what, how.width(span, length))
    sizes = how.config.decoder
    x, caches, trace = run_window(sizes, how.ops, params, state.tokens, window, state.caches, how.buckets, how.schedule)
    return x, window.positions[:, 0], caches, trace


class BlockLogits(NamedTuple):
    """Logits of each row's block, with the caches and the trace of the pass.

    Attributes:
        logits: that predict `positions`, `[B, K, V]`.
        masked: which of them can be committed.
        caches, trace: of the pass.
    """

    logits: Array
    positions: Array
    masked: Array
    caches: Any
    trace: Trace | None


def block_logits(how: Denoiser, span: Span, params: DecoderParams, state: DiffusionState) -> BlockLogits:
    """A pass of a batch none of whose rows asks for more than this span; nothing is committed."""
    what = plan(state, how.config.shifted)
    x, begin, caches, trace = look(how, span, params, state, what)
    positions, masked = candidates(state, how)
    logits = guided(how, state, predicted(how, params, x, begin, what.first, positions))
    return BlockLogits(logits, positions, masked, caches, trace)


def guided(how: Denoiser, state: DiffusionState, logits: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Logits after classifier-free guidance, in both halves of a batch that has it."""
    if not how.guided:
        return logits
    with_prompt, without = jnp.split(logits, 2)
    scale = jnp.split(jnp.asarray(state.options.guidance), 2)[0][:, None, None]
    logits = without + (scale + 1) * (with_prompt - without)
    return jnp.concatenate([logits, logits])


SLOTS = 128
"""For how many positions of a row logits are computed together at most: those of 1,024 would take 0.6 GB for each row, of a
vocabulary of 152,000."""


def choices(how: Denoiser, state: DiffusionState, logits_of: Callable[[Array], Array], positions: Int[Array, "B K"]) -> Choices:
    """The choice at each of `positions`; of long blocks part after part, as far as the longest one of the rows goes.

    Args:
        logits_of: the logits that predict some positions.
    """

    def choose_at(positions: Int[Array, "B K"]) -> Choices:
        return choose(logits_of(positions), state.options, positions, state.step, how.config.mask_token_id)

    if how.block <= SLOTS:
        return choose_at(positions)
    parts = -(-how.block // SLOTS)
    padded = jnp.pad(positions, ((0, 0), (0, parts * SLOTS - how.block)), mode="edge")
    nothing = jnp.zeros(padded.shape, jnp.float32)

    def part(number: Array, found: Choices) -> Choices:
        some = choose_at(jax.lax.dynamic_slice_in_dim(padded, number * SLOTS, SLOTS, 1))
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, number * SLOTS, 1), found, some)

    longest = jnp.max(jnp.where(state.done, 0, state.block_stop - state.block_start))
    found = jax.lax.fori_loop(0, -(-longest // SLOTS), part, Choices(nothing.astype(jnp.int32), nothing, nothing))
    return jax.tree.map(lambda x: x[:, : how.block], found)


def step_span(
    how: Denoiser, span: Span, params: DecoderParams, state: DiffusionState
) -> tuple[DiffusionState, DenoisingStepInfo]:
    """One step of a batch none of whose rows asks for more than this span."""
    what = plan(state, how.config.shifted)
    x, begin, caches, trace = look(how, span, params, state, what)
    positions, masked = candidates(state, how)

    def logits_of(some: Int[Array, "B K"]) -> Float[Array, "B K V"]:
        return guided(how, state, predicted(how, params, x, begin, what.first, some))

    found = choices(how, state, logits_of, positions)
    failed = jnp.any(masked & ~jnp.isfinite(found.probability), axis=1)
    taken = commits(found, masked, state.options, state.block_step) & ~failed[:, None]
    after = commit(how, replace(state, caches=caches), masked, taken, found.token)
    after = replace(after, done=after.done | failed)
    count = jnp.where(state.done, NO_STEP, jnp.where(failed, NOT_FINITE, jnp.sum(taken, axis=1)))
    layers = how.config.decoder.num_layers
    salient = jnp.zeros((len(count), layers), jnp.int32) if trace is None else jnp.sum(trace.salient, axis=2).T
    return after, DenoisingStepInfo(
        count.astype(jnp.int32), jnp.int32(SPANS.index(span)), after.done, salient.astype(jnp.int32)
    )


def commit(
    how: Denoiser, state: DiffusionState, masked: Bool[Array, "B K"], taken: Bool[Array, "B K"], token: Int[Array, "B K"]
) -> DiffusionState:
    """The state after a commit: tokens, which of them changed, and where each row stands."""
    # Each position looks into the block: a scatter would go through it entry by entry on a CPU.
    slot = jnp.arange(state.tokens.shape[1])[None] - state.block_start[:, None]
    inside = (slot >= 0) & (slot < how.block)
    slot = jnp.clip(slot, 0, how.block - 1)
    changed = inside & jnp.take_along_axis(taken, slot, axis=1)
    tokens = jnp.where(changed, jnp.take_along_axis(token, slot, axis=1), state.tokens)
    eos = ended(tokens, state, how.config.mask_token_id, how.config.eos_token_ids)
    if how.guided:  # the first half decides
        eos = jnp.tile(jnp.split(eos, 2)[0], 2)
    full = ~jnp.any(masked & ~taken, axis=1)
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
    )


def step_of(how: Denoiser) -> Callable[[DecoderParams, DiffusionState], tuple[DiffusionState, DenoisingStepInfo]]:
    """A step of whatever span the rows ask for, chosen on the device.

    Each span is a loop of one turn or none: what XLA gives to a branch it copies on a CPU, and the caches are large.
    """
    if len(how.spans) == 1 or how.dense:
        return lambda params, state: step_span(how, "whole", params, state)

    def step(params: DecoderParams, state: DiffusionState) -> tuple[DiffusionState, DenoisingStepInfo]:
        offered = [SPANS.index(span) for span in how.spans]
        asked = jnp.max(plan(state, how.config.shifted).span)
        least = jnp.min(jnp.where(jnp.asarray(offered) >= asked, jnp.asarray(offered), len(SPANS)))
        layers = how.config.decoder.num_layers
        nothing = DenoisingStepInfo(
            jnp.zeros_like(state.step), jnp.int32(0), state.done, jnp.zeros((len(state.step), layers), jnp.int32)
        )
        carry = (state, nothing)
        for span in how.spans:

            def once(_: Array, carry: tuple[Any, Any], span: Span = span) -> tuple[Any, Any]:
                return step_span(how, span, params, carry[0])

            carry = jax.lax.fori_loop(0, (least == SPANS.index(span)).astype(jnp.int32), once, carry)
        return carry

    return step


def run_steps(
    how: Denoiser, params: DecoderParams, state: DiffusionState, limit: Int[Array, ""], most: int = STEPS_PER_DISPATCH
) -> tuple[DiffusionState, Int[Array, "most B _"]]:
    """Up to `limit` (at most `most`) steps on the device, fewer once every row is done. DONATES state."""
    step = step_of(how)
    layers = how.config.decoder.num_layers
    reports = jnp.full((most, len(state.tokens), 3 + layers), NO_STEP, jnp.int32)

    def going(carry: tuple[Any, ...]) -> Array:
        count, state, _ = carry
        return (count < jnp.minimum(limit, most)) & ~jnp.all(state.done)

    def turn(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, state, reports = carry
        state, info = step(params, state)
        return count + 1, state, jax.lax.dynamic_update_slice_in_dim(reports, info.packed()[None], count, 0)

    _, state, reports = jax.lax.while_loop(going, turn, (jnp.int32(0), state, reports))
    return state, reports
