"""What keys and values in 8 bits save: a step's time and the memory, beside keys and values in the model's dtype, in turns.

    python benchmarks/kv_int8.py [--model smollm2-135m --weights int4 --positions 4096,32768 --widths 1,8] [--json FILE]

One row stands at a position with all before it cached, and decodes `--steps` tokens, by steps of plain decoding (width 1) or
through a program of blocks, as rounds verify them. Positions beyond the model's context are timed with the same weights, as
those of a model with a longer one: what is cached does not matter for the time. Printed are medians of milliseconds, and of
times in turns over those in the model's dtype: below 1 is faster. On a machine with other work:
`NPROC=1 taskset -c 0 python benchmarks/kv_int8.py --clock cpu`.
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
    """The model, its keys and values kept in a dtype, for so many positions; the weights are shared."""
    config = replace(loaded.target, max_position_embeddings=positions)
    params = loaded.model.models.target
    table = ShapeTable(batches=(1,), capacities=(positions,), chunks=(16,))
    weights: Any = loaded.weights
    return LanguageModel(config, params, loaded.tokenizer, loaded.dtype, weights, table=table, prepared=True, kv_dtype=kv_dtype)


def stepping(programs: Programs, at: int, steps: int, clock: Callable[[], float]) -> Callable[[], float]:
    """A function that decodes `steps` tokens from position `at` on, and gives the milliseconds of one."""
    runner = ModelRunner(programs, "greedy")
    layout = programs.layout
    runner.reset()
    key = programs.round_key(programs.choices[0], 1, layout.capacity, "greedy")
    table = np.arange(layout.pages, dtype=np.int32)[None]
    slots = np.zeros(1, np.int32)
    running = np.ones(1, bool)

    def timed() -> float:
        assert runner.state is not None
        ends = {"end": jnp.full(1, layout.capacity), "ignore_eos": jnp.ones(1, bool)}
        runner.state = replace(runner.state, known=jnp.full(1, at), done=jnp.zeros(1, bool), **ends)
        runner.wait()
        began = clock()
        reports = runner.run_rounds(key, slots, table, running, steps)
        jax.block_until_ready(reports)
        runner.wait()
        assert int(np.asarray(reports.packed)[:steps, 0, 0].sum()) == steps
        return (clock() - began) / steps * 1e3

    return timed


def compare(loaded: LanguageModel, positions: int, width: int, how: argparse.Namespace) -> dict[str, Any]:
    """Times and memory of both sides."""
    capacity = positions + 256
    sides = {}
    memory = {}
    for kv_dtype in get_args(KvDtype):
        lm = model_with(loaded, kv_dtype, capacity)
        drafter = None if width == 1 else Blockwise(width)
        sides[kv_dtype] = stepping(lm.programs_for(drafter, Shape(1, capacity)), positions, how.steps, CLOCKS[how.clock])
        one, two = (state_bytes(lm.model.target, None, Layout(1, 64, n, 64), lm.model.dtype) for n in (1, 2))
        memory[kv_dtype] = (two - one) // 64
    taken = alternate(sides, how.repetitions, warm=True)
    ratios = [x / y for x, y in zip(taken["int8"], taken["auto"], strict=True)]
    return {
        "positions": positions,
        "width": width,
        "step_ms": {name: spread(times).__dict__ for name, times in taken.items()},
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
    how = parser.parse_args()
    loaded = tw.load(how.model, dtype=how.dtype, weights=how.weights)
    versions = {"python": platform.python_version(), "tilewright": tw.__version__, "jax": jax.__version__}
    report: dict[str, Any] = {"chip": chip_name(), "versions": versions, "kernels": loaded.kernels, "clock": how.clock}
    report |= {"model": how.model, "dtype": how.dtype, "weights": how.weights, "steps": how.steps, "timed": []}
    for positions in how.positions:
        for width in how.widths:
            found = compare(loaded, positions, width, how)
            report["timed"].append(found)
            auto, int8 = (found["step_ms"][name]["median"] for name in ("auto", "int8"))
            ratio = found["int8_over_auto"]
            print(
                f"position {positions:6}, width {width:2}: {how.dtype} {auto:8.2f} ms, int8 {int8:8.2f} ms; in turns "
                f"{ratio['median']:.3f} ({ratio['least']:.3f}-{ratio['most']:.3f}); bytes a position "
                f"{found['bytes_a_position']['auto']:,} and {found['bytes_a_position']['int8']:,}",
                flush=True,
            )
    if how.json:
        how.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
