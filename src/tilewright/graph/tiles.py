"""Messages of edges in tiles of slots that fit a CPU's cache, so that no array of an edge's features exists.

A message function is independent between edges, except for `softmax` and `dropout` of its parameter `index`. These divide it
into *stages*. `plan` traces each stage for the slots of one tile. A loop over tiles gathers a tile's values, evaluates the
stage, and stores its result if a softmax or dropout follows, else reduces it. Gradients evaluate the stage once more: in tiles
of the graph for values of nodes (`_i`), of edges and of the function's closure, and in tiles of the transposed graph for values
of sources (`_j`). Nothing scatters.

Legend: N nodes, M sources, E edges, S slots of a slot list, T slots of a tile, W rows of a tile, F features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jaxtyping import Bool, Int32

from tilewright.graph import rows as row_layouts
from tilewright.graph.rows import Bucket, BucketRows, CsrRows, Rows, Slots, take
from tilewright.graph.slotwise import slotwise
from tilewright.kernels import select

Place = Literal["sources", "rows", "edges", "slots"]
"""Array that a value of a slot comes from: of its source, its node, the caller's edge, or the slot list itself."""
Sums = Literal["sum", "squares"]
"""Reductions in tiles. A maximum or minimum is none: its gradient compares messages with it, so that they are stored."""
LAYOUTS: tuple[type, ...] = (CsrRows,)
"""Layouts whose messages run in tiles. Those of padded rows, which TPUs use, are stored: tiles are not measured there."""


class Operand(NamedTuple):
    """Value that a message function gathers."""

    value: Array
    place: Place


class Tile(NamedTuple):
    """Slots of a tile.

    Attributes:
        rows, sources, edges: ends of each slot; those of some edge in padding.
        valid: mask of the slots that belong to this tile.
        slots: values of the slots that the caller passed.
    """

    rows: Int32[Array, " T"]
    sources: Int32[Array, " T"]
    edges: Int32[Array, " T"]
    valid: Bool[Array, " T"]
    slots: tuple[Array, ...]


class Results(NamedTuple):
    """Results of a tile: values to store by slot, values to sum by row, and values to sum over all slots.

    Values to sum are float32; the function clears those of invalid slots.
    """

    stored: tuple[Array, ...] = ()
    reduced: tuple[Array, ...] = ()
    totals: tuple[Array, ...] = ()


def fold(rows: Rows, size: int, function: Callable[[Tile], Results], slots: Sequence[Slots]) -> tuple[Any, ...]:
    """Evaluates a function of tiles of `size` slots.

    Args:
        rows: the rows.
        size: slots of a tile.
        function: the function.
        slots: values of the slots.

    Returns:
        The stored values `[S, ...]` as slots, with zeros in padding; the sums `[N, ...]`; and the totals.
    """
    if isinstance(rows, CsrRows):
        return fold_csr(rows, size, function, slots)
    each = [
        fold_bucket(bucket, rows, size, function, tuple(values[place] for values in slots))
        for place, bucket in enumerate(rows.blocks)
    ]
    stored = tuple(tuple(values) for values in zip(*(results.stored for results in each), strict=True))
    sums = []
    for parts in zip(*(results.reduced for results in each), strict=True):
        flat = tuple(part.reshape(part.shape[0], math.prod(part.shape[1:])) for part in parts)
        sums.append(rows.join(flat, "sum").reshape(-1, *parts[0].shape[1:]))
    totals = tuple(sum(parts) for parts in zip(*(results.totals for results in each), strict=True))
    return stored, tuple(sums), totals


def fold_csr(rows: CsrRows, size: int, function: Callable[[Tile], Results], slots: Sequence[Slots]) -> tuple[Any, ...]:
    """Computes `fold` for lists. A tile has at most a quarter as many rows as slots, and may begin or end within a row.

    The last tile begins early enough to be full; slots of the tile before are not valid in it.
    """
    count, nodes = rows.num_slots, rows.degrees.shape[0]
    size = min(size, count)
    height = min(nodes, max(1, size // 4))
    end = rows.offsets[nodes]
    first = rows.slots.at[0].get(mode="clip") if rows.slots.shape[0] else jnp.int32(0)
    places = jnp.arange(size, dtype=jnp.int32)

    def part(values: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(values, start, size)

    def tile_at(begin: Array) -> tuple[Tile, Array, Array, Array]:
        """Returns the tile, its first slot, its first row and its end."""
        start = jnp.minimum(begin, count - size)
        row = jnp.minimum(take(rows.rows, begin), nodes - height)
        stop = jnp.minimum(jnp.minimum(start + size, take(rows.offsets, row + height)), end)
        slot = start + places
        filled = slot < end
        ends = [
            jnp.where(filled, part(values, start), values.at[first].get(mode="clip"))
            for values in (rows.rows, rows.sources, rows.edges)
        ]
        valid = (slot >= begin) & (slot < stop)
        return Tile(ends[0], ends[1], ends[2], valid, tuple(part(values[0], start) for values in slots)), start, row, stop

    shapes = jax.eval_shape(lambda: function(tile_at(jnp.int32(0))[0]))
    stored = tuple(jnp.zeros((count, *each.shape[1:]), each.dtype) for each in shapes.stored)
    sums = tuple(jnp.zeros((nodes, math.prod(each.shape[1:])), jnp.float32) for each in shapes.reduced)
    totals = tuple(jnp.zeros(each.shape, each.dtype) for each in shapes.totals)

    def step(state: tuple[Array, Results]) -> tuple[Array, Results]:
        begin, (stored, sums, totals) = state
        tile, start, row, stop = tile_at(begin)
        found = function(tile)
        offsets = jnp.clip(jax.lax.dynamic_slice_in_dim(rows.offsets, row, height + 1), begin, stop) - start

        def store(into: Array, values: Array) -> Array:
            kept = jnp.where(aligned(tile.valid, values), values, part(into, start))
            return jax.lax.dynamic_update_slice_in_dim(into, kept, start, 0)

        def add(into: Array, values: Array) -> Array:
            flat = values.reshape(size, math.prod(values.shape[1:]))
            partial = select.gather_reduce_csr(flat, offsets, places, None, "sum")
            sum_before = jax.lax.dynamic_slice_in_dim(into, row, height)
            return jax.lax.dynamic_update_slice_in_dim(into, sum_before + partial, row, 0)

        return stop, Results(
            tuple(map(store, stored, found.stored)),
            tuple(map(add, sums, found.reduced)),
            tuple(a + b for a, b in zip(totals, found.totals, strict=True)),
        )

    _, out = jax.lax.while_loop(lambda state: state[0] < end, step, (jnp.int32(0), Results(stored, sums, totals)))
    reduced = tuple(each.reshape(nodes, *like.shape[1:]) for each, like in zip(out.reduced, shapes.reduced, strict=True))
    return tuple((each,) for each in out.stored), reduced, out.totals


def fold_bucket(
    bucket: Bucket, rows: BucketRows, size: int, function: Callable[[Tile], Results], slots: tuple[Array, ...]
) -> Results:
    """Computes `fold` for a bucket, in tiles of whole rows.

    The last tile begins early enough to be full; its first rows are not valid if the tile before has them. Rows without edges
    have no effect.
    """
    count, width = bucket.sources.shape
    height = min(count, max(1, size // max(width, 1)))
    assert rows.slots is not None, "only the first stage has edges"
    edges = jnp.zeros_like(bucket.sources) if bucket.edges is None else bucket.edges
    spare = first_slot(rows)

    def tile_at(begin: Array) -> tuple[Tile, Array]:
        start = jnp.minimum(begin, count - height)

        def part(values: Array) -> Array:
            found = jax.lax.dynamic_slice_in_dim(values, start, height)
            return found.reshape(height * width, *found.shape[2:])

        degrees = jax.lax.dynamic_slice_in_dim(bucket.degrees, start, height)
        nodes = jax.lax.dynamic_slice_in_dim(bucket.nodes, start, height)
        filled = jnp.arange(width, dtype=jnp.int32) < degrees[:, None]
        ends = [
            jnp.where(filled.ravel(), values, other)
            for values, other in zip(
                (jnp.broadcast_to(nodes[:, None], (height, width)).ravel(), part(bucket.sources), part(edges)),
                spare,
                strict=True,
            )
        ]
        fresh = (start + jnp.arange(height, dtype=jnp.int32) >= begin)[:, None]
        return Tile(ends[0], ends[1], ends[2], (filled & fresh).ravel(), tuple(map(part, slots))), start

    shapes = jax.eval_shape(lambda: function(tile_at(jnp.int32(0))[0]))
    state = Results(
        tuple(jnp.zeros((count, width, *each.shape[1:]), each.dtype) for each in shapes.stored),
        tuple(jnp.zeros((count, *each.shape[1:]), jnp.float32) for each in shapes.reduced),
        tuple(jnp.zeros(each.shape, each.dtype) for each in shapes.totals),
    )
    if not count or not width:
        return state

    def step(index: Array, state: Results) -> Results:
        begin = index * height
        tile, start = tile_at(begin)
        found = function(tile)

        def update(into: Array, values: Array, valid: Array) -> Array:
            before = jax.lax.dynamic_slice_in_dim(into, start, height)
            return jax.lax.dynamic_update_slice_in_dim(into, jnp.where(aligned(valid, values), values, before), start, 0)

        valid = tile.valid.reshape(height, width)
        return Results(
            tuple(
                update(into, values.reshape(height, width, *values.shape[1:]), valid)
                for into, values in zip(state.stored, found.stored, strict=True)
            ),
            tuple(
                update(into, values.reshape(height, width, *values.shape[1:]).sum(1), valid.any(1))
                for into, values in zip(state.reduced, found.reduced, strict=True)
            ),
            tuple(a + b for a, b in zip(state.totals, found.totals, strict=True)),
        )

    tiles = -(-count // height)
    return step(jnp.int32(0), state) if tiles == 1 else jax.lax.fori_loop(0, tiles, step, state)


def tile_sizes(rows: Rows, size: int) -> set[int]:
    """Returns the numbers of slots of a tile of buckets."""
    if isinstance(rows, CsrRows):
        return set()
    shapes = [bucket.sources.shape for bucket in rows.blocks]
    return {min(count, max(1, size // max(width, 1))) * width for count, width in shapes}


def first_slot(rows: BucketRows) -> list[Array]:
    """Returns row, source and edge of the caller's first edge, which padding repeats; zeros without edges."""
    listed = rows.slot_list
    if not listed.rows.shape[0] or rows.slots is None or not rows.slots.shape[0]:
        return [jnp.int32(0)] * 3
    return [values.at[rows.slots[0]].get(mode="clip") for values in listed[:3]]


def aligned(mask: Array, values: Array) -> Array:
    """Returns the mask with further dims of 1, for `values`."""
    return mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))


class Untiled(Exception):
    """A message function that uses edges in another way than tile by tile."""


class Barrier(Exception):
    """End of a stage: a message function calls softmax or dropout on `values`."""

    def __init__(self, values: Array, rate: float | None, key: Array | None):
        super().__init__()
        self.values, self.rate, self.key = values, rate, key


class StageIndex:
    """Parameter `index` of a message function while a stage is traced: `known` are the results of earlier stages."""

    def __init__(self, known: Sequence[Array]):
        self.known = list(known)

    def softmax(self, scores: Array) -> Array:
        return self.next(scores, None, None)

    def dropout(self, weights: Array, rate: float, key: Array | None) -> Array:
        return weights if key is None or rate == 0 else self.next(weights, rate, key)

    def next(self, values: Array, rate: float | None, key: Array | None) -> Array:
        """Returns the next known result, or ends the stage."""
        if not self.known:
            raise Barrier(values, rate, key)
        return self.known.pop(0)

    def __getattr__(self, name: str) -> Any:
        raise Untiled(name)


@dataclass(frozen=True)
class Stage:
    """Part of a message function up to a softmax or dropout, or its end, for the slots of a tile.

    Attributes:
        jaxpr: program from the operands' values, then those of earlier stages, to the result, and to the key of a dropout that
            follows. Its constants are arrays that the function closes over.
        used: mask of the values that the result depends on.
        end: how the stage ends; None for the function's end.
        size: slots of the traced tile.
        retrace: traces the stage for a tile of another size, with the same constants.
    """

    jaxpr: Any
    used: tuple[bool, ...]
    end: Barrier | None
    size: int
    retrace: Callable[[int], "Stage"]

    @property
    def key(self) -> Array:
        """Key of the dropout that ends the stage, which depends on no value of a slot."""
        values = [jnp.zeros(each.shape, each.dtype) for each in self.jaxpr.in_avals]
        return core.jaxpr_as_fun(self.jaxpr)(*values)[1]

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Shape of the result for a tile."""
        found = self.jaxpr.out_avals[0]
        return jax.ShapeDtypeStruct(found.shape, found.dtype)

    @property
    def same_as(self) -> int | None:
        """Place of the value that is the result; None if the stage computes something."""
        program = self.jaxpr.jaxpr
        found = [n for n, variable in enumerate(program.invars) if variable is program.outvars[0]]
        return found[0] if found else None


def trace_stage(function: Callable[..., Array], operands: Mapping[str, Any], known: Sequence[Any], size: int) -> Stage:
    """Traces the stage after the `known` results. Operands are an `Operand`, None, or "index"."""
    ended: list[Barrier] = []
    named = [name for name, value in operands.items() if isinstance(value, Operand)]

    def stage(*values: Array) -> tuple[Array, ...]:
        index = StageIndex(values[len(named) :])
        given = {name: index if value == "index" else None for name, value in operands.items() if name not in named}
        try:
            return (function(**given, **dict(zip(named, values, strict=False))),)
        except Barrier as barrier:
            ended.append(barrier)
            return (barrier.values,) if barrier.key is None else (barrier.values, barrier.key)

    values = [operands[name].value for name in named]
    shapes = [jax.ShapeDtypeStruct((size, *value.shape[1:]), value.dtype) for value in (*values, *known)]
    jaxpr = jax.make_jaxpr(stage)(*shapes)
    program = jaxpr.jaxpr
    used = depends_on(program, program.outvars[0])
    if len(program.outvars) == 2 and any(depends_on(program, program.outvars[1])):
        raise Untiled("a key that depends on values of edges")

    def retrace(size: int) -> Stage:
        return trace_stage(function, operands, known, size)

    return Stage(jaxpr, used, ended[0] if ended else None, size, retrace)


def depends_on(program: Any, result: Any) -> tuple[bool, ...]:
    """Returns the mask of a program's arguments that a result depends on."""
    needed = set() if isinstance(result, core.Literal) else {result}
    for equation in reversed(program.eqns):
        if any(variable in needed for variable in equation.outvars):
            needed.update(variable for variable in equation.invars if not isinstance(variable, core.Literal))
    return tuple(variable in needed for variable in program.invars)


@dataclass(frozen=True)
class Plan:
    """Stages of a message function for a graph.

    Attributes:
        stages: the stages.
        operands: values that the function gathers, in the order of the stages' programs.
        size: slots of a tile.
    """

    stages: tuple[Stage, ...]
    operands: tuple[Operand, ...]
    size: int


def plan(function: Callable[..., Array], operands: Mapping[str, Any], slots: int) -> Plan | None:
    """Divides a message function into stages.

    Args:
        function: the function.
        operands: by parameter, an `Operand`, None, or "index".
        slots: slots of the graph.

    Returns:
        None if all slots fit one tile, or without a proof that the function treats each edge by itself.
    """
    arrays = [value for value in operands.values() if isinstance(value, Operand)]
    width = sum(math.prod(value.shape[1:]) for value, _ in arrays)
    size = max(1, row_layouts.CHUNK // max(width, 1))
    if slots <= size:
        return None
    stages: list[Stage] = []
    try:
        while not stages or stages[-1].end is not None:
            stages.append(trace_stage(function, operands, [stage.shape for stage in stages], size))
            last = stages[-1]
            if not slotwise(last.jaxpr, last.retrace(size + 1).jaxpr) or last.shape.dtype not in (jnp.float32, jnp.bfloat16):
                return None  # the function without tiles reports other dtypes
    except (Untiled, TypeError, ValueError, IndexError):  # the function without tiles reports its mistakes
        return None
    return Plan(tuple(stages), tuple(arrays), size)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Masks of the values and closed-over arrays with a gradient."""

    values: tuple[bool, ...]
    closed: tuple[bool, ...]


def stage_results(
    forward: Rows, backward: Rows, stage: Stage, operands: Sequence[Operand], size: int, sums: tuple[Sums, ...]
) -> Any:
    """Evaluates a stage for all slots.

    Args:
        forward: sources of each node.
        backward: destinations of each source.
        stage: the stage.
        operands: its values, those of earlier stages last.
        size: slots of a tile.
        sums: reductions of the result over each node's slots.

    Returns:
        The result as a slot list `[S, ...]` without `sums`, else these in float32 `[N, ...]`.
    """
    arrays, shape = jax.tree.flatten((forward, backward))
    programs = {each: stage.retrace(each).jaxpr for each in tile_sizes(forward, size) | tile_sizes(backward, size)}
    places = [place for _, place in operands]

    def evaluate(gathered: Sequence[Array], closed: Sequence[Array]) -> tuple[Array, ...]:
        """Returns the result, or the values to sum."""
        program = programs.get(gathered[0].shape[0], stage.jaxpr)
        result = core.jaxpr_as_fun(core.ClosedJaxpr(program.jaxpr, list(closed)))(*gathered)[0]
        if not sums:
            return (result,)
        return tuple((result if kind == "sum" else result * result).astype(jnp.float32) for kind in sums)

    def gather(values: Sequence[Array], tile: Tile) -> list[Array]:
        """Gathers the values of a tile; zeros for those that have no effect."""
        size = tile.rows.shape[0]
        by_slot = iter(tile.slots)
        ends = {"sources": tile.sources, "rows": tile.rows, "edges": tile.edges}
        return [
            (next(by_slot) if place == "slots" else take(value, ends[place]))
            if used
            else jnp.zeros((size, *value.shape[1:]), value.dtype)
            for value, place, used in zip(values, places, stage.used, strict=True)
        ]

    def stored_slots(rows: Rows, values: Sequence[Array]) -> list[Slots]:
        return [rows.split(v) for v, place, used in zip(values, places, stage.used, strict=True) if used and place == "slots"]

    def compute(arrays: list[Array], values: tuple[Array, ...], closed: tuple[Array, ...]) -> Any:
        rows, _ = shape.unflatten(arrays)

        def in_tile(tile: Tile) -> Results:
            found = evaluate(gather(values, tile), closed)
            if not sums:
                return Results(stored=found)
            return Results(reduced=tuple(jnp.where(aligned(tile.valid, each), each, 0) for each in found))

        stored, reduced, _ = fold(rows, size, in_tile, stored_slots(rows, values))
        return reduced if sums else rows.flatten(stored[0])

    def compute_forward(arrays: Any, values: Any, closed: Any) -> tuple[Any, Any]:
        def differs(each: Any, used: bool = True) -> bool:
            return used and each.perturbed and jnp.issubdtype(each.value.dtype, jnp.inexact)

        wanted = Wanted(tuple(map(differs, values, stage.used)), tuple(map(differs, closed)))
        arrays, values, closed = jax.tree.map(
            lambda each: each.value, (arrays, values, closed), is_leaf=lambda each: hasattr(each, "perturbed")
        )
        return compute(arrays, values, closed), (arrays, values, closed, wanted)

    def compute_backward(saved: Any, gradients: Any) -> tuple[None, Any, Any]:
        arrays, values, closed, wanted = saved
        ahead, back = shape.unflatten(arrays)
        zero: Any = jax.custom_derivatives.SymbolicZero
        given = [
            jnp.zeros(each.shape, each.dtype) if isinstance(each, zero) else each
            for each in (gradients if sums else [gradients])
        ]

        def pull(gathered: list[Array], which: list[int], free: list[int], due: list[Array], valid: Array) -> Any:
            """Returns the gradients of the gathered values `which` and the closed-over arrays `free`."""

            def function(some: list[Any], arrays: list[Array]) -> tuple[Array, ...]:
                every, inside = list(gathered), list(closed)
                for place, value in zip(which, some, strict=True):
                    every[place] = value
                for place, value in zip(free, arrays, strict=True):
                    inside[place] = value
                return evaluate(every, inside)

            _, pulled = jax.vjp(function, [gathered[n] for n in which], [closed[n] for n in free])
            return pulled(tuple(jnp.where(aligned(valid, each), each, 0) for each in due))

        near = [n for n, each in enumerate(wanted.values) if each and places[n] != "sources"]
        far = [n for n, each in enumerate(wanted.values) if each and places[n] == "sources"]
        free = [n for n, each in enumerate(wanted.closed) if each]
        found: list[Any] = [None] * len(values)
        inside: list[Any] = [None] * len(closed)
        if near or free:
            by_row = [n for n in near if places[n] == "rows"]
            by_slot = [n for n in near if places[n] != "rows"]

            def ahead_tile(tile: Tile) -> Results:
                due = [take(each, tile.rows) for each in given] if sums else [tile.slots[-1]]
                gathered = gather(values, tile if sums else tile._replace(slots=tile.slots[:-1]))
                grads, frees = pull(gathered, near, free, due, tile.valid)
                each = dict(zip(near, grads, strict=True))
                return Results(
                    tuple(each[n] for n in by_slot),
                    tuple(each[n].astype(jnp.float32) for n in by_row),
                    tuple(grad.astype(jnp.float32) for grad in frees),
                )

            slots = stored_slots(ahead, values) + ([] if sums else [ahead.split(given[0])])
            stored, reduced, totals = fold(ahead, size, ahead_tile, slots)
            for n, each in zip(by_row, reduced, strict=True):
                found[n] = each.astype(values[n].dtype)
            for n, each in zip(by_slot, stored, strict=True):
                found[n] = ahead.to_edges(each) if places[n] == "edges" else ahead.flatten(each)
            for n, each in zip(free, totals, strict=True):
                inside[n] = each.astype(closed[n].dtype)
        if far:

            def back_tile(tile: Tile) -> Results:
                (here,) = tile.slots
                turned = tile._replace(
                    rows=tile.sources,
                    sources=tile.rows,
                    slots=tuple(
                        take(v, here)
                        for v, place, used in zip(values, places, stage.used, strict=True)
                        if used and place == "slots"
                    ),
                )
                due = [take(each, turned.rows) for each in given] if sums else [take(given[0], here)]
                grads, _ = pull(gather(values, turned), far, [], due, tile.valid)
                return Results(reduced=tuple(grad.astype(jnp.float32) for grad in grads))

            assert ahead.slots is not None, "only the first stage has edges"
            here = back.from_edges(jnp.minimum(ahead.slots, ahead.num_slots - 1))
            _, reduced, _ = fold(back, size, back_tile, [here])
            for n, each in zip(far, reduced, strict=True):
                found[n] = each.astype(values[n].dtype)
        return None, tuple(found), tuple(inside)

    run = jax.custom_vjp(compute)
    run.defvjp(compute_forward, compute_backward, symbolic_zeros=True)
    return run(arrays, tuple(value for value, _ in operands), tuple(stage.jaxpr.consts))
