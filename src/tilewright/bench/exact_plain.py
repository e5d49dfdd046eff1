"""Plain decoding that shares nothing with the runtime: for every token one pass over the whole text, without a cache.

Of the package it takes the model's maths, the tokenizer and what a request says. What a token is drawn from is worked out in
NumPy, in float64: penalties, temperature, top-k, top-p, min-p, and the noise of the request's seed and the token's position.
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


def plain_tokens(lm: LanguageModel, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """The tokens that a request generates, the one that ended it included; one that draws has a seed."""
    generated: list[int] = []
    decoded = StreamDecoder(lm.tokenizer, prompt=prompt)
    text = ""
    while len(generated) < sampling.max_new_tokens:
        logits = next_logits(lm, [*prompt, *generated])
        generated.append(int(np.argmax(draw_scores(logits, sampling, prompt, generated))))
        text += decoded.push(generated[-1:])
        ended = generated[-1] in lm.target.eos_token_ids and not sampling.ignore_eos
        if ended or any(stop in text for stop in sampling.stop):
            break
    return generated


def draw_scores(
    logits: Float[np.ndarray, " V"], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> Float[np.ndarray, " V"]:
    """Scores of every token, the largest of which is drawn; -inf for what filters leave out."""
    scores = penalised(logits.astype(np.float64), sampling, prompt, generated)
    if sampling.temperature == 0:
        return scores
    kept = filtered(scores / sampling.temperature, sampling)
    return kept + draw_noise(sampling.seed or 0, len(prompt) + len(generated), len(scores))


def penalised(
    scores: Float[np.ndarray, " V"], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> Float[np.ndarray, " V"]:
    """Logits after the penalty for repetition, of all tokens before, and for presence and frequency, of generated ones."""
    scores = scores.copy()
    before = np.unique([*prompt, *generated])
    own = scores[before]
    penalty = sampling.repetition_penalty
    scores[before] = np.where(own > 0, own / penalty, own * penalty)
    tokens, times = np.unique(np.asarray(generated, np.int64), return_counts=True)
    scores[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return scores


def filtered(scores: Float[np.ndarray, " V"], sampling: Sampling) -> Float[np.ndarray, " V"]:
    """Scores of what top-k, top-p and min-p keep, in this order; equals of the last that is kept are kept."""
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
    """Gumbel noise of every token, of a request's seed and a position, by JAX's own random bits."""
    key = jax.random.wrap_key_data(jnp.asarray(seed_words(seed), jnp.uint32), impl="threefry2x32")
    bits = np.asarray(jax.random.bits(jax.random.fold_in(key, position), (vocab,), np.uint32))
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) / 2**32))


def top_margin(logits: Float[np.ndarray, " V"]) -> float:
    """By how much the largest of logits exceeds the second."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def score_lead(scores: Float[np.ndarray, " V"], one: int, other: int) -> float | None:
    """Lead of token `one` over `other` in a draw's scores; None where filters leave one of them out."""
    lead = float(scores[one]) - float(scores[other])
    return lead if math.isfinite(lead) else None
