"""Compiled programs of generation, over slots with paged KV caches.

A program is not tied to certain slots: it gets the numbers of the slots that it runs, and their block tables. So any running
requests share a program, of the smallest declared number of rows that holds them. The host keeps the block tables.

Legend: S slots, n rows of a program, L positions of a slot, M pages of a slot, P pages of the pool, G groups of layers.
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
from tilewright.runtime.layout import Layout, restore_states, rows_of, save_states, with_rows
from tilewright.runtime.placement import compile_allocate, compile_step
from tilewright.runtime.prefill import prefill
from tilewright.runtime.rounds import HostDrafts, RowMasks, begin_masked, end_masked, step_of
from tilewright.runtime.sampling import Sampling, SamplingMode, row_sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import DecodeState, Models, Reports, Step, Target, run_steps

FORCED = 4
"""Tokens in a block of rounds under masks without a drafter: the last committed token, and forced text."""
STEPS_PER_DISPATCH = 64
"""The most rounds of one dispatch; a caller may run fewer."""

OUTSIDE_PAGES: dict[type, str] = {
    Ring: "the drafter keeps a window of its last positions (--drafting window), which is not in pages",
    DeltaState: "layers of linear attention keep a state of each row, without snapshots (--memory state_snapshots)",
}
"""Reasons why cached pages are not enough for the prefix cache, by the kind of the part of the state outside of pages."""


class SnapshotRows(NamedTuple):
    """Rows that hold snapshots of states, int32 `[n]` each; below 0 for none.

    Attributes:
        restored: rows that the states of a prefill's rows start from.
        saved: rows that receive the states behind the prefill.
    """

    restored: Any
    saved: Any


class RowRequest(NamedTuple):
    """Initial contents of a slot for a request, without its caches.

    Attributes:
        tokens: int32 `[L]`.
        last_position: position of its last token.
        end: no token is generated at or beyond this position.
        prompt_length: tokens from this position on count as generated.
        wants_logprobs: whether the request wants log-probabilities.
        adapter: number of its low-rank adapter, 0 for none.
        denoising: denoising options of its blocks; None for a request that is not denoised.
    """

    tokens: np.ndarray
    last_position: int
    end: int
    sampling: Sampling
    prompt_length: int
    wants_logprobs: bool
    adapter: int = 0
    denoising: Any = None


@dataclass(frozen=True)
class ProgramKey:
    """Key of a program.

    Attributes:
        rows: number of rows of rounds or of a prefill.
        positions: positions of a slot that rounds attend to.
        chunk: the most tokens of a prefill.
        choice: kind of the rounds; None if all are alike.
        sampling: the most general sampling of the rows; a prefill has "logprobs" or "greedy", since it draws no token.
        masked: whether rounds run under masks, for rows of which some have a constraint.
    """

    name: Literal["allocate", "prefill", "rounds"]
    rows: int = 0
    positions: int = 0
    chunk: int = 0
    choice: Choice | None = None
    sampling: SamplingMode = "greedy"
    masked: bool = False


class Programs(Store[ProgramKey]):
    """Programs of one model over slots of one layout.

    Attributes:
        table: declared shapes.
        layout: layout of the slots and the pool.
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

    allocate_key = ProgramKey("allocate")

    @property
    def over_processes(self) -> bool:
        """True if several processes share the model."""
        mesh = self.target.mesh
        return mesh is not None and mesh.is_multi_process

    @cached_property
    def outside_pages(self) -> str:
        """Reason against a prefix cache; see the function `outside_pages`. Cached, since it traces for milliseconds."""
        return outside_pages(self.target, self.layout, self.drafter, self.dtype)

    @property
    def choices(self) -> tuple[Choice | None, ...]:
        """Kinds of rounds; a single None if all rounds are alike."""
        return (None,) if self.drafter is None else self.drafter.choices

    @property
    def constrained_choice(self) -> Choice | None:
        """Kind of rounds for rows with a constraint; see the function `constrained_choice`."""
        return constrained_choice(self.choices)

    def variant(self, choice: Choice | None) -> Variant | None:
        """Returns the drafter of a kind of rounds; None for plain decoding. Raises a `ValueError` for an unknown kind."""
        if self.drafter is not None:
            return self.drafter.variant(choice)
        if choice is not None:
            raise ValueError(f"expected plain decoding, since there is no drafter, found rounds of {choice}")
        return None

    def masked_variant(self, choice: Choice | None) -> Variant:
        """Returns the drafter of rounds under masks."""
        width = self.width(choice, masked=True)
        return self.variant(choice) or HostDrafts(width, may_be_idle=self.target.loops and width > 1)

    def width(self, choice: Choice | None, masked: bool = False) -> int:
        """Returns the number of tokens in a block of such rounds.

        Args:
            masked: rounds under masks have room for forced text even without a drafter, if a row's results do not depend on the
                width.
        """
        if (variant := self.variant(choice)) is not None:
            return variant.block_size
        if self.target.block_length is not None:
            return self.target.block_length
        return masked_width(self.target, self.dtype) if masked else 1

    def mask_width(self, choice: Choice | None) -> int:
        """Returns the number of slots of a block for which the host makes masks."""
        return self.width(choice, masked=True)

    def declared(self, sampling: SamplingMode = "logprobs", constraints: bool = False) -> Iterator[ProgramKey]:
        """Returns the keys of all programs for rows up to this sampling, some of them with `constraints`."""
        return program_keys(self.table, self.choices, sampling, constraints)

    def first_keys(self, sampling: SamplingMode = "logprobs") -> list[ProgramKey]:
        """Returns the keys of the few programs that can serve every request without a constraint."""
        table = self.table
        rounds = ProgramKey("rounds", table.batches[-1], table.capacities[-1], choice=self.choices[0], sampling=sampling)
        return [self.allocate_key, prefill_key(1, table.together[1], sampling), rounds]

    def round_key(
        self, choice: Choice | None, rows: int, positions: int, sampling: SamplingMode = "logprobs", masked: bool = False
    ) -> ProgramKey:
        """Returns the key of the program of rounds for that many rows and positions."""
        positions = next(each for each in self.table.capacities if each >= positions)
        return ProgramKey("rounds", rows, positions, choice=choice, sampling=sampling, masked=masked)

    def empty_state(self, target_cache: Any, draft_cache: Any) -> DecodeState:
        """Returns a state with empty slots around the caches of the program `allocate`."""
        return empty_state(self.layout, target_cache, draft_cache, self.width(self.constrained_choice, masked=True))

    def compile(self, key: ProgramKey) -> jax.stages.Compiled:
        allocate = partial(allocate_caches, layout=self.layout, drafter=self.drafter, dtype=self.dtype)
        if key.name == "allocate":
            return compile_allocate(self.target, allocate)
        function, inputs = self.function(key)
        return compile_step(self.target, function, self.params_for(key), allocate, self.empty_state, inputs)

    def function(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the program to compile, as `f(models, state, *inputs) -> (state, result)`, and its abstract inputs."""
        return self.prefill(key) if key.name == "prefill" else self.rounds(key)

    def params_for(self, key: ProgramKey) -> Models:
        """Parameters that a program reads."""
        if self.drafter is None:
            return Models(self.models.target)
        return self.models if key.name == "prefill" else self.drafter.variant(key.choice).params_for(self.models)

    def table_of(self, rows: int, positions: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layout.groups, rows, positions // self.layout.page_size), jnp.int32)

    def prefill(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function of a prefill, and its abstract inputs.

        The function is `f(models, state, slots [n], rows, table [G, n, M], start [n], count [n], wanted [n], snapshots)`.
        `rows` are the requests (`request_rows`). Every chunk passes them, so the first chunk also admits its request: a
        separate program would add a dispatch to the time to first token. A slot with a `start` below 0 is padding. `snapshots`
        are `SnapshotRows`, if the layout has snapshots. The result is a `prefill.Prefilled`, with log-probabilities where
        `wanted`.
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
                caches = restore_states(state.target_cache, before.target_cache, snapshots.restored)
                before = replace(before, target_cache=caches)

            def replaced(new: Any, old: Any) -> Array:
                return jnp.where(admitted.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)

            rows = rows | {"proposed": jnp.zeros_like(before.proposed)}
            some = replace(before, **{name: jax.tree.map(replaced, new, getattr(before, name)) for name, new in rows.items()})
            start = jnp.maximum(start, 0)
            if drafter is not None:
                some = replace(some, draft_cache=drafter.on_prefill(some.draft_cache, start, admitted))
            some, result = prefill(
                target, drafter, chunk, models, some, start, count, wanted if target.reports_logprobs else None
            )
            after = with_rows(state, some, slots)
            if snapshots is not None:
                after = replace(after, target_cache=save_states(after.target_cache, some.target_cache, snapshots.saved))
            return after, result

        row = RowRequest(np.zeros(self.layout.capacity, np.int32), 1, 1, Sampling(), 1, wants_logprobs=False)
        numbers, flags = (jax.ShapeDtypeStruct((key.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
        table = self.table_of(key.rows, self.layout.capacity)
        inputs = (numbers, self.request_rows([row] * key.rows), table, numbers, numbers, flags)
        return prefill_chunk, (*inputs, SnapshotRows(numbers, numbers)) if self.layout.snapshots else inputs

    def rounds(self, key: ProgramKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function of rounds, and its abstract inputs.

        The function is `f(models, state, slots [n], table [G, n, M], running [n], limit, masks)`. It runs up to `limit` rounds.
        Slots that are not `running` are padding. The result is the rounds' reports (`state.run_steps`). Without loops the
        function runs one round, and `limit` is None. `masks` are `RowMasks` for rounds under masks, else None.
        """
        target = replace(self.target, sampling=key.sampling)
        variant = self.masked_variant(key.choice) if key.masked else self.variant(key.choice)
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
            some, write_back = self.select_slots(key, variant, target, models, state, slots, table, running)
            some = some if masks is None else begin_masked(masks, some)
            step = self.step(variant, target, masks)
            if limit is not None:
                some, reports = run_steps(step, models, some, limit, STEPS_PER_DISPATCH, width, vocab)
            else:
                some, info = step(models, some)
                reports = Reports(info.packed()[None], None)
            if masks is None:
                return write_back(replace(some, proposed=jnp.zeros_like(some.proposed))), reports
            return write_back(end_masked(masks, some)), reports._replace(proposed=some.proposed)

        limit = jax.ShapeDtypeStruct((), jnp.int32) if target.loops else None
        return run_rounds, (
            *self.round_inputs(key),
            limit,
            self.mask_shapes(key.rows, self.mask_width(key.choice)) if key.masked else None,
        )

    def step(self, variant: Variant | None, target: Target, masks: RowMasks | None) -> Step:
        """Returns the step that a program of rounds repeats."""
        return step_of(variant, target, masks)

    def request_rows(self, rows: Sequence[RowRequest], eos: Sequence[int] = ()) -> dict[str, Any]:
        """Returns the fields of a `DecodeState` that a prefill sets for these rows; see the function `request_rows`."""
        return request_rows(rows, eos)

    def mask_shapes(self, rows: int, width: int) -> RowMasks:
        """Returns the abstract masks of a program's rows."""
        blocks = block_shapes(rows, width, vocab := self.target.config.vocab_size)
        if not makes_masks(self.target):
            return RowMasks(blocks)
        return RowMasks(blocks, (table_shapes(self.layout.batch, vocab), row_shapes(rows)))

    def round_inputs(self, key: ProgramKey) -> tuple[Any, ...]:
        """Returns the first abstract inputs of the programs of rounds: slots, their block table, and flags of running slots."""
        slots, running = (jax.ShapeDtypeStruct((key.rows,), dtype) for dtype in (jnp.int32, jnp.bool_))
        return slots, self.table_of(key.rows, key.positions), running

    def select_slots(
        self,
        key: ProgramKey,
        variant: Variant | None,
        target: Target,
        models: Models,
        state: DecodeState,
        slots: Array,
        table: Array,
        running: Array,
    ) -> tuple[DecodeState, Callable[[DecodeState], DecodeState]]:
        """Selects slots for rounds, and returns a function that writes them back. Slots that are not running count as done."""
        some = rows_of(state, slots, table)
        whole = some.tokens
        done = some.done
        positions = key.positions
        some = replace(some, tokens=whole[:, :positions], done=done | ~running)

        def write_back(some: DecodeState) -> DecodeState:
            tokens = whole.at[:, :positions].set(some.tokens)
            return with_rows(state, replace(some, tokens=tokens, done=jnp.where(running, some.done, done)), slots)

        return some if variant is None else variant.complete_context(target, models, some), write_back


def makes_masks(target: Target) -> bool:
    """True if the device makes masks. Without loops, or over several processes, only the host makes them."""
    return target.loops and not (target.mesh is not None and target.mesh.is_multi_process)


def outside_pages(target: Target, layout: Layout, drafter: Drafter | None, dtype: DTypeLike) -> str:
    """Returns a reason if some part of a row's context is neither in pages nor in snapshots; empty if there is none."""
    state = jax.eval_shape(lambda: allocate_caches(target, layout, drafter, dtype))
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, KVCache | DeltaState))
    reasons = {kind: why for kind, why in OUTSIDE_PAGES.items() if kind is not DeltaState or not layout.snapshots}
    return next((why for kind, why in reasons.items() if any(isinstance(part, kind) for part in parts)), "")


def masked_width(target: Target, dtype: DTypeLike) -> int:
    """Returns the block width of masked rounds without a drafter: above 1 if a row's results do not depend on the width."""
    name = jnp.dtype(dtype).name
    return FORCED if name == "float32" or is_batch_invariant(target.ops, name, by_xla=target.config.needs_xla) else 1


def constrained_choice(choices: Sequence[Choice | None]) -> Choice | None:
    """Returns the one kind of rounds for rows with a constraint; a single kind needs few programs.

    It is the narrowest block of the first drafter: constraints cut drafts off, and the host makes a mask for each slot.
    """
    return choices[:2][-1]


def program_keys(
    table: ShapeTable,
    choices: Sequence[Choice | None],
    sampling: SamplingMode = "logprobs",
    constraints: bool = False,
) -> Iterator[ProgramKey]:
    """Returns the keys of all programs that serve a table with these kinds of rounds, for rows up to this sampling.

    The most useful are first: a program for more positions can replace one for fewer.

    Args:
        constraints: whether some rows may have a constraint.
    """
    yield ProgramKey("allocate")
    for rows, chunk in dict.fromkeys([*((1, chunk) for chunk in table.chunks), table.together]):
        yield prefill_key(rows, chunk, sampling)
    for positions, rows in product(reversed(table.capacities), table.batches):
        yield from (ProgramKey("rounds", rows, positions, choice=choice, sampling=sampling) for choice in choices)
        if constraints:
            yield ProgramKey("rounds", rows, positions, choice=constrained_choice(choices), sampling=sampling, masked=True)


def prefill_key(rows: int, chunk: int, sampling: SamplingMode) -> ProgramKey:
    """Returns the key of the program that prefills chunks for rows up to this sampling."""
    return ProgramKey("prefill", rows, chunk=chunk, sampling="logprobs" if sampling == "logprobs" else "greedy")


def allocate_caches(target: Target, layout: Layout, drafter: Drafter | None, dtype: DTypeLike) -> tuple[Any, Any]:
    """Returns the empty target cache and the drafter's empty context."""
    sizes = target.config
    devices = 1 if target.mesh is None else target.mesh.shape[GROUPED_AXES[0]]
    held = held_dtype(target, dtype)
    kinds = [sizes.kind(n) for n in range(sizes.num_layers)]
    layers = [(kind.window, sizes.heads(kind)) for kind in kinds if kind.delta is None]
    paged = iter(layout.target_caches(target.ops, layers, held, devices))
    target_cache = tuple(
        next(paged) if kind.delta is None else DeltaState.empty(kind.delta, layout.state_rows, dtype) for kind in kinds
    )
    return target_cache, () if drafter is None else drafter.allocate(layout, target, dtype)


def held_dtype(target: Target, dtype: DTypeLike) -> jnp.dtype:
    """Dtype of the target's KV cache."""
    return jnp.dtype(dtype if target.kv_dtype == "auto" else target.kv_dtype)


def empty_state(layout: Layout, target_cache: Any, draft_cache: Any, width: int = 1) -> DecodeState:
    """Returns a state with empty slots, which are done from the start.

    Args:
        width: block width of rounds under masks.
    """
    rows = np.zeros(layout.batch, np.int32)
    return DecodeState(
        tokens=np.zeros((layout.batch, layout.capacity), np.int32),
        last_position=rows,
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


def request_rows(rows: Sequence[RowRequest], eos: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of a `DecodeState` for these rows.

    Args:
        eos: the model's end-of-sequence tokens.
    """
    samplings = [row.sampling for row in rows]
    return {
        "tokens": np.stack([row.tokens for row in rows]),
        "last_position": np.asarray([row.last_position for row in rows], np.int32),
        "end": np.asarray([row.end for row in rows], np.int32),
        "done": np.zeros(len(rows), bool),
        "ignore_eos": np.asarray([each.ignore_eos for each in samplings]),
        "sampling": row_sampling(samplings, [row.prompt_length for row in rows], [row.wants_logprobs for row in rows], eos),
        "adapter": np.asarray([row.adapter for row in rows], np.int32),
    }
