"""Compares models with quantised weights with llama.cpp: one row, 16 rows and long prompts, and the share of memory bandwidth.

    python benchmarks/few_bits.py --llama-python PYTHON [--models NAME ...] [--repetitions N] [--json FILE]

Models: SmolLM2-135M-Instruct from its published file, and the shapes of Qwen3-0.6B, Llama-3.2-1B and, if named, of four
layers of Qwen3-30B-A3B (8 of 128 experts) with random weights. llama.cpp quantises each model to Q4_0, Q4_1, Q8_0 and Q4_K_M;
16 rows and prompts run only in the formats that llama.cpp repacks. Tilewright reads the Q4_1 file and keeps the blocks
(`int4`) or quantises again (`int8`). The sides alternate as in `llama_cpp_speed.py`. A trial for each model and number of
rows chooses flash attention or not for llama.cpp. The share of bandwidth is the bytes of the matrices of a step over the
bytes that all cores read in the same time, measured in the same repetitions. Mixtures of experts have no share, because rows
choose the bytes.
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
from bandwidth import MemoryBuffers
from cyclopts import App, Parameter
from llama_cpp_peer import Peer
from llama_cpp_speed import Timed, faster, formats, ours, theirs
from random_checkpoint import write_gguf
from rich.console import Console
from rich.table import Table

import tilewright as tw
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
    # huggingface.co/Qwen/Qwen3-30B-A3B, config.json, with fewer layers and the vocabulary of SmolLM2
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
"""Prompt tokens of the cases that time steps."""


@dataclass(frozen=True)
class Case:
    """A timed case: the decode steps of some rows, or a prompt.

    Attributes:
        rows: number of prompts.
        prompt: tokens per prompt.
        new: tokens to generate per row.
        kinds: formats of llama.cpp.
        ours: formats of Tilewright.
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
        """Returns the seconds per step, or per prompt token."""
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
"""Name of a case, and the format of llama.cpp or Tilewright."""


def model_file(name: str, folder: Path) -> Path:
    """Returns the published file, or writes a file of random weights."""
    demo = published.find(DEMO)
    if name == DEMO:
        return demo
    file = folder / f"{name}.gguf"
    write_gguf(file, SHAPES[name], open_gguf(demo))
    return file


def matrix_bytes(file: Path) -> int:
    """Returns the bytes of the matrices in a file. With a tied embedding, a step reads all of them."""
    return sum(int(tensor.n_bytes) for tensor in open_gguf(file).tensors.values() if len(tensor.shape) == 2)


def figures(model: str, results: Mapping[Side, Sequence[Any]], nbytes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns a record for each side of each case. Ratios are within a repetition; above 1, Tilewright is faster.

    Args:
        nbytes: bytes of the matrices that a step of each side reads; empty for a mixture of experts.
    """
    records = []
    read = spread(results["memory", "read"]).median
    for case in CASES:
        times = {name: [case.seconds(timed) for timed in found] for (kind, name), found in results.items() if kind == case.name}
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
            for format_name in case.ours if name not in OURS else ():
                ratio = quotients(seconds, times[format_name])
                record[f"{format_name}_speedup"] = ratio.median
                record[f"{format_name}_speedup_range"] = list(ratio.range)
            records.append(record)
    return records


def verdict(results: Mapping[Side, Sequence[Any]]) -> dict[str, float]:
    """Returns the speed of one row in int4 over llama.cpp's best and over int8, and the cost of 16 rows in steps of one row."""
    (case, rows_16, *_) = CASES
    times = {name: [case.seconds(timed) for timed in found] for (kind, name), found in results.items() if kind == case.name}
    best = min((name for name in times if name not in OURS), key=lambda name: spread(times[name]).median)
    sixteen = [rows_16.seconds(timed) for timed in results[rows_16.name, "int4"]]
    return {
        "one_row_over_llama_cpps_best": quotients(times[best], times["int4"]).median,
        "int4_over_int8": quotients(times["int8"], times["int4"]).median,
        "steps_of_16_rows": quotients(sixteen, times["int4"]).median,
    }


def table(records: Sequence[Mapping[str, Any]], model: str) -> Table:
    caption = "ms: per step or prompt token; of read: share of read bandwidth; ×: speed of ours over theirs, and the range"
    shown = Table(title=model, caption=caption)
    for column in ("", "", "ms", "tokens/s", "of read", *(f"× of {format_name}" for format_name in OURS)):
        shown.add_column(column, justify="left" if column == "" else "right")
    for record in records:
        share = record["read_share"]
        cells = [significant(record["ms"]), significant(record["tokens_per_s"]), "" if share is None else f"{share:.0%}"]
        for format_name in (format_name for format_name in OURS if f"{format_name}_speedup" in record):
            least, most = record[f"{format_name}_speedup_range"]
            cells.append(f"{record[f'{format_name}_speedup']:.2f} ({least:.2f} to {most:.2f})")
        shown.add_row(record["case"], record["side"], *cells)
    return shown


def measure(
    model: str, peer: Peer, memory: MemoryBuffers, repetitions: int, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measures a model. Returns its records and its summary."""
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        found = formats(peer, model_file(model, Path(folder)), folder, KINDS)
        files = {kind: found[kind] for kind in KINDS}
        shapes = ShapeTable(batches=(1, 16), capacities=CAPACITIES)
        loaded = {
            format_name: tw.load(files["Q4_1"], table=shapes, dtype="bfloat16", weights=format_name) for format_name in OURS
        }
        nbytes = {}
        if SHAPES[model].mixture is None:
            nbytes = {kind: matrix_bytes(file) for kind, file in files.items()}
            nbytes |= {format_name: step_bytes(lm.model.models.target) for format_name, lm in loaded.items()}
        runs: dict[Side, Callable[[], Any]] = {("memory", "read"): memory.read}
        for case in CASES:
            prompts = [[int(token) for token in rng.integers(100, 40000, case.prompt)] for _ in range(case.rows)]
            for format_name in case.ours:
                runs[case.name, format_name] = partial(ours, loaded[format_name], prompts, case.new)
                runs[case.name, format_name]()  # compiles
            arguments = {"prompts": prompts, "new": case.new, "positions": case.positions}
            trials = {flash: partial(theirs, peer, files["Q4_0"], flash, **arguments) for flash in (True, False)}
            flash = faster(trials, 1) if case.of_steps else True
            runs |= {(case.name, kind): partial(theirs, peer, files[kind], flash, **arguments) for kind in case.kinds}
            console.print(f"{model}: {case.name}, llama.cpp {'with' if flash else 'without'} flash attention", style="dim")
        results = alternate(runs, repetitions)
        return figures(model, results, nbytes), verdict(results)


def main(
    *,
    llama_python: Path,
    models: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = NAMES,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Compares models with quantised weights with llama.cpp.

    Parameters
    ----------
    llama_python
        A Python interpreter with llama-cpp-python.
    models
        Models: smollm2-135m, qwen3-0.6b, llama3.2-1b, qwen3-30b-a3b-4.
    repetitions
        Number of runs of each side.
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
    except published.NotInstalled:
        published.fetch(DEMO)
    keep_programs()
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
            summary_text = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in verdicts[model].items())
            console.print(summary_text, markup=False)
            if json_file != "-" or model == models[-1]:  # keeps the results if a later model fails
                write_json(json_file, {**about, "verdicts": verdicts, "data": records})
    llama_cpp = about["llama_cpp_python"]
    console.print(f"llama-cpp-python {llama_cpp['version']} ({llama_cpp['features']}), {cores()} threads", markup=False)


if __name__ == "__main__":
    app = App(name="few_bits", help=__doc__)
    app.default(main)
    app()
