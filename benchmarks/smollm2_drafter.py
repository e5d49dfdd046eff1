"""Trains the packaged DFlash 2 drafter of SmolLM2 (`smollm2-dflash2`) again, by the recipe of its model card.

    python benchmarks/smollm2_drafter.py DIR [--steps N] [--batch-size N] [--save-every N] [--json FILE]

Runs `tilewright train drafter` twice on the records in `benchmarks/training/smollm2-records.npz.xz`, resumes interrupted runs,
and prints the acceptance of the new and the packaged drafter. On two CPU cores this takes about 40 hours and 20 GB of memory;
`--steps 20 --batch-size 4 --save-every 5` tries it out in 4 GB.
"""

import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cyclopts import App
from rich.console import Console

from tilewright.cli.options import check_least
from tilewright.cli.outputs import JsonFile, human_console, whole_file
from tilewright.cli.train import check_out
from tilewright.cli.train_drafter import drafter
from tilewright.models import hub
from tilewright.models.checkpoint import CONFIG, read_config
from tilewright.train.records import Records

RECORDS = Path(__file__).parent / "training" / "smollm2-records.npz.xz"
FIRST_RECORDS = 9617
"""Records of the first part, from the beginning of the file, including held-out records."""
REPEATED = 2400
"""Records of the first part that the second part uses as well, beside all later records."""
FIRST: dict[str, Any] = {
    "target": "smollm2-135m",
    "kind": "dflash2",
    "sizes": {"layers": 2, "selector_rank": 64, "draft_vocab": 8192, "mask_token_id": 3, "taps": "1,8,15,21,28"},
    "loss": {"dpace": 0.5, "anchors": 96},
    "batch-size": 32,
    "sequence-length": 512,
    "compute-dtype": "bfloat16",
    "optimizer": {"kind": "muon", "muon_learning_rate": 0.02, "schedule": "wsd", "cooldown": 0.3},
    "learning-rate": "1e-3",
    "dtype": "bfloat16",
    "steps": 2763,
}
"""Options of `tilewright train drafter` for the first part; the model card has the same command."""
SECOND: dict[str, Any] = {
    **FIRST,
    "sizes": {**FIRST["sizes"], "block_size": 8},
    "batch-size": 16,
    "sequence-length": 384,
    "compute-dtype": "float32",
    "optimizer": {**FIRST["optimizer"], "muon_learning_rate": 0.006, "cooldown": 0.4},
    "learning-rate": "3e-4",
    "steps": 300,
}
"""Options for the second part, on broader text; it starts from the drafter of the first part."""

app = App(help=__doc__)


@app.default
def train(
    out: Path,
    *,
    records: Path = RECORDS,
    steps: int | None = None,
    batch_size: int | None = None,
    save_every: int | None = None,
    json_file: JsonFile = None,
) -> None:
    """Trains both parts, and prints the acceptance of the drafter.

    Args:
        out: folder for the drafter and the checkpoints of an interrupted run.
        records: file of records.
        steps: steps of each part (default 2763 and 300).
        batch_size: answers per step (default 32 and 16).
        save_every: steps between checkpoints (default 100).
    """
    numbers = {"steps": steps, "batch-size": batch_size, "save-every": save_every}
    check_least(SimpleNamespace(**numbers), **dict.fromkeys(numbers, 1))
    check_out(out)
    console = human_console(json_file)
    data = Records.load(records)
    if len(data) < FIRST_RECORDS:
        raise ValueError(f"{records}: expected at least {FIRST_RECORDS:,} records, found {len(data):,}")
    save = None if save_every is None else f"every={save_every}"
    options = {"steps": steps, "batch-size": batch_size, "save": save}
    changes = {name: value for name, value in options.items() if value is not None}
    repeated = np.sort(np.random.default_rng(0).permutation(FIRST_RECORDS)[:REPEATED])
    first = out / "training" / "first"
    # A finished first part is recognised by its options, and not trained again. With --json -, standard output has the metrics
    # of the second part only.
    with redirect_stdout(console.file):
        train_part(data.take(np.arange(FIRST_RECORDS)), first, {**FIRST, **changes})
    second = data.take(np.concatenate([np.arange(FIRST_RECORDS, len(data)), repeated]))
    figures = {} if json_file is None else {"json": json_file}
    train_part(second, out, {**SECOND, "start": first.absolute(), **changes, **figures})
    copy_block_size(first, out)
    print_acceptance(out, console)


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line; a mapping becomes `KEY=VALUE,...`."""
    words = []
    for name, value in options.items():
        text = ",".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
        words += [f"--{name}", text]
    return words


def train_part(records: Records, out: Path, options: Mapping[str, Any]) -> None:
    """Trains a drafter on records, which are saved beside the checkpoints; resumes an interrupted run."""
    data = out / "training" / RECORDS.name
    data.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(data) as partial:
        records.save(partial)
    words = [str(data.absolute()), f"--out={out}", *command_line(options)]
    command, arguments, _ = App(default_command=drafter).parse_args(words, exit_on_error=False, print_error=False)
    command(*arguments.args, **arguments.kwargs)


def copy_block_size(source: Path, destination: Path) -> None:
    """Sets the block size of the second drafter to the block size of the first, which trained on wider blocks."""
    fields = read_config(destination) | {"block_size": read_config(source)["block_size"]}
    with whole_file(destination / CONFIG) as partial:
        partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def print_acceptance(out: Path, console: Console) -> None:
    """Prints the acceptance of each draft of a block, given that the drafts before it were accepted."""
    for name, folder in (("this run", out), ("packaged", hub.resolve("smollm2-dflash2"))):
        rates = read_config(folder)["dflash_config"]["expected_acceptance"]
        console.print(f"{name}, % accepted by position: {' '.join(f'{100 * rate:2.0f}' for rate in rates)}", markup=False)


if __name__ == "__main__":
    app()
