"""Compiles the train step of a DFlash 2 drafter for Qwen3-4B over a slice of absent TPUs, and prints its memory per chip.

    python benchmarks/drafter_memory_tpu.py --chip v5p:2x2x1 --json drafter.json

The step is that of `train drafter --kind dflash2 --mesh fsdp=4 --compute-dtype bfloat16`, whose collectives XLA's partitioner
places. The target is frozen and in float32, as the command loads it. Figures are the compiler's.
"""

import argparse
import json
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tilewright.compiled.aot import compile_for, tpu_topology
from tilewright.compiled.hlo import read_module
from tilewright.hardware.tpu import chip_of
from tilewright.models import decoder, dflash2
from tilewright.models.dflash2 import DFlash2Config
from tilewright.models.params import abstract, count
from tilewright.models.published_configs import DFLASH_B16, MODELS
from tilewright.train.dflash2 import DFlash2Options, drafter_losses, hidden_matrices
from tilewright.train.drafter import Frozen, draw_blocks
from tilewright.train.step import TrainingPlacement, cast_loss, compiled_step, data_mesh, state_shardings
from tilewright.train.text import TextOptions, make_optimizer

TARGET = MODELS["qwen3-4b"]
DRAFTER = DFlash2Config(**vars(DFLASH_B16), conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
"""Published sizes of DFlash drafters for this target, with the convolutions and the selector of the published DFlash 2."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v5p:2x2x1", help="TPU topology, whose chips are all along fsdp")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a step")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=32, help="draft blocks per sequence")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()

    devices = tpu_topology(chosen.chip).devices
    placement = TrainingPlacement(data_mesh({"fsdp": len(devices)}, devices))
    placement.check_batch(chosen.batch_size)
    options = TextOptions(compute_dtype="bfloat16", sequence_length=chosen.sequence_length)
    drafting = DFlash2Options(anchors=chosen.anchors)
    ops = placement.ops(options, "tpu")
    specs = dflash2.declare(DRAFTER)
    update = make_optimizer(options, hidden_matrices)

    def loss(params: Any, frozen: Any, drawn: Any) -> Any:
        backbone, selector, total = drafter_losses(TARGET, DRAFTER, drafting, ops, params, frozen, *drawn)
        return backbone + drafting.selector_weight * selector, total

    def draw(frozen: Any, batch: Any, key: Any) -> Any:
        return batch, draw_blocks(TARGET, DRAFTER, drafting, batch, key)

    step = compiled_step(cast_loss(options, loss), update, draw, placement, specs)
    sharded = partial(abstract, dtype=jnp.float32)
    params = sharded(specs, shardings=placement.shardings(specs))
    target_specs = decoder.declare(TARGET)
    frozen = Frozen(sharded(target_specs, shardings=placement.shardings(target_specs)))
    places = state_shardings(placement, specs, update)
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(update.init, params), places
    )
    shape = (chosen.batch_size, chosen.sequence_length)
    batch = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=placement.batch_sharding) for dtype in (jnp.int32, jnp.bool_))
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(placement.batch_sharding.mesh, PartitionSpec()))
    started_at = time.perf_counter()
    found = compile_for(chosen.chip, step, params, state, frozen, batch, key)
    figures = {
        "chip": chosen.chip,
        "target": "qwen3-4b",
        "target_parameters": count(target_specs),
        "drafter_parameters": count(specs),
        "batch_rows": chosen.batch_size,
        "positions": chosen.sequence_length,
        "anchors": chosen.anchors,
        "peak_bytes": found.peak_bytes,
        "argument_bytes": found.argument_bytes,
        "temporary_bytes": found.temp_bytes,
        "memory_bytes": 1e9 * chip_of(chosen.chip).hbm_gb,
        "largest_arrays": largest(found.hlo),
        "compile_s": time.perf_counter() - started_at,
    }
    print(json.dumps(figures, indent=2))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


def largest(hlo: str, most: int = 8) -> list[str]:
    """Returns the shapes of the largest arrays of a program, with their sizes in GiB."""
    arrays = {
        (array.dtype, array.dims): array.device_bytes
        for each in read_module(hlo).computations.values()
        for op in each.ops
        for array in op.outputs
        if prod(array.dims) > 1
    }
    order = sorted(arrays, key=lambda one: -arrays[one])[:most]
    return [f"{dtype}{list(dims)} {arrays[dtype, dims] / 2**30:.2f}" for dtype, dims in order]


if __name__ == "__main__":
    main()
