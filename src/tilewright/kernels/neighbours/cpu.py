"""Sampling of neighbours in C++; the functions are those of `reference.py`, and run without Python's lock."""

import ctypes
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from tilewright.kernels import native

SOURCES = {
    "TilewrightDraw": (None, "int32", "count", "int64", "int32", "count", "key", "int64", "int64", "int32"),
    "TilewrightRelabel": (ctypes.c_int64, "int32", "count", "int32", "count", "int32", "int32"),
    "TilewrightGroup": (None, "int32", "count", "count", "int64", "int64"),
}
"""Functions of the library: result, and kinds of arguments."""


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the library with numbers and contiguous arrays.

    Raises:
        RuntimeError: the library is unavailable; `native.host_library` says why.
    """
    library, reason = native.host_library("neighbours")
    if library is None:
        raise RuntimeError(f"expected the compiled sampler, found none: {reason}")
    function = getattr(library, name)
    result, *kinds = SOURCES[name]
    function.restype = result
    given = []
    for kind, value in zip(kinds, arguments, strict=True):
        if kind == "count":
            given.append(ctypes.c_int64(value))
        elif kind == "key":
            given.append(ctypes.c_uint64(value))
        else:
            assert value.dtype == kind
            assert value.flags.c_contiguous
            given.append(ctypes.c_void_p(value.ctypes.data))
    return function(*given)


def draw(
    nodes: Int32[np.ndarray, " N"],
    offsets: Int64[np.ndarray, " V_and_one"],
    sources: Int32[np.ndarray, " E"],
    fan_out: int,
    key: int,
    starts: Int64[np.ndarray, " N"],
    size: int,
) -> tuple[Int64[np.ndarray, " S"], Int32[np.ndarray, " S"]]:
    """Draws edges of each row's node; see `reference.draw`."""
    edges = np.full(size, -1, np.int64)
    near = np.full(size, -1, np.int32)
    call("TilewrightDraw", nodes, len(nodes), offsets, sources, fan_out, key, starts, edges, near)
    return edges, near


def relabel(
    nodes: Int32[np.ndarray, " N"], near: Int32[np.ndarray, " S"]
) -> tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " A"]]:
    """Numbers drawn nodes by rows; see `reference.relabel`."""
    numbers = np.empty(len(near), np.int32)
    added = np.empty(len(near), np.int32)
    count = call("TilewrightRelabel", nodes, len(nodes), near, len(near), numbers, added)
    return numbers, added[:count].copy()


def group(keys: Int32[np.ndarray, " E"], groups: int) -> tuple[Int64[np.ndarray, " G_and_one"], Int64[np.ndarray, " E"]]:
    """Sorts places by key; see `reference.group`."""
    offsets = np.empty(groups + 1, np.int64)
    order = np.empty(len(keys), np.int64)
    call("TilewrightGroup", keys, len(keys), groups, offsets, order)
    return offsets, order
