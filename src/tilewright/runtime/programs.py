"""The compiled programs behind generation, over slots whose keys and values lie in pages.

Rows are not fixed to a program: each takes the slots that it is to run, by number, and the table of their pages. So any of the
requests run together, in the smallest declared number of rows that holds them, and the host alone keeps the table.

Legend: S slots, n rows of a program, L positions of a slot, M pages of one, P pages of the pool, G groups of layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tilewright.compiled.store import Store
from tilewright.kernels.operations import is_batch_invariant
from tilewright.models.delta import DeltaState
from tilewright.parallel.sharding import GROUPED_AXES
from tilewright.runtime.automaton_table import row_shapes, table_shapes
from tilewright.runtime.cache import KVCache, Ring
from tilewright.runtime.constraints import block_shapes
from tilewright.runtime.interfaces import Choice, Drafter, Variant
from tilewright.runtime.layout import Layout, kept, restored, rows_of, with_rows
from tilewright.runtime.placement import compile_allocate, compile_step
from tilewright.runtime.prefill import prefill
from tilewright.runtime.rounds import HostDrafts, RowMasks, begin_masked, end_masked, step_of
from tilewright.runtime.sampling import Sampling, SamplingMode, row_sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models, Reports, Target, run_steps

FORCED = 4
"""Tokens in a block of rounds under masks where nothing drafts but the masks: the known one, and text that has to come."""
STEPS_PER_DISPATCH = 64
"""The most rounds that one dispatch runs on the device; a caller may ask for fewer."""

OUTSIDE_PAGES: dict[type, str] = {
    Ring: "the drafter keeps a window of its last positions (--draft-window), which is not in pages",
    DeltaState: "layers of linear attention keep a state of each row, of which there are no snapshots (--state-snapshots)",
}
"""Why no later request can begin with the pages of an earlier one."""


class SnapshotRows(NamedTuple):
    """Rows of states that snapshots lie in, int32 `[n]` each, below 0 for none.

    Attributes:
        restored: that the states of a prefill's rows begin with.
        kept: that they are copied to behind it.
    """

    restored: Any
    kept: Any


@dataclass(frozen=True)
class ProgramKey:
    """Key of a program.

    Attributes:
        rows: that rounds run with, and that a prefill computes.
        positions: of a slot that rounds look at.
        chunk: the most tokens of a prefill.
        choice: what rounds do, where there are several kinds.
        sampling: what rows may ask for; of a prefill "logprobs" or "greedy", for it draws nothing.
        masked: rounds are under masks, for rows of which some have a constraint.
    """

    name: Literal["allocate", "prefill", "rounds"]
    rows: int = 0
    positions: int = 0
    chunk: int = 0
    choice: Choice | None = None
    sampling: SamplingMode = "greedy"
    masked: bool = False


class Programs(Store[ProgramKey]):
    """The programs of one model over slots of one layout.

    Attributes:
        table: the declared shapes.
        layout: of the slots and the pool.
    """

    def __init__(
        self, target: Target, models: Models, dtype: DTypeLike, drafter: Drafter | None, table: ShapeTable, layout: Layout
    ):
        super().__init__()
        self.target = target
        self.models = models
        self.dtype = dtype
        self.drafter = drafter
        self.table = table
        self.layout = layout

    @cached_property
    def outside_pages(self) -> str:
        """Why a prefix's pages are not enough to go on behind it; see `outside_pages`, which traces for milliseconds."""
        return outside_pages(self.target, self.layout, self.drafter, self.dtype)

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        """The kinds of rounds that there are; a single None where all are alike."""
        return (None,) if self.drafter is None else self.drafter.choices

    @property
    def constrained_choice(self) -> Choice | None:
        """The one kind of rounds that rows with a constraint are served by; see `constrained_choice`."""
        return constrained_choice(self.choices)

    def turn(self, choice: Choice | None) -> Variant | None:
        """Drafter in rounds of a kind; None for plain decoding. Raises a `ValueError` for a kind that there is not."""
        if self.drafter is not None:
            return self.drafter.turn(choice)
        if choice is not None:
            raise ValueError(f"expected plain decoding, without a drafter, found rounds of {choice}")
        return None

    def masked_turn(self, choice: Choice | None) -> Variant:
        """The drafter of rounds under masks."""
        width = self.width(choice, masked=True)
        return self.turn(choice) or HostDrafts(width, may_be_idle=self.target.loops and width > 1)

    def width(self, choice: Choice | None, masked: bool = False) -> int:
        """Tokens in a block of such rounds.

        Args:
            masked: under masks there is room for text that has to come without a drafter, too, where a row's results do not
                depend on the width.
        """
        if (turn := self.turn(choice)) is not None:
            return turn.block_size
        return masked_width(self.target, self.dtype) if masked else 1

    def rows_for(self, running: int) -> int:
        """The least declared number of rows that holds so many."""
        return next(rows for rows in self.table.batches if rows >= running)

    def declared(self, sampling: SamplingMode = "logprobs", constraints: bool = False) -> Iterator[ProgramKey]:
        """All programs that may be needed where rows ask for no more than this, and some have `constraints`."""
        return program_keys(self.table, self.choices, sampling, constraints)

    def round_key(
        self, choice: Choice | None, rows: int, positions: int, sampling: SamplingMode = "logprobs", masked: bool = False
    ) -> ProgramKey:
        """The program of rounds of a kind over so many rows that look at so many positions."""
        positions = next(each for each in self.table.capacities if each >= positions)
        return ProgramKey("rounds", rows, positions, choice=choice, sampling=sampling, masked=masked)

    def empty_state(self, target_cache: Any, draft_cache: Any) -> DecodeState:
        """Slots that hold nothing, around the caches that the program `allocate` gives."""
        return empty_state(self.layout, target_cache, draft_cache, self.width(self.constrained_choice, masked=True))

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        allocate = partial(allocate_caches, layout=self.layout, drafter=self.drafter, dtype=self.dtype)
        if key.name == "allocate":
            return compile_allocate(self.target, allocate)
        function, inputs = self.function(key)
        return compile_step(self.target, function, self.params_for(key), allocate, self.empty_state, inputs)

    def function(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The program to compile, as `f(models, state, *inputs) -> (state, result)`, and its inputs."""
        return self.prefill(key) if key.name == "prefill" else self.rounds(key)

    def params_for(self, key: ProgramKey) -> Models:
        """The parameters that a program reads."""
        if self.drafter is None:
            return Models(self.models.target)
        return self.models if key.name == "prefill" else self.drafter.turn(key.choice).params_for(self.models)

    def table_of(self, rows: int, positions: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layout.groups, rows, positions // self.layout.page_size), jnp.int32)

    def prefill(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`f(models, state, slots [n], rows, table [G, n, M], start [n], count [n], wanted [n], snapshots)`: computes chunks.

        `rows` are the requests (`request_rows`). They are given with each chunk, so that the first one also admits: a program
        of its own for that would cost a dispatch more before the first token. A slot with a `start` below 0 fills the shape.
        `snapshots` are `SnapshotRows`, where the layout has some. The result is a `prefill.Prefilled`, with log-probabilities
        where `wanted`.
        """
        target = replace(self.target, sampling=key.sampling)
        drafter = self.drafter
        chunk = key.chunk

        def prefill_chunk(
            models: Models,
            state: DecodeState,
            slots: Array,
            rows: Any,
            table: Array,
            start: Array,
            count: Array,
            wanted: Array,
            snapshots: SnapshotRows | None = None,
        ) -> tuple[DecodeState, Any]:
            before = rows_of(state, slots, table)
            admitted = start >= 0
            if snapshots is not None:
                caches = restored(state.target_cache, before.target_cache, snapshots.restored)
                before = replace(before, target_cache=caches)

            def given(new: Any, old: Any) -> Array:
                return jnp.where(admitted.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)

            rows = rows | {"proposed": jnp.zeros_like(before.proposed)}
            own = replace(before, **{name: jax.tree.map(given, new, getattr(before, name)) for name, new in rows.items()})
            start = jnp.maximum(start, 0)
            if drafter is not None:
                own = replace(own, draft_cache=drafter.on_prefill(own.draft_cache, start, admitted))
            own, result = prefill(
                target, drafter, chunk, models, own, start, count, wanted if target.reports_logprobs else None
            )
            after = with_rows(state, own, slots)
            if snapshots is not None:
                after = replace(after, target_cache=kept(after.target_cache, own.target_cache, snapshots.kept))
            return after, result

        row = RowRequest(np.zeros(self.layout.capacity, np.int32), 1, 1, Sampling(), 1, wants_logprobs=False)
        numbers, flags = (jax.ShapeDtypeStruct((key.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
        table = self.table_of(key.rows, self.layout.capacity)
        given = (numbers, request_rows([row] * key.rows, ()), table, numbers, numbers, flags)
        return prefill_chunk, (*given, SnapshotRows(numbers, numbers)) if self.layout.snapshots else given

    def rounds(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """`f(models, state, slots [n], table [G, n, M], running [n], limit, masks)`: runs up to `limit` rounds of some slots.

        Slots that are not running fill the shape. The result are the rounds' reports (`state.run_steps`). Without loops it runs
        one round, and `limit` is None; under masks, and only there, `masks` are `RowMasks`.
        """
        target = replace(self.target, sampling=key.sampling)
        turn = self.masked_turn(key.choice) if key.masked else self.turn(key.choice)
        width = self.width(key.choice, key.masked)
        vocab = target.config.vocab_size if target.reports_logprobs else None

        def run_rounds(
            models: Models,
            state: DecodeState,
            slots: Array,
            table: Array,
            running: Array,
            limit: Array | None = None,
            masks: RowMasks | None = None,
        ) -> tuple[DecodeState, Reports]:
            some, close = self.opened(key, turn, target, models, state, slots, table, running)
            some = some if masks is None else begin_masked(masks, some)
            step = step_of(turn, target, masks)
            if limit is not None:
                some, reports = run_steps(step, models, some, limit, STEPS_PER_DISPATCH, width, vocab)
            else:
                some, info = step(models, some)
                reports = Reports(info.packed()[None], None)
            if masks is None:
                return close(replace(some, proposed=jnp.zeros_like(some.proposed))), reports
            return close(end_masked(masks, some)), reports._replace(proposed=some.proposed)

        limit = jax.ShapeDtypeStruct((), jnp.int32) if target.loops else None
        return run_rounds, (*self.round_inputs(key), limit, self.mask_shapes(key.rows, width) if key.masked else None)

    def mask_shapes(self, rows: int, width: int) -> RowMasks:
        """The masks of a program's rows, abstract."""
        blocks = block_shapes(rows, width, vocab := self.target.config.vocab_size)
        if not makes_masks(self.target):
            return RowMasks(blocks)
        return RowMasks(blocks, (table_shapes(self.layout.batch, vocab), row_shapes(rows)))

    def round_inputs(self, key: ProgramKey) -> tuple[Any, ...]:
        """The first arguments of the programs of rounds: slots, their pages, and which of them are running."""
        slots, running = (jax.ShapeDtypeStruct((key.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
        return slots, self.table_of(key.rows, key.positions), running

    def opened(
        self,
        key: ProgramKey,
        turn: Variant | None,
        target: Target,
        models: Models,
        state: DecodeState,
        slots: Array,
        table: Array,
        running: Array,
    ) -> tuple[DecodeState, Callable[[DecodeState], DecodeState]]:
        """Some slots as rounds may begin with them, and what puts them back into the state; those not running are done."""
        some = rows_of(state, slots, table)
        whole = some.tokens
        done = some.done
        positions = key.positions
        some = replace(some, tokens=whole[:, :positions], done=done | ~running)

        def close(some: DecodeState) -> DecodeState:
            tokens = whole.at[:, :positions].set(some.tokens)
            return with_rows(state, replace(some, tokens=tokens, done=jnp.where(running, some.done, done)), slots)

        return some if turn is None else turn.open(target, models, some), close


def makes_masks(target: Target) -> bool:
    """True if the device makes masks; without loops there, and over several processes, the host alone does."""
    return target.loops and not (target.mesh is not None and target.mesh.is_multi_process)


def outside_pages(target: Target, layout: Layout, drafter: Drafter | None, dtype: DTypeLike) -> str:
    """What is known of a row's positions and lies neither in a page nor in a snapshot; empty if there is nothing."""
    state = jax.eval_shape(lambda: allocate_caches(target, layout, drafter, dtype))
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, KVCache | DeltaState))
    kinds = {kind: said for kind, said in OUTSIDE_PAGES.items() if kind is not DeltaState or not layout.snapshots}
    return next((said for kind, said in kinds.items() if any(isinstance(part, kind) for part in parts)), "")


def masked_width(target: Target, dtype: DTypeLike) -> int:
    """Tokens in a block of rounds under masks where nothing else drafts: several where a row's results do not depend on it."""
    name = jnp.dtype(dtype).name
    return FORCED if name == "float32" or is_batch_invariant(target.ops, name, by_xla=target.config.needs_xla) else 1


def constrained_choice(choices: Sequence[Choice | None]) -> Choice | None:
    """The one kind of rounds that rows with a constraint are served by, so that these need few programs.

    It is the narrowest block of the first that drafts: constraints cut drafts off, and the host makes a mask for each slot.
    """
    return choices[:2][-1]


def program_keys(
    table: ShapeTable,
    choices: Sequence[Choice | None],
    sampling: SamplingMode = "logprobs",
    constraints: bool = False,
) -> Iterator[ProgramKey]:
    """All programs that serve a table with rounds of these kinds, for rows that ask for no more than this.

    Args:
        constraints: some may have one.
    """
    yield ProgramKey("allocate")
    for rows, chunk in dict.fromkeys([*((1, chunk) for chunk in table.chunks), table.together]):
        yield prefill_key(rows, chunk, sampling)
    for positions, rows in product(table.capacities, table.batches):
        yield from (ProgramKey("rounds", rows, positions, choice=choice, sampling=sampling) for choice in choices)
        if constraints:
            yield ProgramKey("rounds", rows, positions, choice=constrained_choice(choices), sampling=sampling, masked=True)


def prefill_key(rows: int, chunk: int, sampling: SamplingMode) -> ProgramKey:
    """The program that prefills chunks for rows that ask for no more than this."""
    return ProgramKey("prefill", rows, chunk=chunk, sampling="logprobs" if sampling == "logprobs" else "greedy")


def allocate_caches(target: Target, layout: Layout, drafter: Drafter | None, dtype: DTypeLike) -> tuple[Any, Any]:
    """The target's cache and the drafter's context, empty."""
    sizes = target.config
    devices = 1 if target.mesh is None else target.mesh.shape[GROUPED_AXES[0]]
    held = held_dtype(target, dtype)
    kinds = [sizes.kind(n) for n in range(sizes.num_layers)]
    windows = [kind.window for kind in kinds if kind.delta is None]
    paged = iter(layout.target_caches(target.ops, windows, sizes.num_kv_heads, sizes.head_dim, held, devices))
    target_cache = tuple(
        next(paged) if kind.delta is None else DeltaState.empty(kind.delta, layout.state_rows, dtype) for kind in kinds
    )
    return target_cache, () if drafter is None else drafter.allocate(layout, target, dtype)


def held_dtype(target: Target, dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which the target's keys and values are kept."""
    return jnp.dtype(dtype if target.kv_dtype == "auto" else target.kv_dtype)


def empty_state(layout: Layout, target_cache: Any, draft_cache: Any, width: int = 1) -> DecodeState:
    """Slots that hold nothing, done from the start.

    Args:
        width: of rounds under masks.
    """
    rows = np.zeros(layout.batch, np.int32)
    return DecodeState(
        tokens=np.zeros((layout.batch, layout.capacity), np.int32),
        known=rows,
        end=rows + 1,
        done=rows == 0,
        ignore_eos=rows > 0,
        sampling=row_sampling([Sampling()] * layout.batch, rows + 1),
        target_cache=target_cache,
        draft_cache=draft_cache,
        adapter=np.zeros_like(rows),
        automaton=rows.copy(),
        proposed=np.zeros((layout.batch, width), np.int32),
    )


class RowRequest(NamedTuple):
    """Contents of a slot for a request, but for its caches.

    Attributes:
        tokens: int32 `[L]`.
        known: the position of its last token.
        end: no token is produced at or beyond this position.
        prompt_length: tokens from this position on count as generated.
        wants_logprobs: whether it asks for log-probabilities.
        adapter: the number of its low-rank adapter, 0 for none.
    """

    tokens: np.ndarray
    known: int
    end: int
    sampling: Sampling
    prompt_length: int
    wants_logprobs: bool
    adapter: int = 0


def request_rows(rows: Sequence[RowRequest], eos: Sequence[int]) -> dict[str, Any]:
    """The fields of a `DecodeState` for these rows.

    Args:
        eos: the model's end-of-sequence tokens.
    """
    samplings = [row.sampling for row in rows]
    return {
        "tokens": np.stack([row.tokens for row in rows]),
        "known": np.asarray([row.known for row in rows], np.int32),
        "end": np.asarray([row.end for row in rows], np.int32),
        "done": np.zeros(len(rows), bool),
        "ignore_eos": np.asarray([each.ignore_eos for each in samplings]),
        "sampling": row_sampling(samplings, [row.prompt_length for row in rows], [row.wants_logprobs for row in rows], eos),
        "adapter": np.asarray([row.adapter for row in rows], np.int32),
    }
