"""Finds the compiled CPU kernels, or compiles them, and registers them with XLA.

They come with a wheel that was built where there was a C++17 compiler, for every instruction set. Otherwise they are compiled
at first use, into the user's cache, for the one that runs here. What cannot be had is said, and XLA serves. One that is
damaged would end the process where it is called into: it is found by its digest, and built anew.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tilewright.kernels.build import (
    ISA,
    ISAS,
    PREBUILT,
    build,
    build_all,
    cache_folder,
    find_compiler,
    intact,
    library_name,
    unwanted,
    wanted_isa,
)

log = logging.getLogger("tilewright.kernels")

TARGETS = {
    "append": {"tilewright_append": "TilewrightAppend", "tilewright_paged_append": "TilewrightPagedAppend"},
    "linear": {
        "tilewright_linear": "TilewrightLinear",
        "tilewright_grouped_linear": "TilewrightGroupedLinear",
        "tilewright_argmax": "TilewrightArgmax",
        "tilewright_top_k": "TilewrightTopK",
        "tilewright_matmul": "TilewrightMatmul",
        "tilewright_gate": "TilewrightGate",
    },
    "attention": {
        "tilewright_attention": "TilewrightAttention",
        "tilewright_append_attend": "TilewrightAppendAttend",
        "tilewright_norm_rotate": "TilewrightNormRotate",
        "tilewright_paged_attention": "TilewrightPagedAttention",
        "tilewright_paged_append_attend": "TilewrightPagedAppendAttend",
        "tilewright_quantised_append_attend": "TilewrightQuantisedAppendAttend",
    },
    "causal_attention": {
        "tilewright_causal_attention": "TilewrightCausalAttention",
        "tilewright_causal_attention_grad": "TilewrightCausalAttentionGrad",
    },
    "window_attention": {"tilewright_window_attention": "TilewrightWindowAttention"},
    "nonzero": {"tilewright_nonzero": "TilewrightNonzero"},
    "scatter_rows": {"tilewright_scatter_rows": "TilewrightScatterRows", "tilewright_swap_rows": "TilewrightSwapRows"},
    "read": {"tilewright_read": "TilewrightRead"},
    "dot": {"tilewright_count_products": "TilewrightCountProducts"},
    "rms_norm": {
        "tilewright_rms_norm": "TilewrightRmsNorm",
        "tilewright_normalise": "TilewrightNormalise",
        "tilewright_normalise_grad": "TilewrightNormaliseGrad",
    },
    "gather_rows": {
        "tilewright_gather_rows": "TilewrightGatherRows",
        "tilewright_gather_block_rows": "TilewrightGatherBlockRows",
    },
    "gather_reduce": {
        "tilewright_gather_reduce": "TilewrightGatherReduce",
        "tilewright_edge_dot": "TilewrightEdgeDot",
        "tilewright_attend": "TilewrightAttend",
        "tilewright_attend_grad": "TilewrightAttendGrad",
    },
}
"""For each operation with a `cpu.cc` its handlers: the name that XLA knows it by, and its symbol in the library."""


@dataclass(frozen=True)
class Native:
    """The state of the CPU kernels on this machine.

    Attributes:
        isa: the instruction set that they run on; None if they cannot be used.
        reason: why they cannot be used.
        folder: where their libraries are, if they can.
    """

    isa: str | None
    reason: str = ""
    folder: Path | None = None


def library_names(isa: str | None = None) -> dict[str, str]:
    """The name that each operation's library must have to fit these sources and this JAX.

    Args:
        isa: the instruction set that libraries are for; None for those that choose when they are loaded.
    """
    include = Path(jax.ffi.include_dir())
    return {operation: library_name(operation, include, isa) for operation in TARGETS}


def libraries() -> dict[str, Path]:
    """The library of each operation: built at installation, from the cache, or compiled now for this instruction set.

    Raises:
        RuntimeError: there is none that fits, and it cannot be compiled; with the reason.
        OSError: the cache cannot be written to.
    """
    include = Path(jax.ffi.include_dir())
    cached = cache_folder()
    compiler = find_compiler()
    for folder in (PREBUILT, cached):
        installed = {operation: folder / name for operation, name in library_names().items()}
        if all(map(intact, installed.values())):
            return installed
    known = [folder / name for folder in (PREBUILT, cached) for name in library_names().values()]
    known.append(cached / library_name(ISA, include))
    isa = None
    wanted = dict[str, Path]()
    if intact(known[-1]) or compiler is not None:
        isa = isa_of(build(ISA, include, compiler or "", cached))
        wanted = {operation: cached / name for operation, name in library_names(isa).items()}
        if all(map(intact, wanted.values())):
            return wanted
        known += wanted.values()
    damaged = [path for path in known if path.exists() and not intact(path)]
    found = f"{damaged[0]} is damaged: its digest is not the one noted when it was built" if damaged else ""
    if compiler is None:
        fit = f"those built at installation do not fit these sources and JAX {jax.__version__}" if PREBUILT.exists() else ""
        why = found or fit
        raise RuntimeError(f"{why}{', and ' if why else ''}there is no C++ compiler")
    if damaged:
        log.warning("%s; kernels are built anew", found)
    build_all(include, compiler, cached, isa)
    return wanted


def isa_of(library: Path) -> str:
    """The instruction set that a library runs on here.

    Raises:
        ValueError: `TILEWRIGHT_CPU_ISA` names one that this machine does not have.
        OSError: it cannot be loaded.
    """
    loaded = ctypes.CDLL(str(library))
    loaded.TilewrightIsa.restype = ctypes.c_char_p
    isa = loaded.TilewrightIsa().decode()
    wanted = wanted_isa()
    if wanted is not None and isa != wanted:
        here = ", ".join(ISAS[: ISAS.index(isa) + 1])
        raise ValueError(f"expected TILEWRIGHT_CPU_ISA to name what this machine has, {here}; found {wanted!r}")
    return isa


@cache
def kernels() -> Native:
    """Loads and registers the kernels on its first call, which may have to compile them.

    Raises:
        ValueError: a variable of the environment has a value that it cannot have.
    """
    wanted_isa()
    if unwanted():
        return Native(None, f"TILEWRIGHT_NO_NATIVE is {os.environ['TILEWRIGHT_NO_NATIVE']}")
    if jax.default_backend() != "cpu":
        return Native(None, f"the device is a {jax.default_backend()}")
    isa = None
    folder = None
    try:
        for operation, path in libraries().items():
            library = ctypes.CDLL(str(path))
            isa = isa_of(path)
            folder = path.parent
            for name, symbol in TARGETS[operation].items():
                # XLA refuses a handler made for a newer interface than its own, by a RuntimeError.
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    except (OSError, RuntimeError) as error:
        return Native(None, " ".join(str(error).split()))
    return Native(isa, folder=folder)


def or_nothing(x: Array | None, dtype: DTypeLike) -> Array | np.ndarray:
    """An operand, or in the place of one that is left out an array without elements, which takes no tracing."""
    return np.zeros(0, dtype) if x is None else x
