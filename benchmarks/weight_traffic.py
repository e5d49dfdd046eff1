"""Decoding steps over weights in few bits: what they are made of, and on a TPU that is not here what they read and write.

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
"""Inputs of a group in GPTQ's and AWQ's files, and of a block of FP8."""
FORMATS: dict[str, Weights] = {
    "bfloat16": "auto",
    "int8": "int8",
    "fp8": "fp8",
    "fp8 in blocks": "fp8",
    "int4": "int4",
    "int4 in groups": "int4",
}
"""Formats that are compared, and the bundle that computes with each: FP8 with a scale for each output or each block of 128
inputs, and 4 bits as they are quantised at load, in blocks of 32 with a scale and a minimum, or as GPTQ has them
without zero points."""


def shaped(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def matrix(inputs: int, outputs: int, form: str) -> ScaledMatrix:
    """A matrix of layers in a format, as it is prepared for XLA."""
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
    """A model's abstract arrays in a format, activations being bfloat16."""

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
    """Bytes of an abstract array, integers of 4 bits packed."""
    return prod(array.shape) * (4 if array.dtype in (jnp.int4, jnp.uint4) else 8 * array.dtype.itemsize) // 8


@dataclass(frozen=True)
class WeightTraffic:
    """A step that the TPU compiler made. Bytes are those of its schedule, not measured.

    Attributes:
        held: bytes of the weights in their format, an embedding that is not the head left out: the least that a step reads.
        read, written: bytes of HBM in all: weights, caches, and what is between operations.
        caches: bytes of the caches, of which a step reads all.
        widened: arrays as large as a weight, in a dtype of activations: a copy of its weights, in whatever memory.
    """

    program: Compiled
    held: int
    read: int
    written: int
    caches: int
    widened: tuple[str, ...]


def greedy_step(config: DecoderConfig, ops: Operations) -> Callable[..., tuple[Array, Any]]:
    """A step `(weights, caches, tokens [B, 1], start [B]) -> (tokens, caches)`: the embedding's rows, layers, and the head's
    most likely token."""

    def run(params: Any, caches: Any, tokens: Int[Array, "B 1"], start: Int[Array, " B"]) -> tuple[Array, Any]:
        span = Span(start, jnp.ones_like(start))
        ran = decoder.forward(config, ops, params, tokens, start[:, None], cached_attend, span, caches)
        return decoder.most_likely(config, ops, params, ran.hidden), ran.kept

    return run


def arguments(config: DecoderConfig, form: str, batch: int, positions: int) -> tuple[DecoderParams, Any, Any, Any]:
    """The abstract arguments of `greedy_step` in a format."""
    sizes = (config.num_layers, batch, config.num_kv_heads, positions, config.head_dim, jnp.bfloat16)
    caches = jax.eval_shape(lambda: allocate(*sizes))
    return weights(config, form), caches, shaped(jnp.int32, batch, 1), shaped(jnp.int32, batch)


def step(config: DecoderConfig, form: str, batch: int, positions: int, chip: str, layers: int) -> WeightTraffic:
    """Compiles `greedy_step` over some layers for a TPU."""
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
