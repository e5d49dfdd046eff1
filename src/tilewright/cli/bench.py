"""`tilewright bench`: benchmarks, each with a table and `--json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import Progress

from tilewright.bench.compare import compare, comparison_figures, environment
from tilewright.cli.common import (
    JsonFile,
    ModelOptions,
    check_json_file,
    human_console,
    packaged_prompts,
    read_prompts,
    write_json,
)
from tilewright.decode.language_model import LanguageModel
from tilewright.decode.sampling import Sampling
from tilewright.report import terminal

app = App(name="bench", help="Benchmarks.")


@app.command
def speculative(
    *,
    data: tuple[Path, ...] = (),
    samples: int = 20,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch_size: int = 1,
    repetitions: int = 5,
    models: ModelOptions = ModelOptions(),
    json_file: JsonFile = None,
) -> None:
    """Decodes the prompts of each file with and without the drafter, alternating, and prints both.

    Parameters
    ----------
    data
        JSONL files (GSM8K, HumanEval, MBPP, MATH-500, MT-Bench, or records with a prompt); by default the held-out code that
        comes with the demo pair.
    samples
        How many prompts of each file, from its beginning.
    batch_size
        Rows decoded together.
    repetitions
        How often each way is timed.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    for name, value in (("samples", samples), ("batch_size", batch_size), ("repetitions", repetitions)):
        if value < 1:
            raise ValueError(f"expected {name} of at least 1, found {value}")
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, seed)
    sets = prompt_sets(data, samples)
    console = human_console(json_file)
    lm = models.load(console)
    if lm.drafting is None:
        raise ValueError("this benchmark needs a drafter; name one with --drafter")
    rows = measure(lm, sets, sampling, batch_size, repetitions, console)
    title = f"temperature {temperature:g}, top-p {top_p:g}, {max_new_tokens} new tokens, batch {batch_size}"
    console.print(terminal.benchmark_table(title, rows))
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    described = {"model": models.model, "batch_size": batch_size, "draft_window": models.draft_window, **settings}
    write_json(json_file, {**environment(lm), **described, "data": rows})


def prompt_sets(data: Sequence[Path], samples: int) -> dict[str, list[str]]:
    """The first `samples` prompts of each file, under its name without the suffix."""
    if not data:
        return {"held-out code": packaged_prompts()[:samples]}
    sets = {path.stem: read_prompts(path)[:samples] for path in data}
    if len(sets) < len(data):
        raise ValueError(f"expected data files of different names, found {', '.join(path.name for path in data)}")
    return sets


def measure(
    lm: LanguageModel, sets: dict[str, list[str]], sampling: Sampling, batch_size: int, repetitions: int, console: Console
) -> dict[str, dict[str, Any]]:
    """The figures of each set of prompts."""
    rows = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for name, prompts in sets.items():
            batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
            task = bar.add_task(name, total=2 * (repetitions + 1))
            both = compare(lm, batches, sampling, repetitions, lambda task=task: bar.advance(task))
            rows[name] = {"prompts": len(prompts), **comparison_figures(lm, both)}
    return rows
