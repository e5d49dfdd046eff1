"""A forward pass over a window of positions that computes what has changed and takes the rest from caches.

DyLLM (arXiv 2603.08026) recomputes the positions whose attention context turned, *salient* ones, and reuses what the others
gave the step before. Where every position of a window is salient this is attention over cached keys and values as Fast-dLLM
(arXiv 2505.22618) has it, and where the window is the whole sequence it is the dense pass. So a batch may hold rows of all
kinds.

How many positions are salient depends on the data; shapes do not. They are gathered into the smallest declared number of rows
that holds them, chosen on the device, or counted where products leave out rows by themselves (`Operations.counts`).

Legend: B rows of a batch, S positions of a row, W of a window, R = B * W, H hidden size, N query heads, K key/value heads,
D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Float32, Int

from tilewright.kernels import select
from tilewright.kernels.operations import Norm, Operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig, DecoderParams, Layer
from tilewright.models.stack import SINGLE_DEVICE, Schedule

BUCKETS = (32, 64, 128, 256)
"""Numbers of salient positions that programs are made for, besides all."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Cached arrays of a layer, for each position.

    Attributes:
        k, v: keys, rotated, and values, `[B, S, K, D]`.
        context: what its query saw, before the output projection, `[B, S, N * D]`.
        ffn: what its MLP gave, `[B, S, H]`.
        base: the values as they were when the whole sequence was computed last, `[B, S, K, D]`.
    """

    k: Any
    v: Any
    context: Any
    ffn: Any
    base: Any


def allocate(config: DecoderConfig, batch: int, positions: int, dtype: DTypeLike) -> tuple[LayerCache, ...]:
    """Empty caches, one for each layer."""

    def one() -> LayerCache:
        values = (batch, positions, config.num_kv_heads, config.head_dim)
        context = (batch, positions, config.num_heads * config.head_dim)
        shapes = (values, values, context, (batch, positions, config.hidden_size), values)
        return LayerCache(*(jnp.zeros(shape, dtype) for shape in shapes))

    return tuple(one() for _ in range(config.num_layers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Positions that a pass computes. Every array's first dim is the batch.

    Attributes:
        positions: where the queries stand, `[B, W]`, one behind the other.
        lengths: positions that there are, `[B]`.
        active: `[B, W]`; positions that are not stay as they are, in all caches.
        changed: `[B, W]`: whose token was committed since the pass before.
        catches_up: `[B, W]`: contexts that are carried on by all that values changed since `base`, and not in this pass alone.
            None where the window is not the whole sequence: `base` is neither read nor written then.
        tau: `[B]`; a position is salient in the next layer if the cosine of its contexts is below. Above 1, all are.
        first_all: `[B]`: all active positions are salient in the first layer.
        keep_changed: `[B]`: those that changed are salient in every layer.
        renews: `[B]`: whether `base` becomes the values after this pass; None as above.
    """

    positions: Any
    lengths: Any
    active: Any
    changed: Any
    catches_up: Any
    tau: Any
    first_all: Any
    keep_changed: Any
    renews: Any


class Trace(NamedTuple):
    """Trace of a pass, `[layers, B, W]` each: positions salient before and after each layer's attention, and the cosines."""

    incoming: Array
    salient: Array
    cosine: Array


class Picked(NamedTuple):
    """Positions of a window that were picked, `[B, W]` flattened: the first `number` entries of `indices` `[R]`."""

    indices: Array
    number: Array

    def among(self, places: Int[Array, "B W"]) -> Int[Array, " R"]:
        """Their places, and -1 behind them."""
        slots = jnp.arange(self.indices.size)
        return jnp.where(slots < self.number, places.reshape(-1)[self.indices], -1)


def pick(ops: Operations, mask: Bool[Array, "B W"]) -> Picked:
    return Picked(*ops.nonzero(mask.reshape(-1)))


def bucket_sizes(buckets: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The numbers of rows that programs for up to `rows` are made for."""
    return (*(size for size in buckets if size < rows), rows)


def on_picked(
    ops: Operations,
    buckets: tuple[int, ...],
    function: Callable[..., Any],
    picked: Picked,
    *arrays: Float[Array, "R _"],
) -> Any:
    """`function(*rows, count=...)` of the picked rows of arrays; of its results, `[R, ...]`, the first `count` rows count."""
    size = picked.indices.size
    if ops.counts:
        return function(*(ops.gather_rows(x, picked.indices) for x in arrays), count=picked.number)
    sizes = bucket_sizes(buckets, size)

    def branch(rows: int) -> Callable[[], Any]:
        def run() -> Any:
            results = function(*(ops.gather_rows(x, picked.indices[:rows]) for x in arrays), count=None)
            return jax.tree.map(lambda y: jnp.pad(y, [(0, size - rows), *[(0, 0)] * (y.ndim - 1)]), results)

        return run

    which = sum((picked.number > rows).astype(jnp.int32) for rows in sizes[:-1]) if len(sizes) > 1 else jnp.int32(0)
    return jax.lax.switch(which, [branch(rows) for rows in sizes])


@dataclass(frozen=True)
class Pass:
    """Inputs that all layers of a pass share.

    Attributes:
        rope: cosines and sines of the window's positions.
        positions: S.
    """

    config: DecoderConfig
    ops: Operations
    buckets: tuple[int, ...]
    window: Window
    rope: tuple[Array, Array]
    schedule: Schedule
    positions: int

    @property
    def rows(self) -> Int[Array, "B W"]:
        """Places of the window's positions in the flat caches."""
        batch = jnp.arange(len(self.window.positions), dtype=jnp.int32)[:, None]
        return batch * self.positions + self.window.positions

    @property
    def whole(self) -> bool:
        """True if the window is all of the sequence, as its shape says."""
        return self.window.positions.shape[1] == self.positions

    def of_window(self, cache: Float[Array, "B S F"]) -> Float[Array, "B W F"]:
        if self.whole:
            return cache
        return self.ops.gather_rows(cache.reshape(-1, cache.shape[-1]), self.rows)

    def keys_values(
        self, layer: Layer, x: Float[Array, "R H"], cos: Array, sin: Array, count: Array | None = None
    ) -> tuple[Float[Array, "R _"], Float[Array, "R _"]]:
        norm = Norm(layer.input_norm, self.config.rms_norm_eps)
        projection = self.ops.project(x[None], layer.qkv, norm, first=1, bias=layer.qkv_bias, count=count)
        _, k, v = self.ops.heads(projection, decoder.head_norms(self.config, layer, (cos[None], sin[None])))
        flat = [part[0].transpose(1, 0, 2).reshape(len(x), -1) for part in (k, v)]
        return flat[0], flat[1]

    def queries(self, layer: Layer, x: Float[Array, "B W H"]) -> Float[Array, "B W N D"]:
        norm = Norm(layer.input_norm, self.config.rms_norm_eps)
        projection = self.ops.project(x, layer.qkv, norm, last=1, bias=layer.qkv_bias)
        return self.ops.heads(projection, decoder.head_norms(self.config, layer, self.rope))[0]

    def renew_values(
        self, layer: Layer, cache: LayerCache, x: Float[Array, "B W H"], salient: Bool[Array, "B W"]
    ) -> tuple[LayerCache, Float[Array, "B C S K D"]]:
        """Keys and values of the salient positions, and by how much the values changed, in this pass and since the base."""
        picked = pick(self.ops, salient)
        flat = [part.reshape(-1, part.shape[-1]) for part in (x, *self.rope)]
        k, v = on_picked(self.ops, self.buckets, partial(self.keys_values, layer), picked, *flat)
        places = picked.among(self.rows)
        values, old = self.ops.swap_rows(cache.v, places, v)
        moved = self.ops.scatter_rows(jnp.zeros_like(values), places, v - old)
        after = replace(cache, k=self.ops.scatter_rows(cache.k, places, k), v=values)
        changes = [moved] if self.window.catches_up is None else [moved, after.v - cache.base]
        return after, jnp.stack(changes, axis=1)

    def layer(
        self, layer: Layer, cache: LayerCache, x: Float[Array, "B W H"], salient: Bool[Array, "B W"]
    ) -> tuple[Array, LayerCache, Bool[Array, "B W"], Float32[Array, "B W"]]:
        """The residual stream after a layer, its cache, the positions that are salient in the next one, and the cosines."""
        ops = self.ops
        window = self.window
        cache, changes = self.renew_values(layer, cache, x, salient)
        carried = 0 if window.catches_up is None else window.catches_up
        kinds = jnp.where(salient, select.EXACT, select.CARRIED + carried)
        kinds = jnp.where(window.active, kinds, select.IDLE).astype(jnp.int32)
        context, statistics = ops.window_attention(
            self.queries(layer, x), cache.k, cache.v, changes, window.lengths, kinds, self.of_window(cache.context)
        )
        turned = select.cosine(self.schedule.reduce(statistics))
        tau = window.tau[:, None]
        after = window.active & ((turned < tau) | (tau > 1) | (window.keep_changed[:, None] & window.changed))
        x = x + self.schedule.reduce(ops.linear(context, layer.o))
        if self.whole:
            cache = replace(cache, context=context)
        else:
            places = jnp.where(window.active, self.rows, -1).reshape(-1)
            cache = replace(cache, context=self.ops.scatter_rows(cache.context, places, context.reshape(places.size, -1)))
        picked = pick(ops, after)

        def mlp(rows: Float[Array, "R H"], count: Array | None) -> Float[Array, "R H"]:
            return decoder.mlp(self.config, ops, layer, rows[None], count=count)[0]

        rows = self.schedule.reduce(on_picked(ops, self.buckets, mlp, picked, x.reshape(-1, x.shape[-1])))
        cache = replace(cache, ffn=self.ops.scatter_rows(cache.ffn, picked.among(self.rows), rows))
        if window.renews is not None:
            base = jnp.where(window.renews[:, None, None, None], cache.v, cache.base)
            cache = replace(cache, base=base)
        return x + self.of_window(cache.ffn), cache, after, turned


def run_window(
    config: DecoderConfig,
    ops: Operations,
    params: DecoderParams,
    tokens: Int[Array, "B S"],
    window: Window,
    caches: tuple[LayerCache, ...],
    buckets: tuple[int, ...] = BUCKETS,
    schedule: Schedule = SINGLE_DEVICE,
) -> tuple[Float[Array, "B W H"], tuple[LayerCache, ...], Trace]:
    """All layers over a window.

    Args:
        tokens: of all positions.

    Returns:
        The residual stream after the last layer, of active positions; the caches; and how it went.
    """
    rope = config.rope_tables(window.positions)["global"]
    step = Pass(config, ops, buckets, window, rope, schedule, tokens.shape[1])
    x = schedule.embed(ops, params.embed, jnp.take_along_axis(tokens, window.positions, axis=1))
    salient = window.active & (window.changed | window.first_all[:, None])
    after = []
    traces = []
    for layer, cache in zip(params.layers, caches, strict=True):
        incoming = salient
        x, cache, salient, turned = step.layer(layer, cache, x, salient)
        after.append(cache)
        traces.append(Trace(incoming, salient, turned))
    return x, tuple(after), jax.tree.map(lambda *each: jnp.stack(each), *traces)
