"""Weights in blocks of 32 inputs, as files hold them: kept bit by bit, or made here.

A weight is `(integer - offset) * scale + minimum`. In most forms each block of an output has a scale in half precision, and a
minimum in some. In llama.cpp's K-quants eight blocks share both, and each block has small integers that they are multiplied
with: its steps and lows. `../blocks.h` says how the kernel has them.

Source: ggml's `ggml-common.h` and `ggml-quants.c`; the form with zero points is what GPTQ, AWQ and compressed-tensors store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

BLOCK = 32
"""Inputs of a block."""
LANES = 16

BlockFormat = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_z"]


class Form(NamedTuple):
    """Parts of a format.

    Attributes:
        bits: of an integer.
        group: blocks that lie together.
        scales, minima: numbers in half precision of a group's outputs: one for all of its blocks, or one for each.
        steps: int8 numbers of a group that scales are multiplied with: one for each block, or for each half of a block.
        lows: int8 numbers of a group, one for each block, that minima are multiplied with; scales where there are no minima.
    """

    bits: int
    group: int
    scales: int
    minima: int = 0
    steps: int = 0
    lows: int = 0

    @property
    def offset(self) -> int:
        """The offset that is taken from integers: none where there is a minimum."""
        return 0 if self.minima + self.lows else 1 << (self.bits - 1)

    @property
    def head_bytes(self) -> int:
        """Of a group of a panel, before its integers."""
        return -(-LANES * (2 * (self.scales + self.minima) + self.steps + self.lows) // 64) * 64

    @property
    def group_bytes(self) -> int:
        """Of a group of a panel; by them the kernel knows the format."""
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
"""As in `../blocks.h`. "q4_z" has 4 bits and, for each block, a zero point: its lows are the negative zero points."""
WIDER: dict[BlockFormat, tuple[BlockFormat, ...]] = {
    "q4_0": ("q5_0", "q8_0", "q4_1", "q5_1"),
    "q5_0": ("q8_0", "q5_1"),
    "q4_1": ("q5_1",),
}
"""Formats that hold the same weights exactly, the smallest first."""
STEPS = (15.0, 14.0, 14.5, 15.5, 16.0)
"""Into how many steps a block's range is divided on trial; the first is the range itself."""
LARGEST = 2.0**15
"""Weights below this have scales and minima that half precision holds."""
ROWS = 64
"""Outputs that are quantised at a time: what is in between then stays in the processor's cache."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix `[I, O]` whose weights have 4 to 8 bits, N blocks to an output; G groups, as many as hold them all.

    Attributes:
        integers: uint8 `[O, N, 4 * bits]`; see `joined_bits`.
        scales: float16 `[O, N]`, or `[O, G]` where a group has one.
        minima: float16, likewise; None where the format has none.
        steps: int8 `[O, N]`, or `[O, 2 N]` where half a block has one; None where the format has none.
        lows: int8 `[O, N]`; None where the format has none.
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
        """QuantisedMatrix of an output."""
        return self.integers.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs, up to the end of the last block, and outputs."""
        return self.count * BLOCK, len(self.integers)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that the format has, by their names."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}
        return {name: array for name, array in found.items() if array is not None}

    def part(self, bounds: tuple[slice, slice]) -> "QuantisedMatrix | None":
        """Some inputs and outputs; None where the inputs do not begin and end where groups of blocks do."""
        inputs, (start, stop, _) = self.shape[0], bounds[0].indices(self.shape[0])
        whole = BLOCK * (self.form.group if self.form.scales == 1 else 1)
        if start % whole or stop % whole:
            return None

        def of(array: np.ndarray) -> np.ndarray:
            each = array.shape[1]
            return array[bounds[1], start * each // inputs : stop * each // inputs]

        return QuantisedMatrix(self.kind, **{name: of(array) for name, array in self.arrays.items()})

    def spread(self, values: np.ndarray, parts: int = 1) -> np.ndarray:
        """Values of groups or blocks as float32 `[O, N * parts]`: of each block, or of `parts` of it."""
        wide = np.asarray(values, np.float32)
        wanted = self.count * parts
        each = 1 if wide.shape[1] == wanted else parts if wide.shape[1] == self.count else parts * self.form.group
        return wide if each == 1 else np.repeat(wide, each, axis=1)[:, :wanted]

    def weight_scales(self) -> np.ndarray:
        """The size of a unit of each block's integers, float32 `[O, N]`, or `[O, 2 N]` of each half. Exact."""
        if self.steps is None:
            return self.spread(self.scales)
        parts = self.steps.shape[1] // self.count
        return self.spread(self.scales, parts) * self.steps.astype(np.float32)

    def weight_minima(self) -> np.ndarray | None:
        """The minimum of each block, float32 `[O, N]`; None without any. Exact."""
        if self.lows is None:
            return None if self.minima is None else self.spread(self.minima)
        return self.spread(self.scales if self.minima is None else self.minima) * self.lows.astype(np.float32)


def joined_bits(units: np.ndarray, bits: int) -> np.ndarray:
    """Integers `[..., 32]`, uint8 below `2**bits`, side by side as `[..., 4 * bits]` bytes.

    Of inputs i and i + 16 a byte has the low four bits. Bits above follow: of input 4 g + i, in byte i of four, from bit
    `(bits - 4) * g` on. 8 bits are the int8 of `unit - 128`.
    """
    if bits == 8:
        return units ^ np.uint8(128)
    low = units & 15
    made = [low[..., :16] | low[..., 16:] << 4]
    if bits > 4:
        fours = (units >> 4).reshape(*units.shape[:-1], -1, 8 // (bits - 4), 4)  # those of a byte in the dim before the last
        shifts = (np.arange(8 // (bits - 4), dtype=np.uint8) * (bits - 4))[:, None]
        above = np.bitwise_or.reduce(fours << shifts, axis=-2)
        made.append(above.reshape(*units.shape[:-1], -1))
    return np.concatenate(made, axis=-1)


def units_of(integers: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `joined_bits`."""
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
    """A table `[V, H]` that is read row by row out of what products read: the embedding of a tied model, of its output head.

    Attributes:
        panels: of the head; see `panels_of`.
        rows: V.
        width: H.
        dtype: that its rows are given in.
    """

    panels: Any
    rows: int
    width: int
    dtype: str

    def __len__(self) -> int:
        return self.rows


def dequantise(blocks: QuantisedMatrix) -> np.ndarray:
    """The matrix `[I, O]` in float32."""
    form = blocks.form
    units = units_of(blocks.integers, form.bits).astype(np.float32) - np.float32(form.offset)
    scales = blocks.weight_scales()
    minima = blocks.weight_minima()
    wide = units.reshape(len(units), scales.shape[1], -1) * scales[..., None]
    if minima is not None:
        wide = wide.reshape(units.shape) + minima[..., None]
    return wide.reshape(len(units), -1).T


def quantise(w: np.ndarray, kind: BlockFormat) -> QuantisedMatrix:
    """A matrix `[I, O]`, all below `LARGEST`, in blocks of Q4_1 or Q8_0; zeros follow its inputs up to the end of a block.

    The scale of 8 bits is the largest absolute weight over 127. Those of 4 bits come from a search: for each of `STEPS`,
    weights are rounded to that division of the block's range, scale and minimum are fitted to the integers by least squares,
    and the one with the smallest squared error is kept.
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
    """Rows of blocks `[O, N, 32]` as Q8_0."""
    scales = (np.max(np.abs(x), axis=-1) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    units = np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)
    return QuantisedMatrix("q8_0", np.rint(np.clip(units, -127, 127)).astype(np.int8).view(np.uint8), scales)


def four_bits(x: np.ndarray) -> QuantisedMatrix:
    """Rows of blocks `[O, N, 32]` as Q4_1; see `quantise`."""
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
    """The scale and the minimum, in half precision, by which `units * scale + minimum` errs least, by its squares."""
    middle = units.mean(axis=-1)
    apart = units - middle[..., None]
    spread = np.square(apart).sum(axis=-1)
    slope = np.divide((apart * x).sum(axis=-1), spread, out=np.zeros_like(spread), where=spread > 0)
    scale = slope.astype(np.float16)
    return scale, (mean - scale.astype(np.float32) * middle).astype(np.float16)


def widened(blocks: QuantisedMatrix, kind: BlockFormat) -> QuantisedMatrix:
    """Weights in a wider format (`WIDER`), exactly as they were.

    A scale times 8 or 16 is a number in half precision, too, unless it is above 65,504.
    """
    if blocks.kind == kind:
        return blocks
    assert kind in WIDER[blocks.kind], f"{blocks.kind} does not become {kind}"
    form = blocks.form
    wider = FORMS[kind]
    units = units_of(blocks.integers, form.bits)
    minima = blocks.minima
    if form.offset and not wider.offset:
        minima = np.float16(-form.offset) * blocks.scales
    elif form.offset:
        units = units + np.uint8(wider.offset - form.offset)
    return QuantisedMatrix(kind, joined_bits(units, wider.bits), blocks.scales, minima)


def common_kind(kinds: Sequence[BlockFormat]) -> BlockFormat | None:
    """The smallest format that holds weights of each of these exactly; None if there is none."""
    wider = [(kind, *WIDER.get(kind, ())) for kind in kinds]
    return next((kind for kind in FORMS if all(kind in held for held in wider)), None)


def of_one_kind(matrices: Sequence[QuantisedMatrix]) -> list[QuantisedMatrix] | None:
    """Matrices that one product reads, in their common format; None if there is none."""
    common = common_kind([each.kind for each in matrices])
    return None if common is None else [widened(each, common) for each in matrices]


def side_by_side(matrices: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Matrices of one format and as many inputs as one, their outputs one after another."""
    first, *others = matrices
    if not others:
        return first
    return QuantisedMatrix(
        first.kind, **{name: np.concatenate([each.arrays[name] for each in matrices]) for name in first.arrays}
    )


def panels_of(blocks: QuantisedMatrix) -> np.ndarray:
    """The kernel's panels, uint8 `[P, G, bytes]`: see `../blocks.h`. Zeros follow the last output and the last block."""
    form = blocks.form
    outputs = len(blocks.integers)
    groups = -(-blocks.count // form.group)
    count = -(-outputs // LANES)
    panels = np.zeros((count, groups, form.group_bytes), np.uint8)

    def padded(values: np.ndarray, each: int) -> np.ndarray:
        """Values `[O, N, bytes]`, `each` of a group, as `[P, 16, G, each, bytes]`."""
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
    integers = blocks.integers if form.bits < 8 else blocks.integers ^ np.uint8(128)
    fours = (
        padded(integers, form.group).reshape(count, LANES, groups, -1).view(np.uint32)
    )  # four bytes of each output side by side
    panels[:, :, form.head_bytes :].view(np.uint32)[...] = fours.transpose(0, 2, 3, 1).reshape(count, groups, -1)
    return panels


def blocks_of(panels: np.ndarray, outputs: int) -> QuantisedMatrix:
    """The inverse of `panels_of`, with the blocks of zeros that it may have added."""
    kind: BlockFormat = next(kind for kind, form in FORMS.items() if form.group_bytes == panels.shape[2])
    form, (count, groups, _) = FORMS[kind], panels.shape

    def returned(values: np.ndarray, each: int, size: int) -> np.ndarray:
        """Values of `each` of a group, of `size` bytes, in the order of outputs: `[O, N, size]`."""
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
