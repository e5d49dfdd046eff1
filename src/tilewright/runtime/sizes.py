"""Sizes of an engine: the number of pages, and the longest context that it serves.

With a memory fraction the pool takes free memory, but never more than all slots can fill. The context is the smallest of the
model's context, the requested one, and the positions of the pages.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from tilewright.parallel.mesh import min_over_processes
from tilewright.runtime.automaton_table import table_bytes
from tilewright.runtime.interfaces import Drafter
from tilewright.runtime.layout import Layout, look_ahead
from tilewright.runtime.memory import amount, free_bytes, held_bytes, is_quantised, step_bytes
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.placement import part_of
from tilewright.runtime.programs import allocate_caches, makes_masks, masked_width, outside_pages
from tilewright.runtime.shapes import ShapeTable
from tilewright.runtime.state import Target

MATRICES = {
    "auto": "quantised as in their file",
    "int8": "in 8 bits",
    "int4": "in 4 bits or those of their file",
    "fp8": "in FP8",
}
"""Names of the weight formats in the description of an engine's memory."""
FEWEST_SNAPSHOTS = 4
"""Least default number of snapshots of states."""
LOGITS = 4
"""Float32 arrays of all logits that a program may hold at once: raw, scaled, as probabilities, and as sortable integers."""


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine.

    Attributes:
        table: declared shapes.
        pages, page_size: number of pages of the pool, and positions of a page.
        full: pages that all slots together can fill.
        context: the most positions of a request.
        longest: the most positions that the model and the options allow, regardless of the pages.
        widest: number of tokens in the widest block.
        page_bytes: bytes of a page of every group of layers on each device.
        layout: layout with the pages of all groups of layers.
        held_bytes: bytes of all pages on each device.
        row_bytes: bytes of a row, or a snapshot, of the states outside of pages; 0 without such states.
        automata_bytes: bytes of tables of automata on each device once a request has one; 0 without constraints.
        free: bytes that were free on each device when the pool was sized; None if its size was not derived from free memory.
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
    """Returns the most positions of a request, prompt and new tokens.

    Args:
        longest: the most positions that the model and the options allow.
        capacity: positions of a slot; nothing is written behind them.
        held: positions of all pages.
        widest: tokens in a block, which is written as a whole, even behind a request's last position.

    Raises:
        ValueError: the pages hold fewer than two positions, a token and the next one, and a block.
    """
    context = min(longest, capacity, held if held >= capacity else held - widest)
    if context < 2:
        raise ValueError(f"expected pages for at least {2 + widest} positions, found pages for {held}")
    return context


def pages_within(budget: int, page_bytes: int, most: int) -> int:
    """Returns the number of pages that fit into a budget, at most `most`."""
    return max(0, min(most, budget // page_bytes if page_bytes else most))


def state_bytes(target: Target, drafter: Drafter | None, layout: Layout, dtype: Any) -> int:
    """Returns the bytes of all caches on each device."""
    part = part_of(target)
    state = jax.eval_shape(lambda: allocate_caches(part, layout, drafter, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def temporary_bytes(target: Target, table: ShapeTable, widest: int) -> int:
    """Estimates the bytes of temporary buffers of programs on each device: logits, and activations between two layers.

    Args:
        widest: the most tokens of a row in a round.
    """
    config = target.config
    devices = 1 if target.mesh is None else target.mesh.size
    tokens = max(table.chunks[-1], table.batches[-1] * widest)
    # Passes over canvases compute the logits of one row at a time, and prefills compute none.
    logits = LOGITS * (tokens if config.canvas is None else config.canvas.length) * config.vocab_size * 4
    layer = tokens * (4 * config.hidden_size + 3 * config.mlp_columns) * 4
    return (logits + layer) // devices


@dataclass(frozen=True)
class PoolBytes:
    """Calculator of the bytes of pools, over all groups of layers.

    Attributes:
        batch, capacity, page_size, snapshots: see `layout.Layout`.
        ahead: see `layout.window_pages`.
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
        """Bytes of one page in every group."""
        return self.bytes_of(self.layout(2)) - self.bytes_of(self.layout(1))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or a snapshot, of the target's states outside of pages."""
        if self.target.config.delta is None:
            return 0
        one = self.layout(1)
        return self.bytes_of(replace(one, snapshots=one.snapshots + 1)) - self.bytes_of(one)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything outside of pages."""
        return self.bytes_of(self.layout(1)) - self.page_bytes

    def within(self, budget: int, most: int) -> int:
        """Returns the number of pages that fit into a budget, at most `most`.

        From some number on, layers with a window need no more pages; below it, they have as many as the other layers.
        """
        fewest = pages_within(budget, self.page_bytes, most)
        one = self.layout(1)
        whole = self.layout(most)
        plain = self.bytes_of(replace(one, pages=2)) - self.bytes_of(one)
        windows = self.bytes_of(whole) - self.fixed_bytes - most * plain
        return max(fewest, pages_within(budget - windows, plain, most))


def engine_sizes(target: Target, drafter: Drafter | None, dtype: Any, options: EngineOptions) -> EngineSizes:
    """Computes the sizes of an engine for a loaded model.

    Raises:
        ValueError: an invalid option, or too little memory for the pages of a single request.
    """
    model_context = target.config.max_position_embeddings
    if options.context is not None and options.context > model_context:
        raise ValueError(f"expected a context of at most {model_context}, the model's, found {options.context}")
    longest = min(model_context, options.context or model_context)
    masked = masked_width(target, dtype) if options.constraints else 1
    widest = (target.block_length or masked) if drafter is None else drafter.block_size
    beyond = 0 if drafter is None else drafter.beyond_windows
    table = options.shapes(longest)
    capacity = table.capacities[-1]
    size = options.page_size
    full = table.batches[-1] * capacity // size
    ahead = look_ahead(table.chunks[-1], widest) + beyond
    pool = PoolBytes(target, drafter, dtype, table.batches[-1], capacity, size, ahead)
    pool = replace(pool, snapshots=snapshots_for(pool, options))
    fixed = pool.fixed_bytes
    each = pool.page_bytes
    pages = full if options.pages is None else options.pages
    free = None
    automata = table_bytes(table.batches[-1], target.config.vocab_size)
    automata *= options.constraints and makes_masks(target)
    if options.pages is None and options.memory_fraction is not None:
        free = min_over_processes(target.mesh, free_bytes(None if target.mesh is None else target.mesh.devices.flat))
        nodes = 0 if drafter is None else drafter.nodes
        other = fixed + temporary_bytes(target, table, max(widest, nodes)) + automata
        pages = pool.within(int(options.memory_fraction * free) - other, full)
        if pages * size < min(capacity, size + widest):
            raise ValueError(
                f"too little memory for the KV cache: {amount(free)} are free, of which a fraction of "
                f"{options.memory_fraction:g} may be used; programs need about {amount(other)} of this, and a page of {size} "
                f"positions {amount(each)}. Use a larger --memory fraction, fewer --slots or a shorter --context."
            )
    context = served_context(longest, capacity, pages * size, widest)
    shapes = options.shapes(context)
    layout = replace(pool, batch=shapes.batches[-1], capacity=shapes.capacities[-1]).layout(pages)
    held = state_bytes(target, drafter, layout, dtype) - fixed
    return EngineSizes(shapes, pages, size, full, context, longest, widest, each, layout, held, pool.row_bytes, automata, free)


def snapshots_for(pool: PoolBytes, options: EngineOptions) -> int:
    """Returns the number of snapshots of states: the requested number, or a default where the prefix cache can use them."""
    if pool.target.config.delta is None or options.prefix_cache is False:
        return 0
    if options.state_snapshots is not None:
        return options.state_snapshots
    with_one = replace(pool, snapshots=1).layout(1)
    return 0 if outside_pages(pool.target, with_one, pool.drafter, pool.dtype) else max(FEWEST_SNAPSHOTS, pool.batch)


def sizes_line(sizes: EngineSizes, weights: Any, target: Target, dtype: str, kv_dtype: str, model_context: int) -> str:
    """Describes the memory of an engine, and the options that change it, in one line.

    Args:
        weights: all loaded weights.
        kv_dtype: dtype of the target's KV cache.
        model_context: the model's context.
    """
    pages = f"{sizes.pages:,} pages of {sizes.page_size} positions"
    if sizes.pages < sizes.full:
        pages += f" (all slots could fill {sizes.full:,})"
    free = "" if sizes.free is None else f" of {amount(sizes.free)} free"
    if sizes.context == model_context:
        why = "the model's context"
    elif sizes.context < sizes.longest:
        why = f"limited by the {'pages' if sizes.pages < sizes.full else 'shapes'}, the model's is {model_context:,}"
    else:
        why = f"as requested, the model's is {model_context:,}"
    held = f"in {dtype} (--dtype, --weights)"
    if target.ops.weights not in ("auto", "dequantised") or is_quantised(weights.target):
        held = f"with matrices {MATRICES[target.ops.weights]} (--weights {target.ops.weights}), the rest in {dtype} (--dtype)"
    layout = sizes.layout
    states = ""
    if sizes.row_bytes:
        rows = f"{layout.batch} rows and {layout.snapshots} snapshots"
        states = f"; states {amount(sizes.row_bytes * layout.state_rows)}: {rows} (--slots, --memory state_snapshots)"
    automata = (
        f"; automata of grammars {amount(sizes.automata_bytes)} (--compile structured_output)" if sizes.automata_bytes else ""
    )
    return (
        f"weights {amount(held_bytes(weights))} {held}, of which a plain step reads {amount(step_bytes(weights.target))}; "
        f"KV cache {amount(sizes.held_bytes)}{free} in {kv_dtype} (--kv-dtype): {pages} (--memory fraction, --memory pages, "
        f"--slots){states}{automata}; "
        f"context {sizes.context:,}, {why} (--context)"
    )
