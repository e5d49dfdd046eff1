"""Autoregressive tokens/s of tilewright and of transformers' `generate`, side by side on the same weights.

Greedy, float32, no early end, both in one process on the same cores; each time is that of a whole call, prefill included. One
repetition runs every side once, in alternating order; the table shows medians. transformers runs with one thread and with one
for each core, and the ratio is to the better of the two: torch's threads wait for one another in a busy loop, so that on a
machine with other work two of them can be ten times slower than one. Needs the `oracle` extra:

    python tests/oracle/bench_generate.py [--model FOLDER] [--json FILE]
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Their source is the text of the prompts; the demo pair was not trained on it.
MODULES = ("calendar", "configparser", "csv", "fractions", "heapq", "queue", "statistics", "textwrap")

Generate = Callable[[list[list[int]]], list[list[int]]]
"""From prompts of one length to the tokens generated for each."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (default: the demo target)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], choices=range(1, len(MODULES) + 1), metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU cores given to both (default: 2)")
    return parser.parse_args()


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


def tilewright_side(lm: Any, new_tokens: int) -> Generate:
    import tilewright as tw

    sampling = tw.Sampling(max_new_tokens=new_tokens, ignore_eos=True)
    return lambda prompts: [result.tokens for result in lm.generate(prompts, sampling)]


def transformers_sides(folder: Path, new_tokens: int, threads: Sequence[int]) -> dict[str, Generate]:
    """One side for each number of threads, all with the same model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # No end at all, rather than `min_new_tokens`: that would forbid the end token, which the other side may well generate.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0
    )

    def generate(threads: int, prompts: list[list[int]]) -> list[list[int]]:
        torch.set_num_threads(threads)
        tokens = torch.tensor(prompts)
        out = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        return out[:, tokens.shape[1] :].tolist()

    return {f"transformers_threads_{n}": partial(generate, n) for n in threads}


def timed(generate: Generate, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of one call, and the tokens."""
    began = time.perf_counter()
    tokens = generate(prompts)
    seconds = time.perf_counter() - began
    if any(len(row) != new_tokens for row in tokens):
        raise RuntimeError(f"expected {new_tokens} tokens in each row, found {[len(row) for row in tokens]}")
    return len(prompts) * new_tokens / seconds, tokens


def compare(sides: dict[str, Generate], prompts: list[list[int]], new_tokens: int, repetitions: int) -> dict[str, Any]:
    """Runs both sides in turns; the first call of each compiles or warms up and is not counted."""
    tokens = {name: timed(generate, prompts, new_tokens)[1] for name, generate in sides.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        order = list(sides) if repetition % 2 == 0 else list(reversed(sides))
        for name in order:
            speeds[name].append(timed(sides[name], prompts, new_tokens)[0])
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(medians.keys() - {"tilewright"}, key=lambda name: medians[name])
    same = sum(a == b for a, b in zip(tokens["tilewright"], tokens[best], strict=True))
    return {
        "batch": len(prompts),
        "tokens_per_s": medians,
        "best_transformers": best,
        "ratio": medians["tilewright"] / medians[best],
        "equal_rows": same,
        "all_tokens_per_s": speeds,
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

    table = Table(
        title="Autoregressive tokens/s, greedy, float32",
        caption=f"{report['cpu']}, {report['threads']} cores; medians of {report['repetitions']} alternating repetitions; "
        f"{report['prompt_tokens']} + {report['new_tokens']} tokens; {report['parameters']:,} parameters",
    )
    sides = list(report["cases"][0]["tokens_per_s"])
    for column in ("batch", *(name.replace("_", " ") for name in sides), "ratio to the better", "equal rows"):
        table.add_column(column, justify="right")
    for case in report["cases"]:
        speeds = [f"{case['tokens_per_s'][name]:.1f}" for name in sides]
        table.add_row(str(case["batch"]), *speeds, f"{case['ratio']:.2f}", f"{case['equal_rows']} of {case['batch']}")
    Console().print(table)


def main() -> None:
    args = arguments()
    threads = pin(args.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"

    import tilewright as tw
    from tilewright.models.decoder import declare
    from tilewright.models.params import count

    if args.model is None:
        from tilewright.models.hub import PACKAGED

        args.model = PACKAGED["demo"]
    lm = tw.load(args.model)
    prompts = [lm.encode(source(module))[: args.prompt_tokens] for module in MODULES]
    sides = {
        "tilewright": tilewright_side(lm, args.new_tokens),
        **transformers_sides(args.model, args.new_tokens, sorted({1, threads})),
    }
    report = {
        **machine(threads),
        "model": args.model.name,
        "parameters": count(declare(lm.target)),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repetitions": args.repetitions,
        "cases": [compare(sides, prompts[:batch], args.new_tokens, args.repetitions) for batch in args.batches],
    }
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
