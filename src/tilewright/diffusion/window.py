"""Forward pass over a window of positions that computes changed positions and takes the others from caches.

DyLLM (arXiv 2603.08026) recomputes *salient* positions, whose attention context has changed, and reuses the results of the step
before for the others. If every position of a window is salient, the pass is attention over cached keys and values as in
Fast-dLLM (arXiv 2505.22618); if the window is the whole sequence, too, it is the dense pass. So a batch may mix all kinds of
rows.

The number of salient positions depends on the data, but shapes do not. The salient positions are gathered into the smallest
declared number of rows that holds them, chosen on the device; operations that skip rows behind a count
(`Operations.skips_uncounted`) get the count instead.

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
from tilewright.models.stack import SINGLE_DEVICE, Strategy

BUCKETS = (32, 64, 128, 256)
"""Numbers of salient positions with a program branch of their own, besides that for all positions."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Cached arrays of a layer, for each position.

    Attributes:
        k, v: rotated keys, and values, `[B, S, K, D]`.
        context: attention output before the output projection, `[B, S, N * D]`.
        ffn: output of the MLP, `[B, S, H]`.
        base: values at the last pass over the whole sequence, `[B, S, K, D]`.
    """

    k: Any
    v: Any
    context: Any
    ffn: Any
    base: Any


def cache_widths(config: DecoderConfig) -> tuple[tuple[int, ...], ...]:
    """Returns the dims of an entry behind its position, for each array of a `LayerCache`; devices shard the first of them."""
    values = (config.num_kv_heads, config.head_dim)
    return values, values, (config.num_heads * config.head_dim,), (config.hidden_size,), values


def allocate(config: DecoderConfig, batch: int, positions: int, dtype: DTypeLike) -> tuple[LayerCache, ...]:
    """Returns empty caches, one for each layer."""

    def layer() -> LayerCache:
        return LayerCache(*(jnp.zeros((batch, positions, *width), dtype) for width in cache_widths(config)))

    return tuple(layer() for _ in range(config.num_layers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Positions that a pass computes. Every array's first dim is the batch.

    Attributes:
        positions: positions of the queries, `[B, W]`, contiguous.
        lengths: number of positions of each row, `[B]`.
        active: `[B, W]`; inactive positions do not change in any cache.
        changed: `[B, W]`: positions whose token was committed in the step before.
        catches_up: `[B, W]`: positions whose carried contexts include all changes of values since `base`, not only those of
            this pass. None if the window is not the whole sequence: then `base` is neither read nor written.
        tau: `[B]`; a position is salient in the next layer if the cosine of its contexts is below. Above 1, all are.
        first_all: `[B]`: whether all active positions are salient in the first layer.
        keep_changed: `[B]`: whether changed positions are salient in every layer.
        renews: `[B]`: whether the values after this pass become `base`; None if the window is not the whole sequence.
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
    """Selected positions of a flattened window `[B, W]`: the first `number` entries of `indices` `[R]`."""

    indices: Array
    number: Array

    def among(self, places: Int[Array, "B W"]) -> Int[Array, " R"]:
        """Returns the selected positions' entries of `places`, followed by -1."""
        slots = jnp.arange(self.indices.size)
        return jnp.where(slots < self.number, places.reshape(-1)[self.indices], -1)


def pick(ops: Operations, mask: Bool[Array, "B W"]) -> Picked:
    return Picked(*ops.nonzero(mask.reshape(-1)))


def bucket_sizes(buckets: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows, up to `rows`, with a program branch of their own."""
    return (*(size for size in buckets if size < rows), rows)


def on_picked(
    ops: Operations,
    buckets: tuple[int, ...],
    function: Callable[..., Any],
    picked: Picked,
    *arrays: Float[Array, "R _"],
) -> Any:
    """Runs `function(*rows, count=...)` on the selected rows; the first `count` rows of its results `[R, ...]` are valid."""
    size = picked.indices.size
    if ops.skips_uncounted:
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
    schedule: Strategy
    positions: int

    @property
    def rows(self) -> Int[Array, "B W"]:
        """Indices of the window's positions in the flattened caches."""
        batch = jnp.arange(len(self.window.positions), dtype=jnp.int32)[:, None]
        return batch * self.positions + self.window.positions

    @property
    def whole(self) -> bool:
        """True if the window is the whole sequence, by its static shape."""
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
        """Updates keys and values of the salient positions. Returns the changes of values, in this pass and since the base."""
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
        """Returns the residual stream after a layer, its cache, the salient positions of the next layer, and the cosines."""
        ops = self.ops
        window = self.window
        cache, changes = self.renew_values(layer, cache, x, salient)
        carried = 0 if window.catches_up is None else window.catches_up
        kinds = jnp.where(salient, select.EXACT, select.CARRIED + carried)
        kinds = jnp.where(window.active, kinds, select.IDLE).astype(jnp.int32)
        context, statistics = ops.sparse_attention(
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
    schedule: Strategy = SINGLE_DEVICE,
) -> tuple[Float[Array, "B W H"], tuple[LayerCache, ...], Trace]:
    """Runs all layers over a window.

    Args:
        tokens: tokens of all positions.

    Returns:
        the residual stream of active positions after the last layer; the caches; and the trace.
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
