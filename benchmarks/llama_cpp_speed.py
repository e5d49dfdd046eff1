"""Plain greedy decoding beside llama.cpp, in turns, on the same GGUF file and the same prompts: one row, and sixteen.

    python benchmarks/llama_cpp_speed.py MODEL.gguf --llama-python PYTHON [--json FILE]

llama.cpp runs in a process of its own, under an interpreter that has `llama-cpp-python`, with as many threads as there are
cores. It has the file as it is and, made of it by llama.cpp itself, in Q4_0 and Q8_0; each with flash attention or without,
whichever a trial finds faster. Each measurement there opens the model anew and decodes a few tokens first, which do not count.
Prompts and steps are timed apart. Ratios are of steps that ran in one repetition, above 1 where ours are faster. Only an idle
machine gives figures: llama.cpp's threads wait for each other by spinning.

Built by GCC 12, llama.cpp for AMX crashes at prompts: its tile configuration is optimised away, unless CMAKE_ARGS has
-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'.
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
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "weights": "int8"},
    "int4": {"dtype": "bfloat16", "weights": "int4"},
}
KINDS = ("Q4_0", "Q8_0")
"""Formats that llama.cpp makes of the file; it repacks them as they load."""
NEW = {1: 96, 16: 32}
"""New tokens of each row, by the number of rows."""
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
    """One measurement: seconds of the prompts, and of each step after them."""

    prompts_s: float
    step_s: float


Side = tuple[str, int]
"""A name, and a number of rows."""


def own_format(model: Path) -> str:
    """The type that most of a file's tensors have."""
    return Counter(tensor.tensor_type.name for tensor in open_gguf(model).tensors.values()).most_common(1)[0][0]


def formats(peer: Peer, model: Path, folder: str, kinds: Sequence[str] = KINDS) -> dict[str, Path]:
    """The file by the name of its format, and those that llama.cpp makes of it, in a folder."""
    files = {own_format(model): model}
    for kind in kinds:
        if kind not in files:
            files[kind] = Path(folder) / f"{kind}.gguf"
            peer.ask("quantise", source=str(model), target=str(files[kind]), kind=kind)
    return files


def ours(lm: LanguageModel, prompts: Sequence[list[int]], new: int) -> Timed:
    made = lm.generate(prompts, tw.Sampling(max_new_tokens=new, ignore_eos=True))
    assert all(len(result.tokens) == new for result in made)
    return Timed(made.prefill_seconds, made.decode_seconds / made.rounds)


def theirs(peer: Peer, file: Path, flash: bool, prompts: Sequence[list[int]], new: int, positions: int = POSITIONS) -> Timed:
    peer.ask("open", model=str(file), threads=cores(), rows=len(prompts), positions=positions, flash=flash)
    peer.ask("generate", prompts=[prompt[:WARM] for prompt in prompts], new=WARM, ends=[])
    made = peer.ask("generate", prompts=prompts, new=new, ends=[])
    assert all(len(tokens) == new for tokens in made["tokens"])
    return Timed(made["prefill_s"], made["decode_s"] / (new - 1))


def faster(trials: Mapping[bool, Callable[[], Timed]], repetitions: int = 2) -> bool:
    """With which kind of attention steps take less time, by the better of two measurements each, or of so many."""
    taken = alternate(trials, repetitions)
    return min(taken, key=lambda flash: min(timed.step_s for timed in taken[flash]))


def figures(taken: Mapping[Side, Sequence[Timed]], flash: Mapping[Side, bool]) -> list[dict[str, Any]]:
    """A record for each side: medians and ranges, and of a peer how much faster ours are."""
    records = []
    for (name, rows), times in taken.items():
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
            for own in (name for name in OURS if (name, rows) in taken):
                faster_by = quotients([timed.step_s for timed in times], [timed.step_s for timed in taken[own, rows]])
                record[f"{own}_speedup"] = faster_by.median
                record[f"{own}_speedup_range"] = list(faster_by.range)
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], rows: int) -> Table:
    shown = Table(title=f"{rows} row{'s' * (rows > 1)}", caption="×: how much faster our steps are, the median and the range")
    shown.add_column("")
    for column in ("step, ms", "tokens/s", "prompts, s", *(f"× of {own}" for own in OURS)):
        shown.add_column(column, justify="right")
    for record in records:
        if record["rows"] != rows:
            continue
        cells = [significant(record["step_ms"]), significant(record["tokens_per_s"]), significant(record["prompts_s"])]
        for own in OURS if "flash_attention" in record else ():
            least, most = record[f"{own}_speedup_range"]
            cells.append(f"{record[f'{own}_speedup']:.2f} ({least:.2f} to {most:.2f})")
        shown.add_row(record["side"], *cells)
    return shown


def main(model: Path, *, llama_python: Path, repetitions: int = REPETITIONS, json_file: JsonFile = None) -> None:
    """Measures plain decoding beside llama.cpp.

    Parameters
    ----------
    model
        The GGUF file, of a model with a chat template.
    llama_python
        An interpreter that has llama-cpp-python.
    repetitions
        How often each side runs.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    console = human_console(json_file)
    template = ChatTemplate.load(model)
    if template is None:
        raise ValueError(f"expected a model with a chat template, found {model}, which has none")
    keep_programs(True)
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
            trials = bar.add_task("with flash attention or without", total=len(files) * len(NEW))
            for rows in NEW:
                runs |= {(name, rows): partial(ours, lm, prompts[:rows], NEW[rows]) for name, lm in loaded.items()}
                for name, file in files.items():
                    side = f"llama.cpp, {name}", rows
                    both = {each: partial(theirs, peer, file, each, prompts[:rows], NEW[rows]) for each in (True, False)}
                    flash[side] = faster(both)
                    runs[side] = both[flash[side]]
                    bar.advance(trials)
            for name, rows in runs:
                if name in loaded:
                    runs[name, rows]()  # compiles
            task = bar.add_task("in turns", total=len(runs) * repetitions)
            taken = alternate(runs, repetitions, lambda: bar.advance(task))
    records = figures(taken, flash)
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
