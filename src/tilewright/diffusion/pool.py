"""Slots of a diffusion language model on the device, and the programs that denoise some of their rows.

A dispatch takes the rows of some slots out of the pool, as long as the longest of them needs, takes denoising steps, and puts
them back; where these are all slots at their whole length, it works in place. A row that is new is put into its slot by the
first dispatch that runs it. What a row asks for comes with each dispatch, for the host knows it anyway.

Legend: B slots, b rows of a dispatch, S positions of a slot, s of a dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from tilewright.diffusion.model import DiffusionModel
from tilewright.diffusion.options import Denoising, RowOptions, row_options
from tilewright.diffusion.programs import DiffusionKey, DiffusionPrograms, DiffusionShape, DiffusionTable
from tilewright.diffusion.state import DiffusionState
from tilewright.diffusion.steps import run_steps
from tilewright.models.decoder import DecoderParams
from tilewright.runtime.placement import WHOLE, on


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """State of every slot; the fields are those of `DiffusionState`."""

    tokens: Any
    changed: Any
    step: Any
    block_step: Any
    block_start: Any
    done: Any
    caches: Any


class DispatchInputs(NamedTuple):
    """Rows and steps of a dispatch.

    Attributes:
        slots: where its rows are, all different, int32 `[b]`; those of a whole pool are in order.
        running: which of them have a part in it; the others fill the shape, `[b]`.
        fresh: which of them begin, with `tokens`, `[b]`.
        tokens: `[b, s]`: the prompt of a fresh row, and masks.
        start, stop: where the response begins and ends, `[b]`.
        limit: steps at most.
    """

    slots: Any
    running: Any
    fresh: Any
    tokens: Any
    start: Any
    stop: Any
    options: RowOptions
    limit: Any


class DispatchOutputs(NamedTuple):
    """Report of a dispatch, as the host reads it.

    Attributes:
        reports: of its steps, `DenoisingStepInfo.packed`, `[most, b, _]`.
        tokens: `[b, s]`.
        block_start: where each row's current block begins, `[b]`: what stands before it is committed.
    """

    reports: Any
    tokens: Any
    block_start: Any


def taken(pool: Pool, slots: Int[Array, " b"], positions: int) -> Pool:
    """The rows of some slots, so many positions of each."""
    rows = [slots[n] for n in range(slots.shape[0])]

    def of(x: Array) -> Array:
        sizes = (1, *((min(positions, x.shape[1]), *x.shape[2:]) if x.ndim > 1 else ()))
        return jnp.concatenate([jax.lax.dynamic_slice(x, (row, *[0] * (x.ndim - 1)), sizes) for row in rows])

    return jax.tree.map(of, pool)


def put_back(pool: Pool, rows: Pool, slots: Int[Array, " b"]) -> Pool:
    """The pool with these rows in their slots. DONATES pool."""

    def of(x: Array, new: Array) -> Array:
        for n in range(slots.shape[0]):
            x = jax.lax.dynamic_update_slice(x, new[n : n + 1], (slots[n], *[0] * (x.ndim - 1)))
        return x

    return jax.tree.map(of, pool, rows)


def begun(rows: Pool, inputs: DispatchInputs) -> DiffusionState:
    """The rows of a dispatch at its beginning: fresh ones with nothing done, and those that fill it with nothing to do."""

    def where_fresh(new: Any, old: Array) -> Array:
        return jnp.where(inputs.fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return DiffusionState(
        tokens=where_fresh(inputs.tokens, rows.tokens),
        start=inputs.start,
        stop=inputs.stop,
        step=where_fresh(0, rows.step),
        block_step=where_fresh(0, rows.block_step),
        block_start=where_fresh(inputs.start, rows.block_start),
        changed=where_fresh(False, rows.changed),
        done=where_fresh(False, rows.done) | ~inputs.running,
        options=inputs.options,
        caches=rows.caches,
    )


class PoolPrograms(DiffusionPrograms):
    """A pool, and a program for each declared number of rows, positions, response and block.

    Args:
        modes: those that requests may ask for.
        context: the most positions of one.
    """

    def __init__(self, model: DiffusionModel, table: DiffusionTable, modes: Sequence[str], context: int):
        of = model.programs
        super().__init__(of.config, of.ops, of.params, of.dtype, table, of.placement)
        self.kind = {"dense": {*modes} == {"dense"}, "narrow": "dual" in modes, "guided": False}
        self.context = context
        slots = table.batches[-1]
        positions = self.sizes[-1].positions
        self.whole = DiffusionShape(slots, positions, 0, 0, **self.kind)

    @property
    def sizes(self) -> list[DiffusionShape]:
        """All shapes of dispatches, the largest at the end."""
        shapes = self.table.shapes(self.context, ("sparse",))
        return sorted((replace(shape, **self.kind) for shape in shapes), key=lambda each: (each.positions, each.batch))

    def shape(self, lengths: Sequence[int], requests: Sequence[Denoising]) -> DiffusionShape:
        """The smallest shape that runs requests with prompts of these lengths. Raises a `ValueError` where none does."""
        return replace(self.table.shape(len(requests), lengths, requests), **self.kind)

    @property
    def every(self) -> list[DiffusionKey]:
        """The keys of all programs."""
        return [DiffusionKey("pool", self.whole), *(DiffusionKey("turn", shape) for shape in self.sizes)]

    @staticmethod
    def shared(key: DiffusionKey) -> DiffusionKey:
        return key

    def pool(self) -> Pool:
        """An empty one."""
        slots = self.whole.batch
        positions = self.whole.positions
        numbers = jnp.zeros(slots, jnp.int32)
        return Pool(
            tokens=jnp.full((slots, positions), self.config.mask_token_id, jnp.int32),
            changed=jnp.zeros((slots, positions), bool),
            step=numbers,
            block_step=numbers,
            block_start=numbers,
            done=jnp.ones(slots, bool),
            caches=self.allocate(self.whole),
        )

    def empty_inputs(self, shape: DiffusionShape) -> DispatchInputs:
        """One in which nothing runs, for its shapes and for what fills up; arrays of the host."""
        slots = np.arange(shape.batch, dtype=np.int32)
        zeros = np.zeros(shape.batch, np.int32)
        none = np.zeros(shape.batch, bool)
        tokens = np.full((shape.batch, shape.positions), self.config.mask_token_id, np.int32)
        options = row_options([Denoising(1)] * shape.batch, shape.block)
        return DispatchInputs(slots, none, none.copy(), tokens, zeros, zeros.copy(), options, np.int32(0))

    def compile(self, key: DiffusionKey) -> jax.stages.Compiled:
        if key.name == "pool":
            placed = None
            shapes = jax.eval_shape(self.pool)
            if self.placement is not None:
                specs = replace(jax.tree.map(lambda _: WHOLE, shapes), caches=self.placed(shapes.caches))
                placed = on(self.placement.mesh, specs)
            return jax.jit(self.pool, out_shardings=placed).lower().compile()
        run = partial(self.run, key.shape)
        run.__name__ = "turn"  # type: ignore[attr-defined]
        pool = jax.eval_shape(self.pool)
        run = run if self.placement is None else self.sharded(run, pool)
        return self.compile_run(run, pool, self.empty_inputs(key.shape))

    def run(
        self, shape: DiffusionShape, params: DecoderParams, pool: Pool, inputs: DispatchInputs
    ) -> tuple[Pool, DispatchOutputs]:
        """A dispatch. DONATES pool."""
        in_place = (shape.batch, shape.positions) == (self.whole.batch, self.whole.positions)
        rows = pool if in_place else taken(pool, inputs.slots, shape.positions)
        state, reports = run_steps(self.denoiser(shape), params, begun(rows, inputs), inputs.limit)
        after = Pool(**{name: getattr(state, name) for name in vars(pool)})
        outputs = DispatchOutputs(reports, state.tokens, state.block_start)
        return after if in_place else put_back(pool, after, inputs.slots), outputs
