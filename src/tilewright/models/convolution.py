"""Short causal convolutions along a block, around each sublayer of a drafter's layers (DFlash 2).

Each slot is mixed with earlier slots. A part of each kernel depends on the slot, and a group of channels shares this dynamic
part.

Legend: B rows of a batch, T slots of a block, H hidden size, k taps of a convolution, C groups of channels.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from tilewright.kernels.operations import Operations, Projection
from tilewright.models import decoder, dflash
from tilewright.models.decoder import Attend, Layer, head_norms
from tilewright.models.dflash import DFlashParams
from tilewright.models.params import ArraySpec, matrix
from tilewright.models.stack import Rows, Stack

BEFORE = 0
AFTER = 1
"""Sides of a sublayer, each of which has a convolution."""
SIDES = 2
SIZES = ("conv_kernel_size", "conv_group_size")
"""Configuration fields: the taps k, including the slot itself, and the channels that share a kernel's dynamic part."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Convolution:
    """Both convolutions of a sublayer.

    Attributes:
        base_kernel: `[side, tap, H]`; tap 0 is the slot itself, tap 1 the slot before it.
        kernel_projection: `[H, side * tap * group]`: projects each slot's hidden state to the dynamic part of its kernels.
    """

    base_kernel: Any
    kernel_projection: Any


@runtime_checkable
class HasConvolutions(Protocol):
    """Parameters of a drafter with convolutions around attention and MLP of each layer."""

    @property
    def backbone(self) -> DFlashParams: ...
    @property
    def attention_convs(self) -> tuple[Convolution, ...]: ...
    @property
    def mlp_convs(self) -> tuple[Convolution, ...]: ...


def num_groups(config: Any) -> int:
    """Returns C. `config` has the fields of a `DFlashConfig`, and `SIZES`."""
    return config.hidden_size // config.conv_group_size


def declare(config: Any) -> tuple[tuple[Convolution, ...], tuple[Convolution, ...]]:
    """Declares the convolutions around attention and around the MLP, layer by layer.

    The dynamic part of all kernels is initialised to zero.
    """
    h = config.hidden_size
    taps = config.conv_kernel_size

    def convolution(name: str) -> Convolution:
        return Convolution(
            ArraySpec(f"{name}.base_kernel", (SIDES, taps, h), ("conv", "conv", "hidden"), scale=0.0),
            matrix(f"{name}.kernel_projection.weight", h, SIDES * taps * num_groups(config), ("hidden", "conv"), scale=0.0),
        )

    attention, mlp = (
        tuple(convolution(f"layers.{n}.{kind}_conv") for n in range(config.num_layers)) for kind in ("attention", "mlp")
    )
    return attention, mlp


def pass_through(params: Any) -> Any:
    """Sets the convolutions of fresh parameters to the identity."""

    def identity(conv: Convolution) -> Convolution:
        return replace(conv, base_kernel=conv.base_kernel.at[:, 0].set(1))

    convs = {name: tuple(map(identity, getattr(params, name))) for name in ("attention_convs", "mlp_convs")}
    return replace(params, **convs)


Kernels = Float32[Array, "B T sides k C"]
"""Dynamic part of the kernels around a slot's sublayer."""


def dynamic_kernels(config: Any, ops: Operations, conv: Convolution, h: Float[Array, "B T H"]) -> Kernels:
    flat = ops.linear(h, conv.kernel_projection, jnp.float32)
    return flat.reshape(*h.shape[:2], SIDES, config.conv_kernel_size, num_groups(config))


def convolve(config: Any, conv: Convolution, dynamic: Kernels, side: int, y: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Returns each slot's weighted sum of itself and earlier slots, channel by channel.

    The weights are those of the slot that is written; slots before slot 0 count as zero. Sums are float32 regardless of the
    dtype of `y`.
    """
    base = conv.base_kernel[side].astype(jnp.float32).reshape(config.conv_kernel_size, num_groups(config), -1)
    groups = y.astype(jnp.float32).reshape(*y.shape[:2], *base.shape[1:])

    def tap(j: int) -> Array:
        earlier = jnp.pad(groups, ((0, 0), (j, 0), (0, 0), (0, 0)))[:, : y.shape[1]]
        return (base[j] + dynamic[:, :, side, j, :, None]) * earlier

    return sum((tap(j) for j in range(1, len(base))), tap(0)).reshape(y.shape).astype(y.dtype)


class ConvLayer(NamedTuple):
    """Decoder layer, and the convolutions around its sublayers."""

    decoder: Layer
    attention: Convolution
    mlp: Convolution


def stack_of(config: Any, ops: Operations, params: HasConvolutions, attend: Attend) -> Stack:
    """Builds the stack of layers. A sublayer's normed input also determines the kernels before and after it."""

    def project(ops: Operations, layer: ConvLayer, x: Float[Array, "B T H"]) -> tuple[Projection, Kernels]:
        h = ops.rms_norm(x, layer.decoder.input_norm, config.rms_norm_eps)
        dynamic = dynamic_kernels(config, ops, layer.attention, h)
        return ops.project(convolve(config, layer.attention, dynamic, BEFORE, h), layer.decoder.qkv), dynamic

    def attended(
        ops: Operations, layer: ConvLayer, projected: tuple[Projection, Kernels], rows: Rows, kv_cache: Any
    ) -> tuple[Any, Any]:
        out, kv_cache = attend(
            ops, projected[0], head_norms(config, layer.decoder, rows.rope["global"]), rows.attn_metadata, kv_cache
        )
        return (out, projected[1]), kv_cache

    def output(
        ops: Operations, layer: ConvLayer, out: tuple[Array, Kernels], add: Float[Array, "B T H"] | None = None
    ) -> Float[Array, "B T H"]:
        inner = decoder.post_reduce(config, ops, layer.decoder, "attention", decoder.output(config, ops, layer.decoder, out[0]))
        y = convolve(config, layer.attention, out[1], AFTER, inner)
        return y if add is None else add + y

    def mlp(
        ops: Operations, layer: ConvLayer, x: Float[Array, "B T H"], add: Float[Array, "B T H"] | None = None
    ) -> Float[Array, "B T H"]:
        h = ops.rms_norm(x, layer.decoder.post_attention_norm, config.rms_norm_eps)
        dynamic = dynamic_kernels(config, ops, layer.mlp, h)
        inner = ops.gated_linear(convolve(config, layer.mlp, dynamic, BEFORE, h), layer.decoder.gate_up)
        y = convolve(config, layer.mlp, dynamic, AFTER, ops.linear(inner, layer.decoder.down))
        return y if add is None else add + y

    layers = tuple(map(ConvLayer, params.backbone.layers, params.attention_convs, params.mlp_convs))
    return Stack(ops, layers, project, attended, output, mlp, post_reduce=lambda ops, layer, sublayer, y: y)


def run_block(
    config: Any,
    ops: Operations,
    params: HasConvolutions,
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    attend: Attend,
    attn_metadata: Any,
) -> Float[Array, "B T H"]:
    """Runs blocks through all layers; see `dflash.run_block`. The context is DFlash's, without convolutions."""
    stack = stack_of(config, ops, params, attend)
    return dflash.run_stack(config, stack, params.backbone.norm, embedded, positions, context, attn_metadata)
