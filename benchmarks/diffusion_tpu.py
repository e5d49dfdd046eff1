"""What a TPU that is not there would do in a step of LLaDA-8B, dense and sparse: compiler estimates, no measurements.

    python benchmarks/diffusion_tpu.py [--chips v5e:1x1 v6e:1x1] [--positions 1024] [--response 256] [--json FILE]

Some layers of the real shapes and the output head for one block of 32, compiled by the chip's own compiler; figures of a layer
are differences between two numbers of layers. Each number of salient positions is a program of its own here. Cycles are those
of the plain XLA version, for the compiler gives none for a Pallas kernel; bytes are told for both.
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
from tilewright.diffusion.programs import DiffusionPrograms, DiffusionShape, DiffusionTable
from tilewright.diffusion.steps import Denoiser, step_span
from tilewright.kernels.select import operations
from tilewright.models.decoder import DecoderConfig
from tilewright.models.diffusion import DiffusionConfig, declare
from tilewright.models.params import abstract

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
"""Numbers of layers whose difference is that of one."""


def compiled(how: argparse.Namespace, chip: str, kernels: str, layers: int, span: str, salient: int | None) -> Compiled:
    """One step; `salient` None is the dense one."""
    config = DiffusionConfig(family="llada", decoder=replace(LLADA_8B, num_layers=layers), mask_token_id=MASK)
    ops = operations("tpu", kernels=kernels)  # type: ignore[arg-type]
    params = abstract(declare(config), jnp.bfloat16)
    programs = DiffusionPrograms(config, ops, params, jnp.bfloat16, DiffusionTable())
    shape = DiffusionShape(1, how.positions, how.response, BLOCK, salient is None, False, False)
    state = jax.eval_shape(lambda: programs.state(shape, [[1]], [Denoising(BLOCK)], programs.allocate(shape)))
    denoiser: Denoiser = programs.denoiser(shape)
    window.bucket_sizes = lambda buckets, rows: (salient or rows,)  # one number of rows, so that what is counted is what runs
    return compile_for(chip, partial(step_span, denoiser, span), params, state, donate=1)  # type: ignore[arg-type]


def figures(how: argparse.Namespace, chip: str, kernels: str, span: str, salient: int | None) -> dict[str, Any]:
    few, more = (compiled(how, chip, kernels, layers, span, salient) for layers in LAYERS)
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
    parser.add_argument("--positions", type=int, default=1024, help="prompt and response together")
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25], help="of salient positions in a window")
    parser.add_argument("--json", type=Path)
    how = parser.parse_args()
    console = Console(width=120)
    rows = []
    heads = ("chip", "step", "salient", "version", "Mcycles a layer", "of dense", "MB a layer", "of dense", "Mcycles besides")
    table = Table(*heads)
    for chip in how.chips:
        for kernels in ("xla", "auto"):
            cases: list[tuple[str, str, int | None]] = [("dense", "whole", None)]
            for span, size in (("whole", how.positions), ("response", how.response)):
                cases += [(span, span, round(share * size)) for share in how.shares]
            base: dict[str, Any] = {}
            for name, span, salient in cases:
                found = figures(how, chip, kernels, span, salient)
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
    if how.json is not None:
        about = {"model": "LLaDA-8B shapes", "dtype": "bfloat16", "jax": jax.__version__, "positions": how.positions}
        how.json.write_text(json.dumps({**about, "response": how.response, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
