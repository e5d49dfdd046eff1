"""MXFP4: 4-bit floats, 32 of which share a power of two.

A float has a sign, two bits of exponent and one of fraction (E2M1). The shared scale is `2**(byte - 127)` (E8M0), and 255 is
NaN. gpt-oss publishes experts' weights as `*_blocks` and `*_scales`; compressed-tensors and GGUF have the same numbers in other
orders.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3; transformers' `integrations/mxfp4.py`.
"""

import numpy as np

from tilewright.kernels.linear.blocks import QuantisedMatrix, joined_bits

BLOCK = 32
FOUR_BIT_FLOATS = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the floats, by their four bits."""
NO_NUMBER = 255
"""Shared scale that is NaN."""
SMALLEST = 127 - 23
LARGEST = 127 + 16
"""Range of shared scales whose half is a half-precision number."""


def check_scales(scales: np.ndarray, name: str) -> None:
    """Raises a `ValueError` that names the tensor if a shared scale is NaN."""
    if (scales == NO_NUMBER).any():
        raise ValueError(f"{name}: expected finite scales, found NaN")


def read_mxfp4(blocks: np.ndarray, scales: np.ndarray, name: str = "blocks") -> np.ndarray:
    """Dequantises `*_blocks` and `*_scales` to float32 `[..., 32 * N]`.

    Args:
        blocks: uint8 `[..., N, 16]`: two consecutive weights in each byte, the first in its low half.
        scales: uint8 `[..., N]`.
        name: names the tensors in errors.

    Raises:
        ValueError: other shapes or dtypes, or a scale that is NaN.
    """
    fits = blocks.dtype == scales.dtype == np.uint8 and blocks.shape == (*scales.shape, BLOCK // 2)
    if not fits:
        found = f"{blocks.dtype}{list(blocks.shape)} and {scales.dtype}{list(scales.shape)}"
        raise ValueError(f"{name}: expected uint8 [..., N, {BLOCK // 2}] with scales uint8 [..., N], found {found}")
    check_scales(scales, name)
    weights = FOUR_BIT_FLOATS[in_pairs(blocks)]
    exponents = scales.astype(np.int32)[..., None] - 127
    with np.errstate(over="ignore", under="ignore"):  # overflow becomes infinity, underflow zero
        return np.ldexp(weights, exponents).reshape(*scales.shape[:-1], -1)


def in_pairs(bytes_: np.ndarray) -> np.ndarray:
    """Splits bytes `[..., n]` into 4-bit integers `[..., 2 n]`: the low half of each, then its high half."""
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], -1)


def blocks_of_floats(floats: np.ndarray, scales: np.ndarray) -> QuantisedMatrix | None:
    """Converts weights to 5-bit blocks exactly; None if half of a scale is out of range.

    Twice a float is an integer from -12 to 12.

    Args:
        floats: the bits of each float, uint8 `[O, N, 32]`.
        scales: uint8 `[O, N]`.
    """
    if scales.size and not (scales.min() >= SMALLEST and scales.max() <= LARGEST):
        return None
    units = (2 * FOUR_BIT_FLOATS + 16).astype(np.uint8)[floats]
    return QuantisedMatrix(
        "q5_0", joined_bits(units, 5), np.ldexp(np.float32(1), scales.astype(np.int32) - 128).astype(np.float16)
    )
