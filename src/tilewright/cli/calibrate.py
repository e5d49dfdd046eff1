"""Options of the models of time, with `--calibrate` constants fitted to measurements; and what predictions have to say."""

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
from cyclopts import Parameter
from rich.console import Console

from tilewright.cli.options import option_class
from tilewright.hardware.links import HOP_US, Fabric
from tilewright.hardware.neuron import instance_of
from tilewright.hardware.ranged import Ranged
from tilewright.hardware.tpu import chip_of
from tilewright.perfmodel.calibration import Calibration, calibrate_tpu, read_measurements
from tilewright.perfmodel.calibration_neuron import calibrate_neuron
from tilewright.perfmodel.uncertainty import EVENT_DRAWS
from tilewright.report.terminal import percent


def print_ranges(console: Console, title: str, sweeps: Iterable[Mapping[str, Any]]) -> None:
    """Prints what sweeps found, from their records."""
    console.print(title, markup=False, soft_wrap=True)
    for line in dict.fromkeys(line for one in sweeps for line in one["text"]):
        console.print(f"  {line}", markup=False, soft_wrap=True, highlight=False)


def print_notes(console: Console, records: Iterable[Mapping[str, Any]]) -> None:
    """Prints what records note, each note once."""
    for note in dict.fromkeys(note for one in records for note in one["notes"]):
        console.print(note, style="yellow", markup=False)


def check_draws(draws: int | None) -> None:
    """Raises a `ValueError` for fewer than 2 draws of a sweep; None stands for as many as a program's size allows."""
    if draws is not None and draws < 2:
        raise ValueError(f"expected --draws from 2, found {draws}")


@option_class
class TpuModelOptions:
    """Options of the model of links and memory of TPUs.

    Attributes:
        hop_us: latency of a hop between neighbours, in microseconds: a working figure, which no specification gives; not beside
            "calibrate", which fits it.
        calibrate: JSON of "bench overlap --micro" on several devices, to which constants of links, products and memory are
            fitted.
        draws: of the constants that have a range.
    """

    hop_us: float = HOP_US
    calibrate: Path | None = None
    draws: int = EVENT_DRAWS

    def calibrations(self, topologies: Iterable[str]) -> dict[str, Calibration | None]:
        """Constants for each topology that are fitted to the file; None without one.

        Raises:
            ValueError: another file, or another chip (see `read_measurements` and `chip_of`); fewer than 2 draws; or a latency
                of a hop besides.
        """
        check_draws(self.draws)
        if self.calibrate is not None and not isinstance(self.hop_us, Ranged):  # the default has a range, a given one has none
            raise ValueError(f"expected --hop-us or --calibrate, which fits it, found {self.hop_us:g} and {self.calibrate}")
        chips = {name: chip_of(name) for name in topologies}
        file = None if self.calibrate is None else read_measurements(self.calibrate)
        return {name: None if file is None else calibrate_tpu(file, chip) for name, chip in chips.items()}


CompilerOptions = Annotated[
    bool,
    Parameter(
        help="compile with the options of parallel/compiling.py, by which transfers begin earlier; they were tuned on this "
        "model of time, and no TPU has tried them."
    ),
]


@option_class
class TpuProgramOptions(TpuModelOptions):
    """Options of a model whose programs are compiled for TPUs.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        layers: how many are compiled, of which the middle one is reported; by default as many as it takes for it to be like its
            neighbours, up to 13.
    """

    model_config: str = "llama3-8b"
    layers: int | None = None

    def facts(self, fabrics: Mapping[str, Fabric], *names: str) -> dict[str, Any]:
        """Facts that predictions depend on: the model, a hop's latency on these fabrics, options of these names, and versions.

        The latency is in microseconds, by topology where it is not the same for all.
        """
        hops = {topology: float(fabric.hop_us) for topology, fabric in fabrics.items()}
        hop_us = hops if len(set(hops.values())) > 1 else next(iter(hops.values()))
        own = {name: getattr(self, name) for name in names}
        versions = {"jax_version": jax.__version__, "libtpu_version": version("libtpu")}
        return {"model": self.model_config, "dtype": "bfloat16", **own, "hop_us": hop_us, **versions}


def end_if_exposed(console: Console, shares: Mapping[str, float | None], most: float | None) -> None:
    """Names the programs that leave more than this share of their communication exposed; with any, ends with status 1."""
    above = {name: share for name, share in shares.items() if most is not None and share is not None and share > most}
    for name, share in above.items():
        console.print(f"{name}: {percent(share)} exposed, more than {percent(most)}", style="red", markup=False)
    if above:
        sys.exit(1)


@option_class
class NeuronModelOptions:
    """Options of the model of Neuron chips, and of what runs there.

    Attributes:
        model_config: llama3-8b, llama3-70b, qwen3-0.6b, qwen3-4b, qwen3-8b, qwen3-32b, or a folder with a config.json.
        instance: inf2.48xlarge, trn1.32xlarge, trn2.48xlarge, trn2-ultraserver or trn3-16.
        calibrate: the output of nccom-test, to which latency and rate of collectives are fitted.
    """

    model_config: str = "llama3-8b"
    instance: str = "inf2.48xlarge"
    calibrate: Path | None = None

    def calibration(self, draws: int | None) -> Calibration | None:
        """Constants of the instance that are fitted to the file; None without one.

        Raises:
            ValueError: another file, or fewer than 2 draws.
        """
        check_draws(draws)
        return (
            None if self.calibrate is None else calibrate_neuron(read_measurements(self.calibrate), instance_of(self.instance))
        )
