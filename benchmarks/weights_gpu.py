"""A decoding step over weights in few bits on the GPU that is here, as XLA compiles it, beside bfloat16 in turns.

    python benchmarks/weights_gpu.py FILE [LAYERS]

Layers of Llama-3-8B's shape with its head, eight rows over caches of 640 positions, weights drawn at random. `memory` is what
the program takes between operations: a copy of weights in bfloat16 shows there. `off` is how far logits are from those of the
same weights dequantised to bfloat16 before, over the largest of these.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.bench.model_configs import model_config
from tilewright.bench.weight_traffic import FORMATS, arguments, bytes_held, greedy_step
from tilewright.compiled.timing import alternate, quotients, spread
from tilewright.kernels.linear.scaled import FP8, ScaledMatrix
from tilewright.kernels.select import operations
from tilewright.models import decoder
from tilewright.runtime.state import Span, cached_attend

BATCH, POSITIONS, STEPS, SIZE = 8, 640, 50, 0.02


def drawn(array: Any, seed: int) -> jax.Array:
    """Weights of about `SIZE`: integers of any bits, and scales to match."""
    key, dtype = jax.random.key(seed), array.dtype
    if dtype in (jnp.int8, jnp.int4, jnp.uint4):
        bits = jax.random.bits(key, array.shape, jnp.uint8)
        return (bits & 15).astype(dtype) if dtype == jnp.uint4 else (bits.view(jnp.int8) >> 4 * (dtype == jnp.int4)).astype(dtype)
    if dtype == jnp.uint16:
        return jnp.full(array.shape, np.float16(SIZE / 4).view(np.uint16), dtype)
    if dtype == jnp.float32:
        return jnp.full(array.shape, SIZE / 64, dtype)
    return ((64 if dtype == FP8 else SIZE) * jax.random.normal(key, array.shape)).astype(dtype)


def filled(tree: Any) -> Any:
    leaves, form = jax.tree.flatten(tree)
    return jax.tree.unflatten(form, [drawn(leaf, n) for n, leaf in enumerate(leaves)])


def dequantised(tree: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.dequantised(jnp.bfloat16)[:, : leaf.width or None] if isinstance(leaf, ScaledMatrix) else leaf

    return jax.tree.map(wide, tree, is_leaf=lambda leaf: isinstance(leaf, ScaledMatrix))


def main(file: Path, layers: int) -> None:
    config = replace(model_config("llama3-8b"), num_layers=layers)
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "layers": layers, "data": {}}
    runs, held = {}, {}
    for form in FORMATS:
        ops = operations("gpu", weights=FORMATS[form])
        shapes = arguments(config, form, BATCH, POSITIONS)
        weights, caches = filled(shapes[0]), filled(shapes[1])
        tokens, start = jnp.arange(BATCH)[:, None] * 1000, jnp.full(BATCH, POSITIONS - STEPS - 8, jnp.int32)
        compiled = jax.jit(greedy_step(config, ops), donate_argnums=1).lower(weights, caches, tokens, start).compile()

        def logits(params: Any, ops: Any, caches: Any = caches, tokens: Any = tokens, start: Any = start) -> Any:
            span = Span(start, jnp.ones_like(start))
            ran = decoder.forward(config, ops, params, tokens, start[:, None], cached_attend, span, caches)
            return decoder.logits(config, ops, params, ran.hidden)

        found = jax.jit(logits, static_argnums=1)(weights, ops).astype(jnp.float32)
        wanted = jax.jit(logits, static_argnums=1)(dequantised(weights), operations("gpu")).astype(jnp.float32)
        read = sum(map(bytes_held, jax.tree.leaves(replace(shapes[0], embed=()))))
        off = float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))
        report["data"][form] = {
            "held": read, "memory": compiled.memory_analysis().temp_size_in_bytes, "off": off,
            "same_most_likely": int(jnp.sum(jnp.argmax(found, -1) == jnp.argmax(wanted, -1))),
        }  # fmt: skip
        held[form] = caches

        print(form, report["data"][form], flush=True)

        def run(form: str = form, compiled: Any = compiled, weights: Any = weights, tokens: Any = tokens, start: Any = start) -> Any:
            began = time.perf_counter()
            for _ in range(STEPS):
                _, held[form] = compiled(weights, held[form], tokens, start)
            jax.block_until_ready(held[form])
            return (time.perf_counter() - began) / STEPS

        runs[form] = run
    taken = alternate(runs, 5, warm=True)
    for form, seconds in taken.items():
        middle = spread(seconds)
        ratio = quotients(taken["bfloat16"], seconds)
        report["data"][form] |= {
            "step_ms": 1e3 * middle.median, "step_ms_range": [1e3 * each for each in middle.range],
            "speedup": ratio.median, "speedup_range": list(ratio.range),
            "read_gb_s": report["data"][form]["held"] / middle.median / 1e9,
        }  # fmt: skip
        print(form, report["data"][form], flush=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8)
