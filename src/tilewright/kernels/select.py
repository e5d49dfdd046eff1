"""The only dispatcher: which implementation of an operation runs.

What a model's weights are decides: those that were packed for the CPU kernels bring these with them, for attention too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Int32

from tilewright.kernels import native
from tilewright.kernels.attention import cpu as attention_cpu
from tilewright.kernels.attention import pallas_tpu as attention_tpu
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.gather_reduce import cpu as gather_cpu
from tilewright.kernels.gather_reduce import nki as gather_nki
from tilewright.kernels.gather_reduce import pallas_tpu as gather_tpu
from tilewright.kernels.gather_reduce import reference as gather_reference
from tilewright.kernels.gather_reduce import xla as gather_xla
from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.head_argmax import pallas_tpu as head_tpu
from tilewright.kernels.head_argmax import xla as head_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.linear.cpu import PackedMatrix, TrainedMatrix
from tilewright.kernels.rms_norm import cpu as norm_cpu
from tilewright.kernels.rms_norm import reference as norm_reference
from tilewright.kernels.rms_norm.cpu import KernelNorm
from tilewright.kernels.scatter_add import nki as scatter_nki
from tilewright.kernels.scatter_add import pallas_tpu as scatter_tpu
from tilewright.kernels.scatter_add import xla as scatter_xla

IMPLEMENTATIONS = {
    "gather_reduce": {"tpu": gather_tpu, "trainium": gather_nki},
    "scatter_add": {"tpu": scatter_tpu, "trainium": scatter_nki},
}
"""The modules of accelerators' kernels, for benchmarks, which count what these move on any machine."""

Attended = tuple[Array, Array, Array]
Matrix = Float[Array, "I O"] | PackedMatrix | TrainedMatrix


def rms_norm(x: Float[Array, "*rows H"], weight: Float[Array, " H"] | KernelNorm, eps: float) -> Float[Array, "*rows H"]:
    """Root-mean-square normalisation, computed in float32."""
    if isinstance(weight, KernelNorm):
        return norm_cpu.rms_norm(x, weight.weight, eps)
    return norm_reference.rms_norm(x, weight, eps)  # XLA makes one loop of it


def linear(x: Float[Array, "*rows I"], w: Matrix, out_dtype: DTypeLike | None = None) -> Float[Array, "*rows O"]:
    """`x @ w`, in `out_dtype` or else in the dtype of `x`."""
    if isinstance(w, PackedMatrix):
        return cpu.linear(x, w, out_dtype)
    return cpu.trained_linear(x, w.w, out_dtype) if isinstance(w, TrainedMatrix) else xla.linear(x, w, out_dtype)


def prepared(w: Float[Array, "I O"], name: str = "weight") -> Matrix:
    """A weight that `linear` will meet again and again: packed for the CPU kernels where they run."""
    return cpu.pack(w, name=name) if jax.default_backend() == "cpu" and native.kernels().isa else w


def gated_linear(x: Float[Array, "*rows I"], gate: Matrix, up: Matrix | None) -> Float[Array, "*rows O"]:
    """`silu(x @ gate) * (x @ up)`. A packed gate holds both matrices, and `up` is None."""
    if isinstance(gate, PackedMatrix):
        return cpu.linear(x, gate)
    assert up is not None, "gate and up are packed together or not at all"
    return jax.nn.silu(linear(x, gate)) * linear(x, up)


def head_argmax(
    x: Float[Array, "*rows H"], head: Float[Array, "..."] | PackedMatrix, transposed: bool = False
) -> Int32[Array, "*rows"]:
    """The first index of the largest of `x @ head`, by float32 sums.

    Args:
        transposed: the head is `[V, H]`, as an embedding lies in memory: a TPU then needs no copy of it. A packed one never is.
    """
    if isinstance(head, PackedMatrix):
        return cpu.linear_argmax(x, head)[0]
    plain = partial(head_xla.head_argmax, transposed=transposed)
    if not head_tpu.fits(x, head):
        return plain(x, head)
    return jax.lax.platform_dependent(x, head, tpu=partial(head_tpu.head_argmax, transposed=transposed), default=plain)


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
    if isinstance(beside, PackedMatrix) and q.shape[3] % attention_cpu.HEAD_MULTIPLE == 0:
        return attention_cpu.prefix_attention(q, k, v, lengths, own)
    plain = attention_xla.prefix_attention
    if not attention_tpu.fits(q, k, own):
        return plain(q, k, v, lengths, own)
    return jax.lax.platform_dependent(q, k, v, lengths, own, tpu=attention_tpu.prefix_attention, default=plain)


def gather_reduce(x: Array, sources: Array, degrees: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces for each row the features of its first `degrees` sources, times their weights; see its `reference.py`."""
    plain = partial(gather_xla.gather_reduce, reduce=reduce)
    if not gather_tpu.fits(x, sources, weights):
        return plain(x, sources, degrees, weights)
    fused = partial(gather_tpu.gather_reduce, reduce=reduce)
    return jax.lax.platform_dependent(x, sources, degrees, weights, tpu=fused, default=plain)


def gather_reduce_csr(x: Array, offsets: Array, sources: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """The same where row r has the sources `offsets[r]` to `offsets[r + 1]`, without padding."""
    plain = partial(gather_reference.gather_reduce_csr, reduce=reduce)
    if not reduces_lists():
        return plain(x, offsets, sources, weights)
    fused = partial(gather_cpu.gather_reduce_csr, reduce=reduce)
    return jax.lax.platform_dependent(x, offsets, sources, weights, cpu=fused, default=plain)


def attend_csr(
    x: Float[Array, "M F"],
    source: Float[Array, "M H"],
    target: Float[Array, "R H"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    slope: float,
    otherwise: Callable[[], Attended],
) -> Attended:
    """As `gather_reduce.cpu.attend_csr`: sums under a softmax over each row, with its maximum and its sum of powers.

    Args:
        lists: offsets and sources.
        otherwise: makes the same where there is no kernel for it.
    """
    if not reduces_lists():
        return otherwise()
    scores = source.astype(jnp.float32), target.astype(jnp.float32)
    fused = partial(gather_cpu.attend_csr, negative_slope=slope)
    return jax.lax.platform_dependent(x, *scores, *lists, cpu=fused, default=lambda *_: otherwise())


def attend_csr_grad(operands: tuple[Any, ...], slope: float, otherwise: Callable[[], Attended]) -> Attended:
    """The gradients of features and both scores; `operands` are those of `gather_reduce.cpu.attend_csr_grad`."""
    if not reduces_lists():
        return otherwise()
    fused = partial(gather_cpu.attend_csr_grad, negative_slope=slope)
    return jax.lax.platform_dependent(*operands, cpu=fused, default=lambda *_: otherwise())


def reduces_lists() -> bool:
    """Whether a kernel reduces lists of neighbours here, so that they beat padded rows."""
    return native.kernels().isa is not None


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"]) -> Float[Array, "R F"]:
    """Sums for each of R rows its first `degrees` of K messages."""
    plain = scatter_xla.scatter_add
    if not scatter_tpu.fits(messages):
        return plain(messages, degrees)
    return jax.lax.platform_dependent(messages, degrees, tpu=scatter_tpu.scatter_add, default=plain)
