"""Training plans: prefetch distances, reduce-scatter delays, streams and packet sizes that minimise the step time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.hardware.neuron import NeuronInstance
from tilewright.hardware.ranged import refuse_name
from tilewright.perfmodel.calibration import Calibration, constants_to_sweep, prediction_basis
from tilewright.perfmodel.environment import Variable, recommended_packets, variables
from tilewright.perfmodel.estimate import ProgramEstimate, estimate
from tilewright.perfmodel.machine import (
    CC_PACKET_BYTES,
    DMA_PACKET_BYTES,
    Machine,
    Settings,
    machine_constants,
    machine_of,
    with_machine_constants,
)
from tilewright.perfmodel.shapes import Config
from tilewright.perfmodel.training import TrainingStep, training_program
from tilewright.perfmodel.uncertainty import EVENT_DRAWS, Sweep, sweep_constants

PACKETS = ("default", "recommended")
FEW_LAYERS = (4, 6)
"""Numbers of layers that are simulated; with fewer layers, the memory that shifts need would not be in a steady state."""

COMPARED = 5
"""Number of settings in a sweep, besides the compiler's own order."""


@dataclass(frozen=True)
class Setting:
    """A setting of a train step.

    Attributes:
        streams: number of collective streams.
        packets: packet sizes, `default` or `recommended`.
        prefetch_distance, scatter_delay: shifts in half layers, used if `threaded`. Names, records and commands use layers.
        threaded: tokens fix the order of collectives; otherwise the compiler orders them.
    """

    streams: int
    packets: str
    prefetch_distance: int = 0
    scatter_delay: int = 0
    threaded: bool = True

    @property
    def name(self) -> str:
        shifts = f"prefetch {self.prefetch_distance / 2:g}, delay {self.scatter_delay / 2:g}"
        order = shifts if self.threaded else "compiler's order"
        return f"{self.streams} stream{'s' * (self.streams > 1)}, {self.packets} packets, {order}"

    @property
    def packet_bytes(self) -> tuple[int, tuple[int, ...]]:
        """Packet sizes of compute's transfers, and of each stream."""
        return recommended_packets(self.streams) if self.packets == "recommended" else (DMA_PACKET_BYTES, (CC_PACKET_BYTES,))

    def variables(self) -> list[Variable]:
        """Returns the environment variables of the setting."""
        shifts = (self.prefetch_distance, self.scatter_delay) if self.threaded else (None, None)
        return variables(self.threaded, self.streams, *shifts, self.packet_bytes)


@dataclass(frozen=True)
class TrainingPlan:
    """Comparison of settings of a train step: a model, an instance, a mesh, and the values to try.

    Attributes:
        name: name of the model.
        config: configuration of the model.
        instance: Neuron instance.
        fsdp, tp: ranks along each axis of the mesh.
        streams, packets, prefetch_distance, scatter_delay: values of the settings, tried in all combinations; shifts in half
            layers.
        sequences, positions: sequences, and positions per sequence, of each fully sharded rank.
        layers: numbers of layers that are simulated.
        calibration: source of fitted constants.
    """

    name: str
    config: Config = field(repr=False)
    instance: NeuronInstance
    fsdp: int
    tp: int
    streams: tuple[int, ...] = (1, 2)
    packets: tuple[str, ...] = PACKETS
    prefetch_distance: tuple[int, ...] = (0, 1, 2)
    scatter_delay: tuple[int, ...] = (0, 1, 2, 3)
    sequences: int = 1
    positions: int = 4096
    layers: tuple[int, int] = FEW_LAYERS
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        for packets in self.packets:
            if packets not in PACKETS:
                refuse_name("packet sizes", packets, PACKETS)
        for name in ("streams", "packets", "prefetch_distance", "scatter_delay"):
            if not getattr(self, name):
                raise ValueError(f"expected at least one of {name}, found none")
        for name, shifts in (("prefetch_distance", self.prefetch_distance), ("scatter_delay", self.scatter_delay)):
            if not 0 <= min(shifts) <= max(shifts) <= 2 * min(self.layers[0], self.config.num_layers):
                most = min(self.layers[0], self.config.num_layers)
                shown = ", ".join(f"{shift / 2:g}" for shift in shifts)
                raise ValueError(f"expected --{name.replace('_', '-')} from 0 to {most} layers, found {shown}")
        for setting in self.settings:
            self.machine(setting)

    @property
    def settings(self) -> list[Setting]:
        """All settings of the comparison, the compiler's own order first."""
        compiler_order = Setting(1, "default", threaded=False)
        each = [
            Setting(streams, packets, prefetch_distance, scatter_delay)
            for streams in self.streams
            for packets in self.packets
            for prefetch_distance in self.prefetch_distance
            for scatter_delay in self.scatter_delay
        ]
        return [compiler_order, *each]

    def machine(self, setting: Setting, changes: Mapping[str, float] | None = None) -> Machine:
        """Returns the machine of a setting.

        Raises:
            ValueError: the instance has too few cores for the mesh, or too few collective cores for the streams.
        """
        dma, cc = setting.packet_bytes
        found = machine_of(self.instance, Settings(dma, cc, setting.streams), fsdp=self.fsdp, tp=self.tp)
        fitted = {} if self.calibration is None else self.calibration.constants
        return with_machine_constants(found, {**fitted, **(changes or {})})

    def step(self, setting: Setting) -> TrainingStep:
        return TrainingStep(self.sequences, self.positions, setting.threaded, setting.prefetch_distance, setting.scatter_delay)


def setting_estimate(plan: TrainingPlan, setting: Setting, changes: Mapping[str, float] | None = None) -> ProgramEstimate:
    """Estimates a whole step under a setting."""
    machine = plan.machine(setting, changes)
    step = plan.step(setting)
    return estimate(
        plan.config.num_layers, plan.layers, lambda n: training_program(plan.config, machine, replace(step, layers=n)), machine
    )


def compare(plan: TrainingPlan, done: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Returns a record per setting, with metrics named as in docs/metrics.md; the fastest one that fits into memory first.

    Args:
        done: called with the name of each finished setting.
    """
    found = []
    for setting in plan.settings:
        one = setting_estimate(plan, setting)
        tokens = plan.fsdp * plan.sequences * plan.positions
        found.append(
            {
                "setting": setting.name,
                "threaded": setting.threaded,
                "streams": setting.streams,
                "packets": setting.packets,
                "early_layers": setting.prefetch_distance / 2,
                "late_layers": setting.scatter_delay / 2,
                "step_ms": 1e3 * one.total_s,
                "tokens_per_s": tokens / one.total_s,
                **one.record(),
                "memory_limit_gib": one.hbm_bytes / 2**30,
                "notes": list(one.notes),
            }
        )
        done(setting.name)
    baseline_ms = found[0]["step_ms"]
    for one in found:
        one["gain"] = 1 - one["step_ms"] / baseline_ms
    return sorted(found, key=lambda one: (not one["fits"], one["step_ms"]))


def setting_of(record: Mapping[str, Any]) -> Setting:
    """Reads the setting of a record."""
    prefetch_distance, scatter_delay = (round(2 * record[f"{name}_layers"]) for name in ("early", "late"))
    return Setting(record["streams"], record["packets"], prefetch_distance, scatter_delay, record["threaded"])


def sweep(
    plan: TrainingPlan,
    ranked: Sequence[Mapping[str, Any]],
    draws: int = EVENT_DRAWS,
    progress: Callable[[], None] = lambda: None,
) -> Sweep:
    """Computes ranges of the step times of the fastest settings and of the compiler's own order.

    Args:
        ranked: records of `compare`.
        progress: called after each draw.
    """
    unthreaded = [one for one in ranked if not one["threaded"]]
    settings = [setting_of(one) for one in (*[one for one in ranked if one["threaded"]][:COMPARED], *unthreaded)]
    constants = constants_to_sweep(plan.calibration, machine_constants(plan.machine(settings[0])))

    def predict(changes: Mapping[str, float]) -> dict[str, float]:
        return {one.name: 1e3 * setting_estimate(plan, one, changes).total_s for one in settings}

    return sweep_constants(
        predict, constants, draws, unit="step ms", progress=progress, basis=prediction_basis(plan.calibration)
    )
