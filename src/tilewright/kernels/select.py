"""The only dispatcher: which implementation of an operation runs.

What a model's weights are decides: those that were packed for the CPU kernels bring these with them, for attention too.
"""

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from tilewright.kernels.attention import cpu as attention_cpu
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.linear.cpu import PackedMatrix

Matrix = Float[Array, "I O"] | PackedMatrix


def linear(x: Float[Array, "*rows I"], w: Matrix, out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """`x @ w`, in `out_dtype` or else in the dtype of `x`."""
    return cpu.linear(x, w, out_dtype) if isinstance(w, PackedMatrix) else xla.linear(x, w, out_dtype)


def gated_linear(x: Float[Array, "*rows I"], gate: Matrix, up: Matrix | None) -> Float[Array, "*rows O"]:
    """`silu(x @ gate) * (x @ up)`. A packed gate holds both matrices, and `up` is None."""
    if isinstance(gate, PackedMatrix):
        return cpu.linear(x, gate)
    assert isinstance(up, jax.Array), "gate and up are packed together or not at all"
    return xla.gated_linear(x, gate, up)


def prefix_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B K S D"],
    v: Float[Array, "B K S D"],
    lengths: Int[Array, "B T"],
    own: tuple[Array, Array] | None = None,
    *,
    beside: Matrix,
) -> Float[Array, "B T N D"]:
    """Attention of each query over the first `lengths` entries of a cache, and over all of `own`.

    Args:
        beside: a weight of the same layer; where that is packed, the CPU kernel runs.
    """
    packed = isinstance(beside, PackedMatrix) and q.shape[3] % attention_cpu.HEAD_MULTIPLE == 0
    run = attention_cpu.prefix_attention if packed else attention_xla.prefix_attention
    return run(q, k, v, lengths, own)
