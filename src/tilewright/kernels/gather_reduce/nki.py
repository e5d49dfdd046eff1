"""The operation on Trainium, in NKI 0.6: neighbours' rows gathered by indirect DMA into a tile and reduced there.

One call of the DMA gathers one slot of 128 rows, an index for each partition. Padding gathers a row of zeros that is in range,
since skipping what is out of range has aborted devices (aws-neuron-sdk issue 1390). Weights and a scale for each row come from
the caller, so that one kernel serves them all: GraphSAGE's mean has the scale 1 / degree, GCN the weights
(degree_i degree_j)^-1/2, GIN neither.

`nisa.dma_compute`, which would add what it gathers without a buffer, demands that a call's indices be unique, which neighbours
are not.

Legend: M nodes to gather from, R rows (nodes to reduce for), K slots of a row, F features, P rows of a tile, S slots of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np


def installed() -> tuple[Any, Any, Any]:
    """NKI, its instructions and its language, or None for each: only AWS's own package index has it."""
    try:
        return import_module("nki"), import_module("nki.isa"), import_module("nki.language")
    except ImportError:  # the package of that name on PyPI is a stub that raises it too
        return None, None, None


nki, nisa, nl = installed()
PARTITIONS = 128
"""P, at most: the partitions of SBUF."""
SLOTS = 16
"""S, at most."""
PART_BYTES = 2**16
"""Bytes of a partition for the gathered rows of a part, at most: SBUF has 192 KiB to each, and holds them twice or more."""


def slots_of_part(slots: int, features: int) -> int:
    """S, for weighted messages in float32."""
    return max(1, min(slots, SLOTS, PART_BYTES // (features * 4)))


def kernel(x, sources, weights, scale, part):
    """For each row, the scaled sum of the weighted rows that its slots name.

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
    for first in range(0, rows, PARTITIONS):
        size = min(PARTITIONS, rows - first)
        last = first + size
        indices = nl.ndarray((size, slots), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=indices, src=sources[first:last, :])
        factors = None
        if weights is not None:
            factors = nl.ndarray((size, slots), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=factors, src=weights[first:last, :])
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
            # A reduction runs over the last dims only: the slots are turned there by the strides of a view.
            added = nl.ndarray((size, features), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=added, op=nl.add, data=messages.permute((0, 2, 1)), axis=(2,))
            nisa.tensor_tensor(dst=total, data1=total, data2=added, op=nl.add)
        if scale is not None:
            factor = nl.ndarray((size, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=factor, src=scale[first:last, :])
            nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=factor)
        nisa.dma_copy(dst=out[first:last, :], src=total)
    return out


@dataclass(frozen=True)
class NkiTransfers:
    """Bytes and descriptors that the kernel's DMAs move, by its own structure.

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
    """Counts what the kernel moves: padding is gathered like a neighbour, so degrees don't matter.

    Args:
        itemsize: bytes of an element of `x`.
        weighted, scaled: whether there are weights, and a scale for each row.
    """
    # indices, gathers, result
    tiles = -(-rows // PARTITIONS)
    each_tile = slots + 2 + weighted + scaled
    small = slots * 4 * (1 + weighted) + 4 * scaled
    read = rows * (slots * features * itemsize + small)
    return NkiTransfers(tiles * each_tile, rows * each_tile, read, rows * features * itemsize)


def operands(
    x: np.ndarray, sources: np.ndarray, degrees: np.ndarray, weights: np.ndarray | None = None, reduce: str = "sum"
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, int]:
    """Makes the kernel's operands from those of the other implementations: a row of zeros behind `x`, named by all padding.

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
    """A kernel as NKI compiles it, called as the function is.

    Raises:
        ValueError: NKI is not installed.
    """
    if nki is None:
        raise ValueError("expected the package nki, which only https://pip.repos.neuron.amazonaws.com has; found none")
    return nki.jit(function)
