"""`benchmarks/linear_layers.py` with torch's bfloat16 `linear` as two more columns.

torch runs with the number of threads of XLA's pool, and with one thread: torch's threads spin while they wait, so that on a
busy machine two threads can be far slower than one. The summary uses the better of both. Needs the `oracle` extra:

    python tests/oracle/bench_linear.py [--model NAME ...] [--rows N ...] [--json FILE] ...
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cyclopts import App

from tilewright.cli.outputs import JsonFile
from tilewright.compiled.machine import cores
from tilewright.kernels.linear.cases import LinearCase

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from linear_layers import LinearOptions, Side, copied, report


def torch_bfloat16(threads: int, name: str, case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
    """Stores weights in the layout of `torch.nn.Linear`, `[O, I]`. A gated layer is two matmuls."""
    weights = [torch.from_numpy(w).T.contiguous().to(torch.bfloat16) for w in matrices]
    nbytes = sum(w.nbytes for w in weights)
    groups = copied(nbytes, weights_mb, lambda: [w.clone() for w in weights])

    def start(rows: int) -> Callable[[int], None]:
        x = torch.ones((rows, case.inputs), dtype=torch.bfloat16)

        def run(programs: int) -> None:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                for i in range(programs):
                    for w in groups[i % len(groups)]:
                        y = torch.nn.functional.linear(x, w[0])
                        if case.gated:
                            torch.nn.functional.silu(y).mul_(torch.nn.functional.linear(x, w[1]))

        return run

    return Side(name, nbytes, len(groups[0]), start)


def main(*, options: LinearOptions = LinearOptions(), json_file: JsonFile = None) -> None:
    peers = [partial(torch_bfloat16, cores(), "torch_bfloat16"), partial(torch_bfloat16, 1, "torch_bfloat16_1thread")]
    report(options, json_file, peers, {"torch_version": torch.__version__})


if __name__ == "__main__":
    app = App(name="bench_linear", help=__doc__)
    app.default(main)
    app()
