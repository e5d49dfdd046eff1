"""Weights in blocks of 32 inputs, as llama.cpp's files hold them: kept bit by bit, or made here.

Of each output, 32 weights share a scale in half precision: Q4_0's are `(integer - 8) * scale` with integers of 4 bits, Q4_1's
`integer * scale + minimum`, and Q8_0's `integer * scale` with integers of 8 bits. `blocks.inc` says how the kernel has them.

Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

BLOCK = 32
"""Inputs of a block."""
LANES = 16

BlockFormat = Literal["q4_0", "q4_1", "q8_0"]
INTEGERS: dict[BlockFormat, int] = {"q4_0": 16, "q4_1": 16, "q8_0": 32}
"""Bytes of a block's integers, by format."""
PAIR_BYTES: dict[BlockFormat, int] = {
    name: 2 * LANES * (size + (4 if name == "q4_1" else 2)) for name, size in INTEGERS.items()
}
"""Bytes that two blocks of a panel take; by them the kernel knows the format."""
STEPS = (15.0, 14.0, 14.5, 15.5, 16.0)
"""Into how many steps a block's range is divided on trial; the first is the range itself."""
LARGEST = 2.0**15
"""Weights below this have scales and minima that half precision holds."""
ROWS = 64
"""Outputs that are quantised at a time: what is in between then stays in the processor's cache."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix `[I, O]` whose weights have 4 or 8 bits, N blocks to an output.

    Attributes:
        integers: uint8 `[O, N, 16]`, of inputs i and i + 16 of a block the low and the high half; of Q8_0 `[O, N, 32]`, the
            bits of int8.
        scales: float16 `[O, N]`.
        minima: float16 `[O, N]`, of Q4_1; else None.
    """

    kind: BlockFormat
    integers: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs, up to the end of the last block, and outputs."""
        return self.scales.shape[1] * BLOCK, len(self.scales)


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


def read_blocks(rows: np.ndarray, kind: BlockFormat) -> QuantisedMatrix:
    """The blocks of a file's rows, uint8 `[O, bytes]`: each has its scale, its minimum where it has one, and its integers."""
    head = 4 if kind == "q4_1" else 2
    parts = rows.reshape(len(rows), -1, head + INTEGERS[kind])
    halves = np.ascontiguousarray(parts[..., :head]).view(np.float16)
    return QuantisedMatrix(kind, parts[..., head:], halves[..., 0], halves[..., 1] if kind == "q4_1" else None)


def dequantise(blocks: QuantisedMatrix) -> np.ndarray:
    """The matrix `[I, O]` in float32."""
    if blocks.kind == "q8_0":
        units = blocks.integers.view(np.int8).astype(np.float32)
    else:
        units = np.concatenate([blocks.integers & 15, blocks.integers >> 4], axis=-1).astype(np.float32)
    if blocks.kind == "q4_0":
        units -= 8
    wide = units * blocks.scales[..., None].astype(np.float32)
    if blocks.minima is not None:
        wide += blocks.minima[..., None].astype(np.float32)
    return wide.reshape(len(wide), -1).T


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
    least, most = x.min(axis=-1), x.max(axis=-1)
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


def as_q4_1(blocks: QuantisedMatrix) -> QuantisedMatrix:
    """Q4_1 blocks of the same weights, exactly: eight times a number in half precision is one too, unless it is above 8,188."""
    if blocks.kind != "q4_0":
        return blocks
    return QuantisedMatrix("q4_1", blocks.integers, blocks.scales, -8 * blocks.scales)


def as_q8_0(blocks: QuantisedMatrix) -> QuantisedMatrix:
    """Converts to Q8_0: the same weights where they were Q4_0, else rounded to 8 bits."""
    if blocks.kind == "q8_0":
        return blocks
    if blocks.kind == "q4_1":
        return quantise(dequantise(blocks), "q8_0")
    units = np.concatenate([blocks.integers & 15, blocks.integers >> 4], axis=-1)
    return QuantisedMatrix("q8_0", units - np.uint8(8), blocks.scales)


def of_one_kind(matrices: Sequence[QuantisedMatrix]) -> list[QuantisedMatrix]:
    """Matrices that one product reads, in one format: in 8 bits as soon as one of them has these, else in 4."""
    kinds = {each.kind for each in matrices}
    if len(kinds) == 1:
        return list(matrices)
    return [as_q8_0(each) if "q8_0" in kinds else as_q4_1(each) for each in matrices]


def side_by_side(matrices: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Matrices of one format and as many inputs as one, their outputs one after another."""
    first, *others = matrices
    if not others:
        return first
    minima = None if first.minima is None else np.concatenate([each.minima for each in matrices if each.minima is not None])
    integers, scales = (np.concatenate([getattr(each, name) for each in matrices]) for name in ("integers", "scales"))
    return QuantisedMatrix(first.kind, integers, scales, minima)


def panels_of(blocks: QuantisedMatrix) -> np.ndarray:
    """The kernel's panels, uint8 `[P, N / 2, bytes]`: see `blocks.inc`. Zeros follow the last output and the last block."""
    outputs, count = blocks.scales.shape
    pads = (0, -outputs % LANES), (0, count % 2)

    def turned(values: np.ndarray) -> np.ndarray:
        """Of all outputs `[O, N, bytes]`: of 16 outputs at a time, four bytes of each side by side."""
        padded = np.pad(values, (*pads, (0, 0)))
        step = min(4, padded.shape[2])
        parts = padded.reshape(-1, LANES, padded.shape[1], padded.shape[2] // step, step).transpose(0, 2, 3, 1, 4)
        return parts.reshape(len(parts), padded.shape[1] // 2, -1)

    integers = blocks.integers ^ np.uint8(128) if blocks.kind == "q8_0" else blocks.integers
    halves = [np.ascontiguousarray(each) for each in (blocks.scales, blocks.minima) if each is not None]
    return np.concatenate([*(turned(each[..., None].view(np.uint8)) for each in halves), turned(integers)], axis=2)


def blocks_of(panels: np.ndarray, outputs: int) -> QuantisedMatrix:
    """The inverse of `panels_of`, with the block of zeros that it may have added."""
    kind: BlockFormat = next(name for name, size in PAIR_BYTES.items() if size == panels.shape[2])
    ends = range(64, panels.shape[2] - 2 * LANES * INTEGERS[kind] + 1, 64)  # of scales, and of minima where there are some

    def returned(values: np.ndarray, size: int) -> np.ndarray:
        step = min(4, size)
        parts = values.reshape(len(values), -1, size // step, LANES, step).transpose(0, 3, 1, 2, 4)
        return np.ascontiguousarray(parts).reshape(len(values) * LANES, -1, size)[:outputs]

    integers = returned(panels[..., ends[-1] :], INTEGERS[kind])
    halves = [returned(panels[..., end - 64 : end], 2).view(np.float16)[..., 0] for end in ends]
    made = QuantisedMatrix(kind, integers, *halves)
    return replace(made, integers=integers ^ np.uint8(128)) if kind == "q8_0" else made
