"""Fits a hop's latency and the DMA engines' rate to measured collectives, and says how well held-out ones are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np

from tilewright.hardware.neuron import instance_of
from tilewright.perfmodel.machine import HOP_US, Machine, machine_of, with_figures
from tilewright.perfmodel.program import CC, Collective, NeuronProgram, QueuedOp
from tilewright.perfmodel.simulate import simulate

INSTANCE = "inf2.48xlarge"
"""Taken for the one that was measured, which is not named."""

Point = tuple[float, float]
"""Bytes of the whole array, and microseconds."""

PUBLISHED: tuple[Point, ...] = (
    (1024, 58), (4096, 58), (16384, 58), (65536, 58), (262144, 60), (1048576, 68), (4194304, 107), (16777216, 332),
    (67108864, 1214), (268435456, 4750), (1073741824, 18930),
)  # fmt: skip
"""An all-reduce over two ranks of one instance, which is not named: tools/neuron-sys-tools/nccom-test, single instance
examples; "should not be considered up-to-date"."""


@dataclass(frozen=True)
class Calibration:
    """A machine that was fitted to a part of a curve.

    Attributes:
        fitted, held_out: (bytes, measured us, simulated us).
    """

    machine: Machine
    fitted: tuple[tuple[float, float, float], ...]
    held_out: tuple[tuple[float, float, float], ...]

    @property
    def error(self) -> float:
        """Geometric mean of how far held-out times are off, as a factor above 1, less 1."""
        return exp(sum(abs(log(found / measured)) for _, measured, found in self.held_out) / len(self.held_out)) - 1

    def record(self) -> dict[str, Any]:
        """Figures, named as in docs/metrics.md."""
        rows = [(name, *row) for name, rows in (("fitted", self.fitted), ("held out", self.held_out)) for row in rows]
        return {
            "hop_us": self.machine.settings.hop_us,
            "dma_gb_per_s": self.machine.instance.chip.core.dma_gb_per_s,
            "geometric_mean_error": self.error,
            "plans_hop_us": HOP_US,
            "plans_dma_gb_per_s": instance_of(INSTANCE).chip.core.dma_gb_per_s,
            "points": [
                {"role": role, "bytes": size, "measured_us": measured, "simulated_us": simulated}
                for role, size, measured, simulated in sorted(rows, key=lambda row: row[1])
            ],
        }  # fmt: skip


def collective_us(machine: Machine, collective: Collective) -> float:
    """Microseconds of a collective by itself, from its trigger to the signal of its end."""
    return (
        1e6 * simulate(NeuronProgram("one collective", (QueuedOp("collective", CC, collective=collective),)), machine).total_s
    )


def calibrate(points: Sequence[Point] = PUBLISHED) -> Calibration:
    """Fits all-reduces over two ranks on every second point, in order of size, and simulates all of them.

    Times are a latency and bytes over a rate; least squares of the relative error give both, and the machine gets the hop
    latency and the DMA rate with which it has them.

    Raises:
        ValueError: fewer than four points, or such from which no latency or rate above 0 follows.
    """
    ordered = sorted(points)
    if len(ordered) < 4:
        raise ValueError(f"expected at least 4 points, 2 of them to hold out, found {len(ordered)}")
    fitted, held_out = ordered[::2], ordered[1::2]
    sizes, times = (np.array(column, float) for column in zip(*fitted, strict=True))
    terms = np.stack([1 / times, sizes / times], axis=1)
    (latency_us, us_per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
    machine = machine_of(instance_of(INSTANCE), tp=2)
    steps = 2  # a reduce-scatter and an all-gather of half the bytes each
    hop_us = (float(latency_us) - machine.settings.signal_us) / steps
    if hop_us <= 0 or us_per_byte <= 0:
        raise ValueError(
            f"expected times that grow with bytes from a latency, found {latency_us:.3g} us and {us_per_byte:.3g} us/byte"
        )
    rate = 1e-3 / float(us_per_byte) / machine.instance.chip.core.dma_engines
    machine = with_figures(machine, {"hop_us": hop_us, "dma_gb_per_s": rate})

    def simulated(rows: Sequence[Point]) -> tuple[tuple[float, float, float], ...]:
        return tuple((size, us, collective_us(machine, Collective("all-reduce", size, algorithm="ring"))) for size, us in rows)

    return Calibration(machine, simulated(fitted), simulated(held_out))
