"""The bundles in which XLA computes everything, on any chip."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
from tilewright.kernels.linear import xla
from tilewright.kernels.nonzero import xla as nonzero
from tilewright.kernels.operations import Norm, Operations, Transposed
from tilewright.kernels.paged import xla as paged
from tilewright.kernels.rms_norm import reference as norm_reference
from tilewright.kernels.scatter_rows import xla as scatter
from tilewright.kernels.window_attention import xla as window


def plain_head_argmax(x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return argmax.head_argmax(xla.normed(x, norm), head.w if tied else head, tied)


def plain_head_top_k(x: Float[Array, "*rows H"], head: Any, k: int) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return top_k.head_top_k(x, head.w if tied else head, k, tied)


def as_it_is(weight: Any, *named: Any, **options: Any) -> Any:
    return weight


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
    heads, linear = partial(heads_xla.heads, rotate=rotate), partial(xla.linear, product=product)
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
        restore=lambda w: w.w.T if isinstance(w, Transposed) else w,
        own_head=own_head,
    )


PLAIN = xla_operations("xla")
"""Plain `jnp`, compiled by XLA for any chip: the path that every other bundle is held against."""

CPU_XLA = xla_operations("xla", own_head=True)
"""`PLAIN` for a CPU, whose products read `[in, out]` up to twice as fast as the embedding transposed."""
