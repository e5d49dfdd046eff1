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

from tilewright.compiled.store import Store
from tilewright.decode.division import compile_allocate, compile_step
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.layout import Layout
from tilewright.decode.prefill import prefill
from tilewright.decode.sampling import Sampling, row_sampling
from tilewright.decode.scores import alternatives
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.decode.speculative import step_of
from tilewright.decode.state import DecodeState, Models, Target, run_steps
from tilewright.decode.team import Team, Turn, opened

STEPS_PER_DISPATCH = 64
"""The most steps that one call of the decode loop runs on the device; a caller may ask for fewer."""
DECODING = ("decode", "step")
"""The programs that settle tokens."""


@dataclass(frozen=True)
class ProgramKey:
    """Everything that tells one program from another.

    Attributes:
        drafter: None for autoregressive decoding. Of a team, decoding has a program for each `Turn`; the others serve all.
    """

    name: str
    shape: Shape
    drafter: Drafter | Team | None
    chunk: int = 0


def allocate_caches(target: Target, layout: Layout, drafter: Drafter | Team | None, dtype: DTypeLike) -> tuple[Any, Any]:
    """The target's cache and the drafter's context, empty."""
    sizes = target.config
    target_cache = layout.caches(target.ops, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, dtype)
    context: Any = () if drafter is None else drafter.allocate(layout)
    team = drafter.team if isinstance(drafter, Turn) else drafter
    if isinstance(team, Team):
        context = replace(context, taps=team.room(layout, sizes.hidden_size, dtype))
    return target_cache, context


def read_models(models: Models, drafter: Drafter | Team | None) -> Models:
    """The parameters that the programs of a drafter read: every array that a dispatch hands over takes time."""
    if drafter is None:
        return Models(models.target)
    if not isinstance(drafter, Turn):
        return models
    place = drafter.team.place(drafter.choice)
    return replace(models, drafter=tuple(own if at == place else None for at, own in enumerate(models.drafter)))


def program_keys(table: ShapeTable, shape: Shape, drafter: Drafter | Team | None) -> Iterator[ProgramKey]:
    """All programs that serve a shape of a table, each under the key that it is kept under."""
    for name, chunk in table.programs():
        turns = map(drafter.turn, drafter.choices) if name in DECODING and isinstance(drafter, Team) else (drafter,)
        yield from (Programs.shared(ProgramKey(name, shape, each, chunk)) for each in turns)


class Programs(Store[ProgramKey]):
    """The programs of one model pair."""

    def __init__(self, target: Target, models: Models, dtype: DTypeLike, table: ShapeTable):
        super().__init__()
        self.target, self.models, self.dtype, self.table = target, models, dtype, table

    def keys(self, shape: Shape, drafter: Drafter | Team | None) -> Iterator[ProgramKey]:
        """All programs that serve a shape."""
        return program_keys(self.table, shape, drafter)

    @staticmethod
    def shared(key: ProgramKey) -> ProgramKey:
        """The key that a program is kept under. Only what settles tokens samples: all kinds of sampling share the rest."""
        return key if key.name in DECODING else replace(key, shape=replace(key.shape, warp="greedy"))

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        layout = Layout(key.shape.batch, key.shape.capacity)
        allocate = partial(allocate_caches, layout=layout, drafter=key.drafter, dtype=self.dtype)
        if key.name == "allocate":
            return compile_allocate(self.target, allocate)
        function, inputs = self.function(key)
        empty = partial(self.empty_state, key.shape)
        return compile_step(self.target, function, read_models(self.models, key.drafter), allocate, empty, inputs)

    def function(self, key: ProgramKey) -> tuple[Callable[..., tuple[DecodeState, Any]], tuple[jax.ShapeDtypeStruct, ...]]:
        """The program to compile, as `f(models, state, *inputs) -> (state, result)`, and its inputs."""
        target, drafter, warp = self.target, key.drafter, key.shape.warp
        if key.name == "prefill":

            def prefill_chunk(models: Models, state: DecodeState, start: Array, count: Array) -> tuple[DecodeState, None]:
                return prefill(target, drafter, key.chunk, models, state, start, count), None

            return prefill_chunk, (jax.ShapeDtypeStruct((key.shape.batch,), jnp.int32),) * 2
        assert not isinstance(drafter, Team), "one of its turns decodes"
        run, width = step_of(drafter, target, warp), 1 if drafter is None else drafter.block_size

        def step(models: Models, state: DecodeState) -> tuple[DecodeState, Any]:
            return run(models, opened(drafter, target, models, state))

        def decode_loop(models: Models, state: DecodeState, limit: Array) -> tuple[DecodeState, Array]:
            state = opened(drafter, target, models, state)
            return run_steps(run, models, state, limit, STEPS_PER_DISPATCH, width, alternatives(warp, target.config.vocab_size))

        return (step, ()) if key.name == "step" else (decode_loop, (jax.ShapeDtypeStruct((), jnp.int32),))

    @staticmethod
    def empty_state(shape: Shape | Layout, target_cache: Any, draft_cache: Any) -> DecodeState:
        """Rows that hold nothing, done from the start."""
        rows = np.zeros(shape.batch, np.int32)
        return DecodeState(
            tokens=np.zeros((shape.batch, shape.capacity), np.int32),
            known=rows,
            end=rows + 1,
            done=rows == 0,
            ignore_eos=rows > 0,
            sampling=row_sampling([Sampling()] * shape.batch, rows + 1),
            target_cache=target_cache,
            draft_cache=draft_cache,
        )
