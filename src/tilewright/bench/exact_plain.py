"""Plain decoding without the runtime: one pass over the whole text for every token, without a cache.

Uses only the package's model functions, tokenizer and sampling parameters. The choice of a token is computed in NumPy in
float64: penalties, temperature, top-k, top-p, min-p, and the noise from the request's seed and the token's position.
"""

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
from tilewright.models.tokenizer import StreamDecoder
from tilewright.runtime.sampling import Sampling, seed_words

MULTIPLE = 64
"""Texts are padded to a multiple of this, so that few programs serve all lengths."""


@partial(jax.jit, static_argnums=(0, 1))
def logits_after(
    config: DecoderConfig, ops: Operations, params: DecoderParams, tokens: Int[Array, "1 T"], position: Int[Array, ""]
) -> Float[Array, " V"]:
    """Returns the logits of the token after position `position`."""
    hidden = decoder.forward_full(config, ops, params, tokens).hidden
    return decoder.logits(config, ops, params, jax.lax.dynamic_slice_in_dim(hidden, position, 1, axis=1))[0, 0]


def next_logits(lm: LanguageModel, text: Sequence[int]) -> np.ndarray:
    """Returns the target's logits after a text, from one uncached pass over the text; float32 `[vocabulary]`."""
    padded = np.zeros((1, -(-len(text) // MULTIPLE) * MULTIPLE), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(logits_after(lm.target, lm.ops, lm.model.models.target, padded, np.int32(len(text) - 1)), np.float32)


def plain_tokens(lm: LanguageModel, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Returns the generated tokens of a request, including the token that ended the request. A request with a temperature needs
    a seed."""
    generated: list[int] = []
    decoded = StreamDecoder(lm.tokenizer, prompt=prompt)
    text = ""
    while len(generated) < sampling.max_new_tokens:
        logits = next_logits(lm, [*prompt, *generated])
        generated.append(int(np.argmax(draw_scores(logits, sampling, prompt, generated))))
        text += decoded.push(generated[-1:])
        is_end = generated[-1] in lm.target.eos_token_ids and not sampling.ignore_eos
        if is_end or any(stop in text for stop in sampling.stop):
            break
    return generated


def draw_scores(
    logits: Float[np.ndarray, " V"], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> Float[np.ndarray, " V"]:
    """Returns the scores of all tokens; the largest is chosen. Filtered tokens have -inf."""
    scores = penalised(logits.astype(np.float64), sampling, prompt, generated)
    if sampling.temperature == 0:
        return scores
    remaining = filtered(scores / sampling.temperature, sampling)
    return remaining + draw_noise(sampling.seed or 0, len(prompt) + len(generated), len(scores))


def penalised(
    scores: Float[np.ndarray, " V"], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> Float[np.ndarray, " V"]:
    """Applies the repetition penalty to all earlier tokens, and presence and frequency penalties to generated tokens."""
    scores = scores.copy()
    before = np.unique([*prompt, *generated])
    earlier = scores[before]
    penalty = sampling.repetition_penalty
    scores[before] = np.where(earlier > 0, earlier / penalty, earlier * penalty)
    tokens, times = np.unique(np.asarray(generated, np.int64), return_counts=True)
    scores[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return scores


def filtered(scores: Float[np.ndarray, " V"], sampling: Sampling) -> Float[np.ndarray, " V"]:
    """Applies top-k, top-p and min-p in this order. Ties with the last remaining token remain."""
    if sampling.top_k:
        scores = np.where(scores >= np.sort(scores)[-min(sampling.top_k, len(scores))], scores, -np.inf)
    p = np.exp(scores - np.max(scores))
    least = sampling.min_p * np.max(p) / np.sum(p)
    p = p / np.sum(p)
    if sampling.top_p < 1:
        down = np.sort(p)[::-1]
        least = max(least, down[min(np.searchsorted(np.cumsum(down), sampling.top_p), len(p) - 1)])
    return np.where(p >= least, scores, -np.inf)


def draw_noise(seed: int, position: int, vocab: int) -> Float[np.ndarray, " {vocab}"]:
    """Returns Gumbel noise for every token, from a request's seed and a position, with JAX's random bits."""
    key = jax.random.wrap_key_data(jnp.asarray(seed_words(seed), jnp.uint32), impl="threefry2x32")
    bits = np.asarray(jax.random.bits(jax.random.fold_in(key, position), (vocab,), np.uint32))
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**32))


def top_margin(logits: Float[np.ndarray, " V"]) -> float:
    """Returns the largest logit minus the second largest."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def score_lead(scores: Float[np.ndarray, " V"], token: int, other: int) -> float | None:
    """Returns the difference of the scores of tokens `token` and `other`; None if a filter removed one of them."""
    lead = float(scores[token]) - float(scores[other])
    return lead if math.isfinite(lead) else None
