"""What libtpu makes of the tests' programs is kept in `tests/golden/tpu`, for it takes minutes.

A program is told by a digest of what it computes, the names in it, the chip, the options and the versions of JAX and libtpu.
One that is not there is compiled. `make schedules` compiles all of them and writes the folder anew.
"""

import hashlib
import json
import lzma
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.compiled import aot

KEPT = Path(__file__).parent / "golden" / "tpu"
LONG_SECONDS = 2.0
"""What takes less is compiled each time."""
MEMORY = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
Made = tuple[str, Any, Mapping[str, float]]
"""A program's optimised HLO, its memory and its cost: what `aot.read_compiled` is given."""


def kept(compile_live: Callable[..., Made], write: bool) -> Callable[..., Made]:
    """`aot.compile_lowered`, which takes what is kept; with `write` it compiles, and keeps what took long."""

    def compile_or_read(chip: str, lowered: Any, options: Mapping[str, Any]) -> Made:
        path = KEPT / f"{digest(chip, lowered, options)}.xz"
        if not write and path.exists():
            return read(path)
        start = time.perf_counter()
        made = compile_live(chip, lowered, options)
        if write and time.perf_counter() - start > LONG_SECONDS:
            keep(path, made)
        return made

    return compile_or_read


def digest(chip: str, lowered: Any, options: Mapping[str, Any]) -> str:
    """What tells a program: its source's functions, files and lines do not."""
    try:
        compiler = version("libtpu")
    except PackageNotFoundError:
        compiler = "none"
    text = lowered.as_text(debug_info=True)
    named = dict(re.findall(r'^#(loc\d*) = loc\("([^"]*)"\(', text, re.MULTILINE))
    names = [named.get(place, "") for place in re.findall(r"\bloc\(#(loc\d*)\)", text)]
    parts = [compiler, version("jax"), chip, sorted(options.items()), names, lowered.as_text()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def keep(path: Path, made: Made) -> None:
    """Writes a program, without the paths of the machine that compiled it."""
    hlo, memory, cost = made
    hlo = re.sub(r"\nFileNames\n.*?\n\n\n", "\n", hlo, flags=re.DOTALL)
    hlo = re.sub(r" stack_frame_id=\d+", "", hlo)
    whole = {"hlo": hlo, "memory": {name: getattr(memory, name) for name in MEMORY}, "cost": dict(cost)}
    part = path.with_suffix(".part")
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(lzma.compress(json.dumps(whole).encode(), preset=9))
    part.replace(path)


def read(path: Path) -> Made:
    """A program as `keep` wrote it."""
    whole = json.loads(lzma.decompress(path.read_bytes()))
    return whole["hlo"], SimpleNamespace(**whole["memory"]), whole["cost"]


def install(write: bool) -> None:
    """From here on, this process compiles for TPUs by what is kept."""
    aot.compile_lowered = kept(aot.compile_lowered, write)
