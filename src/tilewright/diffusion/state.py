"""The state of a batch that is being denoised, and what its next step computes.

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
"""How much a pass looks at: a block (and the position before it), the response (and the position before it), or all."""
SPANS: tuple[Span, ...] = ("block", "response", "whole")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiffusionState:
    """A batch of rows, fixed in size, allocated before the loop and donated to every step.

    Attributes:
        tokens: int32 `[B, S]`; masks where tokens are still to come; entries from `stop` on mean nothing.
        start, stop: `[B]`: where the response begins and ends. Nothing stands behind it.
        step: `[B]`: steps taken.
        block_step: `[B]`: steps taken in the current block.
        block_start: `[B]`: where that begins.
        changed: `[B, S]`: the positions committed in the last step.
        done: `[B]`; a row that is done stays as it is. Padding rows are done from the start.
        options: what each row asks for.
        caches: one for each layer (`window.LayerCache`); empty where every step is dense.
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

    @property
    def block_stop(self) -> Int[Array, " B"]:
        return jnp.minimum(self.block_start + self.options.block, self.stop)

    @property
    def visible(self) -> Int[Array, " B"]:
        """End of the positions that a step knows of."""
        return jnp.minimum(self.block_stop + self.options.suffix_window, self.stop)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepPlan:
    """Positions that the next step of each row computes, `[B]` each.

    Attributes:
        first, last: the active positions, from the first to the one before the last.
        response: where the window of a response begins.
        exact: all of them are salient everywhere.
        span: the number in `SPANS` of the smallest one that holds them.
    """

    first: Any
    last: Any
    response: Any
    exact: Any
    span: Any


def plan(state: DiffusionState, shifted: bool) -> StepPlan:
    """Positions that each row's mode asks for at its step.

    Args:
        shifted: logits of a position predict the token behind it.
    """
    options = state.options
    number = state.step + 1
    # A block that begins shows positions that no cache holds yet.
    shows_more = (jnp.asarray(options.suffix_window) < FAR) & (state.block_step == 0)
    mode = [jnp.asarray(options.mode) == n for n in range(len(MODES))]
    back = jnp.where(jnp.asarray(options.boundary) | ~mode[MODES.index("sparse")], 1, 0) if shifted else 0
    sparse = mode[MODES.index("sparse")]
    cached = mode[MODES.index("prefix")] | mode[MODES.index("dual")]
    full = (number <= options.full_steps) | shows_more
    narrow = sparse & ~full & (number % options.every != 0)
    within = cached & (state.block_step > 0)
    response = jnp.maximum(state.start - back, 0)
    first = jnp.where(narrow, response, jnp.where(within, jnp.maximum(state.block_start - back, 0), 0))
    last = jnp.where(within & mode[MODES.index("dual")], state.block_stop, state.visible)
    exact = ~sparse | full
    of_block = within & mode[MODES.index("dual")]
    span = jnp.where(of_block, 0, jnp.where(narrow | within, 1, 2))
    return StepPlan(first, last, response, exact, jnp.where(state.done, 0, span))


def window_of(state: DiffusionState, what: StepPlan, size: int) -> Window:
    """The window of so many positions that holds what a step computes."""
    options = state.options
    length = state.tokens.shape[1]
    begin = jnp.clip(what.first, 0, length - size)
    positions = begin[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    active = (positions >= what.first[:, None]) & (positions < what.last[:, None]) & ~state.done[:, None]
    whole = what.first == 0
    catches_up = None
    renews = None
    if size == length:
        catches_up = ((positions < what.response[:, None]) & (whole & options.keep_prompt)[:, None]).astype(jnp.int32)
        renews = whole & ~state.done
    return Window(
        positions=positions,
        lengths=state.visible,
        active=active,
        changed=jnp.take_along_axis(state.changed, positions, axis=1),
        catches_up=catches_up,
        tau=jnp.where(what.exact, ALWAYS, options.tau),
        first_all=what.exact | options.first_layer,
        keep_changed=jnp.asarray(options.keep_changed),
        renews=renews,
    )


def ended(tokens: Int[Array, "B S"], state: DiffusionState, mask: int, eos: tuple[int, ...]) -> Bool[Array, " B"]:
    """Mask of the rows that have an end-of-sequence token in their response, and no mask before it."""
    place = jnp.arange(tokens.shape[1])[None]
    inside = (place >= state.start[:, None]) & (place < state.stop[:, None])
    is_eos = jnp.zeros(tokens.shape, bool)
    for token in eos:
        is_eos = is_eos | (tokens == token)

    def first(which: Array) -> Array:
        return jnp.min(jnp.where(which & inside, place, tokens.shape[1]), axis=1)

    return (first(is_eos) < first(tokens == mask)) & ~jnp.asarray(state.options.ignore_eos)
