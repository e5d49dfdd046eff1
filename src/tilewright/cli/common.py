"""What several commands share: model options, prompts, JSON output."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from tilewright.decode.language_model import LanguageModel, load
from tilewright.kernels import native
from tilewright.models.hub import PACKAGED
from tilewright.train.data import format_question, read_jsonl

DEMO, DEMO_DRAFTER = "demo", "demo-drafter"
DEMO_PROMPT = 51
"""The packaged prompt that stands in where the demo is given none; what follows it repeats itself less than most."""


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """Which models to load, and how.

    Attributes:
        model: a folder, a Hugging Face id, or "demo", the small pair that comes with the package.
        drafter: a folder, a Hugging Face id, or "none"; by default the demo's own for the demo, and none otherwise.
        dtype: "float32" or "bfloat16".
        block_size: tokens drafted at once, the known one included; by default what the drafter was trained for.
        draft_window: keep only this many last positions in the drafter's context, so that drafting never gets slower.
        drafter_dtype: of the drafter alone; the output is the same either way. By default as dtype.
        kernels: "auto" takes this package's own kernels where they run, "xla" leaves everything to XLA.
    """

    model: str = DEMO
    drafter: str | None = None
    dtype: str = "float32"
    block_size: int | None = None
    draft_window: int | None = None
    drafter_dtype: str | None = None
    kernels: Literal["auto", "xla"] = "auto"

    def load(self, console: Console) -> LanguageModel:
        drafter = self.drafter
        if drafter is None and self.model == DEMO:
            drafter = DEMO_DRAFTER
        lm = load(
            self.model,
            None if drafter == "none" else drafter,
            dtype=self.dtype,
            block_size=self.block_size,
            draft_window=self.draft_window,
            drafter_dtype=self.drafter_dtype,
            kernels=self.kernels,
            console=progress_console(console),
        )
        if self.kernels == "auto" and lm.kernels == "xla":
            console.print(f"without CPU kernels ({native.kernels().reason}): XLA does the products", style="dim", markup=False)
        return lm


JsonFile = Annotated[str | None, Parameter(name="--json", allow_leading_hyphen=True)]
"""Where to write the figures as JSON; "-" is standard output."""


def human_console(json_file: str | None) -> Console:
    """Where people read: standard output, or standard error when the figures go to standard output."""
    return Console(stderr=json_file == "-", highlight=False, emoji=False)


def progress_console(console: Console) -> Console | None:
    """Where the progress of loading shows: nowhere if the output is a file or a pipe, which bars would put empty lines into."""
    return console if console.is_terminal else None


def write_json(json_file: str | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures where `--json` says; a file appears whole or not at all."""
    if json_file is None:
        return
    text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    path = Path(json_file)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_json_file(json_file: str | None) -> None:
    """Refuses, before any work, a place that cannot be written to."""
    if json_file is None or json_file == "-":
        return
    if json_file.startswith("-"):
        raise ValueError(f'--json {json_file}: expected a file, or "-" for standard output')
    path = Path(json_file)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"--json {json_file}: expected a file, found a folder")


PROMPT_FIELDS = ("prompt", "problem", "text", "problem_statement")


def record_prompt(record: Mapping[str, object], where: str) -> str:
    """The prompt of a JSONL record of the usual benchmarks."""
    if isinstance(record.get("question"), str):
        return format_question(str(record["question"]))
    for name in PROMPT_FIELDS:
        if isinstance(record.get(name), str):
            return str(record[name])
    turns = record.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    raise ValueError(f"{where}: expected a record with one of question, turns, {', '.join(PROMPT_FIELDS)}")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSONL file, one a record; at least one."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    prompts = [record_prompt(r, f"{path}, record {n}") for n, r in enumerate(read_jsonl(path), 1)]
    if not prompts:
        raise ValueError(f"{path} has no record")
    return prompts


def packaged_prompts() -> list[str]:
    """Beginnings of functions from modules that the demo pair was never trained on."""
    return read_prompts(PACKAGED[DEMO].parent / "prompts.jsonl")


def gather_prompts(given: Sequence[str], prompt_file: Path | None, model: str) -> list[str]:
    """Prompts from the arguments, a file, or standard input; for the demo alone there is one to fall back on.

    Raises:
        ValueError: there is none, one is empty, or an argument is an option that does not exist.
    """
    for prompt in given:
        if prompt.startswith("-") and prompt != "-":
            where = "--prompt-file or standard input"
            raise ValueError(f'unknown option {prompt} (a prompt that begins with "-" comes from {where})')
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in given]
    if prompt_file is not None:
        prompts += read_prompts(prompt_file)
    if not prompts and not sys.stdin.isatty():
        piped = sys.stdin.read()
        prompts = [piped] if piped else []
    if not prompts and model == DEMO:
        prompts = [packaged_prompts()[DEMO_PROMPT]]
    if not prompts:
        raise ValueError("expected a prompt: as an argument, from --prompt-file, or on standard input")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty")
    return prompts
