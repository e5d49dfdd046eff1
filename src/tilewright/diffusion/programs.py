"""The declared shapes of denoising, and the compiled program of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tilewright.compiled.store import Store
from tilewright.diffusion.options import FAR, Denoising, row_options
from tilewright.diffusion.state import DiffusionState
from tilewright.diffusion.steps import Denoiser, run_steps
from tilewright.diffusion.window import BUCKETS, LayerCache, allocate
from tilewright.kernels.operations import Operations
from tilewright.models.decoder import DecoderParams
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.stack import TRACED_ONCE
from tilewright.parallel.compiling import compile_over
from tilewright.parallel.sharding import GROUPED_AXES
from tilewright.runtime.placement import WHOLE, Placement, on


@dataclass(frozen=True)
class DiffusionShape:
    """Sizes that one program is compiled for.

    Attributes:
        batch: rows, without those that guidance adds.
        positions: of a row, prompt and response together.
        response, block: the longest ones.
        dense: every row computes everything in every step, without caches.
        narrow: some rows may look at their blocks alone.
        guided: some rows are guided.
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
    """The shapes that are compiled; each request goes into the smallest that holds it.

    Attributes:
        batches, positions, responses, blocks: numbers of rows, and lengths, in ascending order. No block is longer than the
            response: `options.FAR` among them stands for one of the whole.
        buckets: numbers of salient positions that programs compute, besides all.
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
        """The smallest shape for prompts of these lengths.

        Raises:
            ValueError: none holds them; with the field and what came.
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
        """All shapes that batches of requests of some of these modes may run in, up to so many positions.

        Args:
            guided: some of the requests may be guided.
            suffix_window: some may have one, so that dense steps, too, need caches.
        """

        def needed(sizes: tuple[int, ...], least: int, most: int) -> tuple[int, ...]:
            """Those that one number or another from the least to the most goes into."""
            return tuple(size for n, size in enumerate(sizes) if size >= least and (n == 0 or sizes[n - 1] < most))

        kinds = {"dense": (True, False), "prefix": (False, False), "dual": (False, True), "sparse": (False, False)}
        asked = [*modes, *(["prefix"] if suffix_window and "dense" in modes else [])]  # whose programs those run in
        offered = product(dict.fromkeys(kinds[mode] for mode in asked), (False, True) if guided else (False,))
        for batch, response, (kind, guide) in product(self.batches, needed(self.responses, 1, positions - 1), [*offered]):
            for size in needed(self.positions, response + 1, max(positions, response + 1)):
                for block in needed(self.blocks, 1, response):
                    yield DiffusionShape(batch, size, response, min(block, response), *kind, guide)


@dataclass(frozen=True)
class DiffusionKey:
    name: str
    shape: DiffusionShape


class DiffusionPrograms(Store[DiffusionKey]):
    """The programs of one model."""

    def __init__(
        self,
        config: DiffusionConfig,
        ops: Operations,
        params: DecoderParams,
        dtype: DTypeLike,
        table: DiffusionTable,
        placement: Placement | None = None,
    ):
        super().__init__()
        self.config = config
        self.ops = ops
        self.params = params
        self.dtype = dtype
        self.table = table
        self.placement = placement

    def denoiser(self, shape: DiffusionShape) -> Denoiser:
        more = int(self.config.shifted)
        return Denoiser(
            config=self.config,
            ops=self.ops,
            widths=(shape.block + more if shape.narrow else None, shape.response + more),
            block=shape.block,
            dense=shape.dense,
            guided=shape.guided,
            buckets=self.table.buckets,
            schedule=TRACED_ONCE if self.placement is None else self.placement.schedule,
        )

    def keys(self, shape: DiffusionShape) -> tuple[DiffusionKey, ...]:
        return DiffusionKey("allocate", shape), DiffusionKey("denoise", shape)

    @staticmethod
    def shared(key: DiffusionKey) -> DiffusionKey:
        """Key under which a program is kept: one that allocates serves all windows."""
        if key.name == "denoise":
            return key
        return replace(key, shape=replace(key.shape, response=0, block=0, narrow=False))

    def allocate(self, shape: DiffusionShape) -> Any:
        rows = shape.batch * (2 if shape.guided else 1)
        return () if shape.dense else allocate(self.config.decoder, rows, shape.positions, self.dtype)

    def compile(self, key: DiffusionKey) -> jax.stages.Compiled:
        make = partial(self.allocate, key.shape)
        if key.name == "allocate":
            make.__name__ = "allocate"  # type: ignore[attr-defined]
            placed = None if self.placement is None else on(self.placement.mesh, self.placed(jax.eval_shape(make)))
            return jax.jit(make, out_shardings=placed).lower().compile()
        how = self.denoiser(key.shape)

        def denoise(params: DecoderParams, state: DiffusionState, limit: Array) -> tuple[DiffusionState, Array]:
            return run_steps(how, params, state, limit)

        state = jax.eval_shape(lambda: self.state(key.shape, [], [], make()))
        limit = jax.ShapeDtypeStruct((), jnp.int32)
        run = denoise if self.placement is None else self.sharded(denoise, state)
        return self.compile_run(run, state, limit)

    def compile_run(self, run: Callable[..., Any], state: Any, *inputs: Any) -> jax.stages.Compiled:
        """A program `run(params, state, *inputs)`, to which the state is donated."""
        lowered = jax.jit(run, donate_argnums=1).lower(self.params, state, *inputs)
        placement = self.placement
        return lowered.compile() if placement is None else compile_over(placement.mesh, lowered, placement.compiler_options)

    def sharded(self, run: Callable[..., Any], state: Any) -> Callable[..., Any]:
        """A program in which each device computes with its part of the parameters and caches, all of them with one state."""
        assert self.placement is not None
        parts = jax.tree.map(lambda x: x.sharding.spec, self.params)
        held = replace(jax.tree.map(lambda _: WHOLE, state), caches=self.placed(state.caches))
        return jax.shard_map(
            run, mesh=self.placement.mesh, in_specs=(parts, held, WHOLE), out_specs=(held, WHOLE), check_vma=False
        )

    def placed(self, caches: Any) -> Any:
        """Partition specs of caches: keys and values are sharded by key/value heads, contexts by all heads."""
        of_heads, of_queries = (PartitionSpec(None, None, axes) for axes in (GROUPED_AXES[0], GROUPED_AXES))

        def of_layer(_: LayerCache) -> LayerCache:
            return LayerCache(k=of_heads, v=of_heads, context=of_queries, ffn=WHOLE, base=of_heads)

        return jax.tree.map(of_layer, caches, is_leaf=lambda x: isinstance(x, LayerCache))

    def state(
        self, shape: DiffusionShape, prompts: Sequence[Sequence[int]], requests: Sequence[Denoising], caches: Any
    ) -> DiffusionState:
        """A batch at its beginning; rows that only fill it are done from the start. The arrays are the host's."""
        padding = shape.batch - len(prompts)
        asked = [*requests, *[Denoising(1)] * padding]
        lengths = np.asarray([*map(len, prompts), *[0] * padding], np.int32)
        ends = lengths + np.asarray([request.new_tokens for request in asked], np.int32)
        tokens = np.full((shape.batch, shape.positions), self.config.mask_token_id, np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        rows = [tokens, lengths, ends, row_options(asked, shape.block), np.arange(shape.batch) >= len(prompts)]
        if shape.guided:
            hidden = tokens.copy()
            hidden[np.arange(shape.positions) < lengths[:, None]] = self.config.mask_token_id
            rows = jax.tree.map(lambda x: np.concatenate([x, x]), rows)
            rows[0][shape.batch :] = hidden
        tokens, start, stop, options, done = rows
        zeros = np.zeros_like(start)
        return DiffusionState(
            tokens, start, stop, zeros, zeros.copy(), start.copy(), np.zeros(tokens.shape, bool), done, options, caches
        )
