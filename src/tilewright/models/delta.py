"""Layers of linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them.

In the place of keys and values such a layer keeps, for each row, a state of a fixed size and the last inputs of a short
convolution. Positions change them for good. So a pass over a block of drafts, whose end is still open (`Positions.open_ended`),
leaves both as they are and keeps the block's inputs beside them; `settle` then takes in as many positions as were committed.
Both go position by position, by the sums of a step of one: the state behind a block is that of plain decoding.

Over several devices each has some of the key heads, with their value heads. So in every array the channels of a key head stand
together: its query, its key, its R values; then those of the next one.

Legend: B rows of a batch, T positions, H hidden size, K key heads, R value heads to each of them, D size of a key, E size of a
value, W taps of the convolution, C channels of the convolution: those of queries, keys and values.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from tilewright.kernels.operations import Norm, Operations
from tilewright.models.params import ArraySpec, in_turns, matrix, norm_weight, turn_by_turn

L2_EPS = 1e-6
"""Added to the squared length by which queries and keys are divided."""


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of the layers with linear attention.

    Attributes:
        key_heads, value_heads: K, and K * R.
        key_dim, value_dim: D and E.
        taps: W, the position itself included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def group(self) -> int:
        """R."""
        return self.value_heads // self.key_heads

    def part(self, value_heads: int) -> "DeltaSizes":
        """Sizes of a part that has so many value heads, with their keys."""
        return replace(self, key_heads=value_heads // self.group, value_heads=value_heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of a row's state, `[K, R, D, E]`."""
        return self.key_heads, self.group, self.key_dim, self.value_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaWeights:
    """Arrays of a layer with linear attention, besides those that every layer has.

    Attributes:
        qkv: queries, keys and values, a key head's after another's, `[H, C]`.
        gate: of what the values' heads give.
        beta, decay: of the share that is written, and of the share that stays; an output for each value head.
        convolution: `[C, 1, W]`, the last tap being the position itself.
        decay_bias, log_rate: the share that stays is `exp(-exp(log_rate) * softplus(decay + decay_bias))`.
        norm: of each value head's output.
    """

    qkv: Any
    gate: Any
    beta: Any
    decay: Any
    convolution: Any
    decay_bias: Any
    log_rate: Any
    norm: Any

    @property
    def inputs(self) -> "DeltaInputs":
        """The matrices of `project_delta`."""
        return DeltaInputs(self.qkv, self.gate, self.beta, self.decay)

    @property
    def of_heads(self) -> "HeadWeights":
        """The others, which `attend_delta` reads."""
        return HeadWeights(self.convolution, self.decay_bias, self.log_rate, self.norm)


def declare_delta(
    sizes: DeltaSizes, prefix: str, hidden: int, out_scale: float, in_one: bool
) -> tuple[DeltaWeights, ArraySpec]:
    """The arrays of one layer's attention, and that of its output.

    Args:
        in_one: the checkpoint has inputs in two tensors, where the heads of a key take turns (Qwen3-Next); else they have
            tensors of their own, all queries before all keys and all values (Qwen3.5).
    """
    values = sizes.values
    heads = sizes.value_heads
    parts = (sizes.keys, sizes.keys, sizes.values)
    own = {"delta_channels": sizes.channels // sizes.key_heads, "delta_values": values // sizes.key_heads}

    def inputs(name: str, size: int, axis: str) -> ArraySpec:
        return matrix(f"{prefix}.in_proj_{name}.weight", hidden, size, ("hidden", axis), units=(1, own.get(axis, sizes.group)))

    def shares(name: str) -> ArraySpec:
        """Of the state, for each head: small, and what is rounded in them adds up over positions. They keep their dtype."""
        return replace(inputs(name, heads, "delta_heads"), kind="router")

    def of_heads(name: str, **settings: Any) -> ArraySpec:
        return ArraySpec(f"{prefix}.{name}", (heads,), ("delta_heads",), units=(sizes.group,), **settings)

    if in_one:
        q, k, v = (inputs("qkvz", size, "delta_channels") for size in parts)
        z = inputs("qkvz", values, "delta_values")
        qkv, gate = in_turns(q.name, [[q, k, v], [z]], sizes.key_heads)
        beta, decay = in_turns(shares("ba").name, [[shares("ba")], [shares("ba")]], sizes.key_heads)
    else:
        qkv = turn_by_turn(inputs("qkv", sizes.channels, "delta_channels"), parts, sizes.key_heads)
        gate = inputs("z", values, "delta_values")
        beta = shares("b")
        decay = shares("a")
    shape = (sizes.channels, 1, sizes.taps)
    axes = ("delta_channels", "single", "taps")
    convolution = ArraySpec(f"{prefix}.conv1d.weight", shape, axes, scale=0.2, units=(own["delta_channels"], 1, 1))
    weights = DeltaWeights(
        qkv,
        gate,
        beta,
        decay,
        convolution=turn_by_turn(convolution, parts, sizes.key_heads),
        decay_bias=of_heads("dt_bias", init="ones"),
        log_rate=of_heads("A_log", scale=1.0),
        norm=norm_weight(f"{prefix}.norm.weight", sizes.value_dim, "delta_head"),
    )
    axes = ("delta_values", "hidden")
    units = (own["delta_values"], 1)
    return weights, matrix(f"{prefix}.out_proj.weight", values, hidden, axes, out_scale, units)


def with_delta(layer: Any, prefix: str, hidden: int, in_one: bool) -> Any:
    """A declared `decoder.Layer`, with linear attention in the place of its attention where its kind says so."""
    if layer.kind.delta is None:
        return layer
    delta, o = declare_delta(layer.kind.delta, f"{prefix}.linear_attn", hidden, layer.o.scale, in_one)
    return replace(layer, qkv=None, q_norm=None, k_norm=None, gate=None, o=o, delta=delta)


@runtime_checkable
class Positions(Protocol):
    """Positions of each row that a pass computes: `count` `[B]` of them from `start` `[B]` on.

    Attributes:
        open_ended: how many of them stay is said later, by `settle`.
    """

    @property
    def start(self) -> Any: ...
    @property
    def count(self) -> Any: ...
    @property
    def open_ended(self) -> bool: ...


class HeadWeights(NamedTuple):
    """Arrays of heads; or, of each, the dim along which key heads lie. See `DeltaWeights`."""

    convolution: Any
    decay_bias: Any
    log_rate: Any
    norm: Any


class DeltaInputs(NamedTuple):
    """Products of a layer's inputs, `[B, T, _]` each; or the matrices of these products."""

    qkv: Any
    gate: Any
    beta: Any
    decay: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingBlock:
    """Inputs of a block of which it is not known yet how many positions stay, as `Operations.delta_rule` takes them.

    Attributes:
        channels: of the convolution, `[B, T, C]`.
    """

    channels: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """State of each row in a layer with linear attention. At position 0 it is that of an empty row, whatever it holds.

    Attributes:
        state: float32 `[B, K, R, D, E]`.
        before: the convolution's last inputs, `[B, W - 1, C]`.
        pending: the `PendingBlock` that was computed last, until it is settled; else None.
    """

    state: Any
    before: Any
    pending: Any = None

    @staticmethod
    def head_dims(pending: bool) -> "DeltaState":
        """The dim of each array along which key heads lie, with or without a block that is pending."""
        return DeltaState(1, 2, PendingBlock(2, 2, 2, 2, 2) if pending else None)

    @staticmethod
    def empty(sizes: DeltaSizes, rows: int, dtype: DTypeLike) -> "DeltaState":
        before = jnp.zeros((rows, sizes.taps - 1, sizes.channels), dtype)
        return DeltaState(jnp.zeros((rows, *sizes.state_shape), jnp.float32), before)

    def settle(self, ops: Operations, count: Int[Array, " B"]) -> "DeltaState":
        """The state with the first `count` positions of each row's block; one that has no block stays as it is."""
        if self.pending is None:
            return self
        dims = (self.head_dims(True), None), self.head_dims(False)
        return ops.each_head(partial(settled, ops), self.state.shape[1], (self, count), *dims)

    def behind_block(self, ops: Operations) -> "DeltaState":
        """The state with all of the block: what further positions of the same pass see."""
        return self if self.pending is None else self.settle(ops, jnp.full(len(self.state), self.pending.k.shape[1]))

    def with_block(self, block: PendingBlock) -> "DeltaState":
        """Copy with further positions behind those of its pending block."""
        join = partial(jax.tree.map, lambda *parts: jnp.concatenate(parts, axis=1))
        return replace(self, pending=block if self.pending is None else join(self.pending, block))

    def rows(self, first: int | Array, count: int) -> "DeltaState":
        """That of some rows, `count` from `first` on, which begin a pass: a block is one that other rows have gone through."""
        return DeltaState(*(jax.lax.dynamic_slice_in_dim(x, first, count) for x in (self.state, self.before)))

    def with_rows(self, first: int | Array, some: "DeltaState") -> "DeltaState":
        """The state with rows from `first` on replaced. Where they have a block and the others none, these get one of zeros."""
        pending = self.pending
        if pending is None:
            pending = jax.tree.map(lambda x: jnp.zeros((len(self.state), *x.shape[1:]), x.dtype), some.pending)
        whole = replace(self, pending=pending)
        return jax.tree.map(lambda x, rows: jax.lax.dynamic_update_slice_in_dim(x, rows, first, 0), whole, some)


def settled(ops: Operations, kept: DeltaState, count: Int[Array, " B"]) -> DeltaState:
    """`DeltaState.settle` of some heads, of a state with a block."""
    block = kept.pending
    inside = slots_before(count, block.k.shape[1])
    log_decay = only(block.log_decay, inside)
    beta = only(block.beta, inside)
    _, state = ops.delta_rule(block.k, block.k, block.v, log_decay, beta, kept.state, by_position=True)
    return DeltaState(state, last_inputs(kept.before, block.channels, count))


def slots_before(count: Int[Array, " B"], slots: int) -> Bool[Array, "B T"]:
    return jnp.arange(slots)[None] < count[:, None]


def only(x: Float[Array, "B T *rest"], inside: Bool[Array, "B T"]) -> Float[Array, "B T *rest"]:
    """Zeros where positions are not inside."""
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, 0)


def last_inputs(
    before: Float[Array, "B V C"], channels: Float[Array, "B T C"], count: Int[Array, " B"]
) -> Float[Array, "B V C"]:
    """The convolution's last inputs behind the first `count` of each row's new ones."""
    at = count[:, None] + jnp.arange(before.shape[1])[None]
    return jnp.take_along_axis(jnp.concatenate([before, channels], axis=1), at[..., None], axis=1)


def convolve(
    before: Float[Array, "B V C"], channels: Float[Array, "B T C"], kernel: Float[Array, "C 1 W"]
) -> Float[Array, "B T C"]:
    """Causal convolution of each channel by itself, then `silu`; sums are float32, tap by tap."""
    line = jnp.concatenate([before, channels], axis=1).astype(jnp.float32)
    taps = kernel[:, 0].astype(jnp.float32)
    count = channels.shape[1]
    total = line[:, :count] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total = total + line[:, tap : tap + count] * taps[:, tap]
    return jax.nn.silu(total.astype(channels.dtype))


def unit(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Vectors of length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + L2_EPS)


def project_delta(
    ops: Operations, x: Float[Array, "*rows H"], w: DeltaInputs, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> DeltaInputs:
    """Products of rows with the matrices of a layer's inputs; see `Operations.begin`."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    return DeltaInputs(*(ops.linear(h, each) for each in w))


def attend_delta(
    sizes: DeltaSizes,
    ops: Operations,
    weights: DeltaWeights,
    eps: float,
    inputs: DeltaInputs,
    seen: Positions | None,
    kept: DeltaState | None,
) -> tuple[Float[Array, "B T _"], DeltaState | None]:
    """Linear attention of new positions over all before them, gated, and what the layer keeps.

    Args:
        sizes: of all devices' heads; the arrays may be those of some of them.
        seen, kept: None for whole sequences from position 0, of which nothing is kept.
    """
    arguments = weights.of_heads, inputs, kept
    after = None if seen is None else DeltaState.head_dims(is_pending(seen, inputs.qkv.shape[1]))
    before = None if kept is None else DeltaState.head_dims(kept.pending is not None)
    dims = (HeadWeights(0, 0, 0, None), DeltaInputs(2, 2, 2, 2), before), (2, after)
    heads = sizes.part(inputs.beta.shape[-1]).key_heads
    return ops.each_head(partial(attend_heads, sizes, ops, eps, seen), heads, arguments, *dims)


def is_pending(seen: Positions, length: int) -> bool:
    """True where so many positions are a block whose end is open."""
    return seen.open_ended and length > 1


def attend_heads(
    sizes: DeltaSizes,
    ops: Operations,
    eps: float,
    seen: Positions | None,
    weights: HeadWeights,
    inputs: DeltaInputs,
    kept: DeltaState | None,
) -> tuple[Float[Array, "B T _"], DeltaState | None]:
    """`attend_delta` of some key heads, with their value heads."""
    rows, length = inputs.qkv.shape[:2]
    sizes = sizes.part(inputs.beta.shape[-1])
    before = DeltaState.empty(sizes, rows, inputs.qkv.dtype) if kept is None else kept
    inside = None
    if seen is not None:
        inside = slots_before(seen.count, length)
        fresh = (seen.start == 0) & (seen.count > 0)
        before = jax.tree.map(lambda x: jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 1)), 0, x), before)
    held = before.behind_block(ops)

    mixed = convolve(held.before, inputs.qkv, weights.convolution)
    by_head = mixed.reshape(rows, length, sizes.key_heads, -1)
    q, k, v = jnp.split(by_head, [sizes.key_dim, 2 * sizes.key_dim], axis=-1)
    q = unit(q)
    k = unit(k)
    groups = (sizes.key_heads, sizes.group)
    v = v.reshape(rows, length, *groups, sizes.value_dim).astype(jnp.float32)
    rate = jnp.exp(weights.log_rate.astype(jnp.float32))
    log_decay = -rate * jax.nn.softplus(inputs.decay.astype(jnp.float32) + weights.decay_bias.astype(jnp.float32))
    beta = jax.nn.sigmoid(inputs.beta).astype(jnp.float32)
    log_decay, beta = (x.reshape(rows, length, *groups) for x in (log_decay, beta))
    if inside is not None:
        log_decay = only(log_decay, inside)
        beta = only(beta, inside)

    pending = seen is not None and is_pending(seen, length)
    out, state = ops.delta_rule(q * sizes.key_dim**-0.5, k, v, log_decay, beta, held.state, by_position=pending)
    out = gated_norm(ops, out.astype(inputs.gate.dtype), inputs.gate.reshape(rows, length, *groups, -1), weights.norm, eps)
    if seen is None:
        after = None
    elif pending:
        after = before.with_block(PendingBlock(inputs.qkv, k, v, log_decay, beta))
    else:
        after = DeltaState(state, last_inputs(held.before, inputs.qkv, seen.count))
    return out.reshape(rows, length, -1), after


def gated_norm(
    ops: Operations, x: Float[Array, "*rows E"], gate: Float[Array, "*rows E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*rows E"]:
    """RMSNorm of each head, times `silu` of its gate."""
    normed = ops.rms_norm(x, weight, eps).astype(jnp.float32)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
