"""Trains every kind of drafter alike for SmolLM2.

    python benchmarks/drafters_alike.py DIR [--steps N] [--kinds KIND ...]

All kinds learn from the same records in the same order, in as many steps, with the same optimiser, rate, taps, draft
vocabulary and block size. What is not the same follows from the kinds: DFlash's relatives learn at anchors in each record,
EAGLE-3 at every position, and it has one layer where they have two. Each is trained by `tilewright train drafter`, in a
subfolder with its kind's name, and goes on where it was interrupted. To compare them, on an idle machine:

    tilewright bench speculative --model smollm2-135m --weights int4 --block-size trained \\
        --drafter DIR/dflash DIR/dflash2 ... ngram --data FILE ...
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App

from tilewright.cli.options import SEVERAL
from tilewright.models.checkpoint import CONFIG
from tilewright.train.records import Records

LONGEST = 192
RECORDS = Path(__file__).parent / "training" / "smollm2-records.npz.xz"
ALIKE = (
    *("--target", "smollm2-135m", "--block-size", 8, "--draft-vocab", 8192, "--dtype", "bfloat16"),
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

app = App(help=__doc__)


@app.default
def train(folder: Path, /, *, steps: int = 240, kinds: Annotated[tuple[str, ...], SEVERAL] = tuple(OWN)) -> None:
    """Trains the drafters that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "records.npz.xz"
    records = Records.load(RECORDS)
    records.take(np.flatnonzero(np.diff(records.ends, prepend=0) <= LONGEST)).save(text)
    for kind in kinds:
        if (folder / kind / CONFIG).exists():
            continue
        states = folder / (
            "taps" if kind in ("dflash", "dflash2") else "taps-and-last"
        )  # the others' losses read the last layer
        out = ("--kind", kind, "--out", folder / kind, "--json", folder / f"{kind}.json", "--keep-taps", states)
        command = ("train", "drafter", text, *out, *ALIKE, *OWN[kind], "--steps", steps)
        subprocess.run([sys.executable, "-m", "tilewright", *map(str, command)], check=True)


if __name__ == "__main__":
    app()
