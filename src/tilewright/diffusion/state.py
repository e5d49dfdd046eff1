"""State of a batch that is being denoised, and the positions that its next step computes.

Legend: B rows of a batch, S positions of a row, W of a window, K of the longest block.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from tilewright.diffusion.options import ALWAYS, FAR, MODES, RowOptions
from tilewright.diffusion.window import Window

Span = Literal["block", "response", "whole"]
"""Positions that a pass covers: a block, the response (each with the position before it), or the whole sequence."""
SPANS: tuple[Span, ...] = ("block", "response", "whole")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiffusionState:
    """Batch of rows of fixed size, allocated before the loop and donated to every step.

    Attributes:
        tokens: int32 `[B, S]`, with masks for tokens not generated yet; entries from `stop` on are undefined.
        start, stop: `[B]`: first position of the response, and the position behind the response. Nothing follows it.
        step: `[B]`: number of steps so far.
        block_step: `[B]`: number of steps so far in the current block.
        block_start: `[B]`: first position of the current block.
        changed: `[B, S]`: positions committed in the last step.
        done: `[B]`; a row that is done does not change. Padding rows are done from the start.
        options: options of each row.
        caches: one for each layer (`window.LayerCache`); empty if every step is dense.
        wants_logprobs: `[B]`: rows that want log-probabilities; None if no row can want them.
        logprobs: log-probabilities of each position (`runtime.logprobs.Logprobs`) at its commit; None likewise.
        allowed: bits of the tokens that rows from left to right may commit next, uint32 `[B, ceil(V / 32)]`.
    """

    tokens: Any
    start: Any
    stop: Any
    step: Any
    block_step: Any
    block_start: Any
    changed: Any
    done: Any
    options: RowOptions
    caches: Any
    wants_logprobs: Any = None
    logprobs: Any = None
    allowed: Any = None

    @property
    def block_stop(self) -> Int[Array, " B"]:
        return jnp.minimum(self.block_start + self.options.block, self.stop)

    @property
    def visible(self) -> Int[Array, " B"]:
        """End of the positions that a step attends to."""
        return jnp.minimum(self.block_stop + self.options.suffix_window, self.stop)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepPlan:
    """Positions that the next step of each row computes, `[B]` each.

    Attributes:
        first, last: first active position, and the position behind the last one.
        response: first position of the window of a response.
        exact: whether all active positions are salient in all layers.
        span: index in `SPANS` of the smallest span that contains them.
    """

    first: Any
    last: Any
    response: Any
    exact: Any
    span: Any


def plan(state: DiffusionState, shifted: bool) -> StepPlan:
    """Plans the positions that each row's mode computes at its next step.

    Args:
        shifted: whether the logits of a position predict the next token.
    """
    options = state.options
    number = state.step + 1
    # A new block makes positions visible that no cache has yet.
    shows_more = (jnp.asarray(options.suffix_window) < FAR) & (state.block_step == 0)
    mode = [jnp.asarray(options.mode) == n for n in range(len(MODES))]
    sparse = mode[MODES.index("sparse")]
    boundary = jnp.where(sparse, options.boundary, ~jnp.asarray(options.first_alone))
    back = boundary.astype(jnp.int32) if shifted else 0
    cached = mode[MODES.index("prefix")] | mode[MODES.index("dual")]
    full = (number <= options.full_steps) | shows_more
    narrow = sparse & ~full & (number > options.whole_until) & (number % options.every != 0)
    within = cached & (state.block_step > 0)
    response = jnp.maximum(state.start - back, 0)
    first = jnp.where(narrow, response, jnp.where(within, jnp.maximum(state.block_start - back, 0), 0))
    last = jnp.where(within & mode[MODES.index("dual")], state.block_stop, state.visible)
    exact = ~sparse | full
    narrow_block = within & mode[MODES.index("dual")]
    span = jnp.where(narrow_block, 0, jnp.where(narrow | within, 1, 2))
    return StepPlan(first, last, response, exact, jnp.where(state.done, 0, span))


def window_of(state: DiffusionState, step: StepPlan, size: int) -> Window:
    """Returns the window of `size` positions that contains the positions of a step."""
    options = state.options
    length = state.tokens.shape[1]
    begin = jnp.clip(step.first, 0, length - size)
    positions = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    active = (positions >= step.first[:, None]) & (positions < step.last[:, None]) & ~state.done[:, None]
    whole = step.first == 0
    catches_up = None
    renews = None
    if size == length:
        catches_up = ((positions < step.response[:, None]) & (whole & options.keep_prompt)[:, None]).astype(jnp.int32)
        renews = whole & ~state.done
    return Window(
        positions=positions,
        lengths=state.visible,
        active=active,
        changed=jnp.take_along_axis(state.changed, positions, axis=1),
        catches_up=catches_up,
        tau=jnp.where(step.exact, ALWAYS, options.tau),
        first_all=step.exact | options.first_layer,
        keep_changed=jnp.asarray(options.keep_changed),
        renews=renews,
    )


def ended(tokens: Int[Array, "B S"], state: DiffusionState, mask: int, eos: tuple[int, ...]) -> Bool[Array, " B"]:
    """Returns a mask of the rows with an end-of-sequence token in their response and no mask before it."""
    place = jnp.arange(tokens.shape[1])[None]
    inside = (place >= state.start[:, None]) & (place < state.stop[:, None])
    is_eos = jnp.zeros(tokens.shape, bool)
    for token in eos:
        is_eos = is_eos | (tokens == token)

    def first(which: Array) -> Array:
        return jnp.min(jnp.where(which & inside, place, tokens.shape[1]), axis=1)

    return (first(is_eos) < first(tokens == mask)) & ~jnp.asarray(state.options.ignore_eos)
