"""`tilewright bench linear` with torch's bfloat16 `linear` beside it: the same options, two more columns.

torch runs with as many threads as XLA's pool has, and with one: its threads wait for one another in a busy loop, so that on a
machine with other work two of them can be far slower than one. The summary goes by the better of the two. Needs the `oracle`
extra:

    python tests/oracle/bench_linear.py [--model NAME ...] [--rows N ...] [--json FILE] ...
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from cyclopts import App

from tilewright.bench.linear import Side, copied
from tilewright.cli.bench_linear import LinearOptions, report
from tilewright.cli.outputs import JsonFile
from tilewright.compiled.machine import cores
from tilewright.kernels.linear.cases import LinearCase


def torch_bfloat16(threads: int, name: str, case: LinearCase, matrices: Sequence[np.ndarray], weights_mb: float) -> Side:
    """Weights lie as `torch.nn.Linear` keeps them, `[O, I]`; a gated layer is two products."""
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
