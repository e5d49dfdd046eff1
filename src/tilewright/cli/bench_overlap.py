"""`tilewright bench overlap`: the grid of `bench_overlap_grid.py`, or what compilers make of single collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich import box
from rich.progress import Progress
from rich.table import Table

from tilewright.bench.overlap_micro import AXIS, COLLECTIVES, HIDDEN, ROWS, MicroCase, cases, compiled, measured
from tilewright.cli.bench_overlap_grid import GridOptions, bench_grid
from tilewright.cli.bench_round import NUMBERS
from tilewright.cli.common import (
    WORDS,
    JsonFile,
    check_json_file,
    check_output_file,
    given,
    human_console,
    whole_file,
    write_json,
)
from tilewright.compiled.aot import tpu_topology
from tilewright.compiled.machine import chip_name
from tilewright.hardware.links import HOP_US
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.parallel.mesh import make_mesh
from tilewright.report.overlap import write_micro
from tilewright.report.terminal import print_table

TOPOLOGIES, KINDS = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2"), ("v5e",)


@Parameter(name="*")
@dataclass(frozen=True)
class PlaceOptions:
    """Options of what is compiled and run. Those of several values take them with commas or blanks between them.

    Attributes:
        micro: single collectives beside a product, instead of a model.
        chip: TPUs to compile for, several, "none" for none: kinds, by default v5e, and with --micro topologies, by default
            v5e:4x2,v5p:2x2x2,v6e:4x2.
        here: run on the devices that are here; by default where there are several, with --micro if they are no CPUs.
        hop_us: latency of a hop between neighbours, in microseconds: a working figure, which no specification gives.
        collective: of --micro: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute: several, by default all.
        size_kib: of --micro: what each device gives to a collective, in KiB, several.
        repetitions: of --micro: how often each is timed here.
        hidden: of --micro: columns of all matrices.
        product_rows: of --micro: rows of the product's input on each device.
    """

    micro: bool = False
    chip: Annotated[tuple[str, ...] | None, WORDS] = None
    here: bool | None = None
    hop_us: float = HOP_US
    collective: Annotated[tuple[str, ...], WORDS] = tuple(COLLECTIVES)
    size_kib: Annotated[tuple[int, ...], NUMBERS] = (64, 1024, 16384)
    repetitions: int = 5
    hidden: int = HIDDEN
    product_rows: int = ROWS

    def chips(self) -> tuple[str, ...]:
        named = given(self.chip, TOPOLOGIES if self.micro else KINDS)
        return () if named == ("none",) else named

    def jobs(self) -> list[tuple[str | None, list[MicroCase]]]:
        """For each place its cases; None stands for the devices that are here.

        Raises:
            ValueError: an option is none that there is, or nothing is asked for.
        """
        if self.repetitions < 1:
            raise ValueError(f"expected repetitions of at least 1, found {self.repetitions}")
        if not 0 <= self.hop_us < float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {self.hop_us:g}")
        for chip in self.chips():
            chip_of(chip)
        found: list[tuple[str | None, list[MicroCase]]] = []
        for chip in self.chips():
            found.append((chip, self.cases(len(tpu_topology(chip).devices))))
        several = jax.device_count() > 1
        if self.here and not several:
            raise ValueError("expected several devices here for --here, found one")
        if self.here or (self.here is None and several and jax.devices()[0].platform != "cpu"):
            found.append((None, self.cases(jax.device_count())))
        if not any(of for _, of in found):
            raise ValueError("expected a chip, a collective and a size, or --here; found none")
        return found

    def cases(self, devices: int) -> list[MicroCase]:
        """Raises ValueError for sizes that the devices don't divide."""
        return cases(self.collective, self.size_kib, devices, self.hidden, self.product_rows)


def bench_overlap(
    *, options: PlaceOptions = PlaceOptions(), grid: GridOptions = GridOptions(), json_file: JsonFile = None,
    html: Path | None = None,
) -> None:  # fmt: skip
    """Times to the first token and for each further one, by schedule and number of devices, for fixed shapes.

    Predicted from compiled programs for TPUs that aren't here, and run on a small model where several devices are. --micro
    shows what compilers make of single collectives beside a product. Every figure is defined in docs/metrics.md.

    Parameters
    ----------
    json_file
        Write the figures as JSON to this file, "-" for standard output.
    html
        Write a page with the tables to this file.
    """
    check_json_file(json_file)
    check_output_file("--html", None if html is None else str(html))
    check_options(options, grid)
    if options.micro:
        micro(options, json_file, html)
    else:
        bench_grid(grid, options.chips(), options.here, options.hop_us, json_file, html)


def check_options(options: PlaceOptions, grid: GridOptions) -> None:
    """Raises a `ValueError` for an option that the other of the two benchmarks has."""
    other = grid if options.micro else options
    names = set(vars(other)) - {"micro", "chip", "here", "hop_us"}
    for name in sorted(name for name in names if getattr(other, name) != getattr(type(other)(), name)):
        expected = "no --micro beside" if options.micro else "--micro beside"
        raise ValueError(f"expected {expected} --{name.replace('_', '-')}")


def micro(options: PlaceOptions, json_file: str | None, html: Path | None) -> None:
    """Single collectives beside a product."""
    jobs, console = options.jobs(), human_console(json_file)
    found: dict[str, list[dict[str, Any]]] = {"compiled": [], "measured": []}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(len(of) for _, of in jobs))
        for chip, of in jobs:
            mesh = make_mesh({AXIS: None}) if chip is None else None
            for case in of:
                bar.update(task, description=f"{chip or 'here'} {case.collective} {case.program}")
                if mesh is None:
                    found["compiled"].append(compiled(str(chip), case, options.hop_us))
                else:
                    found["measured"].append(measured(case, mesh, options.repetitions))
                bar.advance(task)
    about = environment(options, bool(found["measured"]))
    for chip in dict.fromkeys(one["chip"] for one in found["compiled"]):
        print_table(console, compiled_table(chip, [one for one in found["compiled"] if one["chip"] == chip]))
    if found["measured"]:
        print_table(console, measured_table(found["measured"]))
    write_json(json_file, {**about, **found})
    if html is not None:
        with whole_file(html) as partial:
            write_micro(partial, found["compiled"], found["measured"], about)
        console.print(f"{html} written", markup=False)


def environment(options: PlaceOptions, ran: bool) -> dict[str, Any]:
    """Settings that the figures depend on."""
    shape = f"[{options.product_rows}, {options.hidden}] x [{options.hidden}, {options.hidden}], bfloat16"
    about: dict[str, Any] = {"product": shape, "hop_us": options.hop_us, "devices": jax.device_count() if ran else None}
    about |= {"jax_version": jax.__version__, "libtpu_version": version("libtpu") if options.chips() else None}
    return {**about, "measured_on": chip_name() if ran else None, "repetitions": options.repetitions if ran else None}


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // 1024:,} KiB" if size_bytes % 2**20 else f"{size_bytes // 2**20:,} MiB"


def compiled_table(chip: str, records: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each program: at each size what became of its collectives, and how much of their time is hidden."""
    caption = "compiler estimates; in brackets the share of the communication that is hidden"
    table = Table(title=f"collectives beside products on {chip}", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    sizes = list(dict.fromkeys(one["size_bytes"] for one in records))
    for name in ("collective", "program", *map(size_name, sizes)):
        table.add_column(name)
    for collective, program in dict.fromkeys((one["collective"], one["program"]) for one in records):
        line = [one for one in records if (one["collective"], one["program"]) == (collective, program)]
        table.add_row(collective, program, *map(compiled_cell, line), end_section=program == "two")
    return table


def compiled_cell(one: Mapping[str, Any]) -> str:
    if not one["communication_us"]:
        return one["made_of_it"]
    return f"{one['made_of_it']} ({one['hidden_us'] / one['communication_us']:.0%})"


def measured_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Table of what ran here."""
    caption = "medians; hidden: how much less both take than one after the other, of the collective's time; may be below 0"
    table = Table(title=f"collectives beside products on {chip_name()}", caption=caption, box=box.SIMPLE_HEAD)
    for name in ("collective", "program", "size"):
        table.add_column(name)
    for name in ("product us", "collective us", "both us", "hidden"):
        table.add_column(name, justify="right")
    for one in records:
        times = (significant(one[f"{name}_us"]) for name in ("product", "collective", "both"))
        table.add_row(one["collective"], one["program"], size_name(one["size_bytes"]), *times, f"{one['hidden_share']:.0%}")
    return table
