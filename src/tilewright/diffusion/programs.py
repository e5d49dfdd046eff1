"""Compiled programs of denoising, over slots with paged caches.

A dispatch gathers the rows of some slots, and the contents of their pages up to the length of the longest row; runs denoising
steps; and scatters all of it back. The first dispatch of a row initialises it. Every dispatch gets the options of its rows from
the host.

A guided request needs caches of two sequences. The second sequence, whose prompt is masked, has pages of a separate group.

Legend: B slots, b rows of a dispatch, S positions of a slot, s of a dispatch, P pages, E positions of a page, M pages of a row,
G groups of pages.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from tilewright.compiled.store import Store
from tilewright.diffusion.options import FAR, Denoising, RowOptions, one_row, row_options
from tilewright.diffusion.state import DiffusionState
from tilewright.diffusion.steps import Denoiser, run_steps
from tilewright.diffusion.window import BUCKETS, LayerCache, allocate, cache_widths
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.stack import TRACED_ONCE
from tilewright.runtime.automata import ALL, words
from tilewright.runtime.layout import LARGEST_PAGE, Layout, WindowPages
from tilewright.runtime.logprobs import MOST_ALTERNATIVES, Logprobs
from tilewright.runtime.placement import compile_allocate, compile_step
from tilewright.runtime.state import Target


@dataclass(frozen=True)
class DiffusionShape:
    """Sizes that a program is compiled for.

    Attributes:
        batch: number of rows, without those that guidance adds.
        positions: positions of a row, prompt and response together.
        response, block: lengths of the longest response and block.
        dense: whether every row computes everything in every step, without caches.
        narrow: whether some rows may compute their blocks only.
        guided: whether some rows are guided.
    """

    batch: int
    positions: int
    response: int
    block: int
    dense: bool
    narrow: bool
    guided: bool


@dataclass(frozen=True)
class DiffusionTable:
    """Declared shapes; each request runs in the smallest one that holds it.

    Attributes:
        batches, positions, responses, blocks: numbers of rows, and lengths, in ascending order. A block is never longer than
            the response; `options.FAR` stands for a block of the whole response.
        buckets: numbers of salient positions with a program branch of their own, besides that for all positions.
    """

    batches: tuple[int, ...] = (1, 4)
    positions: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    responses: tuple[int, ...] = (64, 128, 256, 512, 1024)
    blocks: tuple[int, ...] = (8, 32, 128, FAR)
    buckets: tuple[int, ...] = BUCKETS

    def __post_init__(self) -> None:
        for name, sizes in vars(self).items():
            if (not sizes and name != "buckets") or list(sizes) != sorted(set(sizes)) or (sizes and sizes[0] < 1):
                raise ValueError(f"expected {name} to be sizes of at least 1 in ascending order, found {sizes}")
        if self.responses[-1] >= self.positions[-1]:
            raise ValueError(
                f"expected responses shorter than the most positions {self.positions[-1]}, found {self.responses[-1]}"
            )

    def shape(self, rows: int, lengths: Sequence[int], requests: Sequence[Denoising]) -> DiffusionShape:
        """Returns the smallest shape for prompts of these lengths.

        Raises:
            ValueError: no shape is large enough; the message names the size and the given value.
        """

        def least(name: str, sizes: tuple[int, ...], needed: int) -> int:
            found = next((size for size in sizes if size >= needed), None)
            if found is None:
                raise ValueError(f"expected {name} of at most {sizes[-1]}, the largest declared, found {needed}")
            return found

        longest = max(length + request.new_tokens for length, request in zip(lengths, requests, strict=True))
        response = least("responses", self.responses, max(request.new_tokens for request in requests))
        return DiffusionShape(
            batch=least("rows", self.batches, rows),
            positions=least("prompt and response together", self.positions, max(longest, response + 1)),
            response=response,
            block=min(least("blocks", self.blocks, max(request.block for request in requests)), response),
            dense=all(request.computes_all for request in requests),
            narrow=any(request.mode == "dual" for request in requests),
            guided=any(request.guidance > 0 for request in requests),
        )

    def shapes(
        self, positions: int, modes: Sequence[str], guided: bool = False, suffix_window: bool = False
    ) -> Iterator[DiffusionShape]:
        """Returns all shapes that batches of requests in some of these modes may run in, up to that many positions.

        Args:
            guided: whether some requests may be guided.
            suffix_window: whether some may have a suffix window, so that dense steps need caches, too.
        """

        def needed(sizes: tuple[int, ...], least: int, most: int) -> tuple[int, ...]:
            """Returns the smallest sizes for all numbers from `least` to `most`."""
            return tuple(size for n, size in enumerate(sizes) if size >= least and (n == 0 or sizes[n - 1] < most))

        kinds = {"dense": (True, False), "prefix": (False, False), "dual": (False, True), "sparse": (False, False)}
        with_caches = ["prefix"] if suffix_window and "dense" in modes else []  # mode with the programs for suffix windows
        offered = product(dict.fromkeys(kinds[mode] for mode in (*modes, *with_caches)), (False, True) if guided else (False,))
        for batch, response, (kind, guide) in product(self.batches, needed(self.responses, 1, positions - 1), [*offered]):
            for size in needed(self.positions, response + 1, max(positions, response + 1)):
                for block in needed(self.blocks, 1, response):
                    yield DiffusionShape(batch, size, response, min(block, response), *kind, guide)


@dataclass(frozen=True)
class DiffusionKey:
    """Key of a program: "allocate", or "steps" for a shape."""

    name: str
    shape: DiffusionShape | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoisingSlots:
    """State of all slots; the fields are those of `DiffusionState`.

    Attributes:
        target_cache: for each group and layer, the bits of `LayerCache`s in pages, `[P, E, F]`; empty if every step is dense.
    """

    tokens: Any
    changed: Any
    step: Any
    block_step: Any
    block_start: Any
    done: Any
    logprobs: Any
    target_cache: Any


ROW_FIELDS = ("tokens", "changed", "step", "block_step", "block_start", "done", "logprobs")


class DispatchInputs(NamedTuple):
    """Rows and steps of a dispatch.

    Attributes:
        slots: slots of its rows, all different, int32 `[b]`.
        table: block table, int32 `[G, b, M]`.
        running: rows that run; the others are padding, `[b]`.
        fresh: rows that start, with `tokens`, `[b]`.
        tokens: `[b, s]`: the prompt of a fresh row, and masks.
        start, stop: first position of the response, and the position behind it, `[b]`.
        limit: the most steps.
        wants_logprobs: rows that want log-probabilities, `[b]`.
        allowed: bits of the tokens that rows from left to right may commit next, uint32 `[b, ceil(V / 32)]`.
    """

    slots: Any
    table: Any
    running: Any
    fresh: Any
    tokens: Any
    start: Any
    stop: Any
    options: RowOptions
    limit: Any
    wants_logprobs: Any
    allowed: Any


class DispatchOutputs(NamedTuple):
    """Outputs of a dispatch, for the host.

    Attributes:
        reports: reports of its steps, `DenoisingStepInfo.packed`, `[most, b, _]`.
        tokens: `[b, s]`.
        block_start: first position of each row's current block, `[b]`; tokens before it are committed.
        logprobs: log-probabilities of each position (`runtime.logprobs.Logprobs`); None if no row can want them.
    """

    reports: Any
    tokens: Any
    block_start: Any
    logprobs: Any = None


def gather_pages(pages: Array, table: Int[Array, "b M"], positions: int, like: jax.ShapeDtypeStruct) -> Array:
    """Gathers the first positions of some rows, `[b, s, ...]`, in the form of `like`; undefined for missing pages."""
    rows = jnp.take(pages, jnp.maximum(table, 0), axis=0).reshape(table.shape[0], -1, pages.shape[-1])[:, :positions]
    return jax.lax.bitcast_convert_type(rows, like.dtype).reshape(*rows.shape[:2], *like.shape[2:])


def scatter_pages(pages: Array, table: Int[Array, "b M"], rows: Array) -> Array:
    """Writes the first positions of some rows, `[b, s, ...]`, to their pages."""
    size = pages.shape[1]
    flat = jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:2], -1), pages.dtype)
    missing = table.shape[1] * size - flat.shape[1]
    whole = jnp.pad(flat, ((0, 0), (0, missing), (0, 0))).reshape(*table.shape, size, pages.shape[-1])
    return pages.at[jnp.where(table < 0, pages.shape[0], table)].set(whole, mode="drop")


def initial_state(rows: dict[str, Any], caches: Any, inputs: DispatchInputs) -> DiffusionState:
    """Returns the rows of a dispatch at its start: fresh rows are initialised, padding rows are done."""

    def where_fresh(new: Any, old: Array) -> Array:
        return jnp.where(inputs.fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return DiffusionState(
        tokens=where_fresh(inputs.tokens, rows["tokens"]),
        start=inputs.start,
        stop=inputs.stop,
        step=where_fresh(0, rows["step"]),
        block_step=where_fresh(0, rows["block_step"]),
        block_start=where_fresh(inputs.start, rows["block_start"]),
        changed=where_fresh(False, rows["changed"]),
        done=where_fresh(False, rows["done"]) | ~inputs.running,
        options=inputs.options,
        caches=caches,
        wants_logprobs=inputs.wants_logprobs if rows["logprobs"] is not None else None,
        logprobs=rows["logprobs"],
        allowed=inputs.allowed,
    )


def guided_state(state: DiffusionState, mask: int) -> DiffusionState:
    """Returns a batch twice as large, with masked prompts in its second half; the caches already have both halves."""
    doubled = jax.tree.map(lambda x: jnp.concatenate([x, x]), replace(state, caches=()))
    half = len(state.tokens)
    hidden = jnp.where(jnp.arange(state.tokens.shape[1]) < state.start[:, None], mask, state.tokens)
    return replace(doubled, tokens=doubled.tokens.at[half:].set(hidden), caches=state.caches)


@dataclass(frozen=True)
class RequestKinds:
    """Kinds of requests that programs are made for.

    Attributes:
        dense: whether every request computes everything in every step.
        narrow: whether some may compute their blocks only.
        guided: whether some may be guided.
        logprobs: whether some may want log-probabilities.
    """

    dense: bool
    narrow: bool
    guided: bool = False
    logprobs: bool = False

    @property
    def kind(self) -> dict[str, bool]:
        """Fields of shapes."""
        return {"dense": self.dense, "narrow": self.narrow, "guided": self.guided}


class DenoisingPrograms(Store[DiffusionKey]):
    """Programs of one model over slots of one layout: one for each declared number of rows, positions, response and block.

    Attributes:
        target: sizes, operations and devices of the model.
        kinds: kinds of requests.
        context: the most positions of a request.
        layout: layout of the slots and the pages.
    """

    allocate_key = DiffusionKey("allocate")

    def __init__(
        self,
        config: DiffusionConfig,
        target: Target,
        params: DecoderParams,
        dtype: DTypeLike,
        table: DiffusionTable,
        kinds: RequestKinds,
        context: int,
        pages: int | None = None,
        page_size: int = LARGEST_PAGE,
    ):
        """Args: `pages`: number of pages of each group; None for as many as all slots can fill."""
        super().__init__()
        self.config = config
        self.target = target
        self.params = params
        self.dtype = dtype
        self.table = table
        self.kinds = kinds
        self.context = context
        slots = table.batches[-1]
        longest = max(shape.positions for shape in self.shapes)
        size = min(page_size, longest)
        capacity = -(-longest // size) * size
        count = slots * capacity // size if pages is None else pages
        layout = Layout(slots, capacity, count, size)
        self.layout = replace(layout, windows=(WindowPages(FAR, count),)) if kinds.guided else layout

    @property
    def over_processes(self) -> bool:
        """True if several processes share the model."""
        return self.target.mesh is not None and self.target.mesh.is_multi_process

    @property
    def shapes(self) -> list[DiffusionShape]:
        """All shapes of dispatches, the largest last."""
        kind = self.kinds.kind
        shapes = self.table.shapes(self.context, ("sparse",))
        return sorted((replace(shape, **kind) for shape in shapes), key=lambda each: (each.positions, each.batch))

    @property
    def largest(self) -> DiffusionShape:
        """The shape that holds every batch of requests."""
        return max(self.shapes, key=lambda each: (each.batch, each.positions, each.response, each.block))

    def replacing(self, shape: DiffusionShape) -> list[DiffusionShape]:
        """Returns the shapes whose programs can run what a shape holds, that shape first and the largest last."""

        def sizes(each: DiffusionShape) -> tuple[int, ...]:
            return each.batch, each.positions, each.response, each.block

        found = [each for each in self.shapes if all(map(operator.ge, sizes(each), sizes(shape)))]
        return sorted(found, key=lambda each: (each.batch * each.positions, *sizes(each)))

    @property
    def keys(self) -> list[DiffusionKey]:
        """Keys of all programs."""
        return [self.allocate_key, *(DiffusionKey("steps", shape) for shape in self.shapes)]

    def shape(self, lengths: Sequence[int], requests: Sequence[Denoising]) -> DiffusionShape:
        """Returns the smallest shape for requests with prompts of these lengths, or raises a `ValueError`."""
        return replace(self.table.shape(len(requests), lengths, requests), **self.kinds.kind)

    def params_for(self, key: DiffusionKey) -> DecoderParams:
        return self.params

    def denoiser(self, shape: DiffusionShape) -> Denoiser:
        """Returns the constants of a program of a shape."""
        more = int(self.config.shifted)
        return Denoiser(
            config=self.config,
            ops=self.target.ops,
            widths=(shape.block + more if shape.narrow else None, shape.response + more),
            block=shape.block,
            dense=shape.dense,
            guided=shape.guided,
            buckets=self.table.buckets,
            schedule=TRACED_ONCE if self.target.mesh is None else self.target.schedule,
            logprobs=self.kinds.logprobs,
        )

    def allocate(self, target: Target) -> tuple[Any, tuple[()]]:
        """Returns empty pages of each group, for the heads of `target`, which may be a device's part."""
        if self.kinds.dense:
            return (), ()
        widths = cache_widths(target.config)
        # Unsigned integers, since XLA:CPU would convert a whole bfloat16 array to write a few entries.
        bits = jnp.dtype(f"uint{8 * jnp.dtype(self.dtype).itemsize}")

        def layer() -> LayerCache:
            sizes = (self.layout.pages, self.layout.page_size)
            return LayerCache(*(jnp.zeros((*sizes, math.prod(width)), bits) for width in widths))

        return tuple(tuple(layer() for _ in range(target.config.num_layers)) for _ in range(self.layout.groups)), ()

    def empty_state(self, target_cache: Any, nothing: Any = ()) -> DenoisingSlots:
        """Returns empty slots around the caches of the program "allocate"."""
        slots = self.layout.batch
        positions = self.layout.capacity
        numbers = np.zeros(slots, np.int32)
        return DenoisingSlots(
            tokens=np.full((slots, positions), self.config.mask_token_id, np.int32),
            changed=np.zeros((slots, positions), bool),
            step=numbers,
            block_step=numbers.copy(),
            block_start=numbers.copy(),
            done=np.ones(slots, bool),
            logprobs=self.no_logprobs(slots, positions) if self.kinds.logprobs else None,
            target_cache=target_cache,
        )

    def no_logprobs(self, slots: int, positions: int) -> Logprobs:
        """Returns zeros as log-probabilities of positions, on the host."""
        k = min(MOST_ALTERNATIVES, self.config.decoder.vocab_size)
        zeros = np.zeros((slots, positions), np.float32)
        return Logprobs(zeros, np.zeros((*zeros.shape, k), np.int32), np.zeros((*zeros.shape, k), np.float32))

    def compile(self, key: DiffusionKey) -> jax.stages.Compiled:
        if key.name == "allocate":
            return compile_allocate(self.target, self.allocate)
        steps, inputs = self.function(key)
        return compile_step(self.target, steps, self.params, self.allocate, self.empty_state, inputs)

    def function(self, key: DiffusionKey) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the program to compile, `f(params, state, inputs) -> (state, outputs)`, and its abstract inputs."""
        shape = key.shape
        assert shape is not None, "only a program of steps has a shape"

        def steps(
            params: DecoderParams, state: DenoisingSlots, inputs: DispatchInputs
        ) -> tuple[DenoisingSlots, DispatchOutputs]:
            return self.run(shape, params, state, inputs)

        return steps, (self.empty_inputs(shape),)

    def empty_inputs(self, shape: DiffusionShape) -> DispatchInputs:
        """Returns inputs in which no row runs, as host arrays, for their shapes and as padding."""
        slots = np.arange(shape.batch, dtype=np.int32)
        zeros = np.zeros(shape.batch, np.int32)
        none = np.zeros(shape.batch, bool)
        tokens = np.full((shape.batch, shape.positions), self.config.mask_token_id, np.int32)
        table = np.full((self.layout.groups, shape.batch, -(-shape.positions // self.layout.page_size)), -1, np.int32)
        options = row_options([Denoising(1)] * shape.batch, shape.block)
        rows = (none, none.copy(), tokens, zeros, zeros.copy(), options)
        return DispatchInputs(slots, table, *rows, np.int32(0), none.copy(), self.all_allowed(shape.batch))

    def all_allowed(self, rows: int) -> np.ndarray:
        """Returns bits that allow every token, `[rows, ceil(V / 32)]`."""
        return np.full((rows, words(self.config.decoder.vocab_size)), ALL, np.uint32)

    def inputs(
        self, shape: DiffusionShape, prompts: Sequence[Sequence[int]], requests: Sequence[Denoising], fresh: Sequence[bool]
    ) -> DispatchInputs:
        """Returns the inputs of a program for these rows; the caller sets steps, slots and pages."""
        empty = self.empty_inputs(shape)
        for row, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            empty.tokens[row, : len(prompt)] = prompt
            empty.start[row] = len(prompt)
            empty.stop[row] = len(prompt) + request.new_tokens
        empty.running[: len(prompts)] = True
        empty.fresh[: len(prompts)] = fresh
        padded = [*requests, *[Denoising(1)] * (shape.batch - len(prompts))]
        options = jax.tree.map(
            lambda *each: np.concatenate(each), *(one_row(each, shape.block, self.config.eos_token_ids) for each in padded)
        )
        return empty._replace(options=options)

    def batch(self, shape: DiffusionShape, prompts: Sequence[Sequence[int]], requests: Sequence[Denoising]) -> DiffusionState:
        """Returns a batch at its start, with contiguous caches, outside of any slot."""
        inputs = self.inputs(shape, prompts, requests, [True] * len(prompts))
        slots = self.empty_state(())
        rows = self.cut(slots, np.arange(shape.batch), shape.positions)
        many = shape.batch * (2 if shape.guided else 1)
        caches = () if shape.dense else allocate(self.config.decoder, many, shape.positions, self.dtype)
        state = initial_state(rows, caches, inputs)
        return guided_state(state, self.config.mask_token_id) if shape.guided else state

    def run(
        self, shape: DiffusionShape, params: DecoderParams, slots: DenoisingSlots, inputs: DispatchInputs
    ) -> tuple[DenoisingSlots, DispatchOutputs]:
        """Runs a dispatch. DONATES slots."""
        config = self.config
        positions = shape.positions
        rows = self.cut(slots, inputs.slots, positions)
        caches = self.caches_of(slots, inputs.table, positions)
        state = initial_state(rows, caches, inputs)
        state = guided_state(state, config.mask_token_id) if shape.guided else state
        state, reports = run_steps(self.denoiser(shape), params, state, inputs.limit)
        half = shape.batch
        found = jax.tree.map(lambda x: x[:half], {name: getattr(state, name) for name in ROW_FIELDS})

        def with_rows(whole: Array, old: Array, new: Array) -> Array:
            new = jnp.where(inputs.running.reshape(-1, *[1] * (old.ndim - 1)), new, old)
            wide = new if old.ndim == 1 else whole[inputs.slots].at[:, :positions].set(new)
            return whole.at[inputs.slots].set(wide, unique_indices=True)

        after = jax.tree.map(with_rows, {name: getattr(slots, name) for name in ROW_FIELDS}, rows, found)

        def write(layer: LayerCache, new: LayerCache, group: int) -> LayerCache:
            rows = slice(group * half, (group + 1) * half)
            return jax.tree.map(lambda pages, new: scatter_pages(pages, inputs.table[group], new[rows]), layer, new)

        cache = tuple(
            tuple(write(layer, new, group) for layer, new in zip(layers, state.caches, strict=True))
            for group, layers in enumerate(slots.target_cache)
        )
        outputs = DispatchOutputs(reports[:, :half], found["tokens"], found["block_start"], found["logprobs"])
        return DenoisingSlots(**after, target_cache=cache), outputs

    @staticmethod
    def cut(slots: DenoisingSlots, which: Any, positions: int) -> dict[str, Any]:
        """Returns the row fields of some slots, cut to that many positions."""
        fields = {name: getattr(slots, name) for name in ROW_FIELDS}
        return jax.tree.map(lambda x: x[which] if x.ndim == 1 else x[which][:, :positions], fields)

    def caches_of(self, slots: DenoisingSlots, table: Int[Array, "G b M"], positions: int) -> tuple[LayerCache, ...]:
        """Gathers the first positions of some rows' caches, one for each layer, with the groups' rows in sequence."""
        widths = LayerCache(*cache_widths(self.target.config))

        def gather_array(width: tuple[int, ...], *groups: Array) -> Array:
            size = groups[0].shape[-1] // math.prod(width[1:])  # this device may have a part of the first dim
            like = jax.ShapeDtypeStruct((table.shape[1], positions, size, *width[1:]), self.dtype)
            parts = [gather_pages(pages, rows, positions, like) for pages, rows in zip(groups, table, strict=True)]
            return jnp.concatenate(parts)

        def gather_layer(*groups: LayerCache) -> LayerCache:
            arrays = zip(*(vars(each).values() for each in (widths, *groups)), strict=True)
            return LayerCache(*(gather_array(*each) for each in arrays))

        return tuple(gather_layer(*groups) for groups in zip(*slots.target_cache, strict=True))
