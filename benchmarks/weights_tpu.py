"""Estimates the bytes of weights that a decode step reads on absent TPUs, in each format.

    python benchmarks/weights_tpu.py FILE

Needs the extra `tpu`. The JSON file has the figures of the table in benchmarks/results/2026-11-26-weights-tpu.md.
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from weight_traffic import FORMATS, step

from tilewright.models.published_configs import model_config

LAYERS = 2
BATCH = 8
POSITIONS = 640


def main(file: Path) -> None:
    rows = []
    for model in ("qwen3-0.6b", "smollm2-135m"):
        for chip in ("v5e:1x1", "v6e:1x1"):
            for form in FORMATS:
                found = step(model_config(model), form, BATCH, POSITIONS, chip, LAYERS)
                rows.append(
                    {
                        "model": model,
                        "chip": chip,
                        "format": form,
                        "held": found.held,
                        "read": found.read,
                        "written": found.written,
                        "caches": found.caches,
                        "temporary": found.program.temp_bytes,
                        "widened": found.widened,
                    }
                )
                print(rows[-1], flush=True)
                file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
