"""Compiles a train step with XLA's attention and with splash attention for absent TPUs, and compares memory and times.

    python benchmarks/training_attention_tpu.py --json FILE --case v5e:4x4,8192,8,4 --program after,before,plain,peer

A case is a topology, positions, sequences and layers; the file is extended by each program. "after" is the step of `train lm`,
"before" the same with XLA's attention, "plain" the step after without ordering tokens, whose activations travel as in the
strategy `sequence`, "peer" the auto-sharded step, and "peer-before" the same with XLA's attention. Compiler estimates and a
model of links and memory, no measurements.
"""

import argparse
import gzip
import json
import time
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from tilewright.bench import overlap_training as training
from tilewright.bench.overlap_training import ANNOTATED, PLAIN_STEP, TrainingCase, TrainingProgram
from tilewright.kernels.select import PLAIN
from tilewright.models.published_configs import model_config
from tilewright.parallel.exchanges import FullyShardedPlan
from tilewright.perfmodel.timeline_ranges import sweep_timelines

MODEL = "llama3-8b"
AXES = {"fsdp": 8, "tp": 2}
PLAN = FullyShardedPlan(dtype="bfloat16", reduce_dtype="bfloat16")
NAMES = {"after": "splash", "before": "XLA's attention", "plain": PLAIN_STEP, "peer": ANNOTATED, "peer-before": ANNOTATED}


class AnyDepth(TrainingCase):
    """A case that may have too few layers for a middle one."""

    def __post_init__(self) -> None:
        return

    @cached_property
    def products_s(self) -> float:
        """Seconds of the compiled layers' matmuls at the chip's peak, with the recomputed forward pass and visible scores."""
        c = self.compiled_config
        weights = c.hidden_size * (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + 3 * c.mlp_columns)
        scores = c.num_heads * c.head_dim * (self.length + 1)
        flops = 8 * c.num_layers * (weights + scores) + 6 * c.hidden_size * c.vocab_size
        return self.batch * self.length * flops / (prod(self.axes.values()) * 1e12 * self.spec.bf16_tflop_per_s)


def figures(program: TrainingProgram, case: AnyDepth, kind: str, cpu_s: float, draws: int) -> dict[str, Any]:
    """Returns the figures of a whole compiled step, and those of its middle layer where it has one."""
    timeline = program.timeline
    whole = timeline.whole()
    share = timeline.roofline_share(set(timeline.layers))
    sweep = sweep_timelines(
        {kind: timeline}, case.fabric, lambda _, one: 1e3 * one.whole().total_s, case.calibration, share, draws, "ms a step"
    )
    found = {
        "chip": case.chip,
        "mesh": "fsdp=8,tp=2",
        "layers_compiled": case.layers,
        "positions": case.length,
        "batch_rows": case.batch,
        "program": kind,
        "attention": "XLA" if kind.endswith("before") else "splash Pallas",
        "peak_bytes": program.compiled.peak_bytes,
        "argument_bytes": program.compiled.argument_bytes,
        "temporary_bytes": program.compiled.temp_bytes,
        "memory_bytes": 1e9 * case.spec.hbm_gb,
        "cycles_estimated": program.compiled.cycles,
        "total_ms": 1e3 * whole.total_s,
        "total_ms_range": sweep.range(kind),
        "compute_ms": 1e3 * whole.compute_s,
        "exposed_ms": 1e3 * whole.exposed_s,
        "memory_wait_ms": 1e3 * whole.memory_wait_s,
        "products_ms": 1e3 * case.products_s,
        "products_share_of_compute": case.products_s / whole.compute_s,
        "roofline_share": share,
        "compile_cpu_s": cpu_s,
    }
    if case.layers >= training.LEAST_LAYERS:
        found["layer"] = training.record(program, [program])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, help="topology, positions, sequences and layers")
    parser.add_argument("--program", default="after,before", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--draws", type=int, default=6, help="draws of the range of a time")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--hlo", type=Path, help="folder for the compiled programs")
    chosen = parser.parse_args()
    plans = {"plain": replace(PLAN, threaded=False)}
    for text in chosen.case:
        chip, *numbers = text.split(",")
        length, batch, layers = map(int, numbers)
        case = AnyDepth(chip, MODEL, model_config(MODEL), AXES, layers, batch, length)
        for kind in chosen.program.split(","):
            started_at = time.process_time()
            program = training.compile_program(
                case, NAMES[kind], plans.get(kind, PLAN), PLAIN if kind.endswith("before") else None
            )
            one = figures(program, case, kind, time.process_time() - started_at, chosen.draws)
            if chosen.hlo is not None:
                with gzip.open(chosen.hlo / f"{text.replace(':', '-')},{kind}.hlo.gz", "wt") as file:
                    file.write(program.compiled.hlo)
            found = json.loads(chosen.json.read_text()) if chosen.json.exists() else versions()
            found["data"].append(one)
            chosen.json.write_text(json.dumps(found, indent=2) + "\n")
            print(json.dumps({name: value for name, value in one.items() if name != "layer"}), flush=True)


def versions() -> dict[str, Any]:
    """Returns the fields of a new result."""
    return {
        "model": MODEL,
        "dtype": "bfloat16",
        "measured": False,
        "jax_version": version("jax"),
        "libtpu_version": version("libtpu"),
        "data": [],
    }


if __name__ == "__main__":
    main()
