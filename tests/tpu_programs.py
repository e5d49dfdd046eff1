"""What libtpu makes of the tests' programs is kept in `tests/golden/tpu`, for it takes minutes.

A program is told by a digest of itself, the chip, the options and the versions of JAX and libtpu.
One that is not there is compiled. `make schedules` compiles all of them anew; `--schedules` alone adds what is missing.
"""

import hashlib
import json
import lzma
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tilewright.compiled import aot
from tilewright.compiled.aot import Compiled, read_record

KEPT = Path(__file__).parent / "golden" / "tpu"
LONG_SECONDS = 2.0
"""What takes less is compiled each time."""
Compile = Callable[[str, Any, Mapping[str, Any]], Compiled]
"""As `aot.compile_lowered`: a chip, a lowered program, options."""


def kept(compile_live: Compile, write: bool) -> Compile:
    """A `compile_lowered` that takes what is kept, and compiles the rest; with `write` it keeps of that what took long."""

    def compile_or_read(chip: str, lowered: Any, options: Mapping[str, Any]) -> Compiled:
        path = KEPT / f"{digest(chip, lowered, options)}.xz"
        if path.exists():
            return read(chip, path)
        start = time.perf_counter()
        made = compile_live(chip, lowered, options)
        if write and time.perf_counter() - start > LONG_SECONDS:
            keep(path, made)
        return made

    return compile_or_read


def digest(chip: str, lowered: Any, options: Mapping[str, Any]) -> str:
    """What tells a program. The names of its operations do; under `conftest.py` it has no files and lines."""
    try:
        compiler = version("libtpu")
    except PackageNotFoundError:
        compiler = "none"
    parts = [compiler, version("jax"), chip, sorted(options.items()), lowered.as_text(debug_info=True)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def keep(path: Path, made: Compiled) -> None:
    """Writes what the compiler said of a program; what we make of that is not kept."""
    part = path.with_suffix(".part")
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(lzma.compress(json.dumps(made.record()).encode(), preset=9))
    part.replace(path)


def read(chip: str, path: Path) -> Compiled:
    """A program as `keep` wrote it."""
    return read_record({**json.loads(lzma.decompress(path.read_bytes())), "chip": chip})


def install(write: bool) -> None:
    """From here on, this process compiles for TPUs by what is kept."""
    aot.compile_lowered = kept(aot.compile_lowered, write)
