"""The programs that an engine runs, over slots whose keys and values lie in pages.

Rows are not fixed to a program: each takes the slots that it is to run, by number, and the table of their pages. So any of the
requests run together, in the smallest declared number of rows that holds them, and the host alone keeps the table.

Legend: S slots, n rows of a program, L positions of a slot, M pages of one, P pages of the pool.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tilewright.compiled.store import Store
from tilewright.decode.cache import KVCache, Ring
from tilewright.decode.division import compile_allocate, compile_step
from tilewright.decode.drafters.base import Drafter
from tilewright.decode.layout import PagedLayout, rows_of, with_rows
from tilewright.decode.policy import Choice
from tilewright.decode.prefill import prefill, scored_prefill
from tilewright.decode.programs import STEPS_PER_DISPATCH, Programs, allocate_caches, read_models
from tilewright.decode.sampling import Sampling, Warp, row_sampling
from tilewright.decode.scores import alternatives
from tilewright.decode.shapes import ShapeTable
from tilewright.decode.speculative import step_of
from tilewright.decode.state import DecodeState, Models, Target, run_steps
from tilewright.decode.team import Contexts, Team, opened

WARPS: tuple[Warp, ...] = ("greedy", "mixed", "scored")
"""What rounds are compiled for: argmax alone; rows that ask for anything, each paying for its own; log-probabilities too."""


@dataclass(frozen=True)
class EngineKey:
    """Which program.

    Attributes:
        rows: that rounds run with.
        positions: of a slot that rounds look at.
        chunk: the most tokens of a prefill.
        choice: what a team's rounds do; None without a team.
    """

    name: Literal["allocate", "prefill", "scored_prefill", "rounds"]
    rows: int = 0
    positions: int = 0
    chunk: int = 0
    choice: Choice | None = None
    warp: Warp = "greedy"


class EnginePrograms(Store[EngineKey]):
    """The programs of one engine.

    Attributes:
        table: the declared shapes.
        layout: of the slots and the pool.
    """

    def __init__(
        self, target: Target, models: Models, dtype: DTypeLike, drafter: Drafter | Team | None, table: ShapeTable,
        layout: PagedLayout,
    ):  # fmt: skip
        super().__init__()
        self.target, self.models, self.dtype, self.drafter = target, models, dtype, drafter
        self.table, self.layout = table, layout

    @property
    def pages_hold_all(self) -> bool:
        """Whether pages hold all that a drafter knows of a position: a window's rows are not in them."""
        state = jax.eval_shape(lambda: allocate_caches(self.target, self.layout, self.drafter, self.dtype))
        parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, KVCache))
        return not any(isinstance(part, Ring) for part in parts)

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        """What rounds may do; a single None without a team."""
        return self.drafter.choices if isinstance(self.drafter, Team) else (None,)

    def turn(self, choice: Choice | None) -> Drafter | None:
        """What drafts in rounds of a choice."""
        if isinstance(self.drafter, Team):
            assert choice is not None
            return self.drafter.turn(choice)
        return self.drafter

    def width(self, choice: Choice | None) -> int:
        """Tokens in a block of such rounds."""
        turn = self.turn(choice)
        return 1 if turn is None else turn.block_size

    def batches(self, warp: Warp) -> tuple[int, ...]:
        """The numbers of rows that rounds are compiled for. Few ask for log-probabilities: whoever runs with them fills up."""
        return self.table.batches[-1:] if warp == "scored" else self.table.batches

    def rows_for(self, seats: int, warp: Warp) -> int:
        """The least declared number of rows that holds so many."""
        return next(rows for rows in self.batches(warp) if rows >= seats)

    def keys(self) -> Iterator[EngineKey]:
        """All programs that the engine may need."""
        yield EngineKey("allocate")
        yield from (EngineKey(name, chunk=chunk) for name in ("prefill", "scored_prefill") for chunk in self.table.chunks)
        for warp in WARPS:
            for positions in self.table.capacities:
                for rows in self.batches(warp):
                    yield from (EngineKey("rounds", rows, positions, choice=choice, warp=warp) for choice in self.choices)

    def compile(self, key: EngineKey) -> jax.stages.Compiled:
        allocate = partial(allocate_caches, layout=self.layout, drafter=self.drafter, dtype=self.dtype)
        if key.name == "allocate":
            return compile_allocate(self.target, allocate)
        function, inputs = getattr(self, key.name)(key)
        empty = partial(Programs.empty_state, self.layout)
        return compile_step(self.target, function, self.read(key), allocate, empty, inputs)

    def read(self, key: EngineKey) -> Models:
        """The parameters that a program reads."""
        return self.models if key.choice is None else read_models(self.models, self.turn(key.choice))

    def empty_state(self, caches: tuple[Any, Any]) -> DecodeState:
        """Slots that hold nothing, done from the start."""
        return Programs.empty_state(self.layout, *caches)

    def table_of(self, rows: int, positions: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, positions // self.layout.page_size), jnp.int32)

    def prefill(self, key: EngineKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`f(models, state, slot [1], row, table [1, M], start [1], count [1])`: computes a chunk of a prompt.

        `row` is the request (`request_row`). It is given with each chunk, so that the first one also admits it: a program of
        its own for that would cost a dispatch more before the first token.
        """

        def run(*given: Any) -> tuple[DecodeState, None]:
            return prefill(*given), None

        return self.prefill_by(run, key)

    def scored_prefill(self, key: EngineKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The same with the scores of the tokens that follow, `[1, chunk]`."""
        return self.prefill_by(scored_prefill, key)

    def prefill_by(
        self, run: Callable[..., tuple[DecodeState, Any]], key: EngineKey
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        target, drafter, chunk = self.target, self.drafter, key.chunk

        def prefill_chunk(
            models: Models, state: DecodeState, slot: Array, row: Any, table: Array, start: Array, count: Array
        ) -> tuple[DecodeState, Any]:
            own = replace(rows_of(state, slot, table), **row)
            if isinstance(contexts := own.draft_cache, Contexts):
                own = replace(own, draft_cache=replace(contexts, held=tuple(start for _ in contexts.held)))
            own, result = run(target, drafter, chunk, models, own, start, count)
            return with_rows(state, own, slot), result

        row = request_row(np.zeros((1, self.layout.capacity), np.int32), 1, 1, Sampling(), 1, scored=False)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        return prefill_chunk, (one, row, self.table_of(1, self.layout.capacity), one, one)

    def rounds(self, key: EngineKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`f(models, state, slots [n], table [n, M], running [n], limit)`: runs up to `limit` rounds of some slots.

        Slots that are not running fill the shape. The result is the rounds' packed infos (`state.run_steps`).
        """
        target, turn, width = self.target, self.turn(key.choice), self.width(key.choice)
        step, scored = step_of(turn, target, key.warp), alternatives(key.warp, target.config.vocab_size)

        def run_rounds(
            models: Models, state: DecodeState, slots: Array, table: Array, running: Array, limit: Array
        ) -> tuple[DecodeState, Array]:
            some = rows_of(state, slots, table)
            whole, done = some.tokens, some.done
            some = replace(some, tokens=whole[:, : key.positions], done=done | ~running)
            some = opened(turn, target, models, some)
            some, infos = run_steps(step, models, some, limit, STEPS_PER_DISPATCH, width, scored)
            tokens = whole.at[:, : key.positions].set(some.tokens)
            return with_rows(state, replace(some, tokens=tokens, done=jnp.where(running, some.done, done)), slots), infos

        slots, running = (jax.ShapeDtypeStruct((key.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
        limit = jax.ShapeDtypeStruct((), jnp.int32)
        return run_rounds, (slots, self.table_of(key.rows, key.positions), running, limit)


def request_row(
    tokens: np.ndarray, known: int, end: int, sampling: Sampling, prompt_length: int, scored: bool
) -> dict[str, Any]:
    """What a slot holds of a request, but for its caches: the fields of a `DecodeState` for one row.

    Args:
        tokens: int32 `[1, L]`.
        prompt_length: tokens from this position on count as generated.
        scored: whether it asks for log-probabilities.
    """
    return {
        "tokens": tokens,
        "known": np.asarray([known], np.int32),
        "end": np.asarray([end], np.int32),
        "done": np.zeros(1, bool),
        "ignore_eos": np.asarray([sampling.ignore_eos]),
        "sampling": row_sampling([sampling], [prompt_length], [scored]),
    }
