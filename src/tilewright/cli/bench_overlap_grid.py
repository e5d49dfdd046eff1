"""Predictions and measurements of `tilewright bench overlap` by input, output, batch, number of devices and schedule."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import jax
from rich.console import Console

from tilewright.bench import overlap_here
from tilewright.bench.overlap import SCHEDULES, OverlapSetup
from tilewright.bench.overlap_grid import GridCase, predictions, scaled
from tilewright.cli.calibrate import CompilerOptions, TpuProgramOptions, print_notes, print_ranges
from tilewright.cli.options import Group, Numbers, Words, check_choices, check_least, option_class
from tilewright.cli.outputs import PageFiles, progress
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import slice_of
from tilewright.metrics.tables import grouped, print_table
from tilewright.models.published_configs import model_config
from tilewright.parallel.auto import AUTO
from tilewright.report.overlap_grid import (
    CPUS,
    PREDICTED,
    device_kind,
    grid_estimates,
    measured_table,
    predicted_table,
    write_grid,
)

RUN_HERE = ("sync", "sequence", "ring", "domino", "column", AUTO)
"""Schedules that give the tokens of one device. `exact` sums in another order."""
SHAPES = Group("Models and shapes", sort_key=2)


@option_class(group=SHAPES)
class GridOptions(TpuProgramOptions):
    """Options of the model and its shapes. Several values are separated by spaces or commas.

    Attributes:
        input: tokens of each prompt.
        output: tokens generated in each row.
        batch: numbers of rows.
        tensor_parallel: numbers of devices.
        schedule: sync, sequence, ring, domino, column, exact, auto. exact does not run on this machine.
        here_divisor: divisor of input and output tokens on this machine's devices.
    """

    input: Numbers = (1024, 4096)
    output: int = 512
    batch: Numbers = (4, 8)
    tensor_parallel: Numbers = (2, 4, 8)
    schedule: Words = ("sync", "sequence", "ring")
    here_divisor: int = 16
    compiler_options: CompilerOptions = False

    def cases(self) -> list[GridCase]:
        """Returns a case for each input and batch. Raises a `ValueError` for an option that is unknown or out of range."""
        check_choices(self, schedule=SCHEDULES)
        check_least(self, input=2, output=2, batch=1, tensor_parallel=1, here_divisor=1)
        return [GridCase(one, self.output, batch) for one, batch in product(self.input, self.batch)]

    def setups(self, chips: Sequence[str]) -> list[OverlapSetup]:
        """Returns a setup for each kind of chip and number of devices.

        Raises:
            ValueError: There is no slice of this size, or the model cannot be sharded over it.
        """
        if not chips:
            return []
        slices = [(slice_of(kind, devices), devices) for kind in chips for devices in sorted(self.tensor_parallel)]
        config = model_config(self.model_config)
        found = []
        fitted = self.calibrations(topology for topology, _ in slices)
        for topology, devices in slices:
            options = {"compiler_options": self.compiler_options, "calibration": fitted[topology]}
            found.append(OverlapSetup(topology, self.model_config, config, self.layers, hop_us=self.hop_us, **options))
            found[-1].check(devices)
        return found


def bench_grid(grid: GridOptions, chips: Sequence[str], here: bool | None, files: PageFiles) -> None:
    """Predicts and measures latencies, prints tables and writes files."""
    console = files.console()
    cases = grid.cases()
    setups = grid.setups(chips)
    if here and jax.device_count() == 1:
        raise ValueError("expected several devices for --here, found one")
    runs = here if here is not None else jax.device_count() > 1
    if not runs and not setups:
        raise ValueError("expected a chip or several devices, found neither")
    small = [scaled(case, grid.here_divisor) for case in cases] if runs else []
    names = [name for name in grid.schedule if name in RUN_HERE] if runs else []
    widths = local_widths(grid) if runs else []
    found: dict[str, list[dict[str, Any]]] = {"predicted": [], "measured": []}
    total = 2 * len(setups) * len(cases) * len(grid.schedule) + len(small) * (1 + len(names) * len(widths))
    with progress(console, total) as step:
        found["predicted"], drawn = predictions(setups, cases, grid.schedule, step, grid.draws)
        if runs:
            found["measured"] = measurements(small, widths, names, grid.compiler_options, step)
    about = environment(grid, setups, runs)
    ranges = {name: one.record() for name, one in drawn.items()}
    shown = (found["predicted"], found["measured"], about, ranges)
    files.write(console, {**about, **found, "ranges": ranges}, lambda path: write_grid(path, *shown))
    show(console, found)
    for name, one in ranges.items():
        print_ranges(console, name, [one])
    if any(one["same_tokens"] is False for one in found["measured"]):
        raise SystemExit(1)


def local_widths(grid: GridOptions) -> list[int]:
    """Returns the numbers of `--tensor-parallel` that fit this machine; with several processes, only all devices.

    Raises:
        ValueError: No number fits.
    """
    count = jax.device_count()
    fits = [n for n in sorted(grid.tensor_parallel) if n == count or (1 < n < count and jax.process_count() == 1)]
    if not fits:
        raise ValueError(
            f"expected --tensor-parallel with a number up to the {count} devices of this machine, found {grid.tensor_parallel}"
        )
    return fits


def measurements(
    cases: Sequence[GridCase],
    widths: Sequence[int],
    names: Sequence[str],
    compiler_options: bool,
    on_run: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Returns records of each case on one device, then for each number of devices and schedule, with compared tokens."""
    found = []
    expected = []
    variants: list[tuple[int, str | None]] = [(1, None), *product(widths, names)]
    for devices, name in variants:
        lm = overlap_here.model(devices, name, compiler_options)
        for number, case in enumerate(cases):
            on_run(f"here {case.batch}x{case.input_tokens} over {devices}" + (f" {name}" if name else ""))
            record, tokens = overlap_here.measured(lm, case, expected[number] if name else None)
            if name is None:
                expected.append(tokens)
            found.append(record)
    return found


def environment(grid: GridOptions, setups: Sequence[OverlapSetup], ran: bool) -> dict[str, Any]:
    """Returns the settings of the figures."""
    predicted = grid.facts({setup.chip: setup.fabric for setup in setups}) if setups else {}
    about = {name: predicted.get(name) for name in ("model", "hop_us", "libtpu_version")}
    about |= {"measured_on": chip_name() if ran else None, "measured_platform": jax.devices()[0].platform if ran else None}
    about |= {"compiler_options": grid.compiler_options}
    return {**about, "processes": jax.process_count() if ran else None, "jax_version": jax.__version__}


def show(console: Console, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Prints a table of predictions for each kind of chip, and one of measurements."""
    for kind, records in grouped(found["predicted"], device_kind).items():
        print_table(console, predicted_table(f"predicted for {kind}", records))
        console.print(grid_estimates(records), markup=False)
        print_notes(console, records)
        console.print(PREDICTED)
    if found["measured"]:
        print_table(console, measured_table(f"measured on {chip_name()}", found["measured"]))
        if jax.devices()[0].platform == "cpu":
            console.print(CPUS)
