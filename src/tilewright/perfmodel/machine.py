"""Machine of simulated programs: an instance, a mesh of its cores, and runtime settings.

This file has the constants of the runtime; `hardware/neuron.py` has those of the hardware.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tilewright.hardware.collectives import CollectiveCosts
from tilewright.hardware.neuron import NeuronInstance
from tilewright.hardware.ranged import Ranged, ranged, refuse_name
from tilewright.perfmodel.collectives import Mesh, steps_of
from tilewright.perfmodel.program import COMPUTE, DMA, Collective

Resource = Hashable

DMA_PACKET_BYTES = 4096
CC_PACKET_BYTES = 65536
"""Default packet sizes of compute's transfers, which can be raised, and of collectives', which can be lowered
(NEURON_RT_DBG_DMA_PACKETIZATION_SIZE, NEURON_RT_DBG_CC_DMA_PACKET_SIZE; neuron-runtime/explore/compute-comm-overlap)."""

HOP_US = Ranged(1.5, 1.0, 2.0, 27.0)
"""Latency of a hop: 1 to 2 us (neuron-runtime/explore/intranode-collective-comm), with the middle as value; 27 us is fitted to
AWS's published curve of its collective tester (`calibration_neuron.py`)."""

PASS_US = 0.2
"""Added latency of each further chip on a path, an assumption; the source calls routed writes O(1) "to a first degree"."""

SIGNAL_US = 1.3
"""Latency from a semaphore to the start of a waiting operation on another engine (nki/deep-dives/nki-dma-bandwidth-guide)."""

DESCRIPTOR_NS = 10.0
"""Time of each descriptor in an engine besides its bytes, an assumption: descriptors of 2 KiB reach 90 % of the rate and those
of 4 KiB 95 %, which that guide calls `approaches peak` and `saturates`."""


@dataclass(frozen=True)
class Limits:
    """Bandwidths that transfers share.

    Attributes:
        dma_bytes_per_s: bytes per second of a DMA engine.
        engines: number of DMA engines of a core.
        others: units per second of other resources, bytes for device memory.
        strict_priority: engines serve a priority class before all higher-numbered ones.
    """

    dma_bytes_per_s: float
    engines: int
    others: Mapping[Resource, float] = field(default_factory=dict)
    strict_priority: bool = False


@dataclass(frozen=True)
class Settings:
    """Settings of the runtime that a user can change, and latencies of the runtime.

    Attributes:
        dma_packet_bytes: packet size of compute's transfers.
        cc_packet_bytes: packet size of collectives' copies, per stream; the last size also holds for further streams.
        streams: number of queues of collectives.
        hop_us, pass_us: latency of a hop to a neighbour, and of each further chip on a path.
        signal_us: latency of a trigger, and of a completion, between engines.
        skew_us: time between the first and the last rank at the begin of a collective; no source gives a value.
    """

    dma_packet_bytes: int = DMA_PACKET_BYTES
    cc_packet_bytes: tuple[int, ...] = (CC_PACKET_BYTES,)
    streams: int = 1
    hop_us: float = HOP_US
    pass_us: float = PASS_US
    signal_us: float = SIGNAL_US
    skew_us: float = 0.0

    def __post_init__(self) -> None:
        if self.dma_packet_bytes < DMA_PACKET_BYTES:
            raise ValueError(f"expected packets of at least {DMA_PACKET_BYTES} bytes for DMA, found {self.dma_packet_bytes}")
        for size in self.cc_packet_bytes or (0,):
            if not 1 <= size <= CC_PACKET_BYTES:
                raise ValueError(f"expected packets of 1 to {CC_PACKET_BYTES} bytes for collectives, found {size}")
        if self.streams < 1:
            raise ValueError(f"expected at least one stream, found {self.streams}")

    @property
    def costs(self) -> CollectiveCosts:
        """Costs of each collective, and of each hop that a program issues itself."""
        return CollectiveCosts(self.signal_us, self.signal_us, self.hop_us, self.pass_us, self.skew_us)

    def cc_packet(self, stream: int) -> int:
        return self.cc_packet_bytes[min(stream, len(self.cc_packet_bytes) - 1)]


@dataclass(frozen=True)
class Machine:
    """An instance with a mesh of cores and runtime settings.

    Attributes:
        instance: instance and its specs.
        mesh: mesh of the cores in use.
        settings: settings of the runtime.
    """

    instance: NeuronInstance
    mesh: Mesh
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if self.settings.streams > self.cc_cores:
            limit = f"{self.cc_cores} streams, one per collective core of a core of {self.instance.name}"
            raise ValueError(f"expected at most {limit}, found {self.settings.streams}")

    @property
    def width(self) -> int:
        """Physical cores per logical core."""
        return self.instance.physical_per_logical

    @property
    def cc_cores(self) -> int:
        """Collective cores of a logical core: two per physical core on Trainium2, three on Inferentia2."""
        return int(self.instance.chip.cc_cores) // self.instance.chip.cores * self.width

    def channels(self, stream: int) -> int:
        """Collective cores of a stream: one each; stream 0 has all remaining ones."""
        return self.cc_cores - self.settings.streams + 1 if stream == 0 else 1

    def engine_hz(self, engine: str) -> float:
        """Cycles per second of a compute engine, summed over a logical core."""
        return 1e9 * self.width * getattr(self.instance.chip.core, f"{engine}_ghz")

    @property
    def tensor_flop_per_s(self) -> float:
        return 1e12 * self.width * self.instance.chip.core.bf16_tflop_per_s

    @property
    def dma_bytes_per_s(self) -> float:
        """Bytes per second of all DMA engines of a logical core."""
        core = self.instance.chip.core
        return 1e9 * self.width * core.dma_engines * core.dma_gb_per_s

    @property
    def hbm_bytes_per_s(self) -> float:
        """A logical core's share of the bandwidth of its chip."""
        return 1e9 * self.instance.chip.hbm_gb_per_s / self.instance.cores_per_chip

    @property
    def hbm_bytes(self) -> float:
        """A logical core's share of the memory of its chip."""
        return 2**30 * self.instance.chip.hbm_gib / self.instance.cores_per_chip

    @property
    def sbuf_bytes(self) -> float:
        return 2**20 * self.width * self.instance.chip.core.sbuf_mib

    @property
    def psum_bytes(self) -> float:
        return 2**20 * self.width * self.instance.chip.core.psum_mib

    def collective_s(self, collective: Collective) -> float:
        """Seconds of a collective alone, from the end of its needs to the start of its users."""
        rates = (self.channels(collective.stream), self.dma_bytes_per_s, self.hbm_bytes_per_s)
        return self.settings.costs.seconds(steps_of(self.mesh, collective), *rates)

    @property
    def limits(self) -> Limits:
        """Bandwidths that transfers of a core share. Links and channels have a capacity of one second per second."""
        core = self.instance.chip.core
        others: dict[Resource, float] = {"hbm": self.hbm_bytes_per_s, "link": 1.0}
        others |= {("channel", stream): 1.0 for stream in range(self.settings.streams)}
        return Limits(1e9 * core.dma_gb_per_s, core.dma_engines * self.width, others, core.strict_priority)


SWEPT = ("dma_gb_per_s", "hbm_gb_per_s", "link_gb_per_s", "hop_us")
"""Constants that a sweep draws. The remaining ranged ones, peaks and numbers of collective cores, change no simulated time."""


def machine_constants(machine: Machine) -> dict[str, Ranged]:
    """Returns the constants of a machine that a sweep draws, by name."""
    chip = machine.instance.chip
    found = ranged(chip.core) | ranged(chip) | ranged(machine.settings)
    return {name: found[name] for name in SWEPT if name in found}


def with_machine_constants(machine: Machine, changes: Mapping[str, float]) -> Machine:
    """Returns the machine with changed constants, named as in the specs (`dma_gb_per_s`) or the settings (`hop_us`).

    Raises:
        ValueError: an unknown constant.
    """
    instance = machine.instance
    parts: dict[str, Any] = {"core": instance.chip.core, "chip": instance.chip, "settings": machine.settings}
    for name, value in changes.items():
        names_of = {key: [one.name for one in fields(part)] for key, part in parts.items()}
        owner = next((key for key, names in names_of.items() if name in names), None)
        if owner is None:
            refuse_name("a constant", name, [each for names in names_of.values() for each in names])
        parts[owner] = replace(parts[owner], **{name: value})
    chip = replace(parts["chip"], core=parts["core"])
    changed = replace(instance, chip=chip)
    return Machine(changed, Mesh(changed, machine.mesh.axes), parts["settings"])


def machine_of(instance: NeuronInstance, settings: Settings = Settings(), **axes: int) -> Machine:
    """Returns a machine with a mesh of these axes, the last one over neighbouring cores."""
    return Machine(instance, Mesh(instance, tuple(axes.items())), settings)


def engine_names(machine: Machine) -> tuple[str, ...]:
    """Names of the reported engines: compute engines, DMA, and each stream of collectives."""
    return (*COMPUTE, DMA, *(f"cc{stream}" for stream in range(machine.settings.streams)))
