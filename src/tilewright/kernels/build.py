"""Compiles the CPU kernels. Standard library only: `hatch_build.py` loads this file by its path, where there is no JAX yet.

A library's name holds a digest of all that it was made from, so that one that does not fit is never found. Beside it lies a
digest of itself: what a full disk or a machine that lost its power left of one is never loaded.
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
YES = ("1", "true", "yes", "y", "t")
NO = ("", "0", "false", "no", "n", "f")
"""Values of switches among the environment's variables, as the command line reads them."""
PREBUILT = HERE / "prebuilt"
"""The libraries that a wheel brings; in a checkout there is no such folder."""
OPERATIONS = sorted(source.parent.name for source in HERE.glob("*/cpu.cc"))
ISAS = ("plain", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Instruction sets as `isa.h` names them, worst first: a machine has those up to its best."""
ISA = "isa"
"""The library that says which instruction set runs here, built as those of operations are."""


def cache_folder() -> Path:
    """Folder that keeps compiled kernels: `TILEWRIGHT_CACHE`, or below the user's cache folder.

    Raises:
        ValueError: the variable names a file, or a place below one.
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
    """Instruction set that `TILEWRIGHT_CPU_ISA` names; None for the machine's best.

    Raises:
        ValueError: there is no such instruction set.
    """
    named = os.environ.get("TILEWRIGHT_CPU_ISA") or None
    if named not in (None, *ISAS):
        raise ValueError(f"expected TILEWRIGHT_CPU_ISA to be one of {', '.join(ISAS)}, found {named!r}")
    return named


def unwanted() -> bool:
    """True if `TILEWRIGHT_NO_NATIVE` asks for no kernels, neither in a wheel nor at run time.

    Raises:
        ValueError: it says neither yes nor no.
    """
    said = os.environ.get("TILEWRIGHT_NO_NATIVE", "")
    if said.lower() not in (*YES, *NO):
        raise ValueError(f"expected TILEWRIGHT_NO_NATIVE to be 1 or 0, found {said!r}")
    return said.lower() in YES


def find_compiler() -> str | None:
    """`CXX` if it is set, else the first C++ compiler on the path."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def flags(isa: str | None) -> tuple[str, ...]:
    """Options of the compiler for one instruction set, or for all that the sources know."""
    return FLAGS if isa is None else (*FLAGS, f'-DTILEWRIGHT_ISA="{isa}"')


def library_name(operation: str, include: Path, isa: str | None = None) -> str:
    """An operation's library: sources, headers of XLA, flags and kind of machine decide its name, and nothing else does.

    Args:
        isa: the instruction set that it is for; None for one that chooses when it is loaded.
    """
    folders = [folder for folder in (HERE, HERE / operation) if folder.is_dir()]
    sources = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".h", ".inc", ".cc"))
    headers = sorted((include / "xla" / "ffi" / "api").glob("*.h"))
    digest = hashlib.sha256(" ".join((*flags(isa), sys.platform, platform.machine())).encode())
    for source in (*sources, *headers):
        digest.update(source.read_bytes())
    return f"{operation}-{digest.hexdigest()[:16]}.so"


def digest_file(library: Path) -> Path:
    """File that notes a library's own digest."""
    return library.with_name(f"{library.name}.sha256")


def digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def intact(library: Path) -> bool:
    """True if a library is there, as it was when it was built."""
    noted = digest_file(library)
    return library.is_file() and noted.is_file() and noted.read_bytes() == digest(library).encode()


def seal(library: Path) -> Path:
    """Notes a library's digest beside it, both safe on disk. Returns where."""
    noted = digest_file(library)
    noted.write_text(digest(library))
    for path in (library, noted):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    return noted


def build(operation: str, include: Path, compiler: str, folder: Path, isa: str | None = None) -> Path:
    """Compiles an operation's `cpu.cc` into a folder, unless that has it already, undamaged.

    Args:
        operation: one of `OPERATIONS`, or `ISA`.
        include: the folder of XLA's headers.
        compiler: a program, possibly with arguments, as in `CXX`.
        isa: the only instruction set to compile for, which takes half the time; None for all.

    Raises:
        RuntimeError: the compiler failed; with the first error that it reported.
        OSError: it could not be run, or the folder cannot be written to.
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
    """Compiles all operations at the same time. Arguments and errors as for `build`."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda operation: build(operation, include, compiler, folder, isa), OPERATIONS))
