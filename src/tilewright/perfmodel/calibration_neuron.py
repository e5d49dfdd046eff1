"""Calibration of a Neuron chip: hop latency and DMA rate, fitted to measured collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tilewright.hardware.neuron import NeuronInstance, instance_of
from tilewright.perfmodel.calibration import PERMUTE, Calibration, Measurement, MeasurementFile, Times, calibrate
from tilewright.perfmodel.machine import Settings, machine_of, with_machine_constants
from tilewright.perfmodel.program import Collective

INSTANCE = "inf2.48xlarge"
"""Assumed instance of AWS's published curve, which names none."""

PUBLISHED = MeasurementFile(
    "AWS's published curve of nccom-test, two ranks",
    "nccom-test",
    tuple(
        Measurement("all-reduce", 2, size, us)
        for size, us in (
            (1024, 58),
            (4096, 58),
            (16384, 58),
            (65536, 58),
            (262144, 60),
            (1048576, 68),
            (4194304, 107),
            (16777216, 332),
            (67108864, 1214),
            (268435456, 4750),
            (1073741824, 18930),
        )
    ),
)
"""All-reduce over two ranks of one unnamed instance: tools/neuron-sys-tools/nccom-test, single instance examples. The source
says "should not be considered up-to-date"."""


def neuron_times(instance: NeuronInstance) -> Times:
    """Returns a model of single collectives on an instance, in closed form; the simulation gives the same times."""

    def times(changes: Mapping[str, float], measurements: Sequence[Measurement]) -> list[float]:
        found = []
        for one in measurements:
            machine = with_machine_constants(machine_of(instance, Settings(), tp=one.devices), changes)
            kind = "permute" if one.kind == PERMUTE else one.kind
            found.append(1e6 * machine.collective_s(Collective(kind, one.whole_bytes)))  # type: ignore[arg-type]
        return found

    return times


def calibrate_neuron(file: MeasurementFile = PUBLISHED, instance: NeuronInstance | None = None) -> Calibration:
    """Fits hop latency and DMA rate to times of nccom-test.

    Args:
        instance: measured instance; by default `INSTANCE`.

    Raises:
        ValueError: the file is not from nccom-test, has a collective that is not modelled, or more ranks than the instance; see
            `calibration.calibrate`.
    """
    if file.tester != "nccom-test":
        raise ValueError(f"expected --calibrate with the output of nccom-test for a Neuron chip, found {file.name}")
    if any(one.kind == "all-to-all" for one in file.measurements):
        raise ValueError(f"{file.name}: expected all-reduces, all-gathers, reduce-scatters or permutes, found all-to-alls")
    measured = instance_of(INSTANCE) if instance is None else instance
    settings = Settings()
    start = {"hop_us": float(settings.hop_us), "dma_gb_per_s": measured.chip.core.dma_gb_per_s / 8}
    found = calibrate(file.name, file.measurements, neuron_times(measured), start)
    return replace(found, source=f"{file.name}, as of {measured.name}")
