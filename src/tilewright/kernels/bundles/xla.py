"""The bundles in which XLA computes everything, on any chip."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tilewright.kernels.append import xla as append
from tilewright.kernels.attention import xla as attention
from tilewright.kernels.causal_attention import xla as causal
from tilewright.kernels.cross_entropy import xla as loss
from tilewright.kernels.delta_rule import xla as delta_rule
from tilewright.kernels.gather_rows import xla as gather
from tilewright.kernels.grouped_linear import xla as grouped
from tilewright.kernels.head_argmax import xla as argmax
from tilewright.kernels.head_top_k import xla as top_k
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import scaled, xla
from tilewright.kernels.linear.scaled import ScaledFormat, ScaledMatrix
from tilewright.kernels.nonzero import xla as nonzero
from tilewright.kernels.operations import Joined, Norm, Operations, Transposed
from tilewright.kernels.paged import xla as paged
from tilewright.kernels.rms_norm import reference as norm_reference
from tilewright.kernels.scatter_rows import xla as scatter
from tilewright.kernels.window_attention import xla as window


def plain_head_argmax(
    x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None, masks: Array | None = None
) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return argmax.head_argmax(xla.normed(x, norm), head.w if tied else head, tied, masks=masks)


def plain_head_top_k(x: Float[Array, "*rows H"], head: Any, k: int) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return top_k.head_top_k(x, head.w if tied else head, k, tied)


def as_it_is(weight: Any, *named: Any, **options: Any) -> Any:
    return weight


def restore(weight: Any) -> Array:
    w = weight.w.T if isinstance(weight, Transposed) else weight
    return w.dequantised(jnp.float32) if isinstance(w, ScaledMatrix) else w


def xla_operations(
    name: str,
    product: xla.Product = xla.product,
    rotate: Callable[..., Array] = heads_xla.rotate_halves,
    attend: Callable[..., Array] = attention.prefix_attention,
    head_argmax: Callable[..., tuple[Array, Array]] = plain_head_argmax,
    head_top_k: Callable[..., tuple[Array, Array]] = plain_head_top_k,
    append_all: Callable[..., tuple[Array, ...]] = append.append_all,
    own_head: bool = False,
) -> Operations:
    """A bundle of XLA's operations on weights as they are, some of them replaced."""
    heads = partial(heads_xla.heads, rotate=rotate)
    linear = partial(xla.linear, product=product)
    return Operations(
        name=name,
        gather_rows=gather.gather_rows,
        scatter_rows=scatter.scatter_rows,
        swap_rows=scatter.swap_rows,
        nonzero=nonzero.nonzero,
        linear=linear,
        gated_linear=partial(xla.gated_linear, product=product),
        grouped_linear=grouped.grouped_linear,
        grouped_gated=grouped.grouped_gated,
        project=partial(xla.project, product=product),
        heads=heads,
        rms_norm=norm_reference.rms_norm,  # XLA makes one loop of it
        prefix_attention=attend,
        window_attention=window.window_attention,
        append=append.append,
        append_attend=partial(append.append_attend, heads=heads, attend=attend, append_all=append_all),
        pages=paged.empty,
        paged_append=paged.append,
        paged_attention=paged.prefix_attention,
        paged_append_attend=partial(paged.append_attend, heads=heads),
        delta_rule=delta_rule.delta_rule,
        causal_attention=partial(causal.causal_attention, heads=heads),
        cross_entropy=partial(loss.cross_entropy, linear=linear),
        head_argmax=head_argmax,
        head_top_k=head_top_k,
        prepare_matrix=as_it_is,
        prepare_joined=as_it_is,
        prepare_groups=as_it_is,
        prepare_table=as_it_is,
        bytes_of=lambda kind, shape, stored: None,
        restore=restore,
        own_head=own_head,
    )


@cache
def in_few_bits(ops: Operations, kind: ScaledFormat) -> Operations:
    """A bundle of XLA's operations over weights in few bits, of which the output head and embeddings have 8."""

    def prepare_matrix(w: Any, name: str, largest: Any = None, head: bool = False, exact: bool = False) -> Any:
        return w if exact else scaled.prepared(w, "int8" if head else kind, name, largest)

    def prepare_joined(joined: Joined, name: str) -> Joined:
        return replace(joined, parts=tuple(scaled.prepared(w, kind, name) for w in joined.parts))

    def bytes_of(of: str, shape: tuple[int, ...], stored: str) -> int | None:
        if of == "embedding":
            return scaled.bytes_of_table(shape[0], shape[1])
        if of not in ("matrix", "head"):
            return None
        keeps = stored == "fp8" if kind == "fp8" else kind == "int4" and stored not in ("", "fp8")
        return scaled.bytes_of(shape[0], shape[1], stored if keeps else kind if of == "matrix" else "int8")

    return replace(
        ops,
        bytes_of=bytes_of,
        prepare_matrix=prepare_matrix,
        prepare_joined=prepare_joined,
        prepare_table=scaled.prepared_table,
        prepares=True,
        own_head=False,
        weights=kind,
        keeps_blocks=kind == "int4",
        keeps_fp8=kind == "fp8",
        scales_tables=True,
    )


PLAIN = xla_operations("xla")
"""Plain `jnp`, compiled by XLA for any chip: the path that every other bundle is held against."""

CPU_XLA = xla_operations("xla", own_head=True)
"""`PLAIN` for a CPU, whose products read `[in, out]` up to twice as fast as the embedding transposed."""
