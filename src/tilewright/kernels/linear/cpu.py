"""The operation on a CPU's vector or tile unit, over weights that were packed once. The kernel itself is `cpu.cc`.

A row's result is the same bit for bit whatever the number of rows.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32, UInt32

from tilewright.kernels.linear import blocks
from tilewright.kernels.linear.blocks import BLOCK, FORMS, BlockFormat, QuantisedMatrix
from tilewright.kernels.native import or_nothing
from tilewright.kernels.operations import Transposed

LANES = 16
"""Outputs in a panel."""

Format = Literal["float32", "bfloat16"] | BlockFormat
STEP: dict[str, int] = {"float32": 1, "bfloat16": 2}
"""Inputs that lie side by side in a panel."""
MULTIPLE: dict[str, int] = {"float32": 1, "bfloat16": 32}
"""Inputs are padded with zeros to a multiple of this: a tile of the tile unit has 64 bytes to a row."""
MADE: tuple[str, ...] = (*STEP, "q4_1", "q8_0")
"""Formats that a matrix can be packed into; other blocks come from files alone."""
BFLOAT16_ISAS = ("avx512bf16", "amx")
"""Instruction sets that multiply bfloat16."""


@partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["outputs", "gated", "parts"])
@dataclass(frozen=True)
class PackedMatrix:
    """A weight `[I, O]` in the kernel's layout.

    Attributes:
        panels: P panels of 16 outputs, the last one padded with zeros: float32 `[P, I, 16]`, bfloat16 `[P, I / 2, 16, 2]`, or
            blocks (see `blocks.py`) as uint8 `[P, G, bytes]`, with I rounded up to a multiple of 32 (bfloat16), or to a whole
            number G of groups of blocks.
        outputs: O.
        gated: panels of a gate and of an up matrix alternate.
        parts: how many of the outputs each of several matrices side by side has; empty for a single one.
    """

    panels: Any
    outputs: int
    gated: bool = False
    parts: tuple[int, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """True for weights in blocks, each of which has a scale of its own."""
        return self.panels.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of the matrix, with the zeros that follow its inputs."""
        if self.in_blocks:
            group = next(form.group for form in FORMS.values() if form.group_bytes == self.panels.shape[2])
            return self.panels.shape[1] * group * BLOCK, self.outputs
        return self.panels.shape[1] * (1 if self.panels.ndim == 3 else self.panels.shape[3]), self.outputs


def panels_of(w: np.ndarray, kind: Format) -> np.ndarray:
    """A matrix `[I, O]` cut into panels (see `PackedMatrix`)."""
    inputs, outputs = w.shape
    count = -(-outputs // LANES)
    step = STEP[kind]
    multiple = MULTIPLE[kind]
    padded = w
    size = (-(-inputs // multiple) * multiple, count * LANES)
    if w.shape != size:
        padded = np.zeros(size, w.dtype)
        padded[:inputs, :outputs] = w
    if step == 1:
        return padded.reshape(-1, count, LANES).transpose(1, 0, 2)
    return padded.reshape(-1, step, count, LANES).transpose(2, 0, 3, 1)


HUGE_PAGE = 2**21


def huge_pages(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Room for an array, on huge pages where Linux has them: streaming many megabytes of weights is up to a tenth faster.

    The device's buffer *is* this memory once it is there: JAX takes over aligned host memory as it is.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    pages = mmap.mmap(-1, size + HUGE_PAGE)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them; ordinary pages serve
        return np.empty(shape, dtype)
    begin = -np.frombuffer(pages, np.uint8).ctypes.data % HUGE_PAGE
    return np.frombuffer(pages, np.uint8, size, begin).view(dtype).reshape(shape)


def on_huge_pages(array: np.ndarray) -> Array:
    """A copy for the device; see `huge_pages`."""
    placed = huge_pages(array.shape, array.dtype)
    placed[...] = array
    return jax.device_put(placed)


def packed(matrices: list[Any], kind: Format) -> PackedMatrix:
    """One matrix, or a gate and an up matrix whose panels alternate."""
    outputs = matrices[0].shape[1]
    parts = [np.asarray(w).astype(jnp.dtype(kind)) for w in matrices]
    # NumPy copies integers faster than bfloat16, and lets other threads run meanwhile.
    panels = in_turn([panels_of(w.view(np.uint16) if kind == "bfloat16" else w, kind) for w in parts])
    return PackedMatrix(jax.device_put(panels.view(jnp.dtype(kind))), outputs, gated=len(matrices) == 2)


def in_turn(panels: list[np.ndarray]) -> np.ndarray:
    """The panels of a matrix, or of two that alternate, on huge pages."""
    count, *panel = panels[0].shape
    placed = huge_pages((count, len(panels), *panel), panels[0].dtype)
    for n, one in enumerate(panels):
        placed[:, n] = one
    return placed.reshape(-1, *panel)


def packed_blocks(matrices: Sequence[QuantisedMatrix]) -> PackedMatrix:
    """Packs a matrix in blocks, or a gate and an up matrix whose panels alternate; see `packed`."""
    panels = in_turn([blocks.panels_of(w) for w in matrices])
    return PackedMatrix(jax.device_put(panels), matrices[0].shape[1], gated=len(matrices) == 2)


def in_blocks(matrices: Sequence[Any], kind: str) -> list[QuantisedMatrix] | None:
    """Matrices in blocks; None if they are in none and `kind` asks for none.

    Those that are blocks stay what they are; others are quantised.
    """
    if kind in STEP:
        return None
    return [w if isinstance(w, QuantisedMatrix) else blocks.quantise(np.asarray(w), cast(Any, kind)) for w in matrices]


def format_of(w: Any) -> str:
    """The format that a matrix has before it is packed."""
    return w.kind if isinstance(w, QuantisedMatrix) else w.dtype.name


def check(w: Any, kind: str, name: str) -> None:
    """Raises a `ValueError` that names the weight if it cannot be packed."""
    if isinstance(w, QuantisedMatrix):
        if not all(np.isfinite(halves).all() for halves in (w.scales, w.minima) if halves is not None):
            raise ValueError(f"{name}: expected finite scales and minima, found infinity or NaN")
        return
    if kind not in MADE:
        raise ValueError(f"{name}: expected the format {', '.join(MADE)}, found {kind!r}")
    if getattr(w, "ndim", None) != 2 or 0 in w.shape:
        raise ValueError(f"{name}: expected a matrix [inputs, outputs], found shape {getattr(w, 'shape', None)}")
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{name}: expected float32 or bfloat16, found {w.dtype}")
    if kind not in STEP and not (np.abs(np.asarray(w, np.float32)) < blocks.LARGEST).all():
        raise ValueError(f"{name}: expected weights below {blocks.LARGEST:g}, as blocks hold them, found larger ones or NaN")


def pack(
    w: Float[Array | np.ndarray, "I O"] | QuantisedMatrix, kind: Format | None = None, name: str = "weight"
) -> PackedMatrix:
    """Packs one matrix.

    Args:
        w: float32 or bfloat16; or blocks, which stay what they are.
        kind: the format to pack into; None keeps the dtype.
        name: what a complaint calls it.

    Raises:
        ValueError: `w` is no such matrix.
    """
    chosen = cast(Format, kind or format_of(w))
    check(w, chosen, name)
    if (made := in_blocks([w], chosen)) is not None:
        return packed_blocks(made)
    return packed([w], chosen)


def unpack(w: PackedMatrix) -> Float[Array, "I O"]:
    """The matrix that `pack` was given, rounded to the format, and padded to its multiple of inputs."""
    panels = np.asarray(w.panels)
    if w.in_blocks:
        return jnp.asarray(blocks.dequantise(blocks.blocks_of(panels, w.outputs)))
    rows = panels.reshape(len(panels), -1, LANES, 1) if panels.ndim == 3 else panels
    wide = rows.transpose(1, 3, 0, 2).reshape(-1, len(panels) * LANES)
    return jnp.asarray(wide[:, : w.outputs])


def bytes_of(inputs: int, outputs: int, kind: str) -> int:
    """Bytes of a packed matrix."""
    panels = -(-outputs // LANES)
    if kind in STEP:
        padded = -(-inputs // MULTIPLE[kind]) * MULTIPLE[kind]
        return panels * LANES * padded * jnp.dtype(kind).itemsize
    form = FORMS[cast(BlockFormat, kind)]
    return panels * -(-inputs // (BLOCK * form.group)) * form.group_bytes


def pack_gated(
    gate: Float[Array | np.ndarray, "I O"] | QuantisedMatrix,
    up: Float[Array | np.ndarray, "I O"] | QuantisedMatrix,
    kind: Format | None = None,
    name: str = "gate and up",
) -> PackedMatrix:
    """Packs gate and up for one call, their panels in turn. See `pack`."""
    chosen = cast(Format, kind or format_of(gate))
    for w in (gate, up):
        check(w, chosen, name)
    if gate.shape != up.shape:
        raise ValueError(f"{name}: expected two matrices of one shape, found {gate.shape} and {up.shape}")
    if (made := in_blocks([gate, up], chosen)) is None:
        return packed([gate, up], chosen)
    return packed_blocks(alike(made, name))


def pack_joined(
    matrices: Sequence[Float[Array, "I _"] | QuantisedMatrix], kind: Format | None = None, name: str = "weights"
) -> PackedMatrix:
    """Packs matrices side by side, so that one product gives the outputs of all. See `pack`."""
    chosen = cast(Format, kind or format_of(matrices[0]))
    for n, w in enumerate(matrices):
        check(w, chosen, f"{name}[{n}]")
    if len({w.shape[0] for w in matrices}) != 1:
        raise ValueError(f"{name}: expected matrices of as many inputs, found {', '.join(str(w.shape) for w in matrices)}")
    parts = tuple(w.shape[1] for w in matrices)
    if (made := in_blocks(matrices, chosen)) is None:
        return replace(packed([np.concatenate([np.asarray(w) for w in matrices], axis=1)], chosen), parts=parts)
    return replace(packed_blocks([blocks.side_by_side(alike(made, name))]), parts=parts)


def read_together(matrices: Sequence[Any], kind: Format | None) -> bool:
    """True if one product can read matrices: not if they are blocks and no format holds all of them exactly."""
    kinds = [cast(Any, w.kind if isinstance(w, QuantisedMatrix) else kind) for w in matrices]
    return not any(isinstance(w, QuantisedMatrix) for w in matrices) or blocks.common_kind(kinds) is not None


def alike(matrices: Sequence[QuantisedMatrix], name: str) -> list[QuantisedMatrix]:
    """QuantisedMatrix of one format; a `ValueError` if none holds all of them."""
    made = blocks.of_one_kind(matrices)
    if made is None:
        kinds = " and ".join(dict.fromkeys(w.kind for w in matrices))
        raise ValueError(f"{name}: expected blocks that one format holds exactly, found {kinds}")
    return made


def linear(
    x: Float[Array, "*rows I"],
    w: PackedMatrix,
    out_dtype: DTypeLike | None = None,
    *,
    norm: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    add: Float[Array, "*rows O"] | None = None,
    parts: tuple[int, int] | None = None,
    count: Int32[Array, ""] | None = None,
) -> Float[Array, "*rows O"]:
    """`x @ w`, or `silu(x @ gate) * (x @ up)` for a gated matrix; float32 sums, whatever the weights.

    With weights in blocks, each block of a row of `x` is rounded to 8 bits as well, its largest absolute value being 127; with
    weights of 8 bits, to 16 bits where it has outliers.

    Args:
        x: float32 or bfloat16.
        out_dtype: of the result, float32 or bfloat16; None: that of `x`.
        norm: the weight of an RMS norm that comes first, in the dtype of `x`: the same bits as `rms_norm` and then `linear`.
        eps: of that norm.
        add: is added to the sums before they are rounded to the result's dtype, which it has.
        parts: only the outputs of these matrices of several that were joined: the first, and the one behind the last.
        count: only so many rows are computed, from the first; what is returned for the others means nothing.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    begin, end = (0, w.outputs) if parts is None else (sum(w.parts[: parts[0]]), sum(w.parts[: parts[1]]))
    first = begin // LANES
    skipped = begin - first * LANES  # of the first panel, which a part need not begin
    assert add is None or skipped == 0, "nothing is added to a part that begins within a panel"
    out = jax.ShapeDtypeStruct((*x.shape[:-1], end - first * LANES), dtype)
    y = jax.ffi.ffi_call("tilewright_linear", out)(
        x,
        w.panels,
        or_nothing(norm, x.dtype),
        or_nothing(add, dtype),
        or_nothing(count, jnp.int32),
        gated=w.gated,
        eps=np.float32(eps),
        first=np.int64(first),
    )
    return y[..., skipped:]


def linear_argmax(
    x: Float[Array, "*rows I"],
    w: PackedMatrix,
    *,
    norm: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    masks: UInt32[Array, "*rows W"] | None = None,
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """The first index of the largest of each row's outputs `x @ w`, and that output, without writing them to memory.

    A row whose outputs are all minus infinity, or no numbers, gives index 0 and minus infinity. `norm` as in `linear`.

    Args:
        masks: a bit for each output that a row may take, the lowest of the first word for the first one. Weights of outputs
            that no row may take are not read.
    """
    results = (jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32))
    index, value = jax.ffi.ffi_call("tilewright_argmax", results)(
        x, w.panels, or_nothing(norm, x.dtype), or_nothing(masks, jnp.uint32), outputs=w.outputs, eps=np.float32(eps)
    )
    return index, value


def linear_top_k(
    x: Float[Array, "*rows I"], w: PackedMatrix, k: int
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Indices and values of the `k` largest of each row's outputs `x @ w`, in descending order, of equal ones the first first.

    The other outputs are not written to memory. What is no number counts as minus infinity.
    """
    if not 1 <= k <= w.outputs:
        raise ValueError(f"expected from 1 to {w.outputs} of the largest outputs, found {k}")
    shape = (*x.shape[:-1], k)
    results = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    index, value = jax.ffi.ffi_call("tilewright_top_k", results)(x, w.panels, or_nothing(None, x.dtype), outputs=w.outputs)
    return index, value


def matmul(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    add: Float[Array, "M N"] | None = None,
    out_dtype: DTypeLike = jnp.float32,
    bfloat16: bool = False,
) -> Float[Array, "M N"]:
    """`a @ b + add` with float32 sums, for two matrices of float32 or bfloat16 that may be given as their transposes.

    Args:
        bfloat16: operands in float32 are rounded to bfloat16 first. Products are then those of the CPU's bfloat16 instructions
            where it has them.
    """
    dtype = jnp.dtype(out_dtype)
    out = jax.ShapeDtypeStruct((a.shape[1 if a_transposed else 0], b.shape[0 if b_transposed else 1]), dtype)
    call = jax.ffi.ffi_call("tilewright_matmul", out)
    return call(a, b, or_nothing(add, dtype), a_transposed=a_transposed, b_transposed=b_transposed, bfloat16=bfloat16)


class TrainingPrecision(NamedTuple):
    """The precision in which matrices are multiplied that are being trained.

    Attributes:
        bfloat16: products of bfloat16, and what stands between two of them in bfloat16; else all in float32.
    """

    bfloat16: bool

    @property
    def dtype(self) -> Any:
        """Of what stands between two products."""
        return jnp.bfloat16 if self.bfloat16 else jnp.float32


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def trained_matmul(
    precision: TrainingPrecision,
    transposed: bool,
    out_dtype: DTypeLike,
    x: Float[Array, "M I"],
    w: Float[Array, "..."],
    add: Float[Array, "M O"] | None,
) -> Float[Array, "M O"]:
    """`x @ w + add`, with `w.T` if it is `transposed`; its gradients are products of the same kind."""
    return matmul(x, w, b_transposed=transposed, add=add, out_dtype=out_dtype, bfloat16=precision.bfloat16)


def trained_forward(
    precision: TrainingPrecision, transposed: bool, out_dtype: DTypeLike, x: Array, w: Array, add: Array | None
) -> tuple[Array, Any]:
    return trained_matmul(precision, transposed, out_dtype, x, w, add), (x, w, None if add is None else ())


def trained_backward(
    precision: TrainingPrecision, transposed: bool, out_dtype: DTypeLike, kept: Any, dy: Float[Array, "M O"]
) -> tuple[Array, Array, Array | None]:
    x, w, added = kept
    dx = matmul(dy, w, b_transposed=not transposed, out_dtype=x.dtype, bfloat16=precision.bfloat16)
    first, second = (dy, x) if transposed else (x, dy)
    dw = matmul(first, second, a_transposed=True, out_dtype=w.dtype, bfloat16=precision.bfloat16)
    return dx, dw, None if added is None else dy


trained_matmul.defvjp(trained_forward, trained_backward)


def trained_linear(
    precision: TrainingPrecision,
    x: Float[Array, "*rows I"],
    w: Any,
    out_dtype: DTypeLike = jnp.float32,
    add: Float[Array, "*rows O"] | None = None,
) -> Float[Array, "*rows O"]:
    """`x @ w + add` for a matrix `[I, O]`, or one that is `Transposed`; `add` is of the result's dtype."""
    transposed = isinstance(w, Transposed)
    flat = None if add is None else add.reshape(-1, add.shape[-1])
    y: Any = trained_matmul(precision, transposed, out_dtype, x.reshape(-1, x.shape[-1]), w.w if transposed else w, flat)
    return y.reshape(*x.shape[:-1], -1)


def gate(x: Float[Array, "M O2"], due: Float[Array, "M O"] | None = None) -> Float[Array, "M _"]:
    """`silu(g) * u` for rows of g and u side by side; or, where something is due to that, what is due to `x`."""
    width = x.shape[1] // 2 if due is None else x.shape[1]
    call = jax.ffi.ffi_call("tilewright_gate", jax.ShapeDtypeStruct((x.shape[0], width), x.dtype))
    return call(x, or_nothing(due, x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def trained_gated(precision: TrainingPrecision, x: Float[Array, "M I"], w: Float[Array, "I O2"]) -> Float[Array, "M O"]:
    """`silu(x @ gate) * (x @ up)`, gate and up side by side in `w`."""
    return gated_forward(precision, x, w)[0]


def gated_forward(precision: TrainingPrecision, x: Array, w: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    both = matmul(x, w, out_dtype=precision.dtype, bfloat16=precision.bfloat16)
    return gate(both), (x, w, both)


def gated_backward(
    precision: TrainingPrecision, kept: tuple[Array, Array, Array], dy: Float[Array, "M O"]
) -> tuple[Array, Array]:
    x, w, both = kept
    due = gate(both, dy)
    dx = matmul(due, w, b_transposed=True, out_dtype=x.dtype, bfloat16=precision.bfloat16)
    return dx, matmul(x, due, a_transposed=True, out_dtype=w.dtype, bfloat16=precision.bfloat16)


trained_gated.defvjp(gated_forward, gated_backward)
