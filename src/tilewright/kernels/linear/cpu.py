"""Linear layers on a CPU's vector or tile unit, with packed weights. The kernel is `cpu.cc`.

A row's result is bitwise independent of the number of rows.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Int32, UInt32

from tilewright.kernels.cross_entropy import xla as loss_xla
from tilewright.kernels.linear import blocks
from tilewright.kernels.linear.blocks import BLOCK, FORMS, BlockFormat, QuantisedMatrix
from tilewright.kernels.native import or_empty
from tilewright.kernels.operations import Joined, Norm, Transposed

LANES = 16
"""Outputs per panel."""
PART = 32
"""Columns of joined unpacked matrices are multiples of this."""

Format = Literal["float32", "bfloat16"] | BlockFormat
STEP: dict[str, int] = {"float32": 1, "bfloat16": 2}
"""Inputs stored side by side in a panel (VNNI pairs for bfloat16)."""
MULTIPLE: dict[str, int] = {"float32": 1, "bfloat16": 32}
"""Inputs are zero-padded to a multiple of this: an AMX tile row has 64 bytes."""
MADE: tuple[str, ...] = (*STEP, "q4_1", "q8_0")
"""Formats that a matrix can be packed into; other block formats only come from files."""
BFLOAT16_ISAS = ("avx512bf16", "amx")
"""Instruction sets with bfloat16 multiplication."""


@partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["outputs", "gated", "parts"])
@dataclass(frozen=True)
class PackedMatrix:
    """A weight `[I, O]` in the kernel's layout.

    Attributes:
        panels: P panels of 16 outputs, the last one zero-padded: float32 `[P, I, 16]`, bfloat16 `[P, I / 2, 16, 2]`, or blocks
            (see `blocks.py`) as uint8 `[P, G, bytes]`. I is rounded up to a multiple of 32 (bfloat16), or to G whole groups of
            blocks.
        outputs: O.
        gated: True if panels of a gate and an up matrix alternate.
        parts: outputs of each of several concatenated matrices; empty for a single one.
    """

    panels: Any
    outputs: int
    gated: bool = False
    parts: tuple[int, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """True for block-quantised weights."""
        return self.panels.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs, including zero padding, and outputs."""
        if self.in_blocks:
            group = next(form.group for form in FORMS.values() if form.group_bytes == self.panels.shape[2])
            return self.panels.shape[1] * group * BLOCK, self.outputs
        return self.panels.shape[1] * (1 if self.panels.ndim == 3 else self.panels.shape[3]), self.outputs


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["parts"])
@dataclass(frozen=True)
class Joint:
    """A projection: the products with several joined matrices, `[B, T, sum(parts)]`, side by side."""

    array: Array
    parts: tuple[int, ...]

    def split(self) -> tuple[Array, ...]:
        ends = tuple(accumulate(self.parts))
        return tuple(self.array[..., end - size : end] for size, end in zip(self.parts, ends, strict=True))


def panels_of(w: np.ndarray, kind: Format) -> np.ndarray:
    """Splits a matrix `[I, O]` into panels (see `PackedMatrix`)."""
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
CHUNK = 2**25
"""Bytes of a mapping that smaller arrays share."""
ALIGNMENT = 64


def map_pages(size: int) -> np.ndarray:
    """Maps zeroed memory as bytes, on huge pages if the system has them.

    The mapping is private, because Linux backs shared mappings with huge pages only where its administrator enables it.
    """
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(pages, np.uint8).ctypes.data % HUGE_PAGE
    return np.frombuffer(pages, np.uint8, size, begin)


class HugePages:
    """Allocator of arrays on huge pages. Arrays smaller than a mapping share it; a mapping is freed after its last array."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.chunk = np.empty(0, np.uint8)
        self.used = 0

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns an uninitialised array, aligned to 64 bytes so that JAX uses its memory without a copy."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size >= CHUNK // 2:
            return map_pages(size).view(dtype).reshape(shape)
        with self.lock:
            if self.used + size > len(self.chunk):
                self.chunk = map_pages(CHUNK)
                self.used = 0
            begin = self.used
            self.used += -(-size // ALIGNMENT) * ALIGNMENT
            return self.chunk[begin : begin + size].view(dtype).reshape(shape)


huge_pages = HugePages()
"""Memory of packed weights. Streaming weights from ordinary pages is slower, since each has 4 KiB."""


def on_huge_pages(array: np.ndarray) -> Array:
    """Copies an array to the device; see `HugePages`."""
    placed = huge_pages.allocate(array.shape, array.dtype)
    placed[...] = array
    return jax.device_put(placed)


def packed(matrices: list[Any], kind: Format) -> PackedMatrix:
    """Packs one matrix, or a gate and an up matrix with alternating panels."""
    outputs = matrices[0].shape[1]
    parts = [np.asarray(w).astype(jnp.dtype(kind)) for w in matrices]
    # NumPy copies integers faster than bfloat16, and releases the GIL meanwhile.
    panels = interleaved([panels_of(w.view(np.uint16) if kind == "bfloat16" else w, kind) for w in parts])
    return PackedMatrix(jax.device_put(panels.view(jnp.dtype(kind))), outputs, gated=len(matrices) == 2)


def interleaved(panels: list[np.ndarray]) -> np.ndarray:
    """Places the panels of one matrix, or the alternating panels of two, on huge pages."""
    count, *panel = panels[0].shape
    placed = huge_pages.allocate((count, len(panels), *panel), panels[0].dtype)
    for n, one in enumerate(panels):
        placed[:, n] = one
    return placed.reshape(-1, *panel)


def packed_blocks(matrices: Sequence[QuantisedMatrix]) -> PackedMatrix:
    """Packs a block-quantised matrix, or a gate and an up matrix with alternating panels; see `packed`."""
    count, *panel = blocks.panel_shape(matrices[0])
    placed = huge_pages.allocate((count, len(matrices), *panel), np.uint8)
    for n, matrix in enumerate(matrices):
        blocks.fill_panels(placed[:, n], matrix)
    return PackedMatrix(jax.device_put(placed.reshape(-1, *panel)), matrices[0].shape[1], gated=len(matrices) == 2)


def in_blocks(matrices: Sequence[Any], kind: str) -> list[QuantisedMatrix] | None:
    """Returns matrices in blocks, quantising those that are not; None if `kind` is no block format.

    Matrices that are blocks already keep their format.
    """
    if kind in STEP:
        return None
    return [w if isinstance(w, QuantisedMatrix) else blocks.quantise(np.asarray(w), cast(Any, kind)) for w in matrices]


def format_of(w: Any) -> str:
    """Returns the format of an unpacked matrix."""
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
        raise ValueError(f"{name}: expected weights below {blocks.LARGEST:g} for block formats, found larger weights or NaN")


def pack(
    w: Float[Array | np.ndarray, "I O"] | QuantisedMatrix, kind: Format | None = None, name: str = "weight"
) -> PackedMatrix:
    """Packs a matrix.

    Args:
        w: float32 or bfloat16, or blocks, which keep their format.
        kind: format to pack into; None keeps the dtype.
        name: name of the weight in error messages.

    Raises:
        ValueError: `w` is no such matrix.
    """
    chosen = cast(Format, kind or format_of(w))
    check(w, chosen, name)
    if (made := in_blocks([w], chosen)) is not None:
        return packed_blocks(made)
    return packed([w], chosen)


def unpack(w: PackedMatrix, outputs: Int[Array, " W"] | None = None) -> Float[Array, "I _"]:
    """Inverts `pack`, up to rounding to the format and zero padding of inputs.

    Args:
        outputs: indices of the wanted outputs; None for all.
    """
    panels = np.asarray(w.panels)
    rows: Any = slice(w.outputs)
    if outputs is not None:
        wanted = np.asarray(outputs)
        held, place = np.unique(wanted // LANES, return_inverse=True)
        panels = panels[held]
        rows = place * LANES + wanted % LANES
    if w.in_blocks:
        found = blocks.blocks_of(panels, len(panels) * LANES)
        part = replace(found, **{name: array[rows] for name, array in found.arrays.items()})
        return jnp.asarray(blocks.dequantise(part))
    apart = panels.reshape(len(panels), -1, LANES, 1) if panels.ndim == 3 else panels
    wide = apart.transpose(1, 3, 0, 2).reshape(-1, len(panels) * LANES)
    return jnp.asarray(wide[:, rows])


def bytes_of(inputs: int, outputs: int, kind: str) -> int:
    """Returns the bytes of a packed matrix."""
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
    """Packs gate and up with alternating panels for one call; see `pack`."""
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
    """Packs matrices side by side, so that one matmul computes the outputs of all; see `pack`."""
    chosen = cast(Format, kind or format_of(matrices[0]))
    for n, w in enumerate(matrices):
        check(w, chosen, f"{name}[{n}]")
    if len({w.shape[0] for w in matrices}) != 1:
        raise ValueError(f"{name}: expected matrices with equal inputs, found {', '.join(str(w.shape) for w in matrices)}")
    parts = tuple(w.shape[1] for w in matrices)
    if (made := in_blocks(matrices, chosen)) is None:
        return replace(packed([np.concatenate([np.asarray(w) for w in matrices], axis=1)], chosen), parts=parts)
    return replace(packed_blocks([blocks.side_by_side(alike(made, name))]), parts=parts)


def read_together(matrices: Sequence[Any], kind: Format | None) -> bool:
    """Returns True if one matmul can read all matrices: blocks need a format that represents all of them exactly.

    Args:
        kind: format into which matrices that are not blocks are packed; None keeps their dtype.
    """
    kinds = [w.kind if isinstance(w, QuantisedMatrix) else kind or format_of(w) for w in matrices]
    return not any(isinstance(w, QuantisedMatrix) for w in matrices) or blocks.common_kind(kinds) is not None


def alike(matrices: Sequence[QuantisedMatrix], name: str) -> list[QuantisedMatrix]:
    """Converts block-quantised matrices to one format; raises a `ValueError` if none represents all of them exactly."""
    made = blocks.of_one_kind(matrices)
    if made is None:
        kinds = " and ".join(dict.fromkeys(w.kind for w in matrices))
        raise ValueError(f"{name}: expected blocks that one format represents exactly, found {kinds}")
    return made


def norm_weight(norm: Norm | None, dtype: DTypeLike) -> Any:
    return or_empty(None if norm is None else norm.weight, dtype)


def epsilon(norm: Norm | None) -> np.float32:
    return np.float32(0.0 if norm is None else norm.eps)


def linear(
    x: Float[Array, "*rows I"],
    w: PackedMatrix,
    out_dtype: DTypeLike | None = None,
    norm: Norm | None = None,
    add: Float[Array, "*rows O"] | None = None,
    count: Int32[Array, ""] | None = None,
    *,
    parts: tuple[int, int] | None = None,
) -> Float[Array, "*rows O"]:
    """Computes `x @ w`, or `silu(x @ gate) * (x @ up)` for a gated matrix, with float32 sums for all weight formats.

    With block-quantised weights, each block of a row of `x` is quantised to 8 bits too, with its largest absolute value at 127;
    if the weights have 8 bits, to 16 bits where the block has outliers.

    Args:
        x: float32 or bfloat16.
        out_dtype: float32 or bfloat16; None for the dtype of `x`.
        norm: RMSNorm applied first, its weight in the dtype of `x`; bitwise equal to `rms_norm` followed by `linear`.
        add: added to the sums before they are rounded, in the dtype of the result.
        count: number of leading rows to compute; the other rows of the result are undefined.
        parts: range of joined matrices whose outputs are computed: the first, and the end.
    """
    dtype = jnp.dtype(out_dtype or x.dtype)
    begin, end = (0, w.outputs) if parts is None else (sum(w.parts[: parts[0]]), sum(w.parts[: parts[1]]))
    first = begin // LANES
    skipped = begin - first * LANES  # outputs of the first panel before the part
    assert add is None or skipped == 0, "expected no add for a part that begins within a panel"
    out = jax.ShapeDtypeStruct((*x.shape[:-1], end - first * LANES), dtype)
    y = jax.ffi.ffi_call("tilewright_linear", out)(
        x,
        w.panels,
        norm_weight(norm, x.dtype),
        or_empty(add, dtype),
        or_empty(count, jnp.int32),
        gated=w.gated,
        eps=epsilon(norm),
        first=np.int64(first),
    )
    return y[..., skipped:]


def biased(products: Array, bias: tuple[Array, ...] | None, first: int, last: int | None = None) -> Array:
    """Adds biases, if given, to joint products."""
    return products if bias is None else products + jnp.concatenate(bias[first:last], axis=-1).astype(products.dtype)


def project(
    x: Float[Array, "*rows I"],
    joined: Any,
    norm: Norm | None = None,
    first: int = 0,
    last: int | None = None,
    bias: tuple[Array, ...] | None = None,
    count: Int32[Array, ""] | None = None,
) -> Joint:
    """Computes products with joined matrices; see `Operations.project`."""
    parts = joined.parts[first:last]
    if isinstance(joined, Joined):  # formats that no single matmul can read
        products = jnp.concatenate([linear(x, w, norm=norm, count=count) for w in parts], axis=-1)
        return Joint(biased(products, bias, first, last), tuple(w.outputs for w in parts))
    products = linear(x, joined, norm=norm, parts=(first, first + len(parts)), count=count)
    return Joint(biased(products, bias, first, last), parts)


def gated_linear(
    x: Float[Array, "*rows I"], joined: Any, norm: Norm | None = None, count: Int32[Array, ""] | None = None
) -> Float[Array, "*rows O"]:
    """Computes `silu(x @ gate) * (x @ up)`; see `Operations.gated_linear`."""
    if not isinstance(joined, Joined):
        return linear(x, joined, norm=norm, count=count)
    gated, up = (linear(x, w, jnp.float32, norm, count=count) for w in joined.parts)
    return (jax.nn.silu(gated) * up).astype(x.dtype)


cross_entropy = partial(loss_xla.cross_entropy, linear=linear)


def head_argmax(
    x: Float[Array, "*rows I"], head: PackedMatrix, norm: Norm | None = None, masks: UInt32[Array, "*rows W"] | None = None
) -> tuple[Int32[Array, "*rows"], Float32[Array, "*rows"]]:
    """Returns the first index of the largest of each row's outputs `x @ head`, and this output, without storing the outputs.

    A row whose outputs are all minus infinity or NaN gives index 0 and minus infinity. `norm` as in `linear`.

    Args:
        masks: a bit per allowed output, output 0 in the lowest bit of the first word. Weights of outputs that no row allows are
            not read.
    """
    results = (jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32), jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32))
    index, value = jax.ffi.ffi_call("tilewright_argmax", results)(
        x, head.panels, norm_weight(norm, x.dtype), or_empty(masks, jnp.uint32), outputs=head.outputs, eps=epsilon(norm)
    )
    return index, value


def head_top_k(
    x: Float[Array, "*rows I"], head: PackedMatrix, k: int
) -> tuple[Int32[Array, "*rows {k}"], Float32[Array, "*rows {k}"]]:
    """Returns indices and values of the `k` largest of each row's outputs `x @ head`, descending, the first of equals first.

    The other outputs are not stored. NaN counts as minus infinity.
    """
    if not 1 <= k <= head.outputs:
        raise ValueError(f"expected k from 1 to {head.outputs}, found {k}")
    shape = (*x.shape[:-1], k)
    results = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    call = jax.ffi.ffi_call("tilewright_top_k", results)
    index, value = call(x, head.panels, or_empty(None, x.dtype), outputs=head.outputs)
    return index, value


def matmul(
    a: Float[Array, "..."],
    b: Float[Array, "..."] | Sequence[Array],
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    add: Float[Array, "M N"] | None = None,
    out_dtype: DTypeLike = jnp.float32,
    bfloat16: bool = False,
) -> Float[Array, "M N"]:
    """Computes `a @ b + add` with float32 sums, for float32 or bfloat16 matrices that may be stored transposed.

    Args:
        b: the matrix, or several that are side by side as stored, with columns in multiples of `PART`.
        bfloat16: round float32 operands to bfloat16 first, to use the CPU's bfloat16 instructions if it has them.
    """
    parts = tuple(b) if isinstance(b, Sequence) else (b,)
    columns = parts[0].shape[0] if b_transposed else sum(part.shape[1] for part in parts)
    out = jax.ShapeDtypeStruct((a.shape[1 if a_transposed else 0], columns), jnp.dtype(out_dtype))
    call = jax.ffi.ffi_call("tilewright_matmul", out)
    operands = (a, parts[0], or_empty(add, out.dtype), *parts[1:])
    return call(*operands, a_transposed=a_transposed, b_transposed=b_transposed, bfloat16=bfloat16)


def weight_gradients(
    x: Float[Array, "M I"], dy: Float[Array, "M _"], sizes: Sequence[int], dtype: DTypeLike, bfloat16: bool
) -> tuple[Float[Array, "I _"], ...]:
    """Computes `x.T @ dy` as several matrices of `sizes` columns, multiples of `PART`; see `matmul`."""
    outs = [jax.ShapeDtypeStruct((x.shape[1], size), jnp.dtype(dtype)) for size in sizes]
    call = jax.ffi.ffi_call("tilewright_matmul", outs)
    return tuple(call(x, dy, or_empty(None, dtype), a_transposed=True, b_transposed=False, bfloat16=bfloat16))


class TrainingPrecision(NamedTuple):
    """Precision of matmuls in training.

    Attributes:
        bfloat16: matmuls and intermediate values in bfloat16; else all in float32.
    """

    bfloat16: bool

    @property
    def dtype(self) -> Any:
        """Dtype of intermediate values."""
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
    """Computes `x @ w + add`, with `w.T` if `transposed`; its gradients are matmuls of the same precision."""
    return matmul(x, w, b_transposed=transposed, add=add, out_dtype=out_dtype, bfloat16=precision.bfloat16)


def trained_forward(
    precision: TrainingPrecision, transposed: bool, out_dtype: DTypeLike, x: Array, w: Array, add: Array | None
) -> tuple[Array, Any]:
    return trained_matmul(precision, transposed, out_dtype, x, w, add), (x, w, None if add is None else ())


def trained_backward(
    precision: TrainingPrecision, transposed: bool, out_dtype: DTypeLike, residuals: Any, dy: Float[Array, "M O"]
) -> tuple[Array, Array, Array | None]:
    x, w, added = residuals
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
    """Computes `x @ w + add` for a matrix `[I, O]` or `Transposed`; `add` has the result's dtype."""
    transposed = isinstance(w, Transposed)
    flat = None if add is None else add.reshape(-1, add.shape[-1])
    y: Any = trained_matmul(precision, transposed, out_dtype, x.reshape(-1, x.shape[-1]), w.w if transposed else w, flat)
    return y.reshape(*x.shape[:-1], -1)


def divisible(parts: Sequence[Array]) -> Sequence[Array]:
    """Returns joined matrices as `trained_joined` accepts them: concatenated if columns are no multiples of `PART`."""
    if all(part.shape[1] % PART == 0 and part.dtype == parts[0].dtype for part in parts):
        return tuple(parts)
    return (jnp.concatenate(parts, axis=1),)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def trained_joined(
    precision: TrainingPrecision, x: Float[Array, "M I"], parts: tuple[Float[Array, "I _"], ...]
) -> Float[Array, "M _"]:
    """Computes the products with joined matrices (see `divisible`) side by side, without a copy of the matrices."""
    return matmul(x, parts, out_dtype=precision.dtype, bfloat16=precision.bfloat16)


def joined_forward(precision: TrainingPrecision, x: Array, parts: tuple[Array, ...]) -> tuple[Array, Any]:
    return trained_joined(precision, x, parts), (x, parts)


def joined_backward(precision: TrainingPrecision, residuals: Any, dy: Float[Array, "M _"]) -> tuple[Array, tuple[Array, ...]]:
    x, parts = residuals
    dx = matmul(dy, parts, b_transposed=True, out_dtype=x.dtype, bfloat16=precision.bfloat16)
    return dx, weight_gradients(x, dy, [part.shape[1] for part in parts], parts[0].dtype, precision.bfloat16)


trained_joined.defvjp(joined_forward, joined_backward)


def gate(x: Float[Array, "M O2"], cotangent: Float[Array, "M O"] | None = None) -> Float[Array, "M _"]:
    """Computes `silu(g) * u` for rows of g and u side by side; with a cotangent, the gradient of `x` instead."""
    width = x.shape[1] // 2 if cotangent is None else x.shape[1]
    call = jax.ffi.ffi_call("tilewright_gate", jax.ShapeDtypeStruct((x.shape[0], width), x.dtype))
    return call(x, or_empty(cotangent, x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def trained_gated(
    precision: TrainingPrecision, x: Float[Array, "M I"], parts: tuple[Float[Array, "I _"], ...]
) -> Float[Array, "M O"]:
    """Computes `silu(x @ gate) * (x @ up)`, with gate and up joined; see `trained_joined`."""
    return gated_forward(precision, x, parts)[0]


def gated_forward(precision: TrainingPrecision, x: Array, parts: tuple[Array, ...]) -> tuple[Array, Any]:
    both, residuals = joined_forward(precision, x, parts)
    return gate(both), (residuals, both)


def gated_backward(precision: TrainingPrecision, residuals: Any, dy: Float[Array, "M O"]) -> tuple[Array, tuple[Array, ...]]:
    joined, both = residuals
    return joined_backward(precision, joined, gate(both, dy))


trained_gated.defvjp(gated_forward, gated_backward)
