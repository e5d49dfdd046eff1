"""The compiled programs behind generation: built ahead of time for a declared shape, kept, and never traced again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.decode import cache
from tilewright.decode.autoregressive import autoregressive_step
from tilewright.decode.sampling import RowSampling
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.decode.speculative import Drafting, drafter_params, extend, speculative_round
from tilewright.decode.state import DecodeState, Models, run_steps, run_target
from tilewright.models.decoder import DecoderConfig
from tilewright.models.dflash import ContextKV
from tilewright.models.params import DTYPES

STEPS_PER_DISPATCH = 64
"""The most steps that one call of the decode loop runs on the device; a caller may ask for fewer."""


@dataclass(frozen=True)
class ProgramKey:
    """Everything that tells one program from another. `drafting` is None for autoregressive decoding."""

    name: str
    shape: Shape
    drafting: Drafting | None
    chunk: int = 0


def allocate_caches(
    target: DecoderConfig, shape: Shape, drafting: Drafting | None, dtype: DTypeLike
) -> tuple[ContextKV, ContextKV]:
    """The target's cache and the drafter's context, empty."""
    target_cache = cache.allocate(target.num_layers, shape.batch, target.num_kv_heads, shape.capacity, target.head_dim, dtype)
    if drafting is None:
        return target_cache, ()
    config, slots = drafting.config, drafting.context_slots(shape.capacity)
    context = cache.allocate(
        config.num_layers, shape.batch, config.num_kv_heads, slots, config.head_dim, DTYPES[drafting.dtype]
    )
    return target_cache, context


def prefill(
    target: DecoderConfig, drafting: Drafting | None, chunk: int, models: Models, state: DecodeState, start: Int[Array, ""]
) -> DecodeState:
    """Runs `chunk` prompt tokens of every row from position `start` on, and fills both caches with them. DONATES state.

    Rows whose prompt ends earlier write stale entries beyond their known token.
    """
    tokens = jax.lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
    starts = jnp.broadcast_to(start, state.known.shape)
    taps = () if drafting is None else drafting.config.target_layer_ids
    ran = run_target(target, models.target, state, tokens, starts, taps)
    state = replace(state, target_cache=ran.left)
    if drafting is None:
        return state
    stops = jnp.minimum(state.known, starts + chunk)
    return extend(drafting, drafter_params(models), state, ran.taps, starts, stops)


class Programs:
    """Compiles and keeps the programs of one model pair."""

    def __init__(self, target: DecoderConfig, models: Models, dtype: DTypeLike, table: ShapeTable):
        self.target, self.models, self.dtype, self.table = target, models, dtype, table
        self.compiled: dict[ProgramKey, Any] = {}

    def keys(self, shape: Shape, drafting: Drafting | None) -> Iterator[ProgramKey]:
        """All programs that serve a shape."""
        yield ProgramKey("allocate", shape, drafting)
        for chunk in self.table.chunks:
            yield ProgramKey("prefill", shape, drafting, chunk)
        yield ProgramKey("decode", shape, drafting)

    def get(self, key: ProgramKey) -> Any:
        """The compiled program, compiling it if this is its first use."""
        if key.name != "decode":  # nothing else samples, so the kinds of sampling share it
            key = replace(key, shape=replace(key.shape, warp="greedy"))
        if key not in self.compiled:
            self.compiled[key] = self.compile(key)
        return self.compiled[key]

    def compile(self, key: ProgramKey) -> Any:
        allocate = partial(allocate_caches, self.target, key.shape, key.drafting, self.dtype)
        allocate.__name__ = "allocate"  # type: ignore[attr-defined]
        if key.name == "allocate":
            return jax.jit(allocate).lower().compile()
        state = self.abstract_state(key.shape, *jax.eval_shape(allocate))
        models = self.read_models(key.drafting)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(self.function(key), donate_argnums=1).lower(models, state, scalar).compile()

    def function(self, key: ProgramKey) -> Callable[[Models, DecodeState, Array], Any]:
        """The program to compile, as `f(models, state, scalar)`: a prefill chunk's start, or the most steps to run."""
        target, drafting, warp = self.target, key.drafting, key.shape.warp
        if key.name == "prefill":

            def prefill_chunk(models: Models, state: DecodeState, start: Array) -> DecodeState:
                return prefill(target, drafting, key.chunk, models, state, start)

            return prefill_chunk
        step = (
            partial(autoregressive_step, target, warp)
            if drafting is None
            else partial(speculative_round, drafting, target, warp)
        )

        def decode_loop(models: Models, state: DecodeState, limit: Array) -> tuple[DecodeState, Array, Array]:
            return run_steps(step, models, state, limit, STEPS_PER_DISPATCH)

        return decode_loop

    def read_models(self, drafting: Drafting | None) -> Models:
        """The parameters that programs with or without drafting read."""
        return self.models if drafting is not None else Models(self.models.target)

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
    return [((batch,), np.float32), ((batch,), np.float32), ((batch,), np.int32), ((batch, 2), np.uint32)]
