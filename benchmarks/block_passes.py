"""Estimates passes over blocks, and rounds of self-speculation, on absent TPUs, beside a plain step of the same weights.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python benchmarks/block_passes.py [--chip v5e:2x2] [--rows 1 --rows 8] [--json FILE]

Shapes are SDAR-8B's (Qwen3-8B's layers, blocks of 4 and 32) and Nemotron-Labs-Diffusion-3B's (blocks of 32), in bfloat16, at a
context of 1,024 positions. A pass runs a block and its logits, and writes its keys and values; a pass over two blocks stores
the first, and denoises the second. A round of self-speculation is a pass that drafts, and a verification. A plain step runs one
token a row and the head's best token.

Programs are compiled ahead of time; layers beyond those compiled are extrapolated (`round_compiled.py`). `cycles` are the
compiler's estimates, with rooflines of Pallas kernels; `bound_cycles` are the larger of these and the time of the memory
traffic. Ranges are over the memory's rate and the ratio of kernel time to roofline.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from cyclopts import App
from jax import Array
from round_compiled import LAYERS_COMPILED, over_layers

from tilewright.cli.calibrate import print_ranges
from tilewright.cli.options import Numbers, Several
from tilewright.cli.outputs import JsonFile, human_console, progress, write_json
from tilewright.compiled.aot import compile_for
from tilewright.hardware.ranged import ranged
from tilewright.hardware.tpu import TpuChip, chip_of
from tilewright.kernels.operations import Operations
from tilewright.kernels.select import operations
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.models import decoder, params
from tilewright.models.config import MaskedBlocks
from tilewright.models.decoder import DecoderConfig
from tilewright.models.published_configs import MODELS
from tilewright.perfmodel.calibration import chip_with
from tilewright.perfmodel.compiler_estimate import CompilerEstimate, estimate
from tilewright.perfmodel.timeline_ranges import ROOFLINE_TIME
from tilewright.perfmodel.uncertainty import DRAWS, Basis, Sweep, sweep_constants
from tilewright.runtime import cache
from tilewright.runtime.sampling import Sampling, row_sampling
from tilewright.runtime.state import DecodeState, Span, Target, block_positions, run_target

CONTEXT = 1024
SDAR = replace(MODELS["qwen3-8b"], family="sdar", masked_blocks=MaskedBlocks(151669, 4, causal=False))
NEMOTRON = DecoderConfig(
    family="nemotron_labs_diffusion",
    vocab_size=131072,
    hidden_size=3072,
    intermediate_size=9216,
    num_layers=26,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    masked_blocks=MaskedBlocks(100, 32),
)
CASES: tuple[tuple[str, DecoderConfig, int], ...] = (
    ("SDAR-8B, blocks of 4", SDAR, 4),
    ("SDAR-8B, blocks of 32", SDAR, 32),
    ("Nemotron-Labs-Diffusion-3B, blocks of 32", NEMOTRON, 32),
)


def state_of(config: DecoderConfig, rows: int, capacity: int) -> DecodeState:
    """Returns rows at `CONTEXT`, with empty caches. Abstract inside `jax.eval_shape`."""
    numbers = jnp.zeros(rows, jnp.int32)
    sizes = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim, jnp.bfloat16)
    return DecodeState(
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        last_position=numbers + CONTEXT,
        end=numbers + capacity,
        done=numbers > 0,
        ignore_eos=numbers == 0,
        sampling=row_sampling([Sampling()] * rows, [1] * rows),
        target_cache=cache.allocate(*sizes),
        draft_cache=(),
    )


def layers_estimate(
    topology: str, ops: Operations, config: DecoderConfig, rows: int, width: int, seen: int, layers: int
) -> Any:
    """Estimates the layers of a program over `width` tokens of each row, in blocks of `seen` tokens that see each other."""
    small = replace(config, num_layers=layers)
    target = Target(small, ops)

    def run(weights: Any, state: DecodeState, block: Array) -> tuple[Array, Any]:
        span = Span(state.last_position, jnp.full_like(state.last_position, width))
        ends = None if seen == 1 else (block_positions(span.start, width) // seen + 1) * seen
        ran = run_target(target, weights, state, block, span, (), ends)
        return ran.hidden, replace(state, target_cache=ran.caches)

    weights = params.abstract(decoder.declare(small), jnp.bfloat16)
    state = jax.eval_shape(partial(state_of, small, rows, CONTEXT + 128))
    block = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    return estimate(chip_of(topology), compile_for(topology, run, weights, state, block, donate=1))


def head_estimate(
    topology: str, ops: Operations, config: DecoderConfig, rows: int, width: int, logits: bool
) -> CompilerEstimate:
    """Estimates the output head: all logits, or the best token alone."""
    weights = replace(params.abstract(decoder.declare(replace(config, num_layers=1)), jnp.bfloat16), layers=())
    hidden = jax.ShapeDtypeStruct((rows, width, config.hidden_size), jnp.bfloat16)

    def run(x: Array, weights: Any) -> Array:
        if logits:
            found = decoder.logits(config, ops, weights, x)
            return jnp.max(found, axis=-1) - jax.nn.logsumexp(found, axis=-1)
        return decoder.most_likely(config, ops, weights, x)

    return estimate(chip_of(topology), compile_for(topology, run, hidden, weights))


def program(
    topology: str, ops: Operations, config: DecoderConfig, rows: int, width: int, *, seen: int, head: int, logits: bool
) -> CompilerEstimate:
    """Estimates a program of layers over `width` tokens of each row, and the output head over `head` tokens."""
    layers = over_layers(partial(layers_estimate, topology, ops, config, rows, width, seen), config.num_layers)
    return layers.combined(head_estimate(topology, ops, config, rows, head, logits), 1)


def ranges(topology: str, records: list[dict[str, Any]]) -> Sweep:
    """Returns ranges of all programs' cycles over the memory bandwidth and the ratio of kernel time to roofline."""
    chip = chip_of(topology)

    def cycles(one: dict[str, Any], part: str, spec: TpuChip, factor: float) -> float:
        moved = one[f"{part}_read_bytes"] + one[f"{part}_written_bytes"]
        return max(one[f"{part}_cycles"] + (factor - 1) * one[f"{part}_kernel_cycles"], spec.roofline_cycles(moved, 0))

    def predict(changes: Any) -> dict[str, float]:
        spec = chip_with(chip, {name: value for name, value in changes.items() if name != "roofline_time"})
        factor = changes.get("roofline_time", 1.0)
        return {
            f"{one['model']}, {one['rows']} rows: {part}": cycles(one, part, spec, factor) / 1e3
            for one in records
            for part in PROGRAMS
            if f"{part}_cycles" in one
        }

    each = ((one, part) for one in records for part in PROGRAMS if f"{part}_cycles" in one)
    share = max(one[f"{part}_kernel_cycles"] / one[f"{part}_cycles"] for one, part in each)
    memory = {name: value for name, value in ranged(chip).items() if name == "hbm_gb_per_s"}
    basis = Basis(roofline_share=share)
    constants = {**memory, "roofline_time": ROOFLINE_TIME}
    return sweep_constants(predict, constants, DRAWS, unit="kilocycles", basis=basis, compared=False)


def measure(topology: str, rows: int, on_part: Callable[[], None]) -> list[dict[str, Any]]:
    """Estimates the programs of all cases for a number of rows."""
    ops = operations("tpu")
    records = []
    for name, config, length in CASES:
        found = {
            "step": program(topology, ops, config, rows, 1, seen=1, head=1, logits=False),
            "pass": program(topology, ops, config, rows, length, seen=length, head=length, logits=True),
        }
        if config.denoises_blocks:
            found["two"] = program(topology, ops, config, rows, 2 * length, seen=length, head=length, logits=True)
        else:
            found["verify"] = program(topology, ops, config, rows, length, seen=1, head=length, logits=False)
        figures = {f"{part}_{key}": value for part, each in found.items() for key, value in each.record().items()}
        records.append({"chip": topology, "model": name, "rows": rows, "block_length": length, **figures})
        on_part()
    return records


PROGRAMS = {
    "step": "plain step",
    "pass": "pass over a block",
    "two": "pass over two blocks",
    "verify": "verification of a block",
}
METRICS = (
    Metric("model", head="model", words=True),
    Metric("rows", head="rows"),
    Metric("program", head="program", words=True),
    Metric("cycles", head="cycles", form=",.0f", factor=1e-3),
    Metric("memory_cycles", head="HBM", form=",.0f", factor=1e-3),
    Metric("bound_cycles", head="larger", form=",.0f", factor=1e-3),
    Metric("in_steps", head="steps", form=".2f"),
)


def main(*, chip: Several = ("v5e:2x2", "v6e:2x2"), rows: Numbers = (1, 8), json: JsonFile = None) -> None:
    """Estimates passes over blocks and rounds of self-speculation on absent TPUs.

    Args:
        chip: topologies of the TPUs.
        rows: numbers of rows.
        json: file for all figures.
    """
    console = human_console(json)
    records: list[dict[str, Any]] = []
    swept: dict[str, Any] = {}
    with progress(console, len(chip) * len(rows) * len(CASES), "programs compiled") as advance:
        for topology in chip:
            found = [one for count in rows for one in measure(topology, count, advance)]
            records += found
            swept[topology] = ranges(topology, found).record()
    for topology, sweep in swept.items():
        lines = []
        for one in records:
            for part, name in PROGRAMS.items():
                if one["chip"] != topology or f"{part}_cycles" not in one:
                    continue
                figures = {metric.name: one.get(f"{part}_{metric.name}") for metric in METRICS[3:]}
                ratio = one[f"{part}_bound_cycles"] / one["step_bound_cycles"]
                lines.append({"model": one["model"], "rows": one["rows"], "program": name, **figures, "in_steps": ratio})
        layers = " and ".join(map(str, LAYERS_COMPILED))
        title = f"{topology}, kilocycles, context {CONTEXT}, extrapolated from models of {layers} layers"
        print_table(console, FigureTable(title, "", {"": lines}, METRICS, unknown=""))
        print_ranges(console, "ranges of the larger", [sweep])
    write_json(json, {"records": records, "ranges": swept, "jax": jax.__version__})


if __name__ == "__main__":
    app = App(help=__doc__)
    app.default(main)
    app()
