"""Times the kernel calls of a decoder layer on the CPU relative to its matrix products, and the overhead of one call.

    python benchmarks/layer_overhead.py [--layers 12 --hidden 320 ...] [--json layer_overhead.json]

Weights are random, in bfloat16. A step writes its keys and values into the caches and attends to `--context` entries. Three
variants alternate in one process, each in a device loop over all layers:

- *separate*: one call per operation: two norms, products for q, k and v, a norm for queries and one for keys, rotation,
  cache writes, attention, the output projection, gate and up, down, and two additions;
- *joined*: five calls: norm and product for q, k and v; everything up to the attention output; the output projection with the
  addition; norm, gate and up; down with the addition;
- *products*: only the matrix products of *joined*.

`dispatch_us` is the time per call, in microseconds, in a chain of calls that hardly compute. On a busy machine:
`NPROC=1 taskset -c 0 python benchmarks/layer_overhead.py --clock cpu`.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, medians
from tilewright.kernels import native
from tilewright.kernels.attention import cpu as attention
from tilewright.kernels.heads.xla import rotate_halves
from tilewright.kernels.linear import cpu as linear
from tilewright.kernels.masks import causal_from
from tilewright.kernels.operations import Heads, KeyValueRows, Norm
from tilewright.kernels.rms_norm import cpu as norm
from tilewright.models.layers import rope_tables

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
EPS = 1e-6
Caches = tuple[Array, Array]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and the number of cached entries before a step."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int


def make_layers(shape: Shape) -> list[dict[str, Any]]:
    """Draws the weights of each layer, packed for all variants."""
    rng = np.random.default_rng(0)

    def draw(*sizes: int) -> Array:
        return jnp.asarray(rng.standard_normal(sizes, np.float32) / sizes[0] ** 0.5, jnp.bfloat16)

    query = shape.heads * shape.head_dim
    key = shape.kv_heads * shape.head_dim
    made = []
    for _ in range(shape.layers):
        qkv = [draw(shape.hidden, size) for size in (query, key, key)]
        made.append(
            {
                "q": linear.pack(qkv[0]),
                "k": linear.pack(qkv[1]),
                "v": linear.pack(qkv[2]),
                "qkv": linear.pack_joined(qkv),
                "o": linear.pack(draw(query, shape.hidden)),
                "down": linear.pack(draw(shape.intermediate, shape.hidden)),
                "gate_up": linear.pack_gated(draw(shape.hidden, shape.intermediate), draw(shape.hidden, shape.intermediate)),
                "norms": (draw(shape.hidden), draw(shape.hidden)),
                "head_norms": (draw(shape.head_dim), draw(shape.head_dim)),
            }
        )
    return made


def separate(shape: Shape, layer: dict[str, Any], x: Array, caches: Caches, rope: Caches, start: Array) -> tuple[Array, Caches]:
    """Runs a layer with one call per operation."""
    b, t, _ = x.shape
    h = norm.rms_norm(x, layer["norms"][0], EPS)
    q, k, v = (linear.linear(h, layer[name]).reshape(b, t, -1, shape.head_dim) for name in "qkv")
    q, k = (norm.rms_norm(part, w, EPS) for part, w in zip((q, k), layer["head_norms"], strict=True))
    q = rotate_halves(q, rope[0], rope[1])
    k = rotate_halves(k, rope[0], rope[1])
    cached: list[Array] = []
    for cache, new in zip(caches, (k, v), strict=True):
        for row in range(b):
            cache = jax.lax.dynamic_update_slice(cache, new.transpose(0, 2, 1, 3)[row : row + 1], (row, 0, start[row], 0))
        cached.append(cache)
    out = attention.attend(q, KeyValueRows(cached[0], cached[1]), causal_from(start))
    x = x + linear.linear(out.reshape(b, t, -1), layer["o"])
    h = norm.rms_norm(x, layer["norms"][1], EPS)
    return x + linear.linear(linear.linear(h, layer["gate_up"]), layer["down"]), (cached[0], cached[1])


def joined(shape: Shape, layer: dict[str, Any], x: Array, caches: Caches, rope: Caches, start: Array) -> tuple[Array, Caches]:
    """Runs a layer with five calls."""
    qkv = linear.project(x, layer["qkv"], Norm(layer["norms"][0], EPS))
    heads = Heads(shape.head_dim, *(Norm(weight, EPS) for weight in layer["head_norms"]), rope)
    mask = causal_from(start, jnp.full_like(start, x.shape[1]))
    out, after = attention.attend_projected(None, qkv, heads, KeyValueRows(*caches), mask)
    x = linear.linear(out, layer["o"], add=x)
    h = linear.linear(x, layer["gate_up"], norm=Norm(layer["norms"][1], EPS))
    return linear.linear(h, layer["down"], add=x), (after.k, after.v)


def products(shape: Shape, layer: dict[str, Any], x: Array, caches: Caches, rope: Caches, start: Array) -> tuple[Array, Caches]:
    """Runs only the four matrix products of a layer."""
    x = linear.linear(linear.linear(x, layer["qkv"])[..., : shape.heads * shape.head_dim], layer["o"])
    return linear.linear(linear.linear(x, layer["gate_up"]), layer["down"]), caches


def program(shape: Shape, variant: Callable[..., tuple[Array, Caches]], rows: int, steps: int) -> Callable[..., Any]:
    """Compiles `steps` passes through all layers into one dispatch. DONATES the caches."""

    @jax.jit(donate_argnums=2)
    def run(layers: list[dict[str, Any]], x: Array, caches: list[Caches], start: Array) -> tuple[Array, list[Caches]]:
        def body(_: Any, carry: tuple[Array, list[Caches]]) -> tuple[Array, list[Caches]]:
            x, caches = carry
            rope = rope_tables(start[:, None] + jnp.arange(rows)[None], [0.1**i for i in range(shape.head_dim // 2)])
            new_caches = []
            for layer, cached in zip(layers, caches, strict=True):
                x, cached = variant(shape, layer, x, cached, rope, start)
                new_caches.append(cached)
            return x * jnp.bfloat16(0.01), new_caches

        return jax.lax.fori_loop(0, steps, body, (x, caches))

    return run


def timer(
    shape: Shape, layers: list[Any], variant: Callable[..., Any], rows: int, steps: int, clock: Callable[[], float]
) -> Callable[[], float]:
    """Returns a function that measures the seconds per step."""
    run = program(shape, variant, rows, steps)
    x = jnp.ones((1, rows, shape.hidden), jnp.bfloat16)
    start = jnp.full((1,), shape.context, jnp.int32)
    size = (1, shape.kv_heads, shape.context + rows, shape.head_dim)
    caches = [(jnp.zeros(size, jnp.bfloat16), jnp.zeros(size, jnp.bfloat16)) for _ in range(shape.layers)]

    def timed() -> float:
        nonlocal caches
        began = clock()
        _, caches = jax.block_until_ready(run(layers, x, caches, start))
        return (clock() - began) / steps

    timed()
    return timed


def dispatch(clock: Callable[[], float], calls: int = 64, steps: int = 200) -> Callable[[], float]:
    """Returns a function that measures the seconds per call in a chain of calls on a vector of 16 numbers."""
    ones = jnp.ones(16)

    @jax.jit
    def run(x: Array) -> Array:
        def body(_: Any, x: Array) -> Array:
            for _ in range(calls):
                x = norm.rms_norm(x, ones, EPS)
            return x

        return jax.lax.fori_loop(0, steps, body, x)

    def timed() -> float:
        began = clock()
        run(ones[None]).block_until_ready()
        return (clock() - began) / steps / calls

    timed()
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "hidden": 320, "intermediate": 768, "heads": 5, "kv-heads": 1, "head-dim": 64, "context": 256}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=20, help="steps per dispatch")
    parser.add_argument("--repetitions", type=int, default=41)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time, for one core of a busy machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if native.kernels().isa is None:
        raise SystemExit(f"expected the CPU kernels, which cannot run here: {native.kernels().reason}")
    shape = Shape(**{name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in sizes})
    clock = CLOCKS[options.clock]
    layers = make_layers(shape)
    variants = {"separate": separate, "joined": joined, "products": products}
    runs: dict[tuple[str, int], Callable[[], float]] = {("dispatch", 0): dispatch(clock)}
    for rows in options.rows:
        runs |= {(name, rows): timer(shape, layers, variant, rows, options.steps, clock) for name, variant in variants.items()}
    median = medians(alternate(runs, options.repetitions))
    records = [{"way": name, "rows": rows, "step_ms": 1e3 * median[name, rows]} for name, rows in runs if rows]
    about = {
        "chip": chip_name(),
        "isa": native.kernels().isa,
        "jax": jax.__version__,
        "shape": asdict(shape),
        "clock": options.clock,
    }
    report = {**about, "dispatch_us": 1e6 * median["dispatch", 0], "repetitions": options.repetitions, "records": records}
    print(f"one call: {report['dispatch_us']:.2f} µs")
    for record in records:
        base = median[record["way"], options.rows[0]]
        steps = 1e-3 * record["step_ms"] / base
        print(f"{record['way']:>8} {record['rows']:>3} rows: {record['step_ms']:.3f} ms, {steps:.2f} steps")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
