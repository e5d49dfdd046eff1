"""Block-quantised weights, with blocks of 32 inputs: loaded from files bit by bit, or quantised here.

A weight is `(integer - offset) * scale + minimum`. In most formats each block of an output has a half-precision scale, and in
some a minimum. In llama.cpp's K-quants a super-block of eight blocks shares both, and each block multiplies them by small
integers, its steps and lows. `../blocks.h` describes the kernel's layout.

Source: ggml's `ggml-common.h` and `ggml-quants.c`; GPTQ, AWQ and compressed-tensors store the format with zero points.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

BLOCK = 32
"""Inputs per block."""
LANES = 16

BlockFormat = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_z"]


class Form(NamedTuple):
    """Layout of a format.

    Attributes:
        bits: bits of an integer.
        group: blocks per group (super-block).
        scales, minima: half-precision numbers per group and output: one for all blocks, or one per block.
        steps: int8 factors of scales per group: one per block, or one per half block.
        lows: int8 factors per group, one per block, of minima, or of scales if the format has no minima.
    """

    bits: int
    group: int
    scales: int
    minima: int = 0
    steps: int = 0
    lows: int = 0

    @property
    def offset(self) -> int:
        """Offset subtracted from integers; 0 for formats with a minimum."""
        return 0 if self.minima + self.lows else 1 << (self.bits - 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of a panel's group before its integers."""
        return -(-LANES * (2 * (self.scales + self.minima) + self.steps + self.lows) // 64) * 64

    @property
    def group_bytes(self) -> int:
        """Bytes of a panel's group, by which the kernel identifies the format."""
        return self.head_bytes + self.group * self.bits * 64


FORMS: dict[BlockFormat, Form] = {
    "q4_0": Form(4, 2, 2),
    "q4_1": Form(4, 2, 2, 2),
    "q5_0": Form(5, 2, 2),
    "q5_1": Form(5, 2, 2, 2),
    "q8_0": Form(8, 2, 2),
    "q4_k": Form(4, 8, 1, 1, 8, 8),
    "q5_k": Form(5, 8, 1, 1, 8, 8),
    "q6_k": Form(6, 8, 1, steps=16),
    "q4_z": Form(4, 4, 4, lows=4),
}
"""Layouts of all formats, as in `../blocks.h`. "q4_z" has 4 bits and a zero point per block: its lows are negative zero
points."""
WIDER: dict[str, tuple[BlockFormat, ...]] = {
    "q4_0": ("q5_0", "q8_0", "q4_1", "q5_1"),
    "q5_0": ("q8_0", "q5_1"),
    "q4_1": ("q5_1",),
}
"""Formats that represent the same weights exactly, smallest first."""
STEPS = (15.0, 14.0, 14.5, 15.5, 16.0)
"""Numbers of steps into which a block's range is divided when searching a scale; the first spans the range itself."""
LARGEST = 2.0**15
"""Limit of weights whose scales and minima fit half precision."""
CACHED = 1 << 19
"""Bytes of panels that are written at a time."""
ROWS = 64
"""Outputs quantised at a time, so that intermediate values stay in the CPU's cache."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix `[I, O]` with weights of 4 to 8 bits, N blocks per output in G groups.

    Attributes:
        kind: the format.
        integers: uint8 `[O, N, 4 * bits]`; see `joined_bits`.
        scales: float16 `[O, N]`, or `[O, G]` with one per group.
        minima: float16, like `scales`; None if the format has none.
        steps: int8 `[O, N]`, or `[O, 2 N]` with one per half block; None if the format has none.
        lows: int8 `[O, N]`; None if the format has none.
    """

    kind: BlockFormat
    integers: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    steps: np.ndarray | None = None
    lows: np.ndarray | None = None

    @property
    def form(self) -> Form:
        return FORMS[self.kind]

    @property
    def count(self) -> int:
        """Number of blocks per output."""
        return self.integers.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs, rounded up to whole blocks, and outputs."""
        return self.count * BLOCK, len(self.integers)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of this format, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}
        return {name: array for name, array in found.items() if array is not None}

    def part(self, bounds: tuple[slice, slice]) -> "QuantisedMatrix | None":
        """Returns some inputs and outputs; None if the inputs do not align with groups of blocks."""
        inputs, (start, stop, _) = self.shape[0], bounds[0].indices(self.shape[0])
        whole = BLOCK * (self.form.group if self.form.scales == 1 else 1)
        if start % whole or stop % whole:
            return None

        def cut(array: np.ndarray) -> np.ndarray:
            each = array.shape[1]
            return array[bounds[1], start * each // inputs : stop * each // inputs]

        return QuantisedMatrix(self.kind, **{name: cut(array) for name, array in self.arrays.items()})

    def spread(self, values: np.ndarray, parts: int = 1) -> np.ndarray:
        """Expands values per group or block to float32 `[O, N * parts]`, one per block or per part of a block."""
        wide = np.asarray(values, np.float32)
        wanted = self.count * parts
        each = 1 if wide.shape[1] == wanted else parts if wide.shape[1] == self.count else parts * self.form.group
        return wide if each == 1 else np.repeat(wide, each, axis=1)[:, :wanted]

    def weight_scales(self) -> np.ndarray:
        """Returns the exact scale of each block's integers, float32 `[O, N]`, or `[O, 2 N]` per half block."""
        if self.steps is None:
            return self.spread(self.scales)
        parts = self.steps.shape[1] // self.count
        return self.spread(self.scales, parts) * self.steps.astype(np.float32)

    def weight_minima(self) -> np.ndarray | None:
        """Returns the exact minimum of each block, float32 `[O, N]`; None if the format has none."""
        if self.lows is None:
            return None if self.minima is None else self.spread(self.minima)
        return self.spread(self.scales if self.minima is None else self.minima) * self.lows.astype(np.float32)


def joined_bits(units: np.ndarray, bits: int) -> np.ndarray:
    """Packs integers `[..., 32]`, uint8 below `2**bits`, into `[..., 4 * bits]` bytes.

    A byte has the low four bits of inputs i and i + 16. Higher bits follow: those of input 4 g + i are in byte i of four, from
    bit `(bits - 4) * g` on. With 8 bits, each byte is the int8 `unit - 128`.
    """
    if bits == 8:
        return units ^ np.uint8(128)
    low = units & 15
    joined = low[..., :16] | low[..., 16:] << 4
    if bits == 4:
        return joined
    # Four inputs are a word; bytes of a word do not overflow. The words of the last dim share a byte each.
    words = np.ascontiguousarray(units >> 4).view(np.uint32).reshape(*units.shape[:-1], -1, 8 // (bits - 4))
    above = words[..., 0].copy()
    for n in range(1, words.shape[-1]):
        above |= words[..., n] << np.uint32(n * (bits - 4))
    return np.concatenate([joined, above.view(np.uint8)], axis=-1)


def units_of(integers: np.ndarray, bits: int) -> np.ndarray:
    """Inverts `joined_bits`."""
    if bits == 8:
        return integers ^ np.uint8(128)
    units = np.concatenate([integers[..., :16] & 15, integers[..., :16] >> 4], axis=-1)
    if bits > 4:
        bytes_ = integers[..., 16:].reshape(*integers.shape[:-1], -1, 1, 4)
        shifts = (np.arange(8 // (bits - 4), dtype=np.uint8) * (bits - 4))[:, None]
        above = bytes_ >> shifts & np.uint8((1 << (bits - 4)) - 1)
        units |= above.reshape(units.shape) << 4
    return units


@partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["rows", "width", "dtype"])
@dataclass(frozen=True)
class PackedTable:
    """A table `[V, H]` whose rows are read from a packed matrix: a tied model's embedding, stored as its output head.

    Attributes:
        panels: panels of the head; see `panels_of`.
        rows: V.
        width: H.
        dtype: dtype of the returned rows.
    """

    panels: Any
    rows: int
    width: int
    dtype: str

    def __len__(self) -> int:
        return self.rows


def dequantise(blocks: QuantisedMatrix) -> np.ndarray:
    """Returns the matrix `[I, O]` in float32."""
    form = blocks.form
    units = units_of(blocks.integers, form.bits).astype(np.float32) - np.float32(form.offset)
    scales = blocks.weight_scales()
    minima = blocks.weight_minima()
    wide = units.reshape(len(units), scales.shape[1], -1) * scales[..., None]
    if minima is not None:
        wide = wide.reshape(units.shape) + minima[..., None]
    return wide.reshape(len(units), -1).T


def quantise(w: np.ndarray, kind: BlockFormat) -> QuantisedMatrix:
    """Quantises a matrix `[I, O]` with weights below `LARGEST` to Q4_1 or Q8_0, padding inputs with zeros to whole blocks.

    With 8 bits, the scale is the largest absolute weight over 127. With 4 bits, scale and minimum are searched: for each of
    `STEPS`, weights are rounded to this division of the block's range, scale and minimum are fitted to the integers by least
    squares, and the division with the smallest squared error is chosen.
    """
    inputs, outputs = w.shape
    count = -(-inputs // BLOCK)
    read = eight_bits if kind == "q8_0" else four_bits
    made = []
    for begin in range(0, outputs, ROWS):
        part = w[:, begin : begin + ROWS]
        rows = np.zeros((part.shape[1], count * BLOCK), np.float32)
        rows[:, :inputs] = np.asarray(part, np.float32).T
        made.append(read(rows.reshape(-1, count, BLOCK)))
    return side_by_side(made)


def eight_bits(x: np.ndarray) -> QuantisedMatrix:
    """Quantises blocks `[O, N, 32]` to Q8_0."""
    scales = (np.max(np.abs(x), axis=-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    units = np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)
    return QuantisedMatrix("q8_0", np.rint(np.clip(units, -127, 127)).astype(np.int8).view(np.uint8), scales)


def four_bits(x: np.ndarray) -> QuantisedMatrix:
    """Quantises blocks `[O, N, 32]` to Q4_1; see `quantise`."""
    least = x.min(axis=-1)
    most = x.max(axis=-1)
    mean = x.mean(axis=-1)
    best = [np.zeros(x.shape, np.uint8), np.zeros_like(least, np.float16), np.zeros_like(least, np.float16)]
    smallest = np.full_like(least, np.inf)
    for steps in STEPS:
        factor = np.divide(steps, most - least, out=np.zeros_like(least), where=most > least)
        units = np.clip(np.rint((x - least[..., None]) * factor[..., None]), 0, 15)
        scale, minimum = fitted(x, units, mean)
        error = np.square(units * scale.astype(np.float32)[..., None] + minimum.astype(np.float32)[..., None] - x).sum(axis=-1)
        better = error < smallest
        smallest = np.where(better, error, smallest)
        new = (units.astype(np.uint8), scale, minimum)
        best = [np.where(better[..., None] if old.ndim == 3 else better, one, old) for one, old in zip(new, best, strict=True)]
    units, scales, minima = best
    return QuantisedMatrix("q4_1", units[..., :16] | units[..., 16:] << 4, scales, minima)


def fitted(x: np.ndarray, units: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the half-precision scale and minimum that minimise the squared error of `units * scale + minimum`."""
    middle = units.mean(axis=-1)
    apart = units - middle[..., None]
    spread = np.square(apart).sum(axis=-1)
    slope = np.divide((apart * x).sum(axis=-1), spread, out=np.zeros_like(spread), where=spread > 0)
    scale = slope.astype(np.float16)
    return scale, (mean - scale.astype(np.float32) * middle).astype(np.float16)


def widened(blocks: QuantisedMatrix, kind: BlockFormat) -> QuantisedMatrix:
    """Converts weights exactly to a wider format (`WIDER`).

    A scale times 8 or 16 is exact in half precision unless it exceeds 65,504.
    """
    if blocks.kind == kind:
        return blocks
    assert kind in WIDER[blocks.kind], f"{blocks.kind} cannot be widened to {kind}"
    form = blocks.form
    wider = FORMS[kind]
    units = units_of(blocks.integers, form.bits)
    minima = blocks.minima
    if form.offset and not wider.offset:
        minima = np.float16(-form.offset) * blocks.scales
    elif form.offset:
        units = units + np.uint8(wider.offset - form.offset)
    return QuantisedMatrix(kind, joined_bits(units, wider.bits), blocks.scales, minima)


def common_kind(kinds: Sequence[str]) -> BlockFormat | None:
    """Returns the smallest block format that represents weights of all these formats exactly; None without one."""
    wider = [(kind, *WIDER.get(kind, ())) for kind in kinds]
    return next((kind for kind in FORMS if all(kind in held for held in wider)), None)


def of_one_kind(matrices: Sequence[QuantisedMatrix]) -> list[QuantisedMatrix] | None:
    """Converts matrices to their common format, so that one matmul can read them; None without one."""
    common = common_kind([each.kind for each in matrices])
    return None if common is None else [widened(each, common) for each in matrices]


def side_by_side(matrices: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Concatenates matrices of one format and number of inputs along their outputs."""
    first, *rest = matrices
    if not rest:
        return first
    return QuantisedMatrix(
        first.kind, **{name: np.concatenate([each.arrays[name] for each in matrices]) for name in first.arrays}
    )


def panel_shape(blocks: QuantisedMatrix) -> tuple[int, int, int]:
    """Returns the shape of the kernel's panels: panels of 16 outputs, groups, and bytes of a group."""
    outputs, form = len(blocks.integers), blocks.form
    return -(-outputs // LANES), -(-blocks.count // form.group), form.group_bytes


def panels_of(blocks: QuantisedMatrix) -> np.ndarray:
    """Returns the kernel's panels, uint8 `[P, G, bytes]` (see `../blocks.h`), zero-padded to whole panels and groups."""
    panels = np.empty(panel_shape(blocks), np.uint8)
    fill_panels(panels, blocks)
    return panels


def fill_panels(panels: np.ndarray, blocks: QuantisedMatrix) -> None:
    """Writes a matrix into memory for its panels, some panels at a time, which stay in the CPU's cache."""
    count, groups, group_bytes = panels.shape
    each = max(1, CACHED // (groups * group_bytes))
    for first in range(0, count, each):
        rows = slice(first * LANES, (first + each) * LANES)
        part = QuantisedMatrix(blocks.kind, **{name: array[rows] for name, array in blocks.arrays.items()})
        fill_some(panels[first : first + each], part)


def fill_some(panels: np.ndarray, blocks: QuantisedMatrix) -> None:
    """Writes a matrix into memory for its panels, with temporary arrays of the same size; see `fill_panels`."""
    form = blocks.form
    count, groups, _ = panels.shape
    outputs = len(blocks.integers)

    def padded(values: np.ndarray, each: int) -> np.ndarray:
        """Reshapes values `[O, N, bytes]`, `each` per group, to `[P, 16, G, each, bytes]`."""
        if (missing := (count * LANES - outputs, groups * each - values.shape[1])) != (0, 0):
            values = np.pad(values, ((0, missing[0]), (0, missing[1]), (0, 0)))
        return values.reshape(count, LANES, groups, each, -1)

    begin = 0
    for name, values in blocks.arrays.items():
        if name == "integers":
            continue
        each = getattr(form, name)
        placed = padded(np.ascontiguousarray(values)[..., None].view(np.uint8), each).transpose(0, 2, 3, 1, 4)
        end = begin + placed[0, 0].size
        panels[:, :, begin:end] = placed.reshape(count, groups, -1)
        begin = end
    panels[:, :, begin : form.head_bytes] = 0
    integers = blocks.integers if form.bits < 8 else blocks.integers ^ np.uint8(128)
    # Four bytes of each output lie side by side.
    fours = np.ascontiguousarray(padded(integers, form.group).reshape(count, LANES, groups, -1)).view(np.uint32)
    places = panels[:, :, form.head_bytes :].view(np.uint32).reshape(count, groups, -1, LANES)
    places[...] = fours.transpose(0, 2, 3, 1)


def blocks_of(panels: np.ndarray, outputs: int) -> QuantisedMatrix:
    """Inverts `panels_of`, including blocks of zero padding."""
    kind: BlockFormat = next(kind for kind, form in FORMS.items() if form.group_bytes == panels.shape[2])
    form, (count, groups, _) = FORMS[kind], panels.shape

    def returned(values: np.ndarray, each: int, size: int) -> np.ndarray:
        """Reorders values, `each` per group and `size` bytes each, by output: `[O, N, size]`."""
        parts = values.reshape(count, groups, each, LANES, size).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(parts).reshape(count * LANES, groups * each, size)[:outputs]

    fours = returned(panels[:, :, form.head_bytes :], form.group * form.bits, 4)
    integers = fours.reshape(outputs, groups * form.group, 4 * form.bits)
    made = {}
    begin = 0
    for name, dtype in (("scales", np.float16), ("minima", np.float16), ("steps", np.int8), ("lows", np.int8)):
        each = getattr(form, name)
        size = np.dtype(dtype).itemsize
        end = begin + each * LANES * size
        if each:
            made[name] = returned(panels[:, :, begin:end], each, size).view(dtype)[..., 0]
        begin = end
    return QuantisedMatrix(kind, integers if form.bits < 8 else integers ^ np.uint8(128), **made)
