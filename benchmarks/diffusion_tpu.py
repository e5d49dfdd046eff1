"""Estimates dense and sparse denoising steps of LLaDA-8B on an absent TPU. Compiler estimates, not measurements.

    python benchmarks/diffusion_tpu.py [--chips v5e:1x1 v6e:1x1] [--positions 1024] [--response 256] [--json FILE]

The compiler of the chip compiles some layers of the real shapes and the output head for one block of 32. Figures per layer are
differences between two numbers of layers. Each number of salient positions has its own program. The compiler estimates no
cycles of Pallas kernels, so cycles are comparable for the XLA version only; bytes cover both versions.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from tilewright.compiled.aot import Compiled, compile_for
from tilewright.diffusion import window
from tilewright.diffusion.options import Denoising
from tilewright.diffusion.programs import DenoisingPrograms, DiffusionShape, DiffusionTable, RequestKinds
from tilewright.diffusion.steps import Denoiser, step_span
from tilewright.kernels.select import operations
from tilewright.models.decoder import DecoderConfig
from tilewright.models.diffusion import DiffusionConfig, declare
from tilewright.models.params import abstract
from tilewright.runtime.state import Target

LLADA_8B = DecoderConfig(
    family="llama",
    vocab_size=126464,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=4096,
    eos_token_ids=(126081,),
)
"""huggingface.co/GSAI-ML/LLaDA-8B-Instruct, config.json."""
MASK = 126336
BLOCK = 32
LAYERS = (1, 2)
"""Two numbers of layers; their difference gives the figures of a layer."""


def compiled(options: argparse.Namespace, chip: str, kernels: str, layers: int, span: str, salient: int | None) -> Compiled:
    """Compiles one step, a dense one for `salient` None."""
    config = DiffusionConfig(family="llada", decoder=replace(LLADA_8B, num_layers=layers), mask_token_id=MASK)
    ops = operations("tpu", kernels=kernels)  # type: ignore[arg-type]
    params = abstract(declare(config), jnp.bfloat16)
    shape = DiffusionShape(1, options.positions, options.response, BLOCK, salient is None, False, False)
    table = DiffusionTable((1,), (options.positions,), (options.response,), (BLOCK,))
    kinds = RequestKinds(shape.dense, shape.narrow)
    programs = DenoisingPrograms(config, Target(config.decoder, ops), params, jnp.bfloat16, table, kinds, options.positions)
    state = jax.eval_shape(lambda: programs.batch(shape, [[1]], [Denoising(BLOCK)]))
    denoiser: Denoiser = programs.denoiser(shape)
    # A single number of rows, so that the counted program is the one that runs.
    window.bucket_sizes = lambda buckets, rows: (salient or rows,)
    return compile_for(chip, partial(step_span, denoiser, span), params, state, donate=1)  # type: ignore[arg-type]


def figures(options: argparse.Namespace, chip: str, kernels: str, span: str, salient: int | None) -> dict[str, Any]:
    few, more = (compiled(options, chip, kernels, layers, span, salient) for layers in LAYERS)
    steps = LAYERS[1] - LAYERS[0]
    return {
        "cycles_per_layer": (more.cycles - few.cycles) / steps,
        "hbm_bytes_per_layer": (more.traffic().total - few.traffic().total) / steps,
        "cycles_besides": few.cycles - (more.cycles - few.cycles) * LAYERS[0] / steps,
        "without_cycles": sorted({name.split(" ")[-1] for name in more.without_cycles}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e:1x1", "v6e:1x1"])
    parser.add_argument("--positions", type=int, default=1024, help="length of prompt and response together")
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25], help="shares of salient positions in a window")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    rows = []
    heads = ("chip", "step", "salient", "version", "Mcycles a layer", "of dense", "MB a layer", "of dense", "Mcycles besides")
    table = Table(*heads)
    for chip in options.chips:
        for kernels in ("xla", "auto"):
            cases: list[tuple[str, str, int | None]] = [("dense", "whole", None)]
            for span, size in (("whole", options.positions), ("response", options.response)):
                cases += [(span, span, round(share * size)) for share in options.shares]
            base: dict[str, Any] = {}
            for name, span, salient in cases:
                found = figures(options, chip, kernels, span, salient)
                base = base or found
                ratios = [found[key] / base[key] for key in ("cycles_per_layer", "hbm_bytes_per_layer")]
                rows.append({"chip": chip, "kernels": kernels, "step": name, "salient_positions": salient, **found})
                cycles = f"{found['cycles_per_layer'] / 1e6:.3f}"
                moved = f"{found['hbm_bytes_per_layer'] / 1e6:.0f}"
                version = "XLA" if kernels == "xla" else "Pallas"
                besides = f"{found['cycles_besides'] / 1e6:.2f}"
                shares = [f"{ratio:.2f}" for ratio in ratios]
                table.add_row(chip, name, str(salient or "all"), version, cycles, shares[0], moved, shares[1], besides)
    console.print(table)
    if options.json is not None:
        about = {"model": "LLaDA-8B shapes", "dtype": "bfloat16", "jax": jax.__version__, "positions": options.positions}
        options.json.write_text(json.dumps({**about, "response": options.response, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
