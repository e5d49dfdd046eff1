"""The bundles for training, on weights as they are; the residual stream is float32."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.kernels.append import xla as append_xla
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.attention.cpu import refuses_heads
from tilewright.kernels.bundles.cpu import Joint, attention_operands, biased
from tilewright.kernels.bundles.xla import PLAIN, plain_head_argmax, xla_operations
from tilewright.kernels.causal_attention import cpu as causal_cpu
from tilewright.kernels.causal_attention import xla as causal_xla
from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.linear.cpu import BFLOAT16_ISAS as BFLOAT16_ISAS
from tilewright.kernels.operations import Heads, Joined, Norm, Operations
from tilewright.kernels.paged import xla as paged_xla
from tilewright.kernels.rms_norm import cpu as norm_cpu

MIXED = xla_operations("xla, bfloat16 products", xla.mixed_product)
"""For training on accelerators: float32 weights and activations, whose products are taken in bfloat16."""


@cache
def cpu_operations(bfloat16: bool) -> Operations:
    """The CPU kernels and their gradients, on weights as they are.

    Args:
        bfloat16: products are taken in bfloat16, with float32 sums.
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

    def causal_attention(projection: Joint, spec: Heads) -> Array:
        if refuses_heads(spec.head_dim) or not spec.scores.default:
            return causal_xla.causal_attention(projection, spec, heads)
        (array, count, _, size), options = attention_operands(projection, spec)
        sizes = causal_cpu.ProjectionSizes(count, size, options["eps"])
        return causal_cpu.causal_attention(sizes, array, *(options[name] for name in ("q_norm", "k_norm", "cos", "sin")))

    return replace(
        PLAIN,
        name=f"cpu training, {'bfloat16' if bfloat16 else 'float32'}",
        linear=linear,
        gated_linear=gated_linear,
        project=project,
        heads=heads,
        rms_norm=lambda x, weight, eps: norm_cpu.trained_norm(x, weight, eps, x.dtype),
        append_attend=partial(append_xla.append_attend, heads=heads, attend=attention_xla.prefix_attention),
        paged_append_attend=partial(paged_xla.append_attend, heads=heads),
        causal_attention=causal_attention,
        cross_entropy=partial(loss_xla.cross_entropy, linear=linear),
        head_argmax=lambda x, head, norm=None, masks=None: plain_head_argmax(
            normed(x, norm).astype(jnp.float32), head, masks=masks
        ),
    )
