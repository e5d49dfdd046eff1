"""Measures step time and memory of an 8-bit KV cache, relative to a KV cache in the model's dtype.

    python benchmarks/kv_int8.py [--model smollm2-135m --weights int4 --positions 4096,32768 --widths 1,8] [--json FILE]

One row decodes `--steps` tokens after a full cache, by plain decode steps (width 1) or by a program that verifies blocks.
Positions beyond the model's context use the same weights with a longer context; the cached values do not change the time. The
output has medians of milliseconds, and of ratios to the model's dtype within a repetition; below 1 is faster. On a busy
machine: `NPROC=1 taskset -c 0 python benchmarks/kv_int8.py --clock cpu`.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import tilewright as tw
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, spread
from tilewright.kernels.select import Weights
from tilewright.llm.language_model import LanguageModel
from tilewright.runtime.layout import Layout
from tilewright.runtime.memory import step_bytes
from tilewright.runtime.programs import Programs
from tilewright.runtime.runner import ModelRunner
from tilewright.runtime.shapes import Shape, ShapeTable
from tilewright.runtime.sizes import state_bytes
from tilewright.runtime.state import KvDtype
from tilewright.speculation.drafters.blockwise import Blockwise

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def model_with(loaded: LanguageModel, kv_dtype: KvDtype, positions: int) -> LanguageModel:
    """Returns the model with a KV cache of `positions` in a dtype. Shares the weights."""
    config = replace(loaded.target, max_position_embeddings=positions)
    params = loaded.model.models.target
    table = ShapeTable(batches=(1,), capacities=(positions,), chunks=(16,))
    weights: Any = loaded.weights
    return LanguageModel(config, params, loaded.tokenizer, loaded.dtype, weights, table=table, prepared=True, kv_dtype=kv_dtype)


def stepping(programs: Programs, at: int, steps: int, clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a function that decodes `steps` tokens from position `at` and returns the milliseconds per token."""
    runner = ModelRunner(programs, "greedy")
    layout = programs.layout
    runner.reset()
    key = programs.round_key(programs.choices[0], 1, layout.capacity, "greedy")
    table = np.arange(layout.pages, dtype=np.int32)[None, None]
    slots = np.zeros(1, np.int32)
    running = np.ones(1, bool)

    def timed() -> float:
        assert runner.state is not None
        ends = {"end": jnp.full(1, layout.capacity), "ignore_eos": jnp.ones(1, bool)}
        runner.state = replace(runner.state, last_position=jnp.full(1, at), done=jnp.zeros(1, bool), **ends)
        runner.wait()
        began = clock()
        reports = runner.run_rounds(key, slots, table, running, steps)
        jax.block_until_ready(reports)
        runner.wait()
        assert int(np.asarray(reports.packed)[:steps, 0, 0].sum()) == steps
        return (clock() - began) / steps * 1e3

    return timed


def compare(loaded: LanguageModel, positions: int, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures times and memory with both KV caches."""
    capacity = positions + 256
    sides = {}
    memory = {}
    for kv_dtype in get_args(KvDtype):
        lm = model_with(loaded, kv_dtype, capacity)
        drafter = None if width == 1 else Blockwise(width)
        sides[kv_dtype] = stepping(
            lm.programs_for(drafter, Shape(1, capacity)), positions, options.steps, CLOCKS[options.clock]
        )
        one, two = (state_bytes(lm.model.target, None, Layout(1, 64, n, 64), lm.model.dtype) for n in (1, 2))
        memory[kv_dtype] = (two - one) // 64
    times_by_dtype = alternate(sides, options.repetitions, warm=True)
    ratios = [x / y for x, y in zip(times_by_dtype["int8"], times_by_dtype["auto"], strict=True)]
    return {
        "positions": positions,
        "width": width,
        "step_ms": {name: spread(times).__dict__ for name, times in times_by_dtype.items()},
        "int8_over_auto": spread(ratios).__dict__,
        "bytes_a_position": memory,
        "read_of_cache_a_step": {name: each * positions for name, each in memory.items()},
        "read_of_weights_a_step": step_bytes(loaded.model.models.target),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", choices=get_args(Weights), default="int4")
    for name, default in (("positions", "4096,32768"), ("widths", "1,8")):
        parser.add_argument(f"--{name}", type=lambda text: [int(part) for part in text.split(",")], default=default)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = tw.load(options.model, dtype=options.dtype, weights=options.weights)
    versions = {"python": platform.python_version(), "tilewright": tw.__version__, "jax": jax.__version__}
    report: dict[str, Any] = {"chip": chip_name(), "versions": versions, "kernels": loaded.kernels, "clock": options.clock}
    report |= {"model": options.model, "dtype": options.dtype, "weights": options.weights, "steps": options.steps, "timed": []}
    for positions in options.positions:
        for width in options.widths:
            found = compare(loaded, positions, width, options)
            report["timed"].append(found)
            auto, int8 = (found["step_ms"][name]["median"] for name in ("auto", "int8"))
            ratio = found["int8_over_auto"]
            print(
                f"position {positions:6}, width {width:2}: {options.dtype} {auto:8.2f} ms, int8 {int8:8.2f} ms; ratio "
                f"{ratio['median']:.3f} ({ratio['least']:.3f}-{ratio['most']:.3f}); bytes per position "
                f"{found['bytes_a_position']['auto']:,} and {found['bytes_a_position']['int8']:,}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
