"""Times a product in each block format of files against bfloat16, on one core: the rule of `--weights auto`.

    [TILEWRIGHT_CPU_ISA=avx2] python benchmarks/weight_formats.py [--core 1] [--json FILE]

Copies of a layer's weights, together larger than a cache, are read one after another (`linear_layers.py`). All formats run in
alternation, in one process on one core. Processor time is compared, so that other processes on the machine change little.
Fields of the JSON file: `isa`, and for each layer and number of rows `bfloat16_us` and `ratio`, the median over the
repetitions of a format's time over bfloat16's.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import get_args

import numpy as np

LAYERS = {"o": (2048, 1024, False), "gate and up": (576, 1536, True)}
"""Inputs, outputs, and whether the layer is a gated pair: Qwen3-0.6B's o and SmolLM2-135M's gate and up."""
ROWS = (1, 4, 8, 16, 64, 512)
REPETITIONS = 7
RUN_S = 0.06
WEIGHTS_MB = 60.0
SUPER_BLOCK = 256
"""Inputs of a super-block of K-quants. Files have no K-quants where it does not divide the inputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=0, help="number of the core (default: 0)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})  # before JAX counts the cores
    from linear_layers import cpu_side

    from tilewright.kernels import native
    from tilewright.kernels.linear.blocks import FORMS, BlockFormat
    from tilewright.kernels.linear.cases import LinearCase

    found: dict[str, object] = {"isa": native.kernels().isa}
    rng = np.random.default_rng(0)
    for layer, (inputs, outputs, gated) in LAYERS.items():
        case = LinearCase("", "gate_up" if gated else "o", inputs, outputs)
        size = (inputs, outputs)
        matrices = [rng.standard_normal(size, np.float32) / np.float32(math.sqrt(inputs)) for _ in range(1 + gated)]
        whole = [kind for kind in get_args(BlockFormat) if inputs % SUPER_BLOCK == 0 or FORMS[kind].group != 8]
        sides = {kind: cpu_side(kind, case, matrices, WEIGHTS_MB) for kind in ("bfloat16", *whole)}
        for rows in ROWS:
            runs = {}
            for kind, side in sides.items():
                run = side.start(rows)
                run(1)
                began = time.process_time()
                run(1)
                runs[kind] = run, max(1, round(RUN_S / max(time.process_time() - began, 1e-6)))
            seconds: dict[str, list[float]] = {kind: [] for kind in sides}
            for _ in range(REPETITIONS):
                for kind, (run, programs) in runs.items():
                    began = time.process_time()
                    run(programs)
                    seconds[kind].append((time.process_time() - began) / programs / sides[kind].calls)
            base = seconds["bfloat16"]
            ratios = {kind: statistics.median(b / a for a, b in zip(base, seconds[kind], strict=True)) for kind in whole}
            found[f"{layer}, {rows} rows"] = {"bfloat16_us": 1e6 * statistics.median(base), "ratio": ratios}
            print(f"{layer}, {rows} rows:", ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items()), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
