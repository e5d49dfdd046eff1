"""oneDNN's matmul against the package's own linear kernel: the same FFI call, as many threads, in turns, in one process.

    python benchmarks/onednn/compare.py --onednn PREFIX

PREFIX holds `include/` and `lib/libdnnl.so` (README.md says how to get it). Each figure is a chain of calls over copies of a
weight that together exceed the caches; the median of the repetitions is shown, in milliseconds a call.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, medians
from tilewright.kernels import build as own_build
from tilewright.kernels import native
from tilewright.kernels.build import FLAGS
from tilewright.kernels.linear import cpu

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPES = {
    "0.6B q": (1024, 2048),
    "0.6B gate": (1024, 3072),
    "0.6B down": (3072, 1024),
    "4B gate": (2560, 9728),
    "4B down": (9728, 2560),
    "0.6B head": (1024, 151936),
}
SMALL = {"demo gate": (256, 768), "demo down": (768, 256), "demo o": (256, 256)}
"""Inputs and outputs. The small ones stay in the cache, as they do when the demo model decodes."""

PACKED_FOR = 16
"""The rows whose layout serves all numbers of rows: a weight can be packed once only."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""On a machine that others use too, processor time says more; it must be one core then: waiting threads would count."""


def build(prefix: Path) -> ctypes.CDLL:
    """Compiles onednn.cc with the flags of the package's own kernels and registers it."""
    here = Path(__file__).parent
    packed = Path(native.__file__).parent
    includes = ["-I", str(packed), "-I", str(prefix / "include"), "-isystem", jax.ffi.include_dir()]
    link = ["-L", str(prefix / "lib"), "-ldnnl", f"-Wl,-rpath,{prefix / 'lib'}"]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "onednn.so"
        command = [
            own_build.find_compiler() or "c++",
            *FLAGS,
            *includes,
            str(here / "onednn.cc"),
            *link,
            "-o",
            str(built),
        ]
        subprocess.run(command, check=True)
        os.environ["OMP_NUM_THREADS"] = str(
            len(os.sched_getaffinity(0))
        )  # as many as XLA's pool has; read when OpenMP is loaded
        library = ctypes.CDLL(str(built))
    jax.ffi.register_ffi_target("onednn_linear", jax.ffi.pycapsule(library.OnednnLinear), platform="cpu")
    library.OnednnPackedBytes.restype = ctypes.c_int64
    library.OnednnSameLayout.restype = ctypes.c_bool
    return library


def sizes(
    rows: int, shape: tuple[int, int], half: bool
) -> tuple[ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_bool]:
    return ctypes.c_int64(rows), ctypes.c_int64(shape[0]), ctypes.c_int64(shape[1]), ctypes.c_bool(half)


def pack(library: ctypes.CDLL, w: np.ndarray, half: bool, rows: int) -> np.ndarray:
    """`w` in the layout that oneDNN asks for with `rows` rows."""
    packed = np.empty(library.OnednnPackedBytes(*sizes(rows, w.shape, half)), np.uint8)
    plain = np.ascontiguousarray(w)
    library.OnednnPack(*sizes(rows, w.shape, half), ctypes.c_void_p(plain.ctypes.data), ctypes.c_void_p(packed.ctypes.data))
    return packed


def described(library: ctypes.CDLL, shape: tuple[int, int], half: bool, rows: int, packed_for: int) -> str:
    """oneDNN's implementation and the blocks of its weight layout."""
    text = ctypes.create_string_buffer(200)
    given = sizes(packed_for, shape, half)
    library.OnednnDescribe(ctypes.c_int64(rows), *given, text, ctypes.c_int64(200))
    return text.value.decode()


def onednn_linear(x: jax.Array, packed: jax.Array, outputs: int, packed_for: int, half: bool) -> jax.Array:
    call = jax.ffi.ffi_call("onednn_linear", jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    return call(x, packed, packed_for=np.int64(packed_for), half=half)


def chained(step: Callable[[jax.Array, Any], jax.Array]) -> Callable[[jax.Array, Sequence[Any]], jax.Array]:
    """A program that takes `step` over each of several weights, one after the other (XLA would run them side by side)."""

    def run(x: jax.Array, weights: Sequence[Any]) -> jax.Array:
        y = step(x, weights[0])
        for w in weights[1:]:
            x = jax.lax.dynamic_update_slice(x, x[:1, :1] + 1e-30 * y[:1, :1], (0, 0))
            y = step(x, w)
        return y

    return jax.jit(run)


def seconds(run: Callable[[], jax.Array], clock: Callable[[], float]) -> float:
    start = clock()
    run().block_until_ready()
    return clock() - start


def steps(library: ctypes.CDLL, w: np.ndarray, half: bool, rows: int, copies: int) -> dict[str, tuple[Callable, list[Any]]]:
    """Each contender: what it runs, and its copies of the weight."""
    layouts = {"onednn": PACKED_FOR}
    if not library.OnednnSameLayout(ctypes.c_int64(rows), *sizes(PACKED_FOR, w.shape, half)):
        layouts["onednn, packed for these rows"] = rows
    packed = cpu.pack(jnp.asarray(w))
    found: dict[str, tuple[Callable, list[Any]]] = {
        "own": (cpu.linear, [jax.tree.map(partial(jnp.array, copy=True), packed) for _ in range(copies)])
    }
    for name, packed_for in layouts.items():
        packed = pack(library, w, half, packed_for)
        step = partial(onednn_linear, outputs=w.shape[1], packed_for=packed_for, half=half)
        found[name] = (step, [jnp.array(packed, copy=True) for _ in range(copies)])
    return found


def times(
    contenders: dict[str, tuple[Callable, list[Any]]],
    x: jax.Array,
    calls: int,
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Milliseconds a call for each contender, in turns. Each way runs once before it is timed."""
    programs = {}
    for name, (step, weights) in contenders.items():
        cycled = [weights[i % len(weights)] for i in range(calls)]
        programs[name] = partial(seconds, partial(chained(step), x, cycled), clock)
    spent = alternate(programs, repetitions, warm=True)
    return {name: 1e3 * median / calls for name, median in medians(spent).items()}


def random_weight(rng: np.random.Generator, shape: tuple[int, int], half: bool) -> np.ndarray:
    w = rng.standard_normal(shape, np.float32) / math.sqrt(shape[0])
    return w.astype(jnp.bfloat16) if half else w


def row_invariance(library: ctypes.CDLL, shape: tuple[int, int], half: bool) -> dict[str, Any]:
    """Compares the results of each number of rows bitwise with the same rows of 512. Adds the largest error."""
    rng = np.random.default_rng(1)
    w = random_weight(rng, shape, half)
    x = jnp.asarray(rng.standard_normal((max(ROWS), shape[0]), np.float32))
    rounded = x.astype(jnp.bfloat16) if half else x
    exact = np.asarray(rounded, np.float64) @ w.astype(np.float64)
    found: dict[str, Any] = {"layouts": {m: described(library, shape, half, m, m) for m in ROWS}}
    packed = cpu.pack(jnp.asarray(w))
    for name in ("own", "onednn", "onednn, packed for these rows"):
        results = {}
        for m in ROWS:
            if name == "own":
                results[m] = np.asarray(jax.jit(cpu.linear)(x[:m], packed))
                continue
            packed_for = PACKED_FOR if name == "onednn" else m
            packed = jnp.asarray(pack(library, w, half, packed_for))
            results[m] = np.asarray(
                jax.jit(partial(onednn_linear, outputs=shape[1], packed_for=packed_for, half=half))(x[:m], packed)
            )
        whole = results[max(ROWS)]
        found[name] = {
            "same_bits_as_among_512": {m: bool((y == whole[:m]).all()) for m, y in results.items()},
            "largest_error": max(float(np.abs(y - exact[:m]).max()) for m, y in results.items()),
        }
    return found


def setup_seconds(library: ctypes.CDLL, shape: tuple[int, int], half: bool, rows: int) -> dict[str, float]:
    """Measures the seconds of creating a primitive: generated for the first time, and from oneDNN's cache."""
    first = ctypes.c_double()
    again = ctypes.c_double()
    library.OnednnSetup(*sizes(rows, shape, half), ctypes.byref(first), ctypes.byref(again))
    return {"first_us": 1e6 * first.value, "again_us": 1e6 * again.value}


def measure(library: ctypes.CDLL, args: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"times": [], "invariance": [], "setup": []}
    shapes = {name: shape for name, shape in {**SMALL, **SHAPES}.items() if not args.shapes or name in args.shapes}
    for dtype in args.dtypes:
        half = dtype == "bfloat16"
        for name, shape in shapes.items():
            small = name in SMALL
            head = name.endswith("head")
            if small:
                found["setup"].append({"shape": name, "dtype": dtype, **setup_seconds(library, shape, half, 16)})
            if not head:
                found["invariance"].append({"shape": name, "dtype": dtype, **row_invariance(library, shape, half)})
            w = random_weight(rng, shape, half)
            copies = 1 if small else math.ceil(args.megabytes * 1e6 / w.nbytes)
            for rows in args.rows:
                if head and rows not in (1, 16, 64):
                    continue
                x = jnp.asarray(rng.standard_normal((rows, shape[0]), np.float32))
                calls = 64 if small else copies
                times_ms = times(steps(library, w, half, rows, copies), x, calls, args.repetitions, CLOCKS[args.clock])
                found["times"].append({"shape": name, "dtype": dtype, "rows": rows, "mb": w.nbytes / 1e6, "ms": times_ms})
                print(line(found["times"][-1], shape), flush=True)
    return found


def line(row: dict[str, Any], shape: tuple[int, int]) -> str:
    packed = row["ms"]["own"]
    flops = 2e-6 * row["rows"] * shape[0] * shape[1]
    rivals = "  ".join(f"{name} {ms:.4f} ms ({ms / packed:.2f}x own)" for name, ms in row["ms"].items() if name != "own")
    rate = f"{row['mb'] / packed:.1f} GB/s {flops / packed:.0f} GFLOP/s"
    return f"{row['dtype']} {row['shape']} {row['rows']:4}  own {packed:.4f} ms {rate}  {rivals}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onednn", type=Path, required=True, metavar="PREFIX")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", nargs="+", choices=[*SMALL, *SHAPES])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one core, `taskset -c 0`")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=128, help="of weights that one measurement streams")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu" and len(os.sched_getaffinity(0)) > 1:
        raise SystemExit("--clock cpu: expected one core (taskset -c 0), found more")
    kernels = native.kernels()
    if kernels.isa is None:
        raise SystemExit(f"the package's own kernels cannot be used here: {kernels.reason}")
    library = build(args.onednn)
    version = ctypes.create_string_buffer(100)
    library.OnednnVersion(version, ctypes.c_int64(100))
    about = {"chip": chip_name(), "kernels": kernels.isa, "onednn": version.value.decode(), "jax": jax.__version__}
    print(about)
    found = {**about, "repetitions": args.repetitions, "clock": args.clock, "packed_for": PACKED_FOR, **measure(library, args)}
    for kind in ("invariance", "setup"):
        for row in found[kind]:
            print(kind, json.dumps(row))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
