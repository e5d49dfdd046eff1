"""What the target thinks of a position where two ways of decoding part: whether its best tokens are all but equal there."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tilewright.kernels.operations import Operations
from tilewright.llm.language_model import LanguageModel
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.runtime.sampling import Sampling, drawn_scores, penalise, row_sampling

MULTIPLE = 256
"""Texts are padded to a multiple of so many tokens, so that those of all lengths share a few programs."""


@partial(jax.jit, static_argnums=(0, 1))
def logits_behind(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "1 T"], at: Int[Array, ""]
) -> Float[Array, " V"]:
    """The logits of what follows position `at`."""
    hidden = decoder.forward_full(config, ops, params, tokens).hidden
    return decoder.logits(config, ops, params, jax.lax.dynamic_slice_in_dim(hidden, at, 1, axis=1))[0, 0]


def next_logits(lm: LanguageModel, text: Sequence[int]) -> np.ndarray:
    """The target's logits of what follows a text, by a pass over all of it without a cache; float32 `[vocabulary]`."""
    padded = np.zeros((1, -(-len(text) // MULTIPLE) * MULTIPLE), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(logits_behind(lm.target, lm.ops, lm.model.models.target, padded, np.int32(len(text) - 1)), np.float32)


def top_margin(lm: LanguageModel, text: Sequence[int]) -> float:
    """By how much the largest of these logits exceeds the second."""
    second, first = np.partition(next_logits(lm, text), -2)[-2:]
    return float(first - second)


def draw_scores(lm: LanguageModel, sampling: Sampling, prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
    """What the draw behind a text takes the largest of, float32 `[vocabulary]`: these logits after penalties, temperature and
    filters, with the noise of the request's seed and position; -inf for what filters leave out.

    Args:
        prompt: what the text begins with; penalties count what was generated behind it.
    """
    rows, length = row_sampling([sampling], [len(prompt)], eos=lm.target.eos_token_ids), len(text)
    tokens, known, block = (jnp.asarray(each, jnp.int32) for each in ([list(text)], [length - 1], [[text[-1]]]))
    scores = penalise(jnp.asarray(next_logits(lm, text))[None, None], rows, tokens, known, block)
    if sampling.temperature > 0:
        scores = drawn_scores(scores, rows, jnp.full((1, 1), length, jnp.int32))
    return np.asarray(scores)[0, 0]


def score_lead(
    lm: LanguageModel, sampling: Sampling, prompt: Sequence[int], text: Sequence[int], one: int, other: int
) -> float | None:
    """How far token `one` is ahead of `other` in these scores; None where filters leave one of them out."""
    scores = draw_scores(lm, sampling, prompt, text)
    lead = float(scores[one]) - float(scores[other])
    return lead if math.isfinite(lead) else None
