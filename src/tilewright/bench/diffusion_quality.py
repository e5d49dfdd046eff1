"""Accuracy of cached steps: logits compared with a dense pass over the same tokens, along a mode's own trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from tilewright.compiled.timing import mean
from tilewright.diffusion.options import FAR, MODES, Denoising
from tilewright.diffusion.state import SPANS, DiffusionState, Span, plan
from tilewright.diffusion.steps import Denoiser, block_logits, step_span
from tilewright.llm.diffusion_model import DiffusionModel
from tilewright.models.decoder import DecoderParams


class Beside(NamedTuple):
    """Comparison of one step with a dense pass, `[B]`: sums over the positions that the step could commit.

    Attributes:
        kl: KL divergence in nats of the step's distribution from the dense one, at temperature 1, before filters.
        agreeing: number of positions with the same most likely token.
        masked: number of compared positions.
    """

    kl: Array
    agreeing: Array
    masked: Array


def beside(
    dense: Float[Array, "B K V"], cached: Float[Array, "B K V"], masked: Bool[Array, "B K"], mask_token_id: int
) -> Beside:
    """Returns the distance of logits from a dense pass. The mask token, which is never chosen, is excluded."""
    is_token = jnp.arange(dense.shape[-1]) != mask_token_id
    p, q = (jax.nn.log_softmax(jnp.where(is_token, x.astype(jnp.float32), -jnp.inf), axis=-1) for x in (dense, cached))
    each = jnp.sum(jnp.where(is_token, jnp.exp(p) * (p - q), 0.0), axis=-1)
    is_equal = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    kl = jnp.sum(jnp.where(masked, jnp.maximum(each, 0.0), 0.0), axis=1)  # rounding may fall below 0
    return Beside(kl, jnp.sum(is_equal & masked, axis=1), jnp.sum(masked, axis=1))


@partial(jax.jit, static_argnums=0)
def requested_span(denoiser: Denoiser, state: DiffusionState) -> Int[Array, ""]:
    """Returns the index in `SPANS` of the widest span that the rows need."""
    return jnp.max(plan(state, denoiser.config.shifted).span)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def step_beside_dense(
    denoiser: Denoiser, span: Span, params: DecoderParams, state: DiffusionState
) -> tuple[DiffusionState, Beside]:
    """Runs a step and compares its logits with a dense pass over the same tokens. DONATES state.

    The dense pass sees all positions: only the step has a suffix window or a window without its boundary.
    """
    cached = block_logits(denoiser, span, params, state)
    options = state.options
    all_positions = jnp.full_like(state.step, FAR)
    options = replace(options, mode=jnp.full_like(state.step, MODES.index("dense")), suffix_window=all_positions)
    dense = block_logits(replace(denoiser, dense=True), "whole", params, replace(state, options=options))
    difference = beside(dense.logits, cached.logits, cached.masked, denoiser.config.mask_token_id)
    return step_span(denoiser, span, params, state)[0], difference


@dataclass
class Quality:
    """Sums over responses for each step, `[steps, 3]` float64, in the order of `Beside`'s fields."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))

    def add(self, step: int, difference: Beside, rows: int) -> None:
        if step == len(self.sums):
            self.sums = np.append(self.sums, np.zeros((1, 3)), axis=0)
        self.sums[step] += [np.asarray(values)[:rows].sum() for values in difference]

    def figures(self) -> dict[str, object]:
        """Returns means over masked positions, of all steps and of each step; None without comparisons."""
        kl, agreeing, positions = self.sums.sum(axis=0).tolist()
        compared = self.sums[self.sums[:, 2] > 0]
        return {
            "compared_positions": round(positions),
            "logit_kl_nats": kl / positions if positions else None,
            "logit_kl_nats_by_step": (compared[:, 0] / compared[:, 2]).tolist(),
            "argmax_agreement": agreeing / positions if positions else None,
            "argmax_agreement_by_step": (compared[:, 1] / compared[:, 2]).tolist(),
        }


def compare_with_dense(model: DiffusionModel, prompts: Sequence[Sequence[int]], request: Denoising, batch_size: int) -> Quality:
    """Denoises the prompts step by step and compares each step with a dense pass over the current tokens.

    Variants whose steps compute everything are equal by construction and are not run.
    """
    quality = Quality()
    for first in range(0, len(prompts), batch_size):
        if request.computes_all:
            break
        batch = prompts[first : first + batch_size]
        shape = model.table.shape(len(batch), [len(prompt) for prompt in batch], [request] * len(batch))
        programs = model.programs_of(shape)
        denoiser = programs.denoiser(shape)
        state = programs.batch(shape, batch, [request.seeded()] * len(batch))
        step = 0
        while not np.asarray(state.done)[: len(batch)].all():
            requested = int(requested_span(denoiser, state))
            span = next(span for span in denoiser.spans if SPANS.index(span) >= requested)
            state, difference = step_beside_dense(denoiser, span, model.params, state)
            quality.add(step, difference, len(batch))
            step += 1
    return quality


def token_agreement(dense: Sequence[Sequence[int]], compared: Sequence[Sequence[int]]) -> float | None:
    """Returns the share of response positions with the same token. Positions that one response lacks count as different."""
    pairs = list(zip(dense, compared, strict=True))
    places = [max(len(a), len(b)) for a, b in pairs]
    matches = [sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs]
    return sum(matches) / sum(places) if sum(places) else mean(1.0 for _ in pairs)
