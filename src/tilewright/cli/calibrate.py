"""Ranges of predictions in a terminal, and `--calibrate`: constants fitted to a user's measurements."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from tilewright.hardware.tpu import TpuChip
from tilewright.perfmodel.calibration import Calibration, calibrate_tpu, read_measurements


def print_ranges(console: Console, title: str, sweeps: Iterable[Mapping[str, Any]]) -> None:
    """Prints what sweeps found, from their records."""
    console.print(title, markup=False, soft_wrap=True)
    for line in dict.fromkeys(line for one in sweeps for line in one["text"]):
        console.print(f"  {line}", markup=False, soft_wrap=True, highlight=False)


def print_notes(console: Console, records: Iterable[Mapping[str, Any]]) -> None:
    """Prints what records note, each note once."""
    for note in dict.fromkeys(note for one in records for note in one["notes"]):
        console.print(note, style="yellow", markup=False)


def calibrated_for(path: Path | None, chips: Iterable[TpuChip]) -> dict[str, Calibration]:
    """Constants of kinds of TPUs that are fitted to a file of `bench overlap --micro`, by kind; none without a file.

    Raises:
        ValueError: another file; see `read_measurements`.
    """
    if path is None:
        return {}
    file = read_measurements(path)
    return {chip.name: calibrate_tpu(file, chip) for chip in chips}
