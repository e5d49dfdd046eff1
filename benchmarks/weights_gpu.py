"""Times a decode step with quantised weights on this GPU, compiled by XLA, relative to bfloat16.

    python benchmarks/weights_gpu.py FILE [LAYERS]

The model has layers of Llama-3-8B's shape with its head, eight rows, caches of 640 positions, and random weights. `memory` is
the temporary memory of the program; a copy of the weights in bfloat16 would show there. `off` is the largest difference from
the logits of the same weights dequantised to bfloat16, over the largest of those logits.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from weight_traffic import FORMATS, arguments, bytes_held, greedy_step

from tilewright.compiled.timing import alternate, quotients, spread
from tilewright.kernels.linear.scaled import FP8, ScaledMatrix
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.published_configs import model_config
from tilewright.runtime.state import Span, cached_attend

BATCH = 8
POSITIONS = 640
STEPS = 50
SIZE = 0.02


def drawn(array: Any, seed: int) -> jax.Array:
    """Draws weights of about `SIZE`: integers with matching scales, or floats."""
    key = jax.random.key(seed)
    dtype = array.dtype
    if dtype.name in ("int8", "int4", "uint4"):
        bits = jax.random.bits(key, array.shape, jnp.uint8)
        signed = bits.view(jnp.int8)
        return {"int8": signed, "int4": signed >> 4, "uint4": bits & 15}[dtype.name].astype(dtype)
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


def case(config: DecoderConfig, form: str) -> tuple[dict[str, Any], Callable[[], float]]:
    """Returns the record of a format without times, and a function that measures the seconds per step."""
    ops, (weights, caches, *_) = operations("gpu", weights=FORMATS[form]), arguments(config, form, BATCH, POSITIONS)
    read = sum(map(bytes_held, jax.tree.leaves(replace(weights, embed=()))))
    params = filled(weights)
    cache_holder = [filled(caches)]
    tokens = jnp.arange(BATCH)[:, None] * 1000
    start = jnp.full(BATCH, POSITIONS - 1, jnp.int32)

    def logits(ops: Operations, params: Any, caches: Any) -> Any:
        span = Span(start, jnp.ones_like(start))
        ran = decoder.forward(config, ops, params, tokens, start[:, None], cached_attend, span, caches)
        return decoder.logits(config, ops, params, ran.hidden).astype(jnp.float32)

    run = jax.jit(logits, static_argnums=0)
    found = run(ops, params, cache_holder[0])
    expected = run(operations("gpu"), dequantised(params), cache_holder[0])
    step = jax.jit(greedy_step(config, ops), donate_argnums=1).lower(params, cache_holder[0], tokens, start).compile()
    record = {
        "held": read,
        "memory": step.memory_analysis().temp_size_in_bytes,
        "off": float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected))),
        "same_most_likely": int(jnp.sum(jnp.argmax(found, -1) == jnp.argmax(expected, -1))),
    }

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            _, cache_holder[0] = step(params, cache_holder[0], tokens, start)
        jax.block_until_ready(cache_holder[0])
        return (time.perf_counter() - begin) / STEPS

    return record, seconds


def main(file: Path, layers: int) -> None:
    config = replace(model_config("llama3-8b"), num_layers=layers)
    cases = {form: case(config, form) for form in FORMATS}
    results = alternate({form: seconds for form, (_, seconds) in cases.items()}, warm=True)
    data = {}
    for form, times in results.items():
        ratio = quotients(results["bfloat16"], times)
        timed = {"step_ms": 1e3 * spread(times).median, "speedup": ratio.median, "speedup_range": list(ratio.range)}
        data[form] = cases[form][0] | timed
        print(form, data[form], flush=True)
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "layers": layers, "data": data}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)
