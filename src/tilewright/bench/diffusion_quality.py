"""Accuracy of cached steps: logits beside those of a dense pass over the same tokens, all along a mode's own trajectory."""

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
from tilewright.diffusion.model import DiffusionModel
from tilewright.diffusion.options import FAR, MODES, Denoising
from tilewright.diffusion.state import SPANS, DiffusionState, Span, plan
from tilewright.diffusion.steps import Denoiser, block_logits, step_span
from tilewright.models.decoder import DecoderParams


class Beside(NamedTuple):
    """One step beside a dense pass, `[B]`: sums over the positions that it could commit.

    Attributes:
        kl: nats, of the dense distribution against the step's, at temperature 1 and before any filter.
        agreeing: whose most likely tokens are the same.
        masked: how many positions these are.
    """

    kl: Array
    agreeing: Array
    masked: Array


def beside(
    dense: Float[Array, "B K V"], cached: Float[Array, "B K V"], masked: Bool[Array, "B K"], mask_token_id: int
) -> Beside:
    """Distance of logits from those of a dense pass. The mask itself, which is never chosen, counts in neither."""
    kept = jnp.arange(dense.shape[-1]) != mask_token_id
    p, q = (jax.nn.log_softmax(jnp.where(kept, x.astype(jnp.float32), -jnp.inf), axis=-1) for x in (dense, cached))
    each = jnp.sum(jnp.where(kept, jnp.exp(p) * (p - q), 0.0), axis=-1)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    kl = jnp.sum(jnp.where(masked, jnp.maximum(each, 0.0), 0.0), axis=1)  # which rounding may take below 0
    return Beside(kl, jnp.sum(same & masked, axis=1), jnp.sum(masked, axis=1))


@partial(jax.jit, static_argnums=0)
def asked_span(denoiser: Denoiser, state: DiffusionState) -> Int[Array, ""]:
    """The number in `SPANS` of what the rows ask for."""
    return jnp.max(plan(state, denoiser.config.shifted).span)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def step_beside_dense(
    denoiser: Denoiser, span: Span, params: DecoderParams, state: DiffusionState
) -> tuple[DiffusionState, Beside]:
    """A step, and how far its logits are from those of a dense pass over the same tokens. DONATES state.

    The dense pass looks at all positions: a suffix window, and a response's window without its boundary, are the step's alone.
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
    """Sums over responses for each step, `[steps, 3]` float64: those of `Beside`."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))

    def add(self, step: int, difference: Beside, rows: int) -> None:
        if step == len(self.sums):
            self.sums = np.append(self.sums, np.zeros((1, 3)), axis=0)
        self.sums[step] += [np.asarray(values)[:rows].sum() for values in difference]

    def figures(self) -> dict[str, object]:
        """Means over masked positions, of all steps and of each; None where nothing was compared."""
        kl, agreeing, positions = self.sums.sum(axis=0).tolist()
        by_step = self.sums[self.sums[:, 2] > 0]
        return {
            "compared_positions": round(positions),
            "logit_kl_nats": kl / positions if positions else None,
            "logit_kl_nats_by_step": (by_step[:, 0] / by_step[:, 2]).tolist(),
            "argmax_agreement": agreeing / positions if positions else None,
            "argmax_agreement_by_step": (by_step[:, 1] / by_step[:, 2]).tolist(),
        }


def compare_with_dense(model: DiffusionModel, prompts: Sequence[Sequence[int]], request: Denoising, batch_size: int) -> Quality:
    """Denoises the prompts step by step, each beside a dense pass over the tokens as they stand.

    Steps that compute everything differ from that in nothing, and are not run.
    """
    quality = Quality()
    for first in range(0, len(prompts), batch_size):
        if request.computes_all:
            break
        batch = prompts[first : first + batch_size]
        session = model.start(batch, request)
        denoiser = model.programs.denoiser(session.shape)
        state = session.state
        step = 0
        while not np.asarray(state.done)[: len(batch)].all():
            asked = int(asked_span(denoiser, state))
            span = next(span for span in denoiser.spans if SPANS.index(span) >= asked)
            state, difference = step_beside_dense(denoiser, span, model.programs.params, state)
            quality.add(step, difference, len(batch))
            step += 1
    return quality


def token_agreement(dense: Sequence[Sequence[int]], compared: Sequence[Sequence[int]]) -> float | None:
    """The share of places of responses that hold the same token, places that one of the two lacks included."""
    pairs = list(zip(dense, compared, strict=True))
    places = [max(len(a), len(b)) for a, b in pairs]
    same = [sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs]
    return sum(same) / sum(places) if sum(places) else mean(1.0 for _ in pairs)
