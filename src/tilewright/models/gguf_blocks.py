"""Blocks of a GGUF file in the format of the matmuls, bit by bit.

Each function takes the file's rows as uint8 `[O, N, bytes]`, with an entry of N for each of the file's own blocks of 32
weights, or super-blocks of 256 in the K-quants.

Source: ggml's `ggml-common.h` (layouts) and `ggml-quants.c` (their meaning).
"""

from collections.abc import Callable

import numpy as np

from tilewright.kernels.linear.blocks import FORMS, BlockFormat, QuantisedMatrix, joined_bits
from tilewright.models.mxfp4 import blocks_of_floats

NONLINEAR = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""IQ4_NL's 16 values of a weight."""


def halves(parts: np.ndarray, at: int) -> np.ndarray:
    """Reads a half-precision number of each block, `[O, N]`."""
    return np.ascontiguousarray(parts[..., at : at + 2]).view(np.float16)[..., 0]


def nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Splits bytes `[..., n]` into 4-bit integers `[..., 2 n]`: all low halves, then all high ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


FIFTH_BITS = np.asarray([sum((n >> bit & 1) << (8 * (bit % 4) + bit // 4) for bit in range(8)) for n in range(256)], np.uint32)
"""Places of eight inputs' fifth bits, one byte of a file, in the four bytes of `joined_bits`."""


def fifth_bits(bytes_: np.ndarray) -> np.ndarray:
    """Reorders the fifth bits of 32 inputs, `[..., 4]`, from the file's order (lowest first) to that of `joined_bits`."""
    placed = FIFTH_BITS[bytes_]
    joined = placed[..., :1] | placed[..., 1:2] << 2 | placed[..., 2:3] << 4 | placed[..., 3:] << 6
    return joined.astype("<u4").view(np.uint8)


def plain(kind: BlockFormat, minimum: bool = False) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Reads Q4_0, Q4_1 and Q8_0, whose integers have the same order as here."""

    def read(parts: np.ndarray) -> QuantisedMatrix:
        head = 4 if minimum else 2
        return QuantisedMatrix(kind, parts[..., head:], halves(parts, 0), halves(parts, 2) if minimum else None)

    return read


def with_fifth_bit(kind: BlockFormat, minimum: bool = False) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Reads Q5_0 and Q5_1: scale, minimum, the fifth bits of 32 weights, and their four low bits."""

    def read(parts: np.ndarray) -> QuantisedMatrix:
        head = 4 if minimum else 2
        integers = np.concatenate([parts[..., head + 4 :], fifth_bits(parts[..., head : head + 4])], axis=-1)
        return QuantisedMatrix(kind, integers, halves(parts, 0), halves(parts, 2) if minimum else None)

    return read


def six_bit_steps(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads steps and lows, int8 `[O, 8 N]` each, from 12 bytes.

    The first four of each are whole; the others have two bits in another byte.
    """
    first = packed[..., :4]
    second = packed[..., 4:8]
    third = packed[..., 8:]
    steps = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    lows = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return steps.reshape(len(packed), -1).view(np.int8), lows.reshape(len(packed), -1).view(np.int8)


def k_quant(kind: BlockFormat, bits: int) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Reads Q4_K and Q5_K: two scales, 12 bytes of steps and lows, fifth bits, and four low bits of 64 weights at a time."""

    def read(parts: np.ndarray) -> QuantisedMatrix:
        rows = len(parts)
        low = parts[..., -128:].reshape(*parts.shape[:-1], 4, 32)
        units = nibbles(low).reshape(*parts.shape[:-1], 8, 32)
        if bits == 5:
            units |= (parts[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
        steps, lows = six_bit_steps(np.ascontiguousarray(parts[..., 4:16]))
        integers = joined_bits(units, bits).reshape(rows, -1, 4 * bits)
        return QuantisedMatrix(kind, integers, halves(parts, 0), -halves(parts, 2), steps, lows)

    return read


def q6_k(parts: np.ndarray) -> QuantisedMatrix:
    """Reads Q6_K: four low bits, two high bits, a step for 16 weights, and a scale.

    128 weights share 64 bytes of low and 32 bytes of high bits.
    """
    rows = len(parts)
    low = parts[..., :128].reshape(*parts.shape[:-1], 2, 64)
    high = parts[..., 128:192].reshape(*parts.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    units = nibbles(low).reshape(*parts.shape[:-1], 2, 4, 32) | high << 4
    steps = np.ascontiguousarray(parts[..., 192:208]).view(np.int8).reshape(rows, -1)
    integers = joined_bits(units.reshape(rows, -1, 32), 6)
    return QuantisedMatrix("q6_k", integers, halves(parts, 208), steps=steps)


def q3_k(parts: np.ndarray) -> QuantisedMatrix:
    """Reads Q3_K as Q6_K blocks of the same weights: a third bit, two low bits, and 6-bit steps for 16 weights, with offsets.

    8 bytes have the four low bits of the steps, first those of the first 8; four bytes have the two high bits.
    """
    rows = len(parts)
    third = parts[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = parts[..., 32:96].reshape(*parts.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    units = low.reshape(third.shape) | third << 2
    high = parts[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    steps = nibbles(parts[..., 96:104]) | high.reshape(*parts.shape[:-1], 16) << 4
    offset = np.uint8(FORMS["q6_k"].offset - 4)
    integers = joined_bits(units.reshape(rows, -1, 32) + offset, 6)
    return QuantisedMatrix("q6_k", integers, halves(parts, 108), steps=(steps.view(np.int8) - np.int8(32)).reshape(rows, -1))


def iq4_nl(parts: np.ndarray) -> QuantisedMatrix:
    """Reads IQ4_NL as Q8_0 blocks of the same weights: its 16 values are 8-bit integers."""
    return QuantisedMatrix("q8_0", NONLINEAR[nibbles(parts[..., 2:])].view(np.uint8), halves(parts, 0))


def mxfp4(parts: np.ndarray) -> QuantisedMatrix | None:
    """Reads MXFP4: an exponent of two for each block, and 4-bit floats."""
    return blocks_of_floats(nibbles(parts[..., 1:]), parts[..., 0])


READERS: dict[str, tuple[int, Callable[[np.ndarray], QuantisedMatrix | None]]] = {
    "Q4_0": (18, plain("q4_0")),
    "Q4_1": (20, plain("q4_1", minimum=True)),
    "Q8_0": (34, plain("q8_0")),
    "Q5_0": (22, with_fifth_bit("q5_0")),
    "Q5_1": (24, with_fifth_bit("q5_1", minimum=True)),
    "Q4_K": (144, k_quant("q4_k", 4)),
    "Q5_K": (176, k_quant("q5_k", 5)),
    "Q6_K": (210, q6_k),
    "Q3_K": (110, q3_k),
    "IQ4_NL": (18, iq4_nl),
    "MXFP4": (17, mxfp4),
}
"""Bytes of a block, and the function that reads it, by llama.cpp's name of the type."""


BLOCK_FORMATS: dict[str, str] = {name: name.lower() for name in READERS} | {"Q3_K": "q6_k", "IQ4_NL": "q8_0", "MXFP4": "q5_0"}
"""Format in which weights of each type are read."""


def read_blocks(rows: np.ndarray, kind: str) -> QuantisedMatrix | None:
    """Reads blocks of a file's rows, uint8 `[O, bytes]`; None for types that matmuls cannot read."""
    if kind not in READERS:
        return None
    size, read = READERS[kind]
    return read(rows.reshape(len(rows), -1, size))
