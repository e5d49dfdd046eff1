"""Blocks of a GGUF file as the products hold them, bit by bit.

Each function takes the file's rows as uint8 `[O, N, bytes]`, one entry of N for each of the file's own blocks: of 32 weights,
or of 256 in the K-quants.

Source: ggml's `ggml-common.h` (layouts) and `ggml-quants.c` (what they mean).
"""

from collections.abc import Callable

import numpy as np

from tilewright.kernels.linear.blocks import FORMS, BlockFormat, QuantisedMatrix, joined_bits
from tilewright.models.mxfp4 import blocks_of_floats

NONLINEAR = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""IQ4_NL's 16 values of a weight."""


def halves(parts: np.ndarray, at: int) -> np.ndarray:
    """A number in half precision of each block, `[O, N]`."""
    return np.ascontiguousarray(parts[..., at : at + 2]).view(np.float16)[..., 0]


def nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Bytes `[..., n]` as integers of 4 bits `[..., 2 n]`: all low halves, then all high ones."""
    return np.concatenate([bytes_ & 15, bytes_ >> 4], axis=-1)


def fifth_bits(bytes_: np.ndarray) -> np.ndarray:
    """The bits of four bytes `[..., 4]`, from the lowest on, as 16 or 0: `[..., 32]`."""
    return np.unpackbits(np.ascontiguousarray(bytes_), axis=-1, bitorder="little") << 4


def plain(kind: BlockFormat, minimum: bool = False) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Q4_0, Q4_1 and Q8_0: the integers lie as they do here."""

    def read(parts: np.ndarray) -> QuantisedMatrix:
        head = 4 if minimum else 2
        return QuantisedMatrix(kind, parts[..., head:], halves(parts, 0), halves(parts, 2) if minimum else None)

    return read


def with_fifth_bit(kind: BlockFormat, minimum: bool = False) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Q5_0 and Q5_1: scale, minimum, the fifth bits of 32 weights, and the four low ones."""

    def read(parts: np.ndarray) -> QuantisedMatrix:
        head = 4 if minimum else 2
        units = nibbles(parts[..., head + 4 :]) | fifth_bits(parts[..., head : head + 4])
        return QuantisedMatrix(kind, joined_bits(units, 5), halves(parts, 0), halves(parts, 2) if minimum else None)

    return read


def six_bit_steps(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps and lows, int8 `[O, 8 N]` each, of 12 bytes: the first four have all their bits, of the others two stand apart."""
    first = packed[..., :4]
    second = packed[..., 4:8]
    third = packed[..., 8:]
    steps = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    lows = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return steps.reshape(len(packed), -1).view(np.int8), lows.reshape(len(packed), -1).view(np.int8)


def k_quant(kind: BlockFormat, bits: int) -> Callable[[np.ndarray], QuantisedMatrix]:
    """Q4_K and Q5_K: two halves, 12 bytes of steps and lows, the fifth bits, and the four low ones of 64 weights at a time."""

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
    """Q6_K: four low bits, two high ones, a step for 16 weights, and a scale. 128 weights share 64 and 32 bytes of these."""
    rows = len(parts)
    low = parts[..., :128].reshape(*parts.shape[:-1], 2, 64)
    high = parts[..., 128:192].reshape(*parts.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    units = nibbles(low).reshape(*parts.shape[:-1], 2, 4, 32) | high << 4
    steps = np.ascontiguousarray(parts[..., 192:208]).view(np.int8).reshape(rows, -1)
    integers = joined_bits(units.reshape(rows, -1, 32), 6)
    return QuantisedMatrix("q6_k", integers, halves(parts, 208), steps=steps)


def q3_k(parts: np.ndarray) -> QuantisedMatrix:
    """Q3_K, as 6-bit blocks of the same weights: a third bit, two low ones, and 6-bit steps for 16 weights, all with offsets.

    Of steps 8 bytes have four low bits each, those of the first 8 before those of the others, and four bytes the two high ones.
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
    """IQ4_NL, as 8-bit blocks of the same weights: of 16 values each has 8 bits."""
    return QuantisedMatrix("q8_0", NONLINEAR[nibbles(parts[..., 2:])].view(np.uint8), halves(parts, 0))


def mxfp4(parts: np.ndarray) -> QuantisedMatrix | None:
    """MXFP4: an exponent of two, and floats of four bits."""
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
"""Bytes of a block, and what reads it, by llama.cpp's name of the type."""


KEPT: dict[str, str] = {name: name.lower() for name in READERS} | {"Q3_K": "q6_k", "IQ4_NL": "q8_0", "MXFP4": "q5_0"}
"""The format that weights of each type are read in."""


def read_blocks(rows: np.ndarray, kind: str) -> QuantisedMatrix | None:
    """The blocks of a file's rows, uint8 `[O, bytes]`; None of a type that products do not hold as it is."""
    if kind not in READERS:
        return None
    size, read = READERS[kind]
    return read(rows.reshape(len(rows), -1, size))
