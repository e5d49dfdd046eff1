"""How large an engine is: the pages of its pool, and the context that it serves.

The pool takes what memory is free, if it is told to, but never more than all slots can fill. A request gets the smallest of the
model's context, of the one that was asked for, and of what the pages hold.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilewright.parallel.mesh import least_bytes
from tilewright.runtime.automaton_table import table_bytes
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.layout import Layout, look_ahead
from tilewright.runtime.memory import amount, free_bytes, held_bytes, step_bytes
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.placement import part_of
from tilewright.runtime.programs import allocate_caches, makes_masks, masked_width, outside_pages
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import Target

MATRICES = {"int8": "in 8 bits", "int4": "in 4 bits or those of their file", "fp8": "in FP8"}
"""Words on a format of matrices."""
FEWEST_SNAPSHOTS = 4
"""Of states, unless another number is asked for."""
LOGITS = 4
"""Float32 arrays of all logits of a program that may be there at once: themselves, scaled, as probabilities, and in order."""


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of an engine.

    Attributes:
        table: the declared shapes.
        pages, page_size: of the pool.
        full: pages that all slots together can fill.
        context: the most positions of a request.
        longest: the most that the model or the options allow, whatever the pages hold.
        widest: tokens in the widest block.
        page_bytes: that a page of every group of layers takes on each device.
        layout: pages of all groups of layers.
        held_bytes: that all pages take on each device.
        row_bytes: that a row, or a snapshot, of states takes that lie in no page; 0 without such.
        automata_bytes: that tables of automata take on each device once a request has one; 0 where none may have a constraint.
        free: bytes that were free on each device when the pool was sized; None where it takes no more than was asked for.
    """

    table: ShapeTable
    pages: int
    page_size: int
    full: int
    context: int
    longest: int
    widest: int
    page_bytes: int
    layout: Layout
    held_bytes: int
    row_bytes: int = 0
    automata_bytes: int = 0
    free: int | None = None


def served_context(longest: int, capacity: int, held: int, widest: int) -> int:
    """The most positions of a request, prompt and new tokens.

    Args:
        longest: that the model and the options allow.
        capacity: positions of a slot, behind which nothing is written.
        held: positions of all pages.
        widest: tokens in a block, which is written in one piece: behind a request's last position too.

    Raises:
        ValueError: not even two positions, a token and the one behind it.
    """
    context = min(longest, capacity, held if held >= capacity else held - widest)
    if context < 2:
        raise ValueError(f"expected pages for at least {2 + widest} positions, found room for {held}")
    return context


def pages_within(budget: int, page_bytes: int, most: int) -> int:
    """Pages for which there is memory, and no more than can be filled."""
    return max(0, min(most, budget // page_bytes if page_bytes else most))


def state_bytes(target: Target, drafter: Drafter | None, layout: Layout, dtype: Any) -> int:
    """Bytes of all caches on each device."""
    part = part_of(target)
    state = jax.eval_shape(lambda: allocate_caches(part, layout, drafter, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def temporary_bytes(target: Target, table: ShapeTable, widest: int) -> int:
    """About what programs compute with besides weights and caches, on each device: logits, and what is between two layers."""
    config = target.config
    devices = 1 if target.mesh is None else target.mesh.size
    tokens = max(table.chunks[-1], table.batches[-1] * widest)
    logits = LOGITS * tokens * config.vocab_size * 4
    layer = tokens * (4 * config.hidden_size + 3 * config.mlp_columns) * 4
    return (logits + layer) // devices


@dataclass(frozen=True)
class PoolBytes:
    """Bytes that pages take, of all groups of layers.

    Attributes:
        batch, capacity, page_size: of layouts.
        ahead: see `layout.look_ahead`.
        snapshots: see `Layout`.
    """

    target: Target
    drafter: Drafter | None
    dtype: Any
    batch: int
    capacity: int
    page_size: int
    ahead: int
    snapshots: int = 0

    def layout(self, pages: int) -> Layout:
        whole = Layout(self.batch, self.capacity, pages, self.page_size, snapshots=self.snapshots)
        return whole.with_windows(self.target.config.windows, self.ahead)

    def bytes_of(self, layout: Layout) -> int:
        return state_bytes(self.target, self.drafter, layout, self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of every group."""
        return self.bytes_of(self.layout(2)) - self.bytes_of(self.layout(1))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or a snapshot, of the target's states that lie in no page."""
        if self.target.config.delta is None:
            return 0
        one = self.layout(1)
        return self.bytes_of(replace(one, snapshots=one.snapshots + 1)) - self.bytes_of(one)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of what is not in pages."""
        return self.bytes_of(self.layout(1)) - self.page_bytes

    def within(self, budget: int, most: int) -> int:
        """Pages for which there is memory, and no more than can be filled.

        Layers with a window need no more pages from some number on; where there are fewer, as many as the others.
        """
        fewest = pages_within(budget, self.page_bytes, most)
        one = self.layout(1)
        whole = self.layout(most)
        plain = self.bytes_of(replace(one, pages=2)) - self.bytes_of(one)
        windows = self.bytes_of(whole) - self.fixed_bytes - most * plain
        return max(fewest, pages_within(budget - windows, plain, most))


def engine_sizes(target: Target, drafter: Drafter | None, dtype: Any, options: EngineOptions) -> EngineSizes:
    """The sizes of an engine for a model that is loaded.

    Raises:
        ValueError: there is no memory for the pages of a single request, or a wrong option.
    """
    own = target.config.max_position_embeddings
    if options.context is not None and options.context > own:
        raise ValueError(f"expected a context of at most {own}, the model's, found {options.context}")
    longest = min(own, options.context or own)
    masked = masked_width(target, dtype) if options.constraints else 1
    widest = masked if drafter is None else drafter.block_size
    table = options.shapes(longest)
    capacity = table.capacities[-1]
    size = options.page_size
    full = table.batches[-1] * capacity // size
    pool = PoolBytes(target, drafter, dtype, table.batches[-1], capacity, size, look_ahead(table.chunks[-1], widest))
    pool = replace(pool, snapshots=snapshots_for(pool, options))
    fixed = pool.fixed_bytes
    each = pool.page_bytes
    pages = full if options.pages is None else options.pages
    free = None
    automata = table_bytes(table.batches[-1], target.config.vocab_size)
    automata *= options.constraints and makes_masks(target)
    if options.pages is None and options.memory_fraction is not None:
        free = least_bytes(target.mesh, free_bytes(None if target.mesh is None else target.mesh.devices.flat))
        besides = fixed + temporary_bytes(target, table, widest) + automata
        pages = pool.within(int(options.memory_fraction * free) - besides, full)
        if pages * size < min(capacity, size + widest):
            raise ValueError(
                f"no memory for keys and values: of {amount(free)} that are free {options.memory_fraction:g} may be taken, "
                f"programs compute with about {amount(besides)} of that, and a page of {size} positions takes "
                f"{amount(each)}; a larger --memory-fraction, fewer --slots or a shorter --context need less"
            )
    context = served_context(longest, capacity, pages * size, widest)
    shapes = options.shapes(context)
    layout = replace(pool, batch=shapes.batches[-1], capacity=shapes.capacities[-1]).layout(pages)
    held = state_bytes(target, drafter, layout, dtype) - fixed
    return EngineSizes(shapes, pages, size, full, context, longest, widest, each, layout, held, pool.row_bytes, automata, free)


def snapshots_for(pool: PoolBytes, options: EngineOptions) -> int:
    """Snapshots of states that an engine keeps: those that were asked for, where a prefix cache has a use for them."""
    if pool.target.config.delta is None or options.prefix_cache is False:
        return 0
    if options.state_snapshots is not None:
        return options.state_snapshots
    with_one = replace(pool, snapshots=1).layout(1)
    return 0 if outside_pages(pool.target, with_one, pool.drafter, pool.dtype) else max(FEWEST_SNAPSHOTS, pool.batch)


def sizes_line(sizes: EngineSizes, weights: Any, target: Target, dtype: str, kv_dtype: str, own: int) -> str:
    """Memory that an engine takes, and what would change it, on one line.

    Args:
        weights: all that are loaded.
        kv_dtype: of the target's keys and values.
        own: the model's context.
    """
    pages = f"{sizes.pages:,} pages of {sizes.page_size} positions"
    if sizes.pages < sizes.full:
        pages += f" of the {sizes.full:,} that all slots could fill"
    of = "" if sizes.free is None else f" of {amount(sizes.free)} that are free"
    if sizes.context == own:
        why = "the model's"
    elif sizes.context < sizes.longest:
        why = f"what the {'pages' if sizes.pages < sizes.full else 'shapes'} hold; the model's is {own:,}"
    else:
        why = f"as asked for; the model's is {own:,}"
    held = f"in {dtype} (--dtype, --weights)"
    if target.ops.weights != "auto":
        held = f"with matrices {MATRICES[target.ops.weights]} (--weights {target.ops.weights}), the rest in {dtype} (--dtype)"
    layout = sizes.layout
    states = ""
    if sizes.row_bytes:
        rows = f"{layout.batch} rows and {layout.snapshots} snapshots"
        states = f"; states {amount(sizes.row_bytes * layout.state_rows)}: {rows} (--slots, --state-snapshots)"
    automata = f"; automata of grammars {amount(sizes.automata_bytes)} (--structured-output)" if sizes.automata_bytes else ""
    return (
        f"weights {amount(held_bytes(weights))} ({amount(step_bytes(weights.target))} of them read in a plain step) {held}; "
        f"keys and values {amount(sizes.held_bytes)} in {kv_dtype} (--kv-dtype){of}: {pages} (--memory-fraction, --pages, "
        f"--slots){states}{automata}; "
        f"context {sizes.context:,}, {why} (--context)"
    )
