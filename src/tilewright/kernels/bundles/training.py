"""Bundles for training on unprepared weights, with a float32 residual stream."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from tilewright.kernels.bundles.xla import PLAIN, in_few_bits, unchanged
from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.linear.cpu import BFLOAT16_ISAS as BFLOAT16_ISAS
from tilewright.kernels.linear.cpu import Joint, biased
from tilewright.kernels.linear.scaled import ScaledFormat, ScaledMatrix
from tilewright.kernels.masks import AttentionMask
from tilewright.kernels.operations import PLAIN_SCORES, Heads, Joined, Norm, Operations, Scores, attend_in_steps
from tilewright.kernels.registry import Chip, function
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
"""Float32 weights and activations, matmuls in bfloat16."""


@cache
def accelerator_operations(chip: Chip, mixed: bool) -> Operations:
    """Returns XLA's operations, with a chip's kernel for attention without a cache where it supports the operands.

    Args:
        chip: "tpu" or "gpu".
        mixed: weights and activations are float32, matmuls bfloat16 with float32 sums, also those of attention.
    """
    attend_block = function("attend_block", chip)

    def attend(
        q: Array, cache: Any, mask: AttentionMask, block_kv: Any = None, scores: Scores = PLAIN_SCORES
    ) -> Float[Array, "B T N D"]:
        if cache is not None:
            return PLAIN.attend(q, cache, mask, block_kv, scores)
        if not mixed:
            return attend_block(q, mask, block_kv, scores)
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, block_kv))
        return attend_block(rounded[0], mask, rounded[1], scores).astype(q.dtype)

    return replace(
        MIXED if mixed else PLAIN, name=f"{chip} training, {'bfloat16 products' if mixed else 'one dtype'}", attend=attend
    )


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
        y: Any = cpu.trained_gated(precision, flat, cpu.divisible(joined.parts))
        return y.reshape(*x.shape[:-1], -1)

    def project(
        x: Array,
        joined: Joined,
        norm: Norm | None = None,
        first: int = 0,
        last: int | None = None,
        bias: tuple[Array, ...] | None = None,
        count: Array | None = None,
    ) -> Joint:
        parts = joined.parts[first:last]
        y: Any = cpu.trained_joined(precision, normed(x, norm).reshape(-1, x.shape[-1]), cpu.divisible(parts))
        products = y.reshape(*x.shape[:-1], -1)
        return Joint(biased(products, bias, first, last), tuple(part.shape[1] for part in parts))

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


@cache
def with_quantised(ops: Operations, kind: ScaledFormat) -> Operations:
    """Returns a bundle for training beside frozen matrices that stay quantised in memory; embeddings keep their dtype.

    A matmul dequantises its matrix, and the gradient of its rows dequantises it again, so that memory holds few matrices in
    full at a time. Quantised matrices have no gradients.

    Args:
        ops: a bundle for training, which computes the matmuls.
        kind: format into which matrices are quantised.
    """

    def in_full(w: Any, dtype: DTypeLike) -> Any:
        def dequantised(leaf: Any) -> Any:
            return leaf.dequantised(dtype) if isinstance(leaf, ScaledMatrix) else leaf

        return jax.tree.map(dequantised, w, is_leaf=lambda leaf: isinstance(leaf, ScaledMatrix))

    def dequantising(product: Any) -> Any:
        def run(x: Array, w: Any, *settings: Any, **more: Any) -> Any:
            # Without the checkpoint, the gradient would keep the dequantised matrix of every layer.
            return jax.checkpoint(lambda x, w: product(x, in_full(w, x.dtype), *settings, **more))(x, w)

        return run

    linear = dequantising(ops.linear)

    def gated_linear(x: Array, joined: Joined, norm: Norm | None = None, count: Array | None = None) -> Array:
        gate, up = (linear(x, w, jnp.float32, norm, count=count) for w in joined.parts)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    return replace(
        in_few_bits(ops, kind),
        linear=linear,
        project=dequantising(ops.project),
        gated_linear=gated_linear,
        cross_entropy=lambda x, head, *rest: ops.cross_entropy(x, in_full(head, x.dtype), *rest),
        prepare_table=unchanged,
        scales_tables=False,
    )
