"""Times attention over pages relative to attention over contiguous caches on the CPU (`attend_projected`).

    python benchmarks/paged_attention.py [--contexts 512,2048 --rows 1,16 --queries 1,16 --pages 16,64,128] [--json FILE]

Keys and values are random, in bfloat16; pages are shuffled. Each side runs in a device loop that writes its entries at the
same positions in every iteration, for about `--seconds` per repetition. The output has medians of the time over pages
relative to contiguous caches; above 1 is slower. On a busy machine: `NPROC=1 taskset -c 0 python
benchmarks/paged_attention.py --clock cpu`.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, spread
from tilewright.kernels import native
from tilewright.kernels.attention import cpu as attention
from tilewright.kernels.linear.cpu import Joint
from tilewright.kernels.masks import causal_from
from tilewright.kernels.operations import Heads, KeyValuePages, KeyValueRows, Norm, PagedCache

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
HEADS = 16
KV_HEADS = 8
HEAD_DIM = 128


def attended(operands: dict[str, Any], cache: Any) -> Any:
    """Attends in one layer. Returns the updated cache."""
    norms = (Norm(operands[name], 1e-6) for name in ("q_norm", "k_norm"))
    heads = Heads(HEAD_DIM, *norms, (operands["cos"], operands["sin"]))
    projection = Joint(operands["qkv"], (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM))
    return attention.attend_projected(None, projection, heads, cache, causal_from(operands["start"], operands["count"]))[1]


def contiguous(operands: dict[str, Any], k: Array, v: Array) -> tuple[Array, Array]:
    after = attended(operands, KeyValueRows(k, v))
    return after.k, after.v


def over_pages(table: Array, operands: dict[str, Any], k: Array, v: Array) -> tuple[Array, Array]:
    pool = attended(operands, PagedCache(KeyValuePages(k, v), table)).pool
    return pool.k, pool.v


@partial(jax.jit, static_argnums=0)
def repeated(run: Any, operands: dict[str, Any], k: Array, v: Array, iterations: Array) -> Array:
    """Runs `run` for `iterations`. Returns an element of the caches, so that XLA keeps all writes."""
    k, v = jax.lax.fori_loop(0, iterations, lambda _, caches: run.function(*run.operands, operands, *caches), (k, v))
    return k[:1, :1, :1] + v[:1, :1, :1]


class Side:
    """A function with operands, hashable by identity."""

    def __init__(self, function: Callable[..., tuple[Array, Array]], *operands: Array):
        self.function = function
        self.operands = operands


def compare(context: int, rows: int, queries: int, sizes: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians and ranges of the ratios to contiguous caches, by page size."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    angles = rng.uniform(0, 6, (rows, queries, HEAD_DIM // 2)).astype(np.float32)
    operands = {"qkv": draw(rows, queries, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "cos": np.cos(angles), "sin": np.sin(angles)}
    operands |= {"q_norm": draw(HEAD_DIM), "k_norm": draw(HEAD_DIM), "start": np.full(rows, context - queries, np.int32)}
    operands |= {"count": np.full(rows, queries, np.int32)}
    k, v = (draw(rows, KV_HEADS, context, HEAD_DIM) for _ in range(2))
    sides: dict[int, Any] = {0: (Side(contiguous), k, v)}
    for size in sizes:
        order = rng.permutation(rows * context // size).astype(np.int32)
        shape = (len(order), KV_HEADS, size, HEAD_DIM)
        sides[size] = (Side(over_pages, jnp.asarray(order.reshape(rows, -1))), k.reshape(shape), v.reshape(shape))
    clock = CLOCKS[options.clock]

    def timed(side: Any, iterations: int) -> float:
        start = clock()
        repeated(side[0], operands, *side[1:], iterations).block_until_ready()
        return clock() - start

    for side in sides.values():
        timed(side, 1)
    iterations = max(1, round(options.seconds / max(timed(sides[0], 2) / 2, 1e-6)))
    times = alternate({size: partial(timed, side, iterations) for size, side in sides.items()}, options.repetitions, warm=True)
    return {str(size): spread([x / y for x, y in zip(times[size], times[0], strict=True)]).__dict__ for size in sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("contexts", "512,2048"), ("rows", "1,16"), ("queries", "1,16"), ("pages", "16,64,128")):
        parser.add_argument(f"--{name}", type=lambda text: [int(part) for part in text.split(",")], default=default)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"chip": chip_name(), "isa": native.kernels().isa, "clock": options.clock, "ratios": {}}
    for context in options.contexts:
        for rows in options.rows:
            for queries in options.queries:
                found = compare(context, rows, queries, options.pages, options)
                results["ratios"][f"context {context}, rows {rows}, queries {queries}"] = found
                line = "  ".join(f"{size}: {x['median']:.3f} ({x['least']:.3f}-{x['most']:.3f})" for size, x in found.items())
                print(f"context {context:5} rows {rows:2} queries {queries:2}  pages of  {line}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
