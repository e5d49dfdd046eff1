"""Short causal convolutions along a block, around each sublayer of a drafter's layers, as DFlash 2 has them.

Each slot is mixed with those before it. The kernels depend on the slot, and groups of channels share what depends on it.

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
"""The sides of a sublayer that has a convolution on each."""
SIDES = 2
SIZES = ("conv_kernel_size", "conv_group_size")
"""Of a configuration: the taps k, the slot itself included, and the channels that share a kernel's dynamic part."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Convolution:
    """Both convolutions of a sublayer.

    Attributes:
        base_kernel: `[side, tap, H]`; tap 0 is the slot itself, tap 1 the one before it.
        kernel_projection: `[H, side * tap * group]`: what each slot's hidden state adds to its kernels.
    """

    base_kernel: Any
    kernel_projection: Any


@runtime_checkable
class HasConvolutions(Protocol):
    """Parameters of a drafter with convolutions, one of each kind for each layer."""

    @property
    def backbone(self) -> DFlashParams: ...
    @property
    def attention_convs(self) -> tuple[Convolution, ...]: ...
    @property
    def mlp_convs(self) -> tuple[Convolution, ...]: ...


def groups_of(config: Any) -> int:
    """C. `config` has the fields of a `DFlashConfig`, and `SIZES`."""
    return config.hidden_size // config.conv_group_size


def declare(config: Any) -> tuple[tuple[Convolution, ...], tuple[Convolution, ...]]:
    """The convolutions around attention and around the MLP, layer by layer. Fresh, the dynamic part of all kernels is zero."""
    h = config.hidden_size
    taps = config.conv_kernel_size

    def convolution(name: str) -> Convolution:
        return Convolution(
            ArraySpec(f"{name}.base_kernel", (SIDES, taps, h), ("conv", "conv", "hidden"), scale=0.0),
            matrix(f"{name}.kernel_projection.weight", h, SIDES * taps * groups_of(config), ("hidden", "conv"), scale=0.0),
        )

    attention, mlp = (
        tuple(convolution(f"layers.{n}.{kind}_conv") for n in range(config.num_layers)) for kind in ("attention", "mlp")
    )
    return attention, mlp


def passing(params: Any) -> Any:
    """Fresh parameters whose convolutions pass every slot on as it is."""

    def opened(conv: Convolution) -> Convolution:
        return replace(conv, base_kernel=conv.base_kernel.at[:, 0].set(1))

    convs = {name: tuple(map(opened, getattr(params, name))) for name in ("attention_convs", "mlp_convs")}
    return replace(params, **convs)


Kernels = Float32[Array, "B T sides k C"]
"""What a slot adds to the kernels around its sublayer."""


def dynamic_kernels(config: Any, ops: Operations, conv: Convolution, h: Float[Array, "B T H"]) -> Kernels:
    flat = ops.linear(h, conv.kernel_projection, jnp.float32)
    return flat.reshape(*h.shape[:2], SIDES, config.conv_kernel_size, groups_of(config))


def convolve(config: Any, conv: Convolution, dynamic: Kernels, side: int, y: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
    """Each slot's weighted sum of itself and the slots before it, channel by channel; nothing lies before slot 0.

    The weights are those of the slot that is written. In float32, whatever the dtype of `y`.
    """
    base = conv.base_kernel[side].astype(jnp.float32).reshape(config.conv_kernel_size, groups_of(config), -1)
    groups = y.astype(jnp.float32).reshape(*y.shape[:2], *base.shape[1:])

    def tap(j: int) -> Array:
        earlier = jnp.pad(groups, ((0, 0), (j, 0), (0, 0), (0, 0)))[:, : y.shape[1]]
        return (base[j] + dynamic[:, :, side, j, :, None]) * earlier

    return sum((tap(j) for j in range(1, len(base))), tap(0)).reshape(y.shape).astype(y.dtype)


class ConvLayer(NamedTuple):
    """A decoder's layer and the convolutions around its sublayers."""

    layer: Layer
    attention: Convolution
    mlp: Convolution


def stack_of(config: Any, ops: Operations, params: HasConvolutions, attend: Attend) -> Stack:
    """The layers in their parts. What a layer's norm gives also decides the kernels on both sides of the sublayer behind it."""

    def project(ops: Operations, of: ConvLayer, x: Float[Array, "B T H"]) -> tuple[Projection, Kernels]:
        h = ops.rms_norm(x, of.layer.input_norm, config.rms_norm_eps)
        dynamic = dynamic_kernels(config, ops, of.attention, h)
        return ops.project(convolve(config, of.attention, dynamic, BEFORE, h), of.layer.qkv), dynamic

    def attended(
        ops: Operations, of: ConvLayer, projected: tuple[Projection, Kernels], rows: Rows, kept: Any
    ) -> tuple[Any, Any]:
        out, kept = attend(ops, projected[0], head_norms(config, of.layer, rows.rope["global"]), rows.seen, kept)
        return (out, projected[1]), kept

    def output(
        ops: Operations, of: ConvLayer, out: tuple[Array, Kernels], add: Float[Array, "B T H"] | None = None
    ) -> Float[Array, "B T H"]:
        own = decoder.summed(config, ops, of.layer, "attention", decoder.output(config, ops, of.layer, out[0]))
        y = convolve(config, of.attention, out[1], AFTER, own)
        return y if add is None else add + y

    def mlp(
        ops: Operations, of: ConvLayer, x: Float[Array, "B T H"], add: Float[Array, "B T H"] | None = None
    ) -> Float[Array, "B T H"]:
        h = ops.rms_norm(x, of.layer.post_attention_norm, config.rms_norm_eps)
        dynamic = dynamic_kernels(config, ops, of.mlp, h)
        inner = ops.gated_linear(convolve(config, of.mlp, dynamic, BEFORE, h), of.layer.gate_up)
        y = convolve(config, of.mlp, dynamic, AFTER, ops.linear(inner, of.layer.down))
        return y if add is None else add + y

    of = tuple(map(ConvLayer, params.backbone.layers, params.attention_convs, params.mlp_convs))
    return Stack(ops, of, project, attended, output, mlp, summed=lambda ops, of, half, y: y)


def run_block(
    config: Any,
    ops: Operations,
    params: HasConvolutions,
    embedded: Float[Array, "B T H"],
    positions: Int[Array, "B T"],
    context: tuple[Any, ...],
    attend: Attend,
    seen: Any,
) -> Float[Array, "B T H"]:
    """Runs blocks through all layers; see `dflash.run_block`. The context is DFlash's: no convolution touches it."""
    stack = stack_of(config, ops, params, attend)
    return dflash.run_stack(config, stack, params.backbone.norm, embedded, positions, context, seen)
