"""`tilewright train demo`, which makes the packaged models again, and `train evaluate`, which measures others by their text."""

from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
from cyclopts import Parameter
from rich.console import Console

from tilewright.cli.common import DEMO, CompileCache, keep_programs
from tilewright.cli.outputs import JsonFile, human_console, progress_console, write_json
from tilewright.cli.train import check_out
from tilewright.compiled.machine import chip_name
from tilewright.models import hub
from tilewright.models.checkpoint import load_decoder
from tilewright.models.tokenizer import load_tokenizer
from tilewright.train.demo import DRAFTERS, TARGET_OPTIONS, train_demo
from tilewright.train.demo_text import demo_documents, held_out_text
from tilewright.train.evaluate import evaluate_target


def demo(
    *,
    gsm8k: Annotated[Path, Parameter(name="--gsm8k")],
    out: Path = Path("runs/demo"),
    steps: int = TARGET_OPTIONS.steps,
    drafter_steps: int | None = None,
    compile_cache: CompileCache = True,
    json_file: JsonFile = None,
) -> None:
    """Repeats the training of the demo's target and drafters: the standard library's source, that of installed dependencies
    with permissive licences, and GSM8K's training questions.

    Parameters
    ----------
    gsm8k
        GSM8K's training questions, as JSONL.
    out
        Folder for the models and for the checkpoints that an interrupted run resumes from.
    steps
        Steps of the target.
    drafter_steps
        Steps of each drafter; by default 800, for DFlash 2 1200, for EAGLE-3 500.
    """
    console = human_console(json_file)
    check_out(out)
    keep_programs(compile_cache)
    # The tokenizer stays as it is, so that losses compare.
    tokenizer = load_tokenizer(hub.resolve(DEMO))
    figures = train_demo(gsm8k, out, tokenizer, console, steps, drafter_steps)
    show_held_out(figures["target"]["held_out"], console)
    console.print(f"wrote {', '.join(str(out / name) for name in ('target', *DRAFTERS))}")
    write_json(json_file, {**figures, "chip": chip_name()})


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

    Parameters
    ----------
    model
        A folder, a Hugging Face id, or "demo". Its tokenizer must be a byte-level BPE.
    gsm8k
        GSM8K's training questions, as JSONL; a twentieth of them is held out.
    """
    console = human_console(json_file)
    keep_programs(compile_cache)
    folder = hub.resolve(model, console=progress_console(console))
    config, params = load_decoder(folder, jnp.float32, progress_console(console))
    tokenizer, documents = load_tokenizer(folder), demo_documents(gsm8k, held_out_only=True)
    figures = evaluate_target(config, params, tokenizer, held_out_text(documents, tokenizer))
    show_held_out(figures, console)
    write_json(json_file, {"model": model, "held_out": figures, "text": documents.metadata(), "chip": chip_name()})
