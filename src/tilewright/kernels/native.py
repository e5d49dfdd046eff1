"""Finds the compiled CPU kernels, or compiles them, and registers them with XLA.

They come with a wheel that was built where there was a C++17 compiler. Otherwise they are compiled at first use, into the
user's cache. What cannot be had is said, and XLA serves.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tilewright.kernels.build import PREBUILT, build_all, cache_folder, find_compiler, library_name, unwanted

TARGETS = {
    "append": {"tilewright_append": "TilewrightAppend", "tilewright_paged_append": "TilewrightPagedAppend"},
    "linear": {
        "tilewright_linear": "TilewrightLinear",
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
    },
    "causal_attention": {
        "tilewright_causal_attention": "TilewrightCausalAttention",
        "tilewright_causal_attention_grad": "TilewrightCausalAttentionGrad",
    },
    "window_attention": {"tilewright_window_attention": "TilewrightWindowAttention"},
    "compact": {"tilewright_compact": "TilewrightCompact"},
    "put": {"tilewright_put": "TilewrightPut", "tilewright_exchange": "TilewrightExchange"},
    "read": {"tilewright_read": "TilewrightRead"},
    "rms_norm": {
        "tilewright_rms_norm": "TilewrightRmsNorm",
        "tilewright_normalise": "TilewrightNormalise",
        "tilewright_normalise_grad": "TilewrightNormaliseGrad",
    },
    "take": {"tilewright_take": "TilewrightTake"},
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
    """Whether the CPU kernels can be used here.

    Attributes:
        isa: the instruction set that they run on; None if they cannot be used.
        reason: why they cannot be used.
        folder: where their libraries are, if they can.
    """

    isa: str | None
    reason: str = ""
    folder: Path | None = None


def library_names() -> dict[str, str]:
    """The name that each operation's library must have to fit these sources and this JAX."""
    include = Path(jax.ffi.include_dir())
    return {operation: library_name(operation, include) for operation in TARGETS}


def libraries() -> dict[str, Path]:
    """The library of each operation: from the wheel, from the cache, or compiled now.

    Raises:
        RuntimeError: there is none that fits, and it cannot be compiled; with the reason.
        OSError: the cache cannot be written to.
    """
    names = library_names()
    for folder in (PREBUILT, cache_folder()):
        if all((folder / name).exists() for name in names.values()):
            return {operation: folder / name for operation, name in names.items()}
    compiler = find_compiler()
    if compiler is None:
        stale = (
            f"those built at installation do not fit these sources and JAX {jax.__version__}, and " if PREBUILT.exists() else ""
        )
        raise RuntimeError(f"{stale}there is no C++ compiler")
    build_all(Path(jax.ffi.include_dir()), compiler, cache_folder())
    return {operation: cache_folder() / name for operation, name in names.items()}


@cache
def kernels() -> Native:
    """Loads and registers the kernels on its first call, which may have to compile them."""
    if unwanted():
        return Native(None, f"TILEWRIGHT_NO_NATIVE is {os.environ['TILEWRIGHT_NO_NATIVE']}")
    if jax.default_backend() != "cpu":
        return Native(None, f"the device is a {jax.default_backend()}")
    wanted = os.environ.get("TILEWRIGHT_CPU_ISA")
    isa, folder = None, None
    try:
        for operation, path in libraries().items():
            library = ctypes.CDLL(str(path))
            library.TilewrightIsa.restype = ctypes.c_char_p
            isa, folder = library.TilewrightIsa().decode(), path.parent
            if wanted and isa != wanted:
                raise RuntimeError(f"TILEWRIGHT_CPU_ISA is {wanted!r}, which this machine does not have: its best is {isa}")
            for name, symbol in TARGETS[operation].items():
                # XLA refuses a handler made for a newer interface than its own, by a RuntimeError.
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    except (OSError, RuntimeError) as error:
        return Native(None, " ".join(str(error).split()))
    return Native(isa, folder=folder)


def or_nothing(x: Array | None, dtype: DTypeLike) -> Array:
    """What the kernels take for an operand that is left out: an array without elements."""
    return jnp.zeros(0, dtype) if x is None else x
