"""The bundle of the CPU kernels, over weights that are packed once."""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.kernels.append import cpu as append_cpu
from tilewright.kernels.append import xla as append_xla
from tilewright.kernels.attention import cpu as attention_cpu
from tilewright.kernels.attention.cpu import refuses_heads
from tilewright.kernels.bundles import xla
from tilewright.kernels.causal_attention import xla as causal_xla
from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.delta_rule import xla as delta_rule
from tilewright.kernels.gather_rows import cpu as gather_cpu
from tilewright.kernels.grouped_linear import cpu as grouped_cpu
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import cpu
from tilewright.kernels.nonzero import cpu as nonzero_cpu
from tilewright.kernels.operations import Heads, Joined, KeyValuePages, Norm, Operations, Weights
from tilewright.kernels.paged import cpu as paged_cpu
from tilewright.kernels.paged import xla as paged_xla
from tilewright.kernels.registry import first
from tilewright.kernels.rms_norm import cpu as norm_cpu
from tilewright.kernels.scatter_rows import cpu as scatter_cpu


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["parts"])
@dataclass(frozen=True)
class Joint:
    """The products with several joined matrices, `[B, T, sum(parts)]`, side by side."""

    array: Array
    parts: tuple[int, ...]

    def split(self) -> tuple[Array, ...]:
        ends = tuple(accumulate(self.parts))
        return tuple(self.array[..., end - size : end] for size, end in zip(self.parts, ends, strict=True))


def attention_operands(projection: Joint, spec: Heads) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands of the CPU kernels for a projection, with queries or without: its heads, and their norms and rotation."""
    sizes = [size // spec.head_dim for size in projection.parts]
    queries = sizes[: len(sizes) % 2]
    key = sizes[-1] if len(sizes) > 1 else 0
    norms = {name: None if norm is None else norm.weight for name, norm in (("q_norm", spec.q_norm), ("k_norm", spec.k_norm))}
    eps = next((norm.eps for norm in (spec.q_norm, spec.k_norm) if norm is not None), 0.0)
    cos, sin = spec.rope
    return (projection.array, sum(queries), key, spec.head_dim), {**norms, "eps": eps, "cos": cos, "sin": sin}


def heads(projection: Joint, spec: Heads) -> tuple[Any, Any, Any]:
    if refuses_heads(spec.head_dim):
        return heads_xla.heads(projection.split(), spec, norm=norm_cpu.rms_norm)
    operands, options = attention_operands(projection, spec)
    q, k, v = attention_cpu.norm_rotate(*operands, **options)
    return (q if q.shape[2] else None), (k if k.shape[1] else None), (v if v.shape[1] else None)


def prefix_attention(q: Array, k: Array, v: Array, lengths: Array, extra: tuple[Array, Array] | None = None) -> Array:
    return first("attention", "cpu", q, k, extra).prefix_attention(q, k, v, lengths, extra)


def append_attend(projection: Joint, spec: Heads, k: Array, v: Array, start: Array, count: Array) -> tuple[Array, Array, Array]:
    if refuses_heads(spec.head_dim) or not spec.scores.plain:
        return append_xla.append_attend(projection, spec, k, v, start, count, heads, prefix_attention)
    operands, options = attention_operands(projection, spec)
    seen = {"window": spec.scores.window, "scale": spec.scores.scale}
    return attention_cpu.append_attend(*operands, **options, k_cache=k, v_cache=v, start=start, count=count, **seen)


def paged_attention(
    q: Array, pool: KeyValuePages, table: Array, lengths: Array, extra: tuple[Array, Array] | None = None
) -> Array:
    return first("paged attention", "cpu", q.shape[3], q.dtype).prefix_attention(q, pool, table, lengths, extra)


def paged_append_attend(projection: Joint, spec: Heads, pool: KeyValuePages, *places: Array) -> tuple[Array, KeyValuePages]:
    if refuses_heads(spec.head_dim) or not spec.scores.plain:
        return paged_xla.append_attend(projection, spec, pool, *places, heads=heads)
    operands, options = attention_operands(projection, spec)
    table, start, count = places
    seen = {"window": spec.scores.window, "scale": spec.scores.scale}
    return paged_cpu.append_attend(*operands, **options, pool=pool, table=table, start=start, count=count, **seen)


def before(norm: Norm | None) -> dict[str, Any]:
    """A norm as the CPU kernels take it."""
    return {} if norm is None else {"norm": norm.weight, "eps": norm.eps}


def linear(
    x: Array,
    w: Any,
    out_dtype: DTypeLike | None = None,
    norm: Norm | None = None,
    add: Array | None = None,
    count: Array | None = None,
) -> Array:
    return cpu.linear(x, w, out_dtype, **before(norm), add=add, count=count)


def biased(products: Array, bias: tuple[Array, ...] | None, first: int, last: int | None = None) -> Array:
    """Joint products with their biases on top, where there are some."""
    return products if bias is None else products + jnp.concatenate(bias[first:last], axis=-1).astype(products.dtype)


def project(
    x: Array,
    joined: Any,
    norm: Norm | None = None,
    first: int = 0,
    last: int | None = None,
    bias: tuple[Array, ...] | None = None,
    count: Array | None = None,
) -> Joint:
    parts = joined.parts[first:last]
    if isinstance(joined, Joined):  # of formats that no product reads together
        products = jnp.concatenate([cpu.linear(x, w, **before(norm), count=count) for w in parts], axis=-1)
        return Joint(biased(products, bias, first, last), tuple(w.outputs for w in parts))
    products = cpu.linear(x, joined, **before(norm), parts=(first, first + len(parts)), count=count)
    return Joint(biased(products, bias, first, last), parts)


def gated_linear(x: Array, joined: Any, norm: Norm | None = None, count: Array | None = None) -> Array:
    if not isinstance(joined, Joined):
        return linear(x, joined, norm=norm, count=count)
    gate, up = (cpu.linear(x, w, jnp.float32, **before(norm), count=count) for w in joined.parts)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def grouped_gated(x: Array, joined: Any, sizes: Array) -> Array:
    if not isinstance(joined, Joined):
        return grouped_cpu.grouped_linear(x, joined, sizes)
    gate, up = (grouped_cpu.grouped_linear(x, w, sizes, jnp.float32) for w in joined.parts)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def window_attention(q: Array, *rest: Array) -> tuple[Array, Array]:
    return first("window attention", "cpu", q).window_attention(q, *rest)


@cache
def cpu_operations(name: str, weights: Weights) -> Operations:
    """The kernels on a CPU's vector or tile unit, over weights that are packed once."""
    formats: dict[Weights, tuple[cpu.Format | None, cpu.Format | None]] = {"int8": ("q8_0", "q8_0"), "int4": ("q4_1", "q8_0")}
    kind, of_head = formats.get(weights, (None, None))

    def prepare_matrix(w: Any, name: str, largest: Any = None, head: bool = False, exact: bool = False) -> Any:
        return cpu.pack(w, None if exact else of_head if head else kind, name)

    def bytes_of(of: str, shape: tuple[int, ...], stored: str) -> int | None:
        chosen = (stored if weights == "int4" and stored != "fp8" else "") or (of_head if of == "head" else kind)
        if not chosen or of not in ("matrix", "head", "experts"):
            return None
        return prod(shape[:-2]) * cpu.bytes_of(shape[-2], shape[-1], chosen)

    def prepare_joined(joined: Joined, name: str) -> Any:
        if not cpu.read_together(joined.parts, kind):
            return replace(joined, parts=tuple(cpu.pack(w, kind, name) for w in joined.parts))
        if not joined.gated:
            return cpu.pack_joined(joined.parts, kind, name)
        gate, up = joined.parts
        return cpu.pack_gated(gate, up, kind, name)

    def prepare_groups(weights: Any, groups: int, name: str) -> Any:
        if not isinstance(weights, Joined):
            return grouped_cpu.pack([weights], groups, kind, name)
        if cpu.read_together(weights.parts, kind):
            return grouped_cpu.pack(weights.parts, groups, kind, name)
        return replace(weights, parts=tuple(grouped_cpu.pack([w], groups, kind, name) for w in weights.parts))

    return Operations(
        name=name,
        gather_rows=gather_cpu.gather_rows,
        scatter_rows=scatter_cpu.scatter_rows,
        swap_rows=scatter_cpu.swap_rows,
        nonzero=nonzero_cpu.nonzero,
        linear=linear,
        gated_linear=gated_linear,
        grouped_linear=grouped_cpu.grouped_linear,
        grouped_gated=grouped_gated,
        project=project,
        heads=heads,
        rms_norm=norm_cpu.rms_norm,
        prefix_attention=prefix_attention,
        window_attention=window_attention,
        append=append_cpu.append,
        append_attend=append_attend,
        pages=paged_xla.empty,
        paged_append=paged_cpu.append,
        paged_attention=paged_attention,
        paged_append_attend=paged_append_attend,
        delta_rule=delta_rule.delta_rule,
        causal_attention=partial(causal_xla.causal_attention, heads=heads),
        cross_entropy=partial(loss_xla.cross_entropy, linear=linear),
        head_argmax=lambda x, head, norm=None, masks=None: cpu.linear_argmax(x, head, **before(norm), masks=masks),
        head_top_k=cpu.linear_top_k,
        prepare_matrix=prepare_matrix,
        prepare_joined=prepare_joined,
        prepare_groups=prepare_groups,
        prepare_table=xla.as_it_is,
        bytes_of=bytes_of,
        restore=cpu.unpack,
        prepares=True,
        weights=weights,
        packs=True,
        keeps_blocks=weights == "int4",
        own_head=True,
        counts=True,
    )
