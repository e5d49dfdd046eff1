"""`tilewright inspect trace`: compares a profiler's trace of a program with its prediction, operation by operation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tilewright.cli.calibrate import TpuModelOptions, print_notes, print_ranges
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.hardware.links import Fabric, slice_fabric
from tilewright.hardware.tpu import KINDS, chip_of
from tilewright.metrics.metric import significant
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.metrics.traced import OPERATIONS, PARTS
from tilewright.perfmodel.calibration import calibrated
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import Timeline, simulate
from tilewright.perfmodel.timeline_ranges import sweep_timelines
from tilewright.perfmodel.traced import compare, module_name, program_in
from tilewright.perfmodel.uncertainty import Sweep
from tilewright.perfmodel.xplane import read_trace

RUN = "run"
"""Name of the prediction with a range."""

NAMED = 5
"""Unmeasured operations to name on a line; the JSON file has all."""


def inspect_trace(
    trace: Path,
    hlo: Path,
    /,
    *,
    chip: str,
    program: str = "",
    top: int = 20,
    model: TpuModelOptions = TpuModelOptions(),
    json_file: JsonFile = None,
) -> None:
    """Compares a profiler's trace of a program with its prediction, operation by operation.

    The prediction uses compiler estimates and a model of links and memory. docs/metrics.md defines the figures.

    Args:
        trace: an .xplane.pb file, or a folder of jax.profiler.trace, of which the newest trace is read.
        hlo: text of the compiled program: compiled.as_text(), or the dump of XLA_FLAGS=--xla_dump_to=FOLDER after
            optimizations.
        chip: topology that the program ran on, such as v5e:4x2, v5p:2x2x2 or v6e:1x1. Its devices count as a ring.
        program: name of the program in the trace, if several programs there have the name of the module.
        top: number of operations in the table, longest first; the JSON file has all.
    """
    console = human_console(json_file)
    if top < 1:
        raise ValueError(f"expected --top from 1, found {top}")
    text = hlo.read_text(encoding="utf-8")
    fabric, timeline, sweep = predicted(text, chip, model)
    traced = program_in(read_trace(trace), module_name(text), program)
    kind = chip_of(chip).name
    kinds = {lower.lower(): name for lower, name in KINDS.items()}
    if (other := kinds.get(traced.device_kind.lower(), kind)) != kind:
        raise ValueError(f"expected a trace of {kind}, found one of {other} ({traced.device_kind})")
    found = compare(timeline, text, traced)
    record = found.record()
    show(console, chip, record, top)
    print_notes(console, [record])
    print_ranges(console, f"prediction for {chip}", [sweep.record()])
    low, high = sweep.range(RUN)
    place = "below" if found.measured_us < low else "above" if found.measured_us > high else "inside"
    console.print(f"The measured run, {significant(found.measured_us)} us, is {place} the range.")
    write_json(json_file, {"chip": chip, "hop_us": float(fabric.hop_us), "data": record, "ranges": sweep.record()})


def predicted(text: str, chip: str, model: TpuModelOptions) -> tuple[Fabric, Timeline, Sweep]:
    """Predicts a run of a program on a slice. Returns the slice's links, the timeline, and the range of the run."""
    fitted = model.calibrations([chip])[chip]
    fabric = calibrated(slice_fabric(chip, model.hop_us), fitted)
    timeline = simulate(read_schedule(text, fabric.chip), fabric)
    rough = timeline.roofline_share(timeline.layers)
    sweep = sweep_timelines(
        {RUN: timeline}, fabric, lambda _, one: 1e6 * one.whole().total_s, fitted, rough, model.draws, "us a run"
    )
    return fabric, timeline, sweep


def show(console: Console, chip: str, record: Mapping[str, Any], top: int) -> None:
    """Prints a table of the run's parts, a table of operations, and the operations of only one side."""
    shortest, longest = map(significant, record["run_range_us"])
    console.print(
        f"{record['program']}: predicted for {chip}; measured on {record['devices']} x {record['device_kind']}, "
        f"{record['runs']} runs of {shortest} to {longest} us",
        markup=False,
    )
    print_table(console, FigureTable("A run", "part", {"": record["parts"]}, PARTS[1:]))
    shown = record["operations"][:top]
    title = f"The longest {len(shown)} of {len(record['operations'])} operations"
    columns = [metric for metric in OPERATIONS if metric.head]
    print_table(console, FigureTable(title, "operation", {"": shown}, columns))
    if not record["device_kind"].startswith("TPU"):
        console.print(f"measured on a {record['device_kind']}, but predicted for {chip}", style="yellow")
    console.print(
        f"{record['matched_operations']} of {record['traced_operations']} operations of the trace are in the program, with "
        f"{record['matched_share']:.1%} of the measured time."
    )
    if names := record["untraced_operations"]:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        listed = f"{', '.join(names[:NAMED])}{more}"
        console.print(f"Not in the trace, {significant(record['untraced_us'])} us predicted: {listed}", markup=False)
    console.print(
        f"Operations without an estimate, at the full roofline: {record['without_estimate']}, with "
        f"{record['without_estimate_share']:.1%} of the measured time."
    )
