"""Models in few bits beside llama.cpp, in turns: one row, sixteen, and long prompts, with the share of the memory's bandwidth.

    python benchmarks/few_bits.py --llama-python PYTHON [--models NAME ...] [--repetitions N] [--json FILE]

The demo's model in the file that it is published in, and the shapes of Qwen3-0.6B, Llama-3.2-1B and, if it is named, of four
layers of Qwen3-30B-A3B (8 of 128 experts) with random weights.
llama.cpp has each in Q4_0, Q4_1, Q8_0 and Q4_K_M, which it makes itself; 16 rows and prompts are computed in those alone that
it repacks. We read Q4_1: its bits as they are (`int4`), or quantised anew (`int8`). `llama_cpp_speed.py` says how the two sides
take turns; whether llama.cpp runs with flash attention is tried once for each model and number of rows. A share of bandwidth is
the bytes of the matrices that a step reads, over what this machine's cores read in the same time, measured in the same turns.
With experts it depends on what rows choose, and is left out.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
import numpy as np
from cyclopts import App, Parameter
from llama_cpp_peer import Peer
from llama_cpp_speed import Timed, faster, formats, ours, theirs
from random_checkpoint import write_gguf
from rich.console import Console
from rich.table import Table

import tilewright as tw
from tilewright.bench.bandwidth import MemoryBuffers
from tilewright.cli.common import keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, quotients, spread
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models import published
from tilewright.models.decoder import DecoderConfig
from tilewright.models.experts import Mixture
from tilewright.models.gguf import open_gguf
from tilewright.models.published_configs import MODELS
from tilewright.runtime.memory import step_bytes
from tilewright.runtime.shapes import ShapeTable

DEMO = "smollm2-135m"
NAMES = (DEMO, "qwen3-0.6b", "llama3.2-1b")
SHAPES = {
    **{name: MODELS[name] for name in NAMES},
    # huggingface.co/Qwen/Qwen3-30B-A3B, config.json, with fewer layers and a vocabulary as the demo's
    "qwen3-30b-a3b-4": DecoderConfig(
        family="qwen3_moe",
        vocab_size=MODELS[DEMO].vocab_size,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=4,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mixture=Mixture(128, 8, 768),
    ),
}
OURS = ("int4", "int8")
KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K_M")
CAPACITIES = (256, 768, 2304)
SHORT = 16
"""Tokens of a prompt whose steps are timed."""


@dataclass(frozen=True)
class Case:
    """What is timed: steps of some rows, or a prompt.

    Attributes:
        rows, prompt: the prompts, and tokens of each.
        new: tokens that each row makes.
        kinds: llama.cpp's formats.
        ours: our own.
    """

    name: str
    rows: int
    prompt: int
    new: int
    kinds: tuple[str, ...] = KINDS
    ours: tuple[str, ...] = OURS

    @property
    def of_steps(self) -> bool:
        return self.prompt == SHORT

    def seconds(self, timed: Timed) -> float:
        """A step, or a token of the prompt."""
        return timed.step_s if self.of_steps else timed.prompts_s / self.prompt

    @property
    def positions(self) -> int:
        return next(capacity for capacity in CAPACITIES if capacity >= self.prompt + self.new)


CASES = (
    Case("one row", 1, SHORT, 33),
    Case("16 rows", 16, SHORT, 9, ("Q4_0", "Q8_0")),
    Case("prompt of 512", 1, 512, 2, ("Q4_0",), ("int4",)),
    Case("prompt of 2,048", 1, 2048, 2, ("Q4_0",), ("int4",)),
)
Side = tuple[str, str]
"""A case, and who computes it."""


def model_file(name: str, folder: Path) -> Path:
    """The published file, or one of random weights."""
    demo = published.find(DEMO)
    if name == DEMO:
        return demo
    file = folder / f"{name}.gguf"
    write_gguf(file, SHAPES[name], open_gguf(demo))
    return file


def matrix_bytes(file: Path) -> int:
    """Bytes of the matrices in a file; where embedding and head are one, all of them are read by a step."""
    return sum(int(tensor.n_bytes) for tensor in open_gguf(file).tensors.values() if len(tensor.shape) == 2)


def figures(model: str, taken: Mapping[Side, Sequence[Any]], nbytes: Mapping[str, int]) -> list[dict[str, Any]]:
    """A record for each side of each case; ratios are within a repetition, above 1 where ours are faster.

    Args:
        nbytes: of the matrices that a step of each side reads; empty where that depends on what rows choose.
    """
    records = []
    read = spread(taken["memory", "read"]).median
    for case in CASES:
        times = {name: [case.seconds(timed) for timed in found] for (kind, name), found in taken.items() if kind == case.name}
        for name, seconds in times.items():
            middle = spread(seconds)
            record: dict[str, Any] = {
                "model": model,
                "case": case.name,
                "side": name,
                "ms": 1e3 * middle.median,
                "range_ms": [1e3 * each for each in middle.range],
                "tokens_per_s": (case.rows if case.of_steps else 1) / middle.median,
                "read_share": nbytes[name] / middle.median / 1e9 / read if case.of_steps and nbytes else None,
            }
            for own in case.ours if name not in OURS else ():
                ratio = quotients(seconds, times[own])
                record[f"{own}_speedup"] = ratio.median
                record[f"{own}_speedup_range"] = list(ratio.range)
            records.append(record)
    return records


def verdict(taken: Mapping[Side, Sequence[Any]]) -> dict[str, float]:
    """How much faster one row of ours in 4 bits is than llama.cpp's best and than ours in 8 bits; 16 rows in steps of one."""
    (case, many, *_) = CASES
    times = {name: [case.seconds(timed) for timed in found] for (kind, name), found in taken.items() if kind == case.name}
    best = min((name for name in times if name not in OURS), key=lambda name: spread(times[name]).median)
    sixteen = [many.seconds(timed) for timed in taken[many.name, "int4"]]
    return {
        "one_row_over_llama_cpps_best": quotients(times[best], times["int4"]).median,
        "int4_over_int8": quotients(times["int8"], times["int4"]).median,
        "steps_of_16_rows": quotients(sixteen, times["int4"]).median,
    }


def table(records: Sequence[Mapping[str, Any]], model: str) -> Table:
    caption = (
        "ms: a step, or a token of the prompt; of read: of the memory's bandwidth; ×: how much faster ours are, and the range"
    )
    shown = Table(title=model, caption=caption)
    for column in ("", "", "ms", "tokens/s", "of read", *(f"× of {own}" for own in OURS)):
        shown.add_column(column, justify="left" if column == "" else "right")
    for record in records:
        share = record["read_share"]
        cells = [significant(record["ms"]), significant(record["tokens_per_s"]), "" if share is None else f"{share:.0%}"]
        for own in (own for own in OURS if f"{own}_speedup" in record):
            least, most = record[f"{own}_speedup_range"]
            cells.append(f"{record[f'{own}_speedup']:.2f} ({least:.2f} to {most:.2f})")
        shown.add_row(record["case"], record["side"], *cells)
    return shown


def measure(
    model: str, peer: Peer, memory: MemoryBuffers, repetitions: int, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The records of one model, and what it comes to."""
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as made:
        found = formats(peer, model_file(model, Path(made)), made, KINDS)
        files = {kind: found[kind] for kind in KINDS}
        shapes = ShapeTable(batches=(1, 16), capacities=CAPACITIES)
        loaded = {own: tw.load(files["Q4_1"], table=shapes, dtype="bfloat16", weights=own) for own in OURS}
        nbytes = {}
        if SHAPES[model].mixture is None:
            nbytes = {kind: matrix_bytes(file) for kind, file in files.items()}
            nbytes |= {own: step_bytes(lm.model.models.target) for own, lm in loaded.items()}
        runs: dict[Side, Callable[[], Any]] = {("memory", "read"): memory.read}
        for case in CASES:
            prompts = [[int(token) for token in rng.integers(100, 40000, case.prompt)] for _ in range(case.rows)]
            for own in case.ours:
                runs[case.name, own] = partial(ours, loaded[own], prompts, case.new)
                runs[case.name, own]()  # compiles
            settings = {"prompts": prompts, "new": case.new, "positions": case.positions}
            both = {flash: partial(theirs, peer, files["Q4_0"], flash, **settings) for flash in (True, False)}
            flash = faster(both, 1) if case.of_steps else True
            runs |= {(case.name, kind): partial(theirs, peer, files[kind], flash, **settings) for kind in case.kinds}
            console.print(f"{model}: {case.name}, llama.cpp {'with' if flash else 'without'} flash attention", style="dim")
        taken = alternate(runs, repetitions)
        return figures(model, taken, nbytes), verdict(taken)


def main(
    *,
    llama_python: Path,
    models: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = NAMES,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Measures models in few bits beside llama.cpp.

    Parameters
    ----------
    llama_python
        An interpreter that has llama-cpp-python.
    models
        Of smollm2-135m, qwen3-0.6b, llama3.2-1b and qwen3-30b-a3b-4.
    repetitions
        How often each side runs.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if unknown := [name for name in models if name not in SHAPES]:
        raise ValueError(f"expected models of {', '.join(SHAPES)}, found {unknown[0]!r}")
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    console = human_console(json_file)
    try:
        published.find(DEMO)
    except published.Absent:
        published.fetch(DEMO)
    keep_programs(True)
    memory = MemoryBuffers()
    versions = {"tilewright": tw.__version__, "jax": jax.__version__}
    about = {"chip": chip_name(), "threads": cores(), "repetitions": repetitions, **versions}
    records = []
    verdicts = {}
    with Peer(llama_python) as peer:
        about["llama_cpp_python"] = peer.ask("about")
        for model in models:
            found, verdicts[model] = measure(model, peer, memory, repetitions, console)
            gc.collect()
            records += found
            print_table(console, table(found, model))
            said = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in verdicts[model].items())
            console.print(said, markup=False)
            if json_file != "-" or model == models[-1]:  # what is measured is kept, whatever becomes of the next model
                write_json(json_file, {**about, "verdicts": verdicts, "data": records})
    theirs_is = about["llama_cpp_python"]
    console.print(f"llama-cpp-python {theirs_is['version']} ({theirs_is['features']}), {cores()} threads", markup=False)


if __name__ == "__main__":
    app = App(name="few_bits", help=__doc__)
    app.default(main)
    app()
