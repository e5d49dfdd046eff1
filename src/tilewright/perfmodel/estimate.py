"""Estimates of many layers from two simulations of few layers, by linear extrapolation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tilewright.perfmodel.machine import Machine
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.results import SimulationResult
from tilewright.perfmodel.simulate import simulate


@dataclass(frozen=True)
class ProgramEstimate:
    """Metrics of a whole program.

    Attributes:
        total_s: seconds of the program.
        moments_s: seconds by kind of moment; see `results.py`.
        busy_s: busy seconds of each engine, the DMA engines and each stream.
        delay_s: seconds that ready tensor-parallel collectives queued behind others.
        memory_bytes: peak device memory of a core.
        hbm_bytes: a core's share of the device memory.
        layer_exposed_s: exposed communication of one more layer.
        notes: assumptions.
    """

    total_s: float
    moments_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    delay_s: float
    memory_bytes: float
    hbm_bytes: float
    layer_exposed_s: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.hbm_bytes

    @property
    def limit(self) -> str:
        """Name of the busiest resource."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    @property
    def limit_share(self) -> float:
        """Share of the time that `limit` is busy."""
        return self.busy_s[self.limit] / self.total_s

    def record(self) -> dict[str, Any]:
        """Returns the metrics that every plan reports, named as in docs/metrics.md."""
        return {
            **{f"{name}_ms": 1e3 * seconds for name, seconds in self.moments_s.items()},
            "layer_exposed_ms": 1e3 * self.layer_exposed_s,
            "tp_delay_ms": 1e3 * self.delay_s,
            "memory_gib": self.memory_bytes / 2**30,
            "fits": self.fits,
            "limit": self.limit,
            "limit_share": self.limit_share,
        }


def estimate(layers: int, few: tuple[int, int], build: Callable[[int], NeuronProgram], machine: Machine) -> ProgramEstimate:
    """Simulates a program with two numbers of layers, and extrapolates linearly to all layers.

    Args:
        layers: layers of the model; up to the larger of `few`, all layers are simulated.
        few: the two numbers of layers to simulate, ascending.
        build: builds the program of a number of layers.

    Raises:
        ValueError: the program cannot run.
    """
    if layers <= few[1]:
        result = simulate(build(layers), machine)
        return replace(between(result, result, 0.0, 1), layer_exposed_s=result.moments_s["exposed"] / layers)
    low, high = (simulate(build(count), machine) for count in few)
    return between(low, high, (layers - few[1]) / (few[1] - few[0]), few[1] - few[0])


def between(low: SimulationResult, high: SimulationResult, further: float, apart: int) -> ProgramEstimate:
    """Adds `further` times the difference of two results to the second; `apart` is their difference in layers."""

    def on(a: float, b: float) -> float:
        return b + further * (b - a)

    machine = high.machine
    return ProgramEstimate(
        on(low.total_s, high.total_s),
        {name: on(low.moments_s[name], high.moments_s[name]) for name in high.moments_s},
        {name: on(low.busy_s[name], high.busy_s[name]) for name in high.busy_s},
        on(low.delay_s("tp"), high.delay_s("tp")),
        on(low.memory_bytes, high.memory_bytes),
        machine.hbm_bytes,
        (high.moments_s["exposed"] - low.moments_s["exposed"]) / apart,
        high.program.notes,
    )
