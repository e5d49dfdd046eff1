"""Autoregressive tokens/s of tilewright and of transformers' `generate`, side by side on the same weights.

Greedy, no early end, all in one process on the same cores. One repetition runs every side once, in alternating order; the table
shows medians, for decoding alone: what comes before a call's first step (prefill) is left out of it, and is part of the calls'
own tokens/s in the JSON. transformers runs with one thread and with one for each core, and ratios are to the better of the two:
torch's threads wait for one another in a busy loop, so that on a machine with other work two of them can be ten times slower
than one. Needs the `oracle` extra:

    python tests/oracle/bench_generate.py [--model FOLDER] [--json FILE]
    python tests/oracle/bench_generate.py --random qwen3-0.6b --dtype bfloat16 --also int8 xla --batches 1 4 --new-tokens 32

The second form writes a checkpoint with random weights and the shape of a published model to a temporary folder (1.2 GB) and
takes up to 6 GB of memory. Such a model soon repeats one token: equal tokens say little there.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Their source is the text of the prompts; the demo pair was not trained on it.
MODULES = ("calendar", "configparser", "csv", "fractions", "heapq", "queue", "statistics", "textwrap")

# huggingface.co/Qwen/Qwen3-0.6B, config.json
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "family": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    }
}


class Call(NamedTuple):
    """What one call gave.

    Attributes:
        tokens: generated for each prompt.
        decode_tokens_per_s: of all rows, without the prefill.
    """

    tokens: list[list[int]]
    decode_tokens_per_s: float


Generate = Callable[[list[list[int]]], Call]
"""Takes prompts of one length."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, help="folder of the model (default: the demo target)")
    which.add_argument("--random", choices=SHAPES, help="a model of this shape with random weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of both sides' weights")
    parser.add_argument(
        "--also", choices=["int8", "xla"], nargs="+", default=[], help="also with 8-bit weights, without kernels"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], choices=range(1, len(MODULES) + 1), metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128, help="at least 2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU cores given to both (default: 2)")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: transformers' first token belongs to the prefill")
    return args


def pin(threads: int) -> int:
    """Keeps this process on `threads` cores, before JAX sizes its thread pool by them. Returns how many it got."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    return len(cores)


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"the standard library here has no source of {module}")
    return Path(spec.origin).read_text(encoding="utf-8")


@contextmanager
def model_folder(model: Path | None, random: str | None) -> Iterator[Path]:
    """The folder asked for; one with random weights is gone afterwards. Its tokenizer is the demo target's."""
    from tilewright.models.hub import PACKAGED

    if random is None:
        yield model or PACKAGED["demo"]
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / f"{random}-random"
        write_random(folder, SHAPES[random])
        shutil.copy(PACKAGED["demo"] / "tokenizer.json", folder)
        yield folder


def write_random(folder: Path, shape: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp

    from tilewright.models.checkpoint import save_params
    from tilewright.models.decoder import DecoderConfig, config_to_hf, declare
    from tilewright.models.params import initialise

    config = DecoderConfig(**shape)
    specs = declare(config)
    save_params(folder, config_to_hf(config), specs, initialise(specs, jax.random.key(0), jnp.bfloat16), jnp.bfloat16)


def tilewright_side(lm: Any, new_tokens: int) -> Generate:
    import tilewright as tw

    sampling = tw.Sampling(max_new_tokens=new_tokens, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> Call:
        generation = lm.generate(prompts, sampling)
        return Call([result.tokens for result in generation], generation.tokens_per_s)

    return generate


class Clock:
    """A streamer that notes when tokens came. The prompt comes first, then the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def transformers_sides(folder: Path, dtype: str, new_tokens: int, threads: Sequence[int]) -> dict[str, Generate]:
    """One side for each number of threads, all with the same model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    # No end at all, rather than `min_new_tokens`: that would forbid the end token, which the other side may well generate.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
    )

    def generate(threads: int, prompts: list[list[int]]) -> Call:
        torch.set_num_threads(threads)
        tokens = torch.tensor(prompts)
        clock = Clock()
        out = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), streamer=clock)
        # The first token is the prefill's: each of the others took a step.
        steps = len(clock.times) - 2
        seconds = clock.times[-1] - clock.times[1]
        return Call(out[:, tokens.shape[1] :].tolist(), len(prompts) * steps / seconds)

    return {f"transformers_threads_{n}": partial(generate, n) for n in threads}


def timed(name: str, generate: Generate, prompts: list[list[int]], new_tokens: int) -> tuple[float, Call]:
    """Tokens per second of a whole call, prefill included, and what it gave."""
    began = time.perf_counter()
    call = generate(prompts)
    seconds = time.perf_counter() - began
    print(f"batch {len(prompts)}, {name}: {call.decode_tokens_per_s:.1f} tokens/s", file=sys.stderr)
    if any(len(row) != new_tokens for row in call.tokens):
        raise RuntimeError(f"expected {new_tokens} tokens in each row, found {[len(row) for row in call.tokens]}")
    return len(prompts) * new_tokens / seconds, call


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two rows have in common before they differ."""
    return next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))


def compare(sides: dict[str, Generate], prompts: list[list[int]], new_tokens: int, repetitions: int) -> dict[str, Any]:
    """Runs all sides in turns; the first call of each compiles or warms up and is not counted."""
    from tilewright.compiled.timing import alternate, medians, quotients

    tokens = {name: timed(name, generate, prompts, new_tokens)[1].tokens for name, generate in sides.items()}
    runs = {name: partial(timed, name, generate, prompts, new_tokens) for name, generate in sides.items()}
    times = alternate(runs, repetitions)
    whole = {name: [speed for speed, _ in calls] for name, calls in times.items()}
    decode = {name: [call.decode_tokens_per_s for _, call in calls] for name, calls in times.items()}
    middle = medians(decode)
    best = max((name for name in sides if name.startswith("transformers")), key=lambda name: middle[name])
    ours = [name for name in sides if name.startswith("tilewright")]
    return {
        "batch": len(prompts),
        "decode_tokens_per_s": middle,
        "call_tokens_per_s": medians(whole),
        "best_transformers": best,
        "decode_ratio": {name: middle[name] / middle[best] for name in ours},
        "decode_ratio_range": {name: quotients(decode[name], decode[best]).range for name in ours},
        "tokens_before_first_difference": {
            name: [common(a, b) for a, b in zip(tokens[name], tokens[best], strict=True)] for name in ours
        },
        "all_decode_tokens_per_s": decode,
        "all_call_tokens_per_s": whole,
    }


def machine(threads: int) -> dict[str, Any]:
    import jax
    import torch
    import transformers

    import tilewright

    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    packages = (tilewright, jax, torch, transformers)
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": threads,
        "platform": jax.default_backend(),
        "versions": {"python": platform.python_version()} | {package.__name__: package.__version__ for package in packages},
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    for case in report["cases"]:
        table = Table(
            title=f"Autoregressive decoding, greedy, {report['dtype']}, batch {case['batch']}",
            caption=f"{report['cpu']}, {report['threads']} cores; medians of {report['repetitions']} alternating repetitions; "
            f"{report['prompt_tokens']} + {report['new_tokens']} tokens; {report['parameters']:,} parameters",
        )
        for column in ("side", "tokens/s", "ratio", "same tokens until"):
            table.add_column(column, justify="left" if column == "side" else "right")
        for name, speed in case["decode_tokens_per_s"].items():
            ratio = case["decode_ratio"].get(name)
            same = [str(n) for n in case["tokens_before_first_difference"].get(name, [])]
            table.add_row(name.replace("_", " "), f"{speed:.1f}", "" if ratio is None else f"{ratio:.2f}", " ".join(same))
        Console().print(table)


def measure(args: argparse.Namespace, folder: Path, threads: int) -> dict[str, Any]:
    import tilewright as tw
    from tilewright.models.decoder import declare
    from tilewright.models.params import count

    settings: dict[str, dict[str, str]] = {"tilewright": {}}
    known = {"int8": {"weights": "int8"}, "xla": {"kernels": "xla"}}
    settings |= {f"tilewright_{name}": known[name] for name in args.also}
    models = {name: tw.load(folder, dtype=args.dtype, **each) for name, each in settings.items()}
    lm = models["tilewright"]
    prompts = [lm.encode(source(module))[: args.prompt_tokens] for module in MODULES]
    sides = {name: tilewright_side(model, args.new_tokens) for name, model in models.items()}
    sides |= transformers_sides(folder, args.dtype, args.new_tokens, sorted({1, threads}))
    return {
        **machine(threads),
        "model": folder.name,
        "parameters": count(declare(lm.target)),
        "dtype": args.dtype,
        "kernels": {name: model.kernels for name, model in models.items()},
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repetitions": args.repetitions,
        "cases": [compare(sides, prompts[:batch], args.new_tokens, args.repetitions) for batch in args.batches],
    }


def main() -> None:
    args = arguments()
    threads = pin(args.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    with model_folder(args.model, args.random) as folder:
        report = measure(args, folder, threads)
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
