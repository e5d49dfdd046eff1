"""The only dispatcher: which implementation of an operation runs.

`CANDIDATES` lists them, the fastest first, each with what it refuses. Language models take a bundle that `operations` makes
once, when a model is loaded. The reductions of graph networks dispatch by the device that they run on. `implementations` says
what runs, and why not a faster one, by the same list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from tilewright.kernels import native
from tilewright.kernels.append import cpu as append_cpu
from tilewright.kernels.append import pallas_tpu as append_tpu
from tilewright.kernels.append import xla as append_xla
from tilewright.kernels.attention import cpu as attention_cpu
from tilewright.kernels.attention import pallas_tpu as attention_tpu
from tilewright.kernels.attention import xla as attention_xla
from tilewright.kernels.attention.xla import MASKED as MASKED
from tilewright.kernels.attention.xla import KeyValues as KeyValues
from tilewright.kernels.attention.xla import attention as attention
from tilewright.kernels.attention.xla import attention_over as attention_over
from tilewright.kernels.attention.xla import group_rows as group_rows
from tilewright.kernels.attention.xla import ungroup_rows as ungroup_rows
from tilewright.kernels.causal_attention import cpu as causal_cpu
from tilewright.kernels.causal_attention import xla as causal_xla
from tilewright.kernels.compact import cpu as compact_cpu
from tilewright.kernels.compact import xla as compact_xla
from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.gather_reduce import cpu as gather_cpu
from tilewright.kernels.gather_reduce import nki as gather_nki
from tilewright.kernels.gather_reduce import pallas_tpu as gather_tpu
from tilewright.kernels.gather_reduce import reference as gather_reference
from tilewright.kernels.gather_reduce import xla as gather_xla
from tilewright.kernels.gather_reduce.reference import Reduce
from tilewright.kernels.head_argmax import pallas_tpu as head_tpu
from tilewright.kernels.head_argmax import xla as head_xla
from tilewright.kernels.head_top_k import pallas_tpu as top_k_tpu
from tilewright.kernels.head_top_k import xla as top_k_xla
from tilewright.kernels.heads import xla as heads_xla
from tilewright.kernels.linear import cpu, xla
from tilewright.kernels.operations import Heads, Joined, Norm, Operations, Pages, Pool, Transposed
from tilewright.kernels.paged import cpu as paged_cpu
from tilewright.kernels.paged import pallas_tpu as paged_tpu
from tilewright.kernels.paged import xla as paged_xla
from tilewright.kernels.put import cpu as put_cpu
from tilewright.kernels.put import xla as put_xla
from tilewright.kernels.rms_norm import cpu as norm_cpu
from tilewright.kernels.rms_norm import reference as norm_reference
from tilewright.kernels.scatter_add import nki as scatter_nki
from tilewright.kernels.scatter_add import pallas_tpu as scatter_tpu
from tilewright.kernels.scatter_add import xla as scatter_xla
from tilewright.kernels.take import cpu as take_cpu
from tilewright.kernels.take import xla as take_xla
from tilewright.kernels.window_attention import cpu as window_cpu
from tilewright.kernels.window_attention import pallas_tpu as window_tpu
from tilewright.kernels.window_attention import xla as window_xla
from tilewright.kernels.window_attention.reference import CARRIED as CARRIED
from tilewright.kernels.window_attention.reference import EXACT as EXACT
from tilewright.kernels.window_attention.reference import IDLE as IDLE
from tilewright.kernels.window_attention.reference import cosine as cosine

IMPLEMENTATIONS = {
    "gather_reduce": {"tpu": gather_tpu, "trainium": gather_nki},
    "scatter_add": {"tpu": scatter_tpu, "trainium": scatter_nki},
}
"""The modules of accelerators' kernels, for benchmarks, which count what these move on any machine."""

Attended = tuple[Array, Array, Array]
Chip = Literal["cpu", "gpu", "tpu"]
Kernels = Literal["auto", "xla"]
Weights = Literal["auto", "int8", "int4"]
Products = Literal["auto", "float32", "bfloat16"]


class Candidate(NamedTuple):
    """One implementation of an operation.

    Attributes:
        name: as users read it.
        chip: that it is for; None for any.
        refuses: why it does not take some operands of the operation; empty if it does.
    """

    name: str
    module: Any
    chip: Chip | None = None
    refuses: Callable[..., str] = lambda *operands: ""


def unless(fits: Callable[..., bool], taken: str) -> Callable[..., str]:
    """What a kernel refuses that takes some operands only, which `taken` describes."""
    return lambda *operands: "" if fits(*operands) else f"it takes {taken}"


def whole_panels(head_dim: int) -> str:
    """Why the CPU kernels do not take heads of this size; empty if they do."""
    multiple = attention_cpu.HEAD_MULTIPLE
    return f"heads of {head_dim} are no multiple of {multiple}" if head_dim % multiple else ""


LANES_OF_HEADS = "heads of a multiple of 128, all in float32 or all in bfloat16"

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "products": (Candidate("C++", cpu, "cpu"), Candidate("XLA", xla)),
    "norms": (Candidate("C++", norm_cpu, "cpu"), Candidate("XLA", norm_reference)),
    "attention": (
        Candidate("Pallas", attention_tpu, "tpu", unless(attention_tpu.fits, f"{LANES_OF_HEADS}, and few keys of a block")),
        Candidate("C++", attention_cpu, "cpu", lambda q, *rest: whole_panels(q.shape[3])),
        Candidate("XLA", attention_xla),
    ),
    "paged attention": (
        Candidate("ragged Pallas", paged_tpu, "tpu", lambda head_dim, dtype: paged_tpu.refuses(dtype)),
        Candidate("C++", paged_cpu, "cpu", lambda head_dim, dtype: whole_panels(head_dim)),
        Candidate("XLA", paged_xla),
    ),
    "window attention": (
        Candidate("Pallas", window_tpu, "tpu", unless(window_tpu.fits, f"{LANES_OF_HEADS}, in windows of a multiple of 128")),
        Candidate("C++", window_cpu, "cpu", lambda q, *rest: whole_panels(q.shape[3])),
        Candidate("XLA", window_xla),
    ),
    "appending": (
        Candidate("Pallas", append_tpu, "tpu", unless(append_tpu.fits, f"few entries of several rows, {LANES_OF_HEADS}")),
        Candidate("C++", append_cpu, "cpu"),
        Candidate("XLA", append_xla),
    ),
    "head's argmax": (
        Candidate("Pallas", head_tpu, "tpu", unless(head_tpu.fits, "rows that VMEM holds, all in float32 or all in bfloat16")),
        Candidate("C++", cpu, "cpu"),
        Candidate("XLA", head_xla),
    ),
    "head's top-k": (
        Candidate("Pallas", top_k_tpu, "tpu", unless(top_k_tpu.fits, "rows that VMEM holds, one dtype, and k up to 128")),
        Candidate("C++", cpu, "cpu"),
        Candidate("XLA", top_k_xla),
    ),
    "graph reduction": (
        Candidate("Pallas", gather_tpu, "tpu", unless(gather_tpu.fits, "rows that VMEM holds, and a weight for each slot")),
        Candidate("C++", gather_cpu, "cpu"),
        Candidate("XLA", gather_xla),
    ),
}
"""The implementations of each operation of which there are several, the fastest first."""

DECODING = ("products", "norms", "attention", "paged attention", "appending", "head's argmax", "head's top-k")
DENOISING = ("products", "norms", "attention", "window attention")
"""What language models compute with, and what diffusion language models."""


def first(operation: str, chip: Chip, *operands: Any) -> Any:
    """The fastest implementation for a chip that takes these operands."""
    return next(each.module for each in CANDIDATES[operation] if each.chip in (chip, None) and not each.refuses(*operands))


def absent(candidate: Chip, chip: Chip, kernels: Kernels) -> str:
    """Why the kernels for a chip do not run on this one; empty if they do."""
    if kernels == "xla":
        return "they are switched off"
    if candidate != chip:
        return f"a {chip.upper()} has none"
    return native.kernels().reason if chip == "cpu" else ""


class Choice(NamedTuple):
    """Which implementation of an operation runs.

    Attributes:
        runs: its name.
        refused: faster ones, by name, and why each of them does not run.
        lost: that of them which is for the chip at hand and was not switched off, and why it does not run; empty if none is.
    """

    operation: str
    runs: str
    refused: tuple[tuple[str, str], ...]
    lost: str


def implementations(
    sizes: Any,
    dtype: DTypeLike,
    chip: Chip | None = None,
    kernels: Kernels = "auto",
    of: Sequence[str] = tuple(CANDIDATES),
) -> tuple[Choice, ...]:
    """What runs for a model in a step of several rows, and why nothing faster; `chip` and `kernels` as of `operations`.

    Args:
        sizes: the model's configuration: `vocab_size`, `hidden_size`, `num_heads`, `num_kv_heads` and `head_dim`.
        dtype: of weights and activations.
        of: which operations.
    """
    chip = cast(Chip, chip or jax.default_backend())
    operands = typical_operands(sizes, dtype)

    def choice(operation: str) -> Choice:
        refused: list[tuple[str, str]] = []
        lost = ""
        for each in CANDIDATES[operation]:
            why = (each.chip and absent(each.chip, chip, kernels)) or each.refuses(*operands[operation])
            if not why:
                return Choice(operation, each.name, tuple(refused), lost)
            refused.append((each.name, why))
            lost = f"{each.name}: {why}" if each.chip == chip and kernels == "auto" else lost
        raise AssertionError("XLA takes anything")

    return tuple(map(choice, of))


def fallbacks(choices: Sequence[Choice]) -> str:
    """One line on kernels for the chip at hand that do not run, each reason once; empty if all of them do."""
    reasons: dict[str, list[str]] = {}
    for choice in choices:
        if choice.lost:
            reasons.setdefault(choice.lost, []).append(choice.operation)
    listed = "; ".join(f"{', '.join(operations)} ({reason})" for reason, operations in reasons.items())
    return f"computed by XLA, for a faster kernel does not run: {listed}" if listed else ""


def typical_operands(sizes: Any, dtype: DTypeLike) -> dict[str, tuple[Any, ...]]:
    """What the candidates of each operation are asked about, in abstract arrays."""
    rows, entries, d = 8, 1024, sizes.head_dim

    def shaped(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    q, cache = shaped(rows, 1, sizes.num_heads, d), shaped(rows, sizes.num_kv_heads, entries, d)
    head = shaped(rows, sizes.hidden_size), shaped(sizes.hidden_size, sizes.vocab_size)
    return {
        "products": (),
        "norms": (),
        "attention": (q, cache, None),
        "paged attention": (d, dtype),
        "window attention": (shaped(1, 128, sizes.num_heads, d), shaped(1, entries, sizes.num_kv_heads, d)),
        "appending": (cache, shaped(rows, sizes.num_kv_heads, 1, d)),
        "head's argmax": head,
        "head's top-k": (*head, 16),
        "graph reduction": (shaped(entries, 128), jax.ShapeDtypeStruct((entries, 16), jnp.int32), None),
    }


argmax = head_xla.argmax
top_k = top_k_xla.top_k
write = append_xla.write
held = paged_xla.held


def operations(chip: Chip | None = None, weights: Weights = "auto", kernels: Kernels = "auto") -> Operations:
    """The bundle that computes a model.

    Args:
        chip: that it will run on, which need not be here; by default what JAX runs on.
        weights: "int8" keeps matrices in 8 bits with a scale for each output; "int4" keeps those of layers in blocks of 4 bits
            and the output head in blocks of 8, or what blocks a file has; "auto" keeps the dtype that they have.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.

    Raises:
        ValueError: one of them is none of these, or weights of 8 or 4 bits are asked for where the CPU kernels do not run.
    """
    chip = cast(Chip, chip or jax.default_backend())
    for name, value, known in (("chip", chip, Chip), ("weights", weights, Weights), ("kernels", kernels, Kernels)):
        if value not in get_args(known):
            raise ValueError(f"expected {name} to be one of {', '.join(get_args(known))}, found {value!r}")
    missing = absent("cpu", chip, kernels)
    if not missing:
        return cpu_operations(f"cpu {native.kernels().isa}", weights)
    if weights != "auto":
        raise ValueError(f"{weights.removeprefix('int')}-bit weights need the CPU kernels: {missing}")
    if not absent("tpu", chip, kernels):
        return TPU
    return PLAIN if chip != "cpu" else CPU_XLA


def computes_bfloat16(ops: Operations) -> bool:
    """Whether these operations compute in bfloat16 here as fast as in float32: not if XLA does, on a CPU."""
    return ops.prepares or jax.default_backend() != "cpu"


def training_operations(products: str) -> Operations:
    """The bundle for training, on weights as they are, which stay float32 as the residual stream does.

    Args:
        products: "float32"; "bfloat16", with float32 sums; or "auto": bfloat16 where the chip has instructions for it, else
            float32. On a CPU they are the CPU kernels' where these run, else XLA's in float32; elsewhere XLA's.

    Raises:
        ValueError: other products, or bfloat16 on a CPU where the CPU kernels do not run.
    """
    if products not in get_args(Products):
        raise ValueError(f"expected products in auto, float32 or bfloat16, found {products!r}")
    if jax.default_backend() != "cpu":
        return PLAIN if products == "float32" else MIXED
    isa = native.kernels().isa
    if isa is None and products == "bfloat16":
        raise ValueError(f"products in bfloat16 need the CPU kernels: {native.kernels().reason}")
    if isa is None:
        return PLAIN
    return trained_operations(cpu.Training(products == "bfloat16" or (products == "auto" and isa in cpu.BFLOAT16_ISAS)))


def plain_head_argmax(x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return head_xla.head_argmax(xla.normed(x, norm), head.w if tied else head, tied)


def tpu_head_argmax(x: Float[Array, "*rows H"], head: Any, norm: Norm | None = None) -> tuple[Array, Array]:
    tied, x = isinstance(head, Transposed), xla.normed(x, norm)
    w = head.w if tied else head
    return first("head's argmax", "tpu", x, w).head_argmax(x, w, tied)


def plain_head_top_k(x: Float[Array, "*rows H"], head: Any, k: int) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    return top_k_xla.head_top_k(x, head.w if tied else head, k, tied)


def tpu_head_top_k(x: Float[Array, "*rows H"], head: Any, k: int) -> tuple[Array, Array]:
    tied = isinstance(head, Transposed)
    w = head.w if tied else head
    return first("head's top-k", "tpu", x, w, k).head_top_k(x, w, k, tied)


def tpu_prefix_attention(q: Array, k: Array, v: Array, lengths: Array, own: tuple[Array, Array] | None = None) -> Array:
    return first("attention", "tpu", q, k, own).prefix_attention(q, k, v, lengths, own)


def tpu_append_all(caches: Sequence[Array], new: Sequence[Array], start: Array, count: Array) -> tuple[Array, ...]:
    return first("appending", "tpu", caches[0], new[0]).append_all(caches, new, start, count)


def tpu_append(cache: Array, new: Array, start: Array, count: Array) -> Array:
    return tpu_append_all((cache,), (new,), start, count)[0]


def tpu_pages(count: int, kv_heads: int, entries: int, head_dim: int, dtype: DTypeLike, devices: int = 1) -> Pool:
    return first("paged attention", "tpu", head_dim, dtype).empty(count, kv_heads, entries, head_dim, dtype, devices)


def tpu_paged_append(pool: Pool, *rest: Array) -> Pool:
    made: Any = paged_xla if isinstance(pool, Pages) else paged_tpu
    return made.append(pool, *rest)


def tpu_paged_attention(q: Array, pool: Pool, table: Array, lengths: Array, own: tuple[Array, Array] | None = None) -> Array:
    made: Any = paged_xla if isinstance(pool, Pages) else paged_tpu
    return made.prefix_attention(q, pool, table, lengths, own, tpu_prefix_attention)


def tpu_paged_append_attend(projection: Any, how: Heads, pool: Pool, *rest: Array) -> tuple[Array, Pool]:
    heads = partial(heads_xla.heads, rotate=heads_xla.rotate_by_product)
    if isinstance(pool, Pages):
        return paged_xla.append_attend(projection, how, pool, *rest, heads=heads, attend=tpu_prefix_attention)
    return paged_tpu.append_attend(projection, how, pool, *rest, heads=heads)


def as_it_is(weight: Any, name: str, largest: Any = None, head: bool = False) -> Any:
    return weight


def xla_operations(
    name: str,
    product: xla.Product = xla.product,
    rotate: Callable[..., Array] = heads_xla.rotate_halves,
    attend: Callable[..., Array] = attention_xla.prefix_attention,
    head_argmax: Callable[..., tuple[Array, Array]] = plain_head_argmax,
    head_top_k: Callable[..., tuple[Array, Array]] = plain_head_top_k,
    append_all: Callable[..., tuple[Array, ...]] = append_xla.append_all,
    own_head: bool = False,
) -> Operations:
    """Operations on weights as they are."""
    heads, linear = partial(heads_xla.heads, rotate=rotate), partial(xla.linear, product=product)
    return Operations(
        name=name,
        take=take_xla.take,
        put=put_xla.put,
        exchange=put_xla.exchange,
        compact=compact_xla.compact,
        linear=linear,
        gated_linear=partial(xla.gated_linear, product=product),
        project=partial(xla.project, product=product),
        heads=heads,
        rms_norm=norm_reference.rms_norm,  # XLA makes one loop of it
        prefix_attention=attend,
        window_attention=window_xla.window_attention,
        append=append_xla.append,
        append_attend=partial(append_xla.append_attend, heads=heads, attend=attend, append_all=append_all),
        pages=paged_xla.empty,
        paged_append=paged_xla.append,
        paged_attention=paged_xla.prefix_attention,
        paged_append_attend=partial(paged_xla.append_attend, heads=heads),
        causal_attention=partial(causal_xla.causal_attention, heads=heads),
        cross_entropy=partial(loss_xla.cross_entropy, linear=linear),
        head_argmax=head_argmax,
        head_top_k=head_top_k,
        prepare_matrix=as_it_is,
        prepare_joined=as_it_is,
        restore=lambda w: w.w.T if isinstance(w, Transposed) else w,
        own_head=own_head,
    )


PLAIN = xla_operations("xla")
"""What XLA makes of plain `jnp`, on any chip: the path that every other bundle is held against."""

MIXED = xla_operations("xla, bfloat16 products", xla.mixed_product)
"""For training on accelerators: float32 weights and activations, whose products are taken in bfloat16."""

CPU_XLA = xla_operations("xla", own_head=True)
"""The same on a CPU, whose products read `[in, out]` up to twice as fast as the embedding transposed."""


def tpu_window_attention(q: Array, k: Array, *rest: Array) -> tuple[Array, Array]:
    return first("window attention", "tpu", q, k).window_attention(q, k, *rest)


TPU = replace(
    xla_operations(
        "tpu",
        xla.tpu_product,
        heads_xla.rotate_by_product,
        tpu_prefix_attention,
        tpu_head_argmax,
        tpu_head_top_k,
        tpu_append_all,
    ),
    append=tpu_append,
    window_attention=tpu_window_attention,
    window_multiple=window_tpu.LANES,
    pages=tpu_pages,
    paged_append=tpu_paged_append,
    paged_attention=tpu_paged_attention,
    paged_append_attend=tpu_paged_append_attend,
)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["parts"])
@dataclass(frozen=True)
class Joint:
    """The products with several joined matrices, `[B, T, sum(parts)]`, side by side."""

    array: Array
    parts: tuple[int, ...]

    def split(self) -> tuple[Array, ...]:
        ends = tuple(accumulate(self.parts))
        return tuple(self.array[..., end - size : end] for size, end in zip(self.parts, ends, strict=True))


def attention_operands(projection: Joint, how: Heads) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the CPU kernels take for a projection, with queries or without: its heads, and their norms and rotation."""
    sizes = [size // how.head_dim for size in projection.parts]
    queries, key = sizes[: len(sizes) % 2], sizes[-1] if len(sizes) > 1 else 0
    norms = {name: None if norm is None else norm.weight for name, norm in (("q_norm", how.q_norm), ("k_norm", how.k_norm))}
    eps = next((norm.eps for norm in (how.q_norm, how.k_norm) if norm is not None), 0.0)
    cos, sin = how.rope
    return (projection.array, sum(queries), key, how.head_dim), {**norms, "eps": eps, "cos": cos, "sin": sin}


def cpu_heads(projection: Joint, how: Heads) -> tuple[Any, Any, Any]:
    if whole_panels(how.head_dim):
        return heads_xla.heads(projection.split(), how, norm=norm_cpu.rms_norm)
    operands, options = attention_operands(projection, how)
    q, k, v = attention_cpu.norm_rotate(*operands, **options)
    return (q if q.shape[2] else None), (k if k.shape[1] else None), (v if v.shape[1] else None)


def cpu_prefix_attention(q: Array, k: Array, v: Array, lengths: Array, own: tuple[Array, Array] | None = None) -> Array:
    return first("attention", "cpu", q, k, own).prefix_attention(q, k, v, lengths, own)


def cpu_append_attend(
    projection: Joint, how: Heads, k: Array, v: Array, start: Array, count: Array
) -> tuple[Array, Array, Array]:
    if whole_panels(how.head_dim):
        return append_xla.append_attend(projection, how, k, v, start, count, cpu_heads, cpu_prefix_attention)
    operands, options = attention_operands(projection, how)
    return attention_cpu.append_attend(*operands, **options, k_cache=k, v_cache=v, start=start, count=count)


def cpu_paged_attention(q: Array, pool: Pages, table: Array, lengths: Array, own: tuple[Array, Array] | None = None) -> Array:
    return first("paged attention", "cpu", q.shape[3], q.dtype).prefix_attention(q, pool, table, lengths, own)


def cpu_paged_append_attend(projection: Joint, how: Heads, pool: Pages, *places: Array) -> tuple[Array, Pages]:
    if whole_panels(how.head_dim):
        return paged_xla.append_attend(projection, how, pool, *places, heads=cpu_heads)
    operands, options = attention_operands(projection, how)
    table, start, count = places
    return paged_cpu.append_attend(*operands, **options, pool=pool, table=table, start=start, count=count)


def before(norm: Norm | None) -> dict[str, Any]:
    """A norm as the CPU kernels take it."""
    return {} if norm is None else {"norm": norm.weight, "eps": norm.eps}


def cpu_linear(
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
    return products if bias is None else products + jnp.concatenate(bias[first:last]).astype(products.dtype)


def cpu_project(
    x: Array,
    joined: Any,
    norm: Norm | None = None,
    first: int = 0,
    last: int | None = None,
    bias: tuple[Array, ...] | None = None,
    count: Array | None = None,
) -> Joint:
    parts = joined.parts[first:last]
    products = cpu.linear(x, joined, **before(norm), parts=(first, first + len(parts)), count=count)
    return Joint(biased(products, bias, first, last), parts)


def cpu_window_attention(q: Array, *rest: Array) -> tuple[Array, Array]:
    return first("window attention", "cpu", q).window_attention(q, *rest)


@cache
def trained_operations(how: cpu.Training) -> Operations:
    """The CPU kernels and their gradients, on weights as they are; the residual stream is float32."""

    def normed(x: Array, norm: Norm | None) -> Array:
        return x if norm is None else norm_cpu.trained_norm(x.astype(jnp.float32), norm.weight, norm.eps, how.dtype)

    def linear(
        x: Array,
        w: Any,
        out_dtype: DTypeLike | None = None,
        norm: Norm | None = None,
        add: Array | None = None,
        count: Array | None = None,
    ) -> Array:
        return cpu.trained_linear(how, normed(x, norm), w, out_dtype or jnp.float32, add)

    def gated_linear(x: Array, joined: Joined, norm: Norm | None = None, count: Array | None = None) -> Array:
        flat = normed(x, norm).reshape(-1, x.shape[-1])
        y: Any = cpu.trained_gated(how, flat, jnp.concatenate(joined.parts, axis=1))
        return y.reshape(*x.shape[:-1], -1)

    def project(
        x: Array, joined: Joined, norm: Norm | None = None, first: int = 0, bias: tuple[Array, ...] | None = None
    ) -> Joint:
        parts = joined.parts[first:]
        array = cpu.trained_linear(how, normed(x, norm), jnp.concatenate(parts, axis=1), how.dtype)
        return Joint(biased(array, bias, first), tuple(part.shape[1] for part in parts))

    def heads(projection: Joint, what: Heads) -> tuple[Any, Any, Any]:
        return heads_xla.heads(tuple(part.astype(jnp.float32) for part in projection.split()), what)

    def causal_attention(projection: Joint, what: Heads) -> Array:
        if whole_panels(what.head_dim):
            return causal_xla.causal_attention(projection, what, heads)
        (array, count, _, size), options = attention_operands(projection, what)
        sizes = causal_cpu.Sizes(count, size, options["eps"])
        return causal_cpu.causal_attention(sizes, array, *(options[name] for name in ("q_norm", "k_norm", "cos", "sin")))

    return replace(
        PLAIN,
        name=f"cpu training, {'bfloat16' if how.bfloat16 else 'float32'}",
        linear=linear,
        gated_linear=gated_linear,
        project=project,
        heads=heads,
        rms_norm=lambda x, weight, eps: norm_cpu.trained_norm(x, weight, eps, x.dtype),
        append_attend=partial(append_xla.append_attend, heads=heads, attend=attention_xla.prefix_attention),
        paged_append_attend=partial(paged_xla.append_attend, heads=heads),
        causal_attention=causal_attention,
        cross_entropy=partial(loss_xla.cross_entropy, linear=linear),
        head_argmax=lambda x, head, norm=None: plain_head_argmax(normed(x, norm).astype(jnp.float32), head),
    )


@cache
def cpu_operations(name: str, weights: Weights) -> Operations:
    """The kernels on a CPU's vector or tile unit, over weights that are packed once."""
    formats: dict[Weights, tuple[cpu.Format | None, cpu.Format | None]] = {"int8": ("int8", "int8"), "int4": ("q4_1", "q8_0")}
    kind, of_head = formats.get(weights, (None, None))

    def prepare_matrix(w: Any, name: str, largest: Any = None, head: bool = False) -> Any:
        return cpu.pack(w, of_head if head else kind, name, largest)

    def prepare_joined(joined: Joined, name: str) -> Any:
        if not joined.gated:
            return cpu.pack_joined(joined.parts, kind, name)
        gate, up = joined.parts
        return cpu.pack_gated(gate, up, kind, name)

    return Operations(
        name=name,
        take=take_cpu.take,
        put=put_cpu.put,
        exchange=put_cpu.exchange,
        compact=compact_cpu.compact,
        linear=cpu_linear,
        gated_linear=lambda x, w, norm=None, count=None: cpu_linear(x, w, norm=norm, count=count),
        project=cpu_project,
        heads=cpu_heads,
        rms_norm=norm_cpu.rms_norm,
        prefix_attention=cpu_prefix_attention,
        window_attention=cpu_window_attention,
        append=append_cpu.append,
        append_attend=cpu_append_attend,
        pages=paged_xla.empty,
        paged_append=paged_cpu.append,
        paged_attention=cpu_paged_attention,
        paged_append_attend=cpu_paged_append_attend,
        causal_attention=partial(causal_xla.causal_attention, heads=cpu_heads),
        cross_entropy=partial(loss_xla.cross_entropy, linear=cpu_linear),
        head_argmax=lambda x, head, norm=None: cpu.linear_argmax(x, head, **before(norm)),
        head_top_k=cpu.linear_top_k,
        prepare_matrix=prepare_matrix,
        prepare_joined=prepare_joined,
        restore=cpu.unpack,
        prepares=True,
        keeps_blocks=weights == "int4",
        own_head=True,
        counts=True,
    )


def gather_reduce(x: Array, sources: Array, degrees: Array, weights: Array | None = None, reduce: Reduce = "sum") -> Array:
    """Reduces for each row the features of its first `degrees` sources, times their weights; see its `reference.py`."""
    plain = partial(gather_xla.gather_reduce, reduce=reduce)
    if first("graph reduction", "tpu", x, sources, weights) is gather_xla:
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


def edge_dot_csr(
    rows: Float[Array, "R H D"],
    x: Float[Array, "M H D"],
    lists: tuple[Int32[Array, " R1"], Int32[Array, " E"]],
    otherwise: Callable[[], Float[Array, "E H"]],
) -> Float[Array, "E H"]:
    """The product of each edge's row and source, head by head, in float32; `lists` and `otherwise` as in `attend_csr`."""
    if not reduces_lists() or rows.dtype != x.dtype:
        return otherwise()
    flat = rows.reshape(rows.shape[0], -1), x.reshape(x.shape[0], -1)
    fused = partial(gather_cpu.edge_dot_csr, heads=x.shape[1])
    return jax.lax.platform_dependent(*flat, *lists, cpu=fused, default=lambda *_: otherwise())


def reduces_lists() -> bool:
    """Whether a kernel reduces lists of neighbours here, so that they beat padded rows."""
    return native.kernels().isa is not None


def scatter_add(messages: Float[Array, "R K F"], degrees: Int32[Array, " R"]) -> Float[Array, "R F"]:
    """Sums for each of R rows its first `degrees` of K messages."""
    plain = scatter_xla.scatter_add
    if not scatter_tpu.fits(messages):
        return plain(messages, degrees)
    return jax.lax.platform_dependent(messages, degrees, tpu=scatter_tpu.scatter_add, default=plain)
