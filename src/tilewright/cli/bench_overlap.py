"""`tilewright bench overlap`: the grid of `bench_overlap_grid.py`, or what compilers make of single collectives."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
from rich.console import Console

from tilewright.bench.overlap_micro import AXIS, COLLECTIVES, HIDDEN, ROWS, MicroCase, cases, compiled, measured
from tilewright.cli.bench_overlap_grid import GridOptions, bench_grid
from tilewright.cli.common import given
from tilewright.cli.options import Numbers, Words, check_least, option_class, told
from tilewright.cli.outputs import PageFiles, progress
from tilewright.compiled.aot import tpu_topology
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import Metric, chosen
from tilewright.metrics.overlap import MICRO
from tilewright.metrics.tables import FigureTable, grouped, print_table
from tilewright.parallel.mesh import make_mesh
from tilewright.report.overlap import measured_micro_table, size_name, write_micro

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2")
KINDS = ("v5e",)


@option_class
class PlaceOptions:
    """Options of what is compiled and run. Those of several values take them with commas or blanks between them.

    Attributes:
        micro: single collectives beside a product, instead of a model.
        chip: TPUs to compile for, several, "none" for none: kinds, by default v5e, and with --micro topologies, by default
            v5e:4x2,v5p:2x2x2,v6e:4x2.
        here: run on the devices that are here; by default where there are several, with --micro if they are no CPUs.
        collective: of --micro: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute: several, by default all.
        size_kib: of --micro: what each device gives to a collective, in KiB, several.
        repetitions: of --micro: how often each is timed here.
        hidden: of --micro: columns of all matrices.
        product_rows: of --micro: rows of the product's input on each device.
    """

    micro: bool = False
    chip: Words | None = None
    here: bool | None = None
    collective: Words = tuple(COLLECTIVES)
    size_kib: Numbers = (64, 1024, 16384)
    repetitions: int = 5
    hidden: int = HIDDEN
    product_rows: int = ROWS

    def chips(self) -> tuple[str, ...]:
        named = given(self.chip, TOPOLOGIES if self.micro else KINDS)
        return () if named == ("none",) else named

    def jobs(self, hop_us: float) -> list[tuple[str | None, list[MicroCase]]]:
        """For each place its cases; None stands for the devices that are here.

        Raises:
            ValueError: an option is none that there is, or nothing is asked for.
        """
        check_least(self, repetitions=1)
        if not 0 <= hop_us < float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {hop_us:g}")
        for chip in self.chips():
            chip_of(chip)  # names those that there are, of all of them before any is made
        found: list[tuple[str | None, list[MicroCase]]] = [
            (chip, self.cases(len(tpu_topology(chip).devices))) for chip in self.chips()
        ]
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
    *,
    options: PlaceOptions = PlaceOptions(),
    grid: GridOptions = GridOptions(),
    files: PageFiles = PageFiles(),
) -> None:
    """Times to the first token and for each further one, by schedule and number of devices, for fixed shapes.

    Predicted from compiled programs for TPUs that aren't here, and run on a small model where several devices are. --micro
    shows what compilers make of single collectives beside a product. Every figure is defined in docs/metrics.md.
    """
    other: PlaceOptions | GridOptions = grid if options.micro else options
    if wrong := told(other, *vars(other).keys() - {"micro", "chip", "here", "hop_us"}):
        raise ValueError(f"expected {'no ' if options.micro else ''}--micro beside {min(wrong)}")
    if options.micro:
        micro(options, grid.hop_us, files)
    else:
        bench_grid(grid, options.chips(), options.here, files)


def micro(options: PlaceOptions, hop_us: float, files: PageFiles) -> None:
    """Single collectives beside a product."""
    console = files.console()
    jobs = options.jobs(hop_us)
    found: dict[str, list[dict[str, Any]]] = {"compiled": [], "measured": []}
    with progress(console, sum(len(of) for _, of in jobs)) as step:
        for chip, of in jobs:
            mesh = make_mesh({AXIS: None}) if chip is None else None
            for case in of:
                step(f"{chip or 'here'} {case.collective} {case.program}", 0)
                if mesh is None:
                    found["compiled"].append(compiled(str(chip), case, hop_us))
                else:
                    found["measured"].append(measured(case, mesh, options.repetitions))
                step()
    about = environment(options, hop_us, bool(found["measured"]))
    shown = (found["compiled"], found["measured"], about)
    files.write(console, {**about, **found}, lambda path: write_micro(path, *shown))
    show(console, found["compiled"], found["measured"])


def environment(options: PlaceOptions, hop_us: float, ran: bool) -> dict[str, Any]:
    """Settings that the figures depend on."""
    shape = f"[{options.product_rows}, {options.hidden}] x [{options.hidden}, {options.hidden}], bfloat16"
    about: dict[str, Any] = {"product": shape, "hop_us": hop_us, "devices": jax.device_count() if ran else None}
    about |= {"jax_version": jax.__version__, "libtpu_version": version("libtpu") if options.chips() else None}
    return {**about, "measured_on": chip_name() if ran else None, "repetitions": options.repetitions if ran else None}


def show(console: Console, compiled: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> None:
    """A table for each chip, and one of what ran."""
    for chip, of in grouped(compiled, "chip").items():
        print_table(console, compiled_table(chip, of))
    if measured:
        caption = "medians; hidden: how much less both take than one after the other, of the collective's time; may be below 0"
        print_table(console, measured_micro_table(f"collectives beside products on {chip_name()}", measured, caption))


def compiled_table(chip: str, records: Sequence[Mapping[str, Any]]) -> FigureTable:
    """A line for each program: at each size what became of its collectives, and how much of their time is hidden."""
    caption = "compiler estimates; in brackets the share of the communication that is hidden"
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in records:
        names = {name: one[name] for name in ("collective", "program")}
        hidden = f" ({one['hidden_us'] / one['communication_us']:.0%})" if one["communication_us"] else ""
        lines.setdefault((*names.values(),), names)[size_name(one["size_bytes"])] = f"{one['made_of_it']}{hidden}"
    sizes = [Metric(size, head=size, words=True) for size in dict.fromkeys(size_name(one["size_bytes"]) for one in records)]
    metrics = (*chosen(MICRO, "collective program"), *sizes)
    title = f"collectives beside products on {chip}"
    return FigureTable(title, "", {"": list(lines.values())}, metrics, caption=caption, apart="collective")
