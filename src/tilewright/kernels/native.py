"""Compiles the CPU kernels and registers them with XLA.

It happens at first use, into the user's cache, if the machine has a C++17 compiler. What cannot be built is said, and XLA
serves.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
TARGETS = {"linear": "TilewrightLinear", "attention": "TilewrightAttention"}
"""For each operation with a `cpu.cc` the symbol of its handler; XLA knows it as `tilewright_<operation>`."""


@dataclass(frozen=True)
class Native:
    """Whether the CPU kernels can be used here: the instruction set that they run on, or else the reason why they cannot."""

    isa: str | None
    reason: str = ""


def cache_folder() -> Path:
    """Where compiled kernels are kept: `TILEWRIGHT_CACHE`, or below the user's cache folder."""
    named = os.environ.get("TILEWRIGHT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "tilewright"


def find_compiler() -> str | None:
    """`CXX` if it is set, else the first C++ compiler on the path."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(operation: str, compiler: str) -> Path:
    """Compiles an operation's `cpu.cc`, unless the cache has it: the same sources, headers and flags have the same name.

    Raises:
        RuntimeError: the compiler failed; with the first error that it reported.
    """
    here = Path(__file__).parent
    include = Path(jax.ffi.include_dir())
    sources = [*sorted(here.glob("*.h")), *sorted(here.glob("*.inc")), *sorted((here / operation).glob("*.inc"))]
    sources += [here / operation / "cpu.cc", *sorted((include / "xla" / "ffi" / "api").glob("*.h"))]
    digest = hashlib.sha256(" ".join((*FLAGS, compiler)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    built = cache_folder() / f"{operation}-{digest.hexdigest()[:16]}.so"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        output = Path(scratch) / built.name
        command = [compiler, *FLAGS, "-isystem", str(include), str(here / operation / "cpu.cc"), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.splitlines() or ["no message"]
            raise RuntimeError(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
        os.replace(output, built)
    return built


@cache
def kernels() -> Native:
    """Builds and registers the kernels on its first call."""
    if jax.default_backend() != "cpu":
        return Native(None, f"the device is a {jax.default_backend()}")
    compiler = find_compiler()
    if compiler is None:
        return Native(None, "there is no C++ compiler")
    isa = None
    try:
        for operation, symbol in TARGETS.items():
            library = ctypes.CDLL(str(build(operation, compiler)))
            jax.ffi.register_ffi_target(f"tilewright_{operation}", jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
            library.TilewrightIsa.restype = ctypes.c_char_p
            isa = library.TilewrightIsa().decode()
    except (OSError, RuntimeError) as error:
        return Native(None, str(error))
    return Native(isa)
