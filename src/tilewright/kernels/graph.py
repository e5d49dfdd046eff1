"""Reductions of graphs, which dispatch by the device that a program runs on.

A program may be compiled for a chip that is not here, so that what a TPU would run is traced beside what runs here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.kernels import native
from tilewright.kernels.gather_reduce import reference
from tilewright.kernels.gather_reduce import xla as gather_xla
from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.registry import first
from tilewright.kernels.scatter_add import xla as scatter_xla

Attended = tuple[Array, Array, Array]


def gather_reduce(x: Array, sources: Array, degrees: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces for each row the features of its first `degrees` sources, times their weights; see its `reference.py`."""
    plain = partial(gather_xla.gather_reduce, reduce=reduce)
    on_tpu = first("graph reduction", "tpu", x, sources, weights)
    if on_tpu is gather_xla:
        return plain(x, sources, degrees, weights)
    fused = partial(on_tpu.gather_reduce, reduce=reduce)
    return jax.lax.platform_dependent(x, sources, degrees, weights, tpu=fused, default=plain)


def gather_reduce_csr(x: Array, offsets: Array, sources: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces for each row r the features of its sources `offsets[r]` to `offsets[r + 1]`, times their weights."""
    plain = partial(reference.gather_reduce_csr, reduce=reduce)
    if not reduces_lists():
        return plain(x, offsets, sources, weights)
    fused = partial(lists_kernel().gather_reduce_csr, reduce=reduce)
    return jax.lax.platform_dependent(x, offsets, sources, weights, cpu=fused, default=plain)


def attend_csr(
    x: Float[Array, "M F"],
    source: Float[Array, "M H"],
    target: Float[Array, "R H"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    slope: float,
    otherwise: Callable[[], Attended],
) -> Attended:
    """Sums under a softmax over each row's list, with its maximum and its sum of powers; see `gather_reduce.cpu.attend_csr`.

    Args:
        lists: offsets and sources.
        otherwise: makes the same where there is no kernel for it.
    """
    if not reduces_lists():
        return otherwise()
    scores = source.astype(jnp.float32), target.astype(jnp.float32)
    fused = partial(lists_kernel().attend_csr, negative_slope=slope)
    return jax.lax.platform_dependent(x, *scores, *lists, cpu=fused, default=lambda *_: otherwise())


def attend_csr_grad(operands: tuple[Any, ...], slope: float, otherwise: Callable[[], Attended]) -> Attended:
    """The gradients of features and both scores; `operands` are those of `gather_reduce.cpu.attend_csr_grad`."""
    if not reduces_lists():
        return otherwise()
    fused = partial(lists_kernel().attend_csr_grad, negative_slope=slope)
    return jax.lax.platform_dependent(*operands, cpu=fused, default=lambda *_: otherwise())


def edge_dot_csr(
    rows: Float[Array, "R H D"],
    x: Float[Array, "M H D"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    otherwise: Callable[[], Float[Array, "E H"]],
) -> Float[Array, "E H"]:
    """The product of each edge's row and source, head by head, in float32; `lists` and `otherwise` as in `attend_csr`."""
    if not reduces_lists() or rows.dtype != x.dtype:
        return otherwise()
    flat = jax.lax.collapse(rows, 1), jax.lax.collapse(x, 1)
    fused = partial(lists_kernel().edge_dot_csr, heads=x.shape[1])
    return jax.lax.platform_dependent(*flat, *lists, cpu=fused, default=lambda *_: otherwise())


def lists_kernel() -> Any:
    """The kernel for lists of neighbours, which only CPUs have."""
    return first("graph reduction", "cpu")


def reduces_lists() -> bool:
    """True if a kernel reduces lists of neighbours here, so that they beat padded rows."""
    return native.kernels().isa is not None


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"]) -> Float[Array, "R F"]:
    """Sums for each of R rows its first `degrees` of K messages."""
    on_tpu = first("sums of messages", "tpu", messages)
    if on_tpu is scatter_xla:
        return scatter_xla.scatter_add(messages, degrees)
    return jax.lax.platform_dependent(messages, degrees, tpu=on_tpu.scatter_add, default=scatter_xla.scatter_add)
