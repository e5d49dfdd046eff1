"""Estimates a step and a round of Qwen3.5-4B on an absent TPU. Compiler estimates, not measurements.

    python benchmarks/hybrids_tpu.py [--chips v5e:1x1 v6e:1x1] [--rows 1 8] [--block 16] [--positions 4096] [--json FILE]

The programs have four and eight layers of the real shapes, three of linear attention per layer of attention; their difference
gives the figures of four layers. A step runs one token per row. A round verifies a block of given drafts and commits the
accepted ones. The limit is the minimum number of bytes: weights and states read once, states written once.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rich.console import Console
from rich.table import Table

from tilewright.compiled.aot import Compiled, compile_for, tpu_topology
from tilewright.compiled.hlo import read_module
from tilewright.kernels.select import operations
from tilewright.models import decoder
from tilewright.models.decoder import DecoderConfig
from tilewright.models.delta import DeltaSizes, DeltaState
from tilewright.models.params import abstract
from tilewright.runtime.interfaces import Proposal
from tilewright.runtime.layout import Layout, rows_of
from tilewright.runtime.programs import allocate_caches, empty_state
from tilewright.runtime.rounds import HostDrafts, autoregressive_step, verify_and_extend
from tilewright.runtime.state import Models, Target

QWEN35_4B = DecoderConfig(
    family="qwen3_5_text",
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_layers=32,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    tie_word_embeddings=True,
    max_position_embeddings=262144,
    delta=DeltaSizes(16, 32, 128, 128, 4),
    delta_layers=tuple(n for n in range(32) if n % 4 != 3),
)
"""The text model of huggingface.co/Qwen/Qwen3.5-4B, config.json."""
LAYERS = (4, 8)


def with_layers(layers: int) -> DecoderConfig:
    linear = tuple(n for n in QWEN35_4B.delta_layers if n < layers)
    return replace(QWEN35_4B, num_layers=layers, delta_layers=linear)


def compiled(options: argparse.Namespace, chip: str, rows: int, block: int, layers: int) -> Compiled:
    """Compiles a step if the block is one token, else a round."""
    config = with_layers(layers)
    target = Target(config, operations("tpu"), sampling="greedy")
    layout = Layout.full(rows, options.positions)
    drafter = HostDrafts(block, may_be_idle=False)
    models = Models(abstract(decoder.declare(config), jnp.bfloat16))
    state = jax.eval_shape(lambda: empty_state(layout, *allocate_caches(target, layout, None, jnp.bfloat16)))
    table = jax.ShapeDtypeStruct((1, rows, layout.capacity // layout.page_size), jnp.int32)
    state = jax.eval_shape(lambda state, table: rows_of(state, jnp.arange(rows), table), state, table)
    step: Callable[..., Any] = partial(autoregressive_step, target)

    def run_round(models: Models, state: Any, drafts: Array) -> Any:
        last_tokens = jnp.take_along_axis(state.tokens, state.last_position[:, None], axis=1)
        proposal = Proposal(jnp.concatenate([last_tokens, drafts], axis=1), jnp.full((rows,), block - 1, jnp.int32))
        return verify_and_extend(drafter, target, models, state, proposal)

    device = AbstractDevice(tpu_topology(chip).devices[0].device_kind, 1, "tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):  # the attention kernel reads the kind of the device
        if block == 1:
            return compile_for(chip, step, models, state, donate=1)
        return compile_for(chip, run_round, models, state, jax.ShapeDtypeStruct((rows, block - 1), jnp.int32), donate=1)


def state_bytes(rows: int) -> int:
    assert QWEN35_4B.delta is not None
    state = jax.eval_shape(partial(DeltaState.empty, QWEN35_4B.delta, rows, jnp.bfloat16))
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def copied_states(compiled_program: Compiled, rows: int) -> int:
    """Counts the copies of a whole state in the program."""
    assert QWEN35_4B.delta is not None
    size = rows * prod(QWEN35_4B.delta.state_shape)
    ops = (
        op
        for computation in read_module(compiled_program.hlo).computations.values()
        for op in computation.ops
        if op.opcode == "copy"
    )
    return sum(output.dtype == "f32" and prod(output.dims) == size for op in ops for output in op.outputs)


def weight_bytes(layers: int) -> int:
    return sum(2 * prod(spec.shape) for spec in jax.tree.leaves(decoder.declare(with_layers(layers)).layers))


def figures(options: argparse.Namespace, chip: str, rows: int, block: int) -> dict[str, Any]:
    few, more = (compiled(options, chip, rows, block, layers) for layers in LAYERS)
    weights = weight_bytes(LAYERS[1]) - weight_bytes(LAYERS[0])
    states = 3 * state_bytes(rows)
    traffic_bytes = more.traffic().total - few.traffic().total
    return {
        "chip": chip,
        "rows": rows,
        "block": block,
        "moved_bytes": traffic_bytes,
        "weight_bytes": weights,
        "state_bytes": states,
        "limit_bytes": weights + 2 * states,
        "of_limit": traffic_bytes / (weights + 2 * states),
        "cycles": more.cycles - few.cycles,
        "alias_bytes": more.alias_bytes - few.alias_bytes,
        "temp_bytes": more.temp_bytes,
        "copies": copied_states(more, rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e:1x1", "v6e:1x1"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table("chip", "rows", "program", "MB moved", "limit", "of limit", "states", "copies of states", "Mcycles")
    found = []
    for chip in options.chips:
        for rows in options.rows:
            for block in (1, options.block):
                one = figures(options, chip, rows, block)
                found.append(one)
                print(one, flush=True)
                table.add_row(
                    chip,
                    str(rows),
                    "step" if block == 1 else f"round of {block}",
                    f"{one['moved_bytes'] / 1e6:.0f}",
                    f"{one['limit_bytes'] / 1e6:.0f}",
                    f"{one['of_limit']:.2f}",
                    f"{one['state_bytes'] / 1e6:.1f}",
                    str(one["copies"]),
                    f"{one['cycles'] / 1e6:.2f}",
                )
    Console(width=120).print(table)
    if options.json is not None:
        about = {"model": "Qwen3.5-4B shapes", "dtype": "bfloat16", "jax": jax.__version__, "positions": options.positions}
        options.json.write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
