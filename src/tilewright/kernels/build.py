"""Compiles the CPU kernels. Standard library only: `hatch_build.py` loads this file by its path, where there is no JAX yet.

A library's name holds a digest of all that it was made from, so that one that does not fit is never found.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
HERE = Path(__file__).parent
PREBUILT = HERE / "prebuilt"
"""What a wheel brings; in a checkout there is no such folder."""
OPERATIONS = sorted(source.parent.name for source in HERE.glob("*/cpu.cc"))


def cache_folder() -> Path:
    """Where compiled kernels are kept: `TILEWRIGHT_CACHE`, or below the user's cache folder."""
    named = os.environ.get("TILEWRIGHT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "tilewright"


def unwanted() -> bool:
    """Whether `TILEWRIGHT_NO_NATIVE` asks for no kernels, neither in a wheel nor at run time."""
    return os.environ.get("TILEWRIGHT_NO_NATIVE", "0") not in ("", "0")


def find_compiler() -> str | None:
    """`CXX` if it is set, else the first C++ compiler on the path."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def library_name(operation: str, include: Path) -> str:
    """An operation's library: sources, headers of XLA, flags and kind of machine decide its name, and nothing else does."""
    folders = (HERE, HERE / operation)
    sources = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".h", ".inc", ".cc"))
    headers = sorted((include / "xla" / "ffi" / "api").glob("*.h"))
    digest = hashlib.sha256(" ".join((*FLAGS, sys.platform, platform.machine())).encode())
    for source in (*sources, *headers):
        digest.update(source.read_bytes())
    return f"{operation}-{digest.hexdigest()[:16]}.so"


def build(operation: str, include: Path, compiler: str, folder: Path) -> Path:
    """Compiles an operation's `cpu.cc` into a folder, unless that has it already.

    Args:
        include: the folder of XLA's headers.
        compiler: a program, possibly with arguments, as in `CXX`.

    Raises:
        RuntimeError: the compiler failed; with the first error that it reported.
        OSError: it could not be run, or the folder cannot be written to.
    """
    built = folder / library_name(operation, include)
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / built.name
        arguments = [*FLAGS, "-isystem", str(include), str(HERE / operation / "cpu.cc"), "-o", str(output)]
        done = subprocess.run([*shlex.split(compiler), *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.splitlines() or ["no message"]
            raise RuntimeError(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
        os.replace(output, built)
    return built


def build_all(include: Path, compiler: str, folder: Path) -> list[Path]:
    """Compiles all operations at the same time. Raises what `build` raises."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda operation: build(operation, include, compiler, folder), OPERATIONS))
