"""Bundles for training on unprepared weights, with a float32 residual stream."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.kernels.bundles.xla import PLAIN
from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.linear.cpu import BFLOAT16_ISAS as BFLOAT16_ISAS
from tilewright.kernels.linear.cpu import Joint, biased
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import Heads, Joined, Norm, Operations, attend_in_steps
from tilewright.kernels.rms_norm import cpu as norm_cpu
from tilewright.kernels.self_attention import cpu as self_attention

MIXED_LINEAR = partial(xla.linear, product=xla.mixed_product)
MIXED = replace(
    PLAIN,
    name="xla, bfloat16 products",
    linear=MIXED_LINEAR,
    gated_linear=partial(xla.gated_linear, product=xla.mixed_product),
    project=partial(xla.project, product=xla.mixed_product),
    cross_entropy=partial(loss_xla.cross_entropy, linear=MIXED_LINEAR),
)
"""Training on accelerators: float32 weights and activations, matmuls in bfloat16."""


@cache
def cpu_operations(bfloat16: bool) -> Operations:
    """Returns the CPU kernels with their gradients, on unprepared weights.

    Args:
        bfloat16: matmuls in bfloat16 with float32 sums.
    """
    precision = cpu.TrainingPrecision(bfloat16)

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else norm_cpu.trained_norm(x.astype(jnp.float32), norm.weight, norm.eps, precision.dtype)

    def linear(
        x: Array,
        w: Any,
        out_dtype: DTypeLike | None = None,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Array | None = None,
    ) -> Array:
        return cpu.trained_linear(precision, normed(x, norm), w, out_dtype or jnp.float32, add)

    def gated_linear(x: Array, joined: Joined, norm: Norm | None = None, count: Array | None = None) -> Array:
        flat = normed(x, norm).reshape(-1, x.shape[-1])
        y: Any = cpu.trained_gated(precision, flat, jnp.concatenate(joined.parts, axis=1))
        return y.reshape(*x.shape[:-1], -1)

    def project(
        x: Array, joined: Joined, norm: Norm | None = None, first: int = 0, bias: tuple[Array, ...] | None = None
    ) -> Joint:
        parts = joined.parts[first:]
        array = cpu.trained_linear(precision, normed(x, norm), jnp.concatenate(parts, axis=1), precision.dtype)
        return Joint(biased(array, bias, first), tuple(part.shape[1] for part in parts))

    def heads(projection: Joint, spec: Heads) -> tuple[Any, Any, Any]:
        return heads_xla.heads(tuple(part.astype(jnp.float32) for part in projection.split()), spec)

    def attend_projected(ops: Operations, projection: Joint, spec: Heads, cache: Any, mask: AttentionMask) -> tuple[Array, Any]:
        refused = self_attention.refuses(ops, projection, spec, cache, mask)
        run = attend_in_steps if refused else self_attention.attend_projected
        return run(ops, projection, spec, cache, mask)

    return replace(
        PLAIN,
        name=f"cpu training, {'bfloat16' if bfloat16 else 'float32'}",
        linear=linear,
        gated_linear=gated_linear,
        project=project,
        heads=heads,
        rms_norm=lambda x, weight, eps: norm_cpu.trained_norm(x, weight, eps, x.dtype),
        attend_projected=attend_projected,
        cross_entropy=partial(loss_xla.cross_entropy, linear=linear),
        head_argmax=lambda x, head, norm=None, masks=None: PLAIN.head_argmax(
            normed(x, norm).astype(jnp.float32), head, masks=masks
        ),
    )
