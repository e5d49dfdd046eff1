"""Trains every kind of drafter alike for a target, and compares them on the same prompts.

    python benchmarks/drafters_alike.py train DIR [--steps N] [--kinds KIND ...]
    python benchmarks/drafters_alike.py measure DIR --data FILE ... [--json FILE]

All kinds learn from the same records in the same order, in as many steps, with the same optimiser, rate, taps, draft
vocabulary and block size. What is not the same follows from the kinds: DFlash's relatives learn at anchors in each record,
EAGLE-3 at every position, and it has one layer where they have two. `train` runs `tilewright train drafter` for each, and
goes on where it was interrupted. `measure` runs `tilewright bench speculative` with all of them, n-grams and plain decoding
in turns, greedily and at temperature 1, and fails where a text differs.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
from cyclopts import App

from tilewright.cli.common import SEVERAL
from tilewright.cli.outputs import JsonFile, check_output_file, write_json
from tilewright.compiled.timing import REPETITIONS
from tilewright.models.checkpoint import CONFIG
from tilewright.train.records import Records

TARGET, LONGEST, BLOCK = "smollm2-135m", 192, 8
RECORDS = Path(__file__).parent / "training" / "smollm2-records.npz.xz"
ALIKE = (
    *("--target", TARGET, "--block-size", BLOCK, "--draft-vocab", 8192, "--dtype", "bfloat16"),
    *(argument for tap in (1, 8, 15, 21, 28) for argument in ("--taps", tap)),
    *("--batch-size", 8, "--sequence-length", LONGEST, "--optimizer", "muon", "--muon-learning-rate", 0.02),
    *("--learning-rate", 1e-3, "--schedule", "wsd", "--cooldown", 0.3, "--evaluate-every", 50, "--save-every", 50),
)
ANCHORED = ("--layers", 2, "--mask-token-id", 3, "--anchors", 64, "--dpace", 0.5)
OWN: dict[str, tuple[Any, ...]] = {
    "dflash": ANCHORED,
    "dflash2": (*ANCHORED, "--selector-rank", 64),
    "lilicorr": ANCHORED,
    "dspark": (*ANCHORED, "--markov-rank", 64),
    "eagle3": (),
}
"""What each kind is trained with besides `ALIKE`."""
SAMPLED = ("--temperature", 1, "--top-p", 0.9)

app = App(help=__doc__)


def tilewright(*arguments: Any) -> None:
    """Runs a command, whose output goes where this script's goes. Raises a `CalledProcessError` where it fails."""
    subprocess.run([sys.executable, "-m", "tilewright", *map(str, arguments)], check=True)


@app.command
def train(folder: Path, /, *, steps: int = 240, kinds: Annotated[tuple[str, ...], SEVERAL] = tuple(OWN)) -> None:
    """Trains the drafters, each in a subfolder with its kind's name."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "records.npz.xz"
    records = Records.load(RECORDS)
    records.take(np.flatnonzero(np.diff(records.ends, prepend=0) <= LONGEST)).save(text)
    for kind in kinds:
        if (folder / kind / CONFIG).exists():
            continue
        kept = ("--keep-taps", folder / ("taps" if kind in ("dflash", "dflash2") else "taps-whole"))
        out = ("--kind", kind, "--out", folder / kind, "--json", folder / f"{kind}.json")
        tilewright("train", "drafter", text, *out, *ALIKE, *OWN[kind], *kept, "--steps", steps)


@app.command
def measure(
    folder: Path, /, *, data: Annotated[tuple[Path, ...], SEVERAL], samples: int = 4, max_new_tokens: int = 96,
    repetitions: int = REPETITIONS, weights: str = "int4", json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Decodes the prompts of each file with each drafter, with n-grams and plainly."""
    check_output_file("--json", json_file)
    drafters = [folder / kind for kind in OWN if (folder / kind / CONFIG).exists()]
    figures = {}
    with TemporaryDirectory() as made:
        for name, sampling in (("greedy", ()), ("sampled", SAMPLED)):
            path = Path(made) / f"{name}.json"
            tilewright(
                *("bench", "speculative", "--model", TARGET, "--weights", weights, "--data", *data, "--samples", samples),
                *("--max-new-tokens", max_new_tokens, "--repetitions", repetitions, *sampling),
                *("--drafter", *drafters, "ngram", "--block-size", BLOCK, "--json", path),
            )
            figures[name] = json.loads(path.read_text())
    write_json(json_file, figures)
    rows = [row for each in figures.values() for row in each["data"]]
    if differ := {f"{row['drafter']} on {row['dataset']}" for row in rows if row["identical"] is False}:
        raise SystemExit(f"expected the texts of plain decoding, found others: {', '.join(sorted(differ))}")


if __name__ == "__main__":
    app()
