"""Sampling: a request's options, the warped distribution, and a draw from it.

The randomness of a token is a function of its request's seed and its position only. So a row of a batch draws the same tokens
as alone, and speculative decoding draws the same tokens as autoregressive decoding (see `rounds.py`).
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Int32

from tilewright.kernels.select import argmax
from tilewright.runtime.noise import gumbel
from tilewright.runtime.trees import DraftTree

SamplingMode = Literal["greedy", "any", "logprobs"]
"""The most general sampling of a program's rows: the most likely token; any `Sampling`; log-probabilities, too."""

TEMPERATURES = (1e-6, 1e6)
REPETITION_PENALTIES = (1e-3, 1e3)
"""Bounds of the divisors of logits. Quotients stay finite in float32, so different logits never become equal infinities."""
LEAST_TOP_P = 1e-6
"""Lower bound of top_p on the device. It keeps only the most likely token; a smaller value could be rounded to no token."""
MOST_BIASED = 300
"""The most tokens whose logits a request may change."""
MOST_STOP_TOKENS = 128
"""The most stop tokens of a request, besides the model's end-of-sequence tokens."""
ADJUSTED = 512
"""Places of a row for tokens whose logits change: biased tokens, and all tokens that `min_tokens` masks."""
BIASES = (-100.0, 100.0)
SEEDS = (-(2**63), 2**63 - 1)
"""Seeds are int64, as in OpenAI's client and vLLM."""
NO_TOKEN = 2**31 - 1
"""Token id of an empty place."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a request.

    Attributes:
        max_new_tokens: length limit.
        temperature: 0 takes the most likely token; otherwise from 1e-6 to 1e6.
        top_p: keeps the smallest set of most likely tokens with this much probability (ties with the last are kept).
        top_k: keeps this many most likely tokens (ties with the last are kept); 0 keeps all.
        seed: randomness of the request, from -2**63 to 2**63 - 1. Without a seed the request draws a fresh one, and reports it
            in its result.
        stop: texts that end the generation, in a tuple; they are not part of the result.
        ignore_eos: continues past the end-of-sequence token.
        min_p: keeps tokens with at least this share of the probability of the most likely one; 0 keeps all.
        repetition_penalty: divides the logit of a token that occurred before, in the prompt or the output, if the logit is
            positive, and multiplies a negative one; 1 changes nothing, from 0.001 to 1000 (CTRL, arXiv 1909.05858, section 4.1;
            the signs as in transformers).
        presence_penalty: subtracted from the logit of every token that was generated before; from -2 to 2.
        frequency_penalty: subtracted once for each earlier occurrence among the generated tokens; from -2 to 2.
        logit_bias: pairs of a token and a number added to its logit, from -100 to 100, before the penalties; at most 300.
        min_tokens: number of tokens before any token may end the request, or a stop string counts.
        stop_token_ids: tokens that end the generation, regardless of `ignore_eos`; at most 128.
        include_stop: includes the stop string, or the text of the token that ended the generation, in the text.
        skip_special_tokens: leaves special tokens out of the text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        (coldest, hottest), (least, most) = TEMPERATURES, REPETITION_PENALTIES
        stops = not isinstance(self.stop, str) and all(isinstance(text, str) and text for text in self.stop)
        biased = {token for token, _ in self.logit_bias}
        biases = [bias for _, bias in self.logit_bias]
        for good, expected, found in (
            (self.max_new_tokens >= 1, "max_new_tokens of at least 1", self.max_new_tokens),
            (
                self.temperature == 0 or coldest <= self.temperature <= hottest,
                f"a temperature of 0, or from {coldest:g} to {hottest:g}",
                self.temperature,
            ),
            (0 <= self.top_p <= 1, "top_p from 0 to 1", self.top_p),
            (0 <= self.top_k < 2**31, "top_k from 0 to 2**31 - 1", self.top_k),
            (self.seed is None or is_seed(self.seed), "a seed that is an integer from -2**63 to 2**63 - 1", self.seed),
            (stops, "a tuple of stop strings, none of them empty", self.stop),
            (0 <= self.min_p <= 1, "min_p from 0 to 1", self.min_p),
            (
                least <= self.repetition_penalty <= most,
                f"a repetition_penalty from {least:g} to {most:g}",
                self.repetition_penalty,
            ),
            (-2 <= self.presence_penalty <= 2, "a presence_penalty from -2 to 2", self.presence_penalty),
            (-2 <= self.frequency_penalty <= 2, "a frequency_penalty from -2 to 2", self.frequency_penalty),
            (len(biased) == len(biases) <= MOST_BIASED, f"logit_bias of at most {MOST_BIASED} tokens, each once", len(biases)),
            (all(BIASES[0] <= each <= BIASES[1] for each in biases), "a logit_bias from -100 to 100", biases),
            (
                0 <= self.min_tokens <= self.max_new_tokens,
                f"min_tokens from 0 to the length limit, {self.max_new_tokens}",
                self.min_tokens,
            ),
            (
                len(self.stop_token_ids) <= MOST_STOP_TOKENS,
                f"at most {MOST_STOP_TOKENS} stop_token_ids",
                len(self.stop_token_ids),
            ),
            (all(0 <= each < NO_TOKEN for each in biased), "a logit_bias of tokens from 0 on", sorted(biased)),
            (all(0 <= each < NO_TOKEN for each in self.stop_token_ids), "stop_token_ids from 0 on", self.stop_token_ids),
        ):
            if not good:
                raise ValueError(f"expected {expected}, found {found!r}")

    @property
    def is_greedy(self) -> bool:
        """True if it takes the most likely token of the raw logits."""
        changed = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return self.temperature == 0 and not (changed or self.logit_bias or self.min_tokens)

    def seeded(self) -> "Sampling":
        """Returns a copy with a fresh seed if it draws and has none."""
        return replace(self, seed=secrets.randbits(32)) if self.seed is None and self.temperature > 0 else self


def is_seed(seed: object) -> bool:
    return isinstance(seed, int | np.integer) and SEEDS[0] <= int(seed) <= SEEDS[1]


def seed_words(seed: int) -> tuple[int, int]:
    """Splits a seed into its upper and lower 32 bits, which make its key."""
    return int(seed) >> 32 & 0xFFFFFFFF, int(seed) & 0xFFFFFFFF


def seed_of(words: Sequence[int] | np.ndarray) -> int:
    """Joins the words of `seed_words` to a seed."""
    upper, lower = map(int, words)
    return wrapped(upper << 32 | lower)


def later_seed(seed: int, number: int) -> int:
    """Returns the seed `number` steps behind another; the seeds wrap around."""
    return wrapped(int(seed) + number)


def wrapped(seed: int) -> int:
    return (seed - SEEDS[0]) % 2**64 + SEEDS[0]


def check_vocabulary(sampling: Sampling, vocab: int) -> None:
    """Raises a `ValueError` if a request biases a token outside of the vocabulary."""
    if outside := [token for token, _ in sampling.logit_bias if token >= vocab]:
        raise ValueError(f"expected logit_bias of tokens below the vocabulary size {vocab}, found {outside[0]}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of a batch, one entry a row, named as in `Sampling`.

    Attributes:
        key: raw key made from the seed, uint32 `[B, 2]`.
        prompt_length: int32 `[B]`; tokens from this position on count as generated.
        wants_logprobs: bool `[B]`; whether the row wants log-probabilities.
        adjusted: int32 `[B, ADJUSTED]`, tokens whose logits change; empty places have `NO_TOKEN`.
        adjustment: float32 `[B, ADJUSTED]`, numbers added to their logits; -inf for a token that ends the row.
        min_tokens: int32 `[B]`; behind that many generated tokens, -inf counts as 0.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    key: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    prompt_length: Any
    wants_logprobs: Any
    adjusted: Any
    adjustment: Any
    min_tokens: Any


def row_sampling(
    requests: Sequence[Sampling],
    prompt_lengths: Sequence[int] | np.ndarray,
    wants_logprobs: Sequence[bool] | np.ndarray | None = None,
    eos: Sequence[int] | None = None,
) -> RowSampling:
    """Gathers requests into arrays, on the host.

    Args:
        wants_logprobs: whether each request wants log-probabilities; none by default.
        eos: the model's end-of-sequence tokens; requests with `min_tokens` need them.

    Raises:
        ValueError: a request changes more logits than a row has places for.
    """
    adjusted, adjustment = adjustments(requests, eos)
    return RowSampling(
        temperature=np.asarray([r.temperature for r in requests], np.float32),
        top_p=np.asarray([max(r.top_p, LEAST_TOP_P) for r in requests], np.float32),
        top_k=np.asarray([r.top_k for r in requests], np.int32),
        key=np.asarray([seed_words(r.seed or 0) for r in requests], np.uint32),
        min_p=np.asarray([r.min_p for r in requests], np.float32),
        repetition_penalty=np.asarray([r.repetition_penalty for r in requests], np.float32),
        presence_penalty=np.asarray([r.presence_penalty for r in requests], np.float32),
        frequency_penalty=np.asarray([r.frequency_penalty for r in requests], np.float32),
        prompt_length=np.asarray(prompt_lengths, np.int32),
        wants_logprobs=np.zeros(len(requests), bool) if wants_logprobs is None else np.asarray(wants_logprobs, bool),
        adjusted=adjusted,
        adjustment=adjustment,
        min_tokens=np.asarray([r.min_tokens for r in requests], np.int32),
    )


def adjustments(requests: Sequence[Sampling], eos: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens whose logits requests change, and the numbers added to them; see `RowSampling`."""
    tokens = np.full((len(requests), ADJUSTED), NO_TOKEN, np.int32)
    added = np.zeros((len(requests), ADJUSTED), np.float32)
    for row_tokens, row_added, request in zip(tokens, added, requests, strict=True):
        if request.min_tokens and eos is None:
            raise ValueError("expected the model's end-of-sequence tokens for a request with min_tokens, found none")
        ends = {*(eos or ()), *request.stop_token_ids} if request.min_tokens else ()
        changes = [*request.logit_bias, *((token, -np.inf) for token in ends)]
        if len(changes) > ADJUSTED:
            raise ValueError(f"expected at most {ADJUSTED} biased and ending tokens, found {len(changes)}")
        for place, change in enumerate(changes):
            row_tokens[place], row_added[place] = change
    return tokens, added


def occurrences(tokens: Int[Array, "B N"], counted: Bool[Array, "B T N"], vocab: int) -> Int32[Array, "B T V"]:
    """Counts each token of the vocabulary among `tokens`; slot t counts those that are true in `counted[:, t]`."""
    batch, slots, _ = counted.shape
    row = jnp.arange(batch)[:, None, None]
    slot = jnp.arange(slots)[None, :, None]
    return jnp.zeros((batch, slots, vocab), jnp.int32).at[row, slot, tokens[:, None]].add(counted.astype(jnp.int32))


def penalise(
    logits: Float[Array, "B T V"],
    rows: RowSampling,
    tokens: Int[Array, "B L"],
    last_position: Int[Array, " B"],
    block: Int[Array, "B T"],
    tree: DraftTree | None = None,
) -> Float[Array, "B T V"]:
    """Applies biases, then penalties to logits: repetition first, then frequency and presence (vLLM's order).

    Tokens that would end a row before its `min_tokens` get -inf. The history of slot t is the row's tokens up to
    `last_position` and the block's tokens 1 to t: a slot is committed only if all drafts up to it were accepted, and then
    exactly these precede it. In a tree, the drafts of slot t are those of its node and the nodes above. The logits of a row
    without biases and penalties do not change.
    """
    logits = adjust(logits, rows, last_position, tree)
    place = jnp.arange(tokens.shape[1])[None]
    slot = jnp.arange(block.shape[1])
    length = jnp.asarray(rows.prompt_length)[:, None]
    # Counted in each step: this needs no state, and costs little beside the passes over the vocabulary that follow.
    in_prompt = place < length
    since = (place >= length) & (place <= last_position[:, None])
    before = occurrences(tokens, jnp.stack([in_prompt, since], axis=1), logits.shape[-1])
    up_to = slot[None] <= slot[:, None] if tree is None else tree.ancestors
    drafted = jnp.broadcast_to((slot[None] > 0) & up_to, (*block.shape, len(slot)))
    generated = before[:, 1:] + occurrences(block, drafted, logits.shape[-1])
    repetition, presence, frequency = (
        jnp.asarray(field)[:, None, None] for field in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
    )
    seen = (before[:, :1] > 0) | (generated > 0)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * generated.astype(logits.dtype) - presence * (generated > 0).astype(logits.dtype)


def adjust(
    logits: Float[Array, "B T V"], rows: RowSampling, last_position: Int[Array, " B"], tree: DraftTree | None = None
) -> Float[Array, "B T V"]:
    """Adds each row's biases to logits; slot t has the logits of position `last_position + 1 + t`, in a tree by depth."""
    (batch, slots, _), tokens = logits.shape, jnp.asarray(rows.adjusted)
    depths = jnp.arange(slots) if tree is None else tree.depths
    generated = last_position[:, None] + 1 + depths - jnp.asarray(rows.prompt_length)[:, None]
    early = generated < jnp.asarray(rows.min_tokens)[:, None]
    added = jnp.asarray(rows.adjustment)[:, None]
    added = jnp.where(early[..., None] | (added > -jnp.inf), added, 0.0).astype(logits.dtype)
    row = jnp.arange(batch)[:, None, None]
    slot = jnp.arange(slots)[None, :, None]
    return logits.at[row, slot, tokens[:, None]].add(added, mode="drop")


def sortable(x: Float[Array, "*rows V"]) -> Int32[Array, "*rows V"]:
    """Maps floats to integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    return jnp.where(x == 0, 0, order)  # -0.0, too


def threshold(x: Int32[Array, "*rows V"], enough: Callable[[Array], Array]) -> Int32[Array, "*rows 1"]:
    """Returns the largest t for which `enough(x >= t)` holds, by bisection: 32 passes instead of a sort of the vocabulary.

    `enough` must hold for the whole row, and must hold for every superset of a set for which it holds.
    """

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at low; not enough above high
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean, rounded up, without overflow
        good = enough(x >= middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    shape = (*x.shape[:-1], 1)
    bounds = (jnp.full(shape, jnp.iinfo(jnp.int32).min), jnp.full(shape, jnp.iinfo(jnp.int32).max))
    return jax.lax.fori_loop(0, 32, narrow, bounds)[0]


def temper(logits: Float[Array, "B T V"], rows: RowSampling) -> Float[Array, "B T V"]:
    """Divides logits by each row's temperature; by 1 in greedy rows, which are not drawn from."""
    temperature = jnp.asarray(rows.temperature)[:, None, None]
    return logits / jnp.where(temperature > 0, temperature, 1.0)


def keep_best(logits: Float[Array, "B T V"], rows: RowSampling) -> Float[Array, "B T V"]:
    """Applies top-k: sets the other logits to -inf."""
    order = sortable(logits)
    vocab = logits.shape[-1]
    top_k = jnp.asarray(rows.top_k)[:, None, None]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    at_least = threshold(order, lambda kept: jnp.sum(kept, axis=-1, keepdims=True) >= wanted)
    return jnp.where(order >= at_least, logits, -jnp.inf)


class Nucleus(NamedTuple):
    """Condition of top-p on a token: the tokens before it hold less than a mass.

    Attributes:
        p: distribution, `[B, T, V]`.
        order: integers in the order of `p`.
        mass: least mass of the kept tokens, `[B, T, 1]`.
    """

    p: Array
    order: Array
    mass: Array

    def holding(self, kept: Bool[Array, "B T V"]) -> Float[Array, "B T 1"]:
        return jnp.sum(jnp.where(kept, self.p, 0.0), axis=-1, keepdims=True)


def nucleus(logits: Float[Array, "B T V"], rows: RowSampling) -> Nucleus:
    p = jax.nn.softmax(logits, axis=-1)
    # Rounding may leave the whole row a little short of 1, and hides smaller probabilities, which top_p = 1 must keep.
    return Nucleus(p, sortable(p), jnp.asarray(rows.top_p)[:, None, None] * jnp.sum(p, axis=-1, keepdims=True))


def keep_likely(logits: Float[Array, "B T V"], rows: RowSampling) -> Float[Array, "B T V"]:
    """Applies min-p: sets the other logits to -inf."""
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(jnp.asarray(rows.min_p))[:, None, None]
    return jnp.where(logits >= least, logits, -jnp.inf)


def warp_logits(logits: Float[Array, "B T V"], rows: RowSampling) -> Float[Array, "B T V"]:
    """Returns the logits of the sampling distribution: temperature first, then top-k, top-p of the rest, and min-p.

    The order is that of transformers; vLLM applies min-p before top-k and top-p. Penalties are applied before (`penalise`).
    Filtered tokens get -inf.
    """
    logits = keep_best(temper(logits, rows), rows)
    top_p = nucleus(logits, rows)
    kept = top_p.order >= threshold(top_p.order, lambda kept: top_p.holding(kept) >= top_p.mass)
    return jnp.where(kept | (jnp.asarray(rows.top_p)[:, None, None] >= 1), keep_likely(logits, rows), -jnp.inf)


def sample(logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Draws the token at each of `positions` by the Gumbel-max rule; rows with temperature 0 take the argmax."""
    drawn = argmax(drawn_scores(logits, rows, positions))
    return jnp.where(jnp.asarray(rows.temperature)[:, None] > 0, drawn, argmax(logits))


def drawn_scores(logits: Float[Array, "B T V"], rows: RowSampling, positions: Int32[Array, "B T"]) -> Float[Array, "B T V"]:
    """Returns the scores whose argmax is the draw: the warped logits plus the noise of each row's seed and position."""
    return warp_logits(logits, rows) + noise(rows, positions, logits.shape[-1])


def noise(rows: RowSampling, positions: Int32[Array, "B T"], vocab: int) -> Float[Array, "B T {vocab}"]:
    """Returns the Gumbel noise of every token for each row's seed and position."""
    return gumbel(jnp.asarray(rows.key), positions, jnp.arange(vocab)[None, None])
