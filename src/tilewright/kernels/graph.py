"""Graph reductions, which dispatch on the device that a program is compiled for.

A program may target a chip other than the local one, so the implementations for TPUs and for the local device are both traced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from tilewright.kernels import native
from tilewright.kernels.gather_reduce import reference
from tilewright.kernels.gather_reduce import xla as gather_xla
from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.neighbours import reference as sampler_reference
from tilewright.kernels.registry import Chip, Kernels, Selection, first, selection
from tilewright.kernels.scatter_add import xla as scatter_xla

Attended = tuple[Array, Array, Array]


def gather_reduce(x: Array, sources: Array, degrees: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces, for each row, the features of its first `degrees` sources times their weights; see its `reference.py`."""
    plain = partial(gather_xla.gather_reduce, reduce=reduce)
    on_tpu = first("gather_reduce", "tpu", x, sources, weights)
    if on_tpu is gather_xla:
        return plain(x, sources, degrees, weights)
    fused = partial(on_tpu.gather_reduce, reduce=reduce)
    return jax.lax.platform_dependent(x, sources, degrees, weights, tpu=fused, default=plain)


def gather_reduce_csr(x: Array, offsets: Array, sources: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces, for each row r, the features of its sources `offsets[r]` to `offsets[r + 1]`, times their weights."""
    plain = partial(reference.gather_reduce_csr, reduce=reduce)
    if not has_csr_kernels():
        return plain(x, offsets, sources, weights)
    fused = partial(lists_kernel().gather_reduce_csr, reduce=reduce)
    return jax.lax.platform_dependent(x, offsets, sources, weights, cpu=fused, default=plain)


def neighbour_sampler() -> tuple[Any, str]:
    """Returns the module that samples neighbours, with the functions of `neighbours.reference`, and why it is not compiled."""
    library, reason = native.host_library("neighbours")
    if library is None:
        return sampler_reference, reason
    from tilewright.kernels.neighbours import cpu as sampler_cpu

    return sampler_cpu, ""


def message_kernel(
    function: bool, weighted: bool, reduce: str, chip: Chip | None = None, kernels: Kernels = "auto"
) -> Selection:
    """Returns the implementation that reduces messages of a form, and the reasons against faster ones.

    Args:
        function, weighted, reduce: form of the messages, see `gather_reduce.reference.refuses_message_reduce`.
        chip, kernels: see `select.operations`.
    """
    here = chip or cast(Chip, jax.default_backend())
    return selection("messages", (function, weighted, reduce), here, kernels)


def attend_csr(
    x: Float[Array, "M F"],
    source: Float[Array, "M H"],
    target: Float[Array, "R H"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    slope: float,
    fallback: Callable[[], Attended],
) -> Attended:
    """Sums features with a softmax over each row's edges as weights; see `gather_reduce.cpu.attend_csr`.

    Args:
        lists: offsets and sources.
        fallback: computes the result if no kernel is available.

    Returns:
        The sums, and the maximum and the sum of exponentials of each row's scores.
    """
    if not has_csr_kernels():
        return fallback()
    scores = source.astype(jnp.float32), target.astype(jnp.float32)
    fused = partial(lists_kernel().attend_csr, negative_slope=slope)
    return jax.lax.platform_dependent(x, *scores, *lists, cpu=fused, default=lambda *_: fallback())


def attend_csr_grad(operands: tuple[Any, ...], slope: float, fallback: Callable[[], Attended]) -> Attended:
    """Returns the gradients of features and both scores; `operands` are those of `gather_reduce.cpu.attend_csr_grad`."""
    if not has_csr_kernels():
        return fallback()
    fused = partial(lists_kernel().attend_csr_grad, negative_slope=slope)
    return jax.lax.platform_dependent(*operands, cpu=fused, default=lambda *_: fallback())


def edge_dot_csr(
    rows: Float[Array, "R H D"],
    x: Float[Array, "M H D"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    fallback: Callable[[], Float[Array, "E H"]],
) -> Float[Array, "E H"]:
    """Computes the dot product of each edge's row and source, per head, in float32; see `attend_csr` for the arguments."""
    if not has_csr_kernels() or rows.dtype != x.dtype:
        return fallback()
    flat = jax.lax.collapse(rows, 1), jax.lax.collapse(x, 1)
    fused = partial(lists_kernel().edge_dot_csr, heads=x.shape[1])
    return jax.lax.platform_dependent(*flat, *lists, cpu=fused, default=lambda *_: fallback())


def lists_kernel() -> Any:
    """Returns the kernel for graphs in compressed form, which exists for CPUs only."""
    return first("gather_reduce", "cpu")


def has_csr_kernels() -> bool:
    """Returns True if a kernel for graphs in compressed form is available, which is faster than padded rows."""
    return native.kernels().isa is not None


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"]) -> Float[Array, "R F"]:
    """Sums, for each of R rows, its first `degrees` of K messages."""
    on_tpu = first("scatter_add", "tpu", messages)
    if on_tpu is scatter_xla:
        return scatter_xla.scatter_add(messages, degrees)
    return jax.lax.platform_dependent(messages, degrees, tpu=on_tpu.scatter_add, default=scatter_xla.scatter_add)
