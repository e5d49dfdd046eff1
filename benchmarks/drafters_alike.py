"""Trains every kind of drafter for SmolLM2 on the same data with the same settings.

    python benchmarks/drafters_alike.py DIR [--steps N] [--kinds KIND ...]

All kinds use the same records in the same order, the same number of steps, optimizer, learning rate, taps, draft vocabulary
and block size. Differences follow from the kinds: the block drafters learn at anchors in each record and have two layers,
EAGLE-3 learns at every position and has one layer. `tilewright train drafter` trains each kind in a subfolder with the name
of the kind, and resumes interrupted runs. To compare the drafters, on an idle machine:

    tilewright bench speculative --model smollm2-135m --weights int4 --block-size trained \\
        --drafter DIR/dflash DIR/dflash2 ... ngram --data FILE ...
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App

from tilewright.cli.options import SEVERAL
from tilewright.models.checkpoint import CONFIG
from tilewright.train.records import Records

LONGEST = 192
RECORDS = Path(__file__).parent / "training" / "smollm2-records.npz.xz"
COMMON = (
    *("--target", "smollm2-135m", "--dtype", "bfloat16", "--batch-size", 8, "--sequence-length", LONGEST),
    *("--optimizer", "kind=muon,muon_learning_rate=0.02,schedule=wsd,cooldown=0.3", "--learning-rate", 1e-3),
    *("--evaluate-every", 50, "--save", "every=50"),
)
SIZES = "block_size=8,draft_vocab=8192,taps=1,8,15,21,28"
BLOCK_SIZES = f"{SIZES},layers=2,mask_token_id=3"
BLOCK_LOSS = ("--loss", "anchors=64,dpace=0.5")
KIND_OPTIONS: dict[str, tuple[str, ...]] = {
    "dflash": ("--sizes", BLOCK_SIZES, *BLOCK_LOSS),
    "dflash2": ("--sizes", f"{BLOCK_SIZES},selector_rank=64", *BLOCK_LOSS),
    "lilicorr": ("--sizes", BLOCK_SIZES, *BLOCK_LOSS),
    "dspark": ("--sizes", f"{BLOCK_SIZES},markov_rank=64", *BLOCK_LOSS),
    "eagle3": ("--sizes", SIZES),
}
"""Options of each kind besides `COMMON`."""

app = App(help=__doc__)


@app.default
def train(folder: Path, /, *, steps: int = 240, kinds: Annotated[tuple[str, ...], SEVERAL] = tuple(KIND_OPTIONS)) -> None:
    """Trains the drafters that do not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "records.npz.xz"
    records = Records.load(RECORDS)
    records.take(np.flatnonzero(np.diff(records.ends, prepend=0) <= LONGEST)).save(text)
    for kind in kinds:
        if (folder / kind / CONFIG).exists():
            continue
        # The losses of the other kinds also read the target's last layer.
        states = folder / ("taps" if kind in ("dflash", "dflash2") else "taps-and-last")
        out = ("--kind", kind, "--out", folder / kind, "--json", folder / f"{kind}.json", "--keep-taps", states)
        command = ("train", "drafter", text, *out, *COMMON, *KIND_OPTIONS[kind], "--steps", steps)
        subprocess.run([sys.executable, "-m", "tilewright", *map(str, command)], check=True)


if __name__ == "__main__":
    app()
