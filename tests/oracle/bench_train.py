"""Tokens/s of training a decoder: tilewright's step and torch's on transformers' Qwen3 of the same shape, side by side.

Both begin with the same weights and take the same batches: forward, loss, backward, clipping and AdamW, all in one process on
the same cores, in alternating order; the table shows medians. torch runs in float32 and under bfloat16 autocast, with one
thread and with one for each core, with `--compile` through `torch.compile` too, and ratios are to the best of these. Needs the
`oracle` extra, and `--compile` a C++ compiler:

    python tests/oracle/bench_train.py [--layers 12 ...] [--matmul-dtype auto ...] [--clock cpu] [--json FILE]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench_generate import machine, pin

from tilewright.compiled.allocator import keep_freed_memory

Step = Callable[[], float]
"""Takes one training step; its loss."""

RATE = 6e-4
DECAY = 0.01


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "hidden": 320, "intermediate": 768, "heads": 5, "kv-heads": 1, "head-dim": 64, "vocab": 4096}
    for name, value in {**sizes, "batch": 8, "length": 512, "steps": 1, "repetitions": 5, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--matmul-dtype", nargs="+", default=["auto"], choices=["auto", "float32", "bfloat16", "xla"])
    parser.add_argument("--torch", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="torch.compile beside eager torch")
    parser.add_argument("--torch-threads", type=int, nargs="+", help="by default one, and one for each core")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for a machine with other work"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def batches(args: argparse.Namespace) -> list[np.ndarray]:
    """Random tokens, `[batch, length + 1]` each; all sides see them in turn."""
    return list(np.random.default_rng(0).integers(0, args.vocab, (4, args.batch, args.length + 1)).astype(np.int32))


def config_of(args: argparse.Namespace) -> Any:
    from tilewright.models.decoder import config_from_hf

    return config_from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": args.vocab,
            "hidden_size": args.hidden,
            "intermediate_size": args.intermediate,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads,
            "head_dim": args.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": args.length,
            "eos_token_id": 0,
        }
    )


def own_side(args: argparse.Namespace, matmul_dtype: str, params: Any) -> Step:
    """One step as `tilewright train lm` takes it; "xla" leaves everything to XLA, the loss in blocks too."""
    import jax
    import jax.numpy as jnp

    from tilewright.kernels import select
    from tilewright.train.lm import hidden_matrices, next_token_loss
    from tilewright.train.step import train_step
    from tilewright.train.text import TextOptions, make_optimizer

    options = TextOptions(steps=1000, batch_size=args.batch, sequence_length=args.length, learning_rate=RATE, warmup=0.0)
    ops = select.PLAIN if matmul_dtype == "xla" else select.training_operations(matmul_dtype)
    config = config_of(args)
    optimizer = make_optimizer(options, hidden_matrices)
    step = train_step(lambda params, _, batch: next_token_loss(config, ops, params, *batch), optimizer)
    params = jax.tree.map(jnp.copy, params)
    state = [params, optimizer.init(params)]
    feed = batches(args)
    key = jax.random.key(0)
    in_loss = jnp.ones((args.batch, args.length + 1), bool)
    batch_number = 0

    def run() -> float:
        nonlocal batch_number
        for _ in range(args.steps):
            *state[:], figures = step(*state, (jnp.asarray(feed[batch_number % len(feed)]), in_loss), key)
            batch_number += 1
        return float(jax.block_until_ready((state, figures["loss"]))[1])

    return run


def torch_side(args: argparse.Namespace, dtype: str, threads: int, folder: Path, compiled: bool) -> Step:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext():
            logits = model(tokens[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    if compiled:
        loss_of = torch.compile(loss_of)
    feed = [torch.from_numpy(tokens.astype(np.int64)) for tokens in batches(args)]
    batch_number = 0

    def run() -> float:
        nonlocal batch_number
        torch.set_num_threads(threads)
        for _ in range(args.steps):
            tokens = feed[batch_number % len(feed)]
            batch_number += 1
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss.item()

    return run


def timed(name: str, step: Step, tokens: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Tokens/s, and the loss."""
    began = clock()
    loss = step()
    speed = tokens / (clock() - began)
    print(f"{name}: {speed:,.0f} tokens/s, loss {loss:.4f}", file=sys.stderr)
    return speed, loss


def measure(args: argparse.Namespace, threads: int, folder: Path) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from tilewright.compiled.timing import alternate, medians, quotients
    from tilewright.kernels import native
    from tilewright.kernels.select import training_operations
    from tilewright.models.checkpoint import save_params
    from tilewright.models.decoder import config_to_hf, declare
    from tilewright.models.params import count, initialise

    config = config_of(args)
    params = initialise(declare(config), jax.random.key(0))
    save_params(folder, config_to_hf(config), declare(config), params, jnp.float32)
    sides = {f"tilewright {matmul_dtype}": own_side(args, matmul_dtype, params) for matmul_dtype in args.matmul_dtype}
    for dtype, compiled in product(args.torch, (False, True) if args.compile else (False,)):
        name = f"torch{'.compile' * compiled} {dtype}"
        for n in args.torch_threads or sorted({1, threads}):
            sides[f"{name}, threads {n}"] = torch_side(args, dtype, n, folder, compiled)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    runs = {name: partial(timed, name, step, args.batch * args.length * args.steps, clock) for name, step in sides.items()}
    times = alternate(runs, args.repetitions, warm=True)
    speeds = {name: [speed for speed, _ in each] for name, each in times.items()}
    middle = medians(speeds)
    best = max((name for name in sides if name.startswith("torch")), key=lambda name: middle[name])
    ours = [name for name in sides if name.startswith("tilewright")]
    return {
        **machine(threads),
        "instruction_set": native.kernels().isa,
        "default_products": training_operations("auto").name,
        "shape": {k: v for k, v in vars(args).items() if k not in ("json", "matmul_dtype", "torch", "torch_threads")},
        "parameters": count(declare(config)),
        "tokens_per_s": middle,
        "best_torch": best,
        "ratio": {name: middle[name] / middle[best] for name in ours},
        "ratio_range": {name: quotients(speeds[name], speeds[best]).range for name in ours},
        "last_loss": {name: each[-1][1] for name, each in times.items()},
        "all_tokens_per_s": speeds,
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    shape = report["shape"]
    table = Table(
        title=f"Training, AdamW, {report['parameters']:,} parameters, batch {shape['batch']} × {shape['length']}",
        caption=f"{report['cpu']}, {report['instruction_set']}, {report['threads']} cores; medians of {shape['repetitions']} "
        f"alternating repetitions; ratio to {report['best_torch']}",
    )
    for column in ("side", "tokens/s", "ratio", "loss"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, speed in report["tokens_per_s"].items():
        ratio = f"{report['ratio'][name]:.2f}" if name in report["ratio"] else ""
        table.add_row(name, f"{speed:,.0f}", ratio, f"{report['last_loss'][name]:.4f}")
    Console().print(table)


def main() -> None:
    import tempfile

    args = arguments()
    threads = pin(args.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_freed_memory()  # as `tilewright train` does; torch allocates from the same heap
    with tempfile.TemporaryDirectory() as folder:
        report = measure(args, threads, Path(folder))
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
