"""Neighbour reduction on Trainium, in NKI 0.7: indirect DMA gathers neighbours' rows into a tile, which is reduced there.

One DMA call gathers one slot of 128 rows, with an index per partition. Padding gathers a row of zeros that is in range, since
skipping out-of-range indices has aborted devices (aws-neuron-sdk issue 1390). The caller supplies weights and a scale per row,
so that one kernel serves all: GraphSAGE's mean has the scale 1 / degree, GCN the weights (degree_i degree_j)^-1/2, GIN neither.

NKI traces a kernel with Python, so that Python's loops are unrolled. Tiles of 128 rows are therefore a loop on the device,
`fori_loop`, whose variable is a register: access patterns take it as `scalar_offset`, and Python cannot compute with it.

`nisa.dma_compute` would add gathered rows without a buffer, but needs unique indices in a call, and neighbours repeat.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, F features, P rows of a tile, S slots of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np


def installed() -> tuple[Any, Any, Any]:
    """Imports NKI, its instructions and its language; None for each if missing, as only AWS's package index has NKI."""
    try:
        return import_module("nki"), import_module("nki.isa"), import_module("nki.language")
    except ImportError:  # the package of that name on PyPI is a stub that raises this error too
        return None, None, None


nki, nisa, nl = installed()
PARTITIONS = 128
"""Limit of P: the partitions of SBUF."""
SLOTS = 16
"""Limit of S."""
PART_BYTES = 2**16
"""Limit of bytes per partition for a part's gathered rows: SBUF has 192 KiB per partition and holds them at least twice."""


def slots_of_part(slots: int, features: int) -> int:
    """Returns S, for weighted messages in float32."""
    return max(1, min(slots, SLOTS, PART_BYTES // (features * 4)))


def kernel(x, sources, weights, scale, part):
    """Sums, for each row, the weighted rows of `x` that its slots name, and scales the sum.

    Args:
        x: `[M, F]` in HBM.
        sources: `[R, K]` uint32, all in range.
        weights: `[R, K]` float32 or None.
        scale: `[R, 1]` float32 or None.
        part: S.

    Returns:
        `[R, F]` in HBM, in the dtype of `x`, summed in float32.
    """
    rows, slots = sources.shape
    features = x.shape[1]
    out = nl.ndarray((rows, features), dtype=x.dtype, buffer=nl.shared_hbm)

    def tile(first, size):
        indices = nl.ndarray((size, slots), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=indices, src=rows_at(sources, first, size))
        factors = None
        if weights is not None:
            factors = nl.ndarray((size, slots), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=factors, src=rows_at(weights, first, size))
        total = nl.ndarray((size, features), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        for begin in range(0, slots, part):
            width = min(part, slots - begin)
            gathered = nl.ndarray((size, width, features), dtype=x.dtype, buffer=nl.sbuf)
            for slot in range(width):
                at = begin + slot
                nisa.dma_copy(
                    dst=gathered[:, slot, :],
                    src=x.ap(pattern=[[features, size], [1, features]], vector_offset=indices[:, at : at + 1], indirect_dim=0),
                )
            messages = gathered
            if factors is not None:
                messages = nl.ndarray((size, width, features), dtype=nl.float32, buffer=nl.sbuf)
                for slot in range(width):
                    at = begin + slot
                    nisa.tensor_scalar(
                        dst=messages[:, slot, :],
                        data=gathered[:, slot, :],
                        op0=nl.multiply,
                        operand0=factors[:, at : at + 1],
                    )
            # A reduction runs over the last dims only, so a strided view moves the slots there.
            added = nl.ndarray((size, features), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=added, op=nl.add, data=messages.permute((0, 2, 1)), axis=(2,))
            nisa.tensor_tensor(dst=total, data1=total, data2=added, op=nl.add)
        result = nl.ndarray((size, features), dtype=x.dtype, buffer=nl.sbuf)
        if scale is None:
            nisa.tensor_copy(dst=result, src=total)
        else:
            factor = nl.ndarray((size, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=factor, src=rows_at(scale, first, size))
            nisa.tensor_scalar(dst=result, data=total, op0=nl.multiply, operand0=factor)
        nisa.dma_copy(dst=rows_at(out, first, size), src=result)

    each_tile(nl.fori_loop, rows, tile)
    return out


def each_tile(loop, rows, tile):
    """Calls `tile(first, size)` for each tile of rows: in `loop` (`nl.fori_loop`) for full tiles, directly for the rest."""
    whole = rows - rows % PARTITIONS

    def body(first):  # a loop's body returns nothing
        tile(first, PARTITIONS)

    if whole:
        loop(0, whole, body, PARTITIONS)
    if whole < rows:
        tile(whole, rows - whole)


def rows_at(tensor, first, size, begin=0, width=None):
    """Returns `tensor[first : first + size, begin : begin + width]` of a tensor in HBM; `width` is by default the whole of it.

    `first` is an integer or the register of a loop.
    """
    width = tensor.shape[1] if width is None else width
    if isinstance(first, int):
        return tensor[first : first + size, begin : begin + width]
    step = 1
    for count in tensor.shape[2:]:
        step = step * count
    pattern = [[tensor.shape[1] * step, size], [step, width]]
    for count in tensor.shape[2:]:
        step = step // count
        pattern.append([step, count])
    return tensor.ap(pattern=pattern, offset=begin * pattern[1][0], scalar_offset=first, indirect_dim=0)


@dataclass(frozen=True)
class NkiTransfers:
    """DMA transfers of the kernel, derived from its structure.

    Attributes:
        calls: instructions that start DMAs.
        descriptors: runs of bytes that are contiguous in HBM and in a partition of SBUF.
        read, written: bytes of HBM.
    """

    calls: int
    descriptors: int
    read: int
    written: int


def transfers(
    rows: int, slots: int, features: int, itemsize: int = 4, weighted: bool = False, scaled: bool = False
) -> NkiTransfers:
    """Counts the kernel's DMA transfers. Padding is gathered too, so degrees do not matter.

    Args:
        itemsize: bytes of an element of `x`.
        weighted, scaled: True with weights, and with a scale per row.
    """
    # Indices, gathers, result.
    tiles = -(-rows // PARTITIONS)
    each_tile = slots + 2 + weighted + scaled
    small = slots * 4 * (1 + weighted) + 4 * scaled
    read = rows * (slots * features * itemsize + small)
    return NkiTransfers(tiles * each_tile, rows * each_tile, read, rows * features * itemsize)


def operands(
    x: np.ndarray, sources: np.ndarray, degrees: np.ndarray, weights: np.ndarray | None = None, reduce: str = "sum"
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, int]:
    """Converts the operands of the other implementations to the kernel's: padding points to a row of zeros behind `x`.

    Args:
        reduce: "sum" or "mean".

    Raises:
        ValueError: another reduction.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"expected 'sum' or 'mean' on Trainium, found {reduce!r}")
    counts = np.arange(sources.shape[1]) < degrees[:, None]
    filled = np.concatenate([x, np.zeros((1, x.shape[1]), x.dtype)])
    named = np.where(counts, sources, x.shape[0]).astype(np.uint32)
    factors = None if weights is None else np.where(counts, weights, 0).astype(np.float32)
    scale = (1 / np.maximum(degrees, 1)).astype(np.float32)[:, None] if reduce == "mean" else None
    return filled, named, factors, scale, slots_of_part(sources.shape[1], x.shape[1])


def compiled(function: Callable[..., Any] = kernel) -> Callable[..., Any]:
    """Compiles a kernel with NKI; the result is called like the function.

    Raises:
        ValueError: NKI is not installed.
    """
    if nki is None:
        raise ValueError("expected the package nki, available from https://pip.repos.neuron.amazonaws.com; found none")
    return nki.jit(function)
