"""Finds the compiled CPU kernels, or compiles them, and registers them with XLA.

A wheel built with a C++17 compiler contains kernels for every instruction set. Otherwise the kernels for this machine's
instruction set are compiled on first use, into the user's cache folder. If neither works, the reason is recorded and XLA
computes instead. A damaged library could crash the process, so each library is checked against its digest and rebuilt if
damaged.
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
    native_disabled,
    wanted_isa,
)

log = logging.getLogger("tilewright.kernels")

TARGETS = {
    "write": {"tilewright_write": "TilewrightWrite"},
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
        "tilewright_attend_projected": "TilewrightAttendProjected",
        "tilewright_norm_rotate": "TilewrightNormRotate",
        "tilewright_quantised_attend_projected": "TilewrightQuantisedAttendProjected",
    },
    "self_attention": {
        "tilewright_self_attention": "TilewrightSelfAttention",
        "tilewright_self_attention_grad": "TilewrightSelfAttentionGrad",
    },
    "sparse_attention": {"tilewright_window_attention": "TilewrightWindowAttention"},
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
    "neighbours": {},  # called by `neighbours.cpu`, without XLA
    "gather_reduce": {
        "tilewright_gather_reduce": "TilewrightGatherReduce",
        "tilewright_edge_dot": "TilewrightEdgeDot",
        "tilewright_attend": "TilewrightAttend",
        "tilewright_attend_grad": "TilewrightAttendGrad",
    },
}
"""XLA FFI handlers of each operation with a `cpu.cc`: XLA's target name, and the symbol in the library."""


@dataclass(frozen=True)
class Native:
    """State of the CPU kernels on this machine.

    Attributes:
        isa: instruction set in use; None if the kernels are unavailable.
        reason: why the kernels are unavailable.
        folder: folder of the libraries, if the kernels are available.
    """

    isa: str | None
    reason: str = ""
    folder: Path | None = None


def library_names(isa: str | None = None) -> dict[str, str]:
    """Returns the file name of each operation's library for these sources and this version of JAX.

    Args:
        isa: instruction set of the libraries; None for libraries that choose it when they are loaded.
    """
    include = Path(jax.ffi.include_dir())
    return {operation: library_name(operation, include, isa) for operation in TARGETS}


def libraries() -> dict[str, Path]:
    """Returns the library of each operation: built at installation, from the cache, or compiled now for this instruction set.

    Raises:
        RuntimeError: no library fits and none can be compiled; the message has the reason.
        OSError: the cache folder cannot be written.
    """
    include = Path(jax.ffi.include_dir())
    cached = cache_folder()
    compiler = find_compiler()
    for folder in (PREBUILT, cached):
        installed = {operation: folder / name for operation, name in library_names().items()}
        if all(map(intact, installed.values())):
            return installed
    candidates = [folder / name for folder in (PREBUILT, cached) for name in library_names().values()]
    candidates.append(cached / library_name(ISA, include))
    isa = None
    wanted = dict[str, Path]()
    if intact(candidates[-1]) or compiler is not None:
        isa = isa_of(build(ISA, include, compiler or "", cached))
        wanted = {operation: cached / name for operation, name in library_names(isa).items()}
        if all(map(intact, wanted.values())):
            return wanted
        candidates += wanted.values()
    damaged = [path for path in candidates if path.exists() and not intact(path)]
    found = f"{damaged[0]} is damaged: its digest differs from the one recorded when it was built" if damaged else ""
    if compiler is None:
        fit = f"the installed libraries do not fit these sources and JAX {jax.__version__}" if PREBUILT.exists() else ""
        why = found or fit
        raise RuntimeError(f"{why}{', and ' if why else ''}there is no C++ compiler")
    if damaged:
        log.warning("%s; rebuilding the kernels", found)
    build_all(include, compiler, cached, isa)
    return wanted


def isa_of(library: Path) -> str:
    """Returns the instruction set that a library selects on this machine.

    Raises:
        ValueError: `TILEWRIGHT_CPU_ISA` names an instruction set that this machine lacks.
        OSError: the library cannot be loaded.
    """
    loaded = ctypes.CDLL(str(library))
    loaded.TilewrightIsa.restype = ctypes.c_char_p
    isa = loaded.TilewrightIsa().decode()
    wanted = wanted_isa()
    if wanted is not None and isa != wanted:
        here = ", ".join(ISAS[: ISAS.index(isa) + 1])
        raise ValueError(f"expected TILEWRIGHT_CPU_ISA to name an instruction set of this machine, {here}; found {wanted!r}")
    return isa


@cache
def kernels() -> Native:
    """Loads and registers the kernels on the first call, compiling them if necessary.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    wanted_isa()
    if native_disabled():
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
                # XLA raises a RuntimeError for a handler built for a newer FFI version than its own.
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    except (OSError, RuntimeError) as error:
        return Native(None, " ".join(str(error).split()))
    return Native(isa, folder=folder)


@cache
def host_library(operation: str) -> tuple[ctypes.CDLL | None, str]:
    """Returns an operation's library for calls by the host, whatever JAX's devices are; or None and why there is none.

    Raises:
        ValueError: an environment variable has an invalid value.
    """
    wanted_isa()
    if native_disabled():
        return None, f"TILEWRIGHT_NO_NATIVE is {os.environ['TILEWRIGHT_NO_NATIVE']}"
    try:
        path = libraries()[operation]
        isa_of(path)
        return ctypes.CDLL(str(path)), ""
    except (OSError, RuntimeError) as error:
        return None, " ".join(str(error).split())


def or_empty(x: Array | None, dtype: DTypeLike) -> Array | np.ndarray:
    """Returns an operand, or an empty NumPy array, which adds nothing to the trace, if the operand is None."""
    return np.zeros(0, dtype) if x is None else x
