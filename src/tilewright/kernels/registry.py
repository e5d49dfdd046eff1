"""The registry: an ordered list of implementations for each operation, which one runs, and why not a faster one.

A module is imported when it is asked for, by its path below `kernels/`. One that takes only some operands says so itself, by a
function `refuses(*operands)` that gives the reason, or nothing for those that it takes. So a new kernel is a module of its own
and a line in `CANDIDATES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tilewright.kernels import native
from tilewright.kernels.linear.blocks import BLOCK
from tilewright.kernels.linear.scaled import ScaledMatrix

Chip = Literal["cpu", "gpu", "tpu"]
"""Chips that JAX runs on."""
Kernels = Literal["auto", "xla"]
"""This package's own kernels where they run, or XLA alone."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of an operation.

    Attributes:
        name: as users read it.
        path: of its module, below `tilewright.kernels`.
        chip: that it is for; None for any. JAX runs nothing on "trainium": of these kernels benchmarks count what they move.
    """

    name: str
    path: str
    chip: Chip | Literal["trainium"] | None = None

    @property
    def module(self) -> Any:
        """The module, which its first use imports."""
        return import_module(f"tilewright.kernels.{self.path}")

    def refuses(self, *operands: Any) -> str:
        """The reason why it does not take some operands of the operation; empty if it does."""
        refuses = getattr(self.module, "refuses", None)
        return refuses(*operands) if refuses else ""


CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "products": (
        Candidate("C++", "linear.cpu", "cpu"),
        Candidate("XLA", "linear.xla"),
    ),
    "products of blocks": (
        Candidate("Pallas", "linear.pallas_tpu", "tpu"),
        Candidate("C++", "linear.cpu", "cpu"),
        Candidate("XLA", "linear.xla"),
    ),
    "norms": (
        Candidate("C++", "rms_norm.cpu", "cpu"),
        Candidate("XLA", "rms_norm.reference"),
    ),
    "attention": (
        Candidate("Pallas", "attention.pallas_tpu", "tpu"),
        Candidate("C++", "attention.cpu", "cpu"),
        Candidate("XLA", "attention.xla"),
    ),
    "paged attention": (
        Candidate("ragged Pallas", "paged.pallas_tpu", "tpu"),
        Candidate("C++", "paged.cpu", "cpu"),
        Candidate("XLA", "paged.xla"),
    ),
    "window attention": (
        Candidate("Pallas", "window_attention.pallas_tpu", "tpu"),
        Candidate("C++", "window_attention.cpu", "cpu"),
        Candidate("XLA", "window_attention.xla"),
    ),
    "appending": (
        Candidate("Pallas", "append.pallas_tpu", "tpu"),
        Candidate("C++", "append.cpu", "cpu"),
        Candidate("XLA", "append.xla"),
    ),
    "head's argmax": (
        Candidate("Pallas", "head_argmax.pallas_tpu", "tpu"),
        Candidate("C++", "linear.cpu", "cpu"),
        Candidate("XLA", "head_argmax.xla"),
    ),
    "head's top-k": (
        Candidate("Pallas", "head_top_k.pallas_tpu", "tpu"),
        Candidate("C++", "linear.cpu", "cpu"),
        Candidate("XLA", "head_top_k.xla"),
    ),
    "graph reduction": (
        Candidate("Pallas", "gather_reduce.pallas_tpu", "tpu"),
        Candidate("C++", "gather_reduce.cpu", "cpu"),
        Candidate("NKI", "gather_reduce.nki", "trainium"),
        Candidate("XLA", "gather_reduce.xla"),
    ),
    "sums of messages": (
        Candidate("Pallas", "scatter_add.pallas_tpu", "tpu"),
        Candidate("NKI", "scatter_add.nki", "trainium"),
        Candidate("XLA", "scatter_add.xla"),
    ),
}
"""The implementations of each operation of which there are several, the fastest first; the last one takes anything."""

DECODING = (
    "products",
    "products of blocks",
    "norms",
    "attention",
    "paged attention",
    "appending",
    "head's argmax",
    "head's top-k",
)
"""Operations of language models."""
DENOISING = ("products", "norms", "attention", "window attention")
"""Operations of diffusion language models."""
MODELS = tuple(operation for operation in CANDIDATES if operation != "sums of messages")
"""Operations of all models; only a benchmark sums messages that are gathered already."""


def first(operation: str, chip: Chip, *operands: Any) -> Any:
    """The module of the fastest implementation for a chip that takes these operands."""
    return next(each.module for each in CANDIDATES[operation] if each.chip in (chip, None) and not each.refuses(*operands))


def kernel_of(operation: str, chip: Chip | Literal["trainium"]) -> Any:
    """The module of a chip's own kernel, whatever runs here: benchmarks count what it moves."""
    return next(each.module for each in CANDIDATES[operation] if each.chip == chip)


def absent(candidate: Chip | Literal["trainium"], chip: Chip, kernels: Kernels) -> str:
    """The reason why the kernels for a chip do not run on this one; empty if they do."""
    if kernels == "xla":
        return "they are switched off"
    if candidate != chip:
        return f"a {chip.upper()} has none"
    return native.kernels().reason if chip == "cpu" else ""


class Selection(NamedTuple):
    """The implementation of an operation that runs, and why not a faster one.

    Attributes:
        runs: its name.
        refused: faster ones, by name, and why each of them does not run.
        lost: that of them which is for the chip at hand and was not switched off, and why it does not run; empty if none is.
    """

    operation: str
    runs: str
    refused: tuple[tuple[str, str], ...]
    lost: str


@runtime_checkable
class DecoderSizes(Protocol):
    """A model's configuration, as far as the choice of kernels depends on it."""

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
    """The implementations that run for a model in a step of several rows, and why nothing faster does.

    Args:
        dtype: of weights and activations.
        chip, kernels: as of `select.operations`.
        operations: which, by their names in `CANDIDATES`.
        kv_dtype: of keys and values in pages; "auto" for `dtype`.
    """
    here = chip or cast(Chip, jax.default_backend())
    held = dtype if kv_dtype == "auto" else kv_dtype
    operands = typical_operands(sizes, dtype) | {"paged attention": (sizes.head_dim, held)}
    return tuple(selection(operation, operands[operation], here, kernels) for operation in operations)


def selection(operation: str, operands: tuple[Any, ...], chip: Chip, kernels: Kernels) -> Selection:
    """The implementation of one operation that runs, by the same rules as `first` and the bundles."""
    refused: list[tuple[str, str]] = []
    lost = ""
    for each in CANDIDATES[operation]:
        if each.chip == "trainium":
            continue
        why = (each.chip and absent(each.chip, chip, kernels)) or each.refuses(*operands)
        if not why:
            return Selection(operation, each.name, tuple(refused), lost)
        refused.append((each.name, why))
        lost = f"{each.name}: {why}" if each.chip == chip and kernels == "auto" else lost
    raise AssertionError("the last candidate takes anything")


def fallbacks(selections: Sequence[Selection]) -> str:
    """One line on kernels for the chip at hand that do not run, each reason once; empty if all of them do."""
    reasons: dict[str, list[str]] = {}
    for each in selections:
        if each.lost:
            reasons.setdefault(each.lost, []).append(each.operation)
    listed = "; ".join(f"{', '.join(operations)} ({reason})" for reason, operations in reasons.items())
    return f"computed by XLA, for a faster kernel does not run: {listed}" if listed else ""


def typical_operands(sizes: DecoderSizes, dtype: DTypeLike) -> dict[str, tuple[Any, ...]]:
    """Abstract operands of each operation in a step of several rows, about which `implementations` asks its candidates."""
    rows = 8
    entries = 1024
    d = sizes.head_dim

    def shaped(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    q = shaped(rows, 1, sizes.num_heads, d)
    cache = shaped(rows, sizes.num_kv_heads, entries, d)
    head = shaped(rows, sizes.hidden_size), shaped(sizes.hidden_size, sizes.vocab_size)
    scales = jax.ShapeDtypeStruct((max(1, sizes.hidden_size // BLOCK), sizes.vocab_size), jnp.float32)
    in_blocks = ScaledMatrix(jax.ShapeDtypeStruct(head[1].shape, jnp.int4), scales)
    return {
        "products": (),
        "products of blocks": (head[0], in_blocks),
        "norms": (),
        "attention": (q, cache, None),
        "window attention": (shaped(1, 128, sizes.num_heads, d), shaped(1, entries, sizes.num_kv_heads, d)),
        "appending": (cache, shaped(rows, sizes.num_kv_heads, 1, d)),
        "head's argmax": head,
        "head's top-k": (*head, 16),
        "graph reduction": (shaped(entries, 128), jax.ShapeDtypeStruct((entries, 16), jnp.int32), None),
        "sums of messages": (shaped(entries, 16, 128),),
    }
