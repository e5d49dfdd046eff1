"""`tilewright neuron env` and `tilewright neuron calibrate`."""

import json
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.table import Table

from tilewright.cli.common import WORDS, JsonFile, check_json_file, human_console, write_json
from tilewright.compiled.figures import print_table, significant
from tilewright.perfmodel.calibrate import PUBLISHED, Point, calibrate
from tilewright.perfmodel.environment import as_record, recommended

TITLES = {"jax": "JAX", "nxd": "NeuronX Distributed"}


def environment(*, train: Annotated[tuple[str, ...], WORDS] = ("fsdp", "tp"), json_file: JsonFile = None) -> None:
    """Prints the environment that AWS recommends for training that hides its collectives, with what each variable does.

    Parameters
    ----------
    train
        Axes that training is divided over: fsdp, or fsdp,tp.
    json_file
        Write it as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    found = recommended(train)
    console = human_console(json_file)
    for framework, variables in found.items():
        console.print(f"# {TITLES[framework]}", markup=False)
        for one in variables:
            console.print(f"# {one.does}", style="dim", markup=False, soft_wrap=True)
            console.print(one.line, markup=False, soft_wrap=True)
        console.print()
    write_json(json_file, {"train": list(train), **{name: as_record(variables) for name, variables in found.items()}})


def calibrate_command(curve: Path | None = None, *, json_file: JsonFile = None) -> None:
    """Fits latency and rate of collectives to half of a measured curve, and says how well the other half is predicted.

    Parameters
    ----------
    curve
        A JSON file of [bytes, microseconds] pairs, of all-reduces over two ranks; by default the curve that AWS publishes of
        its tester.
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    """
    check_json_file(json_file)
    found = calibrate(PUBLISHED if curve is None else read_curve(curve)).record()
    console = human_console(json_file)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("bytes", "measured us", "simulated us"):
        table.add_column(column, justify="right")
    table.add_column("role")
    for one in found["points"]:
        table.add_row(f"{one['bytes']:,}", significant(one["measured_us"]), significant(one["simulated_us"]), one["role"])
    print_table(console, table)
    console.print(f"hop {found['hop_us']:.1f} us, {found['dma_gb_per_s']:.2f} GB/s a DMA engine")
    console.print(f"held-out sizes are {found['geometric_mean_error']:.1%} off, geometric mean")
    taken = f"{found['plans_hop_us']:g} us and {found['plans_dma_gb_per_s']:g} GB/s"
    console.print(f"plans and simulations do not use this fit: they take {taken}, from AWS's pages")
    write_json(json_file, found)


def read_curve(path: Path) -> list[Point]:
    """Pairs of bytes and microseconds.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    numbers = (int, float)
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(n, numbers) and n > 0 for n in row) for row in rows
    ):  # fmt: skip
        raise ValueError(f"{path}: expected a list of [bytes, microseconds] pairs above 0, found something else")
    return [(float(size), float(us)) for size, us in rows]
