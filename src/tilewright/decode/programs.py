"""The compiled programs behind generation: built ahead of time for a declared shape, kept, and never traced again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.decode import cache
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.sampling import RowSampling, Sampling, row_sampling
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.decode.speculative import step_of
from tilewright.decode.state import DecodeState, Models, StepInfo, run_steps, run_target
from tilewright.models.decoder import DecoderConfig

STEPS_PER_DISPATCH = 64
"""The most steps that one call of the decode loop runs on the device; a caller may ask for fewer."""


@dataclass(frozen=True)
class ProgramKey:
    """Everything that tells one program from another. `drafter` is None for autoregressive decoding."""

    name: str
    shape: Shape
    drafter: Drafter | None
    chunk: int = 0


def allocate_caches(target: DecoderConfig, shape: Shape, drafter: Drafter | None, dtype: DTypeLike) -> tuple[Any, Any]:
    """The target's cache and the drafter's context, empty."""
    target_cache = cache.allocate(target.num_layers, shape.batch, target.num_kv_heads, shape.capacity, target.head_dim, dtype)
    return target_cache, () if drafter is None else drafter.allocate(shape.batch, shape.capacity)


def prefill(
    target: DecoderConfig, drafter: Drafter | None, chunk: int, models: Models, state: DecodeState, start: Int[Array, ""]
) -> DecodeState:
    """Runs `chunk` prompt tokens of every row from position `start` on, and fills both caches with them. DONATES state.

    Rows whose prompt ends earlier write stale entries beyond their known token.
    """
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
    starts = jnp.broadcast_to(start, state.known.shape)
    taps = () if drafter is None else drafter.tap_layers
    ran = run_target(target, models.target, state, tokens, starts, taps)
    state = replace(state, target_cache=ran.left)
    if drafter is None:
        return state
    return drafter.extend(models, state, ran.taps, starts, jnp.minimum(state.known, starts + chunk))


class Programs:
    """Compiles and keeps the programs of one model pair."""

    def __init__(self, target: DecoderConfig, models: Models, dtype: DTypeLike, table: ShapeTable):
        self.target, self.models, self.dtype, self.table = target, models, dtype, table
        self.compiled: dict[ProgramKey, Any] = {}

    def keys(self, shape: Shape, drafter: Drafter | None) -> Iterator[ProgramKey]:
        """All programs that serve a shape."""
        yield ProgramKey("allocate", shape, drafter)
        for chunk in self.table.chunks:
            yield ProgramKey("prefill", shape, drafter, chunk)
        yield ProgramKey("decode", shape, drafter)

    def get(self, key: ProgramKey) -> Any:
        """The compiled program, compiling it if this is its first use."""
        if key.name != "decode":  # nothing else samples, so the kinds of sampling share it
            key = replace(key, shape=replace(key.shape, warp="greedy"))
        if key not in self.compiled:
            self.compiled[key] = self.compile(key)
        return self.compiled[key]

    def compile(self, key: ProgramKey) -> Any:
        allocate = partial(allocate_caches, self.target, key.shape, key.drafter, self.dtype)
        allocate.__name__ = "allocate"  # type: ignore[attr-defined]
        if key.name == "allocate":
            return jax.jit(allocate).lower().compile()
        state = self.abstract_state(key.shape, *jax.eval_shape(allocate))
        models = self.read_models(key.drafter)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(self.function(key), donate_argnums=1).lower(models, state, scalar).compile()

    def function(self, key: ProgramKey) -> Callable[[Models, DecodeState, Array], Any]:
        """The program to compile, as `f(models, state, scalar)`: a prefill chunk's start, or the most steps to run."""
        target, drafter, warp = self.target, key.drafter, key.shape.warp
        if key.name == "prefill":

            def prefill_chunk(models: Models, state: DecodeState, start: Array) -> DecodeState:
                return prefill(target, drafter, key.chunk, models, state, start)

            return prefill_chunk
        step, width = step_of(drafter, target, warp), 1 if drafter is None else drafter.block_size

        def decode_loop(models: Models, state: DecodeState, limit: Array) -> tuple[DecodeState, StepInfo, Array]:
            return run_steps(step, models, state, limit, STEPS_PER_DISPATCH, width)

        return decode_loop

    def read_models(self, drafter: Drafter | None) -> Models:
        """The parameters that programs with or without a drafter read."""
        return self.models if drafter is not None else Models(self.models.target)

    def abstract_state(self, shape: Shape, target_cache: Any, draft_cache: Any) -> DecodeState:
        def rows(dtype: DTypeLike, *dims: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((shape.batch, *dims), dtype)

        sampling = RowSampling(*(jax.ShapeDtypeStruct(s, d) for s, d in sampling_layout(shape.batch)))
        return DecodeState(
            tokens=rows(jnp.int32, shape.capacity),
            known=rows(jnp.int32),
            end=rows(jnp.int32),
            done=rows(jnp.bool_),
            ignore_eos=rows(jnp.bool_),
            sampling=sampling,
            target_cache=target_cache,
            draft_cache=draft_cache,
        )


def sampling_layout(batch: int) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of `RowSampling`'s fields, in order."""
    rows = row_sampling([Sampling()] * batch, [1] * batch)
    return [(field.shape, field.dtype) for field in vars(rows).values()]
