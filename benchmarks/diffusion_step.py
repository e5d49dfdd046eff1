"""Times dense and sparse denoising steps on this machine, at the shapes of real models with random weights.

    python benchmarks/diffusion_step.py [--model llada-8b] [--layers 2] [--positions 512] [--response 256] [--json FILE]

A pass runs some layers without the output head: densely over the whole sequence (no caches), or over the whole sequence or the
response with a given share of salient positions in every layer. The passes alternate. The table has medians and their ratios.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tilewright.compiled.machine import chip_name
from tilewright.diffusion.window import Window, allocate, run_window
from tilewright.kernels.select import operations
from tilewright.models import decoder, diffusion
from tilewright.models.decoder import DecoderConfig
from tilewright.models.diffusion import DiffusionConfig
from tilewright.models.params import DTYPES, initialise

VOCAB = 1024
"""Rows of the embedding; a pass needs no more of the vocabulary."""
MODELS = {
    # huggingface.co/GSAI-ML/LLaDA-8B-Instruct, config.json
    "llada-8b": DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    # huggingface.co/Dream-org/Dream-v0-Instruct-7B, config.json
    "dream-7b": DecoderConfig(
        family="qwen2",
        vocab_size=VOCAB,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    # The small model of `tilewright train diffusion`.
    "small": DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=1024,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=48,
        tie_word_embeddings=True,
    ),
}


def window_of(positions: int, first: int, share: float) -> Window:
    """Returns the window from `first` to the end, with a share of the positions salient in every layer."""
    size = positions - first
    changed = np.zeros((1, size), bool)
    changed[0, np.random.default_rng(0).permutation(size)[: round(share * size)]] = True
    whole = first == 0
    return Window(
        positions=np.arange(first, positions, dtype=np.int32)[None],
        lengths=np.asarray([positions], np.int32),
        active=np.ones((1, size), bool),
        changed=changed,
        catches_up=np.zeros((1, size), np.int32) if whole else None,
        tau=np.full(1, -2, np.float32),  # below every cosine: only changed positions are salient
        first_all=np.zeros(1, bool),
        keep_changed=np.ones(1, bool),
        renews=np.ones(1, bool) if whole else None,
    )


def compiled_passes(options: argparse.Namespace, config: DecoderConfig) -> dict[str, Callable[[], Any]]:
    """Returns each compiled pass."""
    dtype = DTYPES[options.dtype]
    ops = operations()
    made = DiffusionConfig(family="llada" if config.family == "llama" else "dream", decoder=config, mask_token_id=0)
    params = jax.jit(partial(initialise, diffusion.declare(made), dtype=dtype))(jax.random.key(0))
    prepared = decoder.prepare(config, ops, params)
    tokens = np.random.default_rng(1).integers(1, VOCAB, (1, options.positions)).astype(np.int32)
    valid = np.asarray([options.positions], np.int32)
    dense = jax.jit(lambda params: diffusion.forward_full(made, ops, params, tokens, valid).hidden)
    found: dict[str, Callable[[], Any]] = {"dense": lambda: dense(prepared)}
    state = {"caches": allocate(config, 1, options.positions, dtype)}

    def sparse(first: int, share: float) -> Callable[[], Any]:
        window = window_of(options.positions, first, share)

        def passed(params: Any, caches: Any) -> Any:
            return run_window(config, ops, params, tokens, window, caches)[:2]

        run = jax.jit(passed, donate_argnums=1)

        def run_once() -> Any:
            x, state["caches"] = run(prepared, state["caches"])
            return x

        return run_once

    for share in options.shares:
        found[f"whole, {share:.0%} salient"] = sparse(0, share)
        found[f"response, {share:.0%} salient"] = sparse(options.positions - options.response, share)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llada-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--positions", type=int, default=512, help="length of prompt and response together")
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    passes = compiled_passes(options, replace(MODELS[options.model], num_layers=options.layers))
    for run in passes.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in track(range(options.repetitions), "timing", console=console, transient=True):
        for name, run in passes.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - start) / options.layers)
    medians = {name: statistics.median(each) for name, each in times.items()}
    table = Table("pass", "ms a layer", "times as fast as dense")
    for name, seconds in medians.items():
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{medians['dense'] / seconds:.2f}")
    console.print(table)
    if options.json is not None:
        about = {"chip": chip_name(), "jax": jax.__version__, **{k: v for k, v in vars(options).items() if k != "json"}}
        rows = [{"pass": k, "seconds_per_layer": v, "speedup": medians["dense"] / v} for k, v in medians.items()]
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
