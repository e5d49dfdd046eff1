"""`tilewright inspect diff`: compares the output of two versions of the TPU compiler for the same program."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.overlap import LEAST_LAYERS, compile_layers
from tilewright.cli.inspect_overlap import OverlapOptions
from tilewright.cli.options import flag
from tilewright.cli.outputs import JsonFile, check_output_files, human_console, write_file, write_json
from tilewright.compiled.aot import read_record
from tilewright.metrics.diff import DIFF
from tilewright.metrics.metric import Metric
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.perfmodel.diff import ProgramDiff, diff

LIBRARY = "TPU_LIBRARY_PATH"
"""Environment variable by which JAX finds the library."""

SHOWN = 10
"""Changed operations to print; the JSON file has all."""

WATCHED = ("read_bytes", "written_bytes", "estimated_cycles")
"""Figures that `--fail-above` limits."""

Saved = Mapping[str, Any]
"""Compiled programs with the versions of the compiler, in the format of `--save`."""


def inspect_diff(
    files: tuple[Path, ...] = (),
    /,
    *,
    options: OverlapOptions = OverlapOptions(),
    other: Path | None = None,
    save: Annotated[Path | None, Parameter(name="--save")] = None,
    json_file: JsonFile = None,
    fail_above: float | None = None,
) -> None:
    """Compares the programs of two versions of the TPU compiler: bytes, cycles, collectives, fusions, copies.

    Compiler estimates, not measurements. docs/metrics.md defines the figures.

    Args:
        files: two files of --save, the earlier one first. Without files, the options name the programs to compile.
        other: a Python interpreter with tilewright and another libtpu, or a folder with another libtpu (pip install --no-deps
            --target FOLDER libtpu==VERSION), to compile the programs a second time.
        save: write the programs of this compiler to this file.
        fail_above: exit with status 1 if bytes or cycles rise by more than this share, or if a collective is no longer
            asynchronous.
    """
    console = human_console(json_file)
    check_output_files({"--json": json_file, "--save": save})
    if len(files) not in (0, 2) or bool(files) == bool(other or save):
        raise ValueError(f"expected two files of --save, or --other or --save; found {len(files)} files")
    if fail_above is not None and not fail_above >= 0:
        raise ValueError(f"expected --fail-above from 0, found {fail_above:g}")
    before = read_saved(files[0]) if files else compiled_here(options, console)
    write_file(console, save, lambda path: path.write_text(json.dumps(before), encoding="utf-8"))
    if not files and other is None:
        return
    after = read_saved(files[1]) if files else compiled_there(options, other or Path())
    diffs = compare(before, after)
    about = {name: {key: saved[key] for key in VERSIONS} for name, saved in (("before", before), ("after", after))}
    for each in diffs:
        show(console, each, about)
    write_json(json_file, {**about, "measured": False, "data": [each.record() for each in diffs]})
    if fail_above is not None:
        check(console, diffs, fail_above)


VERSIONS = ("jax_version", "libtpu_version")


def compiled_here(options: OverlapOptions, console: Console) -> Saved:
    """Compiles the programs of the options in this process, by default with `LEAST_LAYERS` layers."""
    layers = options.layers or LEAST_LAYERS
    programs = []
    for setup, phase, schedule in product(options.setups(), options.phases(), options.names(console)):
        name = setup.resolved(phase, schedule)
        compiled = compile_layers(setup, phase, name, layers)
        programs.append({"name": f"{setup.chip} {phase.name} {name}, {layers} layers", **compiled.record()})
    return {"jax_version": jax.__version__, "libtpu_version": libtpu_version(), "programs": programs}


def libtpu_version() -> str:
    """Version of the libtpu of this process.

    Raises:
        ValueError: libtpu is not installed, or `TPU_LIBRARY_PATH` names another library, whose version is unknown.
    """
    spec = importlib.util.find_spec("libtpu")
    library = os.environ.get(LIBRARY)
    folder = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
    if folder is None or (library and Path(library).resolve().parent != folder):
        raise ValueError(
            f"expected the library of the package libtpu in {folder}, whose version is known; found {LIBRARY}={library}"
        )
    return version("libtpu")


def compiled_there(options: OverlapOptions, other: Path) -> Saved:
    """Compiles the programs with another interpreter, or with this interpreter and the libtpu of a folder.

    Raises:
        ValueError: the folder has no libtpu, the file does not exist, or the command failed.
    """
    python = str(other)
    environment = dict(os.environ)
    environment.pop(LIBRARY, None)  # libtpu sets the variable at its import
    if other.is_dir():
        if not (other / "libtpu").is_dir():
            raise ValueError(f"expected a folder with libtpu, found no libtpu in {other}")
        python = sys.executable
        path = [str(other.resolve()), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)  # before the installed packages
    elif not other.is_file():
        raise ValueError(f"expected --other to be a Python interpreter or a folder with a libtpu, found {other}")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "programs.json"
        words = [python, "-m", "tilewright", "inspect", "diff", *option_words(options), "--save", str(file)]
        ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode or not file.exists():
            raise ValueError(f"expected {python} to compile too; it ended with {ran.returncode}: {ran.stderr[-2000:]}")
        return read_saved(file)


def option_words(options: OverlapOptions) -> list[str]:
    """Converts options that differ from their defaults to words of a command line."""
    words: list[str] = []
    for name, value in vars(options).items():
        if value != getattr(OverlapOptions(), name):
            words.append(flag(name, value))
            words += [] if isinstance(value, bool) else [",".join(value) if isinstance(value, tuple) else str(value)]
    return words


def read_saved(file: Path) -> Saved:
    """Reads a file of `--save`. Raises a `ValueError` for other content."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected {file} to be a file of --save, found no JSON: {error}") from error
    if not isinstance(saved, dict) or not {*VERSIONS, "programs"} <= saved.keys():
        raise ValueError(f"expected {file} to be a file of --save, with {', '.join(VERSIONS)} and programs")
    programs = saved["programs"]
    if not isinstance(programs, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in programs
    ):
        raise ValueError(f"expected {file} to be a file of --save, with a list of named programs")
    return saved


def compare(before: Saved, after: Saved) -> list[ProgramDiff]:
    """Compares each program. Raises a `ValueError` if the two sides have different programs."""
    old, new = ({one["name"]: read_record(one) for one in saved["programs"]} for saved in (before, after))
    if old.keys() != new.keys():
        raise ValueError(f"expected the same programs on both sides, found {sorted(old)} and {sorted(new)}")
    return [diff(name, old[name], new[name]) for name in old]


def show(console: Console, found: ProgramDiff, about: Mapping[str, Mapping[str, str]]) -> None:
    """Prints a table of the figures, and the changed operations."""
    heads = {name: f"libtpu {one['libtpu_version']}\nJAX {one['jax_version']}" for name, one in about.items()}
    rows = []
    for metric in DIFF:
        old = getattr(found.before, metric.name)
        new = getattr(found.after, metric.name)
        share = "" if old == new else f"{found.rise(metric.name):+.1%}" if old else "new"
        sides = {"before": metric.text(old), "after": metric.text(new)}
        rows.append({"name": metric.name.replace("_", " "), **sides, "change": share})
    columns = [*(Metric(name, head=head) for name, head in heads.items()), Metric("change", head="change")]
    print_table(console, FigureTable(found.name, "figure", {"": rows}, columns, unknown=""))
    for change in found.executions:
        changes = [", ".join(f"{n} {kind}" for kind, n in side.items()) or "none" for side in (change.before, change.after)]
        console.print(f"{change.site}: {' -> '.join(changes)}", markup=False)
    for op in found.ops[:SHOWN]:
        number = f"{op.before} -> {op.after}" if op.before != op.after else f"{op.after}"
        sizes = f"{op.before_bytes / 1e6:,.2f} -> {op.after_bytes / 1e6:,.2f} MB"
        console.print(f"{op.site}: {number} operations, {sizes}", markup=False)
    if len(found.ops) > SHOWN:
        console.print(f"and {len(found.ops) - SHOWN} more changed operations, in the file of --json")
    if about["before"]["jax_version"] != about["after"]["jax_version"]:
        console.print("two versions of JAX: names of operations and the program itself may differ", style="yellow")


def check(console: Console, diffs: Sequence[ProgramDiff], most: float) -> None:
    """Exits with status 1 if one of `WATCHED` rises by more than a share, or a collective is no longer asynchronous."""
    worse = [
        f"{each.name}: {name.replace('_', ' ')} rose by {each.rise(name):.1%}, more than {most:.1%}"
        for each, name in product(diffs, WATCHED)
        if each.rise(name) > most
    ]
    worse += [
        f"{each.name}: {change.site}: {change.gained('synchronous')} more synchronous than before"
        for each in diffs
        for change in each.executions
        if change.gained("synchronous") > 0
    ]
    for line in worse:
        console.print(line, style="red", markup=False)
    if worse:
        sys.exit(1)
