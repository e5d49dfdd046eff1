"""Registry of implementations: an ordered list for each operation, the choice among them, and the reasons for the choice.

A module is imported on first use, by its path below `kernels/`, and has a function named like the operation. A module that
supports only some operands has a function `refuses_<operation>`, or `refuses`, which takes the same operands and returns the
reason why they are unsupported, or an empty string. A new kernel is therefore a module and a line in `IMPLEMENTATIONS`.
`operations_for` returns bundles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels import native
from tilewright.kernels.linear.blocks import BLOCK
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.masks import AttentionMask, causal_from
from tilewright.kernels.operations import Heads, KeyValueRows, Operations, PagedCache

Chip = Literal["cpu", "gpu", "tpu"]
"""Chips that JAX supports."""
Kernels = Literal["auto", "xla"]
"""Use this package's own kernels where they run, or XLA alone."""
XLA = "XLA"


@dataclass(frozen=True)
class Implementation:
    """An implementation of an operation.

    Attributes:
        name: name shown to users.
        path: module below `tilewright.kernels`.
        chip: chip that it supports; None for any. JAX cannot run "trainium" kernels; benchmarks count their transfers.
    """

    name: str
    path: str
    chip: Chip | Literal["trainium"] | None = None

    @property
    def module(self) -> Any:
        """The module, imported on first use."""
        return import_module(f"tilewright.kernels.{self.path}")

    def refusal(self, operation: str) -> Callable[..., str] | None:
        """Returns the function that gives reasons for unsupported operands; None if all operands are supported."""
        return getattr(self.module, f"refuses_{operation}", None) or getattr(self.module, "refuses", None)

    def refuses(self, operation: str, *operands: Any, **options: Any) -> str:
        """Returns the reason why these operands are unsupported; empty if they are supported."""
        refusal = self.refusal(operation)
        return refusal(*operands, **options) if refusal else ""


def listed(
    cpu: str = "", tpu: str = "", xla: str = "", tpu_xla: str = "", tpu_name: str = "Pallas"
) -> tuple[Implementation, ...]:
    """Builds the list of implementations from their modules, fastest first: TPU kernel, CPU kernel, XLA on TPUs, XLA
    anywhere."""
    found = (
        Implementation(tpu_name, tpu, "tpu"),
        Implementation("C++", cpu, "cpu"),
        Implementation(XLA, tpu_xla, "tpu"),
        Implementation(XLA, xla),
    )
    return tuple(each for each in found if each.path)


IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = {
    "gather_rows": listed("gather_rows.cpu", xla="gather_rows.xla"),
    "scatter_rows": listed("scatter_rows.cpu", xla="scatter_rows.xla"),
    "swap_rows": listed("scatter_rows.cpu", xla="scatter_rows.xla"),
    "nonzero": listed("nonzero.cpu", xla="nonzero.xla"),
    "linear": listed("linear.cpu", xla="linear.xla", tpu_xla="linear.tpu"),
    "product": listed("linear.cpu", "linear.pallas_tpu", "linear.xla"),
    "gated_linear": listed("linear.cpu", xla="linear.xla", tpu_xla="linear.tpu"),
    "grouped_linear": listed("grouped_linear.cpu", xla="grouped_linear.xla"),
    "grouped_gated": listed("grouped_linear.cpu", xla="grouped_linear.xla"),
    "project": listed("linear.cpu", xla="linear.xla", tpu_xla="linear.tpu"),
    "heads": listed("heads.cpu", xla="heads.xla", tpu_xla="heads.tpu"),
    "rms_norm": listed("rms_norm.cpu", xla="rms_norm.reference"),  # XLA makes one loop of it
    "write": listed("write.cpu", "write.pallas_tpu", "write.xla"),
    "attend": listed("attention.cpu", "attention.pallas_tpu", "attention.xla"),
    "attend_block": (
        Implementation("splash Pallas", "self_attention.splash", "tpu"),
        Implementation("cuDNN", "self_attention.cudnn", "gpu"),
        *listed(xla="attention.xla"),
    ),
    "attend_projected": listed("attention.cpu", "paged.pallas_tpu", "attention.xla", tpu_name="ragged Pallas"),
    "pages": listed(tpu="paged.pallas_tpu", xla="paged.xla", tpu_name="ragged Pallas"),
    "sparse_attention": listed("sparse_attention.cpu", "sparse_attention.pallas_tpu", "sparse_attention.xla"),
    "delta_rule": listed(xla="delta_rule.xla", tpu_xla="delta_rule.tpu"),
    "cross_entropy": listed("linear.cpu", xla="cross_entropy.xla", tpu_xla="linear.tpu"),
    "head_argmax": listed("linear.cpu", "head_argmax.pallas_tpu", "head_argmax.xla", "linear.tpu"),
    "head_top_k": listed("linear.cpu", "head_top_k.pallas_tpu", "head_top_k.xla", "linear.tpu"),
    "gather_reduce": (
        *listed("gather_reduce.cpu", "gather_reduce.pallas_tpu"),
        Implementation("NKI", "gather_reduce.nki", "trainium"),
        *listed(xla="gather_reduce.xla"),
    ),
    "message_reduce": (*listed("gather_reduce.cpu", "gather_reduce.pallas_tpu"), *listed(xla="gather_reduce.xla")),
    "scatter_add": (
        *listed(tpu="scatter_add.pallas_tpu"),
        Implementation("NKI", "scatter_add.nki", "trainium"),
        *listed(xla="scatter_add.xla"),
    ),
}
"""Implementations of each operation of `Operations`, of its building blocks "product" and "attend_block" (attention without a
cache, with a gradient), and of graph reductions, fastest first.

The last implementation supports all operands.
"""

SHOWN: Mapping[str, str] = {
    "products": "linear",
    "products of blocks": "product",
    "norms": "rms_norm",
    "attention": "attend",
    "paged attention": "attend_projected",
    "sparse attention": "sparse_attention",
    "cache writes": "write",
    "head's argmax": "head_argmax",
    "head's top-k": "head_top_k",
    "graph reduction": "gather_reduce",
    "messages": "message_reduce",
    "sums of messages": "scatter_add",
}
"""Operations whose implementation is shown to users, by their displayed names."""

DECODING = (
    "products",
    "products of blocks",
    "norms",
    "attention",
    "paged attention",
    "cache writes",
    "head's argmax",
    "head's top-k",
)
"""Displayed operations of language models."""
DENOISING = ("products", "norms", "attention", "sparse attention")
"""Displayed operations of diffusion language models."""
MODELS = tuple(shown for shown in SHOWN if shown not in ("messages", "sums of messages"))
"""Displayed operations of all models. The kernel of messages depends on their form (`graph.message_kernel`), and only a
benchmark sums messages that are already gathered."""


def for_chip(operation: str, chip: Chip | None) -> tuple[Implementation, ...]:
    """Returns the implementations of an operation for a chip, fastest first; XLA's for any chip if `chip` is None."""
    return tuple(each for each in IMPLEMENTATIONS[operation] if each.chip in (chip, None))


def first(operation: str, chip: Chip, *operands: Any, **options: Any) -> Any:
    """Returns the module of the fastest implementation for a chip that supports these operands."""
    return next(each.module for each in for_chip(operation, chip) if not each.refuses(operation, *operands, **options))


@cache
def function(operation: str, chip: Chip | None) -> Callable[..., Any]:
    """Returns a function that runs the fastest implementation for its operands; XLA's for any chip if `chip` is None."""
    fastest, *slower = for_chip(operation, chip)
    if not slower or fastest.refusal(operation) is None:
        return getattr(fastest.module, operation)

    def run(*operands: Any, **options: Any) -> Any:
        return getattr(first(operation, cast(Chip, chip), *operands, **options), operation)(*operands, **options)

    return run


def operations_for(chip: Chip | None) -> dict[str, Any]:
    """Returns a bundle's operations for a chip, by their fields in `Operations`; XLA's for any chip if `chip` is None."""
    return {each.name: function(each.name, chip) for each in fields(Operations) if each.name in IMPLEMENTATIONS}


def kernel_of(operation: str, chip: Chip | Literal["trainium"]) -> Any:
    """Returns the module of a chip's own kernel, whether or not it runs here: benchmarks count its transfers."""
    return next(each.module for each in IMPLEMENTATIONS[operation] if each.chip == chip)


def absent(candidate: Chip | Literal["trainium"], chip: Chip, kernels: Kernels) -> str:
    """Returns the reason why the kernels for `candidate` do not run on a chip; empty if they do."""
    if kernels == "xla":
        return "disabled"
    if candidate != chip:
        return f"needs a {candidate.upper()}"
    return native.kernels().reason if chip == "cpu" else ""


class Selection(NamedTuple):
    """The implementation of an operation that runs, and the reasons against faster ones.

    Attributes:
        operation: displayed name of the operation.
        runs: name of the implementation.
        refused: faster implementations, by name, with the reason why each does not run.
        unavailable: kernel for this chip that does not run although kernels are enabled, with the reason; empty without one.
    """

    operation: str
    runs: str
    refused: tuple[tuple[str, str], ...]
    unavailable: str


@runtime_checkable
class DecoderSizes(Protocol):
    """Parts of a model's configuration that determine the choice of kernels."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def implementations(
    sizes: DecoderSizes,
    dtype: DTypeLike,
    chip: Chip | None = None,
    kernels: Kernels = "auto",
    operations: Sequence[str] = MODELS,
    kv_dtype: str = "auto",
) -> tuple[Selection, ...]:
    """Returns the implementations that run for a model in a step of several rows, and the reasons against faster ones.

    Args:
        dtype: dtype of weights and activations.
        chip, kernels: see `select.operations`.
        operations: names of `SHOWN`.
        kv_dtype: dtype of keys and values in pages; "auto" for `dtype`.
    """
    here = chip or cast(Chip, jax.default_backend())
    operands = typical_operands(sizes, dtype, here, kernels, dtype if kv_dtype == "auto" else kv_dtype)
    return tuple(selection(shown, operands[shown], here, kernels) for shown in operations)


def selection(shown: str, operands: tuple[Any, ...], chip: Chip, kernels: Kernels) -> Selection:
    """Selects the implementation of one operation, by the same rules as `first` and the bundles."""
    operation = SHOWN[shown]
    refused: list[tuple[str, str]] = []
    unavailable = ""
    for each in IMPLEMENTATIONS[operation]:
        if each.chip == "trainium":
            continue
        why = (each.chip and absent(each.chip, chip, kernels)) or each.refuses(operation, *operands)
        if not why:
            return Selection(shown, each.name, tuple(refused), unavailable)
        if each.name != XLA:
            refused.append((each.name, why))
            unavailable = f"{each.name}: {why}" if each.chip == chip and kernels == "auto" else unavailable
    raise AssertionError("the last implementation supports all operands")


def fallbacks(selections: Sequence[Selection]) -> str:
    """Returns one line about kernels for this chip that do not run, each reason once; empty if all run."""
    reasons: dict[str, list[str]] = {}
    for each in selections:
        if each.unavailable:
            reasons.setdefault(each.unavailable, []).append(each.operation)
    listed = "; ".join(f"{', '.join(operations)} ({reason})" for reason, operations in reasons.items())
    return f"computed by XLA because a faster kernel does not run: {listed}" if listed else ""


def typical_operands(
    sizes: DecoderSizes, dtype: DTypeLike, chip: Chip, kernels: Kernels, kv_dtype: DTypeLike
) -> dict[str, tuple[Any, ...]]:
    """Returns abstract operands of each operation in a step of several rows, to test which implementations support them."""
    rows = 8
    entries = 1024
    d = sizes.head_dim

    def shaped(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def whole(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    q = shaped(rows, 1, sizes.num_heads, d)
    new = shaped(rows, sizes.num_kv_heads, 1, d)
    held = KeyValueRows(*(shaped(rows, sizes.num_kv_heads, entries, d),) * 2)
    pages = function("pages", None if kernels == "xla" else chip)
    pool = jax.eval_shape(lambda: pages(entries // 64, sizes.num_kv_heads, 64, d, kv_dtype))
    mask = jax.eval_shape(causal_from, whole(rows), whole(rows))
    angles: Any = shaped(rows, 1, d // 2)
    heads = Heads(d, None, None, (angles, angles))
    head = shaped(rows, sizes.hidden_size), shaped(sizes.hidden_size, sizes.vocab_size)
    scales = jax.ShapeDtypeStruct((max(1, sizes.hidden_size // BLOCK), sizes.vocab_size), jnp.float32)
    in_blocks = ScaledMatrix(jax.ShapeDtypeStruct(head[1].shape, jnp.int4), scales)
    return {
        "products": head,
        "products of blocks": (head[0], in_blocks),
        "norms": (head[0], shaped(sizes.hidden_size), 1e-6),
        "attention": (q, held, AttentionMask(whole(rows, 1))),
        "paged attention": (None, None, heads, PagedCache(pool, whole(rows, entries // 64)), mask),
        "sparse attention": (shaped(1, 128, sizes.num_heads, d), shaped(1, entries, sizes.num_kv_heads, d)),
        "cache writes": (held, new, new, whole(rows), whole(rows)),
        "head's argmax": head,
        "head's top-k": (*head, 16),
        "graph reduction": (shaped(entries, 128), whole(entries, 16), None),
        "messages": (False, False, "sum"),
        "sums of messages": (shaped(entries, 16, 128),),
    }
