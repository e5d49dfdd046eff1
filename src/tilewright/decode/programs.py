"""The compiled programs behind generation: built ahead of time for a declared shape, kept, and never traced again."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import Progress

from tilewright.decode import cache
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.prefill import prefill
from tilewright.decode.sampling import Sampling, row_sampling
from tilewright.decode.scores import alternatives
from tilewright.decode.shapes import Shape, ShapeTable
from tilewright.decode.speculative import step_of
from tilewright.decode.state import DecodeState, Models, Target, run_steps
from tilewright.decode.team import Team, Turn, opened
from tilewright.models.decoder import DecoderConfig

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


def allocate_caches(target: DecoderConfig, shape: Shape, drafter: Drafter | Team | None, dtype: DTypeLike) -> tuple[Any, Any]:
    """The target's cache and the drafter's context, empty."""
    target_cache = cache.allocate(target.num_layers, shape.batch, target.num_kv_heads, shape.capacity, target.head_dim, dtype)
    context: Any = () if drafter is None else drafter.allocate(shape.batch, shape.capacity)
    team = drafter.team if isinstance(drafter, Turn) else drafter
    if isinstance(team, Team):
        context = replace(context, taps=team.room(shape.batch, shape.capacity, target.hidden_size, dtype))
    return target_cache, context


def program_keys(table: ShapeTable, shape: Shape, drafter: Drafter | Team | None) -> Iterator[ProgramKey]:
    """All programs that serve a shape of a table, each under the key that it is kept under."""
    for name, chunk in table.programs():
        turns = map(drafter.turn, drafter.choices) if name in DECODING and isinstance(drafter, Team) else (drafter,)
        yield from (Programs.shared(ProgramKey(name, shape, each, chunk)) for each in turns)


class Programs:
    """Compiles and keeps the programs of one model pair; safe to use from several threads.

    Attributes:
        compiled, seconds: of each program that was needed so far: itself, and how long it took to compile or to load.
    """

    def __init__(self, target: Target, models: Models, dtype: DTypeLike, table: ShapeTable):
        self.target, self.models, self.dtype, self.table = target, models, dtype, table
        self.compiled: dict[ProgramKey, jax.stages.Compiled] = {}
        self.locks: dict[ProgramKey, threading.Lock] = {}
        self.seconds: dict[ProgramKey, float] = {}

    def keys(self, shape: Shape, drafter: Drafter | Team | None) -> Iterator[ProgramKey]:
        """All programs that serve a shape."""
        return program_keys(self.table, shape, drafter)

    @staticmethod
    def shared(key: ProgramKey) -> ProgramKey:
        """The key that a program is kept under. Only what settles tokens samples: all kinds of sampling share the rest."""
        return key if key.name in DECODING else replace(key, shape=replace(key.shape, warp="greedy"))

    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        """The compiled program, compiling it if this is its first use."""
        key = self.shared(key)
        if key not in self.compiled:
            with self.locks.setdefault(key, threading.Lock()):  # whoever else needs it waits for it
                if key not in self.compiled:
                    began = time.perf_counter()
                    compiled = self.compile(key)
                    self.seconds[key] = time.perf_counter() - began
                    self.compiled[key] = compiled
        return self.compiled[key]

    def warm(self, keys: Iterable[ProgramKey], console: Console | None = None) -> None:
        """Compiles what is missing of `keys`, several at a time, with a progress bar on the console.

        Only XLA's part runs at the same time as another's: tracing holds Python's lock. JAX's settings in a `with` block
        (`jax.default_device` and its like) hold for the calling thread alone and are not seen here.
        """
        missing = [key for key in dict.fromkeys(map(self.shared, keys)) if key not in self.compiled]
        if not missing:
            return
        bar = Progress(console=console, transient=True, disable=console is None)
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            with bar:
                row = bar.add_task("compiling", total=len(missing))
                for compiled in as_completed([pool.submit(self.get, key) for key in missing]):
                    compiled.result()
                    bar.advance(row)
        finally:
            pool.shutdown(cancel_futures=True)

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        allocate = partial(allocate_caches, self.target.config, key.shape, key.drafter, self.dtype)
        allocate.__name__ = "allocate"  # type: ignore[attr-defined]
        if key.name == "allocate":
            return jax.jit(allocate).lower().compile()
        state = jax.eval_shape(lambda: self.empty_state(key.shape, *allocate()))
        function, inputs = self.function(key)
        return jax.jit(function, donate_argnums=1).lower(self.read_models(key.drafter), state, *inputs).compile()

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

    def read_models(self, drafter: Drafter | Team | None) -> Models:
        """The parameters that programs with or without a drafter read."""
        return self.models if drafter is not None else Models(self.models.target)

    @staticmethod
    def empty_state(shape: Shape, target_cache: Any, draft_cache: Any) -> DecodeState:
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
