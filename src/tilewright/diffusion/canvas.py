"""Denoising of a canvas of random tokens behind the text: options, state of the rows, and the pass that a program repeats.

A pass runs the canvas over the cached keys and values of the text, writes none, and draws a token at each position. It keeps
the draws of lowest entropy whose joint mutual information is bounded, and replaces all other tokens by random ones. The next
pass also reads the expected embeddings under this pass's distributions (self-conditioning). The last pass's most likely tokens
are the result; the same layers then encode these tokens causally, which writes their keys and values. Rows in all phases share
a pass.

Sources: DiffusionGemma as in `modeling_diffusion_gemma.py` and `generation_diffusion_gemma.py` of transformers 5.24; the
entropy bound from arXiv 2505.24857.

Legend: B rows of a batch, T positions of a canvas, H hidden size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32

from tilewright.diffusion.blocks import PassInfo
from tilewright.diffusion.commit import step_keys, step_noise, with_row
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Norm, Operations, Projection
from tilewright.kernels.select import argmax
from tilewright.models import decoder
from tilewright.models.canvas import CanvasWeights
from tilewright.models.config import Canvas, is_number
from tilewright.models.decoder import DecoderParams
from tilewright.runtime.per_row import for_each, slice_row
from tilewright.runtime.rounds import one_of
from tilewright.runtime.sampling import RowSampling
from tilewright.runtime.state import (
    NOT_FINITE,
    DecodeState,
    Models,
    Span,
    Target,
    block_positions,
    commit,
    run_target,
)

MOST_STEPS = 10_000
"""Maximum of `CanvasDenoising.steps`."""
RANDOM_TOKEN = 1
"""Number folded into a position's key for its random token; the key itself makes the noise of its draw."""
SAMPLER = "EntropyBoundSamplerConfig"
"""Name of the sampler in a `generation_config.json`."""
UNSET = -1
"""Token id of a position that gets a random token."""


@dataclass(frozen=True)
class CanvasDenoising:
    """Options of a request to a model that refines canvases. Defaults are the published ones.

    Attributes:
        steps: the most passes of a canvas (`max_denoising_steps`).
        entropy_bound: bound of the sum of entropies, in nats, of the draws that a pass keeps, without the largest of them.
        t_max, t_min: temperature of the logits: it falls linearly from `t_max` in the first pass to one step above `t_min` in
            the last one.
        stability_threshold: number of passes before the last one that must have had the same most likely tokens.
        confidence_threshold: mean entropy, in nats, below which a canvas is finished before `steps` passes, if it is stable.
    """

    steps: int = 48
    entropy_bound: float = 0.1
    t_max: float = 0.8
    t_min: float = 0.4
    stability_threshold: int = 1
    confidence_threshold: float = 0.005

    def __post_init__(self) -> None:
        for good, expected, found in (
            (1 <= self.steps <= MOST_STEPS, f"steps from 1 to {MOST_STEPS}", self.steps),
            (0 < self.entropy_bound < float("inf"), "an entropy_bound above 0", self.entropy_bound),
            (0 <= self.t_min < self.t_max < float("inf"), "t_min from 0 to below t_max", (self.t_min, self.t_max)),
            (
                0 <= self.stability_threshold <= MOST_STEPS,
                f"a stability_threshold from 0 to {MOST_STEPS}",
                self.stability_threshold,
            ),
            (0 < self.confidence_threshold < float("inf"), "a confidence_threshold above 0", self.confidence_threshold),
        ):
            if not good:
                raise ValueError(f"expected {expected}, found {found}")


PUBLISHED_NAMES = {"max_denoising_steps": "steps"} | {
    name: name for name in ("t_max", "t_min", "stability_threshold", "confidence_threshold")
}
"""Fields of a `generation_config.json`, and the options that they set."""


def published_options(fields: Mapping[str, Any], where: str = "generation_config.json") -> CanvasDenoising:
    """Reads the default options of a model from its `generation_config.json`.

    Raises:
        ValueError: another sampler, or a value out of its range.
    """
    found = {option: fields[name] for name, option in PUBLISHED_NAMES.items() if fields.get(name) is not None}
    sampler = fields.get("sampler_config")
    if sampler is not None:
        bound = sampler.get("entropy_bound") if isinstance(sampler, Mapping) else None
        if bound is None or sampler.get("_cls_name", SAMPLER) != SAMPLER:
            raise ValueError(f"{where}: expected sampler_config to be {SAMPLER} with an entropy_bound, found {sampler!r}")
        found["entropy_bound"] = bound
    if wrong := [name for name, value in found.items() if not is_number(value)]:
        raise ValueError(f"{where}: expected a number for {wrong[0]}, found {found[wrong[0]]!r}")
    try:
        return CanvasDenoising(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CanvasRows:
    """State of rows whose canvases are refined, one entry a row; the first six fields are those of `CanvasDenoising`.

    Attributes:
        t_range: `t_max - t_min`.
        left: int32 `[B]`, number of passes left, this one included, from `steps` down to 1.
        tokens: int32 `[B, T]`, the kept draws of the last pass; `UNSET` elsewhere.
        likely: int32 `[B, T]`, the most likely tokens of the last pass; `UNSET` before the first.
        stable: int32 `[B]`, number of passes before the last one with the same most likely tokens.
        expected: `[B, T, H]`, expected embeddings of the last pass; not read in the first.
    """

    steps: Any
    entropy_bound: Any
    t_range: Any
    t_min: Any
    stability_threshold: Any
    confidence_threshold: Any
    left: Any
    tokens: Any
    likely: Any
    stable: Any
    expected: Any


@lru_cache(maxsize=256)
def options_row(options: CanvasDenoising) -> tuple[np.ndarray, ...]:
    """Returns the options of a request as arrays of one row, in the order of `CanvasRows`. Do not write to them."""
    floats = (options.entropy_bound, options.t_max - options.t_min, options.t_min)
    bound, t_range, t_min = (np.asarray([value], np.float32) for value in floats)
    steps = np.asarray([options.steps], np.int32)
    stability = np.asarray([options.stability_threshold], np.int32)
    return steps, bound, t_range, t_min, stability, np.asarray([options.confidence_threshold], np.float32)


def canvas_rows(options: list[CanvasDenoising], canvas: Any, hidden: int, dtype: Any) -> CanvasRows:
    """Returns the state of rows before the first pass, on the host.

    Args:
        canvas, hidden: T and H; 1 for arrays that are broadcast to the rows' size.
    """
    fields = [np.concatenate(field) for field in zip(*(options_row(one) for one in options), strict=True)]
    unset = np.full((len(options), canvas), UNSET, np.int32)
    expected = np.zeros((*unset.shape, hidden), dtype)
    return CanvasRows(*fields, left=fields[0], tokens=unset, likely=unset, stable=np.zeros_like(fields[0]), expected=expected)


def random_tokens(
    rows: RowSampling, positions: Int32[Array, "B T"], passes: Int32[Array, " B"], vocab: int
) -> Int32[Array, "B T"]:
    """Returns uniformly random tokens, a function of a row's seed, the position and the number of passes before."""

    def of_one(key: Array) -> Array:
        return jax.random.randint(jax.random.fold_in(key, RANDOM_TOKEN), (), 0, vocab, jnp.int32)

    return jax.vmap(jax.vmap(of_one))(step_keys(rows, positions, passes))


def expected_embeddings(target: Target, params: DecoderParams, probabilities: Float32[Array, "B T V"]) -> Float[Array, "B T H"]:
    """Returns the expected scaled embeddings of tokens with these probabilities, in the dtype of the embeddings.

    Raises:
        ValueError: an embedding in a format without rows of numbers.
    """
    table = params.embed
    if isinstance(table, ScaledMatrix):
        table = table.dequantised(table.dtype)[:, : table.width or None]
    if not isinstance(table, jax.Array):
        raise ValueError(
            f"expected an embedding of plain or scaled numbers for self-conditioning, found {type(table).__name__}"
        )
    precision = jax.lax.Precision.HIGHEST if table.dtype == jnp.float32 else None
    found = jnp.matmul(probabilities.astype(table.dtype), table, precision=precision, preferred_element_type=jnp.float32)
    return decoder.scaled(target.config, found.astype(table.dtype))


def conditioned(
    target: Target, params: DecoderParams, embedded: Float[Array, "B T H"], expected: Float[Array, "B T H"]
) -> Float[Array, "B T H"]:
    """Adds the self-conditioning to embeddings, and norms the sum. Expected embeddings of 0 add nothing."""
    weights: CanvasWeights = params.canvas
    eps = target.config.rms_norm_eps
    inner = decoder.gelu_gated(target.ops, expected, weights.gate_up, Norm(weights.norm, eps))
    sum_of_both = embedded + target.ops.linear(inner, weights.down)
    return target.ops.rms_norm(sum_of_both, jnp.ones(sum_of_both.shape[-1], sum_of_both.dtype), eps)


def canvas_attend(
    ops: Operations, projection: Projection, heads: Heads, span: Span, cache: Any
) -> tuple[Float[Array, "B T _"], Any]:
    """Attends to the cached positions before the span, and to the whole span; see `decoder.Attend`.

    In a layer with a window of W positions, all queries see the last W - 1 cached positions.
    """
    q, k, v = ops.heads(projection, heads)
    seen = jnp.where(span.count > 0, span.start, 0)[:, None]
    mask = AttentionMask(seen, "full", window=heads.window, shared_window=heads.window is not None)
    out = cache.attend(ops, q, mask, (k, v), heads.scores)
    return out.reshape(*q.shape[:2], -1), cache


def run_canvas(
    target: Target,
    params: DecoderParams,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    expected: Float[Array, "B T H"],
    span: Span,
) -> Float[Array, "B T H"]:
    """Runs a canvas over the target's cache, which it only reads. Returns hidden states before the final norm."""
    config = target.config
    weights: CanvasWeights = params.canvas
    layers = tuple(replace(layer, scalar=scalar) for layer, scalar in zip(params.layers, weights.scalars, strict=True))
    embedded = decoder.embed(config, target.ops, params, tokens, target.schedule)
    return decoder.forward(
        config,
        target.ops,
        replace(params, layers=layers),
        tokens,
        block_positions(span.start, tokens.shape[1]),
        cast(decoder.Attend, canvas_attend),
        span,
        state.target_cache,
        schedule=target.schedule,
        embedded=conditioned(target, params, embedded, expected),
    ).hidden


class Predictions(NamedTuple):
    """Predictions of a pass, `[B, T]` each.

    Attributes:
        likely: the most likely tokens.
        drawn: tokens drawn after temperature.
        entropy: entropy after temperature, in nats.
        expected: expected embeddings after temperature, `[B, T, H]`.
    """

    likely: Array
    drawn: Array
    entropy: Array
    expected: Array


def predict(
    target: Target,
    params: DecoderParams,
    hidden: Float[Array, "B T H"],
    temperature: Float32[Array, " B"],
    keys: Array,
    running: Bool[Array, " B"],
) -> Predictions:
    """Predicts the tokens of each canvas, row by row, since the logits of a canvas are large. Rows not running get zeros.

    Args:
        keys: keys `[B, T]` of the draws.
    """
    shape = hidden.shape[:2]

    def add(row: Array, found: Predictions) -> Predictions:
        one, key, heat = slice_row(row, (hidden, keys, temperature))
        logits = decoder.logits(target.config, target.ops, params, one, target.schedule) / heat[:, None, None]
        log_p = jax.nn.log_softmax(logits, axis=-1)
        # Probabilities of 0 have logarithms of -inf only where logits are not finite.
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        drawn = argmax(logits + step_noise(key, logits.shape[-1]))
        rounded = logits.astype(hidden.dtype).astype(jnp.float32)
        expected = expected_embeddings(target, params, jax.nn.softmax(rounded, axis=-1))
        return with_row(found, row, Predictions(argmax(logits), drawn, entropy, expected))

    zeros = jnp.zeros(shape, jnp.int32)
    found = Predictions(zeros, zeros, jnp.zeros(shape, jnp.float32), jnp.zeros_like(hidden))
    if target.loops:
        return for_each(running, add, found)
    for row in range(shape[0]):
        found = add(jnp.int32(row), found)
    return found


def kept_draws(entropy: Float32[Array, "B T"], bound: Float32[Array, " B"]) -> Bool[Array, "B T"]:
    """Returns the positions whose draws are kept: those of lowest entropy, whose sum without its largest is within a bound."""
    order = jnp.argsort(entropy, axis=1, stable=True)
    ascending = jnp.take_along_axis(entropy, order, axis=1)
    within = jnp.cumsum(ascending, axis=1) - ascending <= bound[:, None]
    return jnp.take_along_axis(within, jnp.argsort(order, axis=1), axis=1)


def canvas_pass(target: Target, canvas: Canvas, models: Models, state: DecodeState) -> tuple[DecodeState, PassInfo]:
    """Refines the canvas of every row, which begins behind its last committed token.

    A canvas is finished after its last pass, or once it is stable and confident. Its most likely tokens are then given to the
    user up to an end-of-sequence token. If the row goes on, they are encoded, and the next canvas begins.
    """
    rows: CanvasRows = state.denoising
    params = models.target
    length = canvas.length
    running = ~state.done
    start = state.last_position + 1
    positions = block_positions(start, length)
    passes = jnp.asarray(rows.steps) - rows.left
    first = passes == 0
    random = random_tokens(state.sampling, positions, passes, target.config.vocab_size)
    tokens = jnp.where(rows.tokens == UNSET, random, rows.tokens)
    expected = jnp.where(first[:, None, None], 0, rows.expected)
    span = Span(start, jnp.where(running, length, 0))
    hidden = run_canvas(target, params, state, tokens, expected, span)

    temperature = rows.t_min + jnp.asarray(rows.t_range) * (rows.left / jnp.asarray(rows.steps)).astype(jnp.float32)
    keys = step_keys(state.sampling, positions, passes)
    found = predict(target, params, hidden, temperature, keys, running)
    kept = kept_draws(found.entropy, jnp.asarray(rows.entropy_bound))
    same = jnp.all(found.likely == rows.likely, axis=1)
    stable = jnp.where(same, rows.stable + 1, 0)
    confident = jnp.mean(found.entropy, axis=1) < rows.confidence_threshold
    failed = running & ~jnp.all(jnp.isfinite(found.entropy), axis=1)
    finished = running & ((confident & (stable >= rows.stability_threshold)) | (rows.left == 1))

    delivered = jnp.where(failed[:, None], NOT_FINITE, found.likely)
    accepted = jnp.where(failed, 0, jnp.where(finished, length - 1, -1))
    after, committed = commit(target, state, delivered, accepted)
    goes_on = finished & ~after.done

    def encode(state: DecodeState) -> tuple[DecodeState, tuple[()]]:
        ran = run_target(target, params, state, found.likely, Span(start, jnp.where(goes_on, length, 0)), ())
        return replace(state, target_cache=ran.caches), ()

    if target.loops:
        after, _ = one_of(jnp.any(goes_on), encode, lambda state: (state, ()), after)
    else:
        after, _ = encode(after)
    ends = finished[:, None]
    rows = replace(
        rows,
        left=jnp.where(finished, rows.steps, jnp.where(running, rows.left - 1, rows.left)),
        tokens=jnp.where(kept & ~ends, found.drawn, UNSET),
        likely=jnp.where(ends, UNSET, found.likely),
        stable=jnp.where(finished, 0, stable),
        expected=found.expected,
    )
    kept_count = jnp.sum(kept & running[:, None], axis=1, dtype=jnp.int32)
    return replace(after, denoising=rows), PassInfo(delivered, committed, kept_count, running.astype(jnp.int32))
