"""Writes a checkpoint with the shapes of a published model and random weights, to see what memory and time serving it takes.

    python benchmarks/random_checkpoint.py qwen3-0.6b FOLDER --tokenizer FOLDER_WITH_A_TOKENIZER

What it says means nothing.
"""

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

from tilewright.bench.model_configs import MODELS
from tilewright.models.decoder import config_to_hf, declare
from tilewright.models.params import ArraySpec, spec_leaves

DRAWN = 2**22
"""Numbers that are drawn; larger arrays repeat them."""


def write_weights(path: Path, specs: list[ArraySpec], seed: int) -> None:
    """A safetensors file in bfloat16, written array by array: the largest models' are more than there is memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sizes, end = [int(np.prod(spec.shape)) for spec in specs], 0
    for spec, size in zip(specs, sizes, strict=True):
        header[spec.name] = {"dtype": "BF16", "shape": spec.stored_shape, "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    said = json.dumps(header).encode()
    drawn = np.random.default_rng(seed).standard_normal(DRAWN, np.float32)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for spec, size in zip(specs, sizes, strict=True):
            values = np.ones(DRAWN, np.float32) if spec.init == "ones" else drawn * np.float32(spec.scale)
            for begin in range(0, size, DRAWN):
                file.write(values[: size - begin].astype(ml_dtypes.bfloat16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = MODELS[args.model]
    args.folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.folder / name)
    fields = {**config_to_hf(config), "torch_dtype": "bfloat16"}
    (args.folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    write_weights(args.folder / "model.safetensors", spec_leaves(declare(config)), args.seed)


if __name__ == "__main__":
    main()
