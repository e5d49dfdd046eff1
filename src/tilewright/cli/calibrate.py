"""Options of the performance models, with constants fitted to measurements (`--calibrate`), and the output of predictions."""

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright.cli.options import flag, option_class
from tilewright.hardware.links import HOP_US, Fabric
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.ranged import Ranged
from tilewright.hardware.tpu import chip_of
from tilewright.perfmodel.calibration import Calibration, calibrate_tpu, read_measurements
from tilewright.perfmodel.calibration_neuron import calibrate_neuron
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.terminal import percent


def print_ranges(console: Console, title: str, sweeps: Iterable[Mapping[str, Any]]) -> None:
    """Prints the ranges of sweeps, from their records."""
    console.print(title, markup=False, soft_wrap=True)
    for line in dict.fromkeys(line for one in sweeps for line in one["text"]):
        console.print(f"  {line}", markup=False, soft_wrap=True, highlight=False)


def print_notes(console: Console, records: Iterable[Mapping[str, Any]]) -> None:
    """Prints each note of the records once."""
    for note in dict.fromkeys(note for one in records for note in one["notes"]):
        console.print(note, style="yellow", markup=False)


def check_draws(draws: int | None) -> None:
    """Raises a `ValueError` for fewer than 2 draws; None chooses a number by the size of the program."""
    if draws is not None and draws < 2:
        raise ValueError(f"expected --draws from 2, found {draws}")


@option_class
class TpuModelOptions:
    """Options of the performance model of TPU links and memory.

    Attributes:
        hop_us: latency of a hop between neighbours, in microseconds; the default is a working figure that no specification
            gives. Excludes --calibrate, which fits it.
        calibrate: JSON file of "bench overlap --micro" on several devices, to fit constants of links, matmuls and memory.
        draws: draws of the constants that have a range.
    """

    hop_us: float = HOP_US
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def calibrations(self, topologies: Iterable[str]) -> dict[str, Calibration | None]:
        """Fits the constants of each topology to the file of `--calibrate`; None without a file.

        Raises:
            ValueError: the file or a chip is invalid (see `read_measurements` and `chip_of`), there are fewer than 2 draws, or
                `--hop-us` is given too.
        """
        check_draws(self.draws)
        if self.calibrate is not None and not isinstance(
            self.hop_us, Ranged
        ):  # the default is ranged, a value of the user is not
            raise ValueError(f"expected --hop-us or --calibrate, which fits it, found {self.hop_us:g} and {self.calibrate}")
        chips = {name: chip_of(name) for name in topologies}
        file = None if self.calibrate is None else read_measurements(self.calibrate)
        return {name: None if file is None else calibrate_tpu(file, chip) for name, chip in chips.items()}


CompilerOptions = Annotated[
    bool,
    Parameter(
        help="compile with the options of parallel/compiling.py, which start transfers earlier; tuned on this performance "
        "model, not tried on a TPU."
    ),
]


@option_class
class TpuProgramOptions(TpuModelOptions):
    """Options of a model whose programs are compiled for TPUs.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        layers: number of layers to compile; the middle one is reported. By default the fewest for which the middle layer
            equals its neighbours, up to 13.
    """

    model_config: str = "llama3-8b"
    layers: int | None = None

    def facts(self, fabrics: Mapping[str, Fabric], *names: str) -> dict[str, Any]:
        """Returns the inputs of a prediction: the model, the latency of a hop, the named options, and versions.

        The latency is in microseconds, for each topology if it differs between them.
        """
        hops = {topology: float(fabric.hop_us) for topology, fabric in fabrics.items()}
        hop_us = hops if len(set(hops.values())) > 1 else next(iter(hops.values()))
        named = {name: getattr(self, name) for name in names}
        versions = {"jax_version": jax.__version__, "libtpu_version": version("libtpu")}
        return {"model": self.model_config, "dtype": "bfloat16", **named, "hop_us": hop_us, **versions}


def end_if_exposed(console: Console, shares: Mapping[str, float | None], most: float | None) -> None:
    """Exits with status 1 if a program leaves more than this share of its communication exposed, and prints its name."""
    above = {name: share for name, share in shares.items() if most is not None and share is not None and share > most}
    for name, share in above.items():
        console.print(f"{name}: {percent(share)} exposed, more than {percent(most)}", style="red", markup=False)
    if above:
        sys.exit(1)


@option_class
class NeuronOptions:
    """Options of the performance model of Neuron chips.

    Attributes:
        calibrate: output of nccom-test, to fit latency and rate of collectives.
    """

    calibrate: Path | None = None

    def calibration(self, instance: str, draws: int | None) -> Calibration | None:
        """Fits the constants of an instance to the file of `--calibrate`; None without a file.

        Raises:
            ValueError: the file is invalid, or there are fewer than 2 draws.
        """
        check_draws(draws)
        return None if self.calibrate is None else calibrate_neuron(read_measurements(self.calibrate), instance_of(instance))


def half_layers(name: str, text: str) -> int:
    """Converts the text of a shift in layers to half layers. Raises a `ValueError` for no multiple of half a layer from 0."""
    if re.fullmatch(r"\d+(\.[05])?", text) is None:
        raise ValueError(f"expected {flag(name)} in layers, in steps of half a layer, found {text!r}")
    return round(2 * float(text))
