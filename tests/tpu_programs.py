"""Stores the TPU programs of the tests in `tests/golden/tpu`, because compiling them takes minutes.

The name of a file is a digest of the lowered program, the chip, the options and the versions of JAX and libtpu. Missing
programs are compiled. `make schedules` recompiles all programs; `--schedules` alone adds the missing ones.
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
"""Seconds of compiling below which a program is not stored."""
Compile = Callable[[str, Any, Mapping[str, Any]], Compiled]
"""Signature of `aot.compile_lowered`: chip, lowered program, options."""


def kept(compile_live: Compile, write: bool) -> Compile:
    """Returns a `compile_lowered` that reads stored programs and compiles the others; `write` stores slow ones."""

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
    """Returns the digest of a program. The text has names of operations, but no files and lines (see `conftest.py`)."""
    try:
        compiler = version("libtpu")
    except PackageNotFoundError:
        compiler = "none"
    parts = [compiler, version("jax"), chip, sorted(options.items()), lowered.as_text(debug_info=True)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def keep(path: Path, made: Compiled) -> None:
    """Writes the compiler's output for a program, without figures derived from it."""
    part = path.with_suffix(".part")
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(lzma.compress(json.dumps(made.record()).encode(), preset=9))
    part.replace(path)


def read(chip: str, path: Path) -> Compiled:
    """Reads a program that `keep` wrote."""
    return read_record({**json.loads(lzma.decompress(path.read_bytes())), "chip": chip})


def install(write: bool) -> None:
    """Makes this process read stored programs when it compiles for TPUs."""
    aot.compile_lowered = kept(aot.compile_lowered, write)
