"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Instead of keys and values, a layer keeps for each row a state of a fixed size, and the last inputs of a short convolution.
Positions change these two irreversibly. A pass over a block of drafts (`Positions.uncommitted`) therefore leaves both unchanged
and keeps the block's inputs beside them; `commit` then applies the committed positions. The pass and `commit` go position by
position, with the sums of a decode step of one position: the state after a block equals that of plain decoding.

Over several devices each device has some of the key heads, with their value heads. The channels of a key head are therefore
adjacent in every array: its query, its key, its R values; then those of the next key head.

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
from tilewright.models.params import ArraySpec, declare_interleaved, declare_regrouped, matrix, norm_weight

L2_EPS = 1e-6
"""Number added to the squared length by which queries and keys are divided."""


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of layers with linear attention.

    Attributes:
        key_heads, value_heads: K, and K * R.
        key_dim, value_dim: D and E.
        taps: W, including the position itself.
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
        """R: value heads of each key head."""
        return self.value_heads // self.key_heads

    def part(self, value_heads: int) -> "DeltaSizes":
        """Returns the sizes of a part with `value_heads` value heads, and their key heads."""
        return replace(self, key_heads=value_heads // self.group, value_heads=value_heads)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a row's state, `[K, R, D, E]`."""
        return self.key_heads, self.group, self.key_dim, self.value_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaWeights:
    """Arrays of a layer with linear attention, besides those that every layer has.

    Attributes:
        qkv: projection to queries, keys and values, key head by key head, `[H, C]`.
        gate: projection to the gate of the value heads' output.
        beta, decay: projections to the write strength and to the decay of the state, an output for each value head.
        convolution: `[C, 1, W]`; the last tap is the position itself.
        decay_bias, log_rate: the state decays by `exp(-exp(log_rate) * softplus(decay + decay_bias))`.
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
        """Matrices of `project_delta`."""
        return DeltaInputs(self.qkv, self.gate, self.beta, self.decay)

    @property
    def head_weights(self) -> "HeadWeights":
        """Arrays that `attend_delta` reads."""
        return HeadWeights(self.convolution, self.decay_bias, self.log_rate, self.norm)


def declare_delta(
    sizes: DeltaSizes, prefix: str, hidden: int, out_scale: float, in_one: bool
) -> tuple[DeltaWeights, ArraySpec]:
    """Declares the arrays of one layer's linear attention, and its output matrix.

    Args:
        in_one: the checkpoint stores the inputs in two tensors, interleaved by key head (Qwen3-Next). Otherwise they are
            separate tensors, with all queries before all keys and all values (Qwen3.5).
    """
    values = sizes.values
    heads = sizes.value_heads
    parts = (sizes.keys, sizes.keys, sizes.values)
    unit_sizes = {"delta_channels": sizes.channels // sizes.key_heads, "delta_values": values // sizes.key_heads}

    def inputs(name: str, size: int, axis: str) -> ArraySpec:
        return matrix(
            f"{prefix}.in_proj_{name}.weight", hidden, size, ("hidden", axis), units=(1, unit_sizes.get(axis, sizes.group))
        )

    def state_control(name: str) -> ArraySpec:
        # Rounding errors of these small matrices accumulate over positions, so "router" keeps their dtype.
        return replace(inputs(name, heads, "delta_heads"), kind="router")

    def per_head(name: str, **settings: Any) -> ArraySpec:
        return ArraySpec(f"{prefix}.{name}", (heads,), ("delta_heads",), units=(sizes.group,), **settings)

    if in_one:
        q, k, v = (inputs("qkvz", size, "delta_channels") for size in parts)
        z = inputs("qkvz", values, "delta_values")
        qkv, gate = declare_interleaved(q.name, [[q, k, v], [z]], sizes.key_heads)
        beta, decay = declare_interleaved(
            state_control("ba").name, [[state_control("ba")], [state_control("ba")]], sizes.key_heads
        )
    else:
        qkv = declare_regrouped(inputs("qkv", sizes.channels, "delta_channels"), parts, sizes.key_heads)
        gate = inputs("z", values, "delta_values")
        beta = state_control("b")
        decay = state_control("a")
    shape = (sizes.channels, 1, sizes.taps)
    axes = ("delta_channels", "single", "taps")
    convolution = ArraySpec(f"{prefix}.conv1d.weight", shape, axes, scale=0.2, units=(unit_sizes["delta_channels"], 1, 1))
    weights = DeltaWeights(
        qkv,
        gate,
        beta,
        decay,
        convolution=declare_regrouped(convolution, parts, sizes.key_heads),
        decay_bias=per_head("dt_bias", init="ones"),
        log_rate=per_head("A_log", scale=1.0),
        norm=norm_weight(f"{prefix}.norm.weight", sizes.value_dim, "delta_head"),
    )
    axes = ("delta_values", "hidden")
    units = (unit_sizes["delta_values"], 1)
    return weights, matrix(f"{prefix}.out_proj.weight", values, hidden, axes, out_scale, units)


def with_delta(layer: Any, prefix: str, hidden: int, in_one: bool) -> Any:
    """Replaces attention by linear attention in a declared `decoder.Layer`, if its kind has linear attention."""
    if layer.kind.delta is None:
        return layer
    delta, o = declare_delta(layer.kind.delta, f"{prefix}.linear_attn", hidden, layer.o.scale, in_one)
    return replace(layer, qkv=None, q_norm=None, k_norm=None, gate=None, o=o, delta=delta)


@runtime_checkable
class Positions(Protocol):
    """Positions of each row that a pass computes: `count` `[B]` of them, from `start` `[B]` on.

    Attributes:
        uncommitted: `commit` decides later how many of them stay.
    """

    @property
    def start(self) -> Any: ...
    @property
    def count(self) -> Any: ...
    @property
    def uncommitted(self) -> bool: ...


class HeadWeights(NamedTuple):
    """Arrays of heads, or the dim of each array along which key heads lie. See `DeltaWeights`."""

    convolution: Any
    decay_bias: Any
    log_rate: Any
    norm: Any


class DeltaInputs(NamedTuple):
    """Projections of a layer's inputs, `[B, T, _]` each, or the matrices of these projections."""

    qkv: Any
    gate: Any
    beta: Any
    decay: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingBlock:
    """Inputs of a block that is not committed yet, in the form of `Operations.delta_rule`.

    Attributes:
        channels: inputs of the convolution, `[B, T, C]`.
    """

    channels: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """State of each row in a layer with linear attention. A row at position 0 counts as empty, whatever its state holds.

    Attributes:
        state: float32 `[B, K, R, D, E]`.
        before: the convolution's last inputs, `[B, W - 1, C]`.
        pending: the `PendingBlock` that was computed last, until `commit` commits it; else None.
    """

    state: Any
    before: Any
    pending: Any = None

    @staticmethod
    def head_dims(pending: bool) -> "DeltaState":
        """Returns the dim of each array along which key heads lie, with or without a pending block."""
        return DeltaState(1, 2, PendingBlock(2, 2, 2, 2, 2) if pending else None)

    @staticmethod
    def empty(sizes: DeltaSizes, rows: int, dtype: DTypeLike) -> "DeltaState":
        before = jnp.zeros((rows, sizes.taps - 1, sizes.channels), dtype)
        return DeltaState(jnp.zeros((rows, *sizes.state_shape), jnp.float32), before)

    def commit(self, ops: Operations, count: Int[Array, " B"]) -> "DeltaState":
        """Commits the first `count` positions of each row's pending block; without a block the state stays as it is."""
        if self.pending is None:
            return self
        dims = (self.head_dims(True), None), self.head_dims(False)
        return ops.each_head(partial(commit_heads, ops), self.state.shape[1], (self, count), *dims)

    def after_block(self, ops: Operations) -> "DeltaState":
        """Returns the state after the whole pending block, which further positions of the same pass read."""
        return self if self.pending is None else self.commit(ops, jnp.full(len(self.state), self.pending.k.shape[1]))

    def with_block(self, block: PendingBlock) -> "DeltaState":
        """Appends positions to the pending block."""
        join = partial(jax.tree.map, lambda *parts: jnp.concatenate(parts, axis=1))
        return replace(self, pending=block if self.pending is None else join(self.pending, block))

    def rows(self, first: int | Array, count: int) -> "DeltaState":
        """Returns `count` rows from `first` on, for a new pass.

        A pending block is left out, because it belongs to other rows.
        """
        return DeltaState(*(jax.lax.dynamic_slice_in_dim(x, first, count) for x in (self.state, self.before)))

    def with_rows(self, first: int | Array, new: "DeltaState") -> "DeltaState":
        """Replaces rows from `first` on. If only the new rows have a pending block, the other rows get zeros."""
        pending = self.pending
        if pending is None:
            pending = jax.tree.map(lambda x: jnp.zeros((len(self.state), *x.shape[1:]), x.dtype), new.pending)
        whole = replace(self, pending=pending)
        return jax.tree.map(lambda x, rows: jax.lax.dynamic_update_slice_in_dim(x, rows, first, 0), whole, new)


def commit_heads(ops: Operations, state: DeltaState, count: Int[Array, " B"]) -> DeltaState:
    """Computes `DeltaState.commit` for some heads of a state with a pending block."""
    block = state.pending
    inside = slots_before(count, block.k.shape[1])
    log_decay = masked(block.log_decay, inside)
    beta = masked(block.beta, inside)
    _, committed = ops.delta_rule(block.k, block.k, block.v, log_decay, beta, state.state, by_position=True)
    return DeltaState(committed, last_inputs(state.before, block.channels, count))


def slots_before(count: Int[Array, " B"], slots: int) -> Bool[Array, "B T"]:
    return jnp.arange(slots)[None] < count[:, None]


def masked(x: Float[Array, "B T *rest"], inside: Bool[Array, "B T"]) -> Float[Array, "B T *rest"]:
    """Sets entries outside of the mask to zero."""
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, 0)


def last_inputs(
    before: Float[Array, "B V C"], channels: Float[Array, "B T C"], count: Int[Array, " B"]
) -> Float[Array, "B V C"]:
    """Returns the convolution's last inputs after the first `count` of each row's new inputs."""
    at = count[:, None] + jnp.arange(before.shape[1])[None]
    return jnp.take_along_axis(jnp.concatenate([before, channels], axis=1), at[..., None], axis=1)


def convolve(
    before: Float[Array, "B V C"], channels: Float[Array, "B T C"], kernel: Float[Array, "C 1 W"]
) -> Float[Array, "B T C"]:
    """Convolves each channel causally, then applies `silu`. Sums are float32, tap by tap."""
    line = jnp.concatenate([before, channels], axis=1).astype(jnp.float32)
    taps = kernel[:, 0].astype(jnp.float32)
    count = channels.shape[1]
    total = line[:, :count] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total = total + line[:, tap : tap + count] * taps[:, tap]
    return jax.nn.silu(total.astype(channels.dtype))


def unit(x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Scales vectors to length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + L2_EPS)


def project_delta(
    ops: Operations, x: Float[Array, "*rows H"], w: DeltaInputs, norm: Norm | None = None, count: Int[Array, ""] | None = None
) -> DeltaInputs:
    """Projects rows with the matrices of a layer's inputs; see `Operations.begin`."""
    h = x if norm is None else ops.rms_norm(x, *norm)
    return DeltaInputs(*(ops.linear(h, each) for each in w))


def attend_delta(
    sizes: DeltaSizes,
    ops: Operations,
    weights: DeltaWeights,
    eps: float,
    inputs: DeltaInputs,
    positions: Positions | None,
    state: DeltaState | None,
) -> tuple[Float[Array, "B T _"], DeltaState | None]:
    """Computes gated linear attention of new positions over all before them. Returns the output and the layer's state.

    Args:
        sizes: of all heads; the arrays may hold only the heads of this device.
        positions, state: None for whole sequences from position 0, which leave no state.
    """
    arguments = weights.head_weights, inputs, state
    after = None if positions is None else DeltaState.head_dims(is_pending(positions, inputs.qkv.shape[1]))
    before = None if state is None else DeltaState.head_dims(state.pending is not None)
    dims = (HeadWeights(0, 0, 0, None), DeltaInputs(2, 2, 2, 2), before), (2, after)
    heads = sizes.part(inputs.beta.shape[-1]).key_heads
    return ops.each_head(partial(attend_heads, sizes, ops, eps, positions), heads, arguments, *dims)


def is_pending(positions: Positions, length: int) -> bool:
    """True if a pass over `length` positions is a block that is committed later."""
    return positions.uncommitted and length > 1


def attend_heads(
    sizes: DeltaSizes,
    ops: Operations,
    eps: float,
    positions: Positions | None,
    weights: HeadWeights,
    inputs: DeltaInputs,
    state: DeltaState | None,
) -> tuple[Float[Array, "B T _"], DeltaState | None]:
    """Computes `attend_delta` for some key heads and their value heads."""
    rows, length = inputs.qkv.shape[:2]
    sizes = sizes.part(inputs.beta.shape[-1])
    before = DeltaState.empty(sizes, rows, inputs.qkv.dtype) if state is None else state
    inside = None
    if positions is not None:
        inside = slots_before(positions.count, length)
        fresh = (positions.start == 0) & (positions.count > 0)
        before = jax.tree.map(lambda x: jnp.where(fresh.reshape(-1, *[1] * (x.ndim - 1)), 0, x), before)
    current = before.after_block(ops)

    mixed = convolve(current.before, inputs.qkv, weights.convolution)
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
        log_decay = masked(log_decay, inside)
        beta = masked(beta, inside)

    pending = positions is not None and is_pending(positions, length)
    out, new_state = ops.delta_rule(q * sizes.key_dim**-0.5, k, v, log_decay, beta, current.state, by_position=pending)
    out = gated_norm(ops, out.astype(inputs.gate.dtype), inputs.gate.reshape(rows, length, *groups, -1), weights.norm, eps)
    if positions is None:
        after = None
    elif pending:
        after = before.with_block(PendingBlock(inputs.qkv, k, v, log_decay, beta))
    else:
        after = DeltaState(new_state, last_inputs(current.before, inputs.qkv, positions.count))
    return out.reshape(rows, length, -1), after


def gated_norm(
    ops: Operations, x: Float[Array, "*rows E"], gate: Float[Array, "*rows E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*rows E"]:
    """Applies an RMSNorm to each head, then multiplies by `silu` of its gate."""
    normed = ops.rms_norm(x, weight, eps).astype(jnp.float32)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
