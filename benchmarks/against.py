"""Compares the speed of two checkouts: the same benchmark commands, in alternation, in one run.

    python benchmarks/against.py --old FOLDER --new FOLDER --command "linear_layers --rows 1 16" [--command ...] [--json FILE]

A command is `bench ...` of `tilewright`, or the name of a script in `SCRIPTS` with its options: each checkout's own
`benchmarks/engine_speed.py`, say.

Every command runs in its own process, once per checkout and repetition; every second repetition runs in reverse order. Each
repetition gives one ratio per figure, of two processes that ran one after the other. The table shows the median ratio and the
range. Ratios are of speed: above 1, the new checkout is faster.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.cli.outputs import JsonFile, check_output_file, human_console, write_json
from tilewright.compiled.machine import chip_name
from tilewright.compiled.timing import REPETITIONS, alternate, medians, quotients

SCRIPTS = ("engine_speed", "linear_layers", "round_parts", "sampling")
"""Benchmarks that are scripts."""
RUN = "from tilewright.cli.main import main; main()"

FIGURES: dict[str, tuple[tuple[str, ...], dict[str, bool]]] = {
    "speculative": (("dataset", "batch_size", "drafter"), {"tokens_per_s": True}),
    "linear_layers": (("model", "dtype", "layer", "rows"), {"median_ms": False}),
    "graph": (("experiment", "name"), {"median_ms": False}),
    "round_parts": (("context", "block_size"), {"round_ms": False, "step_ms": False}),
    "diffusion": (("name",), {"tokens_per_s": True}),
    "engine_speed": (
        ("model", "drafter", "dtype"),
        {f"{name}_tokens_per_s": True for name in ("standalone", "engine", "http", "eight")},
    ),
    "sampling": (("name",), {"median_ms": False, "compile_s": False}),
}
"""Fields that identify a record of each benchmark, and its figures of speed with True if higher values are faster."""

Figures = dict[tuple[str, str], float]
"""Values by the names of record and figure."""


@dataclass(frozen=True)
class Compared:
    """A figure of both checkouts.

    Attributes:
        old, new: medians over the repetitions, in the unit of the figure.
        speed: speed of the new checkout over that of the old: the median of the repetitions' ratios.
        speed_range: smallest and largest of these ratios.
    """

    command: str
    record: str
    figure: str
    old: float
    new: float
    speed: float
    speed_range: tuple[float, float]


def run(python: str, checkout: Path, command: str) -> dict[str, Any]:
    """Runs a command of a checkout. Returns the JSON that the command writes with `--json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = shlex.split(command)
        program = [checkout / "benchmarks" / f"{words.pop(0)}.py"] if words[0] in SCRIPTS else ["-c", RUN]
        words = [python, *program, *words, "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode or not file.is_file():
            raise SystemExit(f"{checkout}: {command} ended with {done.returncode}\n{done.stderr[-2000:]}")
        return json.loads(file.read_text(encoding="utf-8"))


def benchmark_of(command: str) -> str:
    """Returns the name of the benchmark that a command runs.

    Raises:
        ValueError: the command runs no benchmark of `FIGURES`.
    """
    words = shlex.split(command)
    if words and words[0] in SCRIPTS:
        return words[0]
    if len(words) < 2 or words[0] != "bench" or words[1] not in FIGURES:
        raise ValueError(f"expected bench {', '.join(FIGURES)} with its options, found {command!r}")
    return words[1]


def figures_of(benchmark: str, written: Mapping[str, Any]) -> Figures:
    """Returns the figures of speed in the JSON of a benchmark. Older versions have some fields only once, at the top level."""
    naming, wanted = FIGURES[benchmark]
    return {
        (", ".join(str(record.get(name, written.get(name))) for name in naming), figure): record[figure]
        for record in written.get("data", [written])
        for figure in wanted
        if record[figure] is not None
    }


def compare(
    runs: Mapping[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]],
    repetitions: int,
    on_run: Callable[[], None] = lambda: None,
) -> tuple[list[Compared], list[str]]:
    """Runs all commands of both checkouts in alternation.

    Args:
        runs: for each command, functions that run the command of the old and of the new checkout.

    Returns:
        the figures of both checkouts, and the names of the figures that only one checkout has.
    """
    sides = {(command, side): one for command, both in runs.items() for side, one in zip(("old", "new"), both, strict=True)}
    results = alternate(sides, repetitions, on_run)
    compared = []
    alone = []
    for command in runs:
        benchmark = benchmark_of(command)
        old, new = (gathered([figures_of(benchmark, each) for each in results[command, side]]) for side in ("old", "new"))
        alone += [f"{command}: {', '.join(key)}" for key in old.keys() ^ new.keys()]
        middles = medians(old), medians(new)
        for key in (key for key in old if key in new):
            record, figure = key
            over, under = (new, old) if FIGURES[benchmark][1][figure] else (old, new)
            speed = quotients(over[key], under[key])
            compared.append(Compared(command, record, figure, middles[0][key], middles[1][key], speed.median, speed.range))
    return compared, sorted(alone)


def gathered(repetitions: Sequence[Figures]) -> dict[tuple[str, str], list[float]]:
    """Returns the values of each figure over the repetitions."""
    return {key: [each[key] for each in repetitions] for key in repetitions[0]}


def show(console: Console, compared: Sequence[Compared], alone: Sequence[str]) -> None:
    for command in dict.fromkeys(one.command for one in compared):
        table = Table(title=command, caption="×: speed of the new checkout over that of the old, median and range")
        table.add_column("record", overflow="fold")
        table.add_column("figure")
        for column in ("old", "new", "×", "range"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in (one for one in compared if one.command == command):
            cells = f"{one.old:,.4g}", f"{one.new:,.4g}", f"{one.speed:.3f}", "{:.2f} to {:.2f}".format(*one.speed_range)
            table.add_row(one.record, one.figure, *cells)
        console.print(table)
    for name in alone:
        console.print(f"in one checkout only: {name}", style="yellow", markup=False)


def main(
    *,
    old: Path,
    new: Path,
    command: Annotated[tuple[str, ...], Parameter(negative=())],
    old_python: str = sys.executable,
    new_python: str = sys.executable,
    repetitions: int = REPETITIONS,
    json_file: JsonFile = None,
) -> None:
    """Compares the speed of two checkouts.

    Parameters
    ----------
    old, new
        Folders of the checkouts.
    command
        Command to run, such as "linear_layers --rows 1 16"; may be given several times.
    old_python, new_python
        Interpreters with the dependencies of the checkouts; by default this one.
    repetitions
        Number of runs of each command per checkout.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_output_file("--json", json_file)
    if repetitions < 1:
        raise ValueError(f"expected repetitions of at least 1, found {repetitions}")
    for checkout in (old, new):
        if not (checkout / "src" / "tilewright").is_dir():
            raise ValueError(f"expected a checkout, found {checkout} without src/tilewright")
    for each in command:
        benchmark_of(each)
    sides = (old_python, old.absolute()), (new_python, new.absolute())
    runs = {each: tuple(partial(run, *side, each) for side in sides) for each in command}
    console = human_console(json_file)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=2 * len(runs) * repetitions)
        compared, alone = compare(runs, repetitions, lambda: bar.advance(task))  # type: ignore[arg-type]
    show(console, compared, alone)
    data = [asdict(one) for one in compared]
    write_json(json_file, {"chip": chip_name(), "repetitions": repetitions, "data": data, "on_one_side_only": alone})


if __name__ == "__main__":
    app = App(name="against", help=__doc__)
    app.default(main)
    app()
