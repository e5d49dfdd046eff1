"""Decode steps with quantised weights, and their memory traffic on an absent TPU.

Legend: I inputs, O outputs, K inputs of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from tilewright.compiled.aot import Compiled, compile_for
from tilewright.kernels.linear.blocks import BLOCK
from tilewright.kernels.linear.scaled import FP8, ScaledMatrix, padded
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import Weights, operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams
from tilewright.models.params import ArraySpec, abstract
from tilewright.runtime.cache import allocate
from tilewright.runtime.state import Span, cached_attend

GROUP = 128
"""Inputs per group of GPTQ and AWQ files, and per block of FP8."""
FORMATS: dict[str, Weights] = {
    "bfloat16": "auto",
    "int8": "int8",
    "fp8": "fp8",
    "fp8 in blocks": "fp8",
    "int4": "int4",
    "int4 in groups": "int4",
}
"""Compared formats, and the `--weights` value of each.

FP8 has a scale per output, or per block of 128 inputs. "int4" is the format of quantisation at load: blocks of 32 with a scale
and a minimum. "int4 in groups" is GPTQ's format without zero points."""


def shaped(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def matrix(inputs: int, outputs: int, form: str) -> ScaledMatrix:
    """Returns an abstract matrix of a layer in a format, as prepared for XLA."""
    blocks = GROUP if inputs % GROUP == 0 else BLOCK
    if form in ("int8", "fp8"):
        dtype = jnp.int8 if form == "int8" else FP8
        return ScaledMatrix(shaped(dtype, inputs, outputs), shaped(jnp.float32, 1, outputs))
    if form == "fp8 in blocks":
        return ScaledMatrix(shaped(FP8, inputs, outputs), shaped(jnp.float32, inputs // blocks, outputs))
    if form == "int4 in groups":
        return ScaledMatrix(shaped(jnp.int4, inputs, outputs), shaped(jnp.uint16, inputs // blocks, outputs))
    numbers = shaped(jnp.uint16, inputs // BLOCK, outputs)
    return ScaledMatrix(shaped(jnp.uint4, inputs, outputs), numbers, numbers)


def weights(config: DecoderConfig, form: str) -> DecoderParams:
    """Returns the abstract weights of a model in a format, with bfloat16 activations."""

    def made(spec: ArraySpec) -> Any:
        if form == "bfloat16" or len(spec.shape) != 2:
            return abstract(spec, jnp.bfloat16)
        if spec.kind == "matrix":
            return matrix(*spec.shape, form)
        if spec.kind == "head":
            return matrix(*spec.shape, "int8")
        rows, width = spec.shape
        values = shaped(jnp.int8, rows, padded(width))
        return ScaledMatrix(values, shaped(jnp.float32, rows, 1), dtype="bfloat16", width=width)

    return jax.tree.map(made, decoder.declare(config))


def bytes_held(array: Any) -> int:
    """Returns the bytes of an abstract array; 4-bit integers are packed."""
    return prod(array.shape) * (4 if array.dtype in (jnp.int4, jnp.uint4) else 8 * array.dtype.itemsize) // 8


@dataclass(frozen=True)
class WeightTraffic:
    """A step compiled for a TPU. Bytes are those of the compiler's schedule, not measured.

    Attributes:
        program: the compiled step.
        held: bytes of the weights in their format, without an untied embedding: the minimum that a step reads.
        read, written: total bytes of HBM: weights, caches and intermediate arrays.
        caches: bytes of the caches, which a step reads whole.
        widened: arrays of the size of a weight in a dtype of activations: converted copies of weights, in any memory.
    """

    program: Compiled
    held: int
    read: int
    written: int
    caches: int
    widened: tuple[str, ...]


def greedy_step(config: DecoderConfig, ops: Operations) -> Callable[..., tuple[Array, Any]]:
    """Returns a step `(weights, caches, tokens [B, 1], start [B]) -> (tokens, caches)`: embedding, layers and the most likely
    token."""

    def run(params: Any, caches: Any, tokens: Int[Array, "B 1"], start: Int[Array, " B"]) -> tuple[Array, Any]:
        span = Span(start, jnp.ones_like(start))
        ran = decoder.forward(config, ops, params, tokens, start[:, None], cached_attend, span, caches)
        return decoder.most_likely(config, ops, params, ran.hidden), ran.caches

    return run


def arguments(config: DecoderConfig, form: str, batch: int, positions: int) -> tuple[DecoderParams, Any, Any, Any]:
    """Returns the abstract arguments of `greedy_step` in a format."""
    sizes = (config.num_layers, batch, config.num_kv_heads, positions, config.head_dim, jnp.bfloat16)
    caches = jax.eval_shape(lambda: allocate(*sizes))
    return weights(config, form), caches, shaped(jnp.int32, batch, 1), shaped(jnp.int32, batch)


def step(config: DecoderConfig, form: str, batch: int, positions: int, chip: str, layers: int) -> WeightTraffic:
    """Compiles `greedy_step` with `layers` layers for a TPU."""
    config = replace(config, num_layers=layers)
    held, caches, *places = arguments(config, form, batch, positions)
    run = greedy_step(config, operations("tpu", weights=FORMATS[form]))
    made = compile_for(chip, run, held, caches, *places, donate=1)
    counted = held if held.head is None else replace(held, embed=())
    traffic = made.traffic()
    large = {prod(leaf.shape) for leaf in jax.tree.leaves(held) if len(leaf.shape) == 2 and min(leaf.shape) >= GROUP}
    wide = {"bf16", "f32"} if form != "bfloat16" else {"f32"}
    found = {f"{array.dtype}{list(array.dims)}" for array in traffic.arrays if array.dtype in wide and array.elements in large}
    total, kept = (sum(map(bytes_held, jax.tree.leaves(tree))) for tree in (counted, caches))
    return WeightTraffic(made, total, traffic.read, traffic.written, kept, tuple(sorted(found)))
