"""The grid of `tilewright bench overlap`: input, output, batch, number of devices, schedule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tilewright.bench import overlap_here
from tilewright.bench.model_configs import model_config
from tilewright.bench.overlap import SCHEDULES, OverlapSetup
from tilewright.bench.overlap_grid import GridCase, predictions, scaled, slice_of
from tilewright.cli.bench_round import NUMBERS
from tilewright.cli.calibrate import calibrated_for, print_ranges
from tilewright.cli.common import WORDS, human_console, whole_file, write_json
from tilewright.compiled.machine import chip_name
from tilewright.hardware.tpu import chip_of
from tilewright.metrics.metric import significant
from tilewright.parallel.auto import AUTO
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.overlap_grid import CPUS, PREDICTED, grid_estimates, write_grid
from tilewright.report.terminal import print_table

RUN_HERE = ("sync", "sequence", "ring", "domino", "column", AUTO)
"""Schedules whose tokens are those of one device. `exact` sums in an order of its own."""


@Parameter(name="*")
@dataclass(frozen=True)
class GridOptions:
    """The grid. The options of several values take them with commas or blanks between them.

    Attributes:
        model_config: what is predicted: a name or a folder as for `tilewright inspect overlap`.
        input: tokens of each prompt, several.
        output: tokens that each row is given.
        batch: rows, several.
        tensor_parallel: numbers of devices, several.
        schedule: sync, sequence, ring, domino, column, exact, auto: several. exact doesn't run here.
        layers: how many are compiled for a prediction, of which the middle one stands for all; by default as many as it takes
            for it to be like its neighbours, up to 13.
        here_divisor: of the tokens one in so many is left on devices that are here.
        compiler_options: compile with the options of parallel/compiling.py, by which transfers begin earlier; they were tuned
            on this model of time, and no TPU has tried them.
        calibrate: JSON of "bench overlap --micro" on several devices, to which constants of links, products and memory are
            fitted.
        draws: of the constants that have a range.
    """

    model_config: str = "llama3-8b"
    input: Annotated[tuple[int, ...], NUMBERS] = (1024, 4096)
    output: int = 512
    batch: Annotated[tuple[int, ...], NUMBERS] = (4, 8)
    tensor_parallel: Annotated[tuple[int, ...], NUMBERS] = (2, 4, 8)
    schedule: Annotated[tuple[str, ...], WORDS] = ("sync", "sequence", "ring")
    layers: int | None = None
    here_divisor: int = 16
    compiler_options: bool = False
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def cases(self) -> list[GridCase]:
        """One for each input and batch.

        Raises:
            ValueError: an option is none that there is.
        """
        for name in self.schedule:
            if name not in SCHEDULES:
                raise ValueError(f"expected a schedule of {', '.join(SCHEDULES)}, found {name!r}")
        several = {"input": self.input, "batch": self.batch, "tensor-parallel": self.tensor_parallel, "schedule": self.schedule}
        for name, given in several.items():
            if not given:
                raise ValueError(f"expected at least one --{name}, found none")
        least = {"input": min(self.input), "output": self.output, "batch": min(self.batch), "here-divisor": self.here_divisor}
        for name, value in {**least, "tensor-parallel": min(self.tensor_parallel)}.items():
            if value < (2 if name in ("input", "output") else 1):
                raise ValueError(f"expected --{name} from {2 if name in ('input', 'output') else 1}, found {value}")
        return [GridCase(one, self.output, batch) for one, batch in product(self.input, self.batch)]

    def setups(self, chips: Sequence[str], hop_us: float) -> list[OverlapSetup]:
        """One for each kind of chip and number of devices.

        Raises:
            ValueError: there is no such slice, or it cannot divide the model.
        """
        if not chips:
            return []
        slices = [(slice_of(kind, devices), devices) for kind in chips for devices in sorted(self.tensor_parallel)]
        config, found = model_config(self.model_config), []
        fitted = calibrated_for(self.calibrate, map(chip_of, chips))
        for topology, devices in slices:
            options = {"hop_us": hop_us, "compiler_options": self.compiler_options}
            calibration = fitted.get(chip_of(topology).name)
            found.append(OverlapSetup(topology, self.model_config, config, self.layers, **options, calibration=calibration))
            found[-1].check(devices)
        return found


def bench_grid(
    grid: GridOptions, chips: Sequence[str], here: bool | None, hop_us: float, json_file: str | None, html: Path | None
) -> None:
    """Predicts, runs, and writes what was asked for."""
    cases, setups, console = grid.cases(), grid.setups(chips, hop_us), human_console(json_file)
    if here and jax.device_count() == 1:
        raise ValueError("expected several devices here for --here, found one")
    runs = here if here is not None else jax.device_count() > 1
    if not runs and not setups:
        raise ValueError("expected a chip, or several devices here; found neither")
    small = [scaled(case, grid.here_divisor) for case in cases] if runs else []
    names = [name for name in grid.schedule if name in RUN_HERE] if runs else []
    widths = local_widths(grid) if runs else []
    found: dict[str, list[dict[str, Any]]] = {"predicted": [], "measured": []}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        total = 2 * len(setups) * len(cases) * len(grid.schedule) + len(small) * (1 + len(names) * len(widths))
        task = bar.add_task("", total=total)

        def on_run(name: str) -> None:
            bar.update(task, advance=1, description=name)

        found["predicted"], drawn = predictions(setups, cases, grid.schedule, on_run, grid.draws)
        if runs:
            found["measured"] = measurements(small, widths, names, grid.compiler_options, on_run)
    about = environment(grid, hop_us, bool(setups), runs)
    ranges = {name: one.record() for name, one in drawn.items()}
    show(console, found)
    for name, one in ranges.items():
        print_ranges(console, name, [one])
    write_json(json_file, {**about, **found, "ranges": ranges})
    if html is not None:
        with whole_file(html) as partial:
            write_grid(partial, found["predicted"], found["measured"], about, ranges)
        console.print(f"{html} written", markup=False)
    if any(one["same_tokens"] is False for one in found["measured"]):
        raise SystemExit(1)


def local_widths(grid: GridOptions) -> list[int]:
    """The numbers of devices that are here: of those asked for; over several processes all of them, as it must be.

    Raises:
        ValueError: none of those asked for.
    """
    count = jax.device_count()
    fits = [n for n in sorted(grid.tensor_parallel) if n == count or (1 < n < count and jax.process_count() == 1)]
    if not fits:
        raise ValueError(
            f"expected --tensor-parallel with a number that the {count} devices here have, found {grid.tensor_parallel}"
        )
    return fits


def measurements(
    cases: Sequence[GridCase],
    widths: Sequence[int],
    names: Sequence[str],
    compiler_options: bool,
    on_run: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A record for each case on one device, then for each number of devices and schedule, whose tokens are compared with it."""
    found, wanted = [], []
    ways: list[tuple[int, str | None]] = [(1, None), *product(widths, names)]
    for devices, name in ways:
        lm = overlap_here.model(devices, name, compiler_options)
        for number, case in enumerate(cases):
            on_run(f"here {case.batch}x{case.input_tokens} over {devices}" + (f" {name}" if name else ""))
            record, tokens = overlap_here.measured(lm, case, wanted[number] if name else None)
            if name is None:
                wanted.append(tokens)
            found.append(record)
    return found


def environment(grid: GridOptions, hop_us: float, predicted: bool, ran: bool) -> dict[str, Any]:
    """Settings that the figures depend on."""
    about: dict[str, Any] = {"model": grid.model_config if predicted else None, "hop_us": hop_us if predicted else None}
    about |= {"libtpu_version": version("libtpu") if predicted else None}
    about |= {"measured_on": chip_name() if ran else None, "measured_platform": jax.devices()[0].platform if ran else None}
    about |= {"compiler_options": grid.compiler_options}
    return {**about, "processes": jax.process_count() if ran else None, "jax_version": jax.__version__}


def show(console: Console, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A table of the predictions for each kind of chip, and one of what ran."""
    for kind in dict.fromkeys(kind_of(one) for one in found["predicted"]):
        of = [one for one in found["predicted"] if kind_of(one) == kind]
        print_table(console, table_of(f"predicted for {kind}", of, predicted_cells, PREDICTED_HEADS))
        console.print(grid_estimates(of), markup=False)
        for note in dict.fromkeys(note for one in of for note in one["notes"]):
            console.print(note, style="yellow", markup=False)
        console.print(PREDICTED)
    if found["measured"]:
        print_table(console, table_of(f"run on {chip_name()}", found["measured"], measured_cells, MEASURED_HEADS))
        if jax.devices()[0].platform == "cpu":
            console.print(CPUS)


def kind_of(record: Mapping[str, Any]) -> str:
    return record["chip"].partition(":")[0]


CASE_HEADS = ("input", "output", "batch", "devices")
PREDICTED_HEADS = (
    "TTFT ms", "of it\nexposed", "of\nsync's", "compute\nof sync's", "TPOT ms", "of it\nexposed", "of\nsync's", "tokens/s",
    "fits",
)  # fmt: skip
MEASURED_HEADS = ("TTFT ms", "TPOT ms", "tokens/s", "same\ntokens", "collectives\nprefill", "KiB", "collectives\na step", "KiB")


def table_of(
    title: str, records: Sequence[Mapping[str, Any]], cells: Callable[[Mapping[str, Any]], list[str]], heads: Sequence[str]
) -> Table:
    """A line for each record, in the order of the cases."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (*CASE_HEADS, "schedule", *heads):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    ordered = sorted(records, key=lambda one: (one["input_tokens"], one["batch_rows"], one["devices"]))
    for one, after in zip(ordered, [*ordered[1:], None], strict=True):
        case = [str(one[key]) for key in ("input_tokens", "output_tokens", "batch_rows", "devices")]
        table.add_row(
            *case, one["schedule"] or "", *cells(one), end_section=after is None or after["batch_rows"] != one["batch_rows"]
        )
    return table


def predicted_cells(one: Mapping[str, Any]) -> list[str]:
    first, step = (
        significant(one[f"{name}_ms"]) + ("" if one[f"{phase}_steady"] else "\nnot steady")
        for name, phase in (("ttft", "prefill"), ("tpot", "decode"))
    )
    exposed = (f"{one['prefill_exposed_ms'] / one['ttft_ms']:.0%}", f"{one['decode_exposed_ms'] / one['tpot_ms']:.0%}")
    shares = (one[f"{name}_over_sync"] for name in ("ttft", "prefill_compute", "tpot"))
    of_sync = ["" if share is None else f"{share:.2f}" for share in shares]
    return [
        first,
        exposed[0],
        *of_sync[:2],
        step,
        exposed[1],
        of_sync[2],
        f"{one['output_tokens_per_s']:,.0f}",
        "yes" if one["fits"] else "no",
    ]


def measured_cells(one: Mapping[str, Any]) -> list[str]:
    times = [significant(one["ttft_ms"]), significant(one["tpot_ms"]), f"{one['output_tokens_per_s']:,.0f}"]
    same = "" if one["same_tokens"] is None else "yes" if one["same_tokens"] else "no"
    counts = []
    for name in ("prefill", "step"):
        kinds = " + ".join(f"{count} {kind}" for kind, count in sorted(one[f"{name}_collectives"].items()))
        counts += [kinds, f"{one[f'{name}_sent_bytes'] / 1024:,.0f}"]
    return [*times, same, *counts]
