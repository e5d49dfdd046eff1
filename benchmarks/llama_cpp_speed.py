"""Compares plain greedy decoding with llama.cpp on the same GGUF file and prompts: one row and 16 rows.

    python benchmarks/llama_cpp_speed.py MODEL.gguf --llama-python PYTHON [--json FILE]

llama.cpp runs in another process, under a Python interpreter with `llama-cpp-python`, with one thread per core. llama.cpp reads
the file itself, and the file quantised by llama.cpp to Q4_0 and Q8_0; a trial chooses flash attention or not for each. Every
measurement of llama.cpp loads the model again and decodes a few tokens to warm up. Prompts and steps are timed separately.
Ratios compare steps of the same repetition; above 1, Tilewright is faster. Run on an idle machine: the threads of llama.cpp
spin while they wait for each other.

llama.cpp for AMX, built by GCC 12, crashes in prompts, because the compiler removes the tile configuration. Build with
CMAKE_ARGS=-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
from cyclopts import App
from llama_cpp_peer import Peer
from rich.progress import Progress
from rich.table import Table

import tilewright as tw
from tilewright.cli.common import keep_programs
from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name, cores
from tilewright.compiled.timing import REPETITIONS, alternate, quotients, spread
from tilewright.llm.language_model import LanguageModel
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import print_table
from tilewright.models.chat import ChatTemplate
from tilewright.models.gguf import open_gguf
from tilewright.models.tokenizer import encode
from tilewright.runtime.shapes import ShapeTable

OURS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "weights": "dequantised"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
KINDS = ("Q4_0", "Q8_0")
"""Formats that llama.cpp quantises the file to, and repacks when it loads them."""
NEW = {1: 96, 16: 32}
"""New tokens per row, by number of rows."""
POSITIONS = 512
WARM = 8
TOPICS = (
    "tides",
    "glaciers",
    "bridges",
    "bread",
    "clocks",
    "honey",
    "lighthouses",
    "paper",
    "glass",
    "volcanoes",
    "sails",
    "wells",
    "compasses",
    "silk",
    "windmills",
    "canals",
)
QUESTION = (
    "I am writing a small book for people who like to know how the things around them came to be, and who would rather read "
    "two good pages than a whole encyclopedia. Each chapter begins with something that one can see on a walk, goes on with "
    "the first people who thought about it, says what they got wrong, and ends with what a child could try at home on a "
    "rainy afternoon with a bowl of water, a candle, some string and a little patience. Please write the chapter about {}, "
    "in plain words, with short sentences, and without any figures that a reader would have to look up somewhere else."
)


class Timed(NamedTuple):
    """Seconds of the prompts and seconds per later step."""

    prompts_s: float
    step_s: float


Side = tuple[str, int]
"""Name of a side and number of rows."""


def own_format(model: Path) -> str:
    """Returns the most frequent tensor type of a file."""
    return Counter(tensor.tensor_type.name for tensor in open_gguf(model).tensors.values()).most_common(1)[0][0]


def formats(peer: Peer, model: Path, folder: str, kinds: Sequence[str] = KINDS) -> dict[str, Path]:
    """Returns files by format: the model itself, and the files that llama.cpp writes to a folder."""
    files = {own_format(model): model}
    for kind in kinds:
        if kind not in files:
            files[kind] = Path(folder) / f"{kind}.gguf"
            peer.ask("quantise", source=str(model), target=str(files[kind]), kind=kind)
    return files


def ours(lm: LanguageModel, prompts: Sequence[list[int]], new: int) -> Timed:
    generated = lm.generate(prompts, tw.Sampling(max_new_tokens=new, ignore_eos=True))
    assert all(len(result.tokens) == new for result in generated)
    return Timed(generated.prefill_seconds, generated.decode_seconds / generated.rounds)


def theirs(peer: Peer, file: Path, flash: bool, prompts: Sequence[list[int]], new: int, positions: int = POSITIONS) -> Timed:
    peer.ask("open", model=str(file), threads=cores(), rows=len(prompts), positions=positions, flash=flash)
    peer.ask("generate", prompts=[prompt[:WARM] for prompt in prompts], new=WARM, ends=[])
    generated = peer.ask("generate", prompts=prompts, new=new, ends=[])
    assert all(len(tokens) == new for tokens in generated["tokens"])
    return Timed(generated["prefill_s"], generated["decode_s"] / (new - 1))


def faster(trials: Mapping[bool, Callable[[], Timed]], repetitions: int = 2) -> bool:
    """Returns True if steps are faster with flash attention, by the best of `repetitions` measurements of each kind."""
    results = alternate(trials, repetitions)
    return min(results, key=lambda flash: min(timed.step_s for timed in results[flash]))


def figures(results: Mapping[Side, Sequence[Timed]], flash: Mapping[Side, bool]) -> list[dict[str, Any]]:
    """Returns a record for each side: medians and ranges, and for llama.cpp the speedups of Tilewright."""
    records = []
    for (name, rows), times in results.items():
        steps = spread([timed.step_s for timed in times])
        prompts = spread([timed.prompts_s for timed in times])
        record: dict[str, Any] = {
            "rows": rows,
            "side": name,
            "step_ms": 1e3 * steps.median,
            "step_ms_range": [1e3 * each for each in steps.range],
            "tokens_per_s": rows / steps.median,
            "prompts_s": prompts.median,
            "prompts_s_range": list(prompts.range),
        }
        if (name, rows) in flash:
            record["flash_attention"] = flash[name, rows]
            for format_name in (name for name in OURS if (name, rows) in results):
                faster_by = quotients([timed.step_s for timed in times], [timed.step_s for timed in results[format_name, rows]])
                record[f"{format_name}_speedup"] = faster_by.median
                record[f"{format_name}_speedup_range"] = list(faster_by.range)
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], rows: int) -> Table:
    shown = Table(title=f"{rows} row{'s' * (rows > 1)}", caption="×: speed of our steps over theirs, median and range")
    shown.add_column("")
    for column in ("step, ms", "tokens/s", "prompts, s", *(f"× of {format_name}" for format_name in OURS)):
        shown.add_column(column, justify="right")
    for record in records:
        if record["rows"] != rows:
            continue
        cells = [significant(record["step_ms"]), significant(record["tokens_per_s"]), significant(record["prompts_s"])]
        for format_name in OURS if "flash_attention" in record else ():
            least, most = record[f"{format_name}_speedup_range"]
            cells.append(f"{record[f'{format_name}_speedup']:.2f} ({least:.2f} to {most:.2f})")
        shown.add_row(record["side"], *cells)
    return shown


def main(model: Path, *, llama_python: Path, repetitions: int = REPETITIONS, json_file: JsonFile = None) -> None:
    """Compares plain decoding with llama.cpp.

    Parameters
    ----------
    model
        GGUF file of a model with a chat template.
    llama_python
        A Python interpreter with llama-cpp-python.
    repetitions
        Number of runs of each side.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    console = human_console(json_file)
    template = ChatTemplate.load(model)
    if template is None:
        raise ValueError(f"expected a model with a chat template, found {model} without one")
    keep_programs()
    shapes = ShapeTable(batches=tuple(NEW), capacities=(POSITIONS,))
    loaded = {name: tw.load(model, table=shapes, **settings) for name, settings in OURS.items()}
    tokenizer = loaded["bfloat16"].tokenizer
    texts = [template.render([{"role": "user", "content": QUESTION.format(topic)}]) for topic in TOPICS]
    prompts = [encode(tokenizer, text, add_special_tokens=False) for text in texts]
    with Peer(llama_python) as peer, TemporaryDirectory() as folder:
        about = peer.ask("about")
        files = formats(peer, model, folder)
        runs: dict[Side, Callable[[], Timed]] = {}
        flash: dict[Side, bool] = {}
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            trials = bar.add_task("choosing flash attention", total=len(files) * len(NEW))
            for rows in NEW:
                runs |= {(name, rows): partial(ours, lm, prompts[:rows], NEW[rows]) for name, lm in loaded.items()}
                for name, file in files.items():
                    side = f"llama.cpp, {name}", rows
                    trial_runs = {each: partial(theirs, peer, file, each, prompts[:rows], NEW[rows]) for each in (True, False)}
                    flash[side] = faster(trial_runs)
                    runs[side] = trial_runs[flash[side]]
                    bar.advance(trials)
            for name, rows in runs:
                if name in loaded:
                    runs[name, rows]()  # compiles
            task = bar.add_task("measuring", total=len(runs) * repetitions)
            results = alternate(runs, repetitions, lambda: bar.advance(task))
    records = figures(results, flash)
    for rows in NEW:
        print_table(console, table(records, rows))
    console.print(f"llama-cpp-python {about['version']} ({about['features']}), {cores()} threads", markup=False)
    settings = {"model": model.name, "prompt_tokens": [len(prompt) for prompt in prompts], "new_tokens": NEW}
    versions = {"tilewright": tw.__version__, "jax": jax.__version__, "llama_cpp_python": about}
    write_json(json_file, {"chip": chip_name(), "repetitions": repetitions, **versions, **settings, "data": records})


if __name__ == "__main__":
    app = App(name="llama_cpp_speed", help=__doc__)
    app.default(main)
    app()
