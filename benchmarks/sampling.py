"""Times sampling: milliseconds for rows of each kind of sampling, and the compile time of the program.

    python benchmarks/sampling.py [--vocab 49152] [--rows 1 8] [--slots 1 4] [--json FILE]

Logits are inputs; each call samples for all rows, as a round of the runtime does (`runtime/per_row.py`). In blocks of several
slots every draft is accepted. To compare checkouts: `against.py` with `--command "sampling ..."`.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import alternate, medians
from tilewright.runtime.per_row import PenaltyHistory, sample_each
from tilewright.runtime.sampling import Sampling, row_sampling

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_p": 0.95, "top_k": 40},
    "penalties": {"repetition_penalty": 1.2},
    "penalties, top-p": {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
}
MIXES: dict[str, tuple[str, ...]] = {
    **{kind: (kind,) for kind in KINDS},
    "mixed": ("greedy", "plain", "top-p", "top-k, top-p"),
    "one draws": ("top-p", *["greedy"] * 63),
}
"""Kinds of sampling that the rows of a batch repeat."""
CALLS = 5


@dataclass(frozen=True)
class Figure:
    """Figures of one kind of batch, or of the program that all kinds of a shape share.

    Attributes:
        name: shape, and kind of the batch.
        median_ms: median milliseconds per call.
        compile_s: processor seconds of compiling the program.
    """

    name: str
    median_ms: float | None = None
    compile_s: float | None = None


def arguments(rows: int, slots: int, vocab: int, kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns the arguments of `sample_each`."""
    random = np.random.default_rng(0)
    requests = [Sampling(seed=n, **KINDS[kinds[n % len(kinds)]]) for n in range(rows)]
    sampling = jax.tree.map(jnp.asarray, row_sampling(requests, [3] * rows, None, ()))
    logits = random.normal(0, 3, (rows, slots, vocab))
    tokens = random.integers(0, vocab, (rows, 2048))
    last_positions = jnp.full(rows, 500, jnp.int32)
    history = PenaltyHistory(jnp.asarray(tokens, jnp.int32), last_positions, jnp.zeros((rows, slots), jnp.int32))
    return (
        jnp.asarray(logits, jnp.float32),
        sampling,
        history,
        last_positions[:, None] + 1 + jnp.arange(slots),
        jnp.ones(rows, bool),
    )


def measure(rows: int, slots: int, vocab: int, repetitions: int) -> list[Figure]:
    """Measures all kinds of batches of one shape, in alternation."""
    lowered = jax.jit(sample_each).lower(*arguments(rows, slots, vocab, ("greedy",)))
    start = time.process_time()
    compiled = lowered.compile()
    compile_s = time.process_time() - start

    def timed(kinds: tuple[str, ...]) -> Any:
        logits, sampling, history, *rest = arguments(rows, slots, vocab, kinds)
        for _ in range(slots - 1):  # with penalties, tokens of a block change the later tokens
            tokens = compiled(logits, sampling, history, *rest)
            history = history._replace(block=history.block.at[:, 1:].set(tokens[:, :-1]))

        def run() -> float:
            start = time.perf_counter()
            for _ in range(CALLS):
                found = compiled(logits, sampling, history, *rest)
            jax.block_until_ready(found)
            return 1e3 * (time.perf_counter() - start) / CALLS

        return run

    found = medians(alternate({name: timed(kinds) for name, kinds in MIXES.items()}, repetitions))
    shape = f"{rows} x {slots}"
    return [Figure(shape, compile_s=compile_s), *(Figure(f"{shape}, {name}", ms) for name, ms in found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4], help="tokens per block")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = [
        figure
        for rows in options.rows
        for slots in options.slots
        for figure in measure(rows, slots, options.vocab, options.repetitions)
    ]
    for figure in figures:
        figure_text = (
            f"{figure.median_ms:8.3f} ms" if figure.compile_s is None else f"{figure.compile_s:8.2f} processor s to compile"
        )
        print(f"{figure.name:28s} {figure_text}")
    if options.json:
        record = {"chip": chip_name(), "jax": jax.__version__, "vocab": options.vocab, "data": [asdict(f) for f in figures]}
        options.json.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
