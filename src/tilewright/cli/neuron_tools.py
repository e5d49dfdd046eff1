"""`tilewright neuron env` and `tilewright neuron calibrate`."""

from pathlib import Path

from tilewright.cli.options import Words
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.hardware.neuron import instance_of
from tilewright.metrics.ranges import CALIBRATION
from tilewright.metrics.tables import FigureTable, print_table
from tilewright.perfmodel.calibration import read_measurements
from tilewright.perfmodel.calibration_neuron import INSTANCE, PUBLISHED, calibrate_neuron
from tilewright.perfmodel.environment import as_record, recommended
from tilewright.perfmodel.uncertainty import with_range

TITLES = {"jax": "JAX", "nxd": "NeuronX Distributed"}


def environment(*, train: Words = ("fsdp", "tp"), json_file: JsonFile = None) -> None:
    """Prints the environment variables that AWS recommends to hide the collectives of training, with an explanation of each.

    Args:
        train: axes of the mesh of training: fsdp, or fsdp,tp.
    """
    console = human_console(json_file)
    found = recommended(train)
    for framework, variables in found.items():
        console.print(f"# {TITLES[framework]}", markup=False)
        for one in variables:
            console.print(f"# {one.does}", style="dim", markup=False, soft_wrap=True)
            console.print(one.line, markup=False, soft_wrap=True)
        console.print()
    write_json(json_file, {"train": list(train), **{name: as_record(variables) for name, variables in found.items()}})


def calibrate_command(curve: Path | None = None, /, *, instance: str = INSTANCE, json_file: JsonFile = None) -> None:
    """Fits latency and rate of collectives to half of the measurements, and prints the error of predicting the other half.

    Args:
        curve: output of nccom-test, with its command line above each table. By default the curve that AWS publishes.
        instance: the measured instance.
    """
    console = human_console(json_file)
    measured = PUBLISHED if curve is None else read_measurements(curve)
    found = calibrate_neuron(measured, instance_of(instance)).record()
    print_table(console, FigureTable(found["calibrated_against"], "", {"": found["points"]}, CALIBRATION))
    for name, (low, value, high) in found["constants"].items():
        console.print(f"{name} {with_range(value, (low, high))}, two standard errors", markup=False)
    for name in found["unconstrained"]:
        console.print(f"{name} keeps its value: no measured time depends on it", style="yellow", markup=False)
    console.print(f"held-out times are {found['residual']:.1%} off, geometric mean")
    console.print("pass the file to `plan` and `neuron simulate` as --calibrate; without it, these values bound their ranges")
    write_json(json_file, found)
