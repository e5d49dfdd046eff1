"""Compiles the CPU kernels. Uses only the standard library, because `hatch_build.py` loads this file before JAX is installed.

The file name of a library contains a digest of everything that it was built from, so an outdated library is never found. A file
beside it holds the library's own digest, so a truncated library (full disk, power loss) is never loaded.
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
from functools import cache
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
HERE = Path(__file__).parent
YES = ("1", "true", "yes", "y", "t")
NO = ("", "0", "false", "no", "n", "f")
"""Values of boolean environment variables, as the command line accepts them."""
PREBUILT = HERE / "prebuilt"
"""Libraries in a wheel; a checkout has no such folder."""
OPERATIONS = sorted(source.parent.name for source in HERE.glob("*/cpu.cc"))
ISAS = ("plain", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets by their names in `isa.h`, in ascending order; each machine supports all up to its best."""
ISA = "isa"
"""Library that detects the machine's instruction set, built like those of operations."""


def cache_folder() -> Path:
    """Returns the folder for compiled kernels: `TILEWRIGHT_CACHE`, or a folder in the user's cache.

    Raises:
        ValueError: the variable names a file, or a path below a file.
    """
    named = os.environ.get("TILEWRIGHT_CACHE")
    if not named:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewright"
    folder = Path(named).absolute()
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"expected TILEWRIGHT_CACHE to name a folder, found {named!r}: {place} is a file")
    return folder


def wanted_isa() -> str | None:
    """Returns the instruction set in `TILEWRIGHT_CPU_ISA`; None to use the machine's best.

    Raises:
        ValueError: an unknown instruction set.
    """
    named = os.environ.get("TILEWRIGHT_CPU_ISA") or None
    if named not in (None, *ISAS):
        raise ValueError(f"expected TILEWRIGHT_CPU_ISA to be one of {', '.join(ISAS)}, found {named!r}")
    return named


def native_disabled() -> bool:
    """Returns True if `TILEWRIGHT_NO_NATIVE` disables the kernels, both when a wheel is built and at run time.

    Raises:
        ValueError: the value is no boolean.
    """
    value = os.environ.get("TILEWRIGHT_NO_NATIVE", "")
    if value.lower() not in (*YES, *NO):
        raise ValueError(f"expected TILEWRIGHT_NO_NATIVE to be 1 or 0, found {value!r}")
    return value.lower() in YES


def find_compiler() -> str | None:
    """Returns `CXX` if it is set, else the first C++ compiler on the path."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def flags(isa: str | None) -> tuple[str, ...]:
    """Returns the compiler options for one instruction set, or for all."""
    return FLAGS if isa is None else (*FLAGS, f'-DTILEWRIGHT_ISA="{isa}"')


@cache
def header_bytes(include: Path) -> bytes:
    """Returns the contents of XLA's headers, which do not change while a process runs."""
    return b"".join(header.read_bytes() for header in sorted((include / "xla" / "ffi" / "api").glob("*.h")))


def library_name(operation: str, include: Path, isa: str | None = None) -> str:
    """Returns the file name of an operation's library, determined by sources, XLA's headers, flags and type of machine.

    Args:
        isa: instruction set of the library; None for a library that chooses it when it is loaded.
    """
    folders = [folder for folder in (HERE, HERE / operation) if folder.is_dir()]
    sources = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".h", ".inc", ".cc"))
    digest = hashlib.sha256(" ".join((*flags(isa), sys.platform, platform.machine())).encode())
    for source in sources:
        digest.update(source.read_bytes())
    digest.update(header_bytes(include))
    return f"{operation}-{digest.hexdigest()[:16]}.so"


def digest_file(library: Path) -> Path:
    """Returns the file that holds a library's digest."""
    return library.with_name(f"{library.name}.sha256")


def digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def intact(library: Path) -> bool:
    """Returns True if a library exists and is unchanged since it was built."""
    noted = digest_file(library)
    return library.is_file() and noted.is_file() and noted.read_bytes() == digest(library).encode()


def seal(library: Path) -> Path:
    """Writes a library's digest to a file beside it, syncs both to disk, and returns the digest's path."""
    noted = digest_file(library)
    noted.write_text(digest(library))
    for path in (library, noted):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    return noted


def build(operation: str, include: Path, compiler: str, folder: Path, isa: str | None = None) -> Path:
    """Compiles an operation's `cpu.cc` into a folder, unless the folder has an intact library.

    Args:
        operation: a name of `OPERATIONS`, or `ISA`.
        include: folder of XLA's headers.
        compiler: command, possibly with arguments, as in `CXX`.
        isa: the only instruction set to compile for, which takes half the time; None for all.

    Raises:
        RuntimeError: the compiler failed; the message has the first error that it reported.
        OSError: the compiler cannot be run, or the folder cannot be written.
    """
    built = folder / library_name(operation, include, isa)
    if intact(built):
        return built
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / built.name
        source = HERE / "isa.cc" if operation == ISA else HERE / operation / "cpu.cc"
        arguments = [*flags(isa), "-isystem", str(include), str(source), "-o", str(output)]
        done = subprocess.run([*shlex.split(compiler), *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.splitlines() or ["no message"]
            raise RuntimeError(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
        os.replace(seal(output), digest_file(built))
        os.replace(output, built)
    return built


def build_all(include: Path, compiler: str, folder: Path, isa: str | None = None) -> list[Path]:
    """Compiles all operations in parallel; arguments and errors are those of `build`."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda operation: build(operation, include, compiler, folder, isa), OPERATIONS))
