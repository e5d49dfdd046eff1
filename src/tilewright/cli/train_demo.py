"""`tilewright train demo`, which makes the packaged models again, and `train evaluate`, which measures others by their text."""

import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from cyclopts import App, Parameter
from rich.console import Console

from tilewright.cli.common import DEMO, given, keep_programs
from tilewright.cli.options import CompileCache, check_least
from tilewright.cli.outputs import JsonFile, human_console, progress_console, whole_file, write_json
from tilewright.cli.train import check_out
from tilewright.cli.train_drafter import drafter
from tilewright.compiled.machine import chip_name
from tilewright.models import hub
from tilewright.models.checkpoint import CONFIG, load_decoder, read_config
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.demo import DRAFTERS, TARGET_OPTIONS, train_demo
from tilewright.train.demo_text import demo_documents, held_out_text
from tilewright.train.evaluate import evaluate_target
from tilewright.train.records import Records

SMOLLM2 = "smollm2-dflash2"
RECORDS = Path("benchmarks/training/smollm2-records.npz.xz")
FIRST_RECORDS = 9617
AGAIN = 2400
"""Number of records, from the first in that file, that the first part of the training of SmolLM2's drafter reads, the held-out
ones with them; and how many of these the second part reads again beside all that come behind them."""
RECIPE: dict[str, Any] = {
    "target": "smollm2-135m",
    "kind": "dflash2",
    "layers": 2,
    "selector-rank": 64,
    "draft-vocab": 8192,
    "mask-token-id": 3,
    "taps": (1, 8, 15, 21, 28),
    "dpace": 0.5,
    "anchors": 96,
    "batch-size": 32,
    "sequence-length": 512,
    "compute-dtype": "bfloat16",
    "optimizer": "muon",
    "muon-learning-rate": 0.02,
    "learning-rate": "1e-3",
    "schedule": "wsd",
    "cooldown": 0.3,
    "dtype": "bfloat16",
    "steps": 2763,
}
"""Options of `tilewright train drafter` in the first part of that training. The model card has the same command."""
SECOND: dict[str, Any] = {
    "block-size": 8,
    "batch-size": 16,
    "sequence-length": 384,
    "compute-dtype": "float32",
    "muon-learning-rate": 0.006,
    "learning-rate": "3e-4",
    "cooldown": 0.4,
    "steps": 300,
}
"""Options that differ in the second part, on broader text, which starts from the first one's drafter."""


def demo(
    model: Literal["demo", "smollm2-dflash2"] = DEMO,
    *,
    gsm8k: Annotated[Path | None, Parameter(name="--gsm8k")] = None,
    records: Path | None = None,
    out: Path | None = None,
    steps: int | None = None,
    drafter_steps: int | None = None,
    batch_size: int | None = None,
    save_every: int | None = None,
    compile_cache: CompileCache = True,
    json_file: JsonFile = None,
) -> None:
    """Repeats the training of packaged models: the demo's target and drafters, or SmolLM2's drafter.

    The demo takes 25 minutes on two CPU cores. SmolLM2's drafter is trained in two parts, as by `tilewright train drafter` with
    the options that its model card has. The first took 272 seconds on an H100, and would take about 40 hours on two CPU cores,
    which --drafter-steps shortens. The second took an hour on two cores.

    Args:
        model: "demo", the target with its drafters, or "smollm2-dflash2", the drafter for smollm2-135m.
        gsm8k: demo: GSM8K's training questions, as JSONL.
        records: smollm2-dflash2: what its target wrote, a file of the repository, by default
            benchmarks/training/smollm2-records.npz.xz.
        out: folder for the models and for the checkpoints that an interrupted run resumes from; by default runs/ and the name.
        steps: demo: steps of the target (1200 by default).
        drafter_steps: steps of each drafter; by default 800, for DFlash 2 1200, for EAGLE-3 500. Of each part of
            smollm2-dflash2's; by default 2763 and 300.
        batch_size: smollm2-dflash2: answers a step (by default 32, which take more than 20 GB on a CPU, and 16).
        save_every: smollm2-dflash2: steps from one checkpoint to the next (100 by default).
    """
    counts = {"steps": steps, "drafter_steps": drafter_steps, "batch_size": batch_size, "save_every": save_every}
    check_least(SimpleNamespace(**counts), **dict.fromkeys(counts, 1))
    place = out or Path("runs") / model
    own = {"batch-size": batch_size, "save-every": save_every}
    if model == SMOLLM2:
        refuse(SMOLLM2, DEMO, gsm8k=gsm8k, steps=steps)
        instead = {
            name: value for name, value in {**own, "steps": drafter_steps, "json": json_file}.items() if value is not None
        }
        repeat_drafter(given(records, RECORDS), place, instead, compile_cache, human_console(json_file))
        return
    refuse(DEMO, SMOLLM2, records=records, **own)
    if gsm8k is None:
        raise ValueError("expected --gsm8k with a file of GSM8K's training questions, found none")
    repeat_demo(gsm8k, place, given(steps, TARGET_OPTIONS.steps), drafter_steps, compile_cache, json_file)


def refuse(model: str, other: str, **options: object) -> None:
    """Raises a `ValueError` that lists which options of the other model were given."""
    if found := [f"--{name}" for name, value in options.items() if value is not None]:
        raise ValueError(f"train demo {model} does not take {', '.join(found)} (for {other})")


def repeat_demo(
    gsm8k: Path, out: Path, steps: int, drafter_steps: int | None, compile_cache: bool, json_file: str | None
) -> None:
    """Trains the demo's target and drafters."""
    console = human_console(json_file)
    check_out(out)
    keep_programs(compile_cache)
    # The tokenizer stays as it is, so that losses compare.
    tokenizer = load_tokenizer(hub.resolve(DEMO))
    figures = train_demo(gsm8k, out, tokenizer, console, steps, drafter_steps)
    show_held_out(figures["target"]["held_out"], console)
    console.print(f"wrote {', '.join(str(out / name) for name in ('target', *DRAFTERS))}")
    write_json(json_file, {**figures, "chip": chip_name()})


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. A tuple is an option that is given several times."""
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in options.items()}
    return [word for name, values in several.items() for value in values for word in (f"--{name}", str(value))]


def repeat_drafter(records: Path, out: Path, instead: Mapping[str, Any], compile_cache: bool, console: Console) -> None:
    """Trains SmolLM2's drafter by `tilewright train drafter`, and says how it compares with the one of the package.

    Args:
        instead: options that take the place of the recipe's.

    Raises:
        ValueError: the records are not there, or too few.
    """
    check_out(out)
    if not records.is_file():
        raise ValueError(f"expected --records with {RECORDS} of the repository, which the package lacks; no file {records}")
    text = Records.load(records)
    if len(text) < FIRST_RECORDS:
        raise ValueError(f"--records {records}: expected at least {FIRST_RECORDS:,} records, found {len(text):,}")
    again = np.sort(np.random.default_rng(0).permutation(FIRST_RECORDS)[:AGAIN])
    first = out / "training" / "first"
    # One that is finished is known by its options, and not trained again. Figures are the second part's: where they go to
    # standard output, nothing else does.
    with redirect_stdout(console.file):
        train_part(text.take(np.arange(FIRST_RECORDS)), first, {**RECIPE, **instead, "json": None}, compile_cache)
    behind = text.take(np.concatenate([np.arange(FIRST_RECORDS, len(text)), again]))
    train_part(behind, out, {**RECIPE, **SECOND, "start": first.absolute(), **instead}, compile_cache)
    keep_block_size(out, first)
    show_acceptance(out, console)


def train_part(text: Records, out: Path, options: Mapping[str, Any], compile_cache: bool) -> None:
    """Trains a drafter on records, of which it keeps a copy beside its checkpoints; or goes on with that.

    Args:
        options: None for one that is left at its default.
    """
    kept = out / "training" / RECORDS.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(kept) as partial:
        text.save(partial)
    cache = "--compile-cache" if compile_cache else "--no-compile-cache"
    said = {name: value for name, value in options.items() if value is not None}
    words = [str(kept.absolute()), f"--out={out}", *command_line(said), cache]
    command, arguments, _ = App(default_command=drafter).parse_args(words, exit_on_error=False, print_error=False)
    command(*arguments.args, **arguments.kwargs)


def keep_block_size(folder: Path, before: Path) -> None:
    """Has a drafter draft blocks as wide as the one that it started from, which was trained on these."""
    fields = read_config(folder) | {"block_size": read_config(before)["block_size"]}
    with whole_file(folder / CONFIG) as partial:
        partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def show_acceptance(out: Path, console: Console) -> None:
    """Prints how often each draft of a block was accepted where those before it were, here and in the package."""
    for name, folder in (("this run", out), ("packaged", hub.resolve(SMOLLM2))):
        rates = read_config(folder)["dflash_config"]["expected_acceptance"]
        console.print(f"{name}, % accepted by position: {' '.join(f'{100 * rate:2.0f}' for rate in rates)}", markup=False)


def show_held_out(figures: dict[str, dict[str, float]], console: Console) -> None:
    for name, row in figures.items():
        console.print(
            f"held-out {name}: {row['loss_nats_per_token']:.3f} nats a token, {row['bits_per_byte']:.3f} bits a byte, "
            f"{row['distinct_4gram_ratio']:.0%} distinct 4-grams in greedy text"
        )


def evaluate(
    model: str = "demo",
    *,
    gsm8k: Annotated[Path, Parameter(name="--gsm8k")],
    compile_cache: CompileCache = True,
    json_file: JsonFile = None,
) -> None:
    """Measures a language model on the demo's held-out text: its loss, and how much its greedy continuations repeat.

    Args:
        model: a folder, a Hugging Face id, or "demo". Its tokenizer must be a byte-level BPE.
        gsm8k: GSM8K's training questions, as JSONL; a twentieth of them is held out.
    """
    console = human_console(json_file)
    keep_programs(compile_cache)
    folder = hub.resolve(model, console=progress_console(console))
    config, params = load_decoder(folder, jnp.float32, progress_console(console))
    tokenizer = load_tokenizer(folder)
    documents = demo_documents(gsm8k, held_out_only=True)
    figures = evaluate_target(config, params, tokenizer, held_out_text(documents, tokenizer))
    show_held_out(figures, console)
    write_json(json_file, {"model": model, "held_out": figures, "text": documents.metadata(), "chip": chip_name()})
