"""`tilewright bench overlap`: latencies by schedule (`bench_overlap_grid.py`), or single collectives beside a matmul."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright.bench.overlap_micro import AXIS, COLLECTIVES, HIDDEN, ROWS, MicroCase, cases, compiled, measured
from tilewright.cli.bench_overlap_grid import GridOptions, bench_grid
from tilewright.cli.common import given
from tilewright.cli.options import COMMON, Group, Numbers, Words, changed_options, check_least, option_class
from tilewright.cli.outputs import PageFiles, progress
from tilewright.compiled.aot import tpu_topology
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import Metric, select_metrics
from tilewright.metrics.overlap import MICRO
from tilewright.metrics.tables import FigureTable, grouped, print_table
from tilewright.parallel.mesh import make_mesh
from tilewright.report.overlap import measured_micro_table, size_name, write_micro

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2")
KINDS = ("v5e",)
COLLECTIVE = Group("Single collectives (--micro)", sort_key=3)


@option_class(group=COLLECTIVE)
class PlaceOptions:
    """Options of devices and of single collectives. Several values are separated by spaces or commas.

    Attributes:
        micro: measure single collectives beside a matmul instead of a model.
        chip: TPUs to compile for, or "none": kinds such as v5e (the default); with --micro topologies, by default
            v5e:4x2,v5p:2x2x2,v6e:4x2.
        here: also run on this machine's devices. By default if there are several; with --micro, only if they are no CPUs.
        collective: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute; all by default.
        size_kib: sizes that each device gives to a collective, in KiB.
        repetitions: number of timed runs on this machine.
        hidden: columns of all matrices.
        product_rows: rows of the matmul's input on each device.
    """

    micro: Annotated[bool, Parameter(negative=(), group=COMMON)] = False
    chip: Annotated[Words | None, Parameter(group=COMMON)] = None
    here: Annotated[bool | None, Parameter(group=COMMON)] = None
    collective: Words = tuple(COLLECTIVES)
    size_kib: Numbers = (64, 1024, 16384)
    repetitions: int = 5
    hidden: int = HIDDEN
    product_rows: int = ROWS

    def chips(self) -> tuple[str, ...]:
        named = given(self.chip, TOPOLOGIES if self.micro else KINDS)
        return () if named == ("none",) else named

    def jobs(self, hop_us: float) -> list[tuple[str | None, list[MicroCase]]]:
        """Returns the cases of each topology; None stands for this machine's devices.

        Raises:
            ValueError: An option is unknown or out of range, or there is nothing to measure.
        """
        check_least(self, repetitions=1)
        if not 0 <= hop_us < float("inf"):
            raise ValueError(f"expected the latency of a hop from 0 us, found {hop_us:g}")
        for chip in self.chips():
            chip_of(chip)  # checks all names before any topology is made
        found: list[tuple[str | None, list[MicroCase]]] = [
            (chip, self.cases(len(tpu_topology(chip).devices))) for chip in self.chips()
        ]
        several = jax.device_count() > 1
        if self.here and not several:
            raise ValueError("expected several devices for --here, found one")
        if self.here or (self.here is None and several and jax.devices()[0].platform != "cpu"):
            found.append((None, self.cases(jax.device_count())))
        if not any(jobs for _, jobs in found):
            raise ValueError("expected a chip, a collective and a size, or --here; found none")
        return found

    def cases(self, devices: int) -> list[MicroCase]:
        """Returns the cases. Raises a `ValueError` for sizes that the devices do not divide."""
        return cases(self.collective, self.size_kib, devices, self.hidden, self.product_rows)


def bench_overlap(
    *,
    options: PlaceOptions = PlaceOptions(),
    grid: GridOptions = GridOptions(),
    files: PageFiles = PageFiles(),
) -> None:
    """Predicts time to first token and time per output token by schedule and number of devices, for fixed shapes.

    Predictions are for absent TPUs, from compiled programs. On several devices, a small model also runs here. --micro compiles
    or runs single collectives beside a matmul. docs/metrics.md defines every figure.
    """
    other: PlaceOptions | GridOptions = grid if options.micro else options
    if wrong := changed_options(other, *vars(other).keys() - {"micro", "chip", "here", "hop_us"}):
        expected, found = ("without", "with") if options.micro else ("with", "without")
        raise ValueError(f"expected {min(wrong)} {expected} --micro, found it {found}")
    if options.micro:
        micro(options, grid.hop_us, files)
    else:
        bench_grid(grid, options.chips(), options.here, files)


def micro(options: PlaceOptions, hop_us: float, files: PageFiles) -> None:
    """Compiles and measures single collectives beside a matmul."""
    console = files.console()
    jobs = options.jobs(hop_us)
    found: dict[str, list[dict[str, Any]]] = {"compiled": [], "measured": []}
    with progress(console, sum(len(each) for _, each in jobs)) as step:
        for chip, chip_cases in jobs:
            mesh = make_mesh({AXIS: None}) if chip is None else None
            for case in chip_cases:
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
    """Returns the settings of the figures."""
    shape = f"[{options.product_rows}, {options.hidden}] x [{options.hidden}, {options.hidden}], bfloat16"
    about: dict[str, Any] = {"product": shape, "hop_us": hop_us, "devices": jax.device_count() if ran else None}
    about |= {"jax_version": jax.__version__, "libtpu_version": version("libtpu") if options.chips() else None}
    return {**about, "measured_on": chip_name() if ran else None, "repetitions": options.repetitions if ran else None}


def show(console: Console, compiled: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table for each chip, and one of the measurements."""
    for chip, records in grouped(compiled, "chip").items():
        print_table(console, compiled_table(chip, records))
    if measured:
        caption = "medians; hidden: time saved against running one after the other, over the collective's time; may be below 0"
        print_table(console, measured_micro_table(f"collectives beside matmuls on {chip_name()}", measured, caption))


def compiled_table(chip: str, records: Sequence[Mapping[str, Any]]) -> FigureTable:
    """Returns a table with a line for each program: its compiled collectives at each size, with their hidden share."""
    caption = "compiler estimates; in parentheses the hidden share of communication"
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for one in records:
        names = {name: one[name] for name in ("collective", "program")}
        hidden = f" ({one['hidden_us'] / one['communication_us']:.0%})" if one["communication_us"] else ""
        lines.setdefault((*names.values(),), names)[size_name(one["size_bytes"])] = f"{one['made_of_it']}{hidden}"
    sizes = [Metric(size, head=size, words=True) for size in dict.fromkeys(size_name(one["size_bytes"]) for one in records)]
    metrics = (*select_metrics(MICRO, "collective program"), *sizes)
    title = f"collectives beside matmuls on {chip}"
    return FigureTable(title, "", {"": list(lines.values())}, metrics, caption=caption, section_by="collective")
